"""One emulated host from the outside: look into it, wait for it, switch it off and on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from lab import access, cgroup, network, power
from lab.command import evidence
from lab.errors import StepFailed
from lab.instance import Instance

READY_TIMEOUT_S = 90
POWER_OFF_TIMEOUT_S = 30


@dataclass(frozen=True)
class Host:
    """A host of a lab. The object holds no state: each question asks the machine."""

    lab: Instance
    name: str

    def is_on(self) -> bool:
        """Whether the host has power."""
        return power.is_on(self.lab, self.name)

    def enter(self, argv: list[str]) -> list[str]:
        """The command line that runs `argv` as root inside the host, without SSH."""
        pid = power.init_pid(self.lab, self.name)
        if pid is None:
            raise StepFailed(f"{self.name} is off: python -m lab power-on {self.name}")
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
        return ["nsenter", f"--target={pid}", *namespaces, "--root", "--wdns=/", "--", *argv]

    def inside(
        self, argv: list[str], *, timeout_s: float = 15, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as root inside the host and return what it said."""
        return subprocess.run(
            self.enter(argv),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
        )

    def change(self, shell: str, *words: str, what: str, stdin: str | None = None, timeout_s: float = 30) -> str:
        """Run shell text as root inside the host, words as $1, $2, …; raises StepFailed when it fails."""
        done = self.inside(["sh", "-euc", shell, "sh", *words], timeout_s=timeout_s, stdin=stdin)
        if done.returncode != 0:
            raise StepFailed(f"{self.name}: {what}: ended with {done.returncode}{evidence(done.stderr)}")
        return done.stdout

    def ssh(self, *command: str, options: tuple[str, ...] = ()) -> list[str]:
        """The command line that reaches the host over SSH, as the deploy user."""
        return ["ssh", "-F", str(access.ssh_config(self.lab)), *options, self.name, *command]

    def system_state(self) -> str:
        """systemd's word for the state of the host: running, starting, degraded, …, or off."""
        try:
            done = self.inside(["systemctl", "is-system-running"])
        except (StepFailed, subprocess.TimeoutExpired):
            return "off" if not self.is_on() else "unknown"
        return done.stdout.strip() or "starting"

    def boot_id(self) -> str | None:
        """A word that changes with every start, or None while the host is off."""
        pid = power.init_pid(self.lab, self.name)
        return None if pid is None else f"{power.boots(self.lab, self.name)}-{pid}"

    def answers_ssh(self) -> bool:
        """Whether the deploy user gets in over SSH with the lab's key and the pinned host key."""
        return self._over_ssh("true")

    def answers_docker(self) -> bool:
        """Whether the deploy user can ask the Docker daemon."""
        return self._over_ssh("docker", "version", "--format", "{{.Server.Version}}")

    def _over_ssh(self, *command: str) -> bool:
        argv = self.ssh(*command, options=("-o", "BatchMode=yes", "-o", "ConnectTimeout=3"))
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=15, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def wait_ready(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until system, SSH and Docker are ready; raises StepFailed with the host's own words."""
        end = time.monotonic() + timeout_s
        self._wait("system running", self._system_ready, end)
        self._wait("SSH answers", self.answers_ssh, end)
        self._wait("Docker answers", self.answers_docker, end)

    def _system_ready(self) -> bool:
        state = self.system_state()
        if state == "degraded":
            failed = self.inside(["systemctl", "--failed", "--no-legend", "--plain"]).stdout
            raise StepFailed(f"{self.name}: units failed while starting{evidence(failed)}{self._journal()}")
        return state == "running"

    def _wait(self, what: str, done: Callable[[], bool], end: float) -> None:
        while not done():
            if not self.is_on():
                raise StepFailed(f"{self.name}: went off while waiting for: {what}{self._console()}")
            if time.monotonic() > end:
                raise StepFailed(f"{self.name}: not reached in time: {what}{self._console()}{self._journal()}")
            time.sleep(0.2)

    def _journal(self) -> str:
        try:
            said = self.inside(["journalctl", "-b", "-p", "warning", "-n", "15", "--no-pager", "-o", "short"])
        except (StepFailed, subprocess.TimeoutExpired):
            return ""
        return evidence(said.stdout)

    def _console(self) -> str:
        folder = self.lab.host_dir(self.name)
        text = ""
        for name in ("power.log", "console.log"):
            try:
                text += (folder / name).read_text(errors="replace")
            except FileNotFoundError:
                continue
        return evidence(text, 8)

    def switch_on(self, *, timeout_s: float = 20) -> None:
        """Give the host power and wait until its PID 1 exists."""
        supply = power.switch_on(self.lab, self.name)
        end = time.monotonic() + timeout_s
        while power.init_pid(self.lab, self.name) is None:
            if supply.poll() is not None:
                raise StepFailed(f"{self.name}: did not start{self._console()}")
            if time.monotonic() > end:
                raise StepFailed(f"{self.name}: no PID 1 after {timeout_s:.0f} s{self._console()}")
            time.sleep(0.05)

    def cut_power(self) -> None:
        """Take the power away: PID 1 and with it everything else ends at once, nothing more is written."""
        pid = power.init_pid(self.lab, self.name)
        if pid is not None:
            _kill(pid, signal.SIGKILL)
        self._wait_off(10)

    def shut_down(self) -> None:
        """Switch off in order; a host that takes too long loses power instead."""
        pid = power.init_pid(self.lab, self.name)
        if pid is not None:
            # systemd's signal for "power off now".
            _kill(pid, signal.SIGRTMIN + 4)
        end = time.monotonic() + POWER_OFF_TIMEOUT_S
        while self.is_on() and time.monotonic() < end:
            time.sleep(0.1)
        if self.is_on():
            self.cut_power()

    def reboot(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Restart in order and wait until everything answers again."""
        before = self.boot_id()
        done = self.inside(["systemctl", "reboot"])
        if done.returncode != 0:
            raise StepFailed(f"{self.name}: systemctl reboot ended with {done.returncode}{evidence(done.stderr)}")
        end = time.monotonic() + timeout_s
        while self.boot_id() in (None, before):
            if time.monotonic() > end:
                raise StepFailed(f"{self.name}: did not go down and come back in time{self._console()}")
            time.sleep(0.2)
        self.wait_ready(timeout_s=timeout_s)

    def _wait_off(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while self.is_on():
            if time.monotonic() > end:
                self._force_off()
                return
            time.sleep(0.05)

    def _force_off(self) -> None:
        """End a power supply that does not end by itself, and do its cleaning up."""
        supply = power.supply_pid(self.lab, self.name)
        if supply is not None:
            _kill(supply, signal.SIGKILL)
        cgroup.remove(self.lab.tag, self.name)
        network.disconnect(self.lab, self.name)

    def carrier(self, interface: str) -> bool:
        """Whether an interface of the host has a carrier."""
        said = self.inside(["cat", f"/sys/class/net/{interface}/carrier"])
        return said.stdout.strip() == "1"


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
