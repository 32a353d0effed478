"""The program and its components under a mocked engine, in preview and in up."""

from __future__ import annotations

import difflib
import json
from functools import cache
from typing import Any

import pytest

from components.stack import DESTROY_VARIABLE
from tests.config_cases import apply_change
from tests.program.rendering import EXPECTED, STACKS, Rendering, render, settings_of

SILENT = {"healthcheck", "tmpfs", "init", "cpuPeriod", "cpuQuota"}
"""Properties whose change the Docker provider takes and does nothing with."""
PER_RANK = {"name", "command", "envs", "labels", "mounts"}
MARKER = "sk-marker-a1b2c3d4"
SECRET = "4dabf18193072939515e22adb298388d"
"""The key by which the engine's protocol marks a secret value."""


@cache
def rendered(stack: str, preview: bool = False) -> Rendering:
    return render(settings_of(stack), stack=stack, preview=preview)


def spark(change: dict[str, Any], **options: Any) -> Rendering:
    return render(apply_change(settings_of("spark"), change), stack="spark", **options)


def words_after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("stack", STACKS)
def test_a_stack_renders_as_expected(stack: str) -> None:
    wanted, found = (EXPECTED / f"{stack}.json").read_text(), rendered(stack).text()
    difference = list(
        difflib.unified_diff(wanted.splitlines(), found.splitlines(), "expected", "found", n=1, lineterm="")
    )
    assert difference == [], "if it is meant: python -m tests.program.rendering"


@pytest.mark.parametrize("preview", [True, False])
@pytest.mark.parametrize("stack", STACKS)
def test_preview_and_up_register_the_same_resources(stack: str, preview: bool) -> None:
    found = rendered(stack, preview)
    assert found.error == ""
    assert sorted(found.by_name) == sorted(rendered(stack).by_name)
    assert len(found.by_name) == len(found.registered)


def test_preview_says_which_recipe_is_used_and_what_the_stack_says_otherwise() -> None:
    found = spark({"groups.main.recipe": "qwen3.5-122b-a10b-fp8-2x"}, preview=True)
    assert found.error == ""
    [line] = [line for line in found.log if "recipe" in line]
    assert line.startswith("groups.main: ")
    assert "settings are from the recipe qwen3.5-122b-a10b-fp8-2x (reported by TechPreacher/" in line
    assert "of the stack instead: model.source, model.served_name, serving.tensor_parallel_size" in line
    head = found.by_name["Container main-spark-a"]["inputs"]["command"]
    assert words_after(head, "--max-num-seqs") == "8"
    assert words_after(head, "--max-model-len") == "32768"


def test_a_recipe_that_there_is_not_ends_the_preview_before_any_node_is_asked() -> None:
    found = spark({"groups.main.recipe": "qwen3.5-122b"}, preview=True)
    assert "groups.main.recipe: expected the name of a recipe, found 'qwen3.5-122b'; did you mean" in found.error
    assert [item["type"] for item in found.registered] == ["pulumi:pulumi:Stack"]


def test_every_node_has_its_own_docker_provider_over_the_pinned_connection() -> None:
    for node, address in (("spark-a", "10.1.230.180"), ("spark-b", "10.1.230.181")):
        provider = rendered("spark").by_name[f"docker {node}-docker"]["inputs"]
        options = json.loads(provider["sshOpts"])
        assert provider["host"] == f"ssh://aurora@{address}:22"
        assert any(option.startswith("KnownHostsCommand=/bin/echo %H ssh-ed25519 ") for option in options)
        assert "ControlMaster=no" in options
        assert not any("/home" in option or option.startswith("/") for option in options)
        container = rendered("spark").by_name[f"Container main-{node}"]
        assert container["provider"] == f"{node}-docker"


@pytest.mark.parametrize("stack", STACKS)
def test_a_node_s_containers_and_volumes_go_with_its_journal(stack: str) -> None:
    for kind in ("Container", "Volume"):
        for item in rendered(stack).of_type(kind):
            node = item["name"].removeprefix("main-").removesuffix("-cache")
            assert item["deleted_with"] == f"{node}-journal", item["name"]


