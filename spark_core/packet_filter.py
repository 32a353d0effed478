"""A packet filter of our own: who may reach the ports that Ray and the ranks listen on.

Ray binds to all interfaces whatever it is told, and who reaches it can run code in the containers. One nftables table
of ours, loaded at boot by a systemd unit, drops what does not come in by the fabric or loopback. It touches no other
table and no port that it does not name, so SSH and the API stay as they are; a drop elsewhere stays a drop, since an
accept here ends this table only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from spark_core.settings import Settings

RAY_PORTS = (6400, 6499)
"""The fixed range of Ray's ports beside its control store: see spark_runtime/ray_node.py."""
RAY_CLIENT_PORT = 10001
"""Of Ray's client server, where the image has one; Ray refuses to be told a port where it has none."""
_VALUE = re.compile(r"^([\w.,@-]+) ([\d.,]+) ([\d,-]+)$")


def filter_value(settings: Settings) -> str | None:
    """What the filter is to be: interfaces, fabric addresses, ports, each separated by commas; None if there is none.

    All nodes get the same: an interface that a node does not have matches nothing there.
    """
    if not settings.host.packet_filter:
        return None
    netdevs = {interface.netdev for node in settings.nodes for interface in node.fabric}
    netdevs |= {node.control_netdev for node in settings.nodes if node.control_netdev}
    addresses = {interface.ip for node in settings.nodes for interface in node.fabric}
    ports: set[str] = set()
    for group in settings.groups.values():
        serving = group.serving
        if serving.backend == "ray":
            ports |= {str(serving.ray_port), "-".join(map(str, RAY_PORTS)), str(RAY_CLIENT_PORT)}
        else:
            ports.add(str(serving.master_port))
        ports.add(str(serving.status_port))
    return f"{','.join(sorted(netdevs))} {','.join(sorted(addresses))} {','.join(sorted(ports))}"


def unit_lines(table: str, value: str) -> Sequence[str]:
    """The unit's own lines. The value stands in a comment, from which it is read back."""
    found = _VALUE.match(value)
    netdevs, addresses, ports = found.groups() if found else ("lo", "127.0.0.1", "1")
    inside = ", ".join(f'"{name}"' for name in ["lo", *netdevs.split(",")])
    rules = [
        f"add table inet {table}",
        f"delete table inet {table}",
        f"add table inet {table}",
        f"add chain inet {table} input {{ type filter hook input priority -10; policy accept; }}",
        f"add rule inet {table} input iifname {{ {inside} }} accept",
        f"add rule inet {table} input tcp dport {{ {ports.replace(',', ', ')} }} drop",
        # Ranks listen on ephemeral ports of their fabric address, which Linux takes in by any interface.
        f"add rule inet {table} input ip daddr {{ {addresses.replace(',', ', ')} }} tcp dport 1024-65535 drop",
    ]
    return (
        "Before=docker.service",
        "",
        "[Service]",
        "Type=oneshot",
        "RemainAfterExit=yes",
        f"# packet filter: {value}",
        f"ExecStart=/usr/sbin/nft '{'; '.join(rules)}'",
        f"ExecStop=/usr/sbin/nft delete table inet {table}",
    )


def table_of(stack: str) -> str:
    """The table of a stack; nft allows fewer characters than a stack's name."""
    return "spark_vllm_" + re.sub(r"[^A-Za-z0-9_]", "_", stack)
