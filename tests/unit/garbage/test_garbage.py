"""What nobody uses can be freed, and nothing else; the node's own program on real files, with a docker of the tests."""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automation.gc import table, used_by_state
from spark_core.errors import CommandError, ObservationError
from spark_core.garbage.claims import claim
from spark_core.garbage.unused import Item, free, look_at_unused, plan_unused
from spark_core.transport.base import Result
from tests.local_node import LocalNode
from tests.scripted_transport import ScriptedTransport

OLD, NOW, GOOD, NEXT = (letter * 40 for letter in "abcd")
IMAGES = {f"sha256:{digit * 64}": 1000 + int(digit) for digit in "123"}
DOCKER = """#!{python} -IS
import json, sys
state = json.load(open({state!r}))
words = sys.argv[1:]
if words[0] == "ps":
    print("\\n".join(one["Id"] for one in state["containers"]))
elif words[0] == "inspect":
    print(json.dumps([one for one in state["containers"] if one["Id"] in words]))
elif words[:2] == ["image", "inspect"]:
    if words[-1] not in state["images"]:
        sys.exit("No such image")
    print(words[-1], state["images"][words[-1]])
elif words[:2] == ["image", "rm"]:
    if words[-1] in [one["Image"] for one in state["containers"]]:
        sys.exit("in use")
    del state["images"][words[-1]]
    json.dump(state, open({state!r}, "w"))
"""


class Node:
    """A node with weights, and a docker that says what the test wants."""

    def __init__(self, base: Path) -> None:
        self.root = base / "root"
        self.state = base / "docker.json"
        self.transport = LocalNode("spark-a", programs=base / "programs")
        self.transport.install("docker", DOCKER.format(python=sys.executable, state=str(self.state)))
        self.docker([])
        for revision in (OLD, NOW, GOOD):
            (self.root / "weights" / revision).mkdir(parents=True)
            (self.root / "weights" / revision / "model.safetensors").write_bytes(bytes(100_000))

    def docker(self, containers: list[dict[str, Any]]) -> None:
        self.state.write_text(json.dumps({"containers": containers, "images": IMAGES}))

    def serve(self, revision: str, image: str, health: str = "healthy") -> None:
        """A container of the group that has a revision mounted."""
        labels = {"spark-vllm.stack": "dev", "spark-vllm.group": "main"}
        self.docker(
            [
                {
                    "Id": "1",
                    "Image": image,
                    "Mounts": [{"Source": str(self.root / "weights" / revision)}],
                    "State": {"Health": {"Status": health}},
                    "Config": {"Labels": labels},
                }
            ]
        )

    def claim(self, revision: str, image: str = "sha256:" + "1" * 64, stack: str = "dev") -> None:
        claim(self.transport, str(self.root), stack, "main", {"revision": revision, "image": image}, [image])

    def unused(self, **known: Any) -> list[str]:
        items = look_at_unused(self.transport, str(self.root), **known)
        return sorted(item.name for item in items if not item.used_by)

    def used(self) -> dict[str, str]:
        return {item.name: item.used_by for item in look_at_unused(self.transport, str(self.root)) if item.used_by}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


ONE, TWO, THREE = IMAGES


def test_what_no_stack_and_no_container_uses_can_be_freed(node: Node) -> None:
    node.claim(NOW)
    assert node.unused() == [OLD, GOOD]
    assert node.used() == {NOW: "the settings of dev/main", ONE: "the settings of dev/main"}
    items = [item for item in look_at_unused(node.transport, str(node.root)) if not item.used_by]
    assert all(item.size >= 100_000 for item in items)
    assert free(node.transport, str(node.root), items) == ([OLD, GOOD], [])
    assert [path.name for path in (node.root / "weights").iterdir()] == [NOW]


