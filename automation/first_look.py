"""Nodes looked at for the first time, and their peers taken in on a yes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from automation.first_contact import FirstContact, Reached, parse_target
from automation.questions import Questions
from spark_core.errors import UnreachableError
from spark_core.fabric.facts import NETWORK, NetworkFacts, parse_network
from spark_core.facts import FactsSpec, facts_fragment, parse_facts
from spark_core.facts.docker import may_change_with_login
from spark_core.first_day.draft import FirstLook
from spark_core.first_day.peers import (
    Peer,
    find_peers,
    management_addresses,
    unwanted,
    wake_addresses,
    written_addresses,
)
from spark_core.first_day.survey import observe_survey, written_here
from spark_core.transport.base import command, compose, parse_sections, run_checked
from spark_core.transport.connection import ConnectionSpec, resolve
from spark_core.transport.first_contact import offered_key
from spark_core.transport.keys import algorithms_of
from spark_core.transport.ssh import SshTransport

LOOK_TIMEOUT_S = 60


@dataclass(frozen=True)
class Seen:
    """A node that was reached and looked at."""

    reached: Reached
    look: FirstLook


def look_at(node: Reached, questions: Questions, say: Callable[[str], None], *, called: bool = True) -> Seen:
    """Look at a node; where its user may not use Docker, that is mended on a yes.

    Args:
        called: Whether the neighbours on its cables are called, so that they show themselves.
    """
    say(f"{node.spec.address}: looking")
    look = _first_look(node, called=called)
    if may_change_with_login(look.facts.docker):
        who = f"{node.spec.user} on {node.spec.address}"
        text = f"{who} may not use Docker. Add it to the docker group (its members can become root)?"
        if questions.yes("docker-group", text):
            run_checked(
                node.transport,
                command("usermod", "-aG", "docker", node.spec.user, sudo=True, timeout_s=60),
                purpose="expected to add the user to the docker group",
            )
            node.transport.log_in_again()
            look = _first_look(node, called=False, before=look)
    return Seen(node, look)


def _first_look(node: Reached, *, called: bool, before: FirstLook | None = None) -> FirstLook:
    spec = FactsSpec(paths=("/",))
    text = run_checked(
        node.transport,
        compose(NETWORK, facts_fragment(spec), timeout_s=LOOK_TIMEOUT_S),
        purpose="expected the facts of the node",
    )
    sections = parse_sections(text)
    facts, network = parse_facts(spec, sections), parse_network(sections)
    survey = observe_survey(node.transport, wake_addresses(network) if called else ())
    if called and survey.neighbours:
        network = parse_network({**sections, "net-neighbours-after": survey.neighbours})
    elif before is not None:
        network = replace(network, neighbours=before.network.neighbours)
    return FirstLook(
        address=node.spec.address,
        user=node.spec.user,
        host_key=node.spec.host_key or "",
        facts=facts,
        network=network,
        survey=survey,
        port=node.spec.port,
        via=node.spec.via.address if node.spec.via else "",
    )


def with_peers(
    seen: Sequence[Seen], contact: FirstContact, questions: Questions, say: Callable[[str], None]
) -> list[Seen]:
    """The nodes, and those of their peers that the person takes in."""
    found = list(seen)
    declined: list[Peer] = []
    while peer := next(
        (one for one in find_peers(_networks(found)) if not unwanted(one, declined, _networks(found))), None
    ):
        head = next(one for one in found if one.look.address == peer.node)
        text = f"{peer.address} answers on the cable at {peer.netdev} of {peer.node}. Take it in?"
        if head.reached.spec.via is not None or not questions.yes("peers", text):
            declined.append(peer)
            continue
        spec = ConnectionSpec(
            peer.address,
            peer.address,
            head.reached.spec.user,
            ssh_config=head.reached.spec.ssh_config,
            via=head.reached.spec,
        )
        [reached] = contact.reach([spec], via=head.reached)
        found.append(_directly(look_at(reached, questions, say), head, questions, say))
    surveys = {"": written_here(), **{one.look.address: one.look.survey for one in found}}
    for address in written_addresses(surveys, _networks(found)):
        if questions.yes("peers", f"A launcher's file names {address}, which is none of these nodes. Take it in?"):
            spec = replace(parse_target(address, found[0].reached.spec.ssh_config), user=found[0].reached.spec.user)
            found += [look_at(node, questions, say) for node in contact.reach([spec])]
    return found


def _directly(peer: Seen, head: Seen, questions: Questions, say: Callable[[str], None]) -> Seen:
    """A peer at an address of its own off the cables, if one shows the very host key; else as it was reached."""
    pin = peer.reached.spec.host_key or ""
    for address in management_addresses(peer.look.network, head.look.network):
        spec = replace(peer.reached.spec, node=address, address=address, via=None)
        try:
            connection = resolve(spec)
            if offered_key(connection, algorithms_of(pin)).line != pin:
                continue
            password = functools.partial(questions.password, f"{peer.look.user}@{peer.look.address}")
            transport = SshTransport(connection, password)
            return look_at(Reached(spec, transport, False), questions, say, called=False)
        except UnreachableError:
            continue
    return peer


def _networks(seen: Sequence[Seen]) -> dict[str, NetworkFacts]:
    return {one.look.address: one.look.network for one in seen}
