"""HTML and SVG as values: whatever is not markup already is escaped, so that no name and no log line can become any."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_VOID = frozenset({"meta", "line", "rect", "circle", "path", "br"})
# Control characters, and those that turn the direction of text around what follows.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Markup:
    """Text that is markup already. Only :func:`tag`, :func:`joined` and :func:`style_sheet` make it."""

    def __init__(self, text: str) -> None:
        self.text = text


Child = str | int | float | Markup | None


def tag(name: str, /, *children: Child, **attributes: str | int | float | None) -> Markup:
    """An element.

    Args:
        children: Text, which is escaped, or markup; None is left out.
        attributes: ``class_`` stands for ``class``, ``_`` for ``-``; None is left out.
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{words}>" if name in ("meta", "br") else f"<{name}{words}/>")
    return Markup(f"<{name}{words}>{joined(children).text}</{name}>")


def joined(children: Iterable[Child]) -> Markup:
    """Children one after another."""
    return Markup(
        "".join(
            child.text if isinstance(child, Markup) else _escaped(_number(child))
            for child in children
            if child is not None
        )
    )


def style_sheet(text: str) -> Markup:
    """A style sheet of ours; what comes from outside never gets into one."""
    return Markup(f"<style>{text}</style>")


def _escaped(text: str) -> str:
    return html.escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text), quote=True)


def _number(value: str | int | float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
