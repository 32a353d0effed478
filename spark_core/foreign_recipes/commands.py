"""The command of a file, and the defaults that it is filled with, or made of where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spark_core.foreign_recipes import containers
from spark_core.foreign_recipes.document import Document, place_of
from spark_core.foreign_recipes.flags import Serving
from spark_core.foreign_recipes.result import Reading
from spark_core.foreign_recipes.secrets import looks_secret
from spark_core.foreign_recipes.words import Statement, Word, filled, statements

_SPARKRUN_FLAGS = {
    "tensor_parallel": "--tensor-parallel-size",
    "pipeline_parallel": "--pipeline-parallel-size",
    "data_parallel": "--data-parallel-size",
}
"""Defaults of sparkrun whose flag has another name; of all others it is the name itself."""


def read_command(reading: Reading, serving: Serving, document: Document) -> None:
    """Take in what the command says, or what the tool would make of the defaults."""
    value, account = document.value, reading.account
    raw = value.get("defaults")
    defaults = {key: item for key, item in raw.items() if isinstance(key, str)} if isinstance(raw, Mapping) else {}
    template = value.get("command")
    if template is not None and not isinstance(template, str):
        account.say_below("command", "not understood", "expected one text")
        reading.obstacles.append("its command is no text")
    elif isinstance(template, str) and template.strip():
        _template(reading, serving, template, defaults | {"model": value.get("model")})
        _unused_defaults(reading, serving, defaults)
    elif reading.tool == "eugr":
        account.say_below("command", "not understood", "expected a command")
        reading.obstacles.append("it has no command")
        account.say_below("defaults", "left out", "only a command would use it")
    elif not reading.obstacles:
        account.say_below("command", "information", "none; sparkrun makes one from the defaults")
        for key, item in defaults.items():
            _default_as_flag(serving, key, item, defaults | {"model": value.get("model")})
    serving.settings.setdefault("backend", "ray" if value.get("runtime") == "vllm-ray" else "mp")


def _template(reading: Reading, serving: Serving, template: str, values: Mapping[str, Any]) -> None:
    account = reading.account
    try:
        text, used = filled(template, values)
        found = statements(text)
    except ValueError:
        account.say("command", "not understood", "no shell could read it: a quote is not closed, or it is too long")
        reading.obstacles.append("its command cannot be read")
        return
    for key in sorted(used - {"model"}):
        account.say(place_of("defaults", key), "taken", f"stands for {{{key}}} in the command")
    servers = [statement for statement in found if statement.is_serve and not statement.joined]
    if servers:
        account.say("command", "taken", "word by word, see below")
    else:
        account.say("command", "not understood", "nothing in it starts vllm serve")
        reading.obstacles.append("its command does not start vllm serve")
    for statement in found:
        _statement(serving, statement, statement is (servers[0] if servers else None))


def _statement(serving: Serving, statement: Statement, serves: bool) -> None:
    line = f"command, line {statement.line}"
    for name, word in statement.assignments.items():
        place = f"{line}: {'a variable' if looks_secret(name) else name}"
        containers.take_variable(serving.account, place, name, word, serving.settings)
    if serves:
        serving.read(statement.arguments, lambda name: f"command: {name}")
    elif statement.words:
        what = "joined to the one before by the shell" if statement.joined else "another command"
        count = len(statement.words)
        serving.account.add(line, "left out", f"{what}, of {count} words; no shell of a recipe is run")


def _unused_defaults(reading: Reading, serving: Serving, defaults: Mapping[str, Any]) -> None:
    account = reading.account
    for key, item in defaults.items():
        place = place_of("defaults", key)
        flag = _SPARKRUN_FLAGS.get(key, "--" + key.replace("_", "-"))
        if reading.tool == "sparkrun" and key in ("tensor_parallel", "pipeline_parallel", "served_model_name"):
            known = serving.served_name if key == "served_model_name" else serving.settings.get(f"{key}_size")
            if place in account.unsaid() and not known and isinstance(item, str | int):
                serving.read([Word(flag), Word(str(item))], lambda _name, place=place: place)  # type: ignore[misc]
        account.say_below(place, "left out", "the command does not use it, so neither does the tool")


def _default_as_flag(serving: Serving, key: str, item: Any, values: Mapping[str, Any]) -> None:
    place = place_of("defaults", key)
    flag = _SPARKRUN_FLAGS.get(key, "--" + key.replace("_", "-"))
    say: Callable[[str], str] = lambda _name: place  # noqa: E731
    if isinstance(item, bool):
        if item:
            serving.read([Word(flag)], say)
        else:
            serving.account.say(place, "information", "off, and so is not passed on")
    elif isinstance(item, str | int | float):
        try:
            text = filled(str(item), values)[0]
        except ValueError:
            serving.account.say(place, "not understood", "too long")
            return
        serving.read([Word(f"{flag}={text}", "$" in text or "`" in text)], say)
    else:
        serving.account.say_below(place, "not understood", "expected one value")