@pytest.mark.parametrize("stack", STACKS)
def test_nothing_changes_a_node_before_its_journal(stack: str) -> None:
    found = rendered(stack)
    names = [item["name"] for item in found.registered]
    for node in ("spark-a", "spark-b"):
        assert found.by_name[f"NodeJournal {node}-journal"]["dependencies"] == []
        for item in found.registered:
            if item["parent"] == node and item["name"] not in (f"{node}-journal", f"{node}-docker"):
                assert names.index(item["name"]) > names.index(f"{node}-journal"), item["name"]


@pytest.mark.parametrize("stack", STACKS)
def test_every_rank_starts_after_fabric_image_weights_and_files(stack: str) -> None:
    found = rendered(stack)
    needed = {
        item["name"]
        for item in found.registered
        if item["type"].rpartition(":")[2]
        in {"FabricLink", "ImageCopy", "ImageCheck", "WeightsCopy", "NodeHost", "CopyToRemote"}
    }
    assert len(needed) >= 8
    ranks = found.of_type("Container")
    assert len(ranks) == 2
    names = [item["name"] for item in found.registered]
    for rank in ranks:
        assert needed <= set(rank["dependencies"]), rank["name"]
        assert all(names.index(name) < names.index(rank["name"]) for name in needed)


@pytest.mark.parametrize("stack", STACKS)
def test_the_image_goes_over_a_fabric_that_is_configured_and_is_looked_into_before_weights_are_copied(
    stack: str,
) -> None:
    found = rendered(stack).by_name
    assert {"fabric-spark-a", "fabric-spark-b"} <= set(found["ImageCopy image-copy"]["dependencies"])
    assert "image-copy" in found["ImageCheck main-image-check"]["dependencies"]
    assert "main-image-check" in found["FabricProof main-fabric-proof"]["dependencies"]


@pytest.mark.parametrize("stack", STACKS)
def test_the_gate_follows_all_containers_and_the_key(stack: str) -> None:
    gate = rendered(stack).by_name["EndpointGate main-gate"]
    assert {"main-spark-a", "main-spark-b", "main-api-key"} <= set(gate["dependencies"])
    assert gate["inputs"]["containers"] == ["main-spark-a-id", "main-spark-b-id"]


@pytest.mark.parametrize("stack", STACKS)
def test_a_container_is_replaced_by_deleting_it_first_and_way_is_made_for_it(stack: str) -> None:
    for item in rendered(stack).of_type("Container"):
        assert item["delete_before_replace"] is True
        assert item["before_create"] == [f"{item['name']}-make-way"]


@pytest.mark.parametrize("stack", STACKS)
def test_no_property_of_a_container_can_change_without_effect(stack: str) -> None:
    for item in rendered(stack).of_type("Container"):
        assert SILENT & set(item["inputs"]) <= set(item["replace_on_changes"])


@pytest.mark.parametrize("stack", STACKS)
def test_the_containers_of_a_group_differ_in_their_rank_s_own_values_only(stack: str) -> None:
    head, worker = (item["inputs"] for item in rendered(stack).of_type("Container"))
    assert {key for key in head.keys() | worker.keys() if head.get(key) != worker.get(key)} <= PER_RANK
    assert {line.split("=")[0] for line in set(head["envs"]) ^ set(worker["envs"])} == {"VLLM_HOST_IP"}
    flags = {"--rank", "--node-address", "--api-key-file"}
    mine, theirs = head["command"], worker["command"]
    assert [w for w in mine if w.startswith("--") and w not in flags] == [
        w for w in theirs if w.startswith("--") and w not in flags
    ]
    assert mine[mine.index("--") :] == theirs[theirs.index("--") :]
    assert words_after(mine, "--deployment") == words_after(theirs, "--deployment")
    assert {label["label"] for label in head["labels"] if label not in worker["labels"]} == {"spark-vllm.rank"}


