"""A change of netplan's files that a node takes back by itself unless it still answers afterwards.

1. A timer is armed on the node. Its script takes the trial away, applies what ``/etc`` says, and gives the links the
   addresses, MTU and parameters that they had.
2. The new files are written to ``/run/netplan``, where each stands for one of the same name in ``/etc`` and which is
   empty after a boot; an empty one hides a file that is to go. netplan applies them.
3. The node must answer over a new connection: an open one can go on over a path that new ones do not find. An address
   can vanish about a second after the apply and come back (FujitsuPolycom/sparkring#168), so it is asked again and
   again within the bound, and only a loss that lasts counts.
4. The timer is stopped, the files are written to ``/etc``, and those in ``/run`` are removed.

A run that is killed or a cable that is lost before step 4 ends in the network that was there before, and a power cut
too, at the next boot. What is left half-way by a power cut within step 4 is put right by the next ``up``.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from spark_core import root_commands as root
from spark_core.errors import CommandError, SparkError, UnreachableError
from spark_core.fabric.facts import Link, observe_network
from spark_core.transport.base import Transport, parse_sections, run_checked, script

RUN_FOLDER = "/run/spark-vllm"
TRIAL_FOLDER = "/run/netplan"
ROLLBACK_AFTER_S = 45
SETTLE_S = 2.0
"""After an apply, before the node is first asked."""

_EMPTY = b"network: {version: 2}\n"
_MARGIN_S = 8
"""Seconds before the timer fires in which nothing is begun any more."""
_FRESH_S = 5.0
_ROLLBACK_TAKES_S = 40
_PARAMETERS = """
cd /proc/sys/net
for dev in "$@"; do
  echo "=== $dev"
  for f in ipv[46]/conf/"$dev"/* ipv[46]/neigh/"$dev"/*; do
    [ -r "$f" ] || continue
    value=$(cat "$f" 2>/dev/null) || continue
    printf '%s=%s\\n' "$f" "$value"
  done
done
"""
_STATE = """
unit=$1; shift
echo '=== service'; systemctl show -p ActiveState --value "$unit.service" 2>/dev/null || true
echo '=== timer'; systemctl show -p ActiveState --value "$unit.timer" 2>/dev/null || true
there=0; for f in "$@"; do if [ -e "$f" ]; then there=$((there + 1)); fi; done
echo '=== trial'; echo "$there of $#"
"""
_ROLLBACK = """\
#!/bin/bash
# Written by spark-vllm for the time of one network change; runs unless the node still answers after it.
put_back() {
  dev=$1 mtu=$2 state=$3 before=$4; shift 4
  [ -e "/sys/class/net/$dev" ] || return
  for address in $(addresses_of "$dev"); do
    case " $before " in *" $address "*) ;; *) ip address del "$address" dev "$dev" ;; esac
  done
  have=" $(addresses_of "$dev" | tr '\\n' ' ')"
  for address in $before; do
    case "$have" in *" $address "*) ;; *) ip address add "$address" dev "$dev" ;; esac
  done
  ip link set dev "$dev" mtu "$mtu"
  ip link set dev "$dev" "$state"
  for pair in "$@"; do
    file="/proc/sys/net/${pair%%=*}"
    [ "$(cat "$file" 2>/dev/null)" = "${pair#*=}" ] || echo "${pair#*=}" 2>/dev/null > "$file"
  done
}
addresses_of() {
  ip -o -4 address show dev "$1" | while read -r _ _ _ address _; do echo "$address"; done
}
"""


@dataclass(frozen=True)
class NetplanFile:
    """A file below /etc/netplan as it is to be; without content it is to go. Owner and group are numbers."""

    path: str
    content: bytes | None
    mode: str = "0600"
    owner: str = "0:0"

    @property
    def trial(self) -> str:
        return f"{TRIAL_FOLDER}/{PurePosixPath(self.path).name}"


def rollback_unit(stack: str) -> tuple[str, str]:
    """Name of the stack's unit on a node, without its kind, and the path of the script that it runs."""
    unit = f"spark-vllm-netplan-{stack}"
    return unit, f"{RUN_FOLDER}/{unit}"


def change_netplan(
    transport: Transport,
    stack: str,
    staging: str,
    files: Sequence[NetplanFile],
    netdevs: Sequence[str],
    then: Callable[[], None],
    *,
    bound_s: int = ROLLBACK_AFTER_S,
) -> None:
    """Change files below /etc/netplan, under the node's own rollback. May be run again after any interruption.

    Args:
        staging: The stack's staging folder on the node.
        netdevs: Interfaces that the files configure; the rollback gives them back what they have now.
        then: What else is to be done and seen before the change counts; a SparkError of it takes the change back.
        bound_s: Seconds after which the node takes the change back by itself.

    Raises:
        CommandError: the change was taken back, and why; or the node does not answer any more.
    """
    unit, place = rollback_unit(stack)
    trials = [file.trial for file in files]
    end_earlier_change(transport, stack)
    text = render_rollback(trials, observe_network(transport).links, observe_parameters(transport, netdevs))
    purpose = "expected to prepare the node's own rollback"
    root.run_each(
        transport,
        [
            root.make_folder(TRIAL_FOLDER),
            root.make_folder(RUN_FOLDER),
            *root.install_file(staging, place, text.encode(), mode="0700"),
            root.arm_rollback(unit, bound_s, place),
        ],
        purpose=purpose,
        setting="fabric.manage",
    )
    watch = _Watch(transport, unit, trials, time.monotonic() + bound_s)
    try:
        for file in files:
            content = _EMPTY if file.content is None else file.content
            tried = root.install_file(staging, file.trial, content, mode="0600")
            root.run_each(transport, tried, purpose="expected to try netplan's files", setting="fabric.manage")
        _apply(watch, bound_s - _MARGIN_S)
        then()
        _require_answer(watch)
        run_checked(transport, root.stop_unit(f"{unit}.timer"), purpose=f"expected the change in {bound_s} s")
        if not watch.is_tried():
            raise CommandError(f"expected the change in {bound_s} s, found that it takes longer", where=transport.node)
    except SparkError as error:
        raise _taken_back(watch, error) from error
    _keep(transport, staging, files, place)


def end_earlier_change(transport: Transport, stack: str) -> None:
    """Take back what an interrupted run is still trying; its own rollback knows what was there before."""
    watch = _Watch(transport, rollback_unit(stack)[0], [], 0)
    if not watch.ended:
        _roll_back_now(watch)


def render_rollback(
    trials: Sequence[str], links: Mapping[str, Link], parameters: Mapping[str, Mapping[str, str]]
) -> str:
    """The script that takes a change back: no value of it is known only later, so that it needs nobody.

    Args:
        links: The interfaces as they are now.
        parameters: Of each interface that is to be put back, its kernel parameters.
    """
    lines = [
        shlex.join(["rm", "-f", "--", *trials]),
        f"timeout {_ROLLBACK_TAKES_S - 10} netplan apply",
    ]
    for netdev, pairs in parameters.items():
        link = links.get(netdev)
        if link is not None:
            state, before = "up" if link.up else "down", " ".join(link.addresses)
            words = [netdev, str(link.mtu_bytes), state, before, *(f"{path}={value}" for path, value in pairs.items())]
            lines.append(shlex.join(["put_back", *words]))
    return _ROLLBACK + "\n".join([*lines, 'rm -f -- "$0"']) + "\n"


def observe_parameters(transport: Transport, netdevs: Sequence[str]) -> dict[str, dict[str, str]]:
    """Kernel parameters of interfaces by their path below /proc/sys/net; networkd changes some of them."""
    text = run_checked(
        transport, script(_PARAMETERS, *netdevs), purpose=f"expected the kernel parameters of {', '.join(netdevs)}"
    )
    sections = parse_sections(text)
    return {
        netdev: dict(line.split("=", 1) for line in sections.get(netdev, "").splitlines() if "=" in line)
        for netdev in netdevs
    }


@dataclass(frozen=True)
class _Watch:
    """The node's own rollback as it is seen from here.

    Attributes:
        trials: Files that are there as long as it has not begun.
        until: When it begins, on our monotonic clock.
    """

    transport: Transport
    unit: str
    trials: Sequence[str]
    until: float

    @property
    def waits(self) -> bool:
        return self._state()["timer"].strip() == "active"

    @property
    def ended(self) -> bool:
        state = self._state()
        return state["service"].strip() in ("inactive", "failed") and state["timer"].strip() != "active"

    def is_tried(self) -> bool:
        state = self._state()
        whole = f"{len(self.trials)} of {len(self.trials)}"
        return state["service"].strip() in ("inactive", "failed") and state["trial"].strip() == whole

    def _state(self) -> dict[str, str]:
        purpose = "expected the state of the node's own rollback"
        text = run_checked(self.transport, script(_STATE, self.unit, *self.trials), purpose=purpose)
        return {"service": "", "timer": "", "trial": "", **parse_sections(text)}


def _apply(watch: _Watch, timeout_s: float) -> None:
    cmd = replace(root.apply_netplan(), timeout_s=timeout_s)
    purpose = "expected netplan to apply the fabric's file"
    try:
        run_checked(watch.transport, cmd, purpose=purpose, setting="fabric.manage")
    except UnreachableError:
        # The connection broke off, as when NetworkManager restarts; whether netplan ended is not known.
        time.sleep(SETTLE_S)
        _require_answer(watch)
        run_checked(watch.transport, cmd, purpose=purpose, setting="fabric.manage")
    time.sleep(SETTLE_S)
    _require_answer(watch)


def _require_answer(watch: _Watch) -> None:
    """Wait within the bound for an answer over a new connection, before the rollback has begun."""
    while not watch.transport.fresh_answer(_FRESH_S) or not watch.is_tried():
        if time.monotonic() > watch.until - _MARGIN_S:
            raise CommandError(
                "expected an answer over a new connection after `netplan apply`, found none",
                where=f"{watch.transport.node} (fabric)",
                do="compare nodes[].fabric with the network that the node is reached by: a subnet of the fabric that "
                "covers our address, or a file that took the management address away, cuts it off",
            )
        time.sleep(min(0.5, SETTLE_S))


def _taken_back(watch: _Watch, error: SparkError) -> CommandError:
    """The error for the person, once the node has its earlier network again."""
    while not watch.transport.fresh_answer(_FRESH_S):
        if time.monotonic() > watch.until + _ROLLBACK_TAKES_S:
            return CommandError(
                f"expected the node back after its own rollback, found no answer ({error.what})",
                where=watch.transport.node,
                do="look at its console; /etc/netplan is as it was before, so a power cycle starts with that",
                evidence=error.evidence,
            )
        time.sleep(1)
    by_itself = not watch.waits
    _roll_back_now(watch)
    whose = "the node put its earlier network back by itself" if by_itself else "the earlier network was put back"
    return CommandError(f"{error.what}; {whose}", where=error.where, do=error.do, evidence=error.evidence)


def _roll_back_now(watch: _Watch) -> None:
    """Let the rollback begin if it still waits, and see it end."""
    refused: CommandError | None = None
    for _ in range(_ROLLBACK_TAKES_S):
        if watch.waits:
            now = [root.start_unit(f"{watch.unit}.service"), root.stop_unit(f"{watch.unit}.timer")]
            try:
                root.run_each(watch.transport, now, purpose="expected the node's own rollback")
            except CommandError as error:  # it may have begun by itself, and be gone, since we looked
                if refused is not None:
                    raise
                refused = error
        elif watch.ended:
            return
        else:
            time.sleep(1)
    raise CommandError(
        f"expected the node's own rollback to end in {_ROLLBACK_TAKES_S} s, found it running",
        where=watch.transport.node,
        do=f"`journalctl -u {watch.unit}` on the node tells more",
    )


def _keep(transport: Transport, staging: str, files: Sequence[NetplanFile], place: str) -> None:
    purpose = "expected to keep the change"
    for file in sorted(files, key=lambda file: file.content is None):
        user, _, group = file.owner.partition(":")
        if file.content is None:
            commands = [root.remove_file(file.path)]
        else:
            commands = root.install_file(staging, file.path, file.content, mode=file.mode, owner=user, group=group)
        root.run_each(transport, commands, purpose=purpose, setting="fabric.manage")
    gone = [*(root.remove_file(file.trial) for file in files), root.remove_file(place), root.remove_folder(RUN_FOLDER)]
    root.run_each(transport, gone, purpose=purpose, setting="fabric.manage")
