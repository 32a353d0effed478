"""Write docs/automation.md and docs/schemas/ from the command line: ``python -m docs.generate_automation_reference``.

With ``--check`` nothing is written; exit code 1 says that a page is stale.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
if str(PROJECT) not in sys.path:
    sys.path.insert(0, str(PROJECT))

from automation.__main__ import build_parser  # noqa: E402
from automation.exit_codes import MEANINGS  # noqa: E402
from automation.schemas import REPORTS, schema_of  # noqa: E402

PAGE = PROJECT / "docs" / "automation.md"
SCHEMAS = PROJECT / "docs" / "schemas"
WIDTH = "100"

INTRODUCTION = """# Commands

<!-- Made by docs/generate_automation_reference.py from the command line. Change that, then run it again. -->

`python -m automation COMMAND`, inside `. ./env`, or the target `stack-COMMAND` of `make` with `STACK=NAME`.
How to use them: [Operate a deployment](how-to/automation.md).
`make` itself ends with 2 whatever a command ends with: where the status matters, run the command.

## Exit statuses

| status | meaning |
| --- | --- |
"""

NOTE = """
With `pin-hosts`, 1, 3 and 4 also say what became of the host keys; its `--help` has it.
"""


def page() -> str:
    """The reference page."""
    lines = [INTRODUCTION.rstrip("\n")]
    lines += [f"| {code.value} | {meaning} |" for code, meaning in MEANINGS.items()]
    lines += [NOTE]
    os.environ["COLUMNS"] = WIDTH
    for name, parser in commands():
        lines += [f"## {name}", "", "```", parser.format_help().rstrip(), "```"]
        lines += ["", f"`--json`: [schemas/{name}.json](schemas/{name}.json)"]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command with its parser."""
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def files() -> Mapping[Path, str]:
    """Every generated file with its content."""
    schemas = {SCHEMAS / f"{name}.json": json.dumps(schema_of(name), indent=2) + "\n" for name in REPORTS}
    return {PAGE: page(), **schemas}


def main() -> int:
    """Write them, or say which are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is stale")
    check = parser.parse_args().check
    stale = [path for path, text in files().items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(PROJECT)} is stale: run python -m docs.generate_automation_reference")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files()[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
