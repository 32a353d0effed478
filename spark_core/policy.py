"""The owner's own rules: a small Python file that preview and up ask before anything changes.

It defines ``check(settings)``, which is given the validated settings and gives back texts: each says what was expected
and found. A pair of severity and text is milder, such as ``("warn", "expected ...")``.
"""

from __future__ import annotations

import runpy
import traceback
from pathlib import Path
from typing import Any, get_args

from spark_core.errors import SettingsError
from spark_core.findings import Finding, Severity
from spark_core.settings import Settings

_DO = "change the setting, or the rule"


def policy_findings(settings: Settings, project: Path) -> list[Finding]:
    """What the owner's rules find.

    Args:
        project: Folder that the file's path is relative to.

    Raises:
        SettingsError: the file is missing, or it cannot be asked.
    """
    if not settings.policy_file:
        return []
    try:
        check = runpy.run_path(str(project / settings.policy_file)).get("check")
        if not callable(check):
            raise SettingsError([f"policy_file: {settings.policy_file} defines no check(settings)"])
        return [_finding(said, settings.policy_file) for said in check(settings)]
    except SettingsError:
        raise
    except OSError as error:
        found = f"expected the file {settings.policy_file}, found: {error.strerror}"
        raise SettingsError([f"policy_file: {found}"]) from None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{settings.policy_file} raised {type(error).__name__} in line {place.lineno}: {error}"
        raise SettingsError([f"policy_file: {text}"]) from None


def _finding(said: Any, file: str) -> Finding:
    severity: Severity | None = None
    text = said
    if isinstance(said, tuple) and len(said) == 2 and said[0] in get_args(Severity):
        severity, text = said
    if not isinstance(text, str):
        raise SettingsError([f"policy_file: {file} gave {type(said).__name__}, expected a text or (severity, text)"])
    return Finding("policy", file, text, _DO, severity)
