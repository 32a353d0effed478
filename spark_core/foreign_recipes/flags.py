"""Arguments of ``vllm serve`` as settings: which one means what, and which ones are left out and why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import ValidationError

from spark_core.fit import HIGH_UTILIZATION
from spark_core.foreign_recipes.account import Account, Verdict, shown
from spark_core.foreign_recipes.secrets import is_secret_name, looks_secret
from spark_core.foreign_recipes.words import Word
from spark_core.settings.group import OWN_FLAGS, LoadFormat, ServingSettings

_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-n": "--nnodes",
    "-r": "--node-rank",
}
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")
_LENGTH_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 1024**2}
"""vLLM's: a small letter is decimal, a capital one binary."""
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
    """

    account: Account
    model: str = ""
    revision: str = ""
    served_name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def read(self, arguments: Sequence[Word], place: Callable[[str], str]) -> None:
        """Take arguments in.

        Args:
            place: From a flag to the place by which it is accounted for.
        """
        positional, flags = split(arguments)
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
        elif flag.long in _RULES:
            _RULES[flag.long](self, flag, place)
        elif flag.long.startswith(("--speculative-config", "--speculative_config")):
            _speculation(self, flag, place)
        elif flag.long in OWN_FLAGS:
            say(place, "left out", f"the program renders it: {OWN_FLAGS[flag.long]}")
        elif flag.long in _FROM_ELSEWHERE:
            say(place, "left out", _FROM_ELSEWHERE[flag.long])
        elif flag.field in ServingSettings.model_fields and flag.field != "extra_args":
            self._setting(flag, place)
        else:
            self._extra(flag, place)

    def _setting(self, flag: Flag, place: str) -> None:
        name = flag.field
        switch = name in _SWITCHES
        value: Any = not flag.long.startswith("--no-") if switch else _typed(name, flag.value)
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

    def _extra(self, flag: Flag, place: str) -> None:
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


def _typed(name: str, text: str) -> Any:
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    if name == "gpu_memory_utilization" and re.fullmatch(r"\d*\.\d+", text):
        return float(text)
    return text


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _left_to_stack(serving: Serving, flag: Flag, place: str) -> None:
    serving.account.add(place, "left out", f"{OWN_FLAGS[flag.long]} is the stack's: clients would lose their endpoint")


def _backend(serving: Serving, flag: Flag, place: str) -> None:
    if flag.value in ("ray", "mp"):
        serving.put("backend", flag.value, place, f"serving.backend: {flag.value}")
    else:
        serving.account.add(place, "not understood", "expected ray or mp")


def _served_name(serving: Serving, flag: Flag, place: str) -> None:
    if not flag.values:
        serving.account.add(place, "not understood", "expected a name behind it")
        return
    serving.served_name = flag.value
    more = "" if len(flag.values) == 1 else f"; of {len(flag.values)} names the first one, others are not served"
    verdict: Verdict = "changed" if more else "taken"
    serving.account.add(place, verdict, f"model.served_name: {shown(flag.value)}{more}", "model.served_name")


def _revision(serving: Serving, flag: Flag, place: str) -> None:
    serving.revision = flag.value
    serving.account.add(place, "taken", "the revision of the weights", "model.source")


def _utilization(serving: Serving, flag: Flag, place: str) -> None:
    value = _typed("gpu_memory_utilization", flag.value)
    if not isinstance(value, int | float) or not 0 < value <= 1 or len(flag.values) != 1:
        _gigabytes(serving, flag, place)
    elif value > HIGH_UTILIZATION:
        text = (
            f"serving.gpu_memory_utilization: {HIGH_UTILIZATION} instead of {value}; others ran out of memory above it"
        )
        serving.put("gpu_memory_utilization", HIGH_UTILIZATION, place, text, changed=True)
    else:
        serving.put("gpu_memory_utilization", value, place, f"serving.gpu_memory_utilization: {value}")


def _gigabytes(serving: Serving, flag: Flag, place: str) -> None:
    text = (
        f"serving.gpu_memory_utilization: {HIGH_UTILIZATION}, since vLLM's own default would be more; what the file "
        "says is no share of the memory"
    )
    serving.put("gpu_memory_utilization", HIGH_UTILIZATION, place, text, changed=True)


def _context(serving: Serving, flag: Flag, place: str) -> None:
    found = _LENGTH.fullmatch(flag.value)
    if found is None or len(flag.values) != 1:
        text = (
            "no number of tokens; vLLM takes the model's own length, and the memory plan is told if that does not fit"
        )
        serving.account.add(place, "left out", text)
        return
    tokens = int(float(found.group(1)) * _LENGTH_UNITS[found.group(2)])
    serving.put("max_model_len", tokens, place, f"serving.max_model_len: {tokens}")


def _load_format(serving: Serving, flag: Flag, place: str) -> None:
    if flag.value in get_args(LoadFormat):
        text = f"serving.load_format: {flag.value}; some formats need a package of the image, and hold files in memory"
        serving.put("load_format", flag.value, place, text)
    else:
        serving.account.add(place, "left out", "no load format that vLLM is known to have")


def _template(serving: Serving, flag: Flag, place: str) -> None:
    if re.fullmatch(r"/[^\x00:]+", flag.value):
        serving.put("chat_template", flag.value, place, "serving.chat_template; the file must be in the image")
    else:
        text = "a file that a mod of the tool brings; bring it with serving.patches and set serving.chat_template"
        serving.account.add(place, "left out", text)


def _data_parallel(serving: Serving, flag: Flag, place: str) -> None:
    if flag.value == "1":
        serving.account.add(place, "information", "one copy of the model, as here always")
    else:
        serving.account.add(place, "not understood", "a group serves one copy of a model")


def _speculation(serving: Serving, flag: Flag, place: str) -> None:
    try:
        wanted = json.loads(flag.value) if "." not in flag.long else {}
    except ValueError:
        wanted = None
    if isinstance(wanted, dict) and "model" not in wanted and "." not in flag.long:
        serving._extra(flag, place)
    else:
        text = "speculation with a second model, which is not on the nodes; it changes the speed only"
        serving.account.add(place, "left out", text)


_RULES: dict[str, Callable[[Serving, Flag, str], None]] = {
    "--model": lambda serving, flag, place: serving.read(flag.values, lambda _name: place),
    "--host": _left_to_stack,
    "--port": _left_to_stack,
    "--uds": _left_to_stack,
    "--distributed-executor-backend": _backend,
    "--served-model-name": _served_name,
    "--revision": _revision,
    "--gpu-memory-utilization": _utilization,
    "--gpu-memory-utilization-gb": _gigabytes,
    "--max-model-len": _context,
    "--load-format": _load_format,
    "--chat-template": _template,
    "--data-parallel-size": _data_parallel,
    "--nccl-debug": lambda serving, flag, place: serving.account.add(place, "not understood", "no flag of vLLM"),
    # Settings of ours whose names are no flags of vLLM.
    **dict.fromkeys(
        (
            "--backend",
            "--environment",
            "--mounts",
            "--patches",
            "--public-host",
            "--ray-port",
            "--ray-token",
            "--status-port",
            "--heal",
            "--shm-size-mib",
            "--object-store-bytes",
            "--join-timeout-s",
            "--start-timeout-s",
            "--canary-timeout-s",
        ),
        lambda serving, flag, place: serving.account.add(place, "not understood", "no flag of vLLM"),
    ),
}
_SWITCHES = frozenset(
    name
    for name, info in ServingSettings.model_fields.items()
    if info.annotation is bool or bool in get_args(info.annotation)
)
_COMPANIONS: dict[str, dict[str, Any]] = {"enable_auto_tool_choice": {"tool_call_parser": "any"}}
"""What a setting needs beside it to be valid; asked of the whole in the end."""
_REMARKS = {"trust_remote_code": "; it runs code that comes with the weights, so pin a revision that you trust"}
