"""What the settings of the hosts become in the program."""

from __future__ import annotations

import hashlib
from typing import Any

from tests.config_cases import apply_change
from tests.program.rendering import PROJECT, Rendering, render, settings_of


def with_host(host: dict[str, Any]) -> Rendering:
    return render(apply_change(settings_of("spark"), {"host": host}), stack="spark")


def test_each_tuning_is_an_input_of_its_own_and_files_go_by_their_content() -> None:
    found = with_host(
        {
            "sysctls": {"net.core.rmem_max": 1},
            "panic_reboot_s": 10,
            "gpu_clock_cap_mhz": 2150,
            "remove_ipc": False,
            "files": [{"source": "LICENSE", "target": "/etc/owner/license"}],
        }
    )
    parameters = {"kernel.panic": "10", "kernel.panic_on_oops": "1", "net.core.rmem_max": "1"}
    for node in ("spark-a", "spark-b"):
        inputs = found.by_name[f"NodeHost {node}-host"]["inputs"]
        assert inputs["sysctls"] == parameters
        assert inputs["tuning"] == {
            "sysctls_at_boot": "kernel.panic = 10; kernel.panic_on_oops = 1; net.core.rmem_max = 1",
            "gpu_clock_cap_mhz": "2150",
            "remove_ipc": "false",
        }
        digest = hashlib.sha256((PROJECT / "LICENSE").read_bytes()).hexdigest()
        assert inputs["placed"] == {
            "/etc/owner/license": {"source": "LICENSE", "content": digest, "mode": "0644", "sudo": True}
        }


def test_all_of_it_is_off_unless_set() -> None:
    inputs = with_host({}).by_name["NodeHost spark-a-host"]["inputs"]
    assert (inputs["sysctls"], inputs["tuning"], inputs["placed"]) == ({}, {}, {})


def test_files_and_setup_commands_go_with_the_journal_which_knows_what_takes_them_back() -> None:
    found = with_host({"setup": [{"name": "motd", "create": "true", "delete": "true"}]})
    items = [*found.of_type("CopyToRemote"), *found.of_type("Command")]
    assert len(items) == 4
    for item in items:
        assert item["deleted_with"] == f"{item['parent']}-journal", item["name"]


def test_a_file_that_is_not_in_the_project_is_refused() -> None:
    found = with_host({"files": [{"source": "no/such.conf", "target": "/etc/owner/x"}]})
    assert "host.files: expected the file no/such.conf in the project folder, found: No such file" in found.error
