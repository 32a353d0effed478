"""Write the reference pages from the program itself: ``python docs/generate_reference.py [--check]``.

docs/settings.md comes from the settings models (keys, types, defaults, bounds, descriptions), docs/findings.md from the
catalogue of findings, docs/error-index.md from all catalogues of codes, docs/recipes.md from the recipes. With
``--check`` nothing is written; exit code 1 says that a page is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
if str(PROJECT) not in sys.path:
    sys.path.insert(0, str(PROJECT))

from docs import error_index, recipe_pages  # noqa: E402
from spark_core.findings import KINDS  # noqa: E402
from spark_core.settings import SECRET_KEYS, Settings  # noqa: E402
from spark_core.settings.group import INTERFACE_VARIABLES, OWN_FLAGS, ServingSettings  # noqa: E402

PAGE = PROJECT / "docs" / "settings.md"
FINDINGS_PAGE = PROJECT / "docs" / "findings.md"
ERRORS_PAGE = PROJECT / "docs" / "error-index.md"
RECIPES_PAGE = PROJECT / "docs" / "recipes.md"

FINDINGS_INTRODUCTION = """# Findings

<!-- Made by docs/generate_reference.py from spark_core/findings.py. Change that, then run it again. -->

What `pulumi preview` and `pulumi up` say about the nodes before anything changes. Each line ends with the code of its
kind, such as `[mtu-differs]`; below it stands what to do. All findings of a run are told together.

- `fail` stops preview and up, `warn` is shown, `unknown` could not be told yet and is told again by up.
- `severities` in the stack file changes what a kind counts as, or hides it: `nodes-differ-kernel: ignore`.
- Some findings are milder where that is safe: an interface that is down is a warning while `fabric.manage` is true.
"""

INTRODUCTION = """# Settings

<!-- Made by docs/generate_reference.py from the settings models. Change those, then run it again. -->

What a stack file (`Pulumi.<stack>.yaml`) may say. Every key stands under `config:` with the project's name
in front, such as `spark-vllm:nodes`. Unknown keys are refused, at any depth, and every violation is told at
once, before any node is contacted; rules across settings are told with them as far as they can be. No setting is read
from an environment variable.

- In a path, `[]` is one item of a list and `<name>` a name that you choose.
- *required*: there is no default. *not set*: nothing is passed on, and the receiver's own default holds.
- Lists and maps are written as YAML; `pulumi config set --path` changes one value of them.
"""

SECRETS: dict[str, str] = {
    "api_key": "the API key of the endpoint; only if a group's `serving.api_key` is `own`",
    "notify_webhook": "address that notices are posted to as JSON (`event`, `group`, `text`); the next `up` writes it "
    "to the heads, mode 600, and restarts nothing",
    "sudo_password": "the deploy user's sudo password, the same on every node; only where sudo asks for one",
    "hf_token": "the hub's token; only for models that are gated or private, or where the hub limits who has none",
}

RULES = """## Rules across settings

- Names and management addresses of nodes differ. Fabric addresses differ over all nodes.
- With two nodes or more, preview finds what `nodes[].fabric` leaves out; with `preflight: off` every node declares it.
- Two interfaces of one node are on different subnets. The first (primary) interfaces of a group's nodes are
  on the same subnet; with `fabric.topology: ring` each subnet joins two nodes instead.
- `control_address` and `control_netdev` of a node go together. `fabric.take_over` does not name `fabric.netplan_file`.
- Exactly one group is supported so far. Its nodes are nodes of `nodes`, each once.
- `tensor_parallel_size` times `pipeline_parallel_size` is the number of nodes of the group (one GPU each).
- `image` has exactly one of `registry`, `build`, `archive` and `local_id`. A build's files are in the project folder.
- `port`, `ray_port` and `status_port` of a group differ, and none is a port of `monitoring`; its three differ too.
- No two mounts or patches have the same target.
- `enable_auto_tool_choice` needs `tool_call_parser`.
"""


@dataclass(frozen=True)
class Row:
    """One key of a model as the page shows it."""

    path: str
    kind: str
    default: str
    allowed: str
    text: str


@dataclass(frozen=True)
class Section:
    """One model at one place of the stack file."""

    path: str
    text: str
    rows: tuple[Row, ...]


def sections() -> list[Section]:
    """Every model that a stack file can reach, outermost first."""
    schema = Settings.model_json_schema()
    return list(_walk(schema, schema["$defs"], ""))


def setting_paths() -> set[str]:
    """The path of every key, such as ``nodes[].fabric[].netdev``."""
    return {row.path for section in sections() for row in section.rows}


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for section in sections():
        title = f"`{section.path}`" if section.path else "Top level"
        lines = [f"## {title}", "", section.text, ""]
        lines += ["| key | type | default | allowed | meaning |", "| --- | --- | --- | --- | --- |"]
        lines += [f"| `{row.path}` | {row.kind} | {row.default} | {row.allowed} | {row.text} |" for row in section.rows]
        parts.append("\n".join(lines) + "\n")
    parts += [_secrets(), RULES, _reserved()]
    return "\n".join(parts)


def _walk(model: Mapping[str, Any], defs: Mapping[str, Any], prefix: str) -> Iterator[Section]:
    required = model.get("required", ())
    below: list[tuple[str, Mapping[str, Any]]] = []
    rows = []
    for name, field in model["properties"].items():
        path = f"{prefix}{name}"
        nested = _nested(field, defs)
        if nested is not None:
            suffix, inner = nested
            below.append((f"{path}{suffix}", inner))
        rows.append(_row(path, name, field, defs, name in required))
    text = str(model.get("description", "")).replace("\n", " ")
    yield Section(prefix.removesuffix("."), text, tuple(rows))
    for path, inner in below:
        yield from _walk(inner, defs, f"{path}.")


def _nested(field: Mapping[str, Any], defs: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """(what follows the key, the model) if a key holds models."""
    options = [("", option) for option in field.get("anyOf", [field])]
    for suffix, holder in (*options, ("[]", field.get("items", {})), (".<name>", _values(field)[1])):
        if "$ref" in holder:
            return suffix, defs[str(holder["$ref"]).rpartition("/")[2]]
    return None


def _values(field: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(pattern of the keys, what the values are) of a map."""
    for pattern, values in field.get("patternProperties", {}).items():
        return str(pattern), values
    values = field.get("additionalProperties")
    return "", values if isinstance(values, Mapping) else {}


