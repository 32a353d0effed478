"""``python -m automation`` on another project: ``run_automation.py FOLDER COMMAND ...``."""

from __future__ import annotations

import sys
from pathlib import Path

import automation.stack_file

automation.stack_file.PROJECT = Path(sys.argv[1])

import automation.events  # noqa: E402

automation.events.CONTAINER = "pulumi-python:dynamic/test:Restarting"

from automation.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
