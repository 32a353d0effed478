"""vLLM's own parser, in the real serving image on an emulated host, takes the command line of every recipe.

It needs root on Linux and some ten minutes; it uses a lab of its own, `t-recipes`. To clean up after an aborted run:
``python -m lab down --instance t-recipes``. The image's vLLM runs on the CPU: that flags and parsers are known there
says nothing of kernels.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from lab import paths
from spark_core.group import GroupFiles, plan_group
from spark_core.image import Bringing, ImageNode, archive_image_id, bring_image
from spark_core.image.check import CheckReport, check_findings, check_spec, check_words, run_check
from spark_core.settings import ImageSettings, Settings, read_settings
from spark_core.settings.recipe import load_recipe
from spark_core.transport.connection import ConnectionSpec, resolve
from spark_core.transport.ssh import SshTransport
from tests.lab.runs import run_lab
from tests.unit.test_recipes import SHIPPED, model_of, stack_with

pytestmark = [pytest.mark.lab, pytest.mark.campaign]

INSTANCE = "t-recipes"
HOST = "spark-a"
ROOT = "/home/spark/recipes-test"

lab = partial(run_lab, INSTANCE)
"""Run a command of the lab as a person would."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A lab of one host with the serving image in its Docker, removed at the end; the image's id."""
    if sys.platform != "linux" or os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must be able to run the lab, which needs Linux and root")
        pytest.skip("the lab needs Linux and root")
    lab("down")
    lab("up", "--hosts", "1")
    archive = str(paths.instance_dir(INSTANCE) / "serving-image.tar")
    known = archive_image_id(archive)
    nodes = [ImageNode(transport(), ROOT, None, None)]
    work = tmp_path_factory.mktemp("archives")
    source = ImageSettings(archive=archive)
    yield bring_image(Bringing(source, nodes, work, known, "", print, lambda: None)).image_id
    lab("down")


def transport() -> SshTransport:
    config = str(paths.instance_dir(INSTANCE) / "ssh_config")
    return SshTransport(resolve(ConnectionSpec(HOST, HOST, "spark", ssh_config=config)))


def settings_of(name: str, image: str, **serving: object) -> Settings:
    """A stack whose group is the recipe's alone, but for what the lab's image needs to run at all."""
    facts = json.loads((paths.instance_dir(INSTANCE) / "image.json").read_text())
    mount = {"source": facts["cuda_libs_host_path"], "target": facts["cuda_libs_container_path"]}
    raw = stack_with(name, load_recipe(name).nodes, serving={"mounts": [mount], **serving})
    raw |= {"hardware": "cpu", "node_root": ROOT, "image": {"local_id": image}}
    for node in raw["nodes"]:
        for interface in node["fabric"]:
            interface["hca"] = None
    return read_settings(raw)


def said_of(name: str, image: str, **serving: object) -> dict[str, str]:
    """Code and text of each finding that the image gives cause for."""
    settings = settings_of(name, image, **serving)
    spec = check_spec(settings, "main", image, model_of(name).architectures)
    files = GroupFiles("", (), {node.name: "/" for node in settings.nodes})
    container = plan_group(settings, "main", "dev", image, files).containers[0]
    words = check_words(settings, "main", container, image)
    report = run_check(transport(), ROOT, spec, container, words, "no")
    assert isinstance(report, CheckReport)
    assert report.answer["versions"]["vllm"], report
    assert report.answer["unread"] == {}
    return {finding.code: finding.what for finding in check_findings("main", spec, [report])}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_parser_of_vllm_takes_the_command_line_of_a_recipe(image: str, name: str) -> None:
    assert said_of(name, image) == {}


def test_the_parser_would_refuse_what_is_wrong(image: str) -> None:
    said = said_of("gpt-oss-120b-1x", image, extra_args=["--max-num-seqz", "4"])
    assert set(said) == {"flag-refused"}
    assert "--max-num-seqz" in said["flag-refused"]
    assert set(said_of("gpt-oss-120b-1x", image, reasoning_parser="gpt99")) == {"parser-unknown"}


def test_nothing_of_it_is_left_on_the_host(image: str) -> None:
    config = str(paths.instance_dir(INSTANCE) / "ssh_config")
    line = f"docker ps -aq; ls {shlex.quote(ROOT)}/cache 2>/dev/null || true"
    done = subprocess.run(["ssh", "-F", config, HOST, line], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
