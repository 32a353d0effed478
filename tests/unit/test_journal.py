"""The journal: what was there before stands, whatever happens between."""

from __future__ import annotations

import base64
import json
import stat
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_core.errors import CommandError, ObservationError, SparkError, UnreachableError
from spark_core.journal import (
    JournalEntry,
    StackFolder,
    close_journal,
    journal_exists,
    open_journal,
    read_journal,
    record,
    record_file,
    record_setup,
    undo,
)
from spark_core.journal.entry import ACTIVATIONS, parse_entry
from spark_core.journal.links import LinkNow, plan_link, plan_parameters
from spark_core.journal.undo import file_commands
from spark_core.transport.base import Command, Result
from spark_core.transport.ssh import write_file
from spark_core.tuning.items import ITEMS, Place
from tests.local_node import LocalNode
from tests.scripted_transport import ScriptedTransport

SYSCTL = """#!/bin/sh
# A kernel with the parameters that lie as files in $SYSCTLS.
name=${3%%=*}; value=${3#*=}
[ -e "$SYSCTLS/$name" ] || { echo "sysctl: cannot stat $name" >&2; exit 255; }
printf '%s\\n' "$value" > "$SYSCTLS/$name"
"""
NO_SUCH_LINK = '#!/bin/sh\necho "Cannot find device \\"$5\\"" >&2; exit 1\n'


@pytest.fixture
def node(tmp_path: Path) -> LocalNode:
    return LocalNode(programs=tmp_path / "programs")


@pytest.fixture
def folder(tmp_path: Path) -> StackFolder:
    return StackFolder(str(tmp_path / "root"), "dev")


def mode_of(path: str | Path) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def test_opening_makes_folders_that_only_the_deploy_user_can_read(node: LocalNode, folder: StackFolder) -> None:
    open_journal(node, folder, ["main"])
    for path in (
        folder.path,
        folder.journal,
        folder.files,
        folder.secrets,
        folder.state("main"),
        f"{folder.secrets}/main",
    ):
        assert mode_of(path) == 0o700, path


def test_opening_twice_keeps_what_is_there(node: LocalNode, folder: StackFolder) -> None:
    open_journal(node, folder)
    record(node, folder, JournalEntry("sysctl", "net.core.rmem_max", "1"))
    open_journal(node, folder, ["main"])
    assert [entry.old for entry in read_journal(node, folder)] == ["1"]


