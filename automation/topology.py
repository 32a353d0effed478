"""The picture of a deployment: nodes with their ranks, and the fabric's subnets that join them. Pure; inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automation.deployment_report import DeploymentReport, NodePart, SubnetPart
from automation.markup import Markup, tag

NODE_WIDTH, GAP, MARGIN = 300, 28, 8
ROW, TOP, PAD = 19, 64, 14
LANE = 22
"""Distance of two subnets' lines."""
PORT = 18
"""Distance of two interfaces' drops, from the right side of a box."""
_LETTER = 6.7
"""Width of a letter of the text, for cutting what would run over its box."""

GOOD_PHASES = ("serving", "ray_ready")
ON_THE_WAY = ("starting", "waiting_for_ranks", "ray_starting", "joining", "loading", "canary", "backing_off", "ending")


def tone_of(phase: str, rank: int | None) -> str:
    """``good``, ``busy``, ``bad`` or ``quiet``: how a rank's phase is shown."""
    if rank is None or phase == "stopped":
        return "quiet"
    if phase in GOOD_PHASES:
        return "good"
    return "busy" if phase in ON_THE_WAY else "bad"


def picture(report: DeploymentReport, *, tall: bool) -> Markup:
    """The picture.

    Args:
        tall: Whether nodes stand below each other, for a narrow page, instead of beside each other.
    """
    return _tall(report) if tall else _wide(report)


@dataclass(frozen=True)
class _Box:
    node: NodePart
    x: float
    y: float
    height: float

    def port_y(self, place: int) -> float:
        """Middle of the line of an interface."""
        return self.y + self.height - PAD - ROW * (len(self.node.interfaces) - place) + ROW / 2


