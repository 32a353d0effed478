"""Files that lie on a node for us, below the stack's own folder, each under the hash of its content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spark_core.errors import ObservationError
from spark_core.journal import StackFolder
from spark_core.transport.base import Fragment, Transport, parse_sections, run_checked, script

_HASHES = """
n=0
for f in "$@"; do
  echo "=== hash $n"
  n=$((n + 1))
  if [ -f "$f" ]; then sha256sum < "$f" | cut -c1-64; else echo absent; fi
done
"""
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


def hashes_fragment(paths: Sequence[str]) -> Fragment:
    """The part of an observation script that hashes files; changes nothing."""
    return Fragment(_HASHES, tuple(paths))


def parse_hashes(node: str, sections: Mapping[str, str], paths: Sequence[str]) -> dict[str, str]:
    """SHA-256 of each file, ``absent`` where there is none, from the sections of :func:`hashes_fragment`."""
    found = {path: sections.get(f"hash {number}", "").strip() for number, path in enumerate(paths)}
    unknown = [path for path, digest in found.items() if not digest]
    if unknown:
        raise ObservationError(f"expected the hash of {unknown[0]}, found an answer without it", where=node)
    return found


def observe_files(transport: Transport, paths: Sequence[str]) -> dict[str, str]:
    """SHA-256 of each file on a node, ``absent`` where there is none."""
    if not paths:
        return {}
    text = run_checked(transport, script(_HASHES, *paths, timeout_s=60), purpose="expected to read the files of ours")
    return parse_hashes(transport.node, parse_sections(text), paths)


def prune_files(transport: Transport, folder: StackFolder, wanted: Sequence[str]) -> list[str]:
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
