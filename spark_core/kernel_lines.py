"""What the kernel of a node said while a generation ran, kept beside the rank's log of that generation.

A process that is killed for memory, a driver that cannot allocate and a link that goes down leave their words in the
kernel's log only. Where the deploy user may read it (group adm or systemd-journal, or an open dmesg), the lines of the
window are written to ``rank<r>.kernel.log`` in its folder, bounded, so that they can be read after a reboot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spark_core.errors import SparkError
from spark_core.transport.base import Transport, script

LIMIT_LINES = 400
SHOWN_LINES = 8
MATTERS = (
    r"out of memory|oom-kill|oom_reaper|killed process|NVRM|Xid|NV_ERR|mlx5|link is (down|up)|"
    "segfault|hung task|blocked for more than|I/O error|nvidia"
)
_KEEP = """
folder=$1/logs/$2
[ -d "$folder" ] || exit 0
found=$(journalctl -k -q -o short-iso --no-pager --since "@$4" 2>/dev/null || true)
[ -n "$found" ] || found=$(dmesg -T 2>/dev/null | tail -n 2000 || true)
lines=$(printf '%s\\n' "$found" | grep -iE -- "$5" | tail -n "$6" || true)
[ -n "$lines" ] || exit 0
new=$folder/.rank$3.kernel.new
printf '%s\\n' "$lines" > "$new" && mv -f -- "$new" "$folder/rank$3.kernel.log"
printf '%s\\n' "$lines" | tail -n "$7"
"""


def keep_kernel_lines(transport: Transport, state_folder: str, rank: int, status: Mapping[str, Any]) -> list[str]:
    """Keep the kernel's lines of a rank's present generation, and return the last of them; none where unreadable."""
    number = (status.get("generation") or {}).get("n")
    started = status.get("generation_started")
    if not isinstance(number, int) or not isinstance(started, int | float):
        return []
    words = (state_folder, str(number), str(rank), str(int(started)), MATTERS, str(LIMIT_LINES), str(SHOWN_LINES))
    try:
        result = transport.run(script(_KEEP, *words, timeout_s=30))
    except SparkError:
        return []
    return result.stdout.splitlines() if result.ok else []
