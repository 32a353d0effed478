"""Ranks 1 and up: hold a lease at the head, and run Ray for the generation that the head orders."""

from __future__ import annotations

import http.client
import json
import time
from typing import Literal

from spark_runtime.protocol import (
    BadMessage,
    Generation,
    LeaseReply,
    LeaseRequest,
    Phase,
    next_step,
)
from spark_runtime.rank import GenerationFailed, Rank, RestartRequested, Settings, StopRequested

CALL_TIMEOUT_S = 3.0
_JSON = {"Content-Type": "application/json"}
_FOLLOWED: tuple[Phase, ...] = ("ray_starting", "ray_ready", "loading", "canary", "serving")


class HeadUnreachable(Exception):
    """No lease was granted. The text says why; ``refused`` when the head answered, and does not want us."""


class Worker(Rank):
    """The supervisor of a node that follows."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._running: Generation | None = None
        self._ended: Generation | None = None
        self._failed: Generation | None = None
        self._leaving = False
        self._restart = False
        self._heard = time.monotonic()
        self._next_call = 0.0

    def run(self) -> int:
        """Until SIGTERM. A failure here ends the generation, never this loop."""
        try:
            self.prepare()
            while True:
                try:
                    self._turn_once()
                except RestartRequested:
                    self._restart = True  # only the head can begin a generation; the next lease asks it to
                except GenerationFailed as failure:
                    self._fail(failure)
        except StopRequested:
            self._shut_down()
            return 0

    def _turn_once(self) -> None:
        self.turn()
        if self._running is not None and self.note_exit(self.ray):
            text = f"Ray ended on this node with exit code {self.exit_codes['ray']}"
            raise GenerationFailed(text, "ray", from_log=True)
        if time.monotonic() < self._next_call:
            return
        self._next_call = time.monotonic() + self.settings.lease_interval_s
        try:
            reply = self._call()
        except HeadUnreachable as error:
            self._without_head(str(error))
        else:
            self._heard = time.monotonic()
            self._restart = False
            self._follow(reply)

    def _follow(self, reply: LeaseReply) -> None:
        step = next_step(self._running, self._ended, reply)
        if step == "end":
            text = f"ended by the head: {reply.detail or reply.phase}"
            # A head that fails says so only when it has cleaned up; until then it shows the phase it was in.
            failed = reply.phase in (*_FOLLOWED, "failed")
            self._end(GenerationFailed(text, "head"), after="failed" if failed else "waiting")
        elif step == "start" and reply.generation is not None:
            self.start_log(reply.generation)
            self._failed = None
            self._running = reply.generation
            self.set_phase("ray_starting", f"joining Ray at {self.settings.ray_address}")
            self.start_ray(head=False)
        elif self._running is not None:
            for phase in _FOLLOWED:
                if reply.phase == phase:
                    self.set_phase(phase, "as the head says")
        elif reply.generation is None or reply.generation != self._ended:
            why = f": {reply.detail}" if reply.phase == "failed" else ""
            self.set_phase("waiting_for_ranks", f"leased; the head is in {reply.phase}{why}")

    def _without_head(self, reason: str) -> None:
        silence = time.monotonic() - self._heard
        head = f"{self.settings.head_address}:{self.settings.status_port}"
        if self._running is not None:
            if silence > self.settings.lease_timeout_s:
                text = f"the head at {head} was not heard of for {silence:.0f} s: {reason}"
                raise GenerationFailed(text, "head")
        elif silence > self.settings.join_timeout_s:
            # Still calling: a head that comes after all finds this rank here.
            limit = f"{self.settings.join_timeout_s:.0f} s"
            self.set_phase("failed", f"no lease from the head at {head} within {limit}: {reason}")
        elif self.phase != "failed":
            self.set_phase("waiting_for_ranks", f"waiting for the head at {head}: {reason}")

    def _fail(self, failure: GenerationFailed) -> None:
        self._failed = self._running
        self._end(failure, after="failed")

    def _end(self, why: GenerationFailed, after: Literal["failed", "waiting"]) -> None:
        self.say(f"ending the generation: {why}")
        if self._failed is None and self.ray is not None:  # ordered from outside: Ray may leave in its own way
            self.processes.terminate(self.ray, 5, self._leasing_turn)
        left = self.end_everything(self._leasing_turn)
        self.note_exit(self.ray)
        self._ended, self._running = self._running, None
        reboot = f"; reboot the node, these will not die: {', '.join(left)}" if left else ""
        if after == "failed" or left:
            self.first_error = self.find_error(why)
            self.set_phase("failed", f"{self.first_error.line}{reboot}")
        else:  # the head was stopped or restarted in good order
            self.set_phase("waiting_for_ranks", str(why))
        self.keep_end()
        self._next_call = 0.0  # say at once that nothing is left

    def _leasing_turn(self) -> None:
        # An end can take longer than a lease; the answer is not needed, the order to end stands.
        self.quiet_turn()
        if time.monotonic() >= self._next_call:
            self._next_call = time.monotonic() + self.settings.lease_interval_s
            try:
                self._call()
                self._heard = time.monotonic()
            except HeadUnreachable:
                pass

    def _shut_down(self) -> None:
        self._leaving = True
        self.set_phase("stopping", "leaving the group")
        try:
            self._call()
        except HeadUnreachable as error:
            self.say(f"the head was not told: {error}")
        if self.ray is not None:
            self.processes.terminate(self.ray, 10, self.quiet_turn)
            self.note_exit(self.ray)
        self.end_everything(self.quiet_turn)
        self.set_phase("stopped")
        self.keep_end()

    def _call(self) -> LeaseReply:
        settings, error = self.settings, self.first_error
        request = LeaseRequest(
            group=settings.group,
            deployment=settings.deployment,
            rank=settings.rank,
            nodes=settings.nodes,
            address=settings.node_address,
            incarnation=self.incarnation,
            phase=self.phase,
            detail=self.detail,
            running=self._running,
            failed=self._failed,
            failure_source=error.source if error and self._failed else "",
            failure_line=error.line if error and self._failed else "",
            leaving=self._leaving,
            restart=self._restart,
        )
        connection = http.client.HTTPConnection(settings.head_address, settings.status_port, timeout=CALL_TIMEOUT_S)
        try:
            connection.request("POST", "/lease", json.dumps(request.as_json()), _JSON)
            response = connection.getresponse()
            answer = json.loads(response.read(1024 * 1024))
            if response.status != 200:
                raise HeadUnreachable(str(answer.get("error", f"HTTP {response.status}")))
            reply = LeaseReply.from_json(answer)
        except (OSError, http.client.HTTPException, ValueError, AttributeError, BadMessage) as failure:
            text = getattr(failure, "strerror", None) or str(failure) or type(failure).__name__
            raise HeadUnreachable(text) from None
        finally:
            connection.close()
        if (reply.group, reply.deployment) != (settings.group, settings.deployment):
            raise HeadUnreachable(f"there is a head of {reply.group}/{reply.deployment}, not ours")
        return reply
