"""The host of a node: its facts, and the kernel parameters that the settings declare.

Facts that change by themselves (free memory, boot id, load) are for the preflight and never enter any state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_core.errors import CommandError, ObservationError
from spark_core.journal import JournalEntry, StackFolder, read_journal, record, undo
from spark_core.transport.base import Command, Transport, command, parse_sections, run_checked, script

_FACTS = """
echo '=== architecture'; uname -m
echo '=== kernel'; uname -r
echo '=== os'; cat /etc/os-release 2>/dev/null || true
echo '=== dgx'; cat /etc/dgx-release 2>/dev/null || true
echo '=== memory'; grep -E '^(MemTotal|MemAvailable|SwapTotal):' /proc/meminfo
echo '=== disk'; d="$1"; while [ ! -d "$d" ]; do d=$(dirname "$d"); done; df -B1 --output=avail "$d" | tail -1
echo '=== docker'
if ! command -v docker >/dev/null; then echo missing
else
  timeout -k 1 8 docker version --format '{{.Server.Version}} {{.Server.Arch}}' 2>&1 ||
    case $? in 124 | 137) echo no-answer ;; esac
fi
echo '=== gpu'
command -v nvidia-smi >/dev/null &&
  timeout -k 1 8 nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || true
"""


@dataclass(frozen=True)
class HostFacts:
    """What a host is.

    Attributes:
        architecture: Machine architecture in Docker's words, ``arm64`` or ``amd64``.
        kernel: Kernel release.
        os: Pretty name of the distribution.
        dgx_release: Version of the DGX software as built, or None on other hosts.
        memory_total_bytes: MemTotal; on a Spark that is the GPU's memory too.
        memory_available_bytes: MemAvailable at this moment.
        disk_free_bytes: Free space where our folder is.
        docker: Version of the Docker daemon, or None if it could not be asked.
        docker_problem: What the docker command said instead of a version.
        gpu: Name and driver of the GPU, or None.
    """

    architecture: str
    kernel: str
    os: str
    dgx_release: str | None
    memory_total_bytes: int
    memory_available_bytes: int
    disk_free_bytes: int
    docker: str | None
    docker_problem: str | None
    gpu: str | None


_DOCKER_ARCHITECTURE = {"aarch64": "arm64", "x86_64": "amd64"}


def observe_host(transport: Transport, root: str) -> HostFacts:
    """Read the facts of a host in one round trip; changes nothing."""
    text = run_checked(transport, script(_FACTS, root), purpose="expected to read the facts of the host")
    try:
        return parse_host(text)
    except (KeyError, ValueError, IndexError) as error:
        raise ObservationError(
            f"expected the facts of the host, found an answer without {error}", where=transport.node
        ) from error


def parse_host(text: str) -> HostFacts:
    """Facts from the output of the observation script."""
    sections = parse_sections(text)
    memory = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in sections["memory"].splitlines()}
    machine = sections["architecture"].strip()
    version, problem = parse_docker_version(sections["docker"])
    return HostFacts(
        architecture=_DOCKER_ARCHITECTURE.get(machine, machine),
        kernel=sections["kernel"].strip(),
        os=parse_release(sections["os"]).get("PRETTY_NAME", "unknown"),
        dgx_release=parse_release(sections["dgx"]).get("DGX_SWBUILD_VERSION"),
        memory_total_bytes=memory["MemTotal"],
        memory_available_bytes=memory["MemAvailable"],
        disk_free_bytes=int(sections["disk"].split()[0]),
        docker=version,
        docker_problem=problem,
        gpu=next((line.strip() for line in sections["gpu"].splitlines() if line.strip()), None),
    )


def parse_release(text: str) -> dict[str, str]:
    """``KEY=value`` lines with or without quotes, as in os-release and dgx-release; other lines are ignored."""
    values = {}
    for line in text.splitlines():
        key, sign, value = line.partition("=")
        if sign and key.strip().isidentifier():
            values[key.strip()] = value.strip().strip('"').strip()
    return values


def parse_docker_version(text: str) -> tuple[str | None, str | None]:
    """(version, problem) from ``docker version``; exactly one of them is None.

    The problem tells a missing command, a refused socket and a stopped daemon apart (NVIDIA/xr-ai PR 525).
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines == ["missing"]:
        return None, "no docker command on the PATH of a non-interactive shell"
    if lines[-1:] == ["no-answer"]:
        return None, "the Docker daemon does not answer in 8 s"
    for line in lines:
        words = line.split()
        if len(words) == 2 and words[0][:1].isdigit():
            return words[0], None
    joined = " ".join(lines)
    if "permission denied" in joined.lower():
        return None, "the deploy user may not use the Docker socket (is it in the docker group?)"
    if "Cannot connect to the Docker daemon" in joined or "daemon running" in joined:
        return None, "the Docker daemon does not answer (is docker.service running?)"
    return None, joined[-160:] or "docker gave no version"


