"""All proofs of a group's fabric in order, each only if the one before it found nothing that fails."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from spark_core.errors import CommandError, ObservationError, SparkError
from spark_core.fabric.environment import rdma_policy
from spark_core.fabric.proof import prove_packets
from spark_core.findings import Finding, judge
from spark_core.group import GroupFiles, model_target, plan_group
from spark_core.proof.bandwidth import PairBandwidth, links_between, measure_pair, pairs_to_measure
from spark_core.proof.collective import DEADLINE_S, probe_arguments, run_collective
from spark_core.proof.idle import COLLECTIVE_NEEDS_MIB, Readiness, look_for_readiness, parse_readiness
from spark_core.proof.rank_proof import collective_findings, transport_of
from spark_core.proof.verdicts import bandwidth_findings
from spark_core.settings import NodeSettings, Settings
from spark_core.transport.base import Transport, run_checked


@dataclass
class FabricReport:
    """What the proofs gave.

    Attributes:
        findings: Everything that a person should know, with the severities of the settings.
        evidence: Lines of the ranks, if the collective failed.
        pairs: What was measured between nodes.
        transports: For each node, what its rank talked over in the collective.
    """

    findings: list[Finding] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    pairs: list[PairBandwidth] = field(default_factory=list)
    transports: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(found.severity == "fail" for found in self.findings)

    def raise_failure(self) -> None:
        """Raise the first finding that fails, with the others and the ranks' own lines as evidence."""
        failures = [found for found in self.findings if found.severity == "fail"]
        if failures:
            first, *others = failures
            raise SparkError(
                f"{first.what} [{first.code}]",
                where=first.where,
                do=first.do,
                evidence=[*(found.line.splitlines()[0] for found in others), *self.evidence],
            )


@dataclass(frozen=True)
class ProofRun:
    """One run of the proofs.

    Attributes:
        settings: The settings, with every interface filled in.
        stack, group: Names.
        image_id: Local id of the serving image.
        files: Runtime and patches of the group on its nodes.
        transports: One per node of the group.
        say: Tells the person one line.
        pause: Waits that many seconds; raises if the run is interrupted.
    """

    settings: Settings
    stack: str
    group: str
    image_id: str
    files: GroupFiles
    transports: Mapping[str, Transport]
    say: Callable[[str], None]
    pause: Callable[[float], None]

    @property
    def nodes(self) -> list[NodeSettings]:
        return [self.settings.node(name) for name in self.settings.groups[self.group].nodes]


def prove_fabric(run: ProofRun) -> FabricReport:
    """Prove the fabric of a group.

    Raises:
        UnreachableError: a node does not answer.
        SparkError: interrupted.
    """
    report = FabricReport()
    # What only warns of the fabric's state was told before anything was changed; here, what the packets showed counts.
    packets = judge(prove_packets(run.transports, run.settings), run.settings.severities)
    _note(run, report, [found for found in packets if found.severity == "fail" or found.code == "peer-unproven"])
    if report.failed or run.settings.fabric.proof == "off":
        return report
    ready = _readiness(run)
    if run.settings.fabric.proof == "idle":
        busy = [f"{node}: {reason}" for node, one in ready.items() for reason in one.busy]
        if busy:
            _note(run, report, [_not_run("bandwidth and collective", "node busy", busy)])
            return report
    _measure(run, report, ready)
    if not report.failed:
        _try_collective(run, report, ready)
    return report


def _measure(run: ProofRun, report: FabricReport, ready: Mapping[str, Readiness]) -> None:
    for first, second in pairs_to_measure(run.nodes):
        run.pause(0)
        try:
            pair, found = measure_pair(first, second, run.transports, ready, rdma=rdma_policy(run.settings))
        except (ObservationError, CommandError) as error:
            _note(run, report, [Finding("bandwidth-unmeasured", error.where or "fabric", error.what, error.do)])
            continue
        report.pairs.append(pair)
        run.say(str(pair))
        findings = bandwidth_findings(run.settings.hardware, pair.rate, run.settings.fabric.minimum_gbps)
        _note(run, report, [*found, *findings])


def _try_collective(run: ProofRun, report: FabricReport, ready: Mapping[str, Readiness]) -> None:
    nodes, settings = run.nodes, run.settings
    small = [
        f"{node}: {one.memory_mib} MiB available, {COLLECTIVE_NEEDS_MIB} needed"
        for node, one in ready.items()
        if one.memory_mib < COLLECTIVE_NEEDS_MIB
    ]
    head = nodes[0]
    if small or not ready[head.name].ports:
        reasons = small or [f"{head.name}: no free port on {head.fabric_address}"]
        _note(run, report, [_not_run("collective", "too little memory" if small else "no port", reasons)])
        return
    plan = plan_group(settings, run.group, run.stack, run.image_id, run.files)
    backend = "nccl" if settings.hardware == "spark" else "gloo"
    arguments = {}
    for container in plan.containers:
        command = [
            *("probe", "--rank", str(container.rank), "--world", str(len(nodes))),
            *("--address", str(head.rank_address), "--port", str(ready[head.name].ports[0])),
            *("--backend", backend, "--rdma", rdma_policy(settings), "--deadline-s", str(DEADLINE_S)),
        ]
        weights = model_target(settings.groups[run.group])
        arguments[container.node] = probe_arguments(container, run.image_id, weights, command)
    run.say(f"proving a collective between {len(nodes)} ranks in the serving image")
    proofs = run_collective(plan.containers, arguments, run.transports, run.pause)
    findings, evidence = collective_findings(settings, nodes, proofs)
    report.evidence += evidence
    _note(run, report, findings)
    if not report.failed:
        for node, proof in zip(nodes, proofs, strict=True):
            netdev = node.control_netdev or node.fabric[0].netdev
            report.transports[node.name] = transport_of(proof, settings.hardware, netdev)
        run.say("ranks talk over " + "; ".join(f"{text} ({name})" for name, text in report.transports.items()))


def _readiness(run: ProofRun) -> dict[str, Readiness]:
    nodes = run.nodes
    wanted = 1 + max((len(links_between(one, other)) for one, other in pairs_to_measure(nodes)), default=0)

    def look(node: NodeSettings) -> Readiness:
        cmd = look_for_readiness(node.fabric_address or "127.0.0.1", wanted)
        text = run_checked(run.transports[node.name], cmd, purpose="expected to learn whether the node is idle")
        return parse_readiness(node.name, text)

    with concurrent.futures.ThreadPoolExecutor(max_workers=len(nodes)) as pool:
        return dict(zip((node.name for node in nodes), pool.map(look, nodes), strict=True))


def _not_run(what: str, why: str, reasons: Sequence[str]) -> Finding:
    return Finding(
        "proof-not-run",
        f"fabric ({what})",
        f"not checked: {why} ({'; '.join(reasons)})",
        "to prove it, stop what uses the nodes, or set fabric.proof to always",
    )


def _note(run: ProofRun, report: FabricReport, findings: Sequence[Finding]) -> None:
    """Keep findings, and tell those that do not fail at once."""
    judged = judge(findings, run.settings.severities)
    report.findings += judged
    for found in judged:
        if found.severity != "fail":
            run.say(found.line)
