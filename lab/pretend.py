"""Make a host show what a real Spark showed: tools that print recordings, and files with their contents.

What is changed lies on the host's own disk, outlives a restart and is taken back by :func:`stop`.
"""

from __future__ import annotations

import json

from lab import paths
from lab.host import Host

FOLDER = "/usr/share/spark-lab/pretended"

_TOOL = """
mkdir -p "$1/before"
found=$(command -v "$2" || echo "/usr/bin/$2")
test -e "$1/$2.path" || { echo "$found" > "$1/$2.path"; test ! -e "$found" || mv "$found" "$1/before/$2"; }
cat > "$found"
chmod 755 "$found"
"""
_FILE = """
kept=$1/files$2
if test ! -e "$kept" && test ! -e "$kept.none"; then
    mkdir -p "$(dirname "$kept")" "$(dirname "$2")"
    if test -e "$2"; then cp -a "$2" "$kept"; else : > "$kept.none"; fi
fi
cat > "$2"
"""
_STOP = """
for path in "$1"/*.path; do
    tool=$(basename "$path" .path)
    if ! test -e "$path" || { test -n "$2" && test "$2" != "$tool"; }; then continue; fi
    found=$(cat "$path")
    rm -f "$found" "$path" "$1/$tool.json"
    test ! -e "$1/before/$tool" || mv "$1/before/$tool" "$found"
done
test ! -d "$1/files" || find "$1/files" -type f | while read -r kept; do
    file=${kept#"$1/files"}
    if test -n "$2" && test "$2" != "${file%.none}"; then continue; fi
    case $file in
        *.none) rm -f "${file%.none}" ;;
        *) cp -a "$kept" "$file" ;;
    esac
    rm "$kept"
done
"""


def tool(host: Host, name: str, output: str, *, arguments: list[str] | None = None, status: int = 0) -> None:
    """Let a tool of a host print something; later answers for the same arguments replace earlier ones.

    Args:
        arguments: The arguments that it is the answer to; None for any that have no answer of their own.
    """
    stored = host.inside(["cat", f"{FOLDER}/{name}.json"])
    answers = json.loads(stored.stdout) if stored.returncode == 0 else []
    answers = [answer for answer in answers if answer["arguments"] != arguments]
    answers.append({"arguments": arguments, "output": output, "status": status})
    answers.sort(key=lambda answer: answer["arguments"] is None)
    script = (paths.package_dir() / "recorded" / "answers.py").read_text()
    host.change('mkdir -p "$1"; cat > "$1/$2.json"', FOLDER, name, what=f"answer of {name}", stdin=json.dumps(answers))
    host.change(_TOOL, FOLDER, name, what=f"stand-in for {name}", stdin=script)


def file(host: Host, path: str, content: str) -> None:
    """Put a file of a recording in the place of one of a host's own."""
    host.change(_FILE, FOLDER, path, what=f"file {path}", stdin=content)


def stop(host: Host, what: str = "") -> None:
    """Let a host show what it is again: one tool or file, or everything."""
    host.change(_STOP, FOLDER, what, what="no more pretending")
