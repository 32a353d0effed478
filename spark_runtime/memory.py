"""Whether the memory that a generation took has come back on this node, before the next one takes it again.

On unified memory what a killed process held can be gone until a reboot (33 GB for each hard stop in one report), and
a start into too little memory can wedge the whole host instead of failing. The measure is MemAvailable before the
first process of a generation, kept on disk for as long as the host is up, so that a restarted container knows it too.
"""

from __future__ import annotations

import re
from pathlib import Path

from spark_runtime.health import read_json
from spark_runtime.status import write_json

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MEMINFO = Path("/proc/meminfo")
VMSTAT = Path("/proc/vmstat")
TOLERANCE = 0.1
"""Of all memory: other programs of the node come and go as well."""


class Memory:
    """The memory of this node before, during and after a generation; bytes."""

    def __init__(self, path: Path, meminfo: Path = MEMINFO, boot_id: Path = BOOT_ID, vmstat: Path = VMSTAT) -> None:
        self._path, self._meminfo, self._vmstat = path, meminfo, vmstat
        self._kills = 0
        try:
            self._boot = boot_id.read_text().strip()
        except OSError:
            self._boot = ""
        kept = read_json(path) or {}
        same_boot = kept.get("boot_id") == self._boot
        self.before = _bytes(kept.get("before")) if same_boot else 0
        self.used = _bytes(kept.get("used")) if same_boot else 0

    def available(self) -> int:
        """MemAvailable; 0 if it cannot be read."""
        return self._read("MemAvailable")

    def starts(self) -> None:
        """The first process of a generation is about to start. Only ever the most that was seen on this boot."""
        self.before = max(self.before, self.available())
        self._kills = self._oom_kills()
        self._keep()

    def kills(self) -> int:
        """Processes of this node that the kernel has killed for memory since the generation started."""
        return max(0, self._oom_kills() - self._kills)

    def look(self) -> None:
        """While a generation runs: note the most that it takes."""
        found = self.available()
        if found and self.before - found > self.used * 1.1:  # not every little growth is worth a write
            self.used = self.before - found
            self._keep()

    def lacking(self) -> int:
        """What is not back yet; 0 also where nothing is known."""
        found = self.available()
        lacking = self.before - int(self._read("MemTotal") * TOLERANCE) - found
        return max(0, lacking) if found else 0

    def has_room(self) -> bool:
        """Whether there is as much as a generation takes, whoever has the rest."""
        return self.available() >= self.used

    def accept(self) -> None:
        """Somebody asks to go on with what there is."""
        self.before = self.available()
        self._keep()

    def settle(self) -> None:
        """A generation has ended. What is lacking now is somebody else's, and there is room enough without it."""
        if self.lacking():
            self.accept()

    def _keep(self) -> None:
        try:
            write_json(self._path, {"boot_id": self._boot, "before": self.before, "used": self.used})
        except OSError:
            return  # a full disk must not keep the model from serving

    def _oom_kills(self) -> int:
        try:
            found = re.search(r"^oom_kill (\d+)", self._vmstat.read_text(), re.MULTILINE)
        except OSError:
            return 0
        return int(found.group(1)) if found else 0

    def _read(self, name: str) -> int:
        try:
            found = re.search(rf"^{name}:\s+(\d+) kB", self._meminfo.read_text(), re.MULTILINE)
        except OSError:
            return 0
        return int(found.group(1)) * 1024 if found else 0


def _bytes(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