def test_the_reference_deployment_gives_its_containers_gpu_rdma_and_locked_memory() -> None:
    for item in rendered("spark").of_type("Container"):
        inputs = item["inputs"]
        assert inputs["gpus"] == "all"
        assert [device["hostPath"] for device in inputs["devices"]] == ["/dev/infiniband"]
        assert inputs["capabilities"] == {"adds": ["CAP_IPC_LOCK"]}
        assert inputs["ulimits"] == [{"name": "memlock", "soft": -1, "hard": -1}]
        assert "privileged" not in inputs


def test_the_lab_s_containers_need_no_hardware() -> None:
    for item in rendered("dev").of_type("Container"):
        assert not {"gpus", "capabilities", "privileged"} & set(item["inputs"])
        assert item["inputs"].get("devices", []) == item["inputs"].get("ulimits", []) == []


@pytest.mark.parametrize("stack", STACKS)
def test_a_container_heals_by_itself_and_its_entrypoint_is_ours(stack: str) -> None:
    for item in rendered(stack).of_type("Container"):
        inputs = item["inputs"]
        assert inputs["restart"] == "always"
        assert inputs["mustRun"] is True
        assert inputs["entrypoints"][-1] == "/opt/spark-vllm/runtime.pyz"
        assert inputs["image"].startswith("sha256:")
        assert inputs["destroyGraceSeconds"] == inputs["stopTimeout"] > 0
        assert all(mount["type"] in {"bind", "volume"} for mount in inputs["mounts"])


@pytest.mark.parametrize("preview", [True, False])
def test_the_key_is_a_secret_output_and_in_no_input(preview: bool) -> None:
    found = spark(
        {"groups.main.serving.api_key": "own"},
        secrets={"api_key": MARKER, "sudo_password": MARKER},
        preview=preview,
    )
    assert found.by_name["ApiKey main-api-key"]["secret_outputs"] == ["api_key"]
    assert MARKER not in json.dumps(found.registered)
    assert MARKER not in json.dumps(found.log)


def test_a_private_key_is_given_to_the_command_provider_as_a_secret_only() -> None:
    for item in rendered("dev").of_type("CopyToRemote"):
        connection = item["inputs"]["connection"]
        assert SECRET in connection or "privateKey" not in connection


def test_without_a_key_nothing_asks_for_one_and_the_person_is_warned() -> None:
    found = spark({"groups.main.serving.api_key": "off"})
    assert found.of_type("ApiKey") == []
    assert found.by_name["EndpointGate main-gate"]["inputs"]["key_path"] == ""
    assert "serving.api_key is off: whoever reaches the port can use the model" in found.log
    assert found.outputs["api_key"]["value"] is None


def test_the_outputs_of_a_stack() -> None:
    found = rendered("spark").outputs
    assert set(found) == {"endpoint", "model", "api_key", "nodes", "image_digest", "model_revision"}
    assert found["endpoint"]["value"] == "http://10.1.230.180:30000/v1"
    assert found["model"]["value"] == "Qwen3.5-122B-A10B-FP8"
    assert [node["ranks"] for node in found["nodes"]["value"]] == [{"main": 0}, {"main": 1}]


def test_what_only_up_can_know_is_unknown_in_preview() -> None:
    found = rendered("spark", preview=True).outputs
    assert {key for key, output in found.items() if not output["known"]} == {
        "endpoint",
        "api_key",
        "image_digest",
        "model_revision",
    }


