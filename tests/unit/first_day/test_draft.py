"""The settings that are made of what is on two Sparks: they are valid, use what is there, and say why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spark_core.fabric.facts import Link, NetworkFacts
from spark_core.first_day.draft import Draft, FirstLook, Wishes, draft_settings, names_of
from spark_core.first_day.survey import FoundContainer, FoundModel, Server, Survey
from spark_core.settings import Settings, read_settings
from tests.unit.fabric.networks import PORT, TWIN, changed, spark
from tests.unit.facts.spark import spark as spark_facts

EUGR = "eugr/spark-vllm-docker"
IMAGE_A, IMAGE_B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
COMMIT = "c" * 40
CACHE = "~/.cache/huggingface/hub"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAaBcDeF"
NETPLAN = "/etc/netplan/98-spark-vllm-docker.yaml"


def cached(repository: str = "Qwen/big", size: int = 120, **values: Any) -> FoundModel:
    model = FoundModel(f"/home/aurora/x/{repository}", size, 262144, "", repository, COMMIT, CACHE)
    return replace(model, **values)


def look(number: int, network: NetworkFacts | None = None, **things: Any) -> FirstLook:
    facts = replace(spark_facts(), sudo=things.pop("sudo", "asks"))
    survey = Survey(things.pop("name", f"spark-{'ab'[number - 12]}"), **things)
    seen = network or replace(spark(number), netplan={NETPLAN: None})
    return FirstLook(f"10.1.230.{number + 168}", "aurora", KEY, facts, seen, survey)


def drafted(one: FirstLook, other: FirstLook, **wishes: str) -> tuple[Draft, Settings]:
    draft = draft_settings([one, other], Wishes(**wishes))
    return draft, read_settings(draft.values)


def test_two_sparks_with_an_owner_s_fabric_are_used_as_they_are() -> None:
    images = {IMAGE_B: ("nvcr.io/nvidia/vllm:26.02-py3",), IMAGE_A: ("ubuntu:24.04",)}
    draft, settings = drafted(look(12, images=images, models=(cached(),)), look(13, images=images))
    assert settings.hardware == "spark"
    assert [node.name for node in settings.nodes] == ["spark-a", "spark-b"]
    assert [(one.netdev, one.address, one.hca) for one in settings.nodes[1].fabric] == [
        (PORT, "192.168.200.13/24", "rocep1s0f1"),
        (TWIN, "192.168.201.13/24", "roceP2p1s0f1"),
    ]
    assert (settings.fabric.manage, settings.fabric.mtu_bytes, settings.replaces) == (False, 9000, ())
    assert settings.image.local_id == IMAGE_B
    group = settings.groups["main"]
    assert (group.model.source, group.model.served_name) == (f"hf://Qwen/big@{COMMIT}", "big")
    assert (group.serving.max_model_len, group.serving.gpu_memory_utilization) == (32768, 0.8)
    assert group.serving.tensor_parallel_size == 2
    assert draft.reasons["fabric.manage"] == [
        f"the owner's own configuration fits: spark-a one of {NETPLAN}; spark-b one of {NETPLAN}"
    ]
    assert draft.reasons["groups.main.model.source"] == ["0.0 GB, whole on spark-a"]
    assert draft.reasons["image.local_id"] == ["nvcr.io/nvidia/vllm:26.02-py3, on spark-a, spark-b"]
    assert "hub" not in draft.values and "ssh" not in draft.values


def test_a_cluster_that_runs_is_served_on_as_it_is() -> None:
    flags = {
        "--port": "8000",
        "--served-model-name": "qwen",
        "--tensor-parallel-size": "2",
        "--max-model-len": "auto",
        "--gpu-memory-utilization": "0.85",
        "--kv-cache-dtype": "fp8",
        "--load-format": "nonsense",
        "--enable-auto-tool-choice": "",
        "--tool-call-parser": "qwen3_coder",
        "--nnodes": "2",
    }
    server = Server("Qwen/big", flags, ("--swap-space",))
    node = FoundContainer("vllm_node", "vllm-node", IMAGE_A, True, True, servers=(server,), launcher=EUGR)
    worker = replace(node, servers=(Server("Qwen/big", {"--headless": ""}),))
    images = {IMAGE_B: ("vllm:new",), IMAGE_A: ("vllm-node:latest",)}
    models = (cached("Qwen/larger", 500), cached())
    draft, settings = drafted(
        look(12, images=images, models=models, containers=(node, FoundContainer("db", "pg", IMAGE_B, True))),
        look(13, images=images, models=models, containers=(worker,)),
    )
    assert settings.replaces == ("vllm_node",)
    assert settings.image.local_id == IMAGE_A
    group = settings.groups["main"]
    assert (group.model.source, group.model.served_name) == (f"hf://Qwen/big@{COMMIT}", "qwen")
    serving = group.serving
    assert (serving.port, serving.backend, serving.kv_cache_dtype) == (8000, "mp", "fp8")
    assert (serving.gpu_memory_utilization, serving.tool_call_parser) == (0.85, "qwen3_coder")
    assert (serving.enable_auto_tool_choice, serving.max_model_len, serving.load_format) == (True, None, None)
    assert draft.reasons["groups.main.serving"] == [
        "as the cluster that runs is served",
        "not taken over: --max-model-len, --load-format, --swap-space; see serving.extra_args in docs/settings.md",
    ]
    assert draft.reasons["replaces"] == [
        f"{name}: vllm_node of eugr/spark-vllm-docker" for name in ("spark-a", "spark-b")
    ]


def test_another_model_is_not_served_as_the_one_that_runs() -> None:
    node = FoundContainer("vllm_node", "x", IMAGE_A, True, servers=(Server("Qwen/big", {"--max-model-len": "9"}),))
    _, settings = drafted(look(12, containers=(node,)), look(13), model="hf://org/other@main")
    group = settings.groups["main"]
    assert (group.model.source, group.model.served_name) == ("hf://org/other@main", "other")
    assert group.serving.max_model_len is None


def test_a_model_that_runs_and_lies_nowhere_whole_is_named_as_it_is() -> None:
    node = FoundContainer("vllm_node", "x", IMAGE_A, True, servers=(Server("Qwen/big", {}),))
    half = cached(fault="model-2.safetensors is missing")
    draft, settings = drafted(look(12, containers=(node,), models=(half,)), look(13))
    assert settings.groups["main"].model.source == "hf://Qwen/big"
    assert "whole in no hub cache" in draft.reasons["groups.main.model.source"][0]


def test_where_there_is_nothing_the_reference_stands_and_says_so() -> None:
    draft, settings = drafted(look(12), look(13))
    assert settings.image.registry == "hellohal2064/vllm-qwen3.5-gb10:latest"
    assert settings.groups["main"].model.repository == "Qwen/Qwen3.5-122B-A10B-FP8"
    assert "put yours here" in draft.reasons["image.registry"][0]


def test_a_plain_folder_is_taken_where_every_node_has_it_and_another_cache_is_named() -> None:
    plain = FoundModel("/models/big", 900, 4096)
    _, settings = drafted(look(12, models=(plain,)), look(13, models=(plain, cached(cache="/data/hf/hub"))))
    assert settings.groups["main"].model.source == "node:/models/big"
    assert settings.groups["main"].serving.max_model_len == 4096
    _, settings = drafted(look(12, models=(plain,)), look(13, models=(cached(cache="/data/hf/hub"),)))
    assert settings.groups["main"].model.repository == "Qwen/big"
    assert settings.hub.cache == "/data/hf/hub"


def bare(number: int, **changes: Any) -> NetworkFacts:
    network = replace(spark(number), netplan={})
    for name in (PORT, TWIN):
        network = changed(network, name, addresses=(), **changes)
    return network


def test_cables_without_addresses_get_some_that_up_writes() -> None:
    draft, settings = drafted(look(12, bare(12)), look(13, bare(13), sudo="free"))
    assert (settings.fabric.manage, settings.fabric.mtu_bytes) == (True, 9000)
    assert [[one.address for one in node.fabric] for node in settings.nodes] == [
        ["192.168.200.12/24", "192.168.201.12/24"],
        ["192.168.200.13/24", "192.168.201.13/24"],
    ]
    assert draft.reasons["fabric.manage"] == [
        "the cables have no addresses yet: up writes a netplan file of its own, and destroy takes it away",
        "sudo asks for a password on spark-a: set it with `pulumi config set --secret sudo_password`",
    ]
    _, settings = drafted(look(12, bare(12)), look(13, bare(13)), sudo_password_file="~/pw")
    assert settings.ssh.sudo_password_file == "~/pw"


def test_addresses_of_ours_keep_off_networks_that_are_there() -> None:
    network = bare(12)
    network = replace(network, links={**network.links, "eth9": Link(1500, ("192.168.200.1/24",), True)})
    _, settings = drafted(look(12, network), look(13, bare(13)))
    assert [one.address for one in settings.nodes[0].fabric] == ["192.168.201.12/24", "192.168.202.12/24"]


def test_cables_that_do_not_tell_which_ports_face_each_other_are_left_to_the_owner() -> None:
    draft, settings = drafted(look(12, bare(12)), look(13, changed(bare(13), TWIN, carrier=False)))
    assert [node.fabric for node in settings.nodes] == [(), ()]
    assert "spark-a 2, spark-b 1 interfaces with a carrier" in draft.reasons["fabric"][0]


def test_mtus_that_differ_are_managed_and_a_file_of_the_fabric_alone_gives_way() -> None:
    text = f"network:\n  ethernets:\n    {PORT}:\n      mtu: 1500\n    {TWIN}:\n      mtu: 1500\n"
    mixed = text + "    enP7s7:\n      dhcp4: true\n"
    one = replace(spark(12), netplan={NETPLAN: text})
    low = changed(changed(spark(13), PORT, mtu_bytes=1500), TWIN, mtu_bytes=1500)
    draft, settings = drafted(look(12, one), look(13, replace(low, netplan={NETPLAN: text})))
    assert (settings.fabric.manage, settings.fabric.take_over) == (True, (NETPLAN,))
    assert settings.nodes[1].fabric[0].address == "192.168.200.13/24"
    assert draft.reasons["fabric.manage"][0].startswith("MTUs differ (1500, 9000): ")
    _, settings = drafted(look(12, one), look(13, replace(low, netplan={NETPLAN: mixed})))
    assert settings.fabric.take_over == ()


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("spark-a", "spark-b"), ["spark-a", "spark-b"]),
        (("Spark_1.local", "gx10-02"), ["spark-1", "gx10-02"]),
        (("spark", "spark"), ["spark", "spark-a"]),
        (("7", "spark-a"), ["spark-b", "spark-a"]),
        (("7", "localhost"), ["spark-a", "spark-b"]),
    ],
)
def test_nodes_have_their_own_names_where_these_fit(names: tuple[str, str], wanted: list[str]) -> None:
    looks = [look(12, name=names[0]), look(13, name=names[1])]
    assert list(names_of(looks).values()) == wanted


def test_hosts_that_are_no_sparks_and_a_node_behind_another() -> None:
    one, other = look(12), look(13)
    other = replace(other, facts=replace(other.facts, architecture="amd64"), via=one.address, port=2222)
    draft, settings = drafted(one, other, ssh_config="~/conf", hub_endpoint="http://mirror:8090")
    assert settings.hardware == "cpu"
    assert draft.reasons["hardware"] == ["no DGX Spark: spark-b (amd64)"]
    assert (settings.nodes[1].via, settings.nodes[1].ssh_port) == ("spark-a", 2222)
    assert (settings.ssh.config_file, settings.hub.endpoint) == ("~/conf", "http://mirror:8090")
    assert "gpu_memory_utilization" not in draft.values["groups"]["main"]["serving"]


def test_one_node_alone_needs_no_fabric() -> None:
    draft = draft_settings([look(12)], Wishes())
    settings = read_settings(draft.values)
    assert "fabric" not in draft.values
    assert settings.groups["main"].serving.tensor_parallel_size == 1
