"""What became of each key and word of a file of another tool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

Verdict = Literal["taken", "changed", "left out", "information", "not understood"]
VERDICTS: tuple[Verdict, ...] = ("taken", "changed", "left out", "not understood", "information")
"""In the order in which a report tells them."""


@dataclass(frozen=True)
class Entry:
    """One place of a file.

    Attributes:
        place: Such as ``defaults.port`` or ``command: --port``.
        verdict: What became of it.
        text: Of what is taken its meaning; of the rest why not. Never a value that was left out.
        setting: The setting that it became, such as ``serving.max_model_len``.
    """

    place: str
    verdict: Verdict
    text: str
    setting: str = ""


class Account:
    """The entries of a file, one for each place; whoever says something first of a place has said it."""

    def __init__(self, leaves: Iterable[str]) -> None:
        self._leaves = tuple(leaves)
        self._entries: dict[str, Entry] = {}

    def say(self, place: str, verdict: Verdict, text: str, setting: str = "") -> None:
        """What became of one place."""
        self._entries.setdefault(place, Entry(place, verdict, text, setting))

    def say_below(self, place: str, verdict: Verdict, text: str) -> None:
        """The same of every value at a place and below it of which nothing was said."""
        for leaf in self.below(place):
            self.say(leaf, verdict, text)

    def below(self, place: str) -> Iterator[str]:
        """Places of the values at a place and below it."""
        return (leaf for leaf in self._leaves if leaf == place or leaf.startswith((f"{place}.", f"{place}[")))

    def add(self, place: str, verdict: Verdict, text: str, setting: str = "") -> None:
        """An entry for something that may stand there several times, such as a flag."""
        count, free = 1, place
        while free in self._entries:
            count += 1
            free = f"{place} ({count})"
        self._entries[free] = Entry(free, verdict, text, setting)

    def revise(self, setting: str, verdict: Verdict, text: str) -> None:
        """What was said to have become a setting has not after all, or became something else."""
        for place, entry in self._entries.items():
            if entry.setting == setting or entry.setting.startswith(f"{setting}."):
                kept = entry.setting if verdict == "changed" else ""
                self._entries[place] = replace(entry, verdict=verdict, text=text, setting=kept)

    def of_setting(self, setting: str) -> Entry | None:
        """The last entry that became a setting."""
        return next((entry for entry in reversed(self._entries.values()) if entry.setting == setting), None)

    def unsaid(self) -> list[str]:
        """Values of which nothing was said yet."""
        return [leaf for leaf in self._leaves if leaf not in self._entries]

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries.values())


def shown(value: Any) -> str:
    """A value that was taken, short enough for a report."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
