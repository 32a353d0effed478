"""Stands before `pulumi` on the PATH of ./env, changes a few settings where needed, and becomes the real one.

The settings, each only if the person gave no value of their own:

- preview, up, refresh, destroy, import read the stack's settings from a private copy of
  `Pulumi.<stack>.yaml`. The engine writes the salt of the stack's secrets into the file it reads, even when
  the state holds that salt already; in the checkout this would change a committed file, differently for every
  backend. The file itself is read where it holds encrypted values or names another secrets provider, and with
  `--config`, whose purpose is to write that file.
- up and preview do not refresh while the stack file gives nodes up (`abandoned_nodes`): a refresh would ask the Docker
  daemons of these nodes, which are gone, before anything of them could be forgotten.
- destroy neither refreshes nor runs the program. `options: refresh: always` in Pulumi.yaml holds for destroy too, which
  would then ask every node and every Docker daemon first and could never remove what a dead node leaves behind.
- destroy does run the program where the stack file gives nodes up: without it the providers get the settings of the
  last up. `SPARK_VLLM_DESTROY` then tells the program to look at no node (components/stack.py).

- the engine and its plugins collect garbage less often (GOGC).
- an engine that `python -m automation` started is interrupted when that dies (SPARK_VLLM_INTERRUPT_WITH).

It replaces itself with the real program, so process ids, signals and exit codes are the real ones.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

READS_STACK_FILE = frozenset({"up", "update", "preview", "pre", "refresh", "destroy", "down", "dn", "import"})
CONVERGES = frozenset({"up", "update", "preview", "pre"})
DESTROYS = frozenset({"destroy", "down", "dn"})
FOR_SPEED = {"GOGC": "400"}
"""The engine and the plugins that it starts are Go programs of a few seconds; with fewer collections of garbage
they take a tenth less of a processor."""
PR_SET_PDEATHSIG = 1
# Flags whose value is the next word; without this list that word would be taken for the command.
TAKES_VALUE = frozenset({"-C", "--cwd", "-s", "--stack", "--color", "--profiling", "--tracing", "-v", "--verbose"})


class Call(NamedTuple):
    """What is needed of a command line."""

    command: str
    stack: str
    folder: str
    flags: frozenset[str]
    second: str = ""
    """The word behind the command that is no flag, such as the ``history`` of ``stack history``."""


def parse(words: Sequence[str]) -> Call:
    """Read the command, the stack, the folder and the names of all flags from a command line of pulumi."""
    stack, folder = "", ""
    positional: list[str] = []
    flags: set[str] = set()
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            break
        if not word.startswith("-"):
            positional.append(word)
            continue
        name, joined, value = word.partition("=")
        if not name.startswith("--") and len(name) > 2:
            # -sdev, -Cfolder
            name, value, joined = name[:2], name[2:] + joined + value, "="
        flags.add(name)
        if not joined and name in TAKES_VALUE:
            value = left.pop(0) if left else ""
        if name in ("-s", "--stack"):
            stack = value
        elif name in ("-C", "--cwd"):
            folder = value
    command, second = [*positional, "", ""][:2]
    return Call(command, stack, folder, frozenset(flags), second)


def find_project(folder: Path) -> Path | None:
    """The Pulumi.yaml that the engine would find from a folder."""
    here = folder.resolve()
    return next((p for at in (here, *here.parents) if (p := at / "Pulumi.yaml").is_file()), None)


def selected_stack(project: Path, environ: Mapping[str, str]) -> str:
    """The stack that `pulumi stack select` chose for a project, or nothing."""
    import json

    match = re.search(r"^name:\s*['\"]?([A-Za-z0-9_.-]+)", project.read_text("utf-8"), re.MULTILINE)
    if match is None:
        return ""
    home = Path(environ.get("PULUMI_HOME") or Path.home() / ".pulumi")
    key = hashlib.sha1(str(project).encode(), usedforsecurity=False).hexdigest()
    try:
        settings = json.loads((home / "workspaces" / f"{match.group(1)}-{key}-workspace.json").read_text("utf-8"))
        stacks = settings.get("stacks") or {}
        chosen = stacks.get(environ.get("PULUMI_BACKEND_URL", "").rstrip("/")) or settings.get("stack") or ""
    except (OSError, ValueError, AttributeError):
        return ""
    return str(chosen)


def private_copy(stack_file: Path, environ: Mapping[str, str]) -> Path | None:
    """Copy a stack file to where the engine may write to it; None where it should use the file itself."""
    text = stack_file.read_text("utf-8") if stack_file.is_file() else ""
    if re.search(r"^(encryptedkey|secretsprovider):", text, re.MULTILINE):
        return None
    if re.search(r"^encryptionsalt:", text, re.MULTILINE):
        if re.search(r"\bsecure\s*:", text):
            return None
        # Left by a pulumi outside ./env, perhaps for another backend; nothing in the file is encrypted with
        # it.
        text = re.sub(r"^encryptionsalt:.*\n?", "", text, flags=re.MULTILINE)
    where = "\0".join((str(stack_file), environ.get("PULUMI_BACKEND_URL", "")))
    folder = Path(environ["PULUMI_HOME"]) / "stack-files" / hashlib.sha256(where.encode()).hexdigest()[:12]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # One per process: two runs at once must not see each other's half-written file.
    for old in folder.glob(f"{stack_file.stem}.*.yaml"):
        if not _alive(old):
            old.unlink(missing_ok=True)
    for old in folder.glob(f"{stack_file.stem}.*.folder"):
        if not _alive(old):
            for file in old.iterdir():
                file.unlink(missing_ok=True)
            old.rmdir()
    copy = folder / f"{stack_file.stem}.{os.getpid()}.yaml"
    copy.touch(mode=0o600)
    copy.write_text(text, "utf-8")
    return copy


def words_for(words: Sequence[str], environ: Mapping[str, str], cwd: Path) -> list[str]:
    """The words to add to a command line.

    ``stack history --show-secrets``, which the Automation API runs behind every update, takes no ``--config-file`` and
    writes the salt into the stack file of the project folder; it reads nothing else there. It gets a folder of its own.
    """
    call = parse(words)
    wanted = call.command == "stack" and call.second == "history" and "--show-secrets" in call.flags
    if not wanted or "--" in words or "PULUMI_HOME" not in environ:
        return []
    project = find_project(cwd / call.folder)
    stack_file = file_of_stack(call, {k: v for k, v in environ.items() if k != "PULUMI_OPTION_CONFIG_FILE"}, cwd)
    if project is None or stack_file is None:
        return []
    copy = private_copy(stack_file, environ)
    if copy is None:
        return []
    folder = copy.with_suffix(".folder")
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "Pulumi.yaml").write_bytes(project.read_bytes())
    copy.replace(folder / stack_file.name)
    return ["-C", str(folder), "-s", stack_file.name.removeprefix("Pulumi.").removesuffix(".yaml")]


def _alive(copy: Path) -> bool:
    number = copy.name.rsplit(".", 2)[-2]
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return int(number) != os.getpid()


def settings_for(words: Sequence[str], environ: Mapping[str, str], cwd: Path) -> dict[str, str]:
    """The environment variables to add for a command line; none of them replaces one that is set."""
    call = parse(words)
    added: dict[str, str] = {}
    if call.command in DESTROYS and not call.flags & {"-r", "--refresh"} and "PULUMI_OPTION_REFRESH" not in environ:
        added["PULUMI_OPTION_REFRESH"] = "false"
    if call.command not in READS_STACK_FILE:
        return added
    stack_file = file_of_stack(call, environ, cwd)
    if call.command in DESTROYS:
        added["SPARK_VLLM_DESTROY"] = "true"
        if "--run-program" not in call.flags:
            # ./env has the program run first everywhere else. What destroy needs is in the state, and a stack file that
            # is broken by now must not keep anything from being taken away.
            gives_up = stack_file is not None and gives_nodes_up(stack_file)
            added["PULUMI_OPTION_RUN_PROGRAM"] = "true" if gives_up else "false"
    refreshes = not call.flags & {"-r", "--refresh"} and "PULUMI_OPTION_REFRESH" not in environ
    if call.command in CONVERGES and refreshes and stack_file is not None and gives_nodes_up(stack_file):
        added["PULUMI_OPTION_REFRESH"] = "false"
    own_file = call.flags & {"-c", "--config", "--config-file", "--remote"} or "PULUMI_OPTION_CONFIG_FILE" in environ
    if stack_file is not None and not own_file and "PULUMI_HOME" in environ:
        copy = private_copy(stack_file, environ)
        if copy is not None:
            added["PULUMI_OPTION_CONFIG_FILE"] = str(copy)
            # So that the salt comes from the state, and is the same for every run.
            added.setdefault("PULUMI_FALLBACK_TO_STATE_SECRETS_MANAGER", "true")
    return added


def file_of_stack(call: Call, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """The stack file that the engine would read, whether it is there or not."""
    if environ.get("PULUMI_OPTION_CONFIG_FILE"):
        return cwd / environ["PULUMI_OPTION_CONFIG_FILE"]
    project = find_project(cwd / call.folder)
    if project is None:
        return None
    stack = call.stack or environ.get("PULUMI_OPTION_STACK") or environ.get("PULUMI_STACK") or ""
    name = (stack or selected_stack(project, environ)).rsplit("/", 1)[-1]
    return project.with_name(f"Pulumi.{name}.yaml") if name else None


def gives_nodes_up(stack_file: Path) -> bool:
    """Whether a stack file names nodes in `abandoned_nodes`, on the same line or on the lines below."""
    text = stack_file.read_text("utf-8") if stack_file.is_file() else ""
    found = re.search(r"^\s+[\w-]+:abandoned_nodes:[ \t]*(.*)\n?((?:[ \t]+[^:\n]*(?:\n|\Z))*)", text, re.MULTILINE)
    return bool(found and re.search(r"[a-z]", found.group(1).partition("#")[0] + found.group(2)))


def real_pulumi(environ: Mapping[str, str], own_folder: Path) -> str | None:
    """The first pulumi on PATH that is neither this one nor the launcher of another checkout, which would come back."""
    for folder in environ.get("PATH", "").split(os.pathsep):
        candidate = Path(folder) / "pulumi"
        if not os.access(candidate, os.X_OK) or not candidate.is_file():
            continue
        found = candidate.parent.resolve()
        if found != own_folder and not (found.parent / Path(__file__).name).is_file():
            return str(candidate)
    return None


def end_with_parent(parent: str) -> None:
    """Have the kernel interrupt this process, and the engine that it becomes, when the process that asked for it dies.

    Args:
        parent: Process id of the one that asked; nothing is done for any other, or where the kernel is not Linux.
    """
    if sys.platform != "linux" or not parent.isdecimal():
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGINT))
    if os.getppid() != int(parent):  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGINT)


def main() -> int:
    """Become the real pulumi."""
    engine = real_pulumi(os.environ, Path(__file__).resolve().parent / "bin")
    if engine is None:
        print("pulumi: none found on PATH; run `make bootstrap`, then `. ./env`", file=sys.stderr)
        return 127
    words = sys.argv[1:]
    try:
        added = settings_for(words, os.environ, Path.cwd())
        words += words_for(words, os.environ, Path.cwd())
    except OSError as fault:
        print(
            f"pulumi: cannot prepare a private copy of the stack file: {fault}; going on without",
            file=sys.stderr,
        )
        added = {}
    end_with_parent(os.environ.get("SPARK_VLLM_INTERRUPT_WITH", ""))
    sys.stdout.flush()
    # The arguments are the person's own, and no shell reads them.
    os.execve(engine, [engine, *words], {**FOR_SPEED, **os.environ, **added})  # noqa: S606


if __name__ == "__main__":
    sys.exit(main())
