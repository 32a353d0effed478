"""The host: facts from recorded outputs of real Sparks, kernel parameters, the files of ours."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_core.errors import CommandError, ObservationError
from spark_core.host import (
    apply_sysctls,
    observe_files,
    observe_host,
    observe_sysctls,
    parse_docker_version,
    parse_host,
    parse_release,
    plan_sysctls,
    prune_files,
)
from spark_core.journal import StackFolder, open_journal, read_journal
from tests.local_node import LocalNode
from tests.scripted_transport import ScriptedTransport

SPARK = Path(__file__).resolve().parents[1] / "fixtures" / "spark"
SYSCTL = """#!/bin/sh
# A kernel with the parameters that lie as files in $SYSCTLS; a file "limited" bounds what is taken.
name=${3%%=*}; value=${3#*=}
[ -e "$SYSCTLS/$name" ] || exit 255
[ ! -e "$SYSCTLS/limited" ] || value=$(cat "$SYSCTLS/limited")
printf '%s\\n' "$value" > "$SYSCTLS/$name"
"""
CAT = """#!/bin/sh
# Only root, if anybody, reads a parameter that $READABLE does not name.
case "$1" in
  */proc/sys/*) case " $READABLE " in *" ${1##*/} "*) ;; *) echo "cat: $1: Permission denied" >&2; exit 1 ;; esac ;;