def test_a_root_folder_that_cannot_be_made_is_told_with_its_setting(node: LocalNode, tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")
    with pytest.raises(CommandError) as failed:
        open_journal(node, StackFolder(str(tmp_path / "root"), "dev"))
    assert failed.value.line.startswith(f"spark-a (node_root): expected a writable folder {tmp_path}/root/stacks/dev")


def test_a_journal_exists_only_once_it_is_open(node: LocalNode, folder: StackFolder) -> None:
    assert not journal_exists(node, folder)
    open_journal(node, folder)
    assert journal_exists(node, folder)


def test_a_silent_node_is_never_a_node_without_a_journal(folder: StackFolder) -> None:
    def silent(_: Command) -> Result:
        raise UnreachableError("no answer", node="spark-a", step="login")

    with pytest.raises(UnreachableError):
        journal_exists(ScriptedTransport("spark-a", silent), folder)


@pytest.mark.parametrize("status", [2, 126, 127, 255])
def test_a_test_that_could_not_be_made_is_no_answer_that_the_journal_is_gone(status: int, folder: StackFolder) -> None:
    node = ScriptedTransport("spark-a", lambda _: Result(status, "", "sh: fork: Cannot allocate memory"))
    with pytest.raises(SparkError):
        journal_exists(node, folder)


def test_the_first_record_of_a_thing_stands(node: LocalNode, folder: StackFolder) -> None:
    open_journal(node, folder)
    for old in ("first", "second", "third"):
        record(node, folder, JournalEntry("sysctl", "net.core.rmem_max", old))
    assert [entry.old for entry in read_journal(node, folder)] == ["first"]


def test_a_record_is_a_file_of_mode_600_and_leaves_no_other(node: LocalNode, folder: StackFolder) -> None:
    open_journal(node, folder)
    record(node, folder, JournalEntry("link", "enp1s0f1np1", "1500"))
    [path] = Path(folder.journal).iterdir()
    assert mode_of(path) == 0o600
    assert json.loads(path.read_text())["old"] == "1500"


def test_a_record_that_was_killed_half_way_does_not_stand(node: LocalNode, folder: StackFolder) -> None:
    open_journal(node, folder)
    entry = JournalEntry("sysctl", "net.core.rmem_max", "1")
    (Path(folder.journal) / f"{entry.file_name}.tmp.abc123").write_text('{"kind": "sys')
    assert read_journal(node, folder) == []
    record(node, folder, entry)
    assert [found.old for found in read_journal(node, folder)] == ["1"]


def test_a_record_whose_connection_was_cut_does_not_stand(folder: StackFolder) -> None:
    class CutNode(LocalNode):
        def run(self, cmd: Command) -> Result:
            return super().run(replace(cmd, stdin=cmd.stdin[:-7]))

    open_journal(LocalNode(), folder)
    with pytest.raises(CommandError):
        record(CutNode(), folder, JournalEntry("sysctl", "net.core.rmem_max", "1"))
    assert list(Path(folder.journal).iterdir()) == []


def test_entries_are_read_oldest_first(node: LocalNode, folder: StackFolder) -> None:
    open_journal(node, folder)
    for at in (30.0, 10.0, 20.0):
        record(node, folder, JournalEntry("sysctl", f"a.b{at:.0f}", "x", at=at))
    assert [entry.at for entry in read_journal(node, folder)] == [10.0, 20.0, 30.0]


def test_no_journal_is_an_empty_one(node: LocalNode, folder: StackFolder) -> None:
    assert read_journal(node, folder) == []


def test_a_rubbish_answer_is_no_answer_that_the_journal_is_gone(folder: StackFolder) -> None:
    with pytest.raises(ObservationError):
        journal_exists(ScriptedTransport("spark-a", lambda _: "Welcome to spark-a!"), folder)


def entry_with(**parts: object) -> str:
    """The text of an entry of a file with some parts changed."""
    whole = {"kind": "file", "target": "/etc/x", "old": None, "mode": "0644", "owner": "0:0", "at": 1.0}
    return json.dumps(whole | parts)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "an empty file"),
        ("rubbish", "no whole JSON"),
        (entry_with()[:-1], "no whole JSON"),
        ("[" * 50_000, "no whole JSON"),
        ("[]", "no object of JSON"),
        ("null", "no object of JSON"),
        ('{"kind": "sysctl"}', "no old"),
        (entry_with(x=1), "x, as only another version of this program writes"),
        (entry_with(kind="packet-filter"), "kind 'packet-filter'"),
        (entry_with(activation="nft"), "activation 'nft'"),
        (entry_with(domain="security"), "domain 'security'"),
        (entry_with(target=""), "target ''"),
        (entry_with(target=7), "target 7"),
        (entry_with(old="half a te"), "old 'half a te' of a file"),
        (entry_with(old=5), "old 5"),
        (entry_with(mode="rw-r--r--"), "mode 'rw-r--r--'"),
        (entry_with(owner="root:root"), "owner 'root:root'"),
        (entry_with(at="yesterday"), "at 'yesterday'"),
        (entry_with(addresses="192.168.0.1/24"), "addresses '192.168.0.1/24'"),
        (entry_with(parameters={"a": 1}), "parameters {'a': 1}"),
        (entry_with(up="yes"), "up 'yes'"),
        (entry_with(sudo=None), "sudo None"),
        (entry_with(kind="link", target="eth0", old="jumbo"), "old 'jumbo' of a link"),
        (entry_with(kind="sysctl", target="a.b"), "old None of a sysctl"),
        (entry_with(), "an entry of file /etc/x, whose file has another name"),
    ],
)
def test_an_entry_that_cannot_be_understood_stops_everything(
    text: str, found: str, node: LocalNode, folder: StackFolder
) -> None:
    open_journal(node, folder)
    record(node, folder, JournalEntry("sysctl", "a.b", "1"))
    (Path(folder.journal) / "file-0.json").write_text(text)
    asked = len(node.asked)
    with pytest.raises(ObservationError) as failed:
        undo(node, folder)
    assert failed.value.line == (f"spark-a: expected a journal entry of the stack dev in file-0.json, found {found}")
    assert len(node.asked) == asked + 1  # the journal was read, and nothing was done
    assert len(list(Path(folder.journal).iterdir())) == 2


