"""What head and worker share: settings, a turn of the main loop, status, log, the end of everything."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_runtime import desired, hcas, logs, ray_node, status, vllm_server
from spark_runtime.first_error import FirstError, explained, find_first_error, is_consequence
from spark_runtime.memory import Memory
from spark_runtime.messages import Generation, Phase
from spark_runtime.observations import Failure, Limits, Remains
from spark_runtime.processes import Child, Processes, empty_folder, has_own_shm
from spark_runtime.protocol import Heal, Step

PACKAGE_ROOT = Path(__file__).resolve().parent.parent
TURN_S = 0.2
PUBLISH_EVERY_S = 1.0
RECENT_LINES = 2000
"""A death after long serving is explained by the end of the log, not by an old client's bad request."""


class StopRequested(Exception):
    """SIGTERM or SIGINT has arrived."""


class GenerationFailed(Exception):
    """The generation cannot go on. One sentence; ``from_log`` says whether the log explains it better."""

    def __init__(self, text: str, source: str, from_log: bool = False) -> None:
        super().__init__(text)
        self.failure = Failure(text, source, from_log)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The command line of ``run``."""

    group: str
    deployment: str
    rank: int
    nodes: int
    gpus_per_node: int
    backend: str
    head_address: str
    node_address: str
    ray_port: int
    ray_token: str
    master_port: int
    status_port: int
    serve_port: int
    serve_host: str
    model: str
    served_model_name: str
    api_key_file: Path | None
    state_dir: Path
    rdma: str
    ray_arg: list[str]
    object_store_bytes: int
    join_timeout_s: float
    start_timeout_s: float
    canary_timeout_s: float
    canary_interval_s: float
    lease_interval_s: float
    lease_timeout_s: float
    stop_grace_s: float
    ray_folder: Path
    log_limit_bytes: int
    keep_generations: int
    heal: Heal
    node_names: str
    serve_args: list[str] = field(default_factory=list)

    @property
    def over_ray(self) -> bool:
        """Whether Ray distributes the ranks; otherwise vLLM's own processes meet without it."""
        return self.backend == "ray"

    @property
    def ray_address(self) -> str:
        """Where Ray's control store listens."""
        return f"{self.head_address}:{self.ray_port}"

    @property
    def limits(self) -> Limits:
        """The times of the protocol."""
        return Limits(
            lease_interval_s=self.lease_interval_s,
            lease_timeout_s=self.lease_timeout_s,
            join_timeout_s=self.join_timeout_s,
            start_timeout_s=self.start_timeout_s,
            canary_interval_s=self.canary_interval_s,
            last_words_s=min(Limits.last_words_s, self.canary_timeout_s),
            grace_s=self.stop_grace_s,
        )