esac
exec /bin/cat "$@"
"""


def recorded(path: str) -> str:
    return (SPARK / path).read_text()


def observation(**changes: str) -> str:
    """The output of the observation script on a Spark, from recorded parts."""
    sections = {
        "architecture": recorded("uname-m/aarch64.txt"),
        "kernel": "6.14.0-1013-nvidia",
        "os": recorded("os-release/ubuntu-24.04.4.txt"),
        "dgx": recorded("dgx-release/spark-7.2.3-ota-7.5.0.txt"),
        "memory": recorded("meminfo/gx10-total-and-available.txt") + "SwapTotal:             0 kB\n",
        "disk": "3500000000000",
        "docker": "29.2.1 arm64",
        "gpu": "NVIDIA GB10, 580.142",
    } | changes
    return "".join(f"=== {name}\n{text.rstrip()}\n" for name, text in sections.items())


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kernel"
    folder.mkdir()
    monkeypatch.setenv("SYSCTLS", str(folder))
    (folder / "net.core.rmem_max").write_text("212992\n")
    (folder / "net.ipv4.tcp_rmem").write_text("4096\t131072\t6291456\n")
    for path in list(folder.iterdir()):
        place = tmp_path / "host/proc/sys" / path.name.replace(".", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path)
    return folder


@pytest.fixture
def node(tmp_path: Path) -> LocalNode:
    node = LocalNode(programs=tmp_path / "programs", sandbox=tmp_path / "host")
    node.install("sysctl", SYSCTL)
    return node


@pytest.fixture
def folder(tmp_path: Path, node: LocalNode) -> StackFolder:
    folder = StackFolder(str(tmp_path / "root"), "dev")
    open_journal(node, folder)
    return folder


def test_the_facts_of_a_spark() -> None:
    facts = parse_host(observation())
    assert facts.architecture == "arm64"
    assert facts.os == "Ubuntu 24.04.4 LTS"
    assert facts.dgx_release == "7.2.3"
    assert facts.memory_total_bytes == 127535084 * 1024
    assert facts.memory_available_bytes == 14386092 * 1024
    assert (facts.docker, facts.docker_problem) == ("29.2.1", None)
    assert facts.gpu == "NVIDIA GB10, 580.142"


def test_a_host_that_is_no_spark_has_no_dgx_release_and_no_gpu() -> None:
    facts = parse_host(observation(architecture="x86_64", dgx="", gpu="", os=""))
    assert (facts.architecture, facts.dgx_release, facts.gpu, facts.os) == ("amd64", None, None, "unknown")


@pytest.mark.parametrize("path", sorted((SPARK / "dgx-release").iterdir()), ids=lambda path: path.stem)
def test_each_vendor_s_dgx_release_is_understood(path: Path) -> None:
    values = parse_release(path.read_text())
    assert values["DGX_NAME"] == "DGX Spark"
    assert values["DGX_SWBUILD_VERSION"] == "7.2.3"


def test_a_blank_serial_number_is_an_empty_value() -> None:
    assert parse_release(recorded("dgx-release/dell-blank-serial.txt"))["DGX_SERIAL_NUMBER"] == ""


def test_of_several_updates_the_last_one_is_told() -> None:
    values = parse_release(recorded("dgx-release/asus-gx10-four-otas-french-date.txt"))
    assert values["DGX_OTA_VERSION"] == "7.6.0"


@pytest.mark.parametrize("text", ["", "# comment", "no sign", "=value", "a b=c"])
def test_lines_that_are_no_assignment_are_left_out(text: str) -> None:
    assert parse_release(text) == {}


@pytest.mark.parametrize(
    ("text", "version", "problem"),
    [
        ("29.2.1 arm64", "29.2.1", None),
        ("WARNING: old config\n28.0.4 amd64", "28.0.4", None),
        ("missing", None, "no docker command on the PATH of a non-interactive shell"),
        (
            "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock",
            None,
            "the deploy user may not use the Docker socket (is it in the docker group?)",
        ),
        (
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
            None,
            "the Docker daemon does not answer (is docker.service running?)",
        ),
        ("", None, "docker gave no version"),
        ("template parsing error", None, "template parsing error"),
    ],
    ids=["version", "warning before it", "missing", "permission", "stopped", "nothing", "rubbish"],
)
def test_a_docker_version_or_what_docker_said_instead(text: str, version: str | None, problem: str | None) -> None:
    assert parse_docker_version(text) == (version, problem)


@given(text=st.text(max_size=200))
def test_docker_gives_a_version_or_a_problem_and_never_both(text: str) -> None:
    version, problem = parse_docker_version(text)
    assert (version is None) != (problem is None)


@pytest.mark.parametrize("missing", ["architecture", "kernel", "os", "dgx", "memory", "disk", "docker", "gpu"])
def test_an_answer_without_one_of_the_facts_is_not_understood(missing: str) -> None:
    text = observation().replace(f"=== {missing}\n", "=== other\n")
    with pytest.raises(ObservationError) as failed:
        observe_host(ScriptedTransport("spark-a", lambda _: text), "/")
    assert failed.value.line.startswith("spark-a: expected the facts of the host, found an answer without")


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": "MemTotal: lots kB"},
        {"memory": "MemTotal:\nMemAvailable:"},
        {"disk": ""},
        {"disk": "Avail"},
    ],
)
def test_numbers_that_are_none_are_not_understood(changes: dict[str, str]) -> None:
    with pytest.raises(ObservationError):
        observe_host(ScriptedTransport("spark-a", lambda _: observation(**changes)), "/")


def test_the_observation_script_runs_on_this_machine_for_a_folder_that_is_not_there_yet(
    node: LocalNode, tmp_path: Path
) -> None:
    node.install(
        "docker",
        '#!/bin/sh\necho "Cannot connect to the Docker daemon. Is the docker daemon running?" >&2; exit 1\n',
    )
    facts = observe_host(node, str(tmp_path / "not" / "there"))
    assert facts.memory_total_bytes > facts.memory_available_bytes > 0
    assert facts.disk_free_bytes > 0
    assert facts.docker_problem == "the Docker daemon does not answer (is docker.service running?)"
    assert not (tmp_path / "not").exists()


def test_a_docker_and_a_driver_that_hang_are_not_a_dead_node(node: LocalNode, tmp_path: Path) -> None:
    node.install("timeout", '#!/bin/sh\n[ "$1 $2 $3" = "-k 1 8" ] || exit 9; shift 3; exec /usr/bin/timeout 0.2 "$@"\n')
    for program in ("docker", "nvidia-smi"):
        node.install(program, "#!/bin/sh\nexec sleep 30\n")
    facts = observe_host(node, str(tmp_path))
    assert (facts.docker, facts.gpu) == (None, None)
    assert facts.docker_problem == "the Docker daemon does not answer in 8 s"


@pytest.mark.usefixtures("kernel")
def test_kernel_parameters_are_read_with_single_blanks_and_absent_ones_told(node: LocalNode) -> None:
    names = ["net.core.rmem_max", "net.ipv4.tcp_rmem", "no.such"]
    assert observe_sysctls(node, names) == {
        "net.core.rmem_max": "212992",
        "net.ipv4.tcp_rmem": "4096 131072 6291456",
        "no.such": None,
    }


def as_user(node: LocalNode, monkeypatch: pytest.MonkeyPatch, user: str, root: str) -> None:
    """Only these parameters can be read by the deploy user and by root."""
    node.install("cat", CAT)
    node.before = lambda cmd: monkeypatch.setenv("READABLE", root if cmd.sudo else user)


@pytest.mark.usefixtures("kernel")
def test_a_parameter_that_only_root_reads_is_read_by_root(node: LocalNode, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(node, monkeypatch, "rmem_max", "rmem_max tcp_rmem")
    assert observe_sysctls(node, ["net.core.rmem_max", "net.ipv4.tcp_rmem", "no.such"]) == {
        "net.core.rmem_max": "212992",
        "net.ipv4.tcp_rmem": "4096 131072 6291456",
        "no.such": None,
    }
    assert [cmd.argv[-1] for cmd in node.asked if cmd.sudo] == ["net.ipv4.tcp_rmem"]


@pytest.mark.usefixtures("kernel")
def test_a_parameter_that_nobody_can_read_is_not_absent(node: LocalNode, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(node, monkeypatch, "", "")
    with pytest.raises(CommandError) as failed:
        observe_sysctls(node, ["net.core.rmem_max"])
    assert failed.value.line.startswith(
        "spark-a (host.sysctls): expected to read the kernel parameter net.core.rmem_max: "
    )


def test_a_cut_answer_about_parameters_is_not_absent() -> None:
    with pytest.raises(ObservationError):
        observe_sysctls(ScriptedTransport("spark-a", lambda _: "=== a.b\n1\n"), ["a.b", "c.d"])


def test_without_declared_parameters_the_node_is_not_asked() -> None:
    node = LocalNode()
    assert observe_sysctls(node, []) == {}
    assert observe_files(node, []) == {}
    assert node.asked == []


VALUES = st.dictionaries(st.sampled_from(["a.b", "c.d", "e.f"]), st.sampled_from(["1", "2", "1 2 3"]))


@given(wanted=VALUES)
def test_a_plan_for_what_is_already_so_is_empty(wanted: dict[str, str]) -> None:
    assert plan_sysctls(wanted, dict(wanted)) == []


@given(wanted=VALUES, found=VALUES)
def test_a_plan_brings_everything_to_its_wanted_value(wanted: dict[str, str], found: dict[str, str]) -> None:
    after: dict[str, str | None] = dict(found)
    for cmd in plan_sysctls(wanted, after):
        name, _, value = cmd.argv[-1].partition("=")
        after[name] = value
        assert cmd.sudo
    assert plan_sysctls(wanted, after) == []
    assert {name: after[name] for name in wanted} == wanted


def test_applying_records_the_old_value_first_and_is_done_once(
    node: LocalNode, folder: StackFolder, kernel: Path
) -> None:
    wanted = {"net.core.rmem_max": "67108864"}
    assert apply_sysctls(node, folder, wanted, []) == wanted
    assert [(entry.target, entry.old) for entry in read_journal(node, folder)] == [("net.core.rmem_max", "212992")]
    node.asked.clear()
    apply_sysctls(node, folder, wanted, [])
    assert [cmd for cmd in node.asked if cmd.sudo] == []
    assert (kernel / "net.core.rmem_max").read_text() == "67108864\n"


def test_a_drift_that_was_repaired_does_not_pass_for_the_old_value(
    node: LocalNode, folder: StackFolder, kernel: Path
) -> None:
    path, wanted = kernel / "net.core.rmem_max", {"net.core.rmem_max": "120"}
    path.write_text("120\n")
    apply_sysctls(node, folder, wanted, [])
    path.write_text("77\n")
    apply_sysctls(node, folder, wanted, [])
    assert path.read_text() == "120\n"
    assert [(entry.target, entry.old) for entry in read_journal(node, folder)] == [("net.core.rmem_max", "120")]
    apply_sysctls(node, folder, {}, ["net.core.rmem_max"])
    assert path.read_text() == "120\n"


def test_what_the_journal_has_is_not_recorded_again(node: LocalNode, folder: StackFolder, kernel: Path) -> None:
    wanted = {"net.core.rmem_max": "1", "net.ipv4.tcp_rmem": "4096 131072 6291456"}
    apply_sysctls(node, folder, wanted, [])
    assert len(read_journal(node, folder)) == 2
    node.asked.clear()
    apply_sysctls(node, folder, wanted, [])
    assert [cmd.stdin for cmd in node.asked if cmd.stdin] == []
    assert (kernel / "net.core.rmem_max").read_text() == "1\n"


def test_what_is_no_longer_declared_goes_back(node: LocalNode, folder: StackFolder, kernel: Path) -> None:
    apply_sysctls(node, folder, {"net.core.rmem_max": "1"}, [])
    apply_sysctls(node, folder, {}, ["net.core.rmem_max"])
    assert (kernel / "net.core.rmem_max").read_text() == "212992\n"
    assert read_journal(node, folder) == []


def test_a_second_value_keeps_the_first_old_one(node: LocalNode, folder: StackFolder, kernel: Path) -> None:
    apply_sysctls(node, folder, {"net.core.rmem_max": "1"}, [])
    apply_sysctls(node, folder, {"net.core.rmem_max": "2"}, [])
    apply_sysctls(node, folder, {}, ["net.core.rmem_max"])
    assert (kernel / "net.core.rmem_max").read_text() == "212992\n"


@pytest.mark.usefixtures("kernel")
def test_a_parameter_that_is_not_there_changes_nothing(node: LocalNode, folder: StackFolder, kernel: Path) -> None:
    with pytest.raises(CommandError) as failed:
        apply_sysctls(node, folder, {"net.core.rmem_max": "1", "no.such": "1"}, [])
    assert failed.value.line == "spark-a (host.sysctls): expected the kernel parameter no.such, found none of that name"
    assert (kernel / "net.core.rmem_max").read_text() == "212992\n"


def test_a_value_that_the_kernel_bounds_is_told(node: LocalNode, folder: StackFolder, kernel: Path) -> None:
    (kernel / "limited").write_text("1000")
    with pytest.raises(CommandError) as failed:
        apply_sysctls(node, folder, {"net.core.rmem_max": "9999"}, [])
    assert failed.value.line == "spark-a (host.sysctls): expected net.core.rmem_max = 9999, found 1000 after setting it"
    assert len(read_journal(node, folder)) == 1


def test_files_are_told_by_their_content_and_absent_ones_too(tmp_path: Path) -> None:
    there = tmp_path / "a file with blanks"
    there.write_bytes(b"content")
    found = observe_files(LocalNode(), [str(there), str(tmp_path / "none"), str(tmp_path)])
    assert found == {
        str(there): hashlib.sha256(b"content").hexdigest(),
        str(tmp_path / "none"): "absent",
        str(tmp_path): "absent",
    }


def test_files_no_longer_wanted_go_unless_a_container_has_them_mounted(tmp_path: Path) -> None:
    folder = StackFolder(str(tmp_path / "root"), "dev")
    for name in ("wanted", "mounted", "stale"):
        (Path(folder.files) / name).mkdir(parents=True)
        (Path(folder.files) / name / "runtime.pyz").write_text(name)
    programs = tmp_path / "bin"
    programs.mkdir()
    docker = programs / "docker"
    docker.write_text(f'#!/bin/sh\n[ "$1" = ps ] && echo c1 || echo "{folder.files}/mounted/runtime.pyz /etc "\n')
    docker.chmod(0o755)
    node = LocalNode(programs=programs)
    assert prune_files(node, folder, [f"{folder.files}/wanted/runtime.pyz"]) == ["stale"]
    assert sorted(path.name for path in Path(folder.files).iterdir()) == ["mounted", "wanted"]


def test_no_file_is_removed_when_docker_cannot_be_asked(tmp_path: Path) -> None:
    folder = StackFolder(str(tmp_path / "root"), "dev")
    (Path(folder.files) / "stale").mkdir(parents=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "docker").write_text("#!/bin/sh\nexit 1\n")
    (programs / "docker").chmod(0o755)
    with pytest.raises(CommandError):
        prune_files(LocalNode(programs=programs), folder, [])
    assert (Path(folder.files) / "stale").is_dir()


def test_no_file_is_removed_when_docker_cannot_tell_the_mounts(tmp_path: Path) -> None:
    folder = StackFolder(str(tmp_path / "root"), "dev")
    (Path(folder.files) / "mounted").mkdir(parents=True)
    node = LocalNode(programs=tmp_path / "bin")
    node.install(
        "docker",
        f'#!/bin/sh\n[ "$1" = ps ] && printf "c1\\nc2\\n" && exit\necho "$*" >> {tmp_path}/asked\n'
        'echo "/etc "; exit 1\n',
    )
    with pytest.raises(CommandError):
        prune_files(node, folder, [])
    assert (Path(folder.files) / "mounted").is_dir()
    [asked] = (tmp_path / "asked").read_text().splitlines()
    assert asked.endswith(" c1 c2")