@settings(max_examples=300)
@given(data=st.data())
def test_an_entry_that_is_damaged_anywhere_is_understood_wholly_or_not_at_all(data: st.DataObject) -> None:
    whole = asdict(JournalEntry("file", "/etc/x", "b2xk", "0640", "0:998", domain="host", folder="/etc/y", live="1"))
    anything = st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
        max_leaves=4,
    )
    whole[data.draw(st.sampled_from(sorted(whole)))] = data.draw(anything)
    try:
        entry = parse_entry(json.dumps(whole))
    except ValueError:
        return
    assert parse_entry(json.dumps(asdict(entry))) == entry
    if entry.kind == "file":
        assert file_commands(StackFolder("/root", "dev"), entry, b"") is not None
        assert base64.b64decode(entry.old or "", validate=True) is not None


def test_every_activation_that_tuning_writes_is_understood() -> None:
    place = Place(StackFolder("/root", "dev"), "aurora")
    written = {file.activation for item in ITEMS.values() for file in item.files(place, "0")}
    assert written <= set(ACTIVATIONS)


@settings(max_examples=5)
@given(content=st.binary(max_size=200), mode=st.sampled_from([0o600, 0o644, 0o755, 0o400]))
def test_a_recorded_file_comes_back_byte_for_byte(
    content: bytes, mode: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("file")
    node, folder = LocalNode(), StackFolder(str(place / "root"), "dev")
    path = place / "etc" / "a file.yaml"
    path.parent.mkdir()
    path.write_bytes(content)
    path.chmod(mode)
    open_journal(node, folder)
    record_file(node, folder, str(path))
    node.run(write_file(str(path), b"ours", mode="0600"))
    record_file(node, folder, str(path))  # a second run, which finds ours: the first record stands
    assert undo(node, folder) == [f"put back file {path}"]
    assert path.read_bytes() == content
    assert mode_of(path) == mode
    assert read_journal(node, folder) == []


def test_a_file_that_was_not_there_is_gone_afterwards(node: LocalNode, folder: StackFolder, tmp_path: Path) -> None:
    path = tmp_path / "60-spark-vllm.yaml"
    open_journal(node, folder)
    record_file(node, folder, str(path))
    path.write_text("ours")
    undo(node, folder)
    assert not path.exists()


def test_what_was_changed_last_is_put_back_first(node: LocalNode, folder: StackFolder) -> None:
    open_journal(node, folder)
    for at, name in ((1.0, "one"), (2.0, "two"), (3.0, "three")):
        record(node, folder, JournalEntry("file", f"/nonexistent/{name}", None, at=at))
    assert undo(node, folder) == [f"put back file /nonexistent/{name}" for name in ("three", "two", "one")]


def test_only_the_asked_targets_are_put_back(
    node: LocalNode, folder: StackFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYSCTLS", str(tmp_path))
    node.install("sysctl", SYSCTL)
    open_journal(node, folder)
    for name in ("net.core.rmem_max", "net.core.wmem_max"):
        (tmp_path / name).write_text("ours\n")
        record(node, folder, JournalEntry("sysctl", name, "212992"))
    assert undo(node, folder, [("sysctl", "net.core.rmem_max"), ("sysctl", "never.recorded")]) == [
        "put back sysctl net.core.rmem_max"
    ]
    assert (tmp_path / "net.core.rmem_max").read_text() == "212992\n"
    assert (tmp_path / "net.core.wmem_max").read_text() == "ours\n"
    assert [entry.target for entry in read_journal(node, folder)] == ["net.core.wmem_max"]


def test_what_could_not_be_put_back_stays_in_the_journal(
    node: LocalNode, folder: StackFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYSCTLS", str(tmp_path))
    node.install("sysctl", SYSCTL)
    open_journal(node, folder)
    record(node, folder, JournalEntry("sysctl", "kernel.ostype", "1"))
    with pytest.raises(SparkError) as failed:
        close_journal(node, folder)
    assert failed.value.line == (
        "spark-a: expected to put sysctl kernel.ostype back: expected exit status 0, found 255 "
        "(sysctl: cannot stat kernel.ostype)"
    )
    assert failed.value.do == "run destroy again; the old value is still in the journal"
    assert [entry.target for entry in read_journal(node, folder)] == ["kernel.ostype"]


def test_a_parameter_whose_module_is_not_loaded_any_more_needs_no_putting_back(
    node: LocalNode, folder: StackFolder
) -> None:
    open_journal(node, folder)
    record(node, folder, JournalEntry("sysctl", "gone.parameter", "1"))
    assert undo(node, folder) == ["put back sysctl gone.parameter"]
    assert read_journal(node, folder) == []


def test_a_link_whose_cable_was_pulled_needs_no_putting_back(node: LocalNode, folder: StackFolder) -> None:
    node.install("ip", NO_SUCH_LINK)
    open_journal(node, folder)
    record(node, folder, JournalEntry("link", "enp1s0f1np1", "1500"))
    assert undo(node, folder) == ["put back link enp1s0f1np1"]
    assert read_journal(node, folder) == []


def test_an_undo_that_was_cut_between_two_entries_goes_on_where_it_was(folder: StackFolder, tmp_path: Path) -> None:
    node = LocalNode()
    open_journal(node, folder)
    for name in ("one", "two"):
        path = tmp_path / name
        path.write_text("old " + name)
        record_file(node, folder, str(path))
        path.write_text("ours")
    renamed = 0

    def cut(cmd: Command) -> None:
        nonlocal renamed
        if cmd.argv[0] == "mv":
            renamed += 1
            if renamed == 2:
                raise UnreachableError("connection lost", node="spark-a", step="login")

    node.before = cut
    with pytest.raises(UnreachableError):
        undo(node, folder)
    assert len(read_journal(node, folder)) == 2
    node.before = lambda _: None
    close_journal(node, folder)
    assert [(tmp_path / name).read_text() for name in ("one", "two")] == ["old one", "old two"]
    assert not Path(folder.root).exists()


def test_closing_leaves_no_trace_and_may_be_repeated(node: LocalNode, folder: StackFolder) -> None:
    open_journal(node, folder, ["main"])
    (Path(folder.root) / "images").mkdir()
    assert close_journal(node, folder) == []
    assert not Path(folder.root).exists()
    assert close_journal(node, folder) == []


def test_closing_leaves_other_stacks_and_the_shared_weights(node: LocalNode, folder: StackFolder) -> None:
    other = StackFolder(folder.root, "prod")
    open_journal(node, other)
    open_journal(node, folder)
    Path(folder.weights).mkdir()
    close_journal(node, folder)
    assert Path(other.journal).is_dir()
    assert Path(folder.weights).is_dir()
    assert not Path(folder.path).exists()


@pytest.mark.parametrize("path", ["/", "", "/home/x", "/srv/stacks/"])
def test_closing_removes_nothing_that_is_not_a_stack_folder(path: str, node: LocalNode, tmp_path: Path) -> None:
    class Wrong(StackFolder):
        @property
        def path(self) -> str:
            return str(tmp_path) + path

    (tmp_path / "kept").touch()
    with pytest.raises(CommandError):
        close_journal(node, Wrong("/nonexistent", "dev"))
    assert (tmp_path / "kept").exists()


@given(target=st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300))
def test_the_name_of_an_entry_is_a_plain_file_name(target: str) -> None:
    name = JournalEntry("file", target, None).file_name
    assert Path(name).name == name
    assert len(name) < 40


def test_a_link_gets_back_what_it_had_and_loses_only_what_we_added() -> None:
    entry = JournalEntry(
        "link",
        "enp1s0f1np1",
        "1500",
        up=False,
        addresses=["10.0.0.1/24", "10.0.0.2/24"],
        added=["192.168.200.12/24", "192.168.201.12/24"],
        parameters={"ipv4/conf/enp1s0f1np1/rp_filter": "0", "ipv6/conf/enp1s0f1np1/mtu": "1500", "gone": "1"},
    )
    now = LinkNow(
        ("192.168.200.12/24", "10.0.0.2/24", "172.16.0.1/24"),
        {"ipv4/conf/enp1s0f1np1/rp_filter": "2", "ipv6/conf/enp1s0f1np1/mtu": "1500"},
    )
    assert [" ".join(cmd.argv) for cmd in plan_link(entry, now)] == [
        "ip address del 192.168.200.12/24 dev enp1s0f1np1",
        "ip address replace 10.0.0.1/24 dev enp1s0f1np1",
        "ip link set dev enp1s0f1np1 mtu 1500",
        "ip link set dev enp1s0f1np1 down",
    ]
    [parameter] = plan_parameters(entry, now)
    assert parameter.argv == ("sysctl", "-q", "-w", "net/ipv4/conf/enp1s0f1np1/rp_filter=0")


def test_a_file_goes_back_with_its_mode_and_owner(folder: StackFolder) -> None:
    entry = JournalEntry("file", "/etc/x", "b2xk", "0640", "0:998")
    staged, copied, renamed = file_commands(folder, entry, b"old")
    assert (staged.stdin, staged.sudo) == (b"old", False)
    assert copied.argv == (
        *("install", "-m", "0640", "-o", "0", "-g", "998", "-T", "--"),
        *(f"{folder.staging}/etc_x", "/etc/x.new"),
    )
    assert renamed.argv == ("mv", "-f", "-T", "--", "/etc/x.new", "/etc/x")


def test_a_file_goes_with_the_folder_that_was_made_for_it_unless_others_use_it(
    node: LocalNode, folder: StackFolder, tmp_path: Path
) -> None:
    open_journal(node, folder)
    for name in ("empty", "used"):
        record_file(node, folder, f"{tmp_path}/{name}/x")
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("ours")
    (tmp_path / "used" / "theirs").touch()
    undo(node, folder)
    assert not (tmp_path / "empty").exists()
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["theirs"]


def test_a_setup_command_that_no_state_knows_of_is_taken_back(
    node: LocalNode, folder: StackFolder, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    open_journal(node, folder)
    record_setup(node, folder, {"motd": f"rm -f {made}", "other": "true"})
    made.touch()
    record_setup(node, folder, {"motd": f"rm -f {made}; true"})
    [entry] = read_journal(node, folder)
    assert (entry.kind, entry.target, entry.old) == ("command", "motd", f"rm -f {made}; true")
    close_journal(node, folder)
    assert not made.exists()


@pytest.mark.parametrize("stack", ["..", ".", ".dev", "-dev", "", "dev/x", "dev x", "dev\n"])
def test_a_stack_whose_folder_no_shell_would_find_is_refused(stack: str) -> None:
    with pytest.raises(SparkError, match="expected a name of the stack that begins with a letter, a digit or _"):
        StackFolder("/srv", stack)


@pytest.mark.parametrize("stack", ["dev", "_x", "0", "Dev.2-b_c"])
def test_a_stack_of_any_other_name_finds_its_journal_again(stack: str, node: LocalNode, folder: StackFolder) -> None:
    odd = StackFolder(folder.root, stack)
    open_journal(node, odd)
    record(node, odd, JournalEntry("sysctl", "a.b", "1"))
    assert [entry.target for entry in read_journal(node, odd)] == ["a.b"]
