"""Arguments of ``vllm serve`` as settings: which one means what, and which ones are left out and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import ValidationError

from spark_core.foreign_recipes.account import Account, shown
from spark_core.foreign_recipes.flag_rules import RULES, speculation, typed
from spark_core.foreign_recipes.secrets import is_secret_name, looks_secret
from spark_core.foreign_recipes.words import Word
from spark_core.settings.group import OWN_FLAGS, ServingSettings

_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-n": "--nnodes",
    "-r": "--node-rank",
}
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_FROM_ELSEWHERE = {
    "--config": "a file of further arguments, which was not read",
    "--download-dir": "the weights are mounted, nothing is downloaded in containers",
    "--tokenizer": "another model, which the containers would download",
    "--hf-config-path": "another model, which the containers would download",
    "--tokenizer-revision": "the tokenizer comes with the weights",
    "--code-revision": "code comes with the weights, at their revision",
    "--lora-modules": "further weights, which are not on the nodes",
    "--reasoning-parser-plugin": "code of a file that is not in the image; bring it with serving.patches",
    "--tool-parser-plugin": "code of a file that is not in the image; bring it with serving.patches",
}


@dataclass
class Flag:
    """One flag with what follows it."""

    name: str
    values: list[Word]

    @property
    def long(self) -> str:
        """Its long name with hyphens; what follows a dot stays as it is."""
        name = _SHORT.get(self.name, self.name)
        head, dot, rest = name.partition(".")
        return (head.replace("_", "-") if head.startswith("--") else head) + dot + rest

    @property
    def field(self) -> str:
        """The serving setting that it would be."""
        return self.long.removeprefix("--no-").removeprefix("--").replace("-", "_")

    @property
    def value(self) -> str:
        return self.values[0].text if self.values else ""

    @property
    def words(self) -> list[str]:
        return [self.name, *(word.text for word in self.values)]


@dataclass
class Serving:
    """What the arguments of a command come to.

    Attributes:
        account: Where each of them is accounted for.
        model: Name of the model, as far as the arguments say it.
        revision: Its revision.
        served_name: Its name in the API.
        settings: Serving settings.
        drafts: Whether another model is to draft for this one.
    """

    account: Account
    model: str = ""
    revision: str = ""
    served_name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    drafts: bool = False

    def read(self, arguments: Sequence[Word], place: Callable[[str], str]) -> None:
        """Take arguments in.

        Args:
            place: From a flag to the place by which it is accounted for.
        """
        positional, flags = split(arguments)
        self.drafts = any(flag.long == "--speculative-config.model" for flag in flags)
        for word in positional:
            where = place("model")
            if word.expands or word.missing or self.model or looks_secret(word.text):
                self.account.add(where, "not understood", "a word without a flag, which is not the model")
            else:
                self.model = word.text
                self.account.add(where, "taken", "the model that is served", "model.source")
        for flag in flags:
            self.take(flag, place(flag.name if _fit_to_show(flag.name) else "(a flag)"))

    def take(self, flag: Flag, place: str) -> None:
        """Take one flag in, or say why not."""
        say = self.account.add
        secret = is_secret_name(flag.long.lstrip("-").partition(".")[0]) or any(
            looks_secret(word.text) for word in flag.values
        )
        missing = next((word.missing for word in flag.values if word.missing), "")
        if flag.long == "--api-key":
            say(place, "left out", "a key on a command line shows in process lists; serving.api_key makes one")
        elif not _fit_to_show(flag.name):
            say(place, "not understood", "no name that a flag can have")
        elif secret:
            say(place, "left out", "it is or may be a secret; it is not shown and not kept")
        elif missing:
            say(place, "not understood", f"the file has no value for {shown(missing)}")
        elif any(word.expands for word in flag.values):
            say(place, "left out", "a shell would replace something in it, and no shell of a recipe is run")
        elif flag.long in RULES:
            RULES[flag.long](self, flag, place)
        elif flag.long.startswith("--speculative-config"):
            speculation(self, flag, place)
        elif flag.long in OWN_FLAGS:
            say(place, "left out", f"the program renders it: {OWN_FLAGS[flag.long]}")
        elif flag.long in _FROM_ELSEWHERE:
            say(place, "left out", _FROM_ELSEWHERE[flag.long])
        elif flag.field in ServingSettings.model_fields and flag.field != "extra_args":
            self._setting(flag, place)
        else:
            self.pass_on(flag, place)

    def _setting(self, flag: Flag, place: str) -> None:
        name = flag.field
        switch = name in _SWITCHES
        value: Any = not flag.long.startswith("--no-") if switch else typed(name, flag.value)
        if (switch and flag.values) or (not switch and len(flag.values) != 1):
            self.account.add(place, "not understood", f"expected {'no value' if switch else 'one value'} behind it")
            return
        try:
            ServingSettings.model_validate({name: value} | _COMPANIONS.get(name, {}))
        except ValidationError as error:
            text = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
            self.account.add(place, "left out", f"no value that serving.{name} takes: {_lower(text)}")
            return
        self.put(name, value, place, f"serving.{name}: {shown(value)}" + (_REMARKS.get(name, "") if value else ""))

    def put(self, name: str, value: Any, place: str, text: str, *, changed: bool = False) -> None:
        """A serving setting; one that is said twice has the last value, as for vLLM."""
        if name in self.settings:
            self.account.revise(f"serving.{name}", "left out", "said again further on; the last one holds")
        self.settings[name] = value
        self.account.add(place, "changed" if changed else "taken", text, f"serving.{name}")

    def pass_on(self, flag: Flag, place: str) -> None:
        """A flag that is passed on as it is."""
        try:
            ServingSettings.model_validate({"extra_args": flag.words})
        except ValidationError as error:
            text = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
            self.account.add(place, "left out", _lower(text))
            return
        self.settings["extra_args"] = [*self.settings.get("extra_args", ()), *flag.words]
        text = f"serving.extra_args: {shown(' '.join(flag.words))}"
        self.account.add(place, "taken", text, "serving.extra_args")


def split(arguments: Sequence[Word]) -> tuple[list[Word], list[Flag]]:
    """(words without a flag, flags with their values)."""
    positional: list[Word] = []
    flags: list[Flag] = []
    for word in arguments:
        if word.text.startswith("-") and len(word.text) > 1 and not _NUMBER.fullmatch(word.text):
            name, equals, value = word.text.partition("=")
            flags.append(Flag(name, [Word(value, word.expands)] if equals else []))
        elif flags and flags[-1].field not in _SWITCHES:
            flags[-1].values.append(word)
        else:
            positional.append(word)
    return positional, flags


def _fit_to_show(name: str) -> bool:
    return re.fullmatch(r"--?[A-Za-z][a-z0-9_.-]{0,60}", name) is not None


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


_SWITCHES = frozenset(
    name
    for name, info in ServingSettings.model_fields.items()
    if info.annotation is bool or bool in get_args(info.annotation)
)
_COMPANIONS: dict[str, dict[str, Any]] = {"enable_auto_tool_choice": {"tool_call_parser": "any"}}
"""What a setting needs beside it to be valid; asked of the whole in the end."""
_REMARKS = {"trust_remote_code": "; it runs code that comes with the weights, so pin a revision that you trust"}
