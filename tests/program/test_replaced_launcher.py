"""Beside a cluster that a stack is to replace one may look, but not start."""

from __future__ import annotations

import pulumi
import pytest

from components.stack import _as_up_takes, _tell
from spark_core.findings import Finding

FOUND = Finding("launcher-to-replace", "spark-a (replaces)", "expected it to be stopped, found running: vllm_node")
OTHER = Finding("mtu-differs", "spark-a", "expected 9000, found 1500", told_as="warn")


@pytest.mark.parametrize("preview", [True, False])
def test_preview_warns_and_up_refuses(preview: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(pulumi.runtime, "is_dry_run", lambda: preview)
    monkeypatch.setattr(pulumi.log, "warn", warned.append)
    findings = [_as_up_takes(finding) for finding in (FOUND, OTHER)]
    assert findings[1] is OTHER
    if preview:
        _tell(findings)
        assert len(warned) == 2
    else:
        with pytest.raises(pulumi.RunError, match=r"found running: vllm_node \[launcher-to-replace\]"):
            _tell(findings)
