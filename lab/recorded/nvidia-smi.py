#!/usr/bin/python3
"""Stand-in for nvidia-smi on an emulated host: prints outputs recorded on a DGX Spark (driver 580.142).

Nothing here is measured on this host. It answers the plain call, -L, --version and --query-gpu with
recorded values; an idle GPU has no compute processes. Commands that set clocks or persistence need root, as on a GPU,
and are only noted in /run/spark-lab/gpu-commands, which a restart forgets as a GPU does. Anything else fails, so that
nobody mistakes it for the real tool.
"""

import os
import sys
from pathlib import Path

RECORDED = "/usr/share/spark-lab/recorded"
COMMANDS = Path("/run/spark-lab/gpu-commands")
SETTING = ("-lgc", "--lock-gpu-clocks", "-rgc", "--reset-gpu-clocks", "-pm", "--persistence-mode")

FIELDS = {
    "index": ("index", "0"),
    "count": ("count", "1"),
    "name": ("name", "NVIDIA GB10"),
    "gpu_name": ("name", "NVIDIA GB10"),
    "uuid": ("uuid", "GPU-11111111-2222-3333-4444-555555555555"),
    "gpu_uuid": ("uuid", "GPU-11111111-2222-3333-4444-555555555555"),
    "pci.bus_id": ("pci.bus_id", "0000000F:01:00.0"),
    "gpu_bus_id": ("pci.bus_id", "0000000F:01:00.0"),
    "driver_version": ("driver_version", "580.142"),
    "compute_cap": ("compute_cap", "12.1"),
    "persistence_mode": ("persistence_mode", "Enabled"),
    "pstate": ("pstate", "P8"),
    "temperature.gpu": ("temperature.gpu", "36"),
    "power.draw": ("power.draw [W]", "4.30 W"),
    "power.limit": ("power.limit [W]", "[N/A]"),
    "utilization.gpu": ("utilization.gpu [%]", "0 %"),
    "utilization.memory": ("utilization.memory [%]", "0 %"),
    "memory.total": ("memory.total [MiB]", "[N/A]"),
    "memory.used": ("memory.used [MiB]", "[N/A]"),
    "memory.free": ("memory.free [MiB]", "[N/A]"),
    "clocks.gr": ("clocks.current.graphics [MHz]", "208 MHz"),
    "clocks.current.graphics": ("clocks.current.graphics [MHz]", "208 MHz"),
    "clocks.sm": ("clocks.current.sm [MHz]", "208 MHz"),
    "clocks.current.sm": ("clocks.current.sm [MHz]", "208 MHz"),
    "clocks.max.gr": ("clocks.max.graphics [MHz]", "3003 MHz"),
    "clocks.max.graphics": ("clocks.max.graphics [MHz]", "3003 MHz"),
    "clocks.max.sm": ("clocks.max.sm [MHz]", "3003 MHz"),
}


def show(name: str) -> int:
    sys.stdout.write(Path(RECORDED, name).read_text())
    return 0


def query(fields: list[str], options: list[str]) -> int:
    unknown = [field for field in fields if field not in FIELDS]
    if unknown:
        print(f'Field "{unknown[0]}" is not a valid field to query.\n')
        return 2
    values = [FIELDS[field][1] for field in fields]
    if "nounits" in options:
        values = [value if value.startswith("[") else value.split(" %")[0] for value in values]
        values = [value.removesuffix(" W").removesuffix(" MHz") for value in values]
    if "noheader" not in options:
        names = [FIELDS[field][0] for field in fields]
        if "nounits" in options:
            names = [name.split(" [")[0] for name in names]
        print(", ".join(names))
    print(", ".join(values))
    return 0


def note(arguments: list[str]) -> int:
    if os.geteuid() != 0:
        print("The current user does not have permission to change this for GPU 0000000F:01:00.0.")
        print("Terminating early due to previous errors.")
        return 4
    COMMANDS.parent.mkdir(exist_ok=True)
    with COMMANDS.open("a") as file:
        file.write(" ".join(arguments) + "\n")
    print("All done.")
    return 0


def main(arguments: list[str]) -> int:
    if not arguments:
        return show("nvidia-smi.txt")
    if any(argument.split("=")[0] in SETTING for argument in arguments):
        return note(arguments)
    if arguments in (["-L"], ["--list-gpus"]):
        return show("nvidia-smi-L.txt")
    if arguments == ["--version"]:
        return show("nvidia-smi-version.txt")
    options: list[str] = []
    fields: list[str] | None = None
    for argument in arguments:
        if argument.startswith("--format="):
            options = argument.partition("=")[2].split(",")
        elif argument.startswith("--query-gpu="):
            fields = argument.partition("=")[2].split(",")
        elif argument.startswith("--query-compute-apps="):
            if "noheader" not in ",".join(arguments):
                print(", ".join(argument.partition("=")[2].split(",")))
            return 0
        elif argument not in ("-i=0", "--id=0"):
            print(f"nvidia-smi: recorded outputs only, no answer for {argument}", file=sys.stderr)
            return 2
    if fields is None:
        print("nvidia-smi: recorded outputs only", file=sys.stderr)
        return 2
    return query(fields, options)


sys.exit(main(sys.argv[1:]))
