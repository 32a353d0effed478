"""``EndpointGate``: a group that serves, proven by a completion through its public endpoint.

It owns the group's being up: create and update end when a completion has come back, read tells a group that does not
serve as a difference, delete stops the ranks in order, head first, before anything beneath them is undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, each_node, say, told
from providers.cancel import CANCELLED, check_cancel
from providers.connections import Run
from spark_core.api_key import read_key
from spark_core.containers import restart_container, stop_container
from spark_core.errors import GateError
from spark_core.gate import (
    ON_REQUEST,
    Rank,
    ask_new_generation,
    complete,
    drift_of,
    failure_of,
    heals,
    observe_rank,
    wait_until_serving,
)
from spark_core.notify import notify_document, put_notify

INPUTS = ("stack", "group", "ranks", "deployment", "endpoint", "model", "key_path", "containers", "notify", "state")


class EndpointGateProvider(SparkProvider):
    """Life cycle of a group's being up: waited for, proven, told as drift, ended in order."""

    compared = ("ranks", "deployment", "endpoint", "model", "key_path", "containers", "notify", "state")
    replaced_by = ("stack", "group")

    @told
    def diff(self, _id: str, _olds: Mapping[str, Any], _news: Mapping[str, Any]) -> DiffResult:
        # A group that was stopped on request is as it is wanted.
        stopped = str(_olds.get("state")).endswith(ON_REQUEST)
        return super().diff(_id, {**_olds, "state": _news.get("state")} if stopped else _olds, _news)

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        return CreateResult(f"{props['stack']}/{props['group']}", {**props, "state": self._pass(props)})

    @told
    def update(self, _id: str, _olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        return UpdateResult({**news, "state": self._pass(news)})

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        ranks = {rank.transport.node: rank for rank in _ranks(self.run, props)}
        states = each_node(list(ranks), lambda node: observe_rank(ranks[node]))
        live = {"state": drift_of(list(states.values()))}
        return ReadResult(id_, {**props, **live}, {**{key: props.get(key, "") for key in INPUTS}, **live})

    @told
    def delete(self, _id: str, props: Mapping[str, Any]) -> None:
        self.run.require_all_nodes()
        for rank in props["ranks"]:
            if not self.abandoned(str(rank["node"])):
                stop_container(self.run.transport(rank["node"], rank["connection"]), str(rank["container"]))

    def _pass(self, props: Mapping[str, Any]) -> str:
        """Wait until the group serves, and prove it; the state that it is in then."""
        group = self.run.settings.groups[props["group"]]
        ranks = _ranks(self.run, props)
        # Its supervisor reads it when there is something to tell; no restart.
        content = notify_document(group.notify, self.run.secret("notify_webhook"))
        put_notify(ranks[0].transport, ranks[0].state_folder, content)
        if observe_rank(ranks[0]).held:
            say(f"{ranks[0].transport.node}: the group is stopped on request; nothing is proven until it is started")
            return f"{ranks[0].transport.node}: {ON_REQUEST}"
        newer_than = self._renew(ranks)
        states = wait_until_serving(
            ranks, stall_s=group.serving.start_timeout_s, progress=say, newer_than=newer_than, sleep=_pause
        )
        key = read_key(ranks[0].transport, props["key_path"]) if props["key_path"] else None
        try:
            done = complete(str(props["endpoint"]), str(props["model"]), key, timeout_s=group.serving.canary_timeout_s)
        except GateError as error:
            first = failure_of([observe_rank(rank) for rank in ranks], ranks)
            raise first or error from None
        say(f"{props['endpoint']}: a completion came back in {done.seconds:.1f} s, {len(states)} ranks serve")
        return "serving"

    def _renew(self, ranks: list[Rank]) -> tuple[str, int] | None:
        """Ask the head for a new generation where the present one cannot serve any more.

        A supervisor that is stuck cannot be asked: its container is restarted. A new head begins anew by itself.

        Returns:
            The generation that does not count any more, or None if the present one may still come to serve.
        """
        states = [observe_rank(rank) for rank in ranks]
        stuck = [rank for rank, state in zip(ranks, states, strict=True) if state.silent]
        for rank in stuck:
            say(f"{rank.transport.node}: restarting {rank.container}, whose supervisor is stuck")
            restart_container(rank.transport, rank.container)
        head = states[0]
        if not head.running or head.silent or head.generation is None:
            return None
        # A head that has failed stays so until it is asked, whoever started it. One that serves while another rank is
        # not in its generation has not noticed yet; it will, where it heals by itself. One that is starting does what
        # it would be asked for already.
        lost = not heals(head) and head.phase in ("serving", "canary")
        lost = lost and any(state.generation != head.generation for state in states[1:])
        if head.phase == "failed" or lost or stuck:
            ask_new_generation(ranks[0], self.run.settings.image.python)
            return head.generation
        return None


def _pause(seconds: float) -> None:
    """Between two looks at the ranks: the point at which an interrupted gate lets the group load on."""
    check_cancel("the group goes on loading by itself")
    CANCELLED.wait(seconds)


def _ranks(run: Run, props: Mapping[str, Any]) -> list[Rank]:
    return [
        Rank(run.transport(rank["node"], rank["connection"]), place, str(rank["container"]), str(rank["state_folder"]))
        for place, rank in enumerate(props["ranks"])
    ]


class EndpointGate(Resource, module="spark", name="EndpointGate"):
    """The gate of a group.

    Args:
        stack: Name of the stack.
        group: Name of the group.
        ranks: For each rank in order ``node``, ``connection``, ``container`` and ``state_folder``.
        deployment: Id of what the ranks run.
        endpoint: Public base URL.
        model: Served name of the model.
        key_path: Path of the key file on the head; empty if the API is open.
        containers: Ids of the containers; a new one means that the group started anew.
        notify: Digest of whom the head tells; a new one is written to it.
    """

    state: pulumi.Output[str]

    def __init__(
        self,
        resource_name: str,
        *,
        stack: str,
        group: str,
        ranks: list[dict[str, Any]],
        deployment: pulumi.Input[str],
        endpoint: str,
        model: str,
        key_path: str,
        containers: list[pulumi.Input[str]],
        notify: str = "",
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        props: dict[str, Any] = {
            "stack": stack,
            "group": group,
            "ranks": ranks,
            "deployment": deployment,
            "endpoint": endpoint,
            "model": model,
            "key_path": key_path,
            "containers": containers,
            "notify": notify,
            "state": "serving",
        }
        super().__init__(EndpointGateProvider(), resource_name, props, opts)
