"""One rank of a collective in the serving image, before any weights load: does an all-reduce come back, and over what?

Runs in a throw-away container that is like the rank's own but for its command, on all nodes at the same time. Each rank
announces itself in a store at the head's fabric address, so that a rank that never came is named; then a small and a
large all-reduce are done and their sums checked. Nothing of vLLM is imported: loading torch is most of the time.

Every step is printed as one line of JSON behind :data:`MARK`; NCCL's own log follows behind :data:`NCCL_MARK`. A
deadline ends it whatever hangs: first a thread that tells where, and if that cannot run any more, the C watchdog of
faulthandler.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from spark_runtime.hcas import NoActivePort, choose_hcas

MARK = "spark-vllm-probe: "
NCCL_MARK = "=== nccl"
SMALL_VALUES = 1024
LARGE_BYTES = 32 << 20
ROUNDS = {"nccl": 10, "gloo": 3}
NCCL_LOG_BYTES = 64 * 1024
HARD_END_S = 5.0
STORE_GRACE_S = 15.0
"""How long the head's store stays after its own end, for ranks that are a little behind."""


class Probe:
    """One rank's part."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank: int = options.rank
        self.world: int = options.world
        self.address: str = options.address
        self.port: int = options.port
        self.backend: str = options.backend
        self.deadline_s: float = options.deadline_s
        self.rdma: str = options.rdma
        self.stage = "starting"
        self.missing: list[int] = []
        self.nccl_log: Path | None = None
        self._began = time.monotonic()
        self._told = threading.Lock()

    def run(self) -> int:
        """Do all of it; the return value is the exit code."""
        faulthandler.dump_traceback_later(self.deadline_s + HARD_END_S, exit=True)
        watchdog = threading.Timer(self.deadline_s, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            found = self._measure()
        except NoActivePort as error:
            self._tell_end({"error": str(error)})
            return 1
        except Exception as error:
            self._tell_end({"error": f"{type(error).__name__}: {error}"})
            return 1
        self._tell_end(found)
        return 0

    def _measure(self) -> dict[str, Any]:
        environ, hcas = choose_hcas(os.environ, self.rdma)
        os.environ.clear()
        os.environ.update(environ)
        if self.backend == "nccl":
            self._log_nccl()
        self._tell("importing torch")
        torch: Any = importlib.import_module("torch")
        distributed: Any = importlib.import_module("torch.distributed")
        device = self._device(torch)
        store = self._meet(distributed)
        self._tell(f"initialising {self.backend}")
        distributed.init_process_group(
            self.backend,
            store=distributed.PrefixStore("collective", store),
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=self.deadline_s),
        )
        self._tell("first all-reduce")
        self._check_sum(torch, distributed, device, SMALL_VALUES)
        self._tell("large all-reduce")
        self._check_sum(torch, distributed, device, LARGE_BYTES // 4)
        found = self._time(torch, distributed, device)
        store.add("finished", 1)
        found |= {
            "torch": str(torch.__version__),
            "device": str(torch.cuda.get_device_name(0)) if self.backend == "nccl" else "cpu",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if self.backend == "nccl" else None,
            "hcas": hcas.as_json(),
        }
        if self.rank == 0:  # the store is in this process
            end = time.monotonic() + STORE_GRACE_S
            while store.add("finished", 0) < self.world and time.monotonic() < end:
                time.sleep(0.05)
        return found

    def _device(self, torch: Any) -> Any:
        if self.backend != "nccl":
            torch.set_num_threads(1)
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU in this container")
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)

    def _meet(self, distributed: Any) -> Any:
        where = f"{self.address}:{self.port}"
        self._tell(f"opening the store at {where}" if self.rank == 0 else f"looking for rank 0 at {where}")
        store = distributed.TCPStore(
            self.address,
            self.port,
            self.world,
            is_master=self.rank == 0,
            timeout=timedelta(seconds=self.deadline_s),
            wait_for_workers=False,
        )
        store.set(f"here-{self.rank}", socket.gethostname())
        self._tell("waiting for the other ranks")
        while True:
            # Asked for, not waited for: so it is known all the time who is missing.
            self.missing = [rank for rank in range(self.world) if not store.check([f"here-{rank}"])]
            if not self.missing:
                return store
            time.sleep(0.05)

    def _check_sum(self, torch: Any, distributed: Any, device: Any, values: int) -> None:
        pattern = torch.arange(values, dtype=torch.float32, device=device) % 251
        tensor = pattern + self.rank
        distributed.all_reduce(tensor)
        wanted = pattern * self.world + self.world * (self.world - 1) / 2
        wrong = int((tensor != wanted).sum())
        if wrong:
            raise RuntimeError(f"an all-reduce of {values} values came back with {wrong} wrong ones")

    def _time(self, torch: Any, distributed: Any, device: Any) -> dict[str, Any]:
        tensor = torch.zeros(LARGE_BYTES // 4, dtype=torch.float32, device=device)
        finish: Callable[[], Any] = torch.cuda.synchronize if self.backend == "nccl" else (lambda: None)
        distributed.all_reduce(tensor)
        finish()
        rounds, before, begin = ROUNDS[self.backend], read_counters(), time.monotonic()
        for _ in range(rounds):
            distributed.all_reduce(tensor)
        finish()
        seconds, after = time.monotonic() - begin, read_counters()
        moved = 2 * (self.world - 1) / self.world * LARGE_BYTES * rounds
        return {
            "done": True,
            "bus_gbps": moved * 8 / seconds / 1e9,
            "moved_bytes": int(moved),
            "sent_bytes": {name: after[name] - before.get(name, 0) for name in after},
        }

    def _log_nccl(self) -> None:
        # A file, since NCCL's standard output is not written line by line and would be lost with a hang.
        self.nccl_log = Path(tempfile.mkdtemp(prefix="spark-vllm-")) / "nccl.log"
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(self.nccl_log)}
        os.environ.pop("NCCL_DEBUG_SUBSYS", None)

    def _tell(self, stage: str) -> None:
        self.stage = stage
        with self._told:
            print(MARK + json.dumps({"rank": self.rank, "stage": stage, "at_s": self._age()}), flush=True)

    def _tell_end(self, found: dict[str, Any]) -> None:
        with self._told:
            if self.nccl_log is not None and self.nccl_log.exists():
                text = self.nccl_log.read_text(errors="replace")[:NCCL_LOG_BYTES]
                print(NCCL_MARK, text, sep="\n", flush=True)
            whole = {"rank": self.rank, "stage": self.stage, "at_s": self._age(), "missing": self.missing, **found}
            print("\n" + MARK + json.dumps(whole), flush=True)

    def _give_up(self) -> None:
        self._tell_end({"error": f"not done within {self.deadline_s:.0f} s"})
        os._exit(3)

    def _age(self) -> float:
        return round(time.monotonic() - self._began, 2)


def read_counters(sysfs: Path = Path("/sys/class/net")) -> dict[str, int]:
    """Bytes that each interface has sent; RDMA does not pass through here."""
    found = {}
    for path in sysfs.glob("*/statistics/tx_bytes"):
        try:
            found[path.parent.parent.name] = int(path.read_text())
        except (OSError, ValueError):
            continue
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the ``probe`` command."""
    for name in ("rank", "world", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--address", required=True, help="the head's fabric address, where the ranks meet")
    parser.add_argument("--backend", choices=sorted(ROUNDS), required=True)
    parser.add_argument("--rdma", choices=("required", "preferred", "off"), required=True)
    parser.add_argument("--deadline-s", type=float, required=True)


def run(options: argparse.Namespace) -> int:
    """Run the probe; it never returns, since what NCCL has left running could keep the process."""
    os._exit(Probe(options).run())
