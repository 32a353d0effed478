"""What a program may expect of pulumi-command, and what it may not.

The suite drives a plugin binary over gRPC against a real sshd. It holds for the released plugin and for our
stand-in alike; SPARK_VLLM_COMMAND_PLUGIN names another binary to hold against it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.toolchain.resource_plugin import (
    ARCHIVE,
    ASSET,
    SIGNATURE,
    Plugin,
    Properties,
    find_plugin,
    is_secret,
    plain,
    running,
    secret,
)
from tests.toolchain.ssh_server import SshServer, free_port

LOCAL = "command:local:Command"
REMOTE = "command:remote:Command"
COPY = "command:remote:CopyToRemote"


@pytest.fixture
def connection(server: SshServer) -> Properties:
    """How a careful program connects."""
    return {
        "host": "127.0.0.1",
        "port": server.port,
        "user": server.user,
        "privateKey": server.private_key,
        "hostKey": server.host_key,
        "dialErrorLimit": 1,
        "perDialTimeout": 5,
    }


class Life:
    """One resource from its first check on, as the engine leads it."""

    def __init__(self, plugin: Plugin, token: str) -> None:
        self._plugin = plugin
        self._token = token
        self.id = ""
        self.inputs: Properties = {}
        self.state: Properties = {}

    def create(self, news: Properties) -> Properties:
        """Check and create; returns the outputs without secret marks."""
        self.inputs = self.checked(news)
        self.id, self.state = self._plugin.create(self._token, self.inputs)
        return self.outputs

    def checked(self, news: Properties) -> Properties:
        """Check, expecting no failure."""
        answer = self._plugin.check(self._token, news, self.inputs)
        assert answer.failures == {}
        return answer.inputs

    def update(self, news: Properties) -> Properties:
        """Check, and update whether or not anything changed."""
        inputs = self.checked(news)
        self.state = self._plugin.update(self._token, self.id, self.state, self.inputs, inputs)
        self.inputs = inputs
        return self.outputs

    def delete(self) -> None:
        """Delete."""
        self._plugin.delete(self._token, self.id, self.state)

    @property
    def outputs(self) -> Properties:
        """The state without secret marks."""
        found: Properties = plain(self.state)
        return found


@pytest.fixture
def remote(command_plugin: Plugin) -> Life:
    return Life(command_plugin, REMOTE)


@pytest.fixture
def copy(command_plugin: Plugin) -> Life:
    return Life(command_plugin, COPY)


def refused(call: Any, *arguments: Any) -> str:
    """The text of the error that a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments)
    text = caught.value.details()
    assert isinstance(text, str)
    return text


def text_asset(text: str) -> Properties:
    return {SIGNATURE: ASSET, "text": text, "hash": sha256(text.encode()).hexdigest()}


def file_asset(path: Path) -> Properties:
    return {SIGNATURE: ASSET, "path": str(path), "hash": sha256(path.read_bytes()).hexdigest()}


def folder_archive(path: str, mark: str = "1") -> Properties:
    return {SIGNATURE: ARCHIVE, "path": path, "hash": sha256(f"{path}{mark}".encode()).hexdigest()}


# Life cycle of a remote command


def test_create_runs_on_the_host_and_keeps_both_streams(remote: Life, connection: Properties) -> None:
    outputs = remote.create({"connection": connection, "create": "echo out; echo err >&2"})
    assert (outputs["stdout"], outputs["stderr"]) == ("out", "err")
    assert remote.id


def test_only_one_final_newline_is_removed(remote: Life, connection: Properties) -> None:
    assert remote.create({"connection": connection, "create": r"printf ' a\n\n'"})["stdout"] == " a\n"


def test_a_command_without_create_dials_nobody(remote: Life, connection: Properties) -> None:
    outputs = remote.create({"connection": {**connection, "port": free_port()}, "delete": "true"})
    assert outputs["stdout"] == ""


