"""Setting a checkout up: what is chosen, what is said, and that nothing half-made is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from toolchain import bootstrap, places, steps
from toolchain.bootstrap import Choice, choose_engine
from toolchain.places import ROOT, Stop


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache and a home that belong to the test."""
    monkeypatch.setenv("SPARK_VLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPARK_VLLM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PULUMI_CONFIG_PASSPHRASE", raising=False)
    monkeypatch.delenv("PULUMI_CONFIG_PASSPHRASE_FILE", raising=False)
    return tmp_path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the key of the engine depends on."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "toolchain", root / "toolchain", ignore=shutil.ignore_patterns("__pycache__"))
    return root


# Versions and the choice


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("v3.276.0", (3, 276, 0)),
        ("3.259.0-dev.12+abc\n", (3, 259, 0)),
        ("uv 0.13.9 (x86_64-unknown-linux-gnu)", (0, 13, 9)),
        ("go1.26", (1, 26, 0)),
        ("", None),
        ("unknown", None),
    ],
)
def test_versions_are_read_from_what_tools_say(text: str, version: tuple[int, ...] | None) -> None:
    assert bootstrap.parse_version(text) == version


def test_versions_compare_as_numbers() -> None:
    newer, older = bootstrap.parse_version("3.100.0"), bootstrap.parse_version("3.99.9")
    assert newer is not None
    assert older is not None
    assert newer > older


@pytest.mark.parametrize(
    ("path", "found", "wish", "choice"),
    [
        ("/p", (3, 276, 0), "", Choice(False, "/p is 3.276.0, at least the required 3.200.0")),
        ("/p", (3, 200, 0), "", Choice(False, "/p is 3.200.0, at least the required 3.200.0")),
        ("/p", (3, 99, 9), "", Choice(True, "/p is 3.99.9, older than the required 3.200.0")),
        ("/p", None, "", Choice(True, "/p does not tell its version")),
        (None, None, "", Choice(True, "no pulumi on PATH")),
        ("/p", (3, 276, 0), "build", Choice(True, "SPARK_VLLM_ENGINE=build")),
        ("/p", (3, 276, 0), "path", Choice(False, "/p is 3.276.0, at least the required 3.200.0")),
    ],
)
def test_an_engine_on_path_is_used_if_it_is_new_enough(
    path: str | None, found: tuple[int, ...] | None, wish: str, choice: Choice
) -> None:
    assert choose_engine(path, found, (3, 200, 0), wish) == choice


def test_a_forbidden_build_ends_with_the_reason() -> None:
    with pytest.raises(Stop, match=r"^pulumi: no pulumi on PATH, and SPARK_VLLM_ENGINE=path forbids to build one"):
        choose_engine(None, None, (3, 200, 0), "path")


def test_a_misspelt_wish_is_refused() -> None:
    with pytest.raises(Stop, match="expected build or path, found 'biuld'"):
        choose_engine(None, None, (3, 200, 0), "biuld")


def test_the_required_version_is_read_from_the_project(tmp_path: Path) -> None:
    (tmp_path / "Pulumi.yaml").write_text('name: x\nrequiredPulumiVersion: ">=3.210.1"\n')
    assert bootstrap.required_pulumi(tmp_path) == (3, 210, 1)


def test_a_project_without_a_required_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Pulumi.yaml").write_text("name: x\n")
    with pytest.raises(Stop, match="expected a line like"):
        bootstrap.required_pulumi(tmp_path)


def test_the_engine_built_here_satisfies_the_project() -> None:
    built = bootstrap.parse_version(bootstrap.PULUMI_VERSION)
    assert built is not None
    assert built >= bootstrap.required_pulumi()


def test_neither_our_launcher_nor_our_own_build_counts_as_an_engine_on_path(
    homes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, real = homes / "cache" / "toolchain" / "key" / "bin", homes / "real"
    for folder in (built, real):
        folder.mkdir(parents=True)
        (folder / "pulumi").touch(mode=0o755)
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, (ROOT / "toolchain" / "bin", built))))
    assert bootstrap.pulumi_on_path() is None
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, (ROOT / "toolchain" / "bin", built, real))))
    assert bootstrap.pulumi_on_path() == str(real / "pulumi")


# The key


def test_the_key_is_the_same_for_the_same_sources(checkout: Path) -> None:
    assert bootstrap.engine_key(checkout) == bootstrap.engine_key(ROOT)


def test_a_changed_source_changes_the_key_of_its_part_only(checkout: Path) -> None:
    before = {part.binary: bootstrap.build_key(part, checkout) for part in bootstrap.PARTS}
    whole = bootstrap.engine_key(checkout)
    with (checkout / "toolchain" / "command" / "main.go").open("a") as file:
        file.write("// changed\n")
    after = {part.binary: bootstrap.build_key(part, checkout) for part in bootstrap.PARTS}
    assert {name for name in before if before[name] != after[name]} == {"pulumi-resource-command"}
    assert bootstrap.engine_key(checkout) != whole


def test_the_pinned_versions_are_those_of_the_go_modules() -> None:
    pinned = (ROOT / "toolchain" / "engine" / "cli" / "go.mod").read_text()
    for module in ("pkg/v3", "sdk/v3"):
        assert f"github.com/pulumi/pulumi/{module} v{bootstrap.PULUMI_VERSION}" in pinned
    wanted = f"go {bootstrap.show_version(bootstrap.GO_MINIMUM)}"
    asked = [
        line
        for path in (ROOT / "toolchain").glob("**/go.mod")
        for line in path.read_text().splitlines()
        if line.startswith("go ")
    ]
    assert max(asked) == wanted


