"""Which commands run as root on a node: told by preview, and as a sudoers drop-in for just these.

The list is made by calling the very functions that make the commands, with placeholders for what is only known on the
node (:mod:`spark_core.root_commands`). A stack without tuning, with an unmanaged fabric and without a packet filter has
none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from spark_core import root_commands as root
from spark_core.fabric.privileges import fabric_root_commands
from spark_core.journal import StackFolder
from spark_core.journal.file_state import folder_of_file
from spark_core.settings import NodeSettings, Settings
from spark_core.transport.base import Command
from spark_core.tuning import ManagedFile, place_of, tuning_of
from spark_core.tuning.items import ITEMS

_PROGRAMS = {
    "base64": "/usr/bin/base64",
    "busctl": "/usr/bin/busctl",
    "cat": "/usr/bin/cat",
    "install": "/usr/bin/install",
    "ip": "/usr/sbin/ip",
    "mv": "/usr/bin/mv",
    "netplan": "/usr/sbin/netplan",
    "nft": "/usr/sbin/nft",
    "rm": "/usr/bin/rm",
    "rmdir": "/usr/bin/rmdir",
    "stat": "/usr/bin/stat",
    "swapon": "/usr/sbin/swapon",
    "sysctl": "/usr/sbin/sysctl",
    "systemctl": "/usr/bin/systemctl",
    "systemd-run": "/usr/bin/systemd-run",
}
"""Where the programs are on Ubuntu 24.04 and Debian 12; sudo's own search path finds them there."""

# sudo matches the arguments as one text, so a value must not be able to hold what would be another argument: words of a
# kernel parameter's value are no options and no further assignments.
_WORD = r"(-[0-9]+|[A-Za-z0-9_.:,/+][A-Za-z0-9_.:,/+-]*)"
_PATTERNS = {
    root.VALUE: f"{_WORD}( {_WORD})*",
    root.ADDRESS: r"[0-9.]+/[0-9]+",
    root.NUMBER: r"[0-9]+",
    root.MODE: r"[0-7]+",
    root.OWNER: r"[0-9]+",
    root.WORD: r"[A-Za-z0-9_]+",
    root.FILE: r"[A-Za-z0-9_.-]+",
    root.DEVICE: r"/[A-Za-z0-9_./-]+",
    root.STATE: r"(up|down)",
}
_DONE_TO_FILES = {
    "base64": "read",
    "install": "write",
    "mv": "write",
    "rm": "remove",
    "rmdir": "remove",
    "stat": "read",
}


def root_commands(settings: Settings, stack: str, node: NodeSettings) -> list[Command]:
    """Every command that may run as root on a node, each once, with placeholders."""
    found = [*_host_commands(settings, stack, node), *fabric_root_commands(settings, stack, node)]
    return list({cmd.argv: cmd for cmd in found if cmd.sudo}.values())


def privileged_lines(settings: Settings, stack: str, node: NodeSettings) -> list[str]:
    """What root is needed for on a node, one line each: files first, with what is done to them, then commands."""
    files: dict[str, list[str]] = {}
    others = []
    for cmd in root_commands(settings, stack, node):
        if cmd.argv[0] in _DONE_TO_FILES:
            done = files.setdefault(_for_people(cmd.argv[-1:]).removesuffix(".new"), [])
            if _DONE_TO_FILES[cmd.argv[0]] not in done:
                done.append(_DONE_TO_FILES[cmd.argv[0]])
        else:
            others.append(f"run {_for_people(cmd.argv)}")
    return [*(f"{', '.join(sorted(done))} {path}" for path, done in sorted(files.items())), *others]


def sudoers_text(settings: Settings, stack: str, node: NodeSettings) -> str:
    """A sudoers drop-in that allows the deploy user exactly what the stack needs on a node; for /etc/sudoers.d.

    Regular expressions in arguments need sudo 1.9.10, as Ubuntu 24.04 and Debian 12 have.
    """
    lines = [
        f"# spark-vllm: what {node.user} may run as root on {node.name} for the stack {stack}.",
        "# Check it with `visudo -cf FILE`, install it with mode 0440. Who may write unit files or use Docker can",
        "# become root: this keeps accidents out, not the deploy user. When a setting is taken out, run up first, then",
        "# make this anew.",
    ]
    commands = root_commands(settings, stack, node) if node.user != "root" else []
    return "\n".join([*lines, *(f"{node.user} ALL=(root) NOPASSWD: {sudo_rule(cmd)}" for cmd in commands), ""])


def sudo_rule(cmd: Command) -> str:
    """The path of a command's program and the regular expression that its arguments match."""
    program, *arguments = cmd.argv
    return f"{_PROGRAMS[program]} ^{_pattern(' '.join(arguments))}$"


def allowed_by(rules: Iterable[str], cmd: Command) -> bool:
    """Whether sudo would run a command under rules of :func:`sudo_rule`."""
    for rule in rules:
        path, _, pattern = rule.partition(" ")
        if path == _PROGRAMS.get(cmd.argv[0]) and re.search(pattern, " ".join(cmd.argv[1:])):
            return True
    return False


def _pattern(text: str) -> str:
    parts = re.split(f"({root.OPEN}[a-z]+{root.CLOSE})", text)
    return "".join(
        _PATTERNS[part] if part in _PATTERNS else re.sub(r"([][\\.*^$+?(){}|])", r"\\\1", part) for part in parts
    )


def _for_people(argv: Iterable[str]) -> str:
    return " ".join(argv).replace(root.OPEN, "<").replace(root.CLOSE, ">")


def _host_commands(settings: Settings, stack: str, node: NodeSettings) -> list[Command]:
    place, tuning = place_of(settings, stack, node), tuning_of(settings)
    found: list[Command] = []
    for name in tuning.sysctls:
        found += [root.read_parameter(name), root.set_parameter(name, root.VALUE)]
    for setting, value in tuning.items.items():
        for file in ITEMS[setting].files(place, value):
            found += _file_commands(place.folder, file)
            found += _activation_commands(file)
    for file in tuning.files:
        found += _file_commands(place.folder, file)
    return found


def _file_commands(folder: StackFolder, file: ManagedFile) -> list[Command]:
    if not file.sudo:
        return []
    parent = folder_of_file(file.path)
    return [
        root.look_at_file(file.path),
        root.read_file(file.path),
        *([root.make_folder(parent), root.remove_folder(parent)] if file.makes_folder else []),
        *root.install_file(folder.staging, file.path, b"", mode=root.MODE, owner=root.OWNER, group=root.OWNER),
        root.remove_leftover(file.path),
        root.remove_file(file.path),
    ]


def _activation_commands(file: ManagedFile) -> list[Command]:
    unit = [
        root.start_unit(file.unit),
        root.stop_unit(file.unit),
        root.enable_unit(file.unit),
        root.disable_unit(file.unit),
        root.reload_units(),
    ]
    return {
        "unit": unit,
        "swap": [*unit, root.swap_on(root.DEVICE, None), root.swap_on(root.DEVICE, root.NUMBER)],
        "logind": [root.reread_logind()],
        "docker": [root.restart_docker()],
        "watchdog": [root.set_watchdog(root.NUMBER)],
    }.get(file.activation, [])
