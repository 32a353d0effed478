"""What the ranks of a collective said, and what that means."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_core.fabric.environment import rdma_policy
from spark_core.findings import Finding
from spark_core.proof.nccl_log import NcclTransport, parse_nccl_log
from spark_core.proof.verdicts import TRANSPORT_REMEDY, Rate, bandwidth_findings, transport_findings
from spark_core.settings import NodeSettings, Settings
from spark_core.transport.base import tail_lines

MARK = "spark-vllm-probe: "
"""What the program in the container puts before each of its own lines (spark_runtime/collective_probe.py)."""
ENDED = "ended, since another rank had failed"
"""The error of a rank that was ended only since it would have waited for ever."""
_TAIL_LINES = 6
_NOISE = re.compile(rf"^({re.escape(MARK)}|=== )|hostname of the client socket cannot be retrieved")
_STATUS = re.compile(r"^=== status (\d+)$", re.MULTILINE)
_ERROR_LENGTH = 400
_NO_PLUGIN = "Failed to initialize any NET plugin"
"""With ``NCCL_NET=IB``, which ``rdma: required`` sets, NCCL ends so instead of taking sockets (seen with 2.28.9)."""
_NOT_OWN = (ENDED, "not done within")
"""How an error begins that tells of another rank's failure."""


@dataclass(frozen=True)
class RankProof:
    """What one rank's container said.

    Attributes:
        node: Name of the node.
        rank: Its rank.
        stage: How far it came; empty if it never spoke.
        done: Whether every sum was right.
        error: What went wrong, in the rank's own words.
        missing: Ranks that had not come when it ended.
        status: Exit status of its container, if that was told.
        found: What it measured.
        transport: What NCCL chose; without NCCL nothing.
        tail: Its last lines.
    """

    node: str
    rank: int
    stage: str = ""
    done: bool = False
    error: str = ""
    missing: tuple[int, ...] = ()
    status: int | None = None
    found: Mapping[str, Any] = field(default_factory=dict)
    transport: NcclTransport = field(default_factory=lambda: NcclTransport(None))
    tail: tuple[str, ...] = ()


def parse_probe(node: str, rank: int, text: str) -> RankProof:
    """Read what a rank's container printed; cut or foreign output gives a rank that is not done."""
    stages: list[dict[str, Any]] = []
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                value = json.loads(line.removeprefix(MARK))
            except ValueError:
                continue
            if isinstance(value, dict):
                stages.append(value)
    last = stages[-1] if stages else {}
    tail = [line for line in tail_lines(text, 40) if not _NOISE.search(line)][-_TAIL_LINES:]
    missing = last.get("missing")
    return RankProof(
        node,
        rank,
        str(last.get("stage", "")),
        last.get("done") is True,
        "; ".join(str(last.get("error", "")).splitlines())[:_ERROR_LENGTH],
        tuple(int(one) for one in missing if isinstance(one, int)) if isinstance(missing, list) else (),
        int(status[-1]) if (status := _STATUS.findall(text)) else None,
        last,
        parse_nccl_log(text),
        tuple(tail),
    )


def collective_findings(
    settings: Settings, nodes: Sequence[NodeSettings], proofs: Sequence[RankProof]
) -> tuple[list[Finding], list[str]]:
    """Judge what the ranks said; beside the findings, lines that prove a failure."""
    failed = [proof for proof in proofs if not proof.done]
    if failed:
        without_rdma = [_no_rdma(proof) for proof in failed if _NO_PLUGIN in proof.error]
        return without_rdma or [_failure(proofs, failed)], [line for proof in proofs for line in _evidence(proof)]
    findings: list[Finding] = []
    rdma, hardware = rdma_policy(settings), settings.hardware
    for node, proof in zip(nodes, proofs, strict=True):
        if hardware == "spark":
            used = proof.found.get("hcas") or {}
            given = tuple(str(name) for name in used.get("used", ()))
            findings += transport_findings(rdma, node.name, proof.rank, proof.transport, given)
        if hardware != "spark" or not proof.transport.rdma:
            findings += _off_fabric(node, proof)
    rates = [float(proof.found.get("bus_gbps") or 0) for proof in proofs]
    if hardware == "spark" and all(proof.transport.rdma for proof in proofs) and len(proofs) > 1:
        rails = max(len(proof.transport.hcas) for proof in proofs) or 1
        rate = Rate((nodes[0].name, nodes[-1].name), "all-reduce", rails, min(rates))
        findings += [found for found in bandwidth_findings(hardware, rate) if found.code == "bandwidth-degraded"]
    return findings, []


