"""What reading a file of another tool gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spark_core.foreign_recipes.account import Account, Entry


@dataclass
class Reading:
    """What a file says, in the words of this program.

    Attributes:
        tool: Whose file it is.
        summary: What it is for.
        container: The tool's name of the image, if it can be shown.
        model: Settings of the model.
        serving: Serving settings.
        obstacles: Why it cannot be served here; empty if it can.
        entries: The account.
    """

    tool: str
    account: Account
    summary: str = ""
    container: str = ""
    model: dict[str, str] = field(default_factory=dict)
    serving: dict[str, Any] = field(default_factory=dict)
    obstacles: list[str] = field(default_factory=list)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.account.entries

    @property
    def nodes(self) -> int:
        """Number of nodes, one rank each."""
        return int(self.serving.get("tensor_parallel_size", 1)) * int(self.serving.get("pipeline_parallel_size", 1))