def test_preview_runs_nothing(command_plugin: Plugin, connection: Properties, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    inputs = command_plugin.check(REMOTE, {"connection": connection, "create": f"touch {trace}"}).inputs
    command_plugin.create(REMOTE, inputs, preview=True)
    command_plugin.update(REMOTE, "id", {**inputs, "stdout": "", "stderr": ""}, inputs, inputs, preview=True)
    assert not trace.exists()


def test_stdin_reaches_the_command(remote: Life, connection: Properties) -> None:
    outputs = remote.create({"connection": connection, "create": "bash -s", "stdin": "echo $((6 * 7))"})
    assert outputs["stdout"] == "42"


def test_update_runs_update(remote: Life, connection: Properties) -> None:
    remote.create({"connection": connection, "create": "echo created"})
    outputs = remote.update({"connection": connection, "create": "echo created", "update": "echo updated"})
    assert outputs["stdout"] == "updated"


def test_update_without_an_update_command_runs_create_again(
    remote: Life, connection: Properties, tmp_path: Path
) -> None:
    count = f"echo x >> {tmp_path}/count; wc -l < {tmp_path}/count"
    assert remote.create({"connection": connection, "create": count})["stdout"] == "1"
    outputs = remote.update({"connection": {**connection, "perDialTimeout": 6}, "create": count})
    assert outputs["stdout"] == "2"


def test_update_with_neither_keeps_the_old_output(remote: Life, connection: Properties) -> None:
    remote.create({"connection": connection, "create": "echo kept"})
    assert remote.update({"connection": connection, "delete": "true"})["stdout"] == "kept"


@pytest.mark.parametrize(
    "change",
    [
        {"create": "echo other"},
        {"update": "echo other"},
        {"delete": "echo other"},
        {"stdin": "other"},
        {"environment": {"ALLOWED_A": "b"}},
        {"logging": "none"},
        {"addPreviousOutputInEnv": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_changed_input_is_an_update(
    command_plugin: Plugin, remote: Life, connection: Properties, change: Properties
) -> None:
    base: Properties = {"connection": connection, "create": "echo one"}
    remote.create(base)
    new = remote.checked({**base, **change})
    answer = command_plugin.diff(REMOTE, remote.id, remote.state, remote.inputs, new)
    assert (answer.changed, answer.replaces) == (True, False)


def test_a_rotated_key_is_an_update_too(
    command_plugin: Plugin, remote: Life, connection: Properties, server: SshServer
) -> None:
    remote.create({"connection": connection, "create": "true"})
    rotated = {
        **connection,
        "privateKey": server.locked_key,
        "privateKeyPassword": server.locked_key_password,
    }
    new = remote.checked({"connection": rotated, "create": "true"})
    answer = command_plugin.diff(REMOTE, remote.id, remote.state, remote.inputs, new)
    assert (answer.changed, answer.replaces) == (True, False)


def test_equal_inputs_are_no_change(command_plugin: Plugin, remote: Life, connection: Properties) -> None:
    base: Properties = {"connection": connection, "create": "echo one", "triggers": ["a", 1, {"b": [2]}]}
    remote.create(base)
    answer = command_plugin.diff(REMOTE, remote.id, remote.state, remote.inputs, remote.checked(base))
    assert not answer.changed


@pytest.mark.parametrize("token", [REMOTE, COPY, LOCAL])
def test_a_changed_trigger_is_an_update_to_the_plugin_and_a_replacement_to_the_sdk(
    command_plugin: Plugin, connection: Properties, token: str
) -> None:
    """The plugin itself replaces only where triggers come or go; pulumi_command adds replace_on_changes."""
    life = Life(command_plugin, token)
    bases: dict[str, Properties] = {
        REMOTE: {"connection": connection, "create": "true", "update": "true"},
        COPY: {"connection": connection, "remotePath": "/dev/null", "source": text_asset("")},
        LOCAL: {"create": "true"},
    }
    base = bases[token]
    life.create({**base, "triggers": ["1"]})
    changed = life.checked({**base, "triggers": ["2"]})
    answer = command_plugin.diff(token, life.id, life.state, life.inputs, changed)
    assert (answer.changed, answer.replaces) == (True, False)
    gone = command_plugin.diff(token, life.id, life.state, life.inputs, life.checked(base))
    assert (gone.changed, gone.replaces) == (True, True)


def test_the_sdk_makes_a_changed_trigger_a_replacement() -> None:
    import pulumi_command

    sources = Path(pulumi_command.__path__[0]) / "remote"
    for module in ("command.py", "copy_to_remote.py"):
        assert 'replace_on_changes=["triggers[*]"]' in (sources / module).read_text()


def test_delete_runs_delete_over_the_connection_in_the_state(
    remote: Life, connection: Properties, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    remote.create({"connection": connection, "create": "true", "delete": f"touch {trace}"})
    remote.delete()
    assert trace.exists()


def test_delete_without_a_delete_command_dials_nobody(
    command_plugin: Plugin, remote: Life, connection: Properties
) -> None:
    inputs = remote.checked({"connection": {**connection, "port": free_port()}, "create": "true"})
    command_plugin.delete(REMOTE, "id", {**inputs, "stdout": "", "stderr": ""})


def test_there_is_no_drift_detection(
    command_plugin: Plugin, remote: Life, connection: Properties, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    remote.create({"connection": connection, "create": f"touch {made}; echo there"})
    made.unlink()
    state = command_plugin.read(REMOTE, remote.id, remote.state, remote.inputs)
    assert plain(state)["stdout"] == "there"


# Failure


def test_the_error_holds_the_command_line_and_all_its_output(remote: Life, connection: Properties) -> None:
    text = refused(remote.create, {"connection": connection, "create": "echo said; echo cried >&2; exit 3"})
    assert all(part in text for part in ('running "echo said', "said\n", "cried", "status 3"))


def test_the_output_of_a_failed_update_is_not_kept(remote: Life, connection: Properties) -> None:
    remote.create({"connection": connection, "create": "echo good"})
    refused(remote.update, {"connection": connection, "create": "echo bad; false"})
    assert remote.outputs["stdout"] == "good"


def test_unknown_inputs_are_refused(command_plugin: Plugin, connection: Properties) -> None:
    answer = command_plugin.check(REMOTE, {"connection": connection, "craete": "true"})
    assert answer.failures


def test_a_connection_is_required(command_plugin: Plugin) -> None:
    assert command_plugin.check(REMOTE, {"create": "true"}).failures


def test_an_unknown_logging_is_refused(command_plugin: Plugin, connection: Properties) -> None:
    refused_inputs = command_plugin.check(REMOTE, {"connection": connection, "logging": 3}).failures
    assert refused_inputs


# Environment


def test_environment_reaches_the_command_where_the_server_accepts_it(remote: Life, connection: Properties) -> None:
    outputs = remote.create(
        {"connection": connection, "create": "echo $ALLOWED_WORD", "environment": {"ALLOWED_WORD": "w"}}
    )
    assert outputs["stdout"] == "w"


def test_environment_that_the_server_does_not_accept_is_an_error_and_nothing_runs(
    remote: Life, connection: Properties, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    text = refused(
        remote.create,
        {"connection": connection, "create": f"touch {trace}", "environment": {"REFUSED": "w"}},
    )
    assert '"REFUSED"' in text
    assert not trace.exists()


def test_previous_output_that_the_server_does_not_accept_is_only_a_warning(
    command_plugin: Plugin, remote: Life, connection: Properties
) -> None:
    remote.create({"connection": connection, "create": "echo before"})
    seen = len(command_plugin.engine.lines)
    outputs = remote.update({"connection": connection, "create": "echo [$PULUMI_COMMAND_STDOUT]"})
    assert outputs["stdout"] == "[]"
    warned = [text for severity, text in command_plugin.engine.lines[seen:] if severity == "WARNING"]
    assert any("PULUMI_COMMAND_STDOUT" in text for text in warned)


def test_previous_output_can_be_kept_out_of_the_environment(
    command_plugin: Plugin, remote: Life, connection: Properties
) -> None:
    base: Properties = {"connection": connection, "addPreviousOutputInEnv": False}
    remote.create({**base, "create": "echo before"})
    seen = len(command_plugin.engine.lines)
    remote.update({**base, "create": "echo after"})
    assert not [line for line in command_plugin.engine.lines[seen:] if line[0] == "WARNING"]


# What is shown and what is secret


@pytest.mark.parametrize(
    ("logging", "shown"),
    [
        (None, {"visible-out", "visible-err"}),
        ("stdoutAndStderr", {"visible-out", "visible-err"}),
        ("stdout", {"visible-out"}),
        ("stderr", {"visible-err"}),
        ("none", set()),
    ],
)
def test_logging_chooses_what_is_shown_and_not_what_is_kept(
    command_plugin: Plugin, remote: Life, connection: Properties, logging: str | None, shown: set[str]
) -> None:
    seen = len(command_plugin.engine.lines)
    inputs: Properties = {"connection": connection, "create": "echo visible-out; echo visible-err >&2"}
    outputs = remote.create(inputs if logging is None else {**inputs, "logging": logging})
    lines = {text for _, text in command_plugin.engine.lines[seen:] if text.startswith("visible")}
    assert lines == shown
    assert (outputs["stdout"], outputs["stderr"]) == ("visible-out", "visible-err")


def test_the_connection_is_secret_as_a_whole(remote: Life, connection: Properties) -> None:
    remote.create({"connection": connection, "create": "true"})
    assert is_secret(remote.inputs["connection"])
    assert is_secret(remote.state["connection"])


def test_output_is_not_secret_by_itself(remote: Life, connection: Properties) -> None:
    remote.create({"connection": connection, "create": "echo x"})
    assert remote.state["stdout"] == "x"


def test_check_fills_in_the_defaults_of_a_connection(command_plugin: Plugin) -> None:
    inputs = command_plugin.check(REMOTE, {"connection": {"host": "h"}, "create": "true"}).inputs
    assert plain(inputs["connection"]) == {
        "host": "h",
        "user": "root",
        "port": 22,
        "dialErrorLimit": 10,
        "perDialTimeout": 15,
    }


# Who is on the other side


def test_a_wrong_host_key_is_refused_and_nothing_runs(
    remote: Life, connection: Properties, server: SshServer, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    pinned = {**connection, "hostKey": server.other_host_key, "dialErrorLimit": 0}
    text = refused(remote.create, {"connection": pinned, "create": f"touch {trace}"})
    assert "host key" in text
    assert not trace.exists()


def test_a_host_key_that_is_none_is_refused(remote: Life, connection: Properties) -> None:
    pinned = {**connection, "hostKey": "rubbish"}
    assert "host key" in refused(remote.create, {"connection": pinned, "create": "true"})


def test_without_a_host_key_anybody_is_trusted(remote: Life, connection: Properties) -> None:
    trusting = {key: value for key, value in connection.items() if key != "hostKey"}
    assert remote.create({"connection": trusting, "create": "echo in"})["stdout"] == "in"


def test_a_locked_key_needs_its_password(remote: Life, connection: Properties, server: SshServer) -> None:
    locked = {**connection, "privateKey": server.locked_key}
    assert "passphrase" in refused(remote.create, {"connection": locked, "create": "true"})
    opened = {**locked, "privateKeyPassword": server.locked_key_password}
    assert remote.create({"connection": opened, "create": "echo in"})["stdout"] == "in"


@pytest.fixture
def agent(server: SshServer, tmp_path: Path) -> Iterator[str]:
    """An SSH agent that holds the key."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("no ssh-agent")
    socket_path = Path("/tmp") / f"spark-vllm-agent-{os.getpid()}"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket_path)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not socket_path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        key = tmp_path / "key"
        key.touch(mode=0o600)
        key.write_text(server.private_key)
        environ = {**os.environ, "SSH_AUTH_SOCK": str(socket_path)}
        subprocess.run(["ssh-add", "-q", str(key)], check=True, env=environ, timeout=10)
        yield str(socket_path)
    finally:
        process.terminate()
        process.wait(10)
        socket_path.unlink(missing_ok=True)


def test_an_agent_can_hold_the_key(remote: Life, connection: Properties, agent: str) -> None:
    keyless = {key: value for key, value in connection.items() if key != "privateKey"}
    inputs = {"connection": {**keyless, "agentSocketPath": agent}, "create": "echo in"}
    assert remote.create(inputs)["stdout"] == "in"


def test_an_agent_that_is_not_there_is_an_error_even_with_a_key(
    remote: Life, connection: Properties, tmp_path: Path
) -> None:
    named = {**connection, "agentSocketPath": str(tmp_path / "none")}
    assert "none" in refused(remote.create, {"connection": named, "create": "true"})


def test_a_proxy_carries_the_connection(remote: Life, connection: Properties) -> None:
    inputs = {"connection": {**connection, "proxy": connection}, "create": "echo through"}
    assert remote.create(inputs)["stdout"] == "through"


def test_an_unreachable_proxy_is_named(remote: Life, connection: Properties) -> None:
    proxy = {**connection, "port": free_port(), "dialErrorLimit": 0}
    text = refused(remote.create, {"connection": {**connection, "proxy": proxy}, "create": "true"})
    assert text.startswith("proxy:") or "proxy: " in text


# Patience


def test_dialling_is_tried_once_more_than_the_limit_says(remote: Life, connection: Properties) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        tries = 0
        ended = threading.Event()

        def hang_up() -> None:
            nonlocal tries
            while not ended.is_set():
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    continue
                tries += 1
                peer.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            far = {**connection, "port": listener.getsockname()[1], "dialErrorLimit": 2}
            text = refused(remote.create, {"connection": far, "create": "true"})
        finally:
            ended.set()
            thread.join(5)
    assert tries == 3
    assert "after 2 failed attempts" in text


def test_a_refused_port_is_named(remote: Life, connection: Properties) -> None:
    nowhere = {**connection, "port": free_port(), "dialErrorLimit": 0}
    text = refused(remote.create, {"connection": nowhere, "create": "true"})
    assert "connection refused" in text


def test_a_command_waits_for_a_server_that_is_just_starting(
    command_plugin: Plugin, connection: Properties, server: SshServer
) -> None:
    port = free_port()
    life = Life(command_plugin, REMOTE)
    stop = threading.Event()

    def relay() -> None:
        time.sleep(0.5)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen()
            listener.settimeout(10)
            near, _ = listener.accept()
        with near, socket.create_connection(("127.0.0.1", server.port)) as far:
            pumps = [threading.Thread(target=pump, args=ends, daemon=True) for ends in ((near, far), (far, near))]
            for each in pumps:
                each.start()
            stop.wait(20)

    def pump(source: socket.socket, sink: socket.socket) -> None:
        while not stop.is_set():
            try:
                data = source.recv(65536)
                if not data:
                    return
                sink.sendall(data)
            except OSError:
                return

    thread = threading.Thread(target=relay)
    thread.start()
    try:
        late = {**connection, "port": port, "dialErrorLimit": 20}
        assert life.create({"connection": late, "create": "echo late"})["stdout"] == "late"
    finally:
        stop.set()
        thread.join(15)


# Copies


def test_a_text_is_copied_and_its_folders_are_made(copy: Life, connection: Properties, tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "file"
    copy.create({"connection": connection, "remotePath": str(target), "source": text_asset("hello\n")})
    assert target.read_text() == "hello\n"


def test_a_text_needs_a_file_to_go_to(copy: Life, connection: Properties, tmp_path: Path) -> None:
    inputs = {"connection": connection, "remotePath": str(tmp_path), "source": text_asset("x")}
    assert "is a directory" in refused(copy.create, inputs)


def test_a_file_is_copied_under_its_name_into_an_existing_folder(
    copy: Life, connection: Properties, tmp_path: Path
) -> None:
    source, target = tmp_path / "source.txt", tmp_path / "target"
    source.write_text("content")
    target.mkdir()
    copy.create({"connection": connection, "remotePath": str(target), "source": file_asset(source)})
    assert (target / "source.txt").read_text() == "content"


def test_a_copied_file_keeps_nothing_of_its_mode(copy: Life, connection: Properties, tmp_path: Path) -> None:
    source, target = tmp_path / "run.sh", tmp_path / "target.sh"
    source.write_text("#!/bin/sh\n")
    source.chmod(0o755)
    copy.create({"connection": connection, "remotePath": str(target), "source": file_asset(source)})
    assert target.stat().st_mode & 0o111 == 0


@pytest.mark.parametrize(("slash", "inside"), [("", "tree/"), ("/", "")])
def test_a_folder_is_copied_whole_and_a_trailing_slash_drops_its_name(
    copy: Life, connection: Properties, tmp_path: Path, slash: str, inside: str
) -> None:
    tree, target = tmp_path / "tree", tmp_path / "target"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "file").write_text("deep")
    copy.create({"connection": connection, "remotePath": str(target), "source": folder_archive(f"{tree}{slash}")})
    assert (target / f"{inside}sub/file").read_text() == "deep"


def test_a_set_of_assets_is_written_by_name(copy: Life, connection: Properties, tmp_path: Path) -> None:
    archive = {
        SIGNATURE: ARCHIVE,
        "hash": "1",
        "assets": {"a.txt": text_asset("A"), "sub/b.txt": text_asset("B")},
    }
    copy.create({"connection": connection, "remotePath": str(tmp_path / "t"), "source": archive})
    assert (tmp_path / "t" / "a.txt").read_text() == "A"
    assert (tmp_path / "t" / "sub" / "b.txt").read_text() == "B"


def test_only_new_content_or_a_new_path_is_copied_again(copy: Life, connection: Properties, tmp_path: Path) -> None:
    target = tmp_path / "file"
    base: Properties = {"connection": connection, "remotePath": str(target), "source": text_asset("one")}
    copy.create(base)
    target.write_text("by hand")
    copy.update({**base, "connection": {**connection, "perDialTimeout": 7}})
    assert target.read_text() == "by hand"
    copy.update({**base, "source": text_asset("two")})
    assert target.read_text() == "two"
    copy.update({**base, "remotePath": str(tmp_path / "other"), "source": text_asset("two")})
    assert (tmp_path / "other").read_text() == "two"
    assert target.exists(), "the file at the old path stays"


def test_new_content_is_an_update_and_no_replacement(
    command_plugin: Plugin, copy: Life, connection: Properties, tmp_path: Path
) -> None:
    base: Properties = {
        "connection": connection,
        "remotePath": str(tmp_path / "f"),
        "source": text_asset("1"),
    }
    copy.create(base)
    new = copy.checked({**base, "source": text_asset("2")})
    answer = command_plugin.diff(COPY, copy.id, copy.state, copy.inputs, new)
    assert (answer.changed, answer.replaces) == (True, False)


def test_a_copy_has_no_delete(copy: Life, connection: Properties, tmp_path: Path) -> None:
    target = tmp_path / "file"
    copy.create({"connection": connection, "remotePath": str(target), "source": text_asset("stays")})
    copy.delete()
    assert target.read_text() == "stays"


def test_a_copy_needs_a_source(command_plugin: Plugin, connection: Properties) -> None:
    assert command_plugin.check(COPY, {"connection": connection, "remotePath": "/tmp/x"}).failures


def test_the_error_of_a_copy_names_the_remote_path(copy: Life, connection: Properties, tmp_path: Path) -> None:
    inputs = {"connection": connection, "remotePath": "/proc/none/file", "source": text_asset("x")}
    assert "/proc/none" in refused(copy.create, inputs)


# Commands on this machine


def test_a_local_command_gets_environment_folder_stdin_and_interpreter(command_plugin: Plugin, tmp_path: Path) -> None:
    outputs = Life(command_plugin, LOCAL).create(
        {
            "create": 'echo "$WORD $PWD $(cat)"',
            "environment": {"WORD": "w"},
            "dir": str(tmp_path),
            "stdin": "input",
            "interpreter": ["/bin/bash", "-c"],
        }
    )
    assert outputs["stdout"] == f"w {tmp_path} input"


def test_a_local_command_finds_its_previous_output_in_the_environment(command_plugin: Plugin) -> None:
    life = Life(command_plugin, LOCAL)
    life.create({"create": "echo before"})
    assert life.update({"create": "echo [$PULUMI_COMMAND_STDOUT]"})["stdout"] == "[before]"


def test_a_failed_local_command_tells_line_and_output(command_plugin: Plugin) -> None:
    text = refused(Life(command_plugin, LOCAL).create, {"create": "echo said; exit 4"})
    assert all(part in text for part in ("exit status 4", 'running "echo said; exit 4"', "said"))


def test_secret_inputs_stay_secret(command_plugin: Plugin) -> None:
    inputs = command_plugin.check(LOCAL, {"create": "true", "stdin": secret("hush")}).inputs
    _, state = command_plugin.create(LOCAL, inputs)
    assert is_secret(state["stdin"])


def test_the_default_agent_is_the_one_in_the_environment(server: SshServer, connection: Properties, agent: str) -> None:
    with running(find_plugin("command"), {**os.environ, "SSH_AUTH_SOCK": agent}) as plugin:
        plugin.configure({})
        keyless = {key: value for key, value in connection.items() if key != "privateKey"}
        assert Life(plugin, REMOTE).create({"connection": keyless, "create": "echo in"})["stdout"] == "in"
