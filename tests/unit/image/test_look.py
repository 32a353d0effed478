"""What preview says of the image, without pulling, and without starting anything on a busy node."""

from __future__ import annotations

from typing import Any

from spark_core.findings import Finding
from spark_core.image import look
from spark_core.image.check import CheckReport
from spark_core.image.look import ImageQuestion, look_at_image
from spark_core.proof.idle import parse_readiness
from spark_core.settings import read_settings
from tests.config_cases import apply_change, load_base
from tests.unit.image.conftest import Site, layer_tar, write_archive

IDLE = "=== load\n0.1 0.1 0.1 1/1 1\n4\n=== memory\nMemAvailable: 99999999 kB\n"
NAME = "registry.example/vllm:latest"


def asked(
    site: Site, image: dict[str, Any], image_id: str = "", *, may_run: bool = False, **changes: Any
) -> list[Finding]:
    settings = read_settings(apply_change(load_base(), {"hardware": "cpu", "image": image, **changes}))
    transports = {"spark-a": site["a"], "spark-b": site["b"]}
    return look_at_image(
        ImageQuestion(settings, "dev", image_id, image.get("registry", ""), {}, transports, may_run=may_run)
    )


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def tagged(site: Site, letter: str, image: str) -> None:
    (site[letter].base / "docker-root/tags.json").write_text(f'{{"{NAME}": "{image}"}}')


def test_an_image_that_no_node_has_is_not_yet_known(site: Site) -> None:
    [found] = asked(site, {"registry": NAME})
    assert (found.code, found.severity) == ("image-unknown", "unknown")
    assert codes(asked(site, {"archive": "/x.tar"}, site.image_id)) == ["image-unknown"]


def test_a_local_image_that_no_node_has_fails(site: Site) -> None:
    [found] = asked(site, {"local_id": site.image_id}, site.image_id)
    assert found.code == "image-missing"


def test_two_images_under_one_name_fail_with_both_ids(site: Site) -> None:
    other = site.folder / "other.tar"
    other_id = write_archive(other, [layer_tar("other", 1000)])
    site.load("a")
    site.load("b", other)
    tagged(site, "a", site.image_id)
    tagged(site, "b", other_id)
    [found] = asked(site, {"registry": NAME})
    assert found.code == "image-differs"
    assert site.image_id in found.what
    assert other_id in found.what


def test_an_image_of_another_architecture_fails_on_each_node(site: Site) -> None:
    for letter in "ab":
        site.load(letter)
    (site["b"].base / "architecture").write_text("arm64")
    [found] = asked(site, {"local_id": site.image_id}, site.image_id)
    assert found.code == "image-architecture"
    assert found.where == "spark-b (image)"


def test_what_the_image_brings_and_loses_is_said(site: Site) -> None:
    inside: dict[str, object] = {
        "Entrypoint": ["/start.sh"],
        "Cmd": ["serve"],
        "User": "vllm",
        "Env": ["PATH=/bin", "NCCL_IB_DISABLE=1"],
    }
    site.image_id = write_archive(site.archive, site.layers, inside=inside)
    site.load("a")
    found = {finding.code: finding for finding in asked(site, {"local_id": site.image_id}, site.image_id)}
    assert "/start.sh with serve" in found["image-entrypoint"].what
    assert "the user vllm" in found["image-user"].what
    assert "NCCL_IB_DISABLE=1" in found["image-environment"].what
    assert codes(list(found.values())) == ["image-entrypoint", "image-user", "image-environment"]


def test_a_busy_node_is_not_asked_and_said_to_be(site: Site, monkeypatch: Any) -> None:
    site.load("a")
    monkeypatch.setattr(look, "run_check", lambda *args: None)
    busy = parse_readiness(
        "spark-a",
        "=== containers\nrank0|dev||||\n=== load\n0.1 0.1 0.1 1/1 1\n4\n=== memory\nMemAvailable: 99999999 kB\n",
    )
    monkeypatch.setattr(look, "parse_readiness", lambda *args: busy)
    monkeypatch.setattr(look, "run_checked", lambda *args, **kwargs: "")
    [found] = asked(site, {"local_id": site.image_id}, site.image_id, may_run=True)
    assert found.code == "image-unknown"
    assert "spark-a (node busy: container rank0 of the stack dev)" in found.what


def test_an_idle_node_is_asked_and_nothing_is_written(site: Site, monkeypatch: Any) -> None:
    site.load("a")
    kept: list[str] = []

    def ask(*args: Any) -> CheckReport | None:
        kept.append(args[-1])
        return None if args[-1] == "cached" else CheckReport("spark-a", error="exit status 1")

    monkeypatch.setattr(look, "run_check", ask)
    idle = parse_readiness("spark-a", f"=== containers\n{IDLE}")
    monkeypatch.setattr(look, "parse_readiness", lambda *args: idle)
    monkeypatch.setattr(look, "run_checked", lambda *args, **kwargs: "")
    [found] = asked(site, {"local_id": site.image_id}, site.image_id, may_run=True)
    assert found.code == "image-check-failed"
    assert kept == ["cached", "no"]
