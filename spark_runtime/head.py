"""Rank 0: does what ``protocol.HeadProtocol`` decides, and tells it what is to be seen on this node."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from spark_runtime import notices, ray_node, status, vllm_server
from spark_runtime.canary import Canary, Counters, Server
from spark_runtime.first_error import FirstError, is_consequence, is_hopeless
from spark_runtime.messages import LeaseReply, LeaseRequest
from spark_runtime.observations import Answer, Failure, Seen
from spark_runtime.processes import Child
from spark_runtime.progress import read_progress
from spark_runtime.protocol import HeadProtocol, Step
from spark_runtime.rank import GenerationFailed, Rank, Settings, StopRequested
from spark_runtime.status_server import StatusServer

HEALTH_EVERY_S = 0.5
REACH_EVERY_S = 10.0


class Head(Rank):
    """The supervisor of the node that serves."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.protocol = HeadProtocol(
            settings.group,
            settings.deployment,
            settings.nodes,
            self.incarnation,
            settings.limits,
            settings.heal,
            over_ray=settings.over_ray,
            names=[name for name in settings.node_names.split(",") if name],
            number=status.last_generation_number(settings.state_dir),
            attempts=status.read_attempts(settings.state_dir, time.monotonic()),
        )
        self.server = Server(
            settings.serve_host, settings.serve_port, settings.served_model_name, settings.api_key_file
        )
        self.last_canary: dict[str, Any] | None = None
        self.last_good_canary_at: float | None = None
        self.last_failure: dict[str, Any] | None = None
        self._lock = threading.Lock()  # the protocol is shared with the threads of the status server
        self._probe: Child | None = None
        self._ray_nodes: list[tuple[str, float]] | None = None
        self._died: Failure | None = None
        self._canary: Canary | None = None
        self._counters: Counters | None = None
        self._next_look = 0.0
        self._next_tell = 0.0
        self._kept: object = None
        self._moved = False
        self._with_token = settings.over_ray and settings.ray_token == "auto" and ray_node.knows_tokens()  # noqa: S105 (a choice)
        self._outbox = notices.Outbox()
        self._watch = notices.Watch(settings.group)

    def run(self) -> int:
        """Until SIGTERM: one generation after another."""
        status_server: StatusServer | None = None
        try:
            self.prepare()
            self.protocol.open(time.monotonic())
            self.generation = self.protocol.generation
            status_server = self._listen()
            while True:
                self.turn()
                self._go_on()
        except StopRequested:
            self._shut_down()
            return 0
        finally:
            if status_server is not None:
                status_server.close()

    def document(self) -> dict[str, Any]:
        """The status of the group (called from the status server's threads too)."""
        now = time.monotonic()
        own = {
            "node": self._node(0),
            "address": self.settings.node_address,
            "incarnation": self.incarnation,
            "lease_age_s": 0.0,
            "phase": self.phase,
            "detail": self.detail,
        }
        ranks: dict[str, Any] = {"0": own}
        with self._lock:
            for rank, lease in sorted(self.protocol.leases.items()):
                ranks[str(rank)] = {
                    "node": self._node(rank),
                    "address": lease.request.address,
                    "incarnation": lease.request.incarnation,
                    "lease_age_s": round(now - lease.seen, 1),
                    "phase": lease.request.phase,
                    "detail": lease.request.detail,
                }
            refusals = list(self.protocol.refusals)
            backing_off = self.protocol.phase == "backing_off"
            healing = {
                "policy": self.settings.heal,
                "failures_before_serving": len(self.protocol.attempts.crashes),
                "retry_in_s": round(max(0.0, self.protocol.retry_at - now), 1) if backing_off else None,
                "last_failure": self.last_failure,
            }
        more = {
            "ranks": ranks,
            "refused": refusals,
            "last_canary": self.last_canary,
            "last_good_canary_at": self.last_good_canary_at,
            "healing": healing,
            "notices": list(self._outbox.sent),
        }
        return {**super().document(), **more}

    def _node(self, rank: int) -> str:
        names = self.protocol.names
        return names[rank] if rank < len(names) else ""

    def _listen(self) -> StatusServer:
        address, port = self.settings.node_address, self.settings.status_port
        started = time.monotonic()
        while True:
            try:
                return StatusServer(address, port, self.document, self._take_lease)
            except OSError as error:
                # The container before this one may still be closing, or the fabric not up yet after a boot.
                late = time.monotonic() - started > self.settings.join_timeout_s
                text = f"the status port {port} cannot be had on {address}: {error.strerror}"
                self.set_phase("failed" if late else "starting", text)
            for _ in range(20):
                self.turn()
                self.take_restart_request()  # there is nothing to begin anew yet

    def _take_lease(self, request: LeaseRequest) -> LeaseReply:
        with self._lock:
            return self.protocol.take(request, time.monotonic())

    def _go_on(self) -> None:
        try:
            seen = self._look()
            asked = self.take_restart_request()
            with self._lock:
                self.protocol.restart_wanted = self.protocol.restart_wanted or asked
                self.protocol.held = self.held
                step = self.protocol.turn(time.monotonic(), seen)
            self._do(step)
        except GenerationFailed as error:
            with self._lock:
                self.protocol.end(error.failure, time.monotonic())
        self._show()

    def _look(self) -> Seen:
        if self.protocol.is_ending:
            return Seen(remains=self.remains(self.vllm or self.ray))
        phase = self.protocol.phase
        died = self._dead()
        if phase == "ray_starting" and self.ray is not None and died is None:
            return self._look_at_ray()
        if phase == "joining" and died is None:
            return Seen(joinable=self.vllm is not None, complete=True)
        if phase == "loading" and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + HEALTH_EVERY_S
            return Seen(healthy=self.server.is_healthy(), progress=self.progress, died=died)
        if phase in ("waiting_for_ranks", "failed") and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + REACH_EVERY_S
            self._reach_silent_ranks()
        return Seen(progress=self.progress, died=died, answer=self._answer())

    def _look_at_ray(self) -> Seen:
        settings = self.settings
        if not self.protocol.may_join:
            return Seen(joinable=ray_node.is_listening(settings.head_address, settings.ray_port))
        if self._probe is None or not self._probe.running:
            self._ray_nodes = None
            argv = ray_node.probe_argv(settings.ray_address)
            self._probe = self.start("ray-probe", argv, ray_node.start_env(self.env), self._on_probe_line)
        found = self._ray_nodes
        if found is None:
            return Seen(count_text="Ray's node list cannot be read yet")
        with self._lock:
            ranks = {rank: self.protocol.address(rank) for rank in self.protocol.members}
        count = ray_node.count_nodes(found, {0: settings.node_address, **ranks}, settings.gpus_per_node)
        if count.hopeless:
            raise GenerationFailed(count.text, "ray")
        return Seen(complete=count.complete, count_text=count.text)

    def _dead(self) -> Failure | None:
        for child in (self.vllm, self.ray):
            if self.note_exit(child) and child is not None:
                self._died = Failure(f"{child.name} ended with {_exit(child)}", child.name, from_log=True)
                return self._died
        return None

    def _answer(self) -> Answer | None:
        verdict = self._canary.result() if self._canary is not None else None
        if verdict is None or self._canary is None:
            return None
        self.last_canary = {
            "at": time.time(), "ms": verdict.ms, "ok": verdict.ok, "how": verdict.how, "text": verdict.text
        }  # fmt: skip
        self._counters, self._canary = self._canary.counters, None
        if verdict.ok:
            self.last_good_canary_at = time.time()
        self.publish()
        return Answer(verdict.ok, verdict.text, verdict.stalled)

    def _do(self, step: Step) -> None:
        if step == "begin":
            self._begin()
        elif step == "join" and self.settings.over_ray:
            self._require_free_port(self.settings.node_address, self.settings.ray_port, "Ray")
            self.start_ray(head=True, token=self.protocol.token)
        elif step == "join":
            self._require_free_port(self.settings.node_address, self.settings.master_port, "the ranks of vLLM")
            self._start_vllm()
        elif step == "start_vllm":
            self._start_vllm()
        elif step == "ask":
            self._ask()
        elif step == "close":
            self._close()
        else:
            self.end_step(step, self.vllm or self.ray)

    def _begin(self) -> None:
        with self._lock:
            generation = self.protocol.begin(time.monotonic())
            self.protocol.token = secrets.token_hex(32) if self._with_token else ""
        status.keep_generation_number(self.settings.state_dir, generation.n)
        self.vllm = self.ray = self._probe = self._canary = self._counters = self.last_canary = self._died = None
        self._moved = False
        self.start_log(generation)
        self.say(f"generation {generation.n}")

    def _on_probe_line(self, source: str, text: str) -> None:
        found = ray_node.read_probe(text)
        if found is None:
            self.on_line(source, text)
        else:
            self._ray_nodes = found

    def _start_vllm(self) -> None:
        settings = self.settings
        if self._probe is not None:
            self.processes.ask_to_leave(self._probe)
        bind_to = settings.serve_host or "0.0.0.0"  # noqa: S104 (what vLLM itself does with no host)
        self._require_free_port(bind_to, settings.serve_port, "vLLM")
        if settings.over_ray:
            try:
                vllm_server.write_per_node_variables(Path(self.env["VLLM_CONFIG_ROOT"]))
            except OSError as error:
                raise GenerationFailed(f"cannot write below VLLM_CONFIG_ROOT: {error}", "supervisor") from None
        self.start_vllm(self._on_vllm_line)

    def _on_vllm_line(self, source: str, text: str) -> None:
        self.on_line(source, text)
        step = read_progress(text) if self.phase in ("joining", "loading") else None
        if step is not None and step != self.progress:
            self._moved = True
            self.set_progress(step)
            self.say(f"loading: {step}")

    def _ask(self) -> None:
        first = self.protocol.phase == "canary"
        if first and self.settings.api_key_file is not None and self.server.answers_without_key():
            raise GenerationFailed("the API answers without a key: vllm has not loaded the key check", "vllm")
        self._canary = Canary(self.server, self.settings.canary_timeout_s, None if first else self._counters)

    def _require_free_port(self, address: str, port: int, user: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                text = f"port {port} for {user} cannot be had on {address}: {error.strerror}"
                raise GenerationFailed(text, "supervisor") from None

    def _reach_silent_ranks(self) -> None:
        with self._lock:
            silent = self.protocol.silent(time.monotonic())
            addresses = {rank: self.protocol.address(rank) for rank in silent}
        found = {rank: ray_node.look_at_node(address, self.settings.status_port) for rank, address in addresses.items()}
        self.protocol.reachable = {rank for rank, node in found.items() if node == "answers"}
        self.protocol.wedged = {rank for rank, node in found.items() if node == "wedged"}

    def _close(self) -> None:
        failure, line = self.protocol.failure, ""
        if failure is not None and not (self.protocol.restart_wanted or self.held):
            self.first_error = self._explain(failure)
            line = self.first_error.line
            self.last_failure = {
                "generation": self.protocol.number,
                "at": self.first_error.at,
                "phase": self.protocol.failed_in,
                "source": self.first_error.source,
                "line": line,
                "diagnosis": self.first_error.diagnosis.as_json() if self.first_error.diagnosis else None,
            }
        self.memory.settle()
        with self._lock:
            began = self._moved or failure is None or failure.source != "vllm"
            self.protocol.close(line, is_hopeless(line, began), time.monotonic())
        self._canary = None
        self._show()
        if failure is not None:
            self.keep_end()

    def _explain(self, failure: Failure) -> FirstError:
        phase = self.protocol.failed_in
        if self._died is not None and is_consequence(failure.text):
            # Without Ray every rank sees the others go. What this one says is heard, if it knows more than that.
            own = self.find_error(self._died, recent=phase in ("canary", "serving"))
            if not is_consequence(own.line) and own.line != self._died.text:
                failure = self._died
        error = self.find_error(failure, recent=phase in ("canary", "serving"))
        if phase == "canary" and failure.source == "vllm" and failure.from_log:
            text = f"vllm answered /health with 200, then died on the first completion: {error.line}"
            error = replace(error, line=text)
        return error

    def _show(self) -> None:
        self.tell_stuck(self.protocol.stuck)
        self.set_phase(self.protocol.phase, self.protocol.detail)
        self.protocol.digest = self._digest()
        self._tell_people()
        kept = (len(self.protocol.attempts.crashes), self.protocol.attempts.unfinished)
        if kept != self._kept:
            self._kept = kept
            status.keep_attempts(self.settings.state_dir, self.protocol.attempts, time.monotonic())

    def _tell_people(self) -> None:
        """Send the notices that are due, to whoever is to be told."""
        now = time.monotonic()
        if now < self._next_tell:
            return
        self._next_tell = now + 1.0
        channel = notices.Channel.read(self.settings.state_dir)
        self._watch.deadline_s = channel.deadline_s
        with self._lock:
            silent = {
                f"rank {rank} on {self._node(rank) or self.protocol.address(rank)}": self.protocol.of_node(rank)
                for rank in self.protocol.silent(now)
            }
        for notice in self._watch.look(now, self.protocol.phase, self.protocol.detail, silent):
            self.say(f"notice: {notice.text}")
            if channel.webhook:
                self._outbox.post(channel.webhook, notice, time.time())
            if channel.command:
                self._outbox.note(notice, time.time(), "given to the command")
                env = {**self._given_env, "SPARK_VLLM_NOTICE": json.dumps(notice.as_json())}
                with contextlib.suppress(OSError):
                    self.processes.spawn("notify", channel.command, env, self.on_line)

    def _digest(self) -> dict[str, Any]:
        """What the other ranks show of the group in their own status."""
        with self._lock:
            leases = {str(rank): lease.request.phase for rank, lease in self.protocol.leases.items()}
        failure = self.last_failure or {}
        return {
            "phase": self.phase,
            "progress": self.progress,
            "ranks": {"0": self.phase, **leases},
            "last_good_canary_at": self.last_good_canary_at,
            "last_failure": str(failure.get("line", ""))[:500],
        }

    def _shut_down(self) -> None:
        """Over Ray in order: vLLM, the workers' Ray, Ray's head. Without it the workers go first."""
        if self.settings.over_ray:
            self.set_phase("stopping", "stopping vllm")
            self._terminate(self.vllm, self.settings.stop_grace_s)
        self.set_phase("stopping", "stopping the other ranks")
        with self._lock:
            self.protocol.stop()
        # Whoever misses this learns it from the silence.
        deadline = time.monotonic() + 2 * self.settings.lease_interval_s + 5
        while time.monotonic() < deadline and not self._all_left():
            self.quiet_turn()
        if not self.settings.over_ray:
            self.set_phase("stopping", "stopping vllm")
            self._terminate(self.vllm, self.settings.stop_grace_s)
        self._terminate(self.ray, 10)
        self.end_everything()
        status.keep_attempts(self.settings.state_dir, self.protocol.attempts, time.monotonic())
        self.set_phase("stopped")
        self.keep_end()

    def _terminate(self, child: Child | None, grace_s: float) -> None:
        if child is not None:
            self.processes.terminate(child, grace_s, self.quiet_turn)
            self.note_exit(child)

    def _all_left(self) -> bool:
        with self._lock:
            return self.protocol.all_left()


def _exit(child: Child) -> str:
    code = child.exit_code or 0
    return f"signal {-code}" if code < 0 else f"exit code {code}"