def observe_sysctls(transport: Transport, names: list[str]) -> dict[str, str | None]:
    """Current value of each kernel parameter, blanks made single; None where the kernel has no such parameter.

    One that only root can read is read by root.

    Raises:
        CommandError: a parameter is there and cannot be read; that is not "absent".
    """
    if not names:
        return {}
    text = run_checked(
        transport,
        # /proc and not the sysctl command, which is not on the PATH of an unprivileged shell everywhere.
        script(
            'for k in "$@"; do echo "=== $k"; f="/proc/sys/${k//.//}"; if [ ! -e "$f" ]; then echo "--absent--"; '
            'else cat "$f" 2>/dev/null || echo "--unreadable--"; fi; done',
            *names,
        ),
        purpose="expected to read kernel parameters",
    )
    sections = parse_sections(text)
    found: dict[str, str | None] = {}
    for name in names:
        if name not in sections:
            raise ObservationError(
                f"expected the kernel parameter {name} in the answer, found none", where=transport.node
            )
        value = sections[name]
        if "--unreadable--" in value.splitlines():
            value = run_checked(
                transport,
                script('cat "/proc/sys/${1//.//}"', name, sudo=True),
                purpose=f"expected to read the kernel parameter {name}",
                setting="host.sysctls",
            )
        found[name] = None if value.strip() == "--absent--" else " ".join(value.split())
    return found


def plan_sysctls(wanted: Mapping[str, str], found: Mapping[str, str | None]) -> list[Command]:
    """The commands that bring the parameters to their wanted values; empty when nothing differs."""
    return [
        command("sysctl", "-q", "-w", f"{name}={value}", sudo=True)
        for name, value in sorted(wanted.items())
        if found.get(name) != " ".join(value.split())
    ]


def apply_sysctls(
    transport: Transport, folder: StackFolder, wanted: Mapping[str, str], no_longer: list[str]
) -> dict[str, str | None]:
    """Set the wanted parameters, put back those that are no longer declared; the values found afterwards.

    Raises:
        CommandError: a parameter does not exist or did not take its value.
    """
    if no_longer:
        undo(transport, folder, [("sysctl", name) for name in no_longer])
    found = observe_sysctls(transport, sorted(wanted))
    absent = [name for name, value in found.items() if value is None]
    if absent:
        raise CommandError(
            f"expected the kernel parameter {absent[0]}, found none of that name",
            where=f"{transport.node} (host.sysctls)",
            do="correct the name; a module that is not loaded has no parameters yet",
        )
    known = {entry.target for entry in read_journal(transport, folder) if entry.kind == "sysctl"} if wanted else set()
    # Also what already has its wanted value: after a drift and its repair, the drift's value must not pass for the old.
    for name in sorted(set(wanted) - known):
        record(transport, folder, JournalEntry("sysctl", name, found[name]))
    commands = plan_sysctls(wanted, found)
    for cmd in commands:
        name = cmd.argv[-1].split("=", 1)[0]
        run_checked(transport, cmd, purpose=f"expected to set {name}", setting="host.sysctls")
    after = observe_sysctls(transport, sorted(wanted)) if commands else found
    wrong = [name for name, value in wanted.items() if after[name] != " ".join(value.split())]
    if wrong:
        raise CommandError(
            f"expected {wrong[0]} = {wanted[wrong[0]]}, found {after[wrong[0]]} after setting it",
            where=f"{transport.node} (host.sysctls)",
            do="the kernel limits this value; declare one that it takes",
        )
    return after


_PRUNE = """
cd "$1" 2>/dev/null || exit 0
shift
ids=$(docker ps -aq)
used=
if [ -n "$ids" ]; then used=$(docker inspect --format '{{range .Mounts}}{{.Source}} {{end}}' $ids); fi
for d in *; do
  [ -d "$d" ] || continue
  case " $* " in *" $d "*) continue ;; esac
  case "$used" in *"/$d/"*) continue ;; esac
  rm -rf -- "$d"
  echo "$d"
done
"""


def prune_files(transport: Transport, folder: StackFolder, wanted: list[str]) -> list[str]:
    """Remove files of ours that the settings no longer want and that no container has mounted, running or not.

    A container that is about to be replaced keeps its file until the next time: if the replacement never comes, it can
    still be started again.

    Returns:
        The folders that were removed.
    """
    keep = sorted({path.removeprefix(f"{folder.files}/").split("/")[0] for path in wanted})
    text = run_checked(
        transport, script(_PRUNE, folder.files, *keep), purpose="expected to remove files no longer wanted"
    )
    return text.split()


def observe_files(transport: Transport, paths: list[str]) -> dict[str, str]:
    """SHA-256 of each file on a node, ``absent`` where there is none."""
    if not paths:
        return {}
    text = run_checked(
        transport,
        script(
            'for f in "$@"; do echo "=== $f"; if [ -f "$f" ]; then sha256sum -- "$f" | cut -c1-64; '
            "else echo absent; fi; done",
            *paths,
            timeout_s=60,
        ),
        purpose="expected to read the files of ours",
    )
    found = parse_sections(text)
    return {path: found.get(path, "absent").strip() for path in paths}