def transport_of(proof: RankProof, hardware: str, netdev: str) -> str:
    """What a rank talked over, for the outputs."""
    return str(proof.transport) if hardware == "spark" else f"gloo over {netdev}"


def _failure(proofs: Sequence[RankProof], failed: Sequence[RankProof]) -> Finding:
    """One line that names the rank to look at first."""
    expected = f"expected an all-reduce between {len(proofs)} ranks in the serving image"
    absent = sorted({rank for proof in proofs for rank in proof.missing})
    own = [proof for proof in failed if proof.error and not proof.missing and not proof.error.startswith(_NOT_OWN)]
    wordless = [proof for proof in failed if not proof.error]
    dead = [proof for proof in wordless if proof.stage]
    silent = [proof for proof in wordless if not proof.stage]
    if dead:
        first = dead[0]
        killed = " (killed, as over its bound of memory)" if first.status == 137 else ""
        found = f"rank {first.rank} on {first.node} died in {first.stage!r} with exit status {first.status}{killed}"
    elif own:
        first = own[0]
        found = f"rank {first.rank} on {first.node} failed in {first.stage!r}: {first.error}"
    elif silent:
        first = silent[0]
        found = f"rank {first.rank} on {first.node} never started" + (f": {first.tail[-1]}" if first.tail else "")
    elif absent:
        names = {proof.rank: proof for proof in proofs}
        found = "; ".join(
            f"rank {rank} on {names[rank].node} never came (it was in {names[rank].stage!r})"
            for rank in absent
            if rank in names
        )
    else:
        stages = ", ".join(f"rank {proof.rank} on {proof.node} in {proof.stage!r}" for proof in failed)
        found = f"no end: {stages}"
    return Finding(
        "collective-failed",
        "fabric (collective in the serving image)",
        f"{expected}, found: {found}",
        "correct the cause and run up again; no weights were loaded",
    )


def _no_rdma(proof: RankProof) -> Finding:
    reason = f": {proof.transport.reason}" if proof.transport.reason else ""
    return Finding(
        "transport-sockets",
        f"{proof.node}, rank {proof.rank} (fabric.rdma)",
        f"expected RDMA (rdma: required), found that NCCL has no device for it{reason}",
        TRANSPORT_REMEDY,
    )


def _evidence(proof: RankProof) -> list[str]:
    head = f"rank {proof.rank} on {proof.node}: {proof.stage or 'no word'}"
    return [f"{head}{f': {proof.error}' if proof.error else ''}", *(f"  {line}" for line in proof.tail)]


def _off_fabric(node: NodeSettings, proof: RankProof) -> list[Finding]:
    """Whether the bytes of the large all-reduces passed the fabric's interfaces."""
    sent = {str(name): int(size) for name, size in (proof.found.get("sent_bytes") or {}).items()}
    moved = int(proof.found.get("moved_bytes") or 0)
    # On a ring no subnet joins all nodes, and sockets go where the ranks meet.
    fabric = dict.fromkeys([*(interface.netdev for interface in node.fabric), node.control_netdev or ""])
    fabric.pop("", None)
    if sum(sent.get(name, 0) for name in fabric) >= moved / 2:
        return []
    busiest = max(sent, key=lambda name: sent[name], default="none")
    return [
        Finding(
            "traffic-off-fabric",
            f"{node.name}, rank {proof.rank} (fabric)",
            f"expected {moved >> 20} MiB of an all-reduce over {', '.join(fabric)}, found them on {busiest}",
            "check the addresses of the fabric and the routes between them",
        )
    ]