# Whole or not at all


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def make(into: Path) -> None:
        (into / "half").touch()
        raise Stop("no")

    with pytest.raises(Stop):
        bootstrap.fill(tmp_path / "target", make)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_build_left_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "unfinished-old").mkdir()
    bootstrap.fill(tmp_path / "target", lambda into: (into / "whole").touch())
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert (tmp_path / "target" / "whole").exists()


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    bootstrap.fill(tmp_path / "target", lambda into: pytest.fail("made again"))


def test_two_builds_wait_for_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []
    held = threading.Event()

    def first() -> None:
        with bootstrap.only_one(tmp_path):
            held.set()
            time.sleep(0.7)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert held.wait(5)
    with bootstrap.only_one(tmp_path):
        order.append("second")
    thread.join(5)
    assert order == ["first", "second"]
    assert "another set-up is at work" in capsys.readouterr().out


FAKE_GO = """#!/bin/sh
case "$*" in
    "env GOVERSION") echo {version} ;;
    "env GOTOOLCHAIN") echo local ;;
    *) {action} ;;
esac
"""


def fake_go(folder: Path, version: str = "go1.99.0", action: str = "exit 1") -> str:
    """A PATH with a go that does as told."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "go"
    program.write_text(FAKE_GO.format(version=version, action=action))
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_ends_its_compiler_and_leaves_nothing(homes: Path, number: signal.Signals) -> None:
    marker = homes / "compiling"
    path = fake_go(homes / "go", action=f"echo $$ > {marker}; exec sleep 60")
    code = (
        "from toolchain import bootstrap, steps; import sys;"
        "sys.exit(steps.run_command(lambda: bool(bootstrap.build_engine()) and 0))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 20
    while not (marker.exists() and marker.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted; run the same command again to go on" in output
    assert "Traceback" not in output
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)
    assert not list((homes / "cache" / "toolchain" / "parts").iterdir())


# What is said


def test_a_missing_go_is_one_line_with_a_way_out(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/none")
    with pytest.raises(Stop) as caught:
        bootstrap.build_engine()
    assert str(caught.value).startswith("pulumi: none on PATH, and no go (at least 1.")
    assert "\n" not in str(caught.value)


def test_an_old_go_is_named(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_go(homes / "go", version="go1.19.8"))
    with pytest.raises(Stop, match=r"^go: expected at least 1\.\d+\.\d+, found 1\.19\.8 "):
        bootstrap.build_engine()


def test_a_failed_build_shows_what_the_compiler_said(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_go(homes / "go", action="echo it broke; exit 1"))
    with pytest.raises(Stop) as caught:
        bootstrap.build_engine()
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("building pulumi: ")
    assert "proxy must be reachable" in first
    assert rest == ["  it broke"]


def test_a_missing_venv_module_is_named(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = homes / "python"
    python.write_text("#!/bin/sh\necho 'No module named venv'\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(Stop, match="python3-venv"):
        bootstrap.find_uv()


def test_an_old_python_is_told_without_a_traceback() -> None:
    code = (
        "import sys; sys.version_info = (3, 9, 2);"
        f"exec(compile(open({str(ROOT / 'toolchain' / 'bootstrap.py')!r}).read(), 'bootstrap.py', 'exec'))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert ended.returncode == 1
    assert ended.stderr.startswith("python: expected 3.11 or newer, found 3.9 (")
    assert ended.stderr.count("\n") == 1


def test_a_long_tool_shows_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "HEARTBEAT_S", 0.1)
    steps.quietly("sleeping", ["sleep", "0.35"], cwd=tmp_path, limit_s=10)
    assert "sleeping: 0.1 s so far" in capsys.readouterr().out


def test_a_tool_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "HEARTBEAT_S", 0.1)
    with pytest.raises(Stop, match="sleeping: not done after"):
        steps.quietly("sleeping", ["sleep", "60"], cwd=tmp_path, limit_s=0.2)


def test_the_table_says_where_the_time_went(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1.5, 2.0, 336.0])
    said = steps.Steps(2, clock=lambda: next(times))
    with said("one"):
        pass
    with said("second"):
        pass
    assert "step 2/2 second: done, 5 min 34 s" in capsys.readouterr().out
    assert said.table().splitlines() == [
        "where the time went",
        "  one           1.5 s",
        "  second  5 min 34 s".replace("second  ", "second   "),
        "  all     5 min 36 s".replace("all     ", "all      "),
    ]


# State and passphrase


def test_the_passphrase_is_made_once_and_for_its_owner_only(homes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bootstrap.make_home()
    first = places.passphrase_file().read_text()
    assert len(first.strip()) >= 32
    assert places.passphrase_file().stat().st_mode & 0o777 == 0o600
    said = capsys.readouterr().out
    assert all(word in said for word in ("back it up", "share it with CI", "change it"))
    assert first.strip() not in said
    bootstrap.make_home()
    assert places.passphrase_file().read_text() == first
    assert capsys.readouterr().out == ""


def test_no_passphrase_is_made_for_someone_who_has_one(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE", "own")
    bootstrap.make_home()
    assert not places.passphrase_file().exists()


def test_an_empty_passphrase_file_is_refused(homes: Path) -> None:
    places.home_dir().mkdir()
    places.passphrase_file().touch()
    with pytest.raises(Stop, match="found an empty file"):
        bootstrap.make_home()