def test_in_preview_a_floating_image_leaves_nothing_unknown_but_the_image_and_the_deployment() -> None:
    preview = rendered("spark", preview=True)
    for item in preview.of_type("Container"):
        up = rendered("spark").by_name[f"Container {item['name']}"]["inputs"]
        different = {key for key in up if item["inputs"].get(key) != up[key]}
        assert different == {"image", "command", "labels"}
        words = zip(item["inputs"]["command"], up["command"], strict=True)
        assert [place for place, (mine, theirs) in enumerate(words) if mine != theirs] == [2]
        assert up["command"][1] == "--deployment"
        labels = zip(item["inputs"]["labels"], up["labels"], strict=True)
        assert [theirs["label"] for mine, theirs in labels if mine != theirs] == ["spark-vllm.deployment"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"node_rot": "/srv"}, "  node_rot: found an unknown key; did you mean 'node_root'?"),
        ({"nodes[1].usr": "x"}, "  nodes[1].usr: found an unknown key; did you mean 'user'?"),
        (
            {"groups.main.serving.prot": 1},
            "  groups.main.serving.prot: found an unknown key; did you mean 'port'?",
        ),
        (
            {"fabric": {"mtu_byte": 9000}},
            "  fabric.mtu_byte: found an unknown key; did you mean 'mtu_bytes'?",
        ),
    ],
    ids=["top", "in a list", "in a group", "in an object"],
)
@pytest.mark.parametrize("preview", [True, False])
def test_a_typo_registers_no_resource_at_all(change: dict[str, Any], line: str, preview: bool) -> None:
    found = spark(change, preview=preview)
    assert [item["type"] for item in found.registered] == ["pulumi:pulumi:Stack"]
    assert found.error.splitlines()[0] == "the stack file has 1 setting that cannot be used; no node was contacted"
    assert found.error.splitlines()[1].startswith(line)
    assert found.outputs == {}


def test_variables_of_other_launchers_are_noted_and_change_nothing() -> None:
    found = render(settings_of("dev"), environment={"VLLM_IMAGE": "other:latest", "MAX_MODEL_LEN": "1"})
    assert sum("is set in the environment and is not read" in line for line in found.log) == 2
    assert found.text() == rendered("dev").text()


def _nobody(number: int) -> dict[str, Any]:
    """An address of this machine at which nothing listens."""
    return {"management_address": f"127.0.0.{number + 2}", "ssh_port": 9}


def test_a_node_without_a_pinned_key_cannot_be_looked_at() -> None:
    nobody = {f"nodes[{n}].{key}": value for n in (0, 1) for key, value in _nobody(n).items()}
    live = {"preflight": "live", "ssh": {"boot_wait_s": 0}} | nobody
    settings = apply_change(settings_of("spark"), live, ["nodes[0].host_key", "nodes[1].host_key"])
    found = render(settings, stack="spark")
    assert [item["type"] for item in found.registered] == ["pulumi:pulumi:Stack"]
    assert [line.partition(": ")[0] for line in found.error.splitlines() if not line.startswith("  ")] == [
        "spark-a, host key (nodes[].host_key)",
        "spark-b, host key (nodes[].host_key)",
    ]


def test_the_program_of_a_destroy_looks_at_no_node_and_reads_no_source() -> None:
    change = {
        "preflight": "live",
        "abandoned_nodes": ["spark-b"],
        "image": {"archive": "/no/such.tar"},
        "groups.main.model.source": "controller:/no/such/folder",
    }
    settings = apply_change(settings_of("spark"), change, ["nodes[0].host_key", "nodes[1].host_key"])
    assert render(settings, stack="spark").error
    found = render(settings, stack="spark", environment={DESTROY_VARIABLE: "true"})
    assert found.error == ""
    assert {item["name"] for item in found.registered} == {item["name"] for item in rendered("spark").registered}


def test_a_patch_that_is_not_in_the_project_is_refused() -> None:
    found = spark({"groups.main.serving.patches": [{"source": "no/such.jinja", "target": "/t"}]})
    assert "serving.patches[0].source: expected the file no/such.jinja in the project folder" in found.error
    assert found.of_type("Container") == []


