"""A host with systemd, logind, Docker, swap and kernel parameters that are files in a folder.

The programs are small shell scripts: a test that kills a run at every command starts them thousands of times.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from spark_core.transport.base import Command, Result, command
from tests.local_node import LocalNode

HEAD = """#!/bin/bash
base={base} M={base}/machine
"""
SYSTEMCTL = """
etc=$base/etc/systemd/system wants=$base/etc/systemd/system/multi-user.target.wants
name=${@: -1} verb=$1
text=$M/units/$name.text active=$M/units/$name.active file=$etc/$name
effects() {
  grep "^$1=" "$text" | while IFS= read -r line; do
    case $line in
      *nvidia-smi\\ -lgc\\ 200,*) echo "${line##*,}" > "$M/cap" ;;
      *nvidia-smi\\ -rgc) echo none > "$M/cap" ;;
      *swapoff\\ -a) head -1 "$base/proc/swaps" > "$M/swaps.new"; cat "$M/swaps.new" > "$base/proc/swaps" ;;
    esac
  done
}
case $verb in
  show)
    load=not-found on=inactive enabled= stale=no
    if [ -e "$text" ] || [ -e "$file" ]; then load=loaded; fi
    [ ! -e "$active" ] || on=active
    [ ! -e "$file" ] || enabled=disabled
    [ ! -L "$wants/$name" ] || enabled=enabled
    if [ -e "$text" ] && ! cmp -s "$text" "$file"; then stale=yes; fi
    printf 'LoadState=%s\\nActiveState=%s\\nUnitFileState=%s\\nNeedDaemonReload=%s\\n' "$load" "$on" "$enabled" "$stale"
    ;;
  start)
    [ -e "$text" ] || cp "$file" "$text" || exit 5
    [ ! -e "$active" ] || exit 0
    [ ! -e "$M/fails-$name" ] || { echo "Job for $name failed" >&2; exit 1; }
    effects ExecStart
    touch "$active"
    ;;
  stop)
    if [ -e "$active" ]; then effects ExecStop; rm "$active"; fi
    [ -L "$wants/$name" ] || rm -f "$text"
    ;;
  enable) [ -e "$file" ] || { echo "Unit $name does not exist" >&2; exit 1; }
    mkdir -p "$wants"; ln -sfn "$file" "$wants/$name" ;;
  disable) [ -e "$file" ] || { echo "Unit $name does not exist" >&2; exit 1; }
    rm -f "$wants/$name"; rmdir --ignore-fail-on-non-empty "$wants" 2>/dev/null ;;
  daemon-reload)
    echo x >> "$M/reloads"
    for text in "$M"/units/*.text; do
      name=${text##*/}; name=${name%.text}
      if [ -e "$etc/$name" ]; then cp "$etc/$name" "$text"; else rm -f "$text"; fi
    done ;;
  restart)
    driver=$(grep -o 'native.cgroupdriver=[a-z]*' "$base/etc/docker/daemon.json" 2>/dev/null | cut -d= -f2)
    driver=${driver:-$(cat "$M/docker-default")}
    echo "$driver" >> "$M/docker-restarts"
    if [ "$driver" = "$(cat "$M/docker-refuses")" ]; then rm -f "$M/docker"; echo "Job failed" >&2; exit 1; fi
    echo "$driver" > "$M/docker" ;;
  kill)
    if grep -qs '^RemoveIPC=no' "$base"/etc/systemd/logind.conf.d/*.conf; then echo false; else echo true; fi \\
      > "$M/remove-ipc" ;;
  *) echo "fake systemctl: $*" >&2; exit 1 ;;
esac
exit 0
"""
PROGRAMS = {
    "systemctl": SYSTEMCTL,
    "busctl": """
case "$*" in
  "get-property "*" RemoveIPC") echo "b $(cat "$M/remove-ipc")" ;;
  "get-property "*" RuntimeWatchdogUSec") echo "t $(cat "$M/watchdog")" ;;
  "set-property "*" RuntimeWatchdogUSec t "*) echo "${@: -1}" > "$M/watchdog" ;;
  *) echo "fake busctl: $*" >&2; exit 1 ;;
esac
""",
    "docker": """
case "$1" in
  info) cat "$M/docker" 2>/dev/null || { echo "Cannot connect to the Docker daemon" >&2; exit 1; } ;;
  ps) [ -e "$M/docker" ] && cat "$M/containers" ;;
  restart) echo "$*" >> "$M/container-restarts" ;;
  *) echo "fake docker: $*" >&2; exit 1 ;;
esac
""",
    "sysctl": """
name=${3%%=*} value=${3#*=}
file=$base/proc/sys/${name//.//}
[ -e "$file" ] || { echo "sysctl: cannot stat $file" >&2; exit 255; }
[ ! -e "$M/limit" ] || value=$(cat "$M/limit")
printf '%s\\n' "$value" > "$file"
""",
    "swapon": """
priority=-2
if [ "$1" = -p ]; then priority=$2; shift 2; fi
if grep -q "^$2 " "$base/proc/swaps"; then echo "swapon: $2: Device or resource busy" >&2; exit 255; fi
printf '%s file 8388604 0 %s\\n' "$2" "$priority" >> "$base/proc/swaps"
""",
    # Everything belongs to root, whoever runs the tests.
    "install": """
while [ "$1" != -- ]; do
  case $1 in -d) folder=1; shift ;; -T) shift ;; -m) mode=$2; shift 2 ;; *) shift 2 ;; esac
done
if [ -n "${folder:-}" ]; then mkdir -p "$2" && chmod "$mode" "$2"; else cp "$2" "$3" && chmod "$mode" "$3"; fi
""",
    "stat": 'exec /usr/bin/stat "$@" | sed "s/ $(id -u):$(id -g)$/ 0:0/"\n',
    "sync": "exit 0\n",
    "sleep": "exit 0\n",
}


class RepeatingNode(LocalNode):
    """A carrier that loses the first answer to each command and asks again, over a new connection."""

    def run(self, cmd: Command) -> Result:
        if not any(cmd.argv == asked.argv for asked in self.asked):
            super().run(cmd)
        return super().run(cmd)


class TunedHost:
    """A host in a folder.

    Attributes:
        base: The folder; system files lie below it.
        node: Carries commands to it.

    Args:
        node: A host that has a Docker and kernel parameters already, and becomes one with systemd and the rest.
    """

    def __init__(self, base: Path, node: LocalNode | None = None) -> None:
        self.base = base
        self.machine = base / "machine"
        (self.machine / "units").mkdir(parents=True)
        for folder in ("etc/systemd/system", "etc/security/limits.d", "etc/sysctl.d", "etc/docker", "proc/sys", "dev"):
            (base / folder).mkdir(parents=True, exist_ok=True)
        (base / "dev/watchdog").touch()
        (base / "etc/docker/daemon.json").write_text('{\n    "bip": "10.9.0.1/24",\n    "runtimes": {}\n}')
        self.set_parameters({"net.core.rmem_max": "212992", "kernel.panic": "0", "kernel.panic_on_oops": "0"})
        (base / "proc/swaps").write_text("Filename Type Size Used Priority\n/dev/null file 8388604 0 -2\n")
        for name, text in (
            ("cap", "none"),
            ("docker", "systemd"),
            ("docker-default", "systemd"),
            ("docker-refuses", "nothing"),
            ("remove-ipc", "true"),
            ("watchdog", "0"),
            ("containers", ""),
        ):
            (self.machine / name).write_text(f"{text}\n" if text else "")
        self.node = node or LocalNode("spark-a", programs=base / "programs", sandbox=base)
        for name, text in PROGRAMS.items():
            if node is None or name not in ("docker", "sysctl"):
                self.node.install(name, HEAD.format(base=base) + text)

    def set_parameters(self, values: dict[str, str]) -> None:
        for name, value in values.items():
            path = self.base / "proc/sys" / name.replace(".", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")

    def parameter(self, name: str) -> str:
        return (self.base / "proc/sys" / name.replace(".", "/")).read_text().strip()

    def says(self, name: str) -> str:
        """A part of the running machine: ``cap``, ``docker``, ``remove-ipc``, ``watchdog``."""
        return (self.machine / name).read_text().strip()

    def be(self, name: str, text: str) -> None:
        (self.machine / name).write_text(text + "\n" if text else "")

    def count(self, name: str) -> int:
        """How often something happened: ``reloads``, ``docker-restarts``, ``container-restarts``."""
        path = self.machine / name
        return len(path.read_text().splitlines()) if path.exists() else 0

    def runs(self, container: str, stack: str = "") -> None:
        """A container that runs."""
        with (self.machine / "containers").open("a") as file:
            file.write(f"{container}|{stack}\n")

    def file(self, path: str) -> Path:
        """A system file of the host."""
        return self.base / path.lstrip("/")

    def picture(self) -> dict[str, str]:
        """All that tuning changes: files with modes and links, the running machine, kernel parameters."""
        seen = {}
        for folder in ("etc", "proc", "srv"):
            for path in sorted((self.base / folder).rglob("*")):
                name = str(path.relative_to(self.base))
                mode = f"{path.lstat().st_mode:o}"
                content = "" if path.is_dir() or path.is_symlink() else path.read_text()
                seen[name] = f"{mode} {content}"
        for name in ("cap", "docker", "remove-ipc", "watchdog"):
            path = self.machine / name
            seen[name] = path.read_text() if path.exists() else "nothing"
        seen["units"] = " ".join(sorted(path.name for path in (self.machine / "units").iterdir()))
        return seen

    def save(self, target: Path) -> None:
        """Keep a copy of the host."""
        shutil.copytree(self.base, target, symlinks=True, ignore=shutil.ignore_patterns("programs"))

    def restore(self, saved: Path) -> None:
        """Be as the copy was."""
        for path in self.base.iterdir():
            if path.name != "programs":
                shutil.rmtree(path)
        shutil.copytree(saved, self.base, symlinks=True, dirs_exist_ok=True)

    def boot(self) -> None:
        """Lose the power and start again: what is enabled runs, what was only set is gone."""
        machine, system = self.machine, self.file("/etc/systemd/system")
        for path in (machine / "units").iterdir():
            path.unlink()
        self.be("cap", "none")
        self.be("watchdog", "30000000" if self.file("/etc/systemd/system.conf.d").exists() else "0")
        for link in sorted((system / "multi-user.target.wants").glob("*")):
            if link.exists():
                self._systemctl("start", link.name)
        self._systemctl("kill", "-s", "HUP", "systemd-logind.service")
        self._systemctl("restart", "docker.service")

    def _systemctl(self, *words: str) -> None:
        assert self.node.run(command("systemctl", *words)).ok
