"""Findings: what a person should know before ``up``, each of a kind with a code of its own.

The catalogue below is the only list of kinds: settings refer to its codes (``severities``), and docs/findings.md is
generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["fail", "warn", "unknown", "ignore"]
"""``fail`` stops preview and up; ``warn`` is shown; ``unknown`` could not be told yet; ``ignore`` is not shown."""


@dataclass(frozen=True)
class FindingKind:
    """A kind of finding.

    Args:
        code: Its name in settings and documents, such as ``mtu-differs``.
        area: What it is about.
        severity: What it is unless the settings say otherwise.
        meaning: What is wrong, in one sentence for the documents.
    """

    code: str
    area: str
    severity: Severity
    meaning: str


def _kinds(area: str, *rows: tuple[str, Severity, str]) -> dict[str, FindingKind]:
    return {code: FindingKind(code, area, severity, meaning) for code, severity, meaning in rows}


KINDS: Mapping[str, FindingKind] = {
    **_kinds(
        "Reaching a node",
        ("connect-failed", "fail", "Nothing answers at the node's ssh address, or it refuses the connection."),
        ("key-exchange-failed", "fail", "sshd answers but ends the connection before the keys are exchanged."),
        ("host-key-unpinned", "fail", "No host key is pinned for the node; a first contact is never trusted."),
        ("host-key-mismatch", "fail", "The node shows another host key than the pinned one."),
        ("authentication-failed", "fail", "sshd refuses every key that was offered."),
        ("session-refused", "fail", "sshd accepts the login and refuses a session (MaxSessions, a wedged node)."),
        (
            "login-shell",
            "fail",
            "The deploy user's login shell prints text of its own without a terminal, or does not run a command.",
        ),
        ("connection-lost", "fail", "The connection to the node broke off, and again each time it was opened anew."),
        ("ssh-configuration", "fail", "The ssh configuration on this machine cannot be used."),
        (
            "sudo-refused",
            "fail",
            "Root is needed for declared settings, and sudo gives it neither freely nor by password.",
        ),
        ("observation-failed", "fail", "The node answers, but a look at it failed as a whole."),
        ("fact-unreadable", "warn", "One fact could not be read from what the node said."),
    ),
    **_kinds(
        "Docker",
        (
            "docker-missing",
            "fail",
            "There is no docker command on the PATH of the deploy user's non-interactive shell.",
        ),
        ("docker-permission", "fail", "The deploy user may not use the Docker socket."),
        ("docker-down", "fail", "The Docker daemon does not answer."),
        ("docker-runtime-missing", "fail", "Neither an nvidia runtime nor CDI gives containers the GPU."),
        (
            "docker-cgroup-driver",
            "warn",
            "With the systemd cgroup driver any daemon-reload takes GPUs from containers.",
        ),
        ("foreign-container", "fail", "A container that is not ours has the name of one of ours."),
        ("launcher-running", "fail", "Another launcher's containers hold the GPU or its memory."),
        (
            "launcher-to-replace",
            "warn",
            "Containers that this stack is to replace (`replaces`) still run; up refuses until they are stopped.",
        ),
    ),
    **_kinds(
        "Machine",
        ("architecture", "fail", "The node's architecture is not what its hardware profile says."),
        ("gpu-missing", "fail", "No GPU answers on a node whose hardware profile has one."),
        ("driver-not-loaded", "fail", "The NVIDIA driver is installed and not loaded in the running kernel."),
        ("driver-next-boot", "warn", "The kernel of the next boot has no NVIDIA module."),
        ("driver-known-bad", "warn", "This driver version is known to hang on GB10."),
        ("gpu-memory-held", "warn", "Another process holds memory of the unified pool."),
        ("disk-space", "fail", "Too little space is free where images or weights go."),
        ("memory-available", "warn", "Much less memory is available than the node has."),
        ("memory-cma", "warn", "CmaFree is above CmaTotal: memory registrations can fail until a reboot."),
        ("clock-skew", "warn", "The clocks of two nodes differ."),
        ("remove-ipc", "warn", "logind removes the shared memory of the deploy user at its last logout."),
        (
            "hostname-loopback",
            "ignore",
            "The node's own name resolves to a loopback address; harmless to ranks, whose interface is always named.",
        ),
        ("memlock-limit", "fail", "Docker gives containers no unlimited locked memory, which RDMA needs."),
        ("port-taken", "fail", "A port that the group needs is held by another program."),
        ("sysctl-missing", "fail", "A declared kernel parameter does not exist on the node."),
        ("program-missing", "fail", "A program that the settings need is not on the node."),
        (
            "tuning-refused",
            "fail",
            "Declared tuning cannot be made on the node as it is: no device, no plain file, or containers of others.",
        ),
        ("setting-contradicted", "fail", "Another stack on the same node declares another value of the same thing."),
        ("clock-cap-elsewhere", "warn", "Another unit of the node sets GPU clocks."),
    ),
    **_kinds(
        "Differences between nodes",
        ("nodes-differ-architecture", "fail", "Nodes of one stack have different architectures."),
        ("nodes-differ-driver", "fail", "Nodes of one stack have different GPUs or drivers."),
        ("nodes-differ-kernel", "warn", "Nodes of one stack run different kernels."),
        ("nodes-differ-docker", "warn", "Nodes of one stack run different versions of Docker."),
        (
            "nodes-differ-image-store",
            "fail",
            "Nodes of one stack keep images in different stores (classic, containerd), where one image has two ids.",
        ),
        ("nodes-differ-release", "warn", "Nodes of one stack have different DGX releases."),
    ),
    **_kinds(
        "Fabric",
        ("fabric-undiscovered", "fail", "No fabric is declared and none could be discovered."),
        ("netdev-missing", "fail", "A declared interface does not exist; an uncabled port has none."),
        ("netdev-is-management", "fail", "A declared fabric interface is the one that ssh comes in by."),
        ("netdev-down", "fail", "A declared interface is down and the fabric is not managed."),
        ("carrier-missing", "fail", "A declared interface has no carrier."),
        ("twin-gone", "fail", "One half of a port is gone, as after a warm reboot; only a power cycle brings it back."),
        ("twin-unaddressed", "warn", "One half of a port carries no address: half of the bandwidth is lost."),
        ("hca-missing", "fail", "A declared RDMA device does not exist."),
        ("hca-inactive", "fail", "A declared RDMA device has no active port."),
        ("gid-missing", "fail", "An RDMA device has no RoCE v2 entry for the interface's IPv4 address."),
        ("rdma-absent", "fail", "The settings require RDMA and a node has no RDMA device for its fabric interfaces."),
        ("address-missing", "fail", "A declared address is not on its interface and the fabric is not managed."),
        ("address-volatile", "warn", "An address is on the interface but in no netplan file: a reboot loses it."),
        ("address-taken", "fail", "Another machine on the fabric has the declared address."),
        ("subnet-shared", "fail", "Two interfaces of one node are on one subnet."),
        ("subnet-alone", "fail", "No other node is on the subnet of a fabric interface."),
        ("subnet-of-management", "fail", "A fabric subnet overlaps the one that the node is reached by."),
        ("mtu-differs", "fail", "An interface's MTU is not the declared one, or differs at the two ends."),
        ("mtu-not-carried", "fail", "Packets of the declared MTU do not arrive in one direction."),
        ("peer-unreachable", "fail", "A peer does not answer over the fabric."),
        ("peer-unproven", "warn", "A peer's packets are filtered, so that nothing could be proven."),
        ("cabling", "fail", "The cables join other ports than the settings say."),
        ("speed-low", "warn", "A link negotiated less than 200 Gb/s."),
        ("netplan-foreign", "fail", "Another file already configures an interface that is to be managed."),
        (
            "bandwidth-degraded",
            "fail",
            "The link moves about 13 Gb/s: a degraded ConnectX start; power-cycle both nodes.",
        ),
        ("bandwidth-low", "warn", "The link moves less than its floor."),
        ("bandwidth-unmeasured", "warn", "The bandwidth between two nodes could not be measured."),
        ("rdma-write-failed", "fail", "A short write of RDMA between two nodes failed."),
        ("transport-sockets", "fail", "A rank chose sockets where the settings require RDMA."),
        ("transport-unproven", "fail", "The log of a rank does not say which transport it chose."),
        ("hca-unused", "warn", "A rank uses fewer RDMA devices than it has: part of the bandwidth is lost."),
        ("traffic-off-fabric", "fail", "The bytes between ranks went over another interface than the fabric's."),
        (
            "collective-failed",
            "fail",
            "The first all-reduce between the ranks in the serving image failed or did not end.",
        ),
        ("proof-not-run", "unknown", "The fabric's proof was not made: a node is busy or has too little memory."),
    ),
    **_kinds(
        "Rules of your own",
        ("policy", "fail", "A rule of the stack's `policy_file` is not met."),
    ),
    **_kinds(
        "Image",
        ("image-missing", "fail", "No node has the image that is named by its local id."),
        ("image-unknown", "unknown", "The image, or what is in it, is not known yet; up checks it before it starts."),
        ("image-differs", "fail", "Two nodes have different images under one name."),
        ("image-architecture", "fail", "The image is for another architecture than the node's."),
        ("image-entrypoint", "warn", "The image has an entrypoint of its own, which the rank supervisor replaces."),
        ("image-user", "warn", "The image's processes are not root's."),
        ("image-environment", "warn", "The image brings variables that steer how ranks talk."),
        ("image-check-failed", "fail", "The container that looks into the image failed or did not end."),
        ("image-unreadable", "warn", "A part of the image could not be asked, since its vLLM keeps it elsewhere."),
        ("image-versions-differ", "fail", "Python, vLLM, Ray, transformers, torch or NCCL differ between nodes."),
        ("vllm-missing", "fail", "The image has no vLLM."),
        ("ray-missing", "fail", "The image has no Ray, which serving.backend needs."),
        ("ray-unsupported", "fail", "The image's Ray is not one that its vLLM works with."),
        ("architecture-unknown", "fail", "The image's vLLM does not know the model's architecture."),
        ("flag-refused", "fail", "The image's vLLM refuses the arguments that the settings give."),
        ("parser-unknown", "fail", "The image's vLLM does not know a reasoning or tool call parser."),
        ("nccl-config-baked", "warn", "An NCCL configuration file lies in the image."),
    ),
    **_kinds(
        "Model",
        ("parallel-size", "fail", "The model's heads or layers cannot be divided over the ranks as the settings say."),
        ("memory-fit", "fail", "Weights, cache and runtime of a rank do not fit into the memory of a node."),
        ("memory-utilization", "warn", "A share of memory at which owners of Sparks ran out of it."),
        ("memory-unknown", "unknown", "The model's size or shape could not be read yet."),
        ("memory-load", "fail", "What the load format takes beside the weights does not fit into a node's memory."),
    ),
    **_kinds(
        "Weights",
        ("weights-space", "fail", "Too little space is free for what a node lacks of the weights."),
        ("revision-floating", "warn", "The model's revision is a branch or tag; it was resolved once and is recorded."),
        ("model-incomplete", "fail", "The hub's revision has no config.json or no weights."),
        ("hub-cache-unusable", "warn", "A node's hub cache has the revision, but not whole or not readable."),
        ("hub-unauthorized", "fail", "The hub asks for a login, refuses the token, or knows no such model."),
        ("hub-gated", "fail", "Access to the model must be asked for on the hub."),
        ("hub-missing", "fail", "The hub has no such model, revision or file."),
        ("hub-limited", "fail", "The hub limits how often it may be asked."),
        ("hub-unreachable", "fail", "The hub does not answer, or what answers is no hub."),
    ),
}
"""Every kind of finding there is, by its code."""


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know.

    Args:
        code: A key of :data:`KINDS`.
        where: Node, and setting if there is one.
        what: Expected and found, in one line.
        do: What to do.
        told_as: Another severity than the kind's own, for the cases where it is milder.
    """

    code: str
    where: str
    what: str
    do: str = ""
    told_as: Severity | None = None

    @property
    def severity(self) -> Severity:
        return self.told_as or KINDS[self.code].severity

    @property
    def line(self) -> str:
        """The text for the person: where, what and code; then what to do."""
        return f"{self.where}: {self.what} [{self.code}]" + (f"\n  do: {self.do}" if self.do else "")


def judge(findings: Sequence[Finding], severities: Mapping[str, Severity]) -> list[Finding]:
    """Findings with the severities of the settings; what is to be ignored is left out."""
    judged = [
        Finding(found.code, found.where, found.what, found.do, severities.get(found.code, found.severity))
        for found in findings
    ]
    return [found for found in judged if found.severity != "ignore"]