def test_what_served_until_the_switch_stays_until_something_else_has_served(node: Node) -> None:
    node.claim(GOOD, ONE)
    node.serve(GOOD, ONE)
    node.claim(NOW, TWO)
    assert node.used()[GOOD] == "the last good settings of dev/main"
    # The new ones never serve; the ones after them do not make them good.
    node.serve(NOW, TWO, health="unhealthy")
    node.claim(OLD, THREE)
    node.docker([])
    assert node.used() == {
        OLD: "the settings of dev/main",
        GOOD: "the last good settings of dev/main",
        THREE: "the settings of dev/main",
        ONE: "the last good settings of dev/main",
    }
    assert node.unused() == [NOW, TWO]


def test_the_same_claim_again_changes_nothing(node: Node) -> None:
    node.claim(NOW)
    path = node.root / "stacks" / "dev" / "claims" / "main.json"
    before = path.stat().st_mtime_ns, path.read_text()
    node.serve(NOW, ONE)
    node.claim(NOW)
    assert (path.stat().st_mtime_ns, path.read_text()) == before


def test_what_another_stack_uses_is_kept(node: Node) -> None:
    node.claim(NOW)
    node.claim(OLD, stack="other")
    assert node.used()[OLD] == "the settings of other/main"
    assert node.unused() == [GOOD]


def test_what_is_staged_and_what_a_container_has_mounted_is_kept(node: Node) -> None:
    claim(node.transport, str(node.root), "dev", "main", {"staged": OLD, "staged_image": TWO}, [TWO])
    node.serve(GOOD, THREE)
    assert node.used() == {
        OLD: "what was staged for dev/main",
        GOOD: "a container",
        TWO: "what was staged for dev/main",
    }
    assert node.unused() == [NOW]


def test_what_the_state_of_the_caller_knows_is_kept(node: Node) -> None:
    assert node.unused(revisions={OLD}) == [NOW, GOOD]


def test_a_claim_that_cannot_be_read_protects_everything(node: Node) -> None:
    path = node.root / "stacks" / "dev" / "claims" / "main.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert node.unused() == []
    assert node.used()[OLD] == "perhaps dev/main, whose claim cannot be read"


def test_an_interrupted_copy_can_be_freed_unless_it_goes_on_or_is_wanted(node: Node) -> None:
    weights = node.root / "weights"
    for name in (f"{NEXT}.partial", f"{NEXT}.incoming", f"{OLD}.going"):
        (weights / name).mkdir()
        (weights / name / "model.safetensors").write_bytes(bytes(50_000))
    lock = weights / f"{NEXT}.lock"
    lock.write_text("4711")
    assert {f"{NEXT}.partial", f"{NEXT}.incoming", f"{NEXT}.lock", f"{OLD}.going"} <= set(node.unused())
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert node.used() == {
            f"{NEXT}.incoming": "process 4711, which fills it",
            f"{NEXT}.lock": "process 4711, which fills it",
            f"{NEXT}.partial": "process 4711, which fills it",
        }
        items = [Item("spark-a", f"{NEXT}.partial", "copy", 1, "")]
        assert free(node.transport, str(node.root), items) == ([], [f"{NEXT}.partial"])
    node.claim(NEXT)
    assert node.used()[f"{NEXT}.partial"] == "the settings of dev/main"


def test_what_came_into_use_after_the_list_was_made_is_kept(node: Node) -> None:
    items = look_at_unused(node.transport, str(node.root))
    node.claim(OLD)
    node.serve(GOOD, ONE)
    done, kept = free(node.transport, str(node.root), items)
    assert (done, kept) == ([NOW], [OLD, GOOD])
    assert (node.root / "weights" / OLD / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["..", ".", "", "../stacks", "a/b"])
def test_nothing_outside_the_weights_is_ever_removed(node: Node, name: str) -> None:
    node.claim(NOW)
    done, kept = free(node.transport, str(node.root), [Item("spark-a", name, "revision", 1, "")])
    assert (done, kept) == ([], [name])
    assert (node.root / "stacks" / "dev" / "claims" / "main.json").exists()
    assert (node.root / "weights" / OLD).exists()


