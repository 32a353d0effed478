"""Secrets in every place where one may lie, and everything that the commands print and write: none is in it."""

from __future__ import annotations

import json
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from automation.exit_codes import Exit
from tests.engine.conftest import PROJECT
from tests.engine.test_automation import Parked, schema, serving
from tests.fake_ssh import FakeSsh

CONFIG = {
    "sudo_password": 'Sudo"quux<41Zk',  # JSON and HTML write it in another way
    "api_key": "Key-plugh-92Lm",
    "hf_token": "Hub-xyzzy-73Pq",
    "notify_webhook": "https://hooks.example/Hook-frotz-55Ts",
}
"""Encrypted in the stack's file. No value has a form by which one could know it."""
FILES = {"ssh.sudo_password_file": "Filed-gnusto-18Wd", "hub.token_file": "Filed-rezrov-64Vb"}
ENVIRONMENT = {"HF_TOKEN": "Env-blorb-37Xc", "AWS_SECRET_ACCESS_KEY": "Env-yomin-29Rf"}
PIN = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAaBcDeF"
NODES = ("spark-a", "spark-b")


class Seeded:
    """A stack with secrets, whose program, provider and nodes tell each of them to whoever listens."""

    def __init__(self, parked: Parked, ssh: FakeSsh, folder: Path) -> None:
        self.parked = parked
        self.folder = folder
        self.heard: dict[str, str] = {}
        self.root = folder / "root"
        extra = {"PATH": f"{ssh.programs}{os.pathsep}{os.environ['PATH']}", "HOME": str(ssh.home)}
        parked.stack.extra |= extra | ENVIRONMENT
        for name, value in FILES.items():
            (folder / name).write_text(f"{value}\n")
        self.file = parked.stack.home / "Pulumi.spark.yaml"
        self.write(1000)
        passphrase = (parked.stack.home / "passphrase").read_text().strip()
        self.secrets = {**CONFIG, **FILES, **ENVIRONMENT, "passphrase": passphrase}
        self.told = "\n".join(f"it is {value} and no other" for value in self.secrets.values())
        self.seed_nodes(ssh)

    def write(self, max_model_len: int) -> None:
        """The stack's file; what is encrypted in it stays."""
        kept = yaml.safe_load(self.file.read_text()) if self.file.is_file() else {}
        config = (kept.get("config") or {}).items()
        secure = {key: value for key, value in config if isinstance(value, dict) and value.keys() == {"secure"}}

        def change(config: dict[str, Any]) -> None:
            serving(max_model_len=max_model_len, api_key="own")(config)
            for node in config["spark-vllm:nodes"]:
                node |= {"management_address": node["name"], "host_key": PIN}
            config["spark-vllm:node_root"] = str(self.root)
            config["spark-vllm:ssh"] = {"sudo_password_file": str(self.folder / "ssh.sudo_password_file")}
            config["spark-vllm:hub"] = {"token_file": str(self.folder / "hub.token_file")}
            config |= secure

        self.parked.stack.configure(change, "Pulumi.spark.yaml")
        if not secure:
            for key, value in CONFIG.items():
                line = 'printf %s "$2" | pulumi config set -s spark --config-file "$3" --secret "spark-vllm:$1"'
                done = self.parked.stack.run(line, key, value, str(self.file), cwd=self.parked.program)
                assert done.returncode == 0, done.stdout

    def seed_nodes(self, ssh: FakeSsh) -> None:
        """Logs, status and labels of the ranks."""
        state = self.root / "stacks" / "spark" / "state" / "main"
        (state / "logs" / "1").mkdir(parents=True)
        for rank, name in enumerate(NODES):
            said = "".join(f"100.000 vllm | {line}\n" for line in self.told.splitlines())
            (state / "logs" / "1" / f"rank{rank}.log").write_text(said)
            labels = {"spark-vllm.stack": "spark", "told": self.told}
            container = f"spark-vllm-spark-main-rank{rank}"
            ssh.hosts[name].set_container(container, Labels=labels, StartedAt="2026-01-01T00:00:00Z")
        error = {"at": 100.0, "source": "vllm", "line": self.told.splitlines()[0], "lines": self.told.splitlines()}
        document = {
            "phase": "failed",
            "detail": self.told,
            "progress": self.told,
            "updated": time.time() + 3600,
            "since": 100.0,
            "generation": {"deployment": "d", "head_incarnation": "x", "n": 1},
            "first_error": error,
        }
        (state / "status.json").write_text(json.dumps(document))

    def hear(self, command: str, *words: str) -> Any:
        """Run a command; what it printed is heard, and with --json it fits its schema."""
        code, out, err = self.parked.run(command, *words)
        place = " ".join((command, *words))
        self.heard |= {f"{place}: output": out, f"{place}: messages": err}
        if "--json" not in words:
            return code
        assert out.startswith("{"), (place, err[-2000:])
        value = json.loads(out)
        jsonschema.validate(value, schema(command))
        assert value["exit_code"] == code, (value, err)
        return value

    def leaks(self) -> list[str]:
        """Where a secret was heard, in any of the ways in which it may be written."""
        ways = {
            name: {value, json.dumps(value)[1:-1], value.replace('"', "&quot;").replace("<", "&lt;")}
            for name, value in self.secrets.items()
        }
        return [
            f"{name} in {place}"
            for place, text in self.heard.items()
            for name, forms in ways.items()
            if any(form in text for form in forms)
        ]