def test_a_patch_is_copied_to_every_member_and_mounted_read_only() -> None:
    found = spark({"groups.main.serving.patches": [{"source": "pyproject.toml", "target": "/opt/p.toml"}]})
    copies = [item for item in found.of_type("CopyToRemote") if "pyproject.toml" in item["name"]]
    assert [item["parent"] for item in copies] == ["spark-a", "spark-b"]
    for item in found.of_type("Container"):
        [mount] = [mount for mount in item["inputs"]["mounts"] if mount["target"] == "/opt/p.toml"]
        assert mount["readOnly"] is True
        assert mount["source"] in {copy["inputs"]["remotePath"] for copy in copies}


def test_a_node_outside_the_group_is_looked_after_and_runs_no_rank() -> None:
    third = {
        "name": "spark-c",
        "management_address": "10.1.230.182",
        "user": "aurora",
        "host_key": "ssh-ed25519 AAAA",
        "fabric": [{"netdev": "enp1s0f1np1", "address": "192.168.200.14/24"}],
    }
    settings = settings_of("spark")
    found = render({**settings, "nodes": [*settings["nodes"], third]}, stack="spark")
    assert "NodeJournal spark-c-journal" in found.by_name
    assert "FabricLink fabric-spark-c" in found.by_name
    assert len(found.of_type("Container")) == 2
    assert found.by_name["ImageCopy image-copy"]["inputs"]["nodes"] == ["spark-a", "spark-b"]


COMMIT = "0123456789abcdef0123456789abcdef01234567"
OF_THE_HUB = {"groups.main.model.source": f"hf://Qwen/Qwen3.5-122B-A10B-FP8@{COMMIT}"}


def test_a_pinned_model_of_the_hub_lies_in_a_folder_of_its_commit() -> None:
    found = spark(OF_THE_HUB)
    assert found.error == ""
    copy = found.by_name["WeightsCopy main-weights-copy"]["inputs"]
    assert copy["folders"]["spark-a"] == f"/home/aurora/.spark-vllm/weights/{COMMIT}"
    assert copy["commit"] == COMMIT
    assert set(copy["revisions"].values()) == {"as verified"}
    mounts = found.by_name["Container main-spark-b"]["inputs"]["mounts"]
    assert copy["folders"]["spark-b"] in [mount["source"] for mount in mounts]
    # Nobody was asked, so nothing is there to be recorded; the copy asks.
    assert found.of_type("HubRevision") == []


def test_a_floating_model_of_the_hub_needs_somebody_to_be_asked() -> None:
    found = spark({"groups.main.model.source": "hf://Qwen/Qwen3.5-122B-A10B-FP8"})
    assert "groups.main.model.source: found 'main' behind the @, expected a commit" in found.error
    assert found.of_type("WeightsCopy") == []


def test_what_the_state_remembers_is_planned_again_and_kept() -> None:
    files = {"config.json": f"9:{'a' * 40}", "model.safetensors": f"99:{'b' * 64}"}
    outputs = {"group": "main", "source": "hf://org/model", "commit": COMMIT, "files": files}
    state = {"urn:x": {"type": "pulumi-python:dynamic/spark:HubRevision", "outputs": outputs}, "urn:y": {"type": "z"}}
    found = spark({"groups.main.model.source": "hf://org/model"}, state=state)
    assert found.error == ""
    [record] = found.of_type("HubRevision")
    assert record["inputs"]["commit"] == COMMIT
    assert record["inputs"]["files"] == files
    copy = found.by_name["WeightsCopy main-weights-copy"]
    assert copy["inputs"]["listing"] == files
    assert "main-weights-revision" in copy["dependencies"]
    moved = spark({"groups.main.model.source": "hf://org/model@v2"}, state=state)
    assert "found 'v2' behind the @" in moved.error


def test_the_hub_s_token_reaches_no_resource() -> None:
    found = spark(OF_THE_HUB, secrets={"hf_token": MARKER})
    assert found.error == ""
    assert MARKER not in json.dumps(found.registered)
    assert MARKER not in json.dumps([found.log, found.outputs])