def test_a_link_in_the_weights_is_removed_and_what_is_behind_it_stays(node: Node, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    (node.root / "weights" / NEXT).symlink_to(elsewhere)
    done, _ = free(node.transport, str(node.root), [Item("spark-a", NEXT, "revision", 1, "")])
    assert done == [NEXT]
    assert (elsewhere / "file").read_text() == "mine"


def test_an_image_that_is_in_use_is_kept(node: Node) -> None:
    node.claim(NOW, ONE)
    node.claim(NOW, TWO)
    node.serve(NOW, ONE)
    assert node.used()[ONE] == "a container"
    items = [Item("spark-a", image, "image", 1, "") for image in (ONE, THREE)]
    assert free(node.transport, str(node.root), items) == ([THREE], [ONE])


def test_a_docker_that_does_not_answer_is_no_free_weights(node: Node) -> None:
    node.transport.install("docker", "#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2; exit 1\n")
    with pytest.raises(CommandError, match="expected to learn who uses which weights"):
        look_at_unused(node.transport, str(node.root))
    with pytest.raises(CommandError, match="expected to free weights"):
        free(node.transport, str(node.root), [Item("spark-a", OLD, "revision", 1, "")])
    assert (node.root / "weights" / OLD).exists()


def test_rubbish_is_no_answer() -> None:
    transport = ScriptedTransport("spark-a", lambda _: Result(0, "[]", ""))
    with pytest.raises(ObservationError, match="expected a list of weights, found something else"):
        look_at_unused(transport, "/r")


REVISIONS = st.sampled_from([OLD, NOW, GOOD, NEXT])
CLAIMS = st.dictionaries(
    st.sampled_from(["dev/main", "other/main"]),
    st.fixed_dictionaries({}, optional={"revision": REVISIONS, "good": REVISIONS, "staged": REVISIONS}),
)


@given(CLAIMS, st.lists(REVISIONS), st.sets(REVISIONS), st.sets(REVISIONS))
def test_whatever_is_named_by_anybody_is_never_listed_as_unused(
    claims: dict[str, dict[str, str]], mounted: list[str], known: set[str], held: set[str]
) -> None:
    entries = [
        {"name": f"{revision}{ending}", "revision": revision, "bytes": 1, "held": 7 if revision in held else None}
        for revision in (OLD, NOW, GOOD, NEXT)
        for ending in ("", ".partial")
    ]
    containers = [{"image": "", "mounts": [f"/r/weights/{revision}"]} for revision in mounted]
    seen = {"entries": entries, "claims": claims, "containers": containers, "images": []}
    unused = {item.name for item in plan_unused("n", seen, "/r", known) if not item.used_by}
    named = {value for one in claims.values() for value in one.values()} | known | held
    assert not unused & named
    assert not unused & set(mounted)
    assert unused == {
        entry["name"] for entry in entries if entry["revision"] not in named and entry["name"] not in mounted
    }


def test_the_list_for_a_person_names_node_size_and_user() -> None:
    items = [
        Item("spark-a", NOW, "revision", 119 * 10**9, "the settings of dev/main"),
        Item("spark-a", OLD, "revision", 60 * 10**9, ""),
    ]
    first, second = table(items).splitlines()
    assert first.split() == ["spark-a", "60.00", "GB", "weights", OLD, "unused"]
    assert second.endswith("used by the settings of dev/main")
    assert table([]) == "no weights and no images of ours on any node"


def test_a_state_tells_what_is_used_and_what_served_before() -> None:
    resources = [
        {"type": "pulumi-python:dynamic/spark:WeightsCopy", "outputs": {"revision": NOW, "image": ONE}},
        {
            "type": "pulumi-python:dynamic/spark:GoodSettings",
            "outputs": {"revision": GOOD, "image_id": TWO, "before": [{"revision": OLD, "image_id": THREE}]},
        },
        {"type": "pulumi:pulumi:Stack", "outputs": {"model_revision": NEXT}},
    ]
    assert used_by_state({"deployment": {"resources": resources}}) == ({NOW, GOOD, OLD}, {ONE, TWO, THREE})
    assert used_by_state({"deployment": None}) == (set(), set())
