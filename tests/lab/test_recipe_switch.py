"""Switching a served deployment to a recipe: staged while the old model serves, then one start.

Only this shows that what ``use`` writes is what ``up`` then serves. It needs what test_end_to_end.py needs and about
ten minutes. The tests build on each other and run in order. The recipe lies in another checkout, so that this one stays
clean.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-switch``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from automation.exit_codes import Exit
from automation.schemas import schema_of
from spark_core.settings.recipe import leaves
from tests.lab.deployment import Deployment, chat, copy_checkout
from tests.lab.in_order import in_order as in_order
from tests.lab.operating import HOSTS

pytestmark = [pytest.mark.lab, pytest.mark.campaign]

NAME = "tiny-2x"


@dataclass
class Switching:
    """A deployment and the checkout from which it is operated."""

    deployment: Deployment
    checkout: Path

    def run(self, command: str, *words: str) -> tuple[Any, str]:
        """The report of a command, and what else it printed."""
        file = self.deployment.home / "report.json"
        text = 'exec 2>&1 >"$0"; python3 toolchain/bootstrap.py >&2; . ./env && exec python -m automation "$@"'
        given = (str(file), command, "--stack", "dev", "--json", *words)
        done = self.deployment._run(["sh", "-c", text, *given], self.checkout, 1800)
        self.deployment.printed.append(done.text)
        report = json.loads(file.read_text() or "{}")
        if command != "stage":
            jsonschema.validate(report, schema_of(command))
            assert report["exit_code"] == done.code, (report, done.text[-3000:])
        else:
            assert done.code == 0, done.text[-3000:]
        return report, done.text

    def write(self, **serving: Any) -> None:
        """The recipe: the lab's tiny model under another name, and some of the settings."""
        value: dict[str, Any] = {
            "summary": "the lab's model",
            "nodes": 2,
            "date": "2026-12",
            "image": "the lab's",
            "weights": {"source": "not counted"},
            "sources": [{"title": "the lab"}],
            "model": {"source": f"controller:{self.deployment.folder}/model", "served_name": "tiny-by-recipe"},
            "serving": {"tensor_parallel_size": 2, "max_model_len": 256, **serving},
        }
        value["why"] = dict.fromkeys(
            (place for place, _ in leaves({part: value[part] for part in ("model", "serving")})), "for the lab"
        )
        path = self.checkout / "recipes" / "own" / f"{NAME}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(value))

    def arguments(self) -> list[str]:
        """Arguments of the head's container."""
        text = self.deployment.on(
            "spark-a", "docker inspect -f '{{json .Args}}' $(docker ps -qf label=spark-vllm.rank=0)"
        )
        found: list[str] = json.loads(text)
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Switching]:
    made = Deployment("t-switch", tmp_path_factory.mktemp("home"))
    try:
        made.start()
        yield Switching(made, copy_checkout(tmp_path_factory.mktemp("checkout") / "spark-vllm"))
    finally:
        made.stop()


def serves(served: Switching, name: str) -> None:
    outputs = served.deployment.outputs()
    assert outputs["model"] == name
    assert chat(outputs, outputs["api_key"]).status == 200


def test_a_recipe_is_staged_while_the_model_serves(served: Switching) -> None:
    first, said = served.run("up")
    assert first["exit_code"] == Exit.DONE, said[-4000:]
    serves(served, "tiny-qwen3.5-moe")
    started = {host: served.deployment.containers(host) for host in HOSTS}
    file = served.deployment.config_file.read_text()
    served.write()
    staged, said = served.run("stage", NAME)
    assert staged["nodes"] == list(HOSTS)
    assert f"groups.main: the recipe {NAME}" in said
    assert served.deployment.config_file.read_text() == file
    assert {host: served.deployment.containers(host) for host in HOSTS} == started
    serves(served, "tiny-qwen3.5-moe")


def test_use_serves_the_recipe_and_what_the_stack_says_wins(served: Switching) -> None:
    used, said = served.run("use", NAME, "--yes")
    assert used["exit_code"] == Exit.DONE, said[-4000:]
    group = yaml.safe_load(served.deployment.config_file.read_text())["config"]["spark-vllm:groups"]["main"]
    assert (group["recipe"], "model" in group) == (NAME, False)
    serves(served, "tiny-by-recipe")
    words = served.arguments()
    assert words[words.index("--max-model-len") + 1] == "512"
    [own] = re.findall(rf"from the recipe {NAME} .*of the stack instead: (.+)", said)
    assert set(own.split(", ")) == {"serving.tensor_parallel_size", "serving.max_model_len"}
    again, _ = served.run("up")
    assert again["changes"] == []


def test_overrides_are_dropped_on_request(served: Switching) -> None:
    used, said = served.run("use", NAME, "--drop-overrides", "--yes")
    assert used["exit_code"] == Exit.DONE, said[-4000:]
    words = served.arguments()
    assert words[words.index("--max-model-len") + 1] == "256"
    serves(served, "tiny-by-recipe")


def test_a_recipe_that_fails_is_rolled_back_to_the_settings_that_served(served: Switching) -> None:
    served.write(extra_args=["--no-such-flag"])
    used, said = served.run("use", NAME, "--yes", "--rollback-on-failure")
    assert used["exit_code"] == Exit.ROLLED_BACK, said[-4000:]
    assert "no-such-flag" in json.dumps(used["error"])
    serves(served, "tiny-by-recipe")
    assert "--no-such-flag" not in served.arguments()
