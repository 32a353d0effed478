"""Which commands of root a managed fabric needs, for the list of them that preview tells."""

from __future__ import annotations

from collections.abc import Iterator

from spark_core import root_commands as root
from spark_core.fabric.rollback import ROLLBACK_AFTER_S, RUN_FOLDER, TRIAL_FOLDER, NetplanFile, rollback_unit
from spark_core.journal import StackFolder
from spark_core.settings import NodeSettings, Settings
from spark_core.transport.base import Command


def fabric_root_commands(settings: Settings, stack: str, node: NodeSettings) -> list[Command]:
    """Every command that may run as root, also to take a change back; none where the fabric is not managed."""
    fabric = settings.fabric
    if not fabric.manage:
        return []
    folder = StackFolder(settings.root_of(node), stack)
    paths = (fabric.netplan_file, *fabric.take_over)
    unit, place = rollback_unit(stack)
    return [
        # Files of others are read too: one that configures the same interface must not be overlooked.
        *(
            look(path)
            for path in (*paths, f"/etc/netplan/{root.FILE}.yaml")
            for look in (root.look_at_file, root.read_file)
        ),
        root.make_folder(TRIAL_FOLDER),
        root.make_folder(RUN_FOLDER),
        *root.install_file(folder.staging, place, b"", mode="0700"),
        root.arm_rollback(unit, fabric.rollback_after_s, place),
        root.arm_rollback(unit, ROLLBACK_AFTER_S, place),
        root.start_unit(f"{unit}.service"),
        root.stop_unit(f"{unit}.timer"),
        root.apply_netplan(),
        *(cmd for path in paths for cmd in _file_commands(folder, path)),
        root.remove_file(place),
        root.remove_folder(RUN_FOLDER),
        *(cmd for interface in node.fabric for cmd in _link_commands(interface.netdev)),
    ]


def _file_commands(folder: StackFolder, path: str) -> Iterator[Command]:
    trial = NetplanFile(path, None).trial
    yield from root.install_file(folder.staging, trial, b"", mode="0600")
    yield from root.install_file(folder.staging, path, b"", mode=root.MODE, owner=root.OWNER, group=root.OWNER)
    yield from (root.remove_file(trial), root.remove_file(path))


def _link_commands(netdev: str) -> Iterator[Command]:
    yield root.set_link_mtu(netdev, root.NUMBER)
    yield root.set_link_state(netdev, root.STATE)
    yield root.add_address(netdev, root.ADDRESS)
    yield root.delete_address(netdev, root.ADDRESS)
    for family in ("ipv4", "ipv6"):
        for part in ("conf", "neigh"):
            yield root.set_parameter(f"net/{family}/{part}/{netdev}/{root.WORD}", root.VALUE)