def _row(path: str, name: str, field: Mapping[str, Any], defs: Mapping[str, Any], required: bool) -> Row:
    options = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
    text = str(field.get("description", ""))
    if not text:
        nested = _nested(field, defs)
        if nested is not None:
            text = str(nested[1].get("description", ""))
        elif name in ServingSettings.model_fields:
            text = f"`vllm serve --{name.replace('_', '-')}`"
    return Row(
        path,
        " or ".join(dict.fromkeys(_kind(option) for option in options)),
        "*required*" if required else _default(field),
        _escape("; ".join(filter(None, (_allowed(option) for option in options)))),
        _escape(text.replace("\n", " ")),
    )


def _kind(option: Mapping[str, Any]) -> str:
    if "$ref" in option:
        return "map"
    if option.get("type") == "array":
        items = option.get("items", {})
        return "list of maps" if "$ref" in items else f"list of {_plural(_kind(items))}"
    if option.get("type") == "object":
        values = _values(option)[1]
        inner = "maps" if "$ref" in values else _plural(_kind(values))
        return f"map of {inner}"
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
    return words.get(str(option.get("type")), str(option.get("type")))


def _plural(kind: str) -> str:
    return {"text": "texts", "whole number": "whole numbers", "number": "numbers"}.get(kind, kind)


def _default(field: Mapping[str, Any]) -> str:
    if "default" not in field:
        return "see below" if "$ref" in field else "`{}`"
    value = field["default"]
    return "*not set*" if value is None else f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _allowed(option: Mapping[str, Any]) -> str:
    if "enum" in option or "const" in option:
        return ", ".join(f"`{value}`" for value in option.get("enum", [option.get("const")]))
    words = []
    low, high = option.get("minimum"), option.get("maximum")
    if low is not None and high is not None:
        words.append(f"{low} to {high}")
    elif low is not None:
        words.append(f"at least {low}")
    elif high is not None:
        above = option.get("exclusiveMinimum")
        words.append(f"above {above:g}, at most {high:g}" if above is not None else f"at most {high:g}")
    if option.get("minItems"):
        words.append(f"at least {option['minItems']} item")
    pattern = option.get("pattern") or option.get("items", {}).get("pattern")
    if pattern:
        words.append(f"`{pattern}`")
    names = _values(option)[0]
    if names:
        words.append(f"names: `{names}`")
    return "; ".join(words)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")


def _secrets() -> str:
    lines = [
        "## Secrets",
        "",
        "Top-level keys that are encrypted in the stack file. They stand in no state in clear and on no",
        "command line. Set each with `pulumi config set --secret KEY`; without a value it asks for one.",
        "",
        "| key | meaning |",
        "| --- | --- |",
        *(f"| `{key}` | {SECRETS[key]} |" for key in SECRET_KEYS),
    ]
    return "\n".join(lines) + "\n"


def _reserved() -> str:
    lines = [
        "## What a group may not set by itself",
        "",
        "`serving.extra_args` may hold no flag that a setting means, and none of these, set by the program:",
        "",
        "| flag | follows from |",
        "| --- | --- |",
        *(f"| `{flag}` | {_meaning(setting)} |" for flag, setting in OWN_FLAGS.items()),
        "",
        "`serving.environment` may not hold `NCCL_DEBUG` (`serving.nccl_debug`), a variable that would show",
        "a secret (`VLLM_API_KEY`, `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN`), or these, which are each node's",
        "own and follow from `nodes[].fabric`:",
        "",
        *(f"- `{name}`" for name in INTERFACE_VARIABLES),
    ]
    return "\n".join(lines) + "\n"


def _meaning(setting: str) -> str:
    return setting.strip("()") if setting.startswith("(") else f"`{setting}`"


def render_findings() -> str:
    """The page of findings."""
    parts = [FINDINGS_INTRODUCTION]
    for area in dict.fromkeys(kind.area for kind in KINDS.values()):
        rows = [f"| `{k.code}` | {k.severity} | {_escape(k.meaning)} |" for k in KINDS.values() if k.area == area]
        parts.append(
            "\n".join([f"## {area}", "", "| code | severity | meaning |", "| --- | --- | --- |", *rows]) + "\n"
        )
    return "\n".join(parts)


def pages() -> Mapping[Path, str]:
    """Every generated page with its text."""
    return {
        PAGE: render(),
        FINDINGS_PAGE: render_findings(),
        ERRORS_PAGE: error_index.render(),
        RECIPES_PAGE: recipe_pages.render(),
    }


def main(words: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the reference pages from the program.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is stale")
    options = parser.parse_args(words)
    stale = [(page, text) for page, text in pages().items() if not page.is_file() or page.read_text("utf-8") != text]
    for page, text in stale:
        if options.check:
            sys.stderr.write(f"docs/{page.name} is stale; run: python docs/generate_reference.py\n")
        else:
            page.write_text(text, "utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