class Rank:
    """One rank of the group. Everything runs in the main thread unless a method says otherwise."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.incarnation = secrets.token_hex(8)
        self.processes = Processes()
        self.generation: Generation | None = None
        self.ray: Child | None = None
        self.vllm: Child | None = None
        self.memory = Memory(settings.state_dir / "memory.json")
        self.stuck = ""
        self.held = desired.is_held(settings.state_dir)
        self.log: logs.GenerationLog | None = None
        self.phase: Phase = "starting"
        self.detail = ""
        self.progress = ""
        self.first_error: FirstError | None = None
        self.exit_codes: dict[str, int] = {}
        self._since = self._progress_at = self._failed_phase_since = time.time()
        self._generation_started: float | None = None
        self._published = 0.0
        self._stop = False
        self._status_path = settings.state_dir / "status.json"
        self._restart_path = settings.state_dir / "restart.request"
        self._versions = status.read_versions()
        self.hcas = hcas.Hcas()
        self.env = dict(os.environ)
        # Always set, so that this file is the one vLLM reads, also in an image whose home cannot be written.
        self.env.setdefault("VLLM_CONFIG_ROOT", str(settings.state_dir / "vllm-config"))
        if settings.nodes == 1:
            # Without peers there is no fabric to name, and vLLM would ask Ray for the default route's address.
            self.env.setdefault("VLLM_HOST_IP", settings.node_address)
        self._given_env = dict(self.env)

    def prepare(self) -> None:
        """Once, before anything else: signals, the state folder, and leftovers of an earlier life."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)  # PID 1 has no default action for any signal
        self.settings.state_dir.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            self._restart_path.unlink()
        self.publish()

    def turn(self) -> None:
        """One turn of the main loop; raises StopRequested."""
        self.quiet_turn()
        if self._stop:
            raise StopRequested

    def take_restart_request(self) -> bool:
        """Whether somebody asks, on this node, for a new generation; the request counts once."""
        if not self._restart_path.exists():
            return False
        with contextlib.suppress(OSError):
            self._restart_path.unlink()
        self.memory.accept()
        return True

    def quiet_turn(self) -> None:
        """One turn during an end: reaps and publishes, raises nothing."""
        time.sleep(TURN_S)
        self.processes.reap()
        if time.monotonic() - self._published > PUBLISH_EVERY_S:
            self.held = desired.is_held(self.settings.state_dir)
            if self.ray is not None or self.vllm is not None:
                self.memory.look()
            self.publish()

    def tell_stuck(self, stuck: str) -> None:
        """This node cannot become idle: that is an error of its own."""
        if stuck and not self.stuck:
            last: Sequence[str] = self.first_error.last_lines if self.first_error else ()
            self.first_error = FirstError(time.time(), "supervisor", stuck, [], list(last))
        self.stuck = stuck

    def set_phase(self, phase: Phase, detail: str = "") -> None:
        """Enter a phase, or say something new about the one we are in."""
        if (phase, detail) == (self.phase, self.detail):
            return
        if phase != self.phase:
            if phase == "ending":
                self._failed_phase_since = self._since
            self._since = self._progress_at = time.time()
            self.progress = ""
        self.phase, self.detail = phase, detail
        self.say(f"{phase}: {detail}" if detail else phase)
        self.publish()

    def set_progress(self, text: str) -> None:
        """Note a step of loading (called from a log thread; plain assignments)."""
        if text != self.progress:
            self.progress, self._progress_at = text, time.time()

    def say(self, text: str) -> None:
        """One line of the supervisor's own into the log."""
        if self.log is not None:
            self.log.write("supervisor", text)
        else:
            logs.say(text)

    def on_line(self, source: str, text: str) -> None:
        """A line of a child's output (called from its log thread)."""
        if self.log is not None:
            self.log.write(source, text)

    def start_log(self, generation: Generation) -> None:
        """A log of its own for each generation; the oldest ones go."""
        folder = self.settings.state_dir / "logs"
        if self.log is not None:
            self.log.close()
        self.log = logs.GenerationLog(folder / str(generation.n), self.settings.rank, self.settings.log_limit_bytes)
        logs.keep_newest(folder, self.settings.keep_generations)
        self.generation, self._generation_started = generation, time.time()
        self.first_error, self.exit_codes = None, {}

    def start_ray(self, head: bool, token: str) -> Child:
        """Start Ray on this node, with what of the fabric can be used now."""
        settings = self.settings
        self._look_at_fabric()
        argv = ray_node.start_argv(
            head=head,
            head_address=settings.head_address,
            node_address=settings.node_address,
            port=settings.ray_port,
            gpus=settings.gpus_per_node,
            folder=settings.ray_folder,
            object_store_bytes=settings.object_store_bytes,
            extra=settings.ray_arg,
        )
        self.memory.starts()
        try:
            self.env |= ray_node.token_env(token)
        except OSError as error:
            raise GenerationFailed(f"cannot write Ray's token: {error.strerror}", "supervisor") from None
        self.ray = self.start("ray", argv, ray_node.start_env(self.env), self.on_line)
        return self.ray

    def start_vllm(self, on_line: Callable[[str, str], None]) -> Child:
        """Start `vllm serve`; without Ray this is what the rank takes part with."""
        settings = self.settings
        serves = settings.rank == 0
        if not settings.over_ray:
            self._look_at_fabric()
            self.memory.starts()
        distribution = vllm_server.backend_args(
            settings.backend,
            rank=settings.rank,
            nodes=settings.nodes,
            master_address=settings.head_address,
            master_port=settings.master_port,
        )
        argv = vllm_server.serve_argv(
            model=settings.model,
            served_model_name=settings.served_model_name,
            listen=(settings.serve_host, settings.serve_port) if serves else None,
            keyed=serves and settings.api_key_file is not None,
            extra=[*distribution, *settings.serve_args],
        )
        env = vllm_server.serve_env(
            self.env,
            ray_address=settings.ray_address if settings.over_ray else None,
            package_root=PACKAGE_ROOT,
            api_key_file=settings.api_key_file if serves else None,
        )
        self.vllm = self.start("vllm", argv, env, on_line)
        return self.vllm

    def _look_at_fabric(self) -> None:
        """Choose the RDMA devices anew for each generation, and hold vLLM's idea of this node against ours."""
        settings = self.settings
        try:
            self.env, self.hcas = hcas.choose_hcas(self._given_env, settings.rdma)
        except hcas.NoActivePort as error:
            raise GenerationFailed(str(error), "fabric") from None
        if self.hcas.text:
            self.say(self.hcas.text)
        mismatch = ray_node.address_mismatch(self.env, settings.node_address, settings.over_ray)
        if mismatch:
            raise GenerationFailed(mismatch, "fabric")

    def start(self, name: str, argv: list[str], env: dict[str, str], on_line: Callable[[str, str], None]) -> Child:
        """Start a child; an executable that the image lacks is a failure of the generation."""
        self.say(f"starting {name}: {' '.join(argv) if name != 'ray-probe' else 'counting Ray nodes'}")
        try:
            return self.processes.spawn(name, argv, env, on_line)
        except OSError as error:
            text = f"cannot start `{argv[0]}` in this image: {error.strerror}"
            raise GenerationFailed(text, name) from None

    def note_exit(self, child: Child | None) -> bool:
        """Whether a child has ended; its exit code is kept for the status."""
        if child is None or child.exit_code is None:
            return False
        self.exit_codes[child.name] = child.exit_code
        return True

    def remains(self, asked: Child | None) -> Remains:
        """What an ending rank still finds here. ``asked`` is the process that may leave in its own way."""
        lacking = self.memory.lacking()
        return Remains(
            processes=self.processes.left(),
            asked=asked is not None and asked.running,
            lacking_bytes=lacking,
            room=lacking == 0 or self.memory.has_room(),
        )

    def end_step(self, step: Step, asked: Child | None) -> None:
        """Do what the protocol wants done on the way to an idle node."""
        if step == "leave" and asked is not None:
            self.processes.ask_to_leave(asked)
        elif step == "kill":
            self.processes.kill()
        elif step == "sweep":
            self.sweep()

    def sweep(self) -> None:
        """After the last process: keep what it said, empty what it left."""
        self.processes.drain()
        for child in (self.vllm, self.ray):
            self.note_exit(child)
        if self.log is not None:
            logs.keep_ray_logs(self.settings.ray_folder, self.log.folder / f"rank{self.settings.rank}-ray")
        self.clean_leftovers()
        self.ray = self.vllm = None

    def end_everything(self) -> None:
        """When this rank is stopped: what cannot be killed in time ends with the container."""
        deadline = time.monotonic() + Limits.kill_s
        while self.processes.kill() and time.monotonic() < deadline:
            self.quiet_turn()
        self.sweep()

    def clean_leftovers(self) -> None:
        """Empty Ray's folder and /dev/shm, but only where they are the container's own."""
        if os.getpid() == 1:
            empty_folder(self.settings.ray_folder)
            if has_own_shm(Path("/proc/self/mountinfo").read_text()):
                empty_folder(Path("/dev/shm"))  # noqa: S108 (killed vLLM leaves hundreds of MB there)

    def find_error(self, failure: Failure, recent: bool = False) -> FirstError:
        """Explain a failure by the earliest cause in the log, or by its own sentence."""
        found: FirstError | None = None
        end = deque(self.log.lines() if self.log is not None else (), maxlen=RECENT_LINES)
        if failure.from_log and recent:
            found = find_first_error(line for line in end if line.at >= self._failed_phase_since)
        if failure.from_log and found is None and self.log is not None:
            found = find_first_error(self.log.lines())
        last = [f"{line.source} | {line.text[:600]}" for line in list(end)[-30:]]
        if found is None or is_consequence(found.line):
            found = self._killed_for_memory(failure, last) or found
        found = found or FirstError(time.time(), failure.source, failure.text, [], last)
        unlimited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
        return explained(found, () if recent or self.log is None else self.log.lines(), unlimited)

    def _killed_for_memory(self, failure: Failure, last: list[str]) -> FirstError | None:
        kills = self.memory.kills()
        if not kills:
            return None
        text = f"{failure.text}; the kernel has killed {kills} process(es) of this node for memory meanwhile"
        return FirstError(time.time(), failure.source, text, [], last)

    def keep_end(self) -> None:
        """Leave the generation's last status beside its log."""
        if self.log is not None:
            with contextlib.suppress(OSError):
                status.write_json(self.log.folder / f"rank{self.settings.rank}.end.json", self.document())

    def publish(self) -> None:
        """Write the status file. A full disk must not end a rank that serves."""
        self._published = time.monotonic()
        with contextlib.suppress(OSError):
            status.write_json(self._status_path, self.document())

    def document(self) -> dict[str, Any]:
        """The status of this rank."""
        settings = self.settings
        return {
            "schema": status.SCHEMA,
            "group": settings.group,
            "deployment": settings.deployment,
            "rank": settings.rank,
            "nodes": settings.nodes,
            "address": settings.node_address,
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "generation": self.generation.as_json() if self.generation else None,
            "generation_started": self._generation_started,
            "phase": self.phase,
            "since": self._since,
            "updated": time.time(),
            "detail": self.detail,
            "progress": self.progress,
            "progress_at": self._progress_at,
            "first_error": self.first_error.as_json() if self.first_error else None,
            "exit_codes": dict(self.exit_codes),
            "desired": desired.STOPPED if self.held else "run",
            "memory_available_bytes": self.memory.available(),
            "hcas": self.hcas.as_json(),
            "versions": self._versions,
            "log": str(self.log.first) if self.log else None,
        }

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop = True
