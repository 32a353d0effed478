"""The index of errors, made from the catalogues; ``python docs/generate_reference.py`` writes it.

Three catalogues have codes: the preflight's findings, the causes that are known in the ranks' logs, and the exit
statuses of the command line. A code that two of them have stands once for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from automation.exit_codes import MEANINGS
from spark_core.findings import KINDS
from spark_runtime.signatures import SIGNATURES, Diagnosis, Signature, diagnose

INTRODUCTION = """# Error index

<!-- Made by docs/generate_reference.py from the catalogues in the code. Change those, then run it again. -->

Every code that this program tells, in alphabetical order. A code stands in brackets at the end of a finding, such as
`[mtu-differs]`, and as `code` in `--json`, in the page that `report` writes and in a rank's status. What a message
looks like, and messages without a code: [errors](errors.md). By area: [findings](findings.md). By symptom:
[troubleshooting](troubleshooting.md).

- **preflight**: preview and up tell it, with its severity, before anything changes; below it stands what to do.
- **log**: a rank's log says it while the group starts or serves ([diagnosis](explanation/diagnosis.md)). `…` stands for
  a value.

Every code has a test that makes it happen; `tests/unit/test_error_index.py` finds one for each.

| code | told by | means |
| --- | --- | --- |
"""

STATUSES = """## Exit statuses

Of `python -m automation`; [commands](automation.md) has the options.

| status | name | means |
| --- | --- | --- |
"""

_REGISTERED = "memory-not-registered"
"""Told as one of two codes, by whether the rank may lock memory without bound."""


@dataclass(frozen=True)
class Entry:
    """One row of the index."""

    code: str
    told_by: str
    meaning: str


def entries() -> list[Entry]:
    """Every code, in alphabetical order; those of the preflight first."""
    found = [Entry(kind.code, f"preflight, {kind.severity}", kind.meaning) for kind in KINDS.values()]
    return sorted([*found, *_diagnoses()], key=lambda entry: entry.code)


def diagnosis_codes() -> set[str]:
    """The codes that a rank's log can give."""
    return {entry.code for entry in _diagnoses()}


def render() -> str:
    """The whole page."""
    rows = [f"| `{e.code}` | {e.told_by} | {_cell(e.meaning)} |" for e in entries()]
    statuses = [f"| {code.value} | `{code.name}` | {_cell(meaning)} |" for code, meaning in MEANINGS.items()]
    return INTRODUCTION + "\n".join(rows) + "\n\n" + STATUSES + "\n".join(statuses) + "\n"


def _diagnoses() -> Iterator[Entry]:
    seen: dict[str, Signature | Diagnosis] = {}
    for signature in SIGNATURES:
        if signature.code == _REGISTERED:
            for unlimited in (False, True):
                told = diagnose("ibv_reg_mr failed with error Cannot allocate memory", unlimited)
                if told is not None:
                    seen.setdefault(told.code, told)
        else:
            seen.setdefault(signature.code, signature)
    for code, row in seen.items():
        meaning = f"{row.text}. Do: {row.do}." if row.do else f"{row.text}."
        yield Entry(code, f"log, {row.layer}", re.sub(r"\{\d\}", "…", meaning))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
