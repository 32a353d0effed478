"""The pulumi that ./env puts first: what it adds for which command line; otherwise it is the real one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolchain import launcher, places, stack
from toolchain.launcher import Call, parse, settings_for, words_for
from toolchain.places import ROOT

SHELLS = [shell for shell in ("dash", "bash", "zsh") if shutil.which(shell)]
TEXT = "# ours\nconfig:\n  test:a:   [1,   2]\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a stack file, and a home for the copies."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "Pulumi.yaml").write_text("name: test\nruntime: python\n")
    (folder / "Pulumi.dev.yaml").write_text(TEXT)
    return folder


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """What ./env sets, as far as it matters here."""
    return {"PULUMI_HOME": str(tmp_path / "pulumi"), "PULUMI_BACKEND_URL": "file:///somewhere"}


def copied(added: dict[str, str]) -> str | None:
    """The text of the private copy, if one was made."""
    path = added.get("PULUMI_OPTION_CONFIG_FILE")
    return None if path is None else Path(path).read_text()


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("up", Call("up", "", "", frozenset())),
        ("up -s dev --yes", Call("up", "dev", "", frozenset({"-s", "--yes"}))),
        ("-s dev up", Call("up", "dev", "", frozenset({"-s"}))),
        (
            "--stack=org/p/dev -C sub preview",
            Call("preview", "org/p/dev", "sub", frozenset({"--stack", "-C"})),
        ),
        (
            "--color always destroy -sdev -r=true",
            Call("destroy", "dev", "", frozenset({"--color", "-s", "-r"})),
        ),
        ("stack select up", Call("stack", "", "", frozenset(), "select")),
        ("up -- --stack x", Call("up", "", "", frozenset())),
        ("", Call("", "", "", frozenset())),
    ],
)
def test_command_lines_are_read(line: str, call: Call) -> None:
    assert parse(line.split()) == call


@pytest.mark.parametrize("command", sorted(launcher.READS_STACK_FILE))
def test_settings_come_from_a_private_copy(project: Path, environ: dict[str, str], command: str) -> None:
    added = settings_for([command, "-s", "dev"], environ, project)
    assert copied(added) == TEXT
    path = Path(added["PULUMI_OPTION_CONFIG_FILE"])
    assert path.stat().st_mode & 0o077 == 0
    assert project not in path.parents


@pytest.mark.parametrize(
    "line",
    [
        "config set a b -s dev",
        "stack output -s dev",
        "stack select dev",
        "version",
        "up -s dev -c a=b",
        "up -s dev --config a=b",
        "up -s dev --config-file other.yaml",
    ],
)
def test_other_commands_use_the_file_itself(project: Path, environ: dict[str, str], line: str) -> None:
    assert settings_for(line.split(), environ, project) == {}


@pytest.mark.parametrize(
    "text",
    [
        f"secretsprovider: awskms://key\n{TEXT}",
        f"encryptedkey: x\n{TEXT}",
        f"encryptionsalt: v1:x\n{TEXT}  test:token:\n    secure: v1:y\n",
    ],
)
def test_a_file_with_secrets_of_its_own_is_used_itself(project: Path, environ: dict[str, str], text: str) -> None:
    (project / "Pulumi.dev.yaml").write_text(text)
    assert settings_for(["up", "-s", "dev"], environ, project) == {}


def test_a_salt_that_nothing_is_encrypted_with_is_left_out(project: Path, environ: dict[str, str]) -> None:
    """It may stem from another backend, whose passphrase would be asked for."""
    (project / "Pulumi.dev.yaml").write_text(f"{TEXT}encryptionsalt: v1:x:y:z==\n")
    assert copied(settings_for(["up", "-s", "dev"], environ, project)) == TEXT


def test_a_stack_without_a_file_gets_none(project: Path, environ: dict[str, str]) -> None:
    assert copied(settings_for(["up", "-s", "new"], environ, project)) == ""
    assert not (project / "Pulumi.new.yaml").exists()


def test_the_selected_stack_is_found(project: Path, environ: dict[str, str]) -> None:
    key = hashlib.sha1(str(project / "Pulumi.yaml").encode(), usedforsecurity=False).hexdigest()
    chosen = Path(environ["PULUMI_HOME"]) / "workspaces" / f"test-{key}-workspace.json"
    chosen.parent.mkdir(parents=True)
    chosen.write_text(json.dumps({"stacks": {"file:///somewhere": "organization/test/dev"}}))
    assert copied(settings_for(["up"], environ, project)) == TEXT
    assert copied(settings_for(["up"], {**environ, "PULUMI_STACK": "new"}, project)) == ""


def test_a_project_is_found_from_below_and_by_flag(project: Path, environ: dict[str, str]) -> None:
    (project / "below").mkdir()
    assert copied(settings_for(["up", "-s", "dev"], environ, project / "below")) == TEXT
    assert copied(settings_for(["-C", "project", "up", "-s", "dev"], environ, project.parent)) == TEXT
    assert settings_for(["up", "-s", "dev"], environ, Path("/")) == {}


def test_copies_of_ended_runs_are_cleared_away(project: Path, environ: dict[str, str]) -> None:
    first = Path(settings_for(["up", "-s", "dev"], environ, project)["PULUMI_OPTION_CONFIG_FILE"])
    ended = subprocess.Popen(["true"])
    ended.wait(5)
    left = first.with_name(f"Pulumi.dev.{ended.pid}.yaml")
    left.touch()
    settings_for(["up", "-s", "dev"], environ, project)
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_look_at_the_history_gets_a_project_folder_of_its_own(project: Path, environ: dict[str, str]) -> None:
    looked = ["stack", "history", "--show-secrets", "--json"]
    other = {**environ, "PULUMI_OPTION_CONFIG_FILE": str(project / "other.yaml")}  # which it does not read
    for where, environment, words in (
        (project, environ, [*looked, "-s", "dev"]),
        (project, other, [*looked, "-s", "org/test/dev"]),
        (project.parent, environ, ["-C", "project", *looked, "--stack=dev"]),
    ):
        option, folder, *stack = words_for(words, environment, where)
        assert (option, stack) == ("-C", ["-s", "dev"])
        assert project not in Path(folder).parents
        assert sorted(path.name for path in Path(folder).iterdir()) == ["Pulumi.dev.yaml", "Pulumi.yaml"]
        assert (Path(folder) / "Pulumi.dev.yaml").read_text() == TEXT
    for line in ("stack history", "stack output --show-secrets", "stack history --show-secrets -- x", "up -s dev"):
        assert words_for([*line.split()], environ, project) == []
    ended = subprocess.Popen(["true"])
    ended.wait(5)
    left = Path(folder).with_name(f"Pulumi.dev.{ended.pid}.folder")
    left.mkdir()
    (left / "Pulumi.yaml").touch()
    words_for([*looked, "-s", "dev"], environ, project)
    assert not left.exists()


@pytest.mark.parametrize("command", sorted(launcher.DESTROYS))
def test_destroy_does_not_refresh_unless_asked(project: Path, environ: dict[str, str], command: str) -> None:
    assert settings_for([command, "-s", "dev"], environ, project)["PULUMI_OPTION_REFRESH"] == "false"
    for wish in ("--refresh", "--refresh=true", "-r"):
        assert "PULUMI_OPTION_REFRESH" not in settings_for([command, wish], environ, project)
    asked = {**environ, "PULUMI_OPTION_REFRESH": "true"}
    assert "PULUMI_OPTION_REFRESH" not in settings_for([command], asked, project)


@pytest.mark.parametrize("command", ["up", "preview", "refresh"])
def test_nothing_else_is_kept_from_refreshing(project: Path, environ: dict[str, str], command: str) -> None:
    assert "PULUMI_OPTION_REFRESH" not in settings_for([command, "-s", "dev"], environ, project)


def fake_engine(folder: Path, script: str) -> dict[str, str]:
    """An environment in which our launcher finds a pulumi that does as told."""
    folder.mkdir()
    program = folder / "pulumi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    path = os.pathsep.join((str(ROOT / "toolchain" / "bin"), str(folder), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "PULUMI_HOME": str(folder / "home")}


def test_it_becomes_the_real_one(tmp_path: Path) -> None:
    environ = fake_engine(tmp_path / "engine", 'echo "$$ $*"; read answer; exit 7')
    process = subprocess.Popen(
        ["pulumi", "up", "a b"],
        env=environ,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate("\n", timeout=20)
    assert output == f"{process.pid} up a b\n"
    assert process.returncode == 7


def test_the_launcher_of_another_checkout_is_no_engine(tmp_path: Path) -> None:
    """Two checkouts on one PATH would otherwise become each other for ever."""
    other, engine = tmp_path / "other" / "toolchain" / "bin", tmp_path / "engine"
    for folder in (other, engine):
        folder.mkdir(parents=True)
        (folder / "pulumi").write_text("#!/bin/sh\n")
        (folder / "pulumi").chmod(0o755)
    (other.parent / "launcher.py").write_text("")
    own = ROOT / "toolchain" / "bin"
    environ = {"PATH": f"{own}{os.pathsep}{other}{os.pathsep}{engine}"}
    assert launcher.real_pulumi(environ, own) == str(engine / "pulumi")


STARTER = """
import os, subprocess, sys, time
launcher, folder = sys.argv[1:]
environ = {**os.environ, "PATH": f"{folder}:/usr/bin:/bin", "SPARK_VLLM_INTERRUPT_WITH": str(os.getpid())}
subprocess.Popen([sys.executable, launcher, "about"], env=environ, start_new_session=True)
time.sleep(60)
"""
WAITS = """#!/bin/sh
trap 'echo interrupted > "$(dirname "$0")/end"; exit 1' INT
: > "$(dirname "$0")/up"
while :; do sleep 0.1; done
"""


def test_an_engine_is_interrupted_when_the_command_that_started_it_dies(tmp_path: Path) -> None:
    fake = tmp_path / "pulumi"
    fake.write_text(WAITS)
    fake.chmod(0o755)
    words = [sys.executable, "-c", STARTER, str(ROOT / "toolchain" / "launcher.py"), str(tmp_path)]
    with subprocess.Popen(words) as command:
        wait_for(tmp_path / "up")
        command.kill()
    wait_for(tmp_path / "end")
    assert (tmp_path / "end").read_text() == "interrupted\n"


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    end = time.monotonic() + 30
    while not (path.is_file() and (path.name == "up" or path.read_text())):
        assert time.monotonic() < end, f"{path.name} was never made"
        time.sleep(0.05)


def test_a_kill_reaches_the_real_one(tmp_path: Path) -> None:
    environ = fake_engine(tmp_path / "engine", f"touch {tmp_path}/up; exec sleep 60")
    with subprocess.Popen(["pulumi", "up"], env=environ, cwd=tmp_path) as process:
        deadline = time.monotonic() + 10
        while not (tmp_path / "up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait(5) == -signal.SIGKILL


def test_without_an_engine_it_says_what_to_do(tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": f"{ROOT / 'toolchain' / 'bin'}:/usr/bin:/bin"}
    ended = subprocess.run(["pulumi", "up"], env=environ, capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stderr.count("\n")) == (127, 1)
    assert "make bootstrap" in ended.stderr


# ./env


def source(shell: str, home: Path, commands: str = "", **given: str) -> dict[str, str]:
    """The variables of a shell that has sourced ./env."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    script = f". ./env && {commands or ':'} && exec env"
    ended = subprocess.run(
        [shell, "-euc", script],
        cwd=ROOT,
        env={**kept, "SPARK_VLLM_HOME": str(home), **given},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert ended.returncode == 0, ended.stderr
    return dict(line.split("=", 1) for line in ended.stdout.splitlines() if "=" in line)


@pytest.mark.parametrize("shell", SHELLS)
def test_env_points_pulumi_at_our_own_state(shell: str, tmp_path: Path) -> None:
    found = source(shell, tmp_path)
    assert found["PULUMI_BACKEND_URL"] == f"file://{tmp_path}/backend"
    assert found["PULUMI_CONFIG_PASSPHRASE_FILE"] == f"{tmp_path}/passphrase"
    assert found["PULUMI_HOME"] == f"{tmp_path}/pulumi"
    assert found["PULUMI_OPTION_RUN_PROGRAM"] == "true"
    front = found["PATH"].split(":")[:2]
    assert front == [str(ROOT / ".venv" / "bin"), str(ROOT / "toolchain" / "bin")]
    assert not [name for name in found if name.startswith("_spark")]


@pytest.mark.parametrize("shell", SHELLS)
def test_env_leaves_a_backend_and_a_passphrase_of_ones_own(shell: str, tmp_path: Path) -> None:
    found = source(shell, tmp_path, PULUMI_BACKEND_URL="s3://mine", PULUMI_CONFIG_PASSPHRASE="")
    assert found["PULUMI_BACKEND_URL"] == "s3://mine"
    assert found["PULUMI_CONFIG_PASSPHRASE"] == ""
    assert "PULUMI_CONFIG_PASSPHRASE_FILE" not in found
    found = source(shell, tmp_path, PULUMI_CONFIG_PASSPHRASE_FILE="/mine")
    assert found["PULUMI_CONFIG_PASSPHRASE_FILE"] == "/mine"


@pytest.mark.parametrize("shell", SHELLS)
def test_env_can_be_sourced_again_for_another_home(shell: str, tmp_path: Path) -> None:
    again = f"SPARK_VLLM_HOME={tmp_path}/other && . ./env"
    found = source(shell, tmp_path, again)
    assert found["PULUMI_BACKEND_URL"] == f"file://{tmp_path}/other/backend"
    assert found["PULUMI_CONFIG_PASSPHRASE_FILE"] == f"{tmp_path}/other/passphrase"
    assert found["PATH"].count(str(ROOT / ".venv" / "bin")) == 1


# Stacks, with the real engine


@pytest.fixture
def real(tmp_path: Path) -> dict[str, str]:
    """The environment of ./env with a home of its own and the engine that is there."""
    engine = launcher.real_pulumi(os.environ, ROOT / "toolchain" / "bin")
    if engine is None:
        pytest.skip("no pulumi on PATH: `make bootstrap`, then `. ./env`")
    found = source("sh", tmp_path / "home")
    (tmp_path / "home" / "backend").mkdir(parents=True)
    (tmp_path / "home" / "passphrase").write_text("for this test only")
    own = os.pathsep.join((str(ROOT / "toolchain" / "bin"), str(Path(engine).parent), os.environ["PATH"]))
    return {**os.environ, **found, "PATH": own}


def test_a_stack_is_made_once_and_the_checkout_stays_as_it_was(project: Path, real: dict[str, str]) -> None:
    before = {path.name: path.read_bytes() for path in project.iterdir()}
    assert stack.ensure_stack("dev", real, project) is True
    assert stack.ensure_stack("dev", real, project) is False
    stack.select_stack("dev", real, project)
    assert {path.name: path.read_bytes() for path in project.iterdir()} == before
    state = places.stack_state(real, "test", "dev")
    assert state is not None
    latest = json.loads(state.read_text())["checkpoint"]["latest"]
    assert latest["secrets_providers"]["state"]["salt"].startswith("v1:")


def test_a_run_leaves_the_stack_file_and_keeps_the_salt(project: Path, real: dict[str, str]) -> None:
    """The reason for the private copy: the engine writes the salt into the file that it reads."""
    stack.ensure_stack("dev", real, project)

    def salt() -> str:
        state = places.stack_state(real, "test", "dev")
        assert state is not None
        found = json.loads(state.read_text())["checkpoint"]["latest"]["secrets_providers"]["state"]["salt"]
        assert isinstance(found, str)
        return found

    before = salt()
    for words in (["refresh", "--yes", "--skip-preview", "--run-program=false"], ["destroy", "--yes"]):
        argv = ["pulumi", *words, "-s", "dev", "--non-interactive", "--run-program=false"]
        ended = subprocess.run(argv, cwd=project, env=real, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert (project / "Pulumi.dev.yaml").read_text() == TEXT
        assert salt() == before
    direct = {**real, "PATH": real["PATH"].split(os.pathsep, 1)[1]}
    argv = ["pulumi", "refresh", "--yes", "-s", "dev", "--non-interactive", "--run-program=false"]
    subprocess.run(argv, cwd=project, env=direct, capture_output=True, timeout=120)
    assert "encryptionsalt" in (project / "Pulumi.dev.yaml").read_text(), "the engine no longer needs the copy"


@pytest.mark.parametrize("own_file", [False, True])
def test_no_look_at_a_stack_writes_to_the_project_folder(project: Path, real: dict[str, str], own_file: bool) -> None:
    stack.ensure_stack("dev", real, project)
    other = project.parent / "other.yaml"
    other.write_text(TEXT)
    environment = real | ({"PULUMI_OPTION_CONFIG_FILE": str(other)} if own_file else {})
    before = {path.name: path.read_bytes() for path in project.iterdir()}
    for line in (
        "stack history --show-secrets --json --page-size 1 --page 1",
        "stack output --show-secrets --json",
        "stack export --show-secrets",
        "config --show-secrets",
        "stack ls --json",
        "stack --show-urns",
    ):
        words = ["pulumi", *line.split(), "-s", "dev", "--non-interactive"]
        ended = subprocess.run(
            words[:-3] + words[-1:] if line == "stack ls --json" else words,
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, (line, ended.stdout + ended.stderr)
        assert {path.name: path.read_bytes() for path in project.iterdir()} == before, line


def test_a_stack_needs_a_plain_name() -> None:
    with pytest.raises(places.Stop, match="expected a name"):
        stack.ensure_stack("a b", {})


@pytest.mark.parametrize("listed", ["[spark-b]", "\n    - spark-b", "\n  - spark-b", "[\n    spark-b,\n  ]"])
@pytest.mark.parametrize("command", ["up", "preview"])
def test_a_run_that_gives_nodes_up_does_not_ask_them(
    command: str, listed: str, environ: dict[str, str], project: Path
) -> None:
    file = project / "Pulumi.dev.yaml"
    file.write_text(TEXT + f"  spark-vllm:abandoned_nodes: {listed}\n  spark-vllm:node_root: /x\n")
    assert settings_for([command, "-s", "dev"], environ, project)["PULUMI_OPTION_REFRESH"] == "false"
    assert "PULUMI_OPTION_REFRESH" not in settings_for([command, "-s", "dev", "--refresh"], environ, project)
    assert "PULUMI_OPTION_REFRESH" not in settings_for(["refresh", "-s", "dev"], environ, project)
    own = {**environ, "PULUMI_OPTION_CONFIG_FILE": str(file)}
    assert settings_for([command, "-s", "dev"], own, project) == {"PULUMI_OPTION_REFRESH": "false"}


@pytest.mark.parametrize("command", sorted(launcher.DESTROYS))
def test_a_destroy_reads_the_stack_file_only_where_that_gives_nodes_up(
    command: str, environ: dict[str, str], project: Path
) -> None:
    words = [command, "-s", "dev"]
    assert settings_for(words, environ, project)["PULUMI_OPTION_RUN_PROGRAM"] == "false"
    (project / "Pulumi.dev.yaml").write_text(TEXT + "  spark-vllm:abandoned_nodes: [spark-b]\n")
    assert settings_for(words, environ, project)["PULUMI_OPTION_RUN_PROGRAM"] == "true"
    assert "PULUMI_OPTION_RUN_PROGRAM" not in settings_for([*words, "--run-program=false"], environ, project)


@pytest.mark.parametrize("command", ["up", "preview", "refresh"])
def test_only_the_program_of_a_destroy_is_told_of_it(command: str, environ: dict[str, str], project: Path) -> None:
    assert "SPARK_VLLM_DESTROY" not in settings_for([command, "-s", "dev"], environ, project)
    assert settings_for(["destroy", "-s", "dev", "--run-program"], environ, project)["SPARK_VLLM_DESTROY"] == "true"


@pytest.mark.parametrize("listed", ["", "[]", "[]  # none any more", " # spark-b is back"])
def test_a_run_that_gives_no_node_up_refreshes(listed: str, environ: dict[str, str], project: Path) -> None:
    (project / "Pulumi.dev.yaml").write_text(TEXT + f"  spark-vllm:abandoned_nodes: {listed}\n  a:b: c\n")
    assert "PULUMI_OPTION_REFRESH" not in settings_for(["up", "-s", "dev"], environ, project)
