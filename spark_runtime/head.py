"""Rank 0: brings the ranks together, starts Ray and vLLM in order, and watches what it has started."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

from spark_runtime import ray_node, vllm_server
from spark_runtime.canary import Canary, Counters, Server, Verdict
from spark_runtime.first_error import FirstError
from spark_runtime.processes import Child
from spark_runtime.progress import read_progress
from spark_runtime.protocol import Gang, LeaseReply, LeaseRequest
from spark_runtime.rank import GenerationFailed, Rank, RestartRequested, Settings, StopRequested
from spark_runtime.status import next_generation_number
from spark_runtime.status_server import StatusServer

PACKAGE_ROOT = Path(__file__).resolve().parent.parent
RETRY_S = 5.0
LAST_WORDS_S = 20.0
"""How long vLLM may take to die after a failed completion: its last words explain more than an HTTP error."""


class Head(Rank):
    """The supervisor of the node that serves."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.gang = Gang(
            settings.group, settings.deployment, settings.nodes, self.incarnation, settings.lease_timeout_s
        )
        self.server = Server(
            settings.serve_host, settings.serve_port, settings.served_model_name, settings.api_key_file
        )
        self.vllm: Child | None = None
        self.last_canary: dict[str, Any] | None = None
        self._lock = threading.Lock()  # the gang is shared with the threads of the status server
        self._ray_nodes: list[tuple[str, float]] | None = None

    def run(self) -> int:
        """Until SIGTERM: one generation after another, each begun only on request after the first."""
        status_server: StatusServer | None = None
        try:
            self.prepare()
            status_server = self._listen()
            while True:
                try:
                    self._generation()
                except GenerationFailed as failure:
                    self._fail(failure)
                    self._wait_for_restart()
                except RestartRequested:
                    self._end_for_restart()
        except StopRequested:
            self._shut_down()
            return 0
        finally:
            if status_server is not None:
                status_server.close()

    def turn(self) -> None:
        """One turn; also raises when the generation has been breached or one of its processes has ended."""
        super().turn()
        with self._lock:
            breach = self.gang.breach(time.monotonic())
            restart, ended = self.gang.restart_wanted, self.gang.ended
        if restart:
            raise RestartRequested
        if ended:
            return
        if breach is not None:
            raise GenerationFailed(breach.text, breach.source)
        for child in (self.vllm, self.ray):
            if self.note_exit(child) and child is not None:
                raise GenerationFailed(f"{child.name} ended with {_exit(child)}", child.name, from_log=True)

    def document(self) -> dict[str, Any]:
        """The status of the group (called from the status server's threads too)."""
        now = time.monotonic()
        own = {
            "address": self.settings.node_address,
            "incarnation": self.incarnation,
            "lease_age_s": 0.0,
            "phase": self.phase,
            "detail": self.detail,
        }
        ranks: dict[str, Any] = {"0": own}
        with self._lock:
            for rank, lease in sorted(self.gang.leases.items()):
                ranks[str(rank)] = {
                    "address": lease.request.address,
                    "incarnation": lease.request.incarnation,
                    "lease_age_s": round(now - lease.seen, 1),
                    "phase": lease.request.phase,
                    "detail": lease.request.detail,
                }
            refusals = list(self.gang.refusals)
        return {**super().document(), "ranks": ranks, "refused": refusals, "last_canary": self.last_canary}

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
                try:
                    super().turn()
                except RestartRequested:
                    continue

    def _take_lease(self, request: LeaseRequest) -> LeaseReply:
        # The phase is read without the lock: a reply may be one phase behind, the order in it is not.
        detail = self.gang.end_reason or self.detail
        with self._lock:
            return self.gang.take(request, time.monotonic(), self.phase, detail)

    def _generation(self) -> None:
        with self._lock:
            generation = self.gang.begin(next_generation_number(self.settings.state_dir))
        self.vllm = self.ray = None
        self.last_canary = None
        self.start_log(generation)
        self.set_phase("starting", f"generation {generation.n}")
        self._wait_for_ranks()
        self._start_ray()
        self._count_nodes()
        self._load()
        self._first_completion()
        self._serve()

    def _wait_for_ranks(self) -> None:
        deadline = time.monotonic() + self.settings.join_timeout_s
        while True:
            with self._lock:
                fixed = self.gang.fix_members(time.monotonic())
                missing, refusals = self.gang.missing(time.monotonic()), list(self.gang.refusals)
            if fixed:
                return
            text = "; ".join([*missing, *refusals])
            if time.monotonic() > deadline:
                limit = f"not all ranks came within {self.settings.join_timeout_s:.0f} s"
                raise GenerationFailed(f"{limit}: {text}", "supervisor")
            self.set_phase("waiting_for_ranks", text)
            self.turn()

    def _start_ray(self) -> None:
        settings = self.settings
        self.set_phase("ray_starting", "starting Ray's head")
        self._require_free_port(settings.node_address, settings.ray_port, "Ray")
        self.start_ray(head=True)
        deadline = time.monotonic() + settings.join_timeout_s
        while not ray_node.is_listening(settings.head_address, settings.ray_port):
            if time.monotonic() > deadline:
                raise GenerationFailed(f"Ray does not listen on {settings.ray_address}", "ray", from_log=True)
            self.turn()
        with self._lock:
            self.gang.may_join = True

    def _count_nodes(self) -> None:
        settings = self.settings
        with self._lock:
            ranks = {rank: self.gang.address(rank) for rank in self.gang.members}
        ranks[0] = settings.node_address
        deadline = time.monotonic() + settings.join_timeout_s
        stable_s = 2 * settings.lease_interval_s
        probe: Child | None = None
        text, complete_since = "Ray's node list cannot be read yet", None
        while True:
            if probe is None or not probe.running:
                self._ray_nodes = None
                argv = ray_node.probe_argv(settings.ray_address)
                probe = self.start("ray-probe", argv, ray_node.start_env(self.env), self._on_probe_line)
            found, now = self._ray_nodes, time.monotonic()
            if found is not None:
                count = ray_node.count_nodes(found, ranks, settings.gpus_per_node)
                text = count.text
                if count.hopeless:
                    raise GenerationFailed(text, "ray")
                # Seen once is not enough: a node can join for seconds and be declared dead again.
                complete_since = (complete_since or now) if count.complete else None
                if complete_since is not None and now - complete_since >= stable_s and self._may_serve():
                    break
            if now > deadline:
                limit = f"Ray was not complete within {settings.join_timeout_s:.0f} s"
                raise GenerationFailed(f"{limit}: {text}", "ray")
            self.set_phase("ray_starting", text)
            self.turn()
        self.processes.terminate(probe, 5, self.quiet_turn)
        self.set_phase("ray_ready", text)

    def _on_probe_line(self, source: str, text: str) -> None:
        found = ray_node.read_probe(text)
        if found is None:
            self.on_line(source, text)
        else:
            self._ray_nodes = found

    def _load(self) -> None:
        settings = self.settings
        bind_to = settings.serve_host or "0.0.0.0"  # noqa: S104 (what vLLM itself does with no host)
        self._require_free_port(bind_to, settings.serve_port, "vLLM")
        argv = vllm_server.serve_argv(
            model=settings.model,
            served_model_name=settings.served_model_name,
            host=settings.serve_host,
            port=settings.serve_port,
            keyed=settings.api_key_file is not None,
            extra=settings.serve_args,
        )
        env = vllm_server.serve_env(
            self.env,
            ray_address=settings.ray_address,
            package_root=PACKAGE_ROOT,
            api_key_file=settings.api_key_file,
        )
        try:
            vllm_server.write_per_node_variables(Path(env["VLLM_CONFIG_ROOT"]))
        except OSError as error:
            raise GenerationFailed(f"cannot write below VLLM_CONFIG_ROOT: {error}", "supervisor") from None
        self.set_phase("loading")
        self.vllm = self.start("vllm", argv, env, self._on_vllm_line)
        seen, deadline = self.progress, time.monotonic() + settings.start_timeout_s
        next_look = 0.0
        while True:
            if self.progress != seen:
                seen, deadline = self.progress, time.monotonic() + settings.start_timeout_s
                self.say(f"loading: {seen}")
            if time.monotonic() > next_look:
                if self.server.is_healthy():
                    return
                next_look = time.monotonic() + 0.5
            if time.monotonic() > deadline:
                limit = f"loading made no progress for {settings.start_timeout_s:.0f} s"
                raise GenerationFailed(f"{limit}; last step: {seen or 'none'}", "vllm")
            self.turn()

    def _on_vllm_line(self, source: str, text: str) -> None:
        self.on_line(source, text)
        step = read_progress(text) if self.phase == "loading" else None
        if step is not None:
            self.set_progress(step)

    def _first_completion(self) -> None:
        self.set_phase("canary", "vllm answers /health with 200; waiting for the first completion")
        if self.settings.api_key_file is not None and self.server.answers_without_key():
            raise GenerationFailed("the API answers without a key: vllm has not loaded the key check", "vllm")
        verdict = self._complete(self.settings.canary_timeout_s)
        if not verdict.ok:
            self._wait_for_last_words()
            raise GenerationFailed(f"vllm answered /health with 200, but {verdict.text}", "vllm")
        self._note_canary(verdict, "completion")

    def _serve(self) -> None:
        if not self._may_serve():
            raise GenerationFailed("not all ranks hold their lease", "supervisor")
        self.set_phase("serving")
        due = time.monotonic() + self.settings.canary_interval_s
        before = self.server.counters()
        failures = 0
        while True:
            self.turn()
            if time.monotonic() < due:
                continue
            now = self.server.counters()
            if _progressed(before, now) and now is not None and now.running > 0:
                verdict, how = Verdict(True, 0), "traffic"
            else:
                verdict, how = self._complete(self.settings.canary_timeout_s), "completion"
                after = self.server.counters()
                if not verdict.ok and _progressed(now, after) and after is not None and after.running > 0:
                    verdict, how = Verdict(True, verdict.ms), "traffic"  # slow because it is full, not dead
                now = after
            self._note_canary(verdict, how)
            failures = 0 if verdict.ok else failures + 1
            if failures >= 2:  # one may be a moment's overload
                self._wait_for_last_words()
                raise GenerationFailed(f"vllm stopped serving: {verdict.text}", "vllm")
            before = now
            wait = self.settings.canary_interval_s
            due = time.monotonic() + (wait if verdict.ok else min(wait, RETRY_S))

    def _complete(self, timeout_s: float) -> Verdict:
        canary = Canary(self.server, timeout_s)
        while (verdict := canary.result()) is None:
            self.turn()
        return verdict

    def _note_canary(self, verdict: Verdict, how: str) -> None:
        self.last_canary = {
            "at": time.time(), "ms": verdict.ms, "ok": verdict.ok, "how": how, "text": verdict.text
        }  # fmt: skip
        self.publish()

    def _wait_for_last_words(self) -> None:
        deadline = time.monotonic() + min(LAST_WORDS_S, self.settings.canary_timeout_s)
        while time.monotonic() < deadline:
            self.turn()

    def _may_serve(self) -> bool:
        with self._lock:
            return self.gang.may_serve(time.monotonic())

    def _require_free_port(self, address: str, port: int, user: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                text = f"port {port} for {user} cannot be had on {address}: {error.strerror}"
                raise GenerationFailed(text, "supervisor") from None

    def _fail(self, failure: GenerationFailed) -> None:
        phase = self.phase
        if failure.from_log:
            failure = self._blame_rank(failure)
        with self._lock:
            self.gang.end(f"generation {self.gang.generation and self.gang.generation.n} failed: {failure}")
        self.say(f"ending the generation: {failure}")
        left = self._end_all()
        error = self.find_error(failure, recent=phase in ("canary", "serving"))
        if phase == "canary" and failure.source == "vllm" and failure.from_log:
            text = f"vllm answered /health with 200, then died on the first completion: {error.line}"
            error = FirstError(error.at, error.source, text, error.lines, error.last_lines)
        self.first_error = error
        reboot = f"; reboot the node, these will not die: {', '.join(left)}" if left else ""
        self.set_phase("failed", f"{error.source}: {error.line}{reboot}")
        self.keep_end()

    def _blame_rank(self, failure: GenerationFailed) -> GenerationFailed:
        # When a node dies, vLLM notices long before its lease lapses. A few more seconds tell the two apart.
        patience = 3 * self.settings.lease_interval_s
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            self.quiet_turn()
            with self._lock:
                breach = self.gang.breach(time.monotonic())
                silent = self.gang.silent(time.monotonic(), patience - self.settings.lease_interval_s / 2)
            if breach is not None:
                return GenerationFailed(breach.text, breach.source)
            if silent:
                who = f"rank {silent[0]} ({self.gang.address(silent[0])})"
                return GenerationFailed(f"{who} fell silent, then {failure}", f"rank {silent[0]}")
        return failure

    def _end_all(self) -> list[str]:
        for child in (self.vllm, self.ray):
            self.note_exit(child)
        left = self.end_everything(self.quiet_turn)
        self.vllm = None
        return left

    def _wait_for_restart(self) -> None:
        while True:
            try:
                self.turn()
            except RestartRequested:
                return

    def _end_for_restart(self) -> None:
        with self._lock:
            self.gang.end("a restart was asked for")
        self.set_phase("starting", "ending the generation for a restart")
        if self.vllm is not None:
            self.processes.terminate(self.vllm, self.settings.stop_grace_s, self.quiet_turn)
        self._end_all()
        self.keep_end()

    def _shut_down(self) -> None:
        self.set_phase("stopping", "stopping vllm")
        if self.vllm is not None:
            self.processes.terminate(self.vllm, self.settings.stop_grace_s, self.quiet_turn)
        self.set_phase("stopping", "stopping Ray")
        with self._lock:
            self.gang.end("the head was stopped")
        # The workers leave Ray before its head goes. Whoever misses this learns it from the silence.
        deadline = time.monotonic() + 2 * self.settings.lease_interval_s + 5
        while time.monotonic() < deadline and not self._all_idle():
            self.quiet_turn()
        if self.ray is not None:
            self.processes.terminate(self.ray, 10, self.quiet_turn)
        self._end_all()
        self.set_phase("stopped")
        self.keep_end()

    def _all_idle(self) -> bool:
        with self._lock:
            return self.gang.all_idle()


def _progressed(before: Counters | None, now: Counters | None) -> bool:
    return before is not None and now is not None and now.tokens > before.tokens


def _exit(child: Child) -> str:
    code = child.exit_code or 0
    return f"signal {-code}" if code < 0 else f"exit code {code}"
