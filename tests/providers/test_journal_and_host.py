"""``NodeJournal`` and ``NodeHost`` over gRPC: the first resource of a node, and the one that changes it."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import empty_pb2

from providers.node_host import NodeHostProvider
from providers.node_journal import NodeJournalProvider
from tests.providers.conftest import Deployment
from tests.providers.engine import UNKNOWN, Managed, ProviderError
from tests.tuned_host import TunedHost

PROJECT = Path(__file__).resolve().parents[2]
JournalProps = Callable[..., dict[str, Any]]


def host_props(deployment: Deployment, node: str = "spark-a", **changes: Any) -> dict[str, Any]:
    return {
        "node": node,
        "connection": deployment.connection(node),
        "stack": "dev",
        "root": deployment.root(node),
        "sysctls": {},
        "tuning": {},
        "placed": {},
        "setup": {},
        "files": {},
        **changes,
    }


def opened(deployment: Deployment, journal_props: JournalProps, node: str = "spark-a") -> Managed:
    journal = deployment.manage(NodeJournalProvider)
    journal.create(journal_props(node))
    return journal


def test_the_life_of_a_journal(deployment: Deployment, journal_props: JournalProps) -> None:
    journal = opened(deployment, journal_props)
    root = Path(deployment.root())
    assert journal.id == f"spark-a:{root}"
    assert (root / "stacks/dev/secrets/main").is_dir()
    assert journal.up(journal_props()) == "same"
    assert journal.refresh()
    assert journal.up(journal_props()) == "same"
    assert journal.up(journal_props() | {"groups": ["main", "second"]}) == "update"
    assert (root / "stacks/dev/state/second").is_dir()
    assert journal.up(journal_props() | {"root": "/elsewhere", "groups": ["main", "second"]}) == "replace"
    journal.delete()
    assert not root.exists()


def test_an_address_that_changes_is_remembered_and_replaces_nothing(deployment: Deployment) -> None:
    host = deployment.manage(NodeHostProvider)
    host.id, host.outputs = "x", host_props(deployment)
    assert host.diff(host_props(deployment, connection={"address": "elsewhere", "user": "root"})) == (
        True,
        [],
    )


def test_state_holds_no_more_than_the_name_of_a_provider(deployment: Deployment) -> None:
    for provider, path in (
        (NodeJournalProvider, b"providers.node_journal"),
        (NodeHostProvider, b"providers.node_host"),
    ):
        text = deployment.manage(provider).provider
        assert len(text) < 400
        assert path in base64.b64decode(text)


def test_a_journal_that_is_gone_is_read_as_gone_only_when_the_node_says_so(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    journal = opened(deployment, journal_props)
    identity = journal.id
    deployment.ssh.break_sessions("spark-a", "mux_client_request_session: read from master failed: Broken pipe")
    with pytest.raises(ProviderError):
        journal.refresh()
    assert journal.id == identity
    deployment.ssh.mend("spark-a")
    assert journal.refresh()
    for path in sorted(Path(deployment.root()).rglob("*"), reverse=True):
        path.rmdir()
    assert not journal.refresh()


def test_an_unreachable_node_is_one_line_with_node_and_step_and_no_trace(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    deployment.ssh.kill("spark-a")
    with pytest.raises(ProviderError) as failed:
        opened(deployment, journal_props)
    lines = str(failed.value).strip().splitlines()
    assert lines[0] == (
        "spark-vllm: spark-a, connect (TCP): expected sshd at 127.0.0.1 port "
        f"{deployment.ssh.port('spark-a')}, found: connection refused"
    )
    assert lines[1].startswith("  do: ")
    assert len(lines) == 2
    assert "Traceback" not in str(failed.value)


def test_deleting_a_journal_twice_is_fine(deployment: Deployment, journal_props: JournalProps) -> None:
    journal = opened(deployment, journal_props)
    journal.delete()
    journal.delete()
    assert not Path(deployment.root()).exists()


def test_nothing_is_undone_while_another_node_does_not_answer(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    journal = opened(deployment, journal_props)
    host = deployment.manage(NodeHostProvider)
    host.create(host_props(deployment, sysctls={"net.core.rmem_max": "67108864"}))
    deployment.ssh.kill("spark-b")
    for resource in (host, journal):
        with pytest.raises(ProviderError) as failed:
            resource.delete()
        assert "spark-b, connect (TCP)" in str(failed.value)
    assert deployment.host().sysctls["net.core.rmem_max"] == "67108864"
    assert Path(deployment.root()).is_dir()


def test_the_journal_s_end_takes_our_containers_and_volumes_with_it(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    journal = opened(deployment, journal_props)
    deployment.host().set_container("ours", Labels={"spark-vllm.stack": "dev"})
    deployment.host().set_container("theirs", Labels={"spark-vllm.stack": "prod"})
    journal.delete()
    assert list(deployment.host().read()["containers"]) == ["theirs"]


def test_a_resource_is_read_through_the_address_of_the_settings(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    journal = opened(deployment, journal_props)
    deployment.ssh.move("spark-a", "spark-a.new")
    deployment.next_run({"nodes[0].management_address": "spark-a.new"})
    journal.servicer = deployment.servicer
    assert journal.outputs["connection"]["address"] == "spark-a"
    assert journal.refresh()
    assert journal.up(journal_props() | {"connection": deployment.connection("spark-a.new")}) == "update"


def test_a_node_that_the_settings_no_longer_name_is_reached_as_its_journal_remembers(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    journal = opened(deployment, journal_props, "spark-b")
    deployment.next_run(
        {
            "nodes": deployment.config["nodes"][:1],
            "groups.main.nodes": ["spark-a"],
            "groups.main.serving.tensor_parallel_size": 1,
        }
    )
    journal.servicer = deployment.servicer
    assert journal.refresh()
    journal.delete()
    assert not Path(deployment.root("spark-b")).exists()


def test_a_node_that_nobody_remembers_is_told_so(deployment: Deployment) -> None:
    with pytest.raises(ProviderError) as failed:
        deployment.manage(NodeHostProvider).create(host_props(deployment) | {"node": "spark-c", "connection": {}})
    assert "nodes: expected the node spark-c in the settings, found none of that name" in str(failed.value)


def test_the_life_of_a_host(deployment: Deployment, journal_props: JournalProps) -> None:
    opened(deployment, journal_props)
    host = deployment.manage(NodeHostProvider)
    wanted = {"net.core.rmem_max": "67108864"}
    host.create(host_props(deployment, sysctls=wanted))
    assert deployment.host().sysctls["net.core.rmem_max"] == "67108864"
    assert (host.outputs["docker"], host.outputs["gpu"], host.outputs["repair"]) == ("29.2.1", "none", "none")
    assert host.refresh()
    assert host.up(host_props(deployment, sysctls=wanted)) == "same"
    assert host.up(host_props(deployment, sysctls=wanted | {"net.core.wmem_max": "9"})) == "update"
    assert host.up(host_props(deployment, sysctls={"net.core.wmem_max": "9"})) == "update"
    assert deployment.host().sysctls == {"net.core.rmem_max": "212992", "net.core.wmem_max": "9"}
    host.delete()
    assert deployment.host().sysctls == {"net.core.rmem_max": "212992", "net.core.wmem_max": "1"}


def test_a_parameter_changed_by_hand_shows_as_a_difference_and_is_set_back(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    opened(deployment, journal_props)
    host = deployment.manage(NodeHostProvider)
    props = host_props(deployment, sysctls={"net.core.rmem_max": "67108864"})
    host.create(props)
    deployment.host().set_sysctls({"net.core.rmem_max": "1", "net.core.wmem_max": "1"})
    assert host.refresh()
    assert host.inputs["sysctls"] == {"net.core.rmem_max": "1"}
    assert host.up(props) == "update"
    assert deployment.host().sysctls["net.core.rmem_max"] == "67108864"
    assert host.up(props) == "same"
    host.delete()
    assert deployment.host().sysctls["net.core.rmem_max"] == "212992"


def test_a_file_of_ours_that_was_altered_or_removed_asks_for_repair(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    opened(deployment, journal_props)
    path = Path(deployment.root()) / "stacks/dev/files/hash/runtime.pyz"
    digest = hashlib.sha256(b"runtime").hexdigest()
    props = host_props(deployment, files={str(path): digest})
    host = deployment.manage(NodeHostProvider)
    host.create(props)
    assert path.parent.is_dir()
    path.write_bytes(b"runtime")
    assert host.refresh()
    assert host.up(props) == "same"
    seen = {host.outputs["repair"]}
    for damage in (lambda: path.write_bytes(b"altered"), path.unlink):
        damage()
        host.refresh()
        assert host.up(props) == "update"
        seen.add(host.outputs["repair"])
        path.write_bytes(b"runtime")
        host.refresh()
        assert host.up(props) == "same"
    assert len(seen) == 3


def test_a_create_that_failed_half_way_is_undone_by_the_journal(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    journal = opened(deployment, journal_props)
    deployment.host().change(sysctl_fails="net.core.wmem_max")
    host = deployment.manage(NodeHostProvider)
    with pytest.raises(ProviderError) as failed:
        host.create(host_props(deployment, sysctls={"net.core.rmem_max": "7", "net.core.wmem_max": "7"}))
    assert "spark-a (host.sysctls): expected to set net.core.wmem_max" in str(failed.value)
    assert host.id is None
    assert deployment.host().sysctls["net.core.rmem_max"] == "7"
    deployment.host().change(sysctl_fails="")
    journal.delete()
    assert deployment.host().sysctls == {"net.core.rmem_max": "212992", "net.core.wmem_max": "1"}


def test_a_run_that_was_killed_while_it_changed_a_host_is_undone_by_the_journal(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    journal = opened(deployment, journal_props)
    deployment.host().change(hang_on="sysctl")
    host = deployment.manage(NodeHostProvider)
    call = deployment.servicer.start(
        "Create", host.create_request(host_props(deployment, sysctls={"net.core.rmem_max": "7"}))
    )
    end = time.monotonic() + 60
    while not deployment.host().calls("sysctl") and time.monotonic() < end:
        time.sleep(0.02)
    deployment.servicer.kill()
    with pytest.raises(grpc.RpcError):
        call.result()
    assert deployment.host().sysctls["net.core.rmem_max"] == "7"
    deployment.host().change(hang_on="")
    deployment.next_run()
    journal.servicer = deployment.servicer
    assert journal.refresh()
    journal.delete()
    assert deployment.host().sysctls["net.core.rmem_max"] == "212992"


def test_values_that_are_not_known_yet_pass_check_and_count_as_a_change(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    for provider, props in (
        (NodeJournalProvider, journal_props()),
        (NodeHostProvider, host_props(deployment)),
    ):
        resource = deployment.manage(provider)
        inputs = resource.check(props)
        unknown = dict.fromkeys(inputs, UNKNOWN)
        assert resource.check(unknown).keys() == inputs.keys()
        resource.id, resource.outputs = "x", inputs
        assert resource.diff(unknown)[0] is True


def test_a_diff_has_no_opinion_on_the_order_of_a_map_or_the_kind_of_a_number(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    host = deployment.manage(NodeHostProvider)
    host.id, host.outputs = "x", host_props(deployment, sysctls={"a.b": "1", "c.d": "2"})
    assert host.diff(host_props(deployment, sysctls={"c.d": "2", "a.b": "1"})) == (False, [])
    journal = deployment.manage(NodeJournalProvider)
    journal.id, journal.outputs = "x", journal_props() | {"connection": {"address": "x", "port": 22.0}}
    assert journal.diff(journal_props() | {"connection": {"port": 22, "address": "x"}}) == (False, [])


def test_settings_that_cannot_be_used_are_told_before_anything_is_asked(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    deployment.next_run({"nodes[0].usr": "x"})
    with pytest.raises(ProviderError) as failed:
        deployment.manage(NodeJournalProvider).check(journal_props())
    assert "nodes[0].usr: found an unknown key; did you mean 'user'?" in str(failed.value)
    assert "Traceback" not in str(failed.value)
    assert deployment.ssh.lines("spark-a") == []


def test_sudo_s_password_reaches_the_node_and_shows_nowhere(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    marker = "marker-a1b2c3d4"
    deployment.ssh.be("spark-a", "user", sudo=marker)
    deployment.next_run(sudo_password=marker)
    opened(deployment, journal_props)
    host = deployment.manage(NodeHostProvider)
    host.create(host_props(deployment, sysctls={"net.core.rmem_max": "7"}))
    assert deployment.host().sysctls["net.core.rmem_max"] == "7"
    assert marker not in str(host.outputs)
    assert not any(marker in line for line in deployment.ssh.lines("spark-a") + deployment.ssh.sudo_calls("spark-a"))


TUNING = {"gpu_clock_cap_mhz": "2150", "remove_ipc": "false", "memory_floor_mib": "4096"}


@pytest.fixture
def tuned(deployment: Deployment) -> TunedHost:
    """The first node, with systemd, logind and swap."""
    return TunedHost(deployment.host().base, deployment.host().node)


def placed_file(content: str = "", **changes: Any) -> dict[str, Any]:
    digest = hashlib.sha256((PROJECT / "LICENSE").read_bytes()).hexdigest()
    return {"source": "LICENSE", "content": content or digest, "mode": "0644", "sudo": True, **changes}


def test_the_life_of_tuning(deployment: Deployment, journal_props: JournalProps, tuned: TunedHost) -> None:
    journal = opened(deployment, journal_props)
    host = deployment.manage(NodeHostProvider)
    props = host_props(deployment, tuning=TUNING, placed={"/etc/owner/license": placed_file()})
    host.create(props)
    assert (tuned.says("cap"), tuned.says("remove-ipc")) == ("2150", "false")
    assert tuned.file("/etc/owner/license").read_bytes() == (PROJECT / "LICENSE").read_bytes()
    assert host.refresh()
    assert host.up(props) == "same"
    changed = TUNING | {"gpu_clock_cap_mhz": "2000"}
    del changed["remove_ipc"]
    assert host.up(host_props(deployment, tuning=changed)) == "update"
    assert (tuned.says("cap"), tuned.says("remove-ipc")) == ("2000", "true")
    assert not tuned.file("/etc/owner").exists()
    host.delete()
    assert tuned.says("cap") == "none"
    assert list(tuned.file("/etc/systemd/system").iterdir()) == []
    journal.delete()
    assert not Path(deployment.root()).exists()


def test_a_drift_of_tuning_shows_by_its_name_and_is_repaired(
    deployment: Deployment, journal_props: JournalProps, tuned: TunedHost
) -> None:
    opened(deployment, journal_props)
    host = deployment.manage(NodeHostProvider)
    props = host_props(deployment, tuning=TUNING, placed={"/etc/owner/license": placed_file()})
    host.create(props)
    tuned.file("/etc/systemd/logind.conf.d/60-spark-vllm.conf").unlink()
    tuned.file("/etc/owner/license").write_text("altered")
    (tuned.machine / "units/spark-vllm-clock-cap.service.active").unlink()
    assert host.refresh()
    assert host.inputs["tuning"] == TUNING | {"gpu_clock_cap_mhz": "2150, not active", "remove_ipc": "absent"}
    altered = hashlib.sha256(b"altered").hexdigest()
    assert host.inputs["placed"] == {"/etc/owner/license": placed_file(altered)}
    assert host.up(props) == "update"
    assert host.refresh()
    assert host.up(props) == "same"


def test_a_state_of_an_earlier_version_without_tuning_is_read_and_updated(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    opened(deployment, journal_props)
    host = deployment.manage(NodeHostProvider)
    old = host_props(deployment, sysctls={"net.core.rmem_max": "7"})
    host.create(old)
    for name in ("tuning", "placed"):
        host.outputs.pop(name)
        host.inputs.pop(name)
    assert host.refresh()
    assert host.up(old) in ("same", "update")
    host.delete()
    assert deployment.host().sysctls["net.core.rmem_max"] == "212992"


def test_a_lost_state_adopts_the_tuning_and_destroy_restores_what_was_there_at_first(
    deployment: Deployment, journal_props: JournalProps, tuned: TunedHost
) -> None:
    opened(deployment, journal_props)
    props = host_props(deployment, tuning=TUNING | {"docker_cgroup_driver": "cgroupfs"})
    deployment.manage(NodeHostProvider).create(props)
    assert tuned.count("docker-restarts") == 1
    deployment.next_run()
    journal, host = opened(deployment, journal_props), deployment.manage(NodeHostProvider)
    host.create(props)
    assert (tuned.count("docker-restarts"), tuned.count("reloads")) == (1, 0)
    host.delete()
    journal.delete()
    assert (tuned.says("docker"), tuned.says("cap"), tuned.says("remove-ipc")) == ("systemd", "none", "true")


def test_two_stacks_that_contradict_each_other_are_told_and_nothing_changes(
    deployment: Deployment, journal_props: JournalProps, tuned: TunedHost
) -> None:
    for stack in ("dev", "prod"):
        deployment.manage(NodeJournalProvider).create(journal_props() | {"stack": stack})
    deployment.manage(NodeHostProvider).create(host_props(deployment, tuning={"gpu_clock_cap_mhz": "2150"}))
    other = deployment.manage(NodeHostProvider)
    with pytest.raises(ProviderError) as refused:
        other.create(host_props(deployment, stack="prod", tuning={"gpu_clock_cap_mhz": "2000", "swap": "off"}))
    assert "[setting-contradicted]" in str(refused.value)
    assert "gpu_clock_cap_mhz: 2000" in str(refused.value)
    assert "the stack dev declares gpu_clock_cap_mhz: 2150" in str(refused.value)
    assert "Traceback" not in str(refused.value)
    assert tuned.says("cap") == "2150"
    assert not tuned.file("/etc/systemd/system/spark-vllm-swap-off.service").exists()


def test_a_file_of_the_owner_that_changes_during_the_run_is_not_written(
    deployment: Deployment, journal_props: JournalProps, tuned: TunedHost
) -> None:
    opened(deployment, journal_props)
    with pytest.raises(ProviderError) as refused:
        deployment.manage(NodeHostProvider).create(
            host_props(deployment, placed={"/etc/owner/license": placed_file("0" * 64)})
        )
    assert "host.files: expected LICENSE as it was when this run began, found another content" in str(refused.value)
    assert not tuned.file("/etc/owner").exists()


def test_a_node_that_is_given_up_is_never_contacted_and_what_stays_is_told(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    journal = opened(deployment, journal_props, "spark-b")
    host = deployment.manage(NodeHostProvider)
    host.create(host_props(deployment, "spark-b", sysctls={"net.core.rmem_max": "7"}))
    deployment.ssh.kill("spark-b")
    deployment.next_run(
        {
            "nodes": deployment.config["nodes"][:1],
            "abandoned_nodes": ["spark-b"],
            "groups.main.nodes": ["spark-a"],
            "groups.main.serving.tensor_parallel_size": 1,
        }
    )
    asked = len(deployment.ssh.lines("spark-b"))
    for resource in (host, journal):
        resource.servicer = deployment.servicer
        before = dict(resource.outputs)
        assert resource.refresh()
        assert resource.outputs == before
        resource.delete()
    assert len(deployment.ssh.lines("spark-b")) == asked
    assert deployment.host("spark-b").sysctls["net.core.rmem_max"] == "7"
    told = deployment.servicer.said()
    assert "spark-b is given up; what was tuned on it stays: net.core.rmem_max" in told
    assert f"{deployment.root('spark-b')}/stacks/dev with the journal of what was changed" in told


def test_ctrl_c_while_a_host_boots_ends_the_wait_within_five_seconds(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    deployment.ssh.kill("spark-a")
    servicer = deployment.next_run({"ssh": {"boot_wait_s": 120}})
    journal = deployment.manage(NodeJournalProvider)
    making = servicer.start("Create", journal.create_request(journal_props()))
    time.sleep(2)
    assert not making.done()
    asked = time.monotonic()
    servicer.call("Cancel", empty_pb2.Empty())
    with pytest.raises(grpc.RpcError) as failed:
        making.result()
    assert time.monotonic() - asked < 5
    assert "interrupted; the node was not reached" in failed.value.details()
    assert "waiting up to 120 s" in servicer.said()
