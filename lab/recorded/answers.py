#!/usr/bin/python3
"""Stand-in for a tool of an emulated host: prints what somebody gave for it (``python -m lab pretend``).

Calls for which nothing was given go to the tool that was here before.
"""

import json
import os
import sys
from pathlib import Path

FOLDER = Path("/usr/share/spark-lab/pretended")

name = Path(sys.argv[0]).name
for answer in json.loads((FOLDER / f"{name}.json").read_text()):
    if answer["arguments"] in (None, sys.argv[1:]):
        sys.stdout.write(answer["output"])
        sys.exit(answer["status"])
before = FOLDER / "before" / name
if before.exists():
    os.execv(before, [name, *sys.argv[1:]])  # noqa: S606
print(f"{name}: nothing was given for these arguments: {sys.argv[1:]}", file=sys.stderr)
sys.exit(2)
