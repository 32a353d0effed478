"""The published JSON schemas of what ``--json`` prints, one for each command; docs/schemas/ is made from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from automation.bench_report import BenchReport
from automation.deployment_report import DeploymentReport
from automation.monitoring import MonitoringReport
from automation.reports import (
    AdoptReport,
    CutoverReport,
    DoctorReport,
    FailureReport,
    GcReport,
    HistoryReport,
    ImportRecipeReport,
    InitReport,
    LifecycleReport,
    LogsReport,
    PinHostsReport,
    RecipesReport,
    RenderReport,
    Report,
    RunReport,
    StacksReport,
    StageReport,
    StatusReport,
    SudoersReport,
    VerifyReport,
)

REPORTS: Mapping[str, type[Report]] = {
    "preview": RunReport,
    "up": RunReport,
    "use": RunReport,
    "rollback": RunReport,
    "refresh": RunReport,
    "destroy": RunReport,
    "drift": RunReport,
    "status": StatusReport,
    "logs": LogsReport,
    "doctor": DoctorReport,
    "stop": LifecycleReport,
    "start": LifecycleReport,
    "maintenance": LifecycleReport,
    "report": DeploymentReport,
    "bench": BenchReport,
    "monitoring": MonitoringReport,
    "render": RenderReport,
    "history": HistoryReport,
    "stacks": StacksReport,
    "cutover": CutoverReport,
    "init": InitReport,
    "recipes": RecipesReport,
    "import-recipe": ImportRecipeReport,
    "stage": StageReport,
    "gc": GcReport,
    "verify": VerifyReport,
    "pin-hosts": PinHostsReport,
    "sudoers": SudoersReport,
    "adopt": AdoptReport,
}


def schema_of(command: str) -> dict[str, Any]:
    """The schema of a command's output: its report, or why there is none."""
    either: Any = REPORTS[command] | FailureReport
    schema = TypeAdapter(either).json_schema(mode="serialization")
    title = f"`python -m automation {command} --json`"
    return {"$schema": GenerateJsonSchema.schema_dialect, "title": title, **schema}
