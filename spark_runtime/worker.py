"""Ranks 1 and up: do what ``protocol.WorkerProtocol`` decides, and carry its questions to the head."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

from spark_runtime.messages import BadMessage, LeaseReply, LeaseRequest
from spark_runtime.observations import Failure, Seen
from spark_runtime.processes import Child
from spark_runtime.protocol import Step, WorkerProtocol
from spark_runtime.rank import GenerationFailed, Rank, Settings, StopRequested

CALL_TIMEOUT_S = 3.0
_JSON = {"Content-Type": "application/json"}


class HeadUnreachable(Exception):
    """No lease was granted. The text says why."""


class Worker(Rank):
    """The supervisor of a node that follows."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._group_state: dict[str, Any] = {}
        self._token = ""
        self.protocol = WorkerProtocol(
            settings.group,
            settings.deployment,
            settings.rank,
            settings.nodes,
            settings.node_address,
            self.incarnation,
            settings.limits,
            head=f"{settings.head_address}:{settings.status_port}",
            over_ray=settings.over_ray,
        )

    def run(self) -> int:
        """Until SIGTERM. A failure here ends the generation, never this loop."""
        try:
            self.prepare()
            self.protocol.open(time.monotonic())
            while True:
                self.turn()
                self._go_on()
        except StopRequested:
            self._shut_down()
            return 0

    def _go_on(self) -> None:
        try:
            if self.take_restart_request():
                self.protocol.restart_wanted = True  # only the head can begin a generation; the next lease asks it to
            self.protocol.held = self.held
            self._do(self.protocol.turn(time.monotonic(), self._look()))
            if time.monotonic() >= self.protocol.call_at:
                self._do(self._ask_head())
        except GenerationFailed as error:
            self.protocol.fail(error.failure, time.monotonic())
        self.tell_stuck(self.protocol.stuck)
        self.set_phase(self.protocol.phase, self.protocol.detail)

    def _look(self) -> Seen:
        if self.protocol.is_ending:
            return Seen(remains=self.remains(self.part))
        part = self.part
        if self.protocol.running is not None and part is not None and self.note_exit(part):
            self.processes.drain(timeout_s=1.0)
            text = f"{part.name} ended on this node with exit code {self.exit_codes[part.name]}"
            return Seen(died=Failure(text, part.name, from_log=True))
        return Seen()

    @property
    def part(self) -> Child | None:
        """What this rank takes part with."""
        return self.ray or self.vllm

    def _do(self, step: Step) -> None:
        if step == "join" and self.protocol.running is not None:
            self.start_log(self.protocol.running)
            if self.settings.over_ray:
                self.start_ray(head=False, token=self._token)
            else:
                self.start_vllm(self.on_line)
        elif step == "close":
            self.memory.settle()
            self.protocol.close(self._first_line(), time.monotonic())
            self.set_phase(self.protocol.phase, self.protocol.detail)
            self.keep_end()
        else:
            self.end_step(step, self.part)

    def _ask_head(self) -> Step:
        request = self.protocol.request(time.monotonic(), self._first_line())
        try:
            reply = self._call(request)
        except HeadUnreachable as error:
            self.protocol.unanswered(str(error))
            return "wait"
        self._group_state, self._token = dict(reply.group_state), reply.token
        return self.protocol.answered(reply, time.monotonic())

    def document(self) -> dict[str, Any]:
        """The status of this rank, with what the head last said of the group."""
        return {**super().document(), "group_state": self._group_state}

    def _first_line(self) -> str:
        failure = self.protocol.failure
        if failure is not None and self.first_error is None:
            self.first_error = self.find_error(failure)
        return self.first_error.line if self.first_error else ""

    def _shut_down(self) -> None:
        self.protocol.leaving = True
        self.set_phase("stopping", "leaving the group")
        try:
            self._call(self.protocol.request(time.monotonic()))
        except HeadUnreachable as error:
            self.say(f"the head was not told: {error}")
        if self.part is not None:
            self.processes.terminate(self.part, 10, self.quiet_turn)
            self.note_exit(self.part)
        self.end_everything()
        self.set_phase("stopped")
        self.keep_end()

    def _call(self, request: LeaseRequest) -> LeaseReply:
        settings = self.settings
        connection = http.client.HTTPConnection(settings.head_address, settings.status_port, timeout=CALL_TIMEOUT_S)
        try:
            connection.request("POST", "/lease", json.dumps(request.as_json()), _JSON)
            response = connection.getresponse()
            answer = json.loads(response.read(1024 * 1024))
            if response.status != 200:
                raise HeadUnreachable(str(answer.get("error", f"HTTP {response.status}")))
            return LeaseReply.from_json(answer)
        except (OSError, http.client.HTTPException, ValueError, AttributeError, BadMessage) as failure:
            text = getattr(failure, "strerror", None) or str(failure) or type(failure).__name__
            raise HeadUnreachable(text) from None
        finally:
            connection.close()
