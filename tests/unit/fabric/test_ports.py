"""Which interfaces are halves of one port, and which half is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_core.fabric.facts import Link
from spark_core.fabric.ports import function_of, functions_left, twin_of
from tests.unit.fabric.networks import MANAGEMENT, PORT, PORT0, TWIN, TWIN0, spark

LINKS = spark(12).links


@pytest.mark.parametrize(
    ("netdev", "function"),
    [
        (PORT, (0, 1, 0, 1)),
        (TWIN, (2, 1, 0, 1)),
        ("enp1s0f0", (0, 1, 0, 0)),
        ("enP7s7", None),
        ("eth0", None),
        ("enp1s0f1np1.5", None),
        ("enp1s0f2np2", None),
    ],
)
def test_an_interface_s_name_tells_its_function(netdev: str, function: tuple[int, ...] | None) -> None:
    assert function_of(netdev) == function


def test_the_host_s_word_on_a_function_counts_more_than_the_name() -> None:
    assert function_of(PORT, Link(1500, pci="000f:0a:00.3")) == (15, 10, 0, 3)
    assert function_of("renamed0", Link(1500, pci="0002:01:00.1")) == (2, 1, 0, 1)
    assert function_of("usb0", Link(1500, pci="2-1:1.0")) is None


@pytest.mark.parametrize("named", [True, False], ids=["port named by the driver", "by function alone"])
@pytest.mark.parametrize(("one", "other"), [(PORT, TWIN), (TWIN, PORT), (PORT0, TWIN0)])
def test_the_twins_of_a_port_are_in_two_pci_domains(one: str, other: str, named: bool) -> None:
    links = LINKS if named else {name: replace(link, port="") for name, link in LINKS.items()}
    assert twin_of(links, one) == other


def test_names_are_enough_where_there_is_no_device() -> None:
    assert twin_of({name: Link(1500) for name in (PORT0, PORT, TWIN0, TWIN, MANAGEMENT)}, PORT) == TWIN


def test_the_driver_s_word_on_the_port_counts_more_than_the_function() -> None:
    links = {**LINKS, TWIN: replace(LINKS[TWIN], port="p0"), TWIN0: replace(LINKS[TWIN0], port="p1")}
    assert twin_of(links, PORT) == TWIN0


def test_ports_of_two_adapters_are_no_twins() -> None:
    links = {**LINKS, TWIN: replace(LINKS[TWIN], switch="b8cef6"), PORT: replace(LINKS[PORT], switch="b8cef7")}
    assert twin_of(links, PORT) is None


@pytest.mark.parametrize("netdev", [MANAGEMENT, "lo", "gone"])
def test_what_is_no_port_has_no_twin(netdev: str) -> None:
    assert twin_of(LINKS, netdev) is None


def test_a_port_without_its_other_half_has_no_twin() -> None:
    assert twin_of({PORT: LINKS[PORT], PORT0: LINKS[PORT0], TWIN0: LINKS[TWIN0]}, PORT) is None


def test_one_function_that_is_gone_among_others_is_told_from_no_cable() -> None:
    without = {name: link for name, link in LINKS.items() if name not in (PORT, TWIN)}
    assert functions_left(without, PORT) == [TWIN0, PORT0]
    assert functions_left({MANAGEMENT: LINKS[MANAGEMENT]}, PORT) == []
    assert functions_left(LINKS, PORT) == []
    assert functions_left(without, "enp1s0f2np2") == []
    assert functions_left(without, "enp3s0f1np1") == []
