"""The packet filter: what it names follows from the settings, and it can be read back from its unit."""

from __future__ import annotations

from typing import Any

import pytest

from spark_core import packet_filter
from spark_core.errors import SettingsError
from spark_core.journal import StackFolder
from spark_core.settings import Settings, read_settings
from spark_core.tuning.items import ITEMS, Place
from spark_core.tuning.observe import items_of
from spark_runtime import ray_node
from tests.config_cases import apply_change, load_base

PLACE = Place(StackFolder("/root", "my-stack"), "aurora")
INTERFACES = "enP2p1s0f1np1,enp1s0f1np1 192.168.200.12,192.168.200.13,192.168.201.12,192.168.201.13"


def settings_with(**change: Any) -> Settings:
    return read_settings(apply_change(load_base(), {"host": {"packet_filter": True}, **change}))


def unit_of(value: str) -> str:
    return ITEMS["packet_filter"].files(PLACE, value)[-1].content.decode()


def test_nothing_is_filtered_unless_asked_for() -> None:
    assert "packet_filter" not in items_of(read_settings(load_base()))


@pytest.mark.parametrize(
    ("change", "ports"),
    [({}, "10001,30001,6379,6400-6499"), ({"groups.main.serving.backend": "mp"}, "29501,30001")],
    ids=["ray", "mp"],
)
def test_it_names_the_ports_of_the_backend_and_every_fabric_interface(change: dict[str, Any], ports: str) -> None:
    value = items_of(settings_with(**change))["packet_filter"]
    assert value == f"{INTERFACES} {ports}"
    text = unit_of(value)
    assert f"tcp dport {{ {ports.replace(',', ', ')} }} drop" in text
    assert 'iifname { "lo", "enP2p1s0f1np1", "enp1s0f1np1" } accept' in text
    assert "dport 22" not in text and "policy drop" not in text
    assert ITEMS["packet_filter"].value_of(text.encode()) == value


def test_each_stack_has_a_table_of_its_own_that_goes_with_its_unit() -> None:
    text = unit_of(items_of(settings_with())["packet_filter"])
    assert "ExecStop=/usr/sbin/nft delete table inet spark_vllm_my_stack" in text
    assert text.count("spark_vllm_my_stack") == text.count("inet spark_vllm_my_stack")


def test_the_supervisor_gives_ray_the_ports_that_the_filter_names() -> None:
    assert (ray_node.PORTS_FROM, ray_node.PORTS_TO) == packet_filter.RAY_PORTS


def test_a_node_whose_fabric_is_not_declared_is_refused() -> None:
    with pytest.raises(SettingsError) as refused:
        settings_with(**{"nodes[1].fabric": []})
    assert "host.packet_filter: found a node without fabric" in refused.value.render()
