"""A group as containers: the same for all ranks but for what a node's own interfaces say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_core.errors import SettingsError
from spark_core.fabric.environment import rank_environment
from spark_core.group import (
    GroupFiles,
    GroupPlan,
    RankContainer,
    container_name,
    key_path,
    model_target,
    plan_group,
    public_endpoint,
    serve_arguments,
)
from spark_core.journal import StackFolder
from spark_core.settings import ServingSettings, Settings, read_settings
from spark_runtime import supervisor
from spark_runtime.vllm_server import _OURS
from tests.config_cases import apply_change, load_base

IMAGE = "sha256:" + "a" * 64
FILES = GroupFiles("hash/runtime.pyz", (), {"spark-a": "/models/qwen", "spark-b": "/models/qwen"})
MARKER = "sk-marker-a1b2c3d4"


def settings_with(change: Mapping[str, Any] | None = None) -> Settings:
    return read_settings(apply_change(load_base(), change or {}))


def plan(change: Mapping[str, Any] | None = None, image: str = IMAGE, files: GroupFiles = FILES) -> GroupPlan:
    return plan_group(settings_with(change), "main", "dev", image, files)


def environment_of(container: RankContainer) -> dict[str, str]:
    return dict(line.split("=", 1) for line in container.environment)


def after(words: tuple[str, ...], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_there_is_one_container_per_node_head_first() -> None:
    found = plan({"groups.main.nodes": ["spark-b", "spark-a"]}).containers
    assert [(c.rank, c.node, c.name) for c in found] == [
        (0, "spark-b", "spark-vllm-dev-main-rank0"),
        (1, "spark-a", "spark-vllm-dev-main-rank1"),
    ]


def test_the_entrypoint_is_the_supervisor_and_never_the_image_s_own() -> None:
    for container in plan({"image.python": "/opt/venv/bin/python3"}).containers:
        assert container.entrypoint == ("/opt/venv/bin/python3", "/opt/spark-vllm/runtime.pyz")
        assert container.command[:3] == (
            "run",
            "--deployment",
            plan({"image.python": "/opt/venv/bin/python3"}).deployment,
        )


def test_ranks_differ_only_in_what_follows_from_their_node() -> None:
    head, worker = plan().containers
    different = {key for key in environment_of(head) if environment_of(head)[key] != environment_of(worker).get(key)}
    assert different == {"VLLM_HOST_IP"}
    assert environment_of(head).keys() == environment_of(worker).keys()
    for field in (
        "entrypoint",
        "cache_volume",
        "devices",
        "gpus",
        "capabilities",
        "memlock_unlimited",
        "shm_size_mib",
        "health_command",
    ):
        assert getattr(head, field) == getattr(worker, field), field
    mine, theirs = head.command, worker.command
    assert mine[mine.index("--") :] == theirs[theirs.index("--") :]
    assert set(head.mounts) - set(worker.mounts) == {m for m in head.mounts if "secrets" in m.target}
    assert set(worker.mounts) <= set(head.mounts)


def test_without_ray_every_rank_is_told_where_to_meet_and_by_which_backend() -> None:
    change = {"groups.main.serving.backend": "mp", "groups.main.serving.master_port": 29700}
    for container in plan(change).containers:
        assert after(container.command, "--backend") == "mp"
        assert after(container.command, "--master-port") == "29700"
    assert plan(change).deployment != plan().deployment
    assert settings_with(change).groups["main"].serving.port_fields == ("port", "master_port", "status_port")
    settings_with({**change, "groups.main.serving.ray_port": 29700})  # a port that nobody uses collides with nothing
    with pytest.raises(SettingsError, match="port, master_port, status_port must differ"):
        settings_with({**change, "groups.main.serving.port": 29700})


def test_nodes_that_use_other_cages_get_their_own_interface_names() -> None:
    head, worker = plan(
        {"nodes[1].fabric[0]": {"netdev": "enp1s0f0np0", "address": "192.168.200.13/24", "hca": "rocep1s0f0"}}
    ).containers
    assert environment_of(head)["NCCL_SOCKET_IFNAME"] == "enp1s0f1np1"
    assert environment_of(worker)["GLOO_SOCKET_IFNAME"] == "enp1s0f0np0"
    assert environment_of(head)["NCCL_IB_HCA"] == "=rocep1s0f1,roceP2p1s0f1"
    assert environment_of(worker)["NCCL_IB_HCA"] == "=rocep1s0f0,roceP2p1s0f1"


def test_the_address_that_vllm_announces_is_the_fabric_one() -> None:
    for container, node in zip(plan().containers, settings_with().nodes, strict=True):
        assert environment_of(container)["VLLM_HOST_IP"] == node.fabric_address
        assert after(container.command, "--head-address") == "192.168.200.12"
        assert after(container.command, "--node-address") == node.fabric_address


def test_a_spark_gives_gpu_rdma_and_locked_memory_and_nothing_more() -> None:
    container = plan().containers[0]
    assert (container.gpus, container.devices) == ("all", ("/dev/infiniband",))
    assert (container.capabilities, container.memlock_unlimited) == (("IPC_LOCK",), True)


def test_a_host_without_gpu_gives_none_of_it() -> None:
    for container in plan({"hardware": "cpu"}).containers:
        assert (container.gpus, container.devices, container.capabilities) == (None, (), ())
        assert container.memlock_unlimited is False
        assert not any(name.startswith("NCCL_IB_DISABLE") for name in environment_of(container))


def test_a_spark_without_named_rdma_devices_mounts_none() -> None:
    change = {f"nodes[{n}].fabric[{i}].hca": None for n in (0, 1) for i in (0, 1)}
    for container in plan(change).containers:
        assert container.devices == ()
        assert "NCCL_IB_HCA" not in environment_of(container)


def test_the_owner_s_variables_stand_above_the_profile_and_below_the_interfaces() -> None:
    settings = settings_with({"groups.main.serving.environment": {"NCCL_NET": "Socket", "MINE": "1"}})
    found = rank_environment(settings, settings.groups["main"], settings.nodes[0])
    assert (found["NCCL_NET"], found["MINE"]) == ("Socket", "1")
    assert found["NCCL_SOCKET_IFNAME"] == "enp1s0f1np1"


def test_weights_files_and_patches_are_read_only_and_only_state_is_writable() -> None:
    change = {
        "groups.main.serving.patches": [{"source": "docs/t.jinja", "target": "/opt/t.jinja"}],
        "groups.main.serving.mounts": [{"source": "/srv/tiktoken", "target": "/opt/tiktoken"}],
    }
    files = GroupFiles("hash/runtime.pyz", ("hash2/t.jinja",), FILES.weights)
    root = "/home/aurora/.spark-vllm/stacks/dev"
    head = plan(change, files=files).containers[0]
    assert {(m.source, m.target, m.read_only) for m in head.mounts} == {
        (f"{root}/files/hash/runtime.pyz", "/opt/spark-vllm/runtime.pyz", True),
        (f"{root}/state/main", "/var/lib/spark-vllm", False),
        ("/models/qwen", "/models/qwen", True),
        (f"{root}/files/hash2/t.jinja", "/opt/t.jinja", True),
        ("/srv/tiktoken", "/opt/tiktoken", True),
        (f"{root}/secrets/main", "/run/secrets/spark-vllm", True),
    }


@pytest.mark.parametrize(("source", "with_key"), [("generated", True), ("own", True), ("off", False)])
def test_only_the_head_gets_the_key_s_folder_and_only_if_there_is_a_key(source: str, with_key: bool) -> None:
    raw = apply_change({**load_base(), "api_key": MARKER}, {"groups.main.serving.api_key": source})
    head, worker = plan_group(read_settings(raw), "main", "dev", IMAGE, FILES).containers
    assert any("secrets" in mount.source for mount in head.mounts) is with_key
    assert ("--api-key-file" in head.command) is with_key
    assert not any("secrets" in mount.source for mount in worker.mounts)
    assert "--api-key-file" not in worker.command
    assert MARKER not in repr((head, worker))


def test_labels_say_whose_a_container_is() -> None:
    found = plan()
    assert found.containers[1].labels == {
        "spark-vllm.stack": "dev",
        "spark-vllm.group": "main",
        "spark-vllm.rank": "1",
        "spark-vllm.supervisor": "hash/runtime.pyz",
        "spark-vllm.deployment": found.deployment,
    }


def test_the_same_settings_give_the_same_plan() -> None:
    assert plan() == plan()


@pytest.mark.parametrize(
    "change",
    [
        {"groups.main.serving.max_model_len": 4096},
        {"groups.main.serving.environment": {"A": "1"}},
        {"groups.main.serving.shm_size_mib": 4096},
        {"groups.main.serving.extra_args": ["--seed", "7"]},
        {"groups.main.serving.mounts": [{"source": "/a", "target": "/b"}]},
        {"groups.main.model.served_name": "other"},
        {"nodes[1].fabric[0].address": "192.168.200.99/24"},
        {"nodes[1].fabric[0].hca": "rocep1s0f0"},
        {"image.python": "python3.12"},
        {"hardware": "cpu"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_difference_for_one_rank_is_another_deployment_for_all(change: dict[str, Any]) -> None:
    assert plan(change).deployment != plan().deployment


def test_another_image_supervisor_or_revision_is_another_deployment() -> None:
    ids = {
        plan().deployment,
        plan(image="sha256:" + "b" * 64).deployment,
        plan(files=GroupFiles("other/runtime.pyz", (), FILES.weights)).deployment,
        plan(files=GroupFiles(FILES.runtime, (), {**FILES.weights, "spark-b": "/elsewhere"})).deployment,
    }
    assert len(ids) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"nodes[1].management_address": "10.9.9.9"},
        {"nodes[0].ssh_port": 2222},
        {"host": {"sysctls": {"net.core.rmem_max": "1"}}},
        {"fabric": {"mtu_bytes": 4200}},
        {"groups.main.serving.public_host": "spark.example"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_no_rank_sees_restarts_nothing(change: dict[str, Any]) -> None:
    assert plan(change).deployment == plan().deployment


def test_what_is_not_set_is_not_passed_to_vllm() -> None:
    assert serve_arguments(ServingSettings()) == [
        "--tensor-parallel-size",
        "1",
        "--pipeline-parallel-size",
        "1",
    ]


def test_the_reference_arguments() -> None:
    serving = ServingSettings(
        tensor_parallel_size=2,
        max_model_len=32768,
        gpu_memory_utilization=0.9,
        trust_remote_code=True,
        reasoning_parser="qwen3",
        tool_call_parser="qwen3_coder",
        enable_auto_tool_choice=True,
        extra_args=("--seed", "7"),
    )
    assert serve_arguments(serving) == [
        "--tensor-parallel-size",
        "2",
        "--pipeline-parallel-size",
        "1",
        "--max-model-len",
        "32768",
        "--gpu-memory-utilization",
        "0.9",
        "--trust-remote-code",
        "--reasoning-parser",
        "qwen3",
        "--tool-call-parser",
        "qwen3_coder",
        "--enable-auto-tool-choice",
        "--seed",
        "7",
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [(True, ["--enable-prefix-caching"]), (False, ["--no-enable-prefix-caching"]), (None, [])],
)
def test_a_switch_of_three_states_is_passed_only_when_set(value: bool | None, words: list[str]) -> None:
    found = serve_arguments(ServingSettings(enable_prefix_caching=value))
    assert [word for word in found if "prefix" in word] == words


@given(
    length=st.none() | st.integers(1, 10**6),
    share=st.none() | st.floats(0.01, 1),
    eager=st.booleans(),
    caching=st.none() | st.booleans(),
    parser=st.none() | st.text("abc_1", min_size=1, max_size=8),
    cache=st.none() | st.integers(1, 10**12) | st.sampled_from(["64M", "2G"]),
)
def test_every_argument_is_a_flag_or_the_value_of_one(**values: Any) -> None:
    serving = ServingSettings(
        max_model_len=values["length"],
        gpu_memory_utilization=values["share"],
        enforce_eager=values["eager"],
        enable_prefix_caching=values["caching"],
        reasoning_parser=values["parser"],
        kv_cache_memory_bytes=values["cache"],
    )
    words = serve_arguments(serving)
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len(set(flags))
    assert all(isinstance(word, str) and word not in ("None", "True", "False", "") for word in words)
    assert ("--max-model-len" in words) is (values["length"] is not None)
    if values["share"] is not None:
        assert float(words[words.index("--gpu-memory-utilization") + 1]) == values["share"]


def test_names_and_paths() -> None:
    settings = settings_with({"groups.main.model.served_name": "Qwen/Qwen3.5 122B".replace(" ", "-")})
    assert container_name("dev", "main", 1) == "spark-vllm-dev-main-rank1"
    assert model_target(settings.groups["main"]) == "/models/Qwen-Qwen3.5-122B"
    assert (
        key_path(StackFolder("/root/.spark-vllm", "dev"), "main") == "/root/.spark-vllm/stacks/dev/secrets/main/api_key"
    )


@pytest.mark.parametrize(
    ("change", "endpoint"),
    [
        ({}, "http://10.1.230.180:30000/v1"),
        ({"groups.main.serving.port": 8000}, "http://10.1.230.180:8000/v1"),
        ({"groups.main.serving.public_host": "spark.example"}, "http://spark.example:30000/v1"),
    ],
)
def test_the_endpoint_is_what_people_will_use(change: dict[str, Any], endpoint: str) -> None:
    assert public_endpoint(settings_with(change), "main") == endpoint


@pytest.mark.parametrize("rank", [0, 1])
def test_the_supervisor_itself_takes_what_the_plan_renders(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def started_with(settings: Any) -> int:
        started.append(settings)
        return 0

    monkeypatch.setattr(supervisor, "Head", lambda settings: settings)
    monkeypatch.setattr(supervisor, "Worker", lambda settings: settings)
    monkeypatch.setattr(supervisor, "_run", started_with)
    assert supervisor.main(plan({"groups.main.serving.max_model_len": 512}).containers[rank].command) == 0
    [settings] = started
    assert (settings.rank, settings.nodes, settings.deployment) == (
        rank,
        2,
        plan({"groups.main.serving.max_model_len": 512}).deployment,
    )
    assert settings.head_address == "192.168.200.12"
    assert settings.serve_args[-2:] == ["--max-model-len", "512"]
    assert (str(settings.api_key_file) == "/run/secrets/spark-vllm/api_key") is (rank == 0)


@pytest.mark.parametrize("flag", sorted(_OURS))
@pytest.mark.parametrize("shape", ["{}", "{}=x"])
def test_what_the_supervisor_refuses_to_pass_on_is_refused_by_the_settings_first(flag: str, shape: str) -> None:
    for spelling in (flag, flag[:2] + flag[2:].replace("-", "_")):
        with pytest.raises(SettingsError):
            settings_with({"groups.main.serving.extra_args": [shape.format(spelling)]})


@pytest.mark.parametrize("flag", ["-tp", "-pp", "--tensor_parallel_size", "--max_model_len"])
def test_other_spellings_of_a_setting_are_refused_in_extra_args(flag: str) -> None:
    with pytest.raises(SettingsError):
        settings_with({"groups.main.serving.extra_args": [flag, "4"]})


def test_a_plan_can_be_written_as_json() -> None:
    assert json.loads(json.dumps(vars(plan().containers[0]), default=vars))["name"] == "spark-vllm-dev-main-rank0"


def test_a_hub_cache_is_mounted_file_by_file_with_its_links_resolved() -> None:
    target = model_target(settings_with().groups["main"])
    files = replace(FILES, in_place={"spark-b": {"config.json": "/hf/store/1", "sub/tokenizer.json": "/hf/store/2"}})
    [head, worker] = plan(files=files).containers
    assert [(m.source, m.target) for m in head.mounts if m.target.startswith(target)] == [("/models/qwen", target)]
    assert [(m.source, m.target, m.read_only) for m in worker.mounts if m.target.startswith(target)] == [
        ("/hf/store/1", f"{target}/config.json", True),
        ("/hf/store/2", f"{target}/sub/tokenizer.json", True),
    ]
    assert plan(files=files).deployment != plan().deployment


def test_compile_caches_lie_in_a_folder_of_their_own_for_each_image_and_model() -> None:
    def folder(**changes: Any) -> str:
        [head, worker] = plan(**changes).containers
        environment = dict(value.split("=", 1) for value in head.environment)
        assert environment["TRITON_CACHE_DIR"] == f"{environment['VLLM_CACHE_ROOT']}/triton"
        assert environment["TORCHINDUCTOR_CACHE_DIR"].startswith(environment["VLLM_CACHE_ROOT"])
        assert environment["FLASHINFER_WORKSPACE_BASE"].startswith(environment["VLLM_CACHE_ROOT"])
        assert f"VLLM_CACHE_ROOT={environment['VLLM_CACHE_ROOT']}" in worker.environment
        return environment["VLLM_CACHE_ROOT"]

    other = replace(FILES, weights=dict.fromkeys(FILES.weights, "/models/another"))
    moved = replace(FILES, weights={**FILES.weights, "spark-b": "/home/u/.cache/hub/snapshots/qwen"})
    assert folder().startswith("/var/cache/spark-vllm/")
    assert folder(files=other) != folder()
    assert folder(files=moved) == folder()