@pytest.fixture
def seeded(engine_home: Path, tmp_path: Path) -> Iterator[Seeded]:
    with FakeSsh(tmp_path / "ssh", list(NODES)) as ssh:
        yield Seeded(Parked(engine_home, tmp_path), ssh, tmp_path)


def test_no_secret_is_in_any_output_report_bundle_log_or_state(seeded: Seeded, tmp_path: Path) -> None:
    leak = seeded.parked.state / "leak"
    leak.write_text(seeded.told)
    first = seeded.hear("preview", "--json")
    assert first["exit_code"] == Exit.DONE, first["findings"]
    assert seeded.hear("up", "--json")["exit_code"] == Exit.DONE
    seeded.write(2000)
    (seeded.parked.state / "fail").touch()
    assert seeded.hear("up") == Exit.FAILED  # rank and step tell all of it in their evidence
    assert seeded.hear("up", "--json")["exit_code"] == Exit.FAILED
    assert seeded.hear("preview", "--markdown") == Exit.DONE
    (seeded.parked.state / "fail").unlink()
    assert seeded.hear("up", "--json")["exit_code"] == Exit.DONE
    seeded.hear("history", "--json")
    assert seeded.hear("drift", "--json")["exit_code"] == Exit.DRIFT  # the endpoint does not answer
    for command in ("status", "logs"):
        seeded.hear(command)
        seeded.hear(command, "--json")
    assert "[redacted]" in seeded.heard["logs: output"] and "[redacted]" in seeded.heard["status --json: output"]
    page, bundle = tmp_path / "page.html", tmp_path / "bundle.tar.gz"
    seeded.hear("report", "--no-drift", "--output", str(page), "--json")
    seeded.hear("report", "--no-drift", "--output", str(page))
    seeded.heard["page"] = page.read_text()
    seeded.hear("doctor", "--bundle", str(bundle), "--json")
    seeded.hear("doctor")
    with tarfile.open(bundle) as packed:
        files = {member.name: packed.extractfile(member) for member in packed.getmembers()}
        seeded.heard |= {f"bundle: {name}": file.read().decode() for name, file in files.items() if file}
    assert {"spark-vllm-doctor/spark-a/rank0.log.jsonl", "spark-vllm-doctor/state.json"} <= set(files)
    assert "[redacted]" in seeded.heard["bundle: spark-vllm-doctor/spark-a/rank0.log.jsonl"]
    for command in ("stop", "start", "bench", "gc", "verify"):
        words: tuple[str, ...] = ("--deadline", "20s") if command in ("stop", "start", "bench") else ()
        seeded.hear(command, *words, "--json")
    stack = seeded.parked.stack
    seeded.heard["state"] = stack.pulumi("stack", "export", "-s", "spark", cwd=seeded.parked.program).stdout
    history = seeded.parked.backend.glob(".pulumi/**/*.json")
    seeded.heard |= {f"backend: {path.name}": path.read_text() for path in history}
    assert len(seeded.heard) > 40
    assert "\n".join(seeded.leaks()) == ""
    assert (PROJECT / "Pulumi.spark.yaml").read_text().count("secure:") == 0


def test_the_look_for_leaks_finds_one(seeded: Seeded) -> None:
    seeded.heard["here"] = f"x{json.dumps(CONFIG['sudo_password'])}"
    seeded.heard["there"] = "Sudo&quot;quux&lt;41Zk"
    assert seeded.leaks() == ["sudo_password in here", "sudo_password in there"]