def _wide(report: DeploymentReport) -> Markup:
    """Nodes in rows of three at most; the subnets run below each row."""
    per_row = min(3, len(report.nodes))
    height = _box_height(report.nodes)
    lanes = len(report.subnets) * LANE
    row_height = height + lanes + 2 * GAP
    width = per_row * (NODE_WIDTH + GAP) - GAP + 2 * MARGIN
    boxes = [
        _Box(node, MARGIN + (index % per_row) * (NODE_WIDTH + GAP), MARGIN + (index // per_row) * row_height, height)
        for index, node in enumerate(report.nodes)
    ]
    rows = -(-len(boxes) // per_row)
    parts: list[Markup] = []
    for row in range(rows):
        inside = boxes[row * per_row : (row + 1) * per_row]
        base = MARGIN + row * row_height + height
        for lane, subnet in enumerate(report.subnets):
            y = base + GAP + lane * LANE
            ports = [(box, place) for box in inside if (place := _port(box.node, subnet)) is not None]
            xs = [box.x + NODE_WIDTH - PAD - PORT * place for box, place in ports]
            if not xs:
                continue
            # A subnet that goes on in another row runs out at the side.
            beyond = [width - 2] if len(ports) < len(subnet.interfaces) and rows > 1 else []
            kind = f"link lane{lane % 4}"
            parts.append(tag("path", d=f"M{min(xs):g} {y:g}H{max([*xs, *beyond]):g}", class_=kind))
            for (box, place), x in zip(ports, xs, strict=True):
                parts.append(tag("path", d=f"M{x:g} {box.port_y(place):g}V{y:g}", class_=kind))
                parts.append(tag("circle", cx=x, cy=box.port_y(place), r=3.5, class_=f"port lane{lane % 4}"))
            parts.append(_text(min(xs) + PORT * (lane % 4 + 1) + 10, y - 5, subnet.network, "small", 150))
    parts = [*[_node_box(report, box) for box in boxes], *parts]
    return _svg(width, MARGIN + rows * row_height - GAP + 6, report, parts)


def _tall(report: DeploymentReport) -> Markup:
    """Nodes below each other; the subnets run down at their right."""
    height = _box_height(report.nodes)
    boxes = [_Box(node, MARGIN, MARGIN + index * (height + GAP), height) for index, node in enumerate(report.nodes)]
    right = MARGIN + NODE_WIDTH
    width = right + 16 + len(report.subnets) * LANE
    parts = [_node_box(report, box) for box in boxes]
    for lane, subnet in enumerate(report.subnets):
        x = right + 16 + lane * LANE
        ys = [box.port_y(place) for box in boxes if (place := _port(box.node, subnet)) is not None]
        kind = f"link lane{lane % 4}"
        parts.append(tag("path", d=f"M{x:g} {min(ys):g}V{max(ys):g}", class_=kind))
        for y in ys:
            parts.append(tag("path", d=f"M{right - 14:g} {y:g}H{x:g}", class_=kind))
            parts.append(tag("circle", cx=right - 14, cy=y, r=3.5, class_=f"port lane{lane % 4}"))
    return _svg(width, MARGIN + len(boxes) * (height + GAP) - GAP + MARGIN, report, parts)


def _node_box(report: DeploymentReport, box: _Box) -> Markup:
    node, x, y = box.node, box.x, box.y
    tone = tone_of(node.phase, node.rank)
    role = "no rank" if node.rank is None else f"rank {node.rank}{', head' if node.rank == 0 else ''}"
    lines = [
        tag("rect", x=x, y=y, width=NODE_WIDTH, height=box.height, rx=8, class_=f"box {tone}"),
        tag("rect", x=x, y=y + 1, width=5, height=box.height - 2, rx=2, class_=f"edge {tone}"),
        _text(x + PAD, y + 24, node.name, "name", NODE_WIDTH - 110),
        _text(x + NODE_WIDTH - PAD, y + 24, role, "role", 120),
        _text(x + PAD, y + 45, _phase_text(node), f"phase {tone}", NODE_WIDTH - 2 * PAD),
    ]
    for index, line in enumerate(_facts(report, node)):
        lines.append(_text(x + PAD, y + TOP + 4 + ROW * index, line, "fact", NODE_WIDTH - 2 * PAD))
    room = NODE_WIDTH - 2 * PAD - PORT * len(node.interfaces)
    for place, interface in enumerate(node.interfaces):
        said = f"{interface.netdev}  {interface.address}"
        lines.append(_text(x + PAD, box.port_y(place) + 4, said, "fact mono", room))
    return tag("g", *lines)


def _phase_text(node: NodePart) -> str:
    if node.rank is None:
        return "serves nothing"
    number = f", generation {node.generation}" if node.generation is not None else ""
    return f"{node.phase.replace('_', ' ')}{number}"


def _facts(report: DeploymentReport, node: NodePart) -> list[str]:
    facts = [f"{node.user}@{node.management_address}"]
    if node.rank is not None:
        facts.append(f"image {short(report.image) or 'not known'}")
        facts.append(f"weights {short(report.weights) or report.weights_source}")
    return facts


def short(digest: str) -> str:
    """A digest or commit as it is shown."""
    bare = digest.removeprefix("sha256:")
    return bare[:12] if len(bare) >= 40 and all(letter in "0123456789abcdef" for letter in bare) else bare


def _box_height(nodes: Sequence[NodePart]) -> float:
    facts = 3 if any(node.rank is not None for node in nodes) else 1
    most = max((len(node.interfaces) for node in nodes), default=0)
    return TOP + ROW * (facts + most) + PAD


def _port(node: NodePart, subnet: SubnetPart) -> int | None:
    netdev = subnet.interfaces.get(node.name)
    return next((place for place, one in enumerate(node.interfaces) if one.netdev == netdev), None)


def _text(x: float, y: float, text: str, kind: str, width: float) -> Markup:
    most = max(4, int(width / _LETTER))
    shown = text if len(text) <= most else text[: most - 1] + "…"
    hover = tag("title", text) if shown != text else None
    anchor = "end" if kind == "role" else None
    return tag("text", shown, hover, x=x, y=y, class_=kind, text_anchor=anchor)


def _svg(width: float, height: float, report: DeploymentReport, parts: Sequence[Markup]) -> Markup:
    said = "; ".join(f"{node.name}: {_phase_text(node)}" for node in report.nodes)
    return tag(
        "svg",
        tag("title", f"Nodes and fabric of {report.stack}"),
        tag("desc", said),
        *parts,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        style=f"max-width:{width * 1.15:g}px",
    )
