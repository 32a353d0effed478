"""Command line of the lab: ``python -m lab COMMAND``.

Exit codes: 0 done; 1 a step failed; 2 wrong use, or no such lab or host; 3 this machine cannot hold a lab;
`ssh` and `shell` exit as what they ran did.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

from lab import cable, hub, instance, lifecycle, machine, network, pretend, rdma, replaced
from lab.errors import LabError, UnknownHost
from lab.host import Host
from lab.instance import Instance
from lab.lock import locked
from lab.progress import say, step


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--instance",
        default=instance.DEFAULT_INSTANCE,
        metavar="NAME",
        help="which lab; several can run side by side (default: %(default)s)",
    )
    parser = argparse.ArgumentParser(prog="python -m lab", description="Emulated DGX Spark hosts on this machine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, *, host: bool = False) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, parents=[common])
        if host:
            command.add_argument("host", help="such as spark-a")
        return command

    up = add("up", "start the lab, or whatever of it is missing")
    up.add_argument("--hosts", type=int, help="how many hosts (default: 2)")
    up.add_argument("--topology", choices=instance.TOPOLOGIES, help="cabling of three hosts or more (default: switch)")
    up.add_argument("--subnet", help="management network, a private /24 (default: 10.99.0.0/24, or one from the name)")
    up.add_argument("--hosts-only", action="store_true", help="leave out the serving image and the model")
    down = add("down", "stop the lab and remove everything of it")
    down.add_argument("--keep-disks", action="store_true", help="keep the hosts' disks and keys for the next up")
    status = add("status", "say how the hosts are")
    status.add_argument("--json", action="store_true", help="for programs")
    image = add("image", "build the serving image and the model, where the cache has none")
    image.add_argument("--json", action="store_true", help="print the image's facts")
    add("power-cut", "take the power away from a host", host=True)
    add("power-on", "switch a host on and wait until it answers", host=True)
    add("reboot", "restart a host in order and wait until it answers", host=True)
    for name, text in (("cable-pull", "pull a host's fabric cable"), ("cable-plug", "put it back")):
        command = add(name, text, host=True)
        command.add_argument(
            "--twin", action="store_true", help="only the half of the link on the second PCIe connection"
        )
        command.add_argument("--port", type=int, choices=(0, 1), default=cable.FABRIC_PORT, help="default: %(default)s")
    again = add("reimage", "reinstall a host: empty disk, another host key, same name and address", host=True)
    again.add_argument("--keep-known-hosts", action="store_true", help="leave the old key in the lab's known_hosts")
    add("readdress", "give a host another management address; a second time, its first one", host=True)
    show = add("pretend", "let a tool or a file of a host show what is in FILE (- is standard input)", host=True)
    show.add_argument("what", nargs="?", help="name of a tool, or absolute path of a file")
    show.add_argument("file", nargs="?", metavar="FILE")
    show.add_argument("--arguments", metavar="WORDS", help="only when the tool is called with exactly these")
    show.add_argument("--status", type=int, default=0, help="exit status of the tool (default: 0)")
    show.add_argument("--stop", action="store_true", help="let the tool or file show what it is again; or all of them")
    devices = add(
        "rdma", "show RDMA devices in a host's /sys/class, for its fabric interfaces as they are now", host=True
    )
    devices.add_argument("--hide", action="store_true", help="show none again")
    models = add("hub", "serve a folder of models as a hub, where the hosts reach it, until Ctrl-C")
    models.add_argument("folder", type=Path, help="FOLDER/ORG/NAME/BRANCH/… are the models")
    models.add_argument("--port", type=int, default=8090, help="default: %(default)s; the next one gives large files")
    models.add_argument("--token", default="", help="give nothing to who does not show it")
    models.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="MODE[:MATCH[:AT[:TIMES]]]",
        help=f"what goes wrong, for requests with MATCH in their path: {', '.join(hub.MODES)}; may be given again",
    )
    ssh = add("ssh", "run a command on a host over SSH, or log in", host=True)
    ssh.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- command")
    add("shell", "open a root shell inside a host, without SSH", host=True)
    return parser


def _host(options: argparse.Namespace) -> Host:
    lab = instance.require(options.instance)
    lab.index(options.host)
    return Host(lab, options.host)


def _up(options: argparse.Namespace) -> int:
    lab = lifecycle.bring_up(options.instance, hosts=options.hosts, topology=options.topology, subnet=options.subnet)
    if not options.hosts_only:
        from lab.image import serving

        serving.link_into(lab)
    print(f"ssh -F {lab.folder / 'ssh_config'} {lab.hosts[0]}")
    return 0


def _status(options: argparse.Namespace) -> int:
    found = lifecycle.status(options.instance)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"lab {found['instance']}: {found['subnet']}, {found['topology']}, {found['folder']}")
    for host in found["hosts"]:
        word = {True: "yes", False: "no"}
        links = " ".join(name for name, up in host["carrier"].items() if up) or "none"
        print(
            f"{host['name']}  {host['address']}  {host['system']}  ssh {word[host['ssh']]}  "
            f"docker {word[host['docker']]}  links up: {links}"
        )
    return 0


def _set_cable(options: argparse.Namespace, *, pulled: bool) -> int:
    host = _host(options)
    lab: Instance = host.lab
    index = lab.index(host.name)
    if cable.segment_of(lab, index, options.port) is None:
        raise UnknownHost(f"{host.name}: no cable was ever in port {options.port}")
    halves = (1,) if options.twin else (0, 1)
    links = {(index, options.port, half) for half in halves}
    known = cable.unplugged(lab)
    cable.remember_unplugged(lab, known | links if pulled else known - links)
    network.apply_cables(lab)
    names = ", ".join(cable.INTERFACES[options.port, half] for half in halves)
    say(f"{host.name}: {'pulled' if pulled else 'plugged'} {names}")
    return 0


def _power(options: argparse.Namespace) -> int:
    host = _host(options)
    if options.command == "power-cut":
        with step(f"{host.name}: power cut"):
            host.cut_power()
    elif options.command == "power-on":
        with step(f"{host.name}: on"):
            network.ensure_base(host.lab)
            if not host.is_on():
                host.switch_on()
            host.wait_ready()
    else:
        with step(f"{host.name}: rebooted"):
            host.reboot()
    return 0


def _replace(options: argparse.Namespace) -> int:
    host = _host(options)
    with locked(lifecycle.lab_lock(host.lab.name), what=f"lab {host.lab.name}", timeout_s=lifecycle.LOCK_TIMEOUT_S):
        if options.command == "reimage":
            with step(f"{host.name}: reinstalled"):
                replaced.reimage(host.lab, host.name, keep_known_hosts=options.keep_known_hosts)
        else:
            print(replaced.readdress(host.lab, host.name).address(host.name))
    return 0


def _pretend(options: argparse.Namespace) -> int:
    host = _host(options)
    if options.stop:
        pretend.stop(host, options.what or "")
        return 0
    if options.what is None or options.file is None:
        raise UnknownHost("pretend needs a tool or path, and a file with what it is to show; or --stop")
    content = sys.stdin.read() if options.file == "-" else Path(options.file).read_text()
    if options.what.startswith("/"):
        pretend.file(host, options.what, content)
    else:
        words = None if options.arguments is None else shlex.split(options.arguments)
        pretend.tool(host, options.what, content, arguments=words, status=options.status)
    return 0


def _rdma(options: argparse.Namespace) -> int:
    host = _host(options)
    rdma.hide(host) if options.hide else rdma.show(host)
    return 0


def _hub(options: argparse.Namespace) -> int:
    lab = instance.require(options.instance)
    try:
        rules = [hub.parse_rule(text) for text in options.rule]
    except ValueError as error:
        raise UnknownHost(f"--rule: {error}") from None
    served = hub.Hub(options.folder, lab.machine_address, options.port, options.port + 1, options.token, rules)
    with served:
        say(f"hub.endpoint: {served.endpoint}")
        while True:
            time.sleep(3600)


def _ssh(options: argparse.Namespace) -> int:
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    command = _host(options).ssh(*argv)
    os.execvp(command[0], command)  # noqa: S606


def _shell(options: argparse.Namespace) -> int:
    command = _host(options).enter(["/bin/bash", "--login"])
    os.execvp(command[0], command)  # noqa: S606


def _image(options: argparse.Namespace) -> int:
    from lab.image import serving

    facts = serving.ensure()
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        print(facts["archive"])
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.command == "up":
        return _up(options)
    if options.command == "down":
        lifecycle.take_down(options.instance, keep_disks=options.keep_disks)
        return 0
    machine.require_lab_machine()
    if options.command == "status":
        return _status(options)
    if options.command == "image":
        return _image(options)
    if options.command in ("power-cut", "power-on", "reboot"):
        return _power(options)
    if options.command in ("reimage", "readdress"):
        return _replace(options)
    if options.command == "pretend":
        return _pretend(options)
    if options.command == "rdma":
        return _rdma(options)
    if options.command == "hub":
        return _hub(options)
    if options.command == "ssh":
        return _ssh(options)
    if options.command == "shell":
        return _shell(options)
    return _set_cable(options, pulled=options.command == "cable-pull")


def main() -> int:
    """Read the command line, do it, and turn an expected failure into one line."""
    options = build_parser().parse_args()
    # Roots, disks and images are made of files whose modes matter; a strict umask of the caller must not
    # reach them.
    os.umask(0o022)
    try:
        return _run(options)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("lab: interrupted; the next up goes on from here, down removes everything", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
