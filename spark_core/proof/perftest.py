"""``ib_write_bw`` of the perftest package: its output read, and how both ends of a measurement are run.

The command's exit status proves nothing: with a wrong GID index it prints an error and ends with 0 (seen on Sparks).
Only a result row counts. The GID index is looked up on the node at the moment of the run and never kept, since it
differs between machines and drifts (seen: 3, 4, 5, and a move from 3 to 4 within half an hour).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from spark_core.errors import ObservationError
from spark_core.transport.base import Command, parse_sections, script, tail_lines

MESSAGE_BYTES = 65536
"""Two buffers of this size are all the memory that a run registers."""
RUN_S = 1
_LIMIT_S = 12
_MIB_IN_GIGABIT = 2**20 * 8 / 1e9

_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)(?:\s+[\d.]+)*\s*$")
_UNIT = re.compile(r"BW average\[(\S+?)/sec\]")
_DEVICE = re.compile(r"\bDevice\s*:\s*(\w+)")
_GID_INDEX = re.compile(r"GID index\s*:\s*(\d+)")
_NOISE = re.compile(r"^[\s\-*#]*$|WARNING|Conflicting CPU frequency|^\s*(?:local|remote) address|^\s*GID:|^\s*#bytes")

# Both ends look their GID index up, start one ib_write_bw for each device at the same time, and wait for all of them.
# Words for each device: device, own address, port, and for the client the server's address.
_RUN = r"""
role=$1 bytes=$2 seconds=$3 limit=$4; shift 4
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
gid_index() {
  local want hex i
  IFS=. read -r a b c d <<< "$2"
  want=$(printf '0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x' "$a" "$b" "$c" "$d")
  for hex in "/sys/class/infiniband/$1/ports/1/gids/"*; do
    i=${hex##*/}
    [ "$(cat "$hex" 2>/dev/null)" = "$want" ] || continue
    [ "$(cat "/sys/class/infiniband/$1/ports/1/gid_attrs/types/$i" 2>/dev/null)" = "RoCE v2" ] || continue
    echo "$i"; return 0
  done
  return 1
}
measure() {
  local index words end
  index=$(gid_index "$1" "$2") || { echo "no RoCE v2 entry for $2 on $1"; return 0; }
  words=(-d "$1" -x "$index" -p "$3" -s "$bytes" -D "$seconds" -F --report_gbits)
  if [ "$role" = server ]; then timeout -k 2 "$limit" ib_write_bw "${words[@]}" 2>&1 || true; return 0; fi
  end=$((SECONDS + 5))
  while :; do
    timeout -k 2 "$limit" ib_write_bw "${words[@]}" "$4" > "$folder/$1.try" 2>&1 || true
    # The other end may not listen yet.
    grep -q "Couldn't connect" "$folder/$1.try" && [ "$SECONDS" -lt "$end" ] || break
    sleep 0.1
  done
  cat "$folder/$1.try"
}
names=()
while [ $# -gt 0 ]; do
  names+=("$1"); measure "$1" "$2" "$3" "$4" > "$folder/$1.out" & shift 4
done
wait
for name in "${names[@]}"; do echo "=== $name"; cat "$folder/$name.out"; done
"""


@dataclass(frozen=True)
class WriteBandwidth:
    """What one run of ``ib_write_bw`` measured.

    Attributes:
        gbps: Average rate in Gb/s, of the last row if there are several.
        rows: Number of result rows; a run that never ends prints one each second.
        device: The RDMA device, as far as the output names it.
        gid_index: The GID index that was used, as far as the output names it.
    """

    gbps: float
    rows: int
    device: str | None = None
    gid_index: int | None = None


@dataclass(frozen=True)
class Endpoint:
    """One device's part in a measurement.

    Attributes:
        hca: The RDMA device.
        address: The node's own address on it.
        port: TCP port at which the server's end listens.
        server: Address of the server's end.
    """

    hca: str
    address: str
    port: int
    server: str


def parse_write_bandwidth(text: str) -> WriteBandwidth:
    """Read the output of ``ib_write_bw``; rows without their heading are taken as Gb/s.

    Raises:
        ObservationError: there is no result row; the error's evidence is what the command said instead.
    """
    rates = [float(match.group(4)) for line in text.splitlines() if (match := _ROW.match(line))]
    if not rates:
        raise ObservationError(
            "expected a result row of ib_write_bw, found none",
            evidence=[line for line in tail_lines(text) if not _NOISE.search(line)],
        )
    unit = _UNIT.search(text)
    scale = _MIB_IN_GIGABIT if unit and unit.group(1) in ("MB", "MiB") else 1.0
    device, index = _DEVICE.search(text), _GID_INDEX.search(text)
    return WriteBandwidth(
        gbps=rates[-1] * scale,
        rows=len(rates),
        device=device.group(1) if device else None,
        gid_index=int(index.group(1)) if index else None,
    )


def run_write_bandwidth(role: str, endpoints: Sequence[Endpoint]) -> Command:
    """One end of a measurement over several devices at a time: ``server`` receives, ``client`` writes and reports.

    It is over about a second after both ends have met, and after 17 s whatever happens.
    """
    words = [word for end in endpoints for word in (end.hca, end.address, str(end.port), end.server)]
    return script(
        _RUN,
        role,
        str(MESSAGE_BYTES),
        str(RUN_S),
        str(_LIMIT_S),
        *words,
        timeout_s=_LIMIT_S + 15,
        purpose="expected the result of ib_write_bw",
    )


def read_run(text: str, endpoints: Sequence[Endpoint]) -> dict[str, WriteBandwidth]:
    """What the client's end measured, by device.

    Raises:
        ObservationError: a device gave no result.
    """
    sections = parse_sections(text)
    found = {}
    for end in endpoints:
        try:
            found[end.hca] = parse_write_bandwidth(sections.get(end.hca, ""))
        except ObservationError as error:
            seen = error.evidence[-1].strip() if error.evidence else "nothing"
            raise ObservationError(
                f"expected a result of ib_write_bw over {end.hca}, found: {seen}", evidence=error.evidence
            ) from None
    return found
