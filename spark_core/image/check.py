"""What is in the serving image, asked in one run of a throw-away container on each node, and what it means.

The container is the rank's own but for its command and its mounts, so that vLLM sees what it will see when it serves.
An answer is kept on the node under the hash of everything that decides it: image, arguments, model and program. Asking
again costs nothing then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spark_core.errors import ObservationError
from spark_core.findings import Finding, Severity
from spark_core.group import LABEL, RUNTIME_TARGET, RankContainer, model_target, serve_arguments
from spark_core.model_facts import parse_config
from spark_core.proof.collective import MEMORY_MIB, probe_arguments
from spark_core.proof.idle import PROBE_LABEL
from spark_core.settings import Settings
from spark_core.transport.base import Command, Transport, script, tail_lines

DEADLINE_S = 300
"""Building vLLM's parser is most of it: 10 s on an idle core, a minute on a loaded one."""
_PROGRAM = Path(__file__).resolve().parents[2] / "spark_runtime" / "image" / "in_image.py"
_RUN = """
cache=$1 keep=$2 name=$3 label=$4 limit=$5; shift 5
if [ -s "$cache" ]; then cat "$cache"; exit; fi
[ "$keep" != cached ] || exit 0
remove() { docker ps -aq --filter "name=^/$name\\$" --filter "label=$label" | xargs -r docker rm -f >/dev/null 2>&1; }
remove || true; trap 'remove || true' EXIT
said=$(timeout -k 5 "$limit" docker run -i --name "$name" --label "$label" "$@" | tail -n 1)
[ "$keep" != yes ] || { mkdir -p "${cache%/*}"; printf '%s\\n' "$said" > "$cache.$$"; mv -f "$cache.$$" "$cache"; }
printf '%s\\n' "$said"
"""


