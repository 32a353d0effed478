"""What somebody has asked this rank to be: the file ``desired`` in the state folder, ``run`` or ``stopped``.

It lies on the host, so it holds over restarts of the container and reboots of the node. On the head it stops the whole
group: every rank ends its processes and gives its memory back, while the supervisors stay and wait.
"""

from __future__ import annotations

from pathlib import Path

FILE = "desired"
STOPPED = "stopped"


def is_held(state_dir: Path) -> bool:
    """Whether the file says ``stopped``; anything else, and no file, means ``run``."""
    try:
        return (state_dir / FILE).read_text(encoding="utf-8", errors="replace").strip() == STOPPED
    except OSError:
        return False