@dataclass(frozen=True)
class CheckSpec:
    """What is asked of the image of a group.

    Attributes:
        image_id: The image.
        arguments: Arguments of ``vllm serve``.
        architectures: The model's architectures; empty where its configuration is not known yet.
        parsers: Kind (``reasoning``, ``tool_call``) to the name of the parser that is declared.
        backend: What distributes the ranks.
        trust_remote_code: Whether the model may bring code of its own.
    """

    image_id: str
    arguments: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    parsers: Mapping[str, str] = field(default_factory=dict)
    backend: str = "ray"
    trust_remote_code: bool = False

    @property
    def orders(self) -> dict[str, Any]:
        """In the words of the program in the container."""
        return {
            "with_vllm": True,
            "arguments": list(self.arguments),
            "architectures": list(self.architectures),
            "parsers": dict(self.parsers),
        }

    def key(self, words: Sequence[str]) -> str:
        """Hash of everything that decides the answer.

        Args:
            words: Arguments of ``docker run``.
        """
        text = json.dumps([self.image_id, self.orders, list(words)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def architectures_of(config: str) -> tuple[str, ...]:
    """The architectures that a model's ``config.json`` names; none if there is no such text yet."""
    try:
        return parse_config(config).architectures if config else ()
    except ObservationError:
        return ()  # told by the look at the model


def check_spec(settings: Settings, group_name: str, image_id: str, architectures: Sequence[str]) -> CheckSpec:
    """What to ask for a group.

    Args:
        architectures: The model's; empty where its configuration is not there yet.
    """
    group = settings.groups[group_name]
    serving = group.serving
    parsers = {"reasoning": serving.reasoning_parser, "tool_call": serving.tool_call_parser}
    return CheckSpec(
        image_id,
        ("--served-model-name", group.model.served_name, *serve_arguments(serving)),
        tuple(architectures),
        {kind: name for kind, name in parsers.items() if name is not None},
        serving.backend,
        serving.trust_remote_code,
    )


def check_words(settings: Settings, group_name: str, container: RankContainer, image_id: str) -> list[str]:
    """Arguments of ``docker run`` for the check in a rank's image."""
    program = (settings.image.python, "-c", _PROGRAM.read_text())
    mounts = tuple(mount for mount in container.mounts if mount.target != RUNTIME_TARGET)
    bare = replace(container, entrypoint=program, mounts=mounts)
    return probe_arguments(bare, image_id, model_target(settings.groups[group_name]), [])


def question_of(
    settings: Settings, group_name: str, architectures: Sequence[str], containers: Sequence[RankContainer]
) -> str:
    """A hash of what is asked, whatever the image: another one means that the image has to be asked again."""
    spec = check_spec(settings, group_name, "", architectures)
    words = [word for one in containers for word in check_words(settings, group_name, one, "")]
    return spec.key(words)


@dataclass(frozen=True)
class CheckReport:
    """What the image said on one node.

    Attributes:
        node: Name of the node.
        answer: What the program told; empty if it did not.
        error: Why not, in words.
    """

    node: str
    answer: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def versions(self) -> dict[str, str]:
        """Each version that must be the same on all nodes."""
        found = {name: str(value) for name, value in (self.answer.get("versions") or {}).items() if value}
        found["python"] = str(self.answer.get("python") or "")
        if self.answer.get("nccl_library"):
            found["nccl"] = str(self.answer["nccl_library"])
        return found


def run_check(
    transport: Transport, root: str, spec: CheckSpec, container: RankContainer, words: Sequence[str], keep: str
) -> CheckReport | None:
    """Ask the image on one node, or read what it said to the very same question before.

    Args:
        root: Our folder on the node.
        words: What :func:`check_words` gave.
        keep: ``yes`` writes the answer down; ``no`` leaves nothing on the node; ``cached`` asks nothing new, and gives
            None if nothing is known.

    Raises:
        UnreachableError: the node does not answer.
    """
    label = f"{PROBE_LABEL}={container.labels[f'{LABEL}.stack']}"
    result = transport.run(_command(root, spec, container, words, keep, label))
    if keep == "cached" and not result.stdout.strip():
        return None
    try:
        answer = json.loads(result.stdout.strip().splitlines()[-1])
        if not isinstance(answer, dict) or "versions" not in answer:
            raise ValueError("another answer")
        return CheckReport(transport.node, answer)
    except (ValueError, IndexError):
        lines = tail_lines(result.stderr, 3)
        how = {137: f"killed, as over its bound of {MEMORY_MIB} MiB", 124: f"no end within {DEADLINE_S} s"}
        said = f": {lines[-1].strip()}" if lines else ""
        return CheckReport(transport.node, error=how.get(result.status, f"exit status {result.status}") + said)


def _command(
    root: str, spec: CheckSpec, container: RankContainer, words: Sequence[str], keep: str, label: str
) -> Command:
    return script(
        _RUN,
        f"{root}/cache/image-check-{spec.key(words)}.json",
        keep,
        f"{container.name}-check",
        label,
        str(DEADLINE_S),
        *words,
        stdin=json.dumps(spec.orders).encode() + b"\n",
        timeout_s=DEADLINE_S + 60,
        purpose="expected an answer from inside the serving image",
    )


def check_findings(group_name: str, spec: CheckSpec, reports: Sequence[CheckReport]) -> list[Finding]:
    """What the answers mean; what is the same on several nodes is told once. Pure."""
    told: dict[tuple[str, str], tuple[list[str], Finding]] = {}
    for report in reports:
        for finding in _of_node(group_name, spec, report):
            told.setdefault((finding.code, finding.what), ([], finding))[0].append(report.node)
    merged = [replace(found, where=f"{', '.join(nodes)} ({found.where})") for nodes, found in told.values()]
    return merged + _between(reports)


def _of_node(group_name: str, spec: CheckSpec, report: CheckReport) -> list[Finding]:
    answer, serving = report.answer, f"groups.{group_name}.serving"
    image = f"image {spec.image_id[:19]}"
    if report.error:
        do = "see that the image has the python of image.python, and that the node has memory for it"
        return [Finding("image-check-failed", "image", f"expected to look into {image}, found: {report.error}", do)]
    versions, found = answer["versions"], list[Finding]()
    ray = versions.get("ray")
    if not versions.get("vllm"):
        found.append(Finding("vllm-missing", "image", f"expected vLLM in {image}, found none", "take a serving image"))
    if spec.backend == "ray" and not (ray and answer.get("ray_command")):
        what = "no Ray" if not ray else f"Ray {ray} without the command `ray`"
        do = "take an image with one pinned Ray (vLLM images stopped shipping it), or set serving.backend: mp"
        found.append(Finding("ray-missing", "image", f"expected Ray in {image}, found {what}", do))
    if spec.backend == "ray" and answer.get("ray_fits") is False:
        what = f"expected Ray {answer['ray_requirement']} for vLLM {versions['vllm']}, found {ray} in {image}"
        found.append(Finding("ray-unsupported", "image", what, "take an image whose Ray and vLLM go together"))
    for name in answer.get("unknown_architectures") or ():
        what = f"expected an architecture that vLLM {versions['vllm']} knows, found {name}"
        do = "take a newer image" + ("; the model's own code may do" if spec.trust_remote_code else "")
        severity: Severity | None = "warn" if spec.trust_remote_code else None
        found.append(Finding("architecture-unknown", f"groups.{group_name}.model", what, do, severity))
    unknown = answer.get("unknown_parsers") or {}
    for kind, why in unknown.items():
        what = f"expected a parser that vLLM {versions['vllm']} knows, found {spec.parsers.get(kind)} ({why})"
        found.append(Finding("parser-unknown", f"{serving}.{kind}_parser", what[:300], "correct its name"))
    refused = str(answer.get("refused_flags") or "")
    if refused and not unknown:  # a parser that is not known is refused by the flags as well
        what = f"expected arguments that vLLM {versions['vllm']} takes, found: {refused}"
        found.append(Finding("flag-refused", serving, what[:300], "correct the settings, or take another image"))
    for path in answer.get("nccl_files") or ():
        what = f"expected no NCCL configuration in {image}, found {path}, which NCCL reads whatever the variables say"
        found.append(Finding("nccl-config-baked", "image", what, "take it out of the image, or patch it to be empty"))
    for name, why in (answer.get("unread") or {}).items():
        found.append(Finding("image-unreadable", "image", f"could not ask {image} about {name}, found: {why}"))
    return found


def _between(reports: Sequence[CheckReport]) -> list[Finding]:
    answered = [report for report in reports if not report.error]
    names = sorted({name for report in answered for name in report.versions})
    found = []
    for name in names:
        values = {report.node: report.versions.get(name, "none") for report in answered}
        if len(set(values.values())) > 1:
            text = ", ".join(f"{node} {value}" for node, value in values.items())
            do = "look at serving.mounts: one image has one version, so something of the hosts lies over it"
            what = f"expected the same {name} on all nodes, found {text}"
            found.append(Finding("image-versions-differ", "image", what, do))
    return found
