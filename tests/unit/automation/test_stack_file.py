"""Host keys written into a stack's file: in place, and with every other byte kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from automation import stack_file
from automation.stack_file import StackFile, open_stack_file
from spark_core.errors import SettingsError, SparkError
from tests.config_cases import load_base

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAaBcDeF+/Zz="
OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIZZZZZZZ"
REST = "  spark-vllm:image: {local_id: x}  # kept\nencryptionsalt: v1:abc=\n"


def with_keys(text: str, **keys: str) -> str:
    keys = {name.replace("_", "-"): key for name, key in keys.items()}
    return StackFile("t", Path("Pulumi.t.yaml"), "spark-vllm", text).with_host_keys(keys)


BLOCK = """\
# A comment at the top.
config:
  spark-vllm:nodes:
    - name: spark-a
      management_address: 10.1.230.180   # behind the desk
      user: aurora
      # host_key: ssh-ed25519 AAAA…
      fabric: []

    - name: spark-b
      user: aurora
      management_address: "10.1.230.181"
"""


def test_a_key_is_written_behind_the_address_and_nothing_else_changes() -> None:
    after = with_keys(BLOCK + REST, spark_a=KEY, spark_b=OTHER)
    assert after == (BLOCK + REST).replace(
        "# behind the desk\n", f"# behind the desk\n      host_key: {KEY}\n"
    ).replace('"10.1.230.181"\n', f'"10.1.230.181"\n      host_key: {OTHER}\n')


def test_only_the_named_nodes_get_one() -> None:
    after = with_keys(BLOCK, spark_b=KEY)
    assert after == BLOCK + f"      host_key: {KEY}\n"


def test_a_file_without_a_last_newline_gets_its_key_on_a_line_of_its_own() -> None:
    assert with_keys(BLOCK.rstrip("\n"), spark_b=KEY) == BLOCK + f"      host_key: {KEY}"


def test_lines_that_end_as_on_windows_stay_so() -> None:
    text = BLOCK.replace("\n", "\r\n")
    assert with_keys(text, spark_a=KEY) == text.replace(
        "# behind the desk\r\n", f"# behind the desk\r\n      host_key: {KEY}\r\n"
    )


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_a_pin_is_replaced_in_its_place(quote: str) -> None:
    text = BLOCK.replace("user: aurora\n      #", f"host_key: {quote}{OTHER}{quote} # old\n      user: aurora\n      #")
    assert with_keys(text, spark_a=KEY) == text.replace(OTHER, KEY)


def test_nodes_on_one_line_get_it_too() -> None:
    text = (
        "config:\n  spark-vllm:nodes: [{name: spark-a, management_address: 10.1.230.180, user: é},\n"
        "    {name: spark-b, user: x, management_address: 10.1.230.181,}] # two\n" + REST
    )
    after = with_keys(text, spark_a=KEY, spark_b=OTHER)
    assert after == text.replace("10.1.230.180", f"10.1.230.180, host_key: {KEY}").replace(
        "10.1.230.181", f"10.1.230.181, host_key: {OTHER}"
    )


def test_a_file_of_json_stays_json() -> None:
    nodes = [{"name": "spark-a", "management_address": "10.1.230.180", "user": "aurora"}]
    for indent in (None, 2):
        text = json.dumps({"config": {"spark-vllm:nodes": nodes}}, indent=indent)
        after = json.loads(with_keys(text, spark_a=KEY))
        assert after["config"]["spark-vllm:nodes"] == [nodes[0] | {"host_key": KEY}]


@pytest.mark.parametrize(
    "text",
    [
        'config:\n  spark-vllm:nodes: \'[{"name": "spark-a", "management_address": "x"}]\'\n',
        "x: &n {management_address: h}\nconfig:\n  spark-vllm:nodes:\n  - <<: *n\n    name: &a spark-a\n  - name: *a\n",
        "config:\n  spark-vllm:nodes:\n  - name: spark-a\n    host_key: &k old\n    management_address: *k\n",
    ],
    ids=["JSON text", "a name twice", "a pin that something else refers to"],
)
def test_what_cannot_be_changed_in_place_is_left_to_the_person_with_the_line(text: str) -> None:
    with pytest.raises(SparkError) as refused:
        with_keys(text, spark_a=KEY)
    assert refused.value.do == f"put in by hand: spark-a: host_key: {KEY}"


def test_a_file_is_replaced_whole_and_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "Pulumi.t.yaml"
    real.write_text(BLOCK)
    real.chmod(0o640)
    link.symlink_to(real)
    file = StackFile("t", link, "spark-vllm", BLOCK)
    file.write(file.with_host_keys({"spark-a": KEY}))
    assert link.is_symlink()
    assert KEY in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Pulumi.t.yaml", "real.yaml"]


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the environment names."""
    path = tmp_path / "chosen.yaml"
    monkeypatch.setenv("PULUMI_OPTION_CONFIG_FILE", str(path))
    return path


def test_the_settings_are_those_of_the_program(chosen: Path) -> None:
    raw = load_base()
    raw["nodes"] = json.dumps(raw["nodes"])
    config = {f"spark-vllm:{key}": value for key, value in raw.items()}
    chosen.write_text(yaml.safe_dump({"config": config | {"spark-vllm:sudo_password": {"secure": "v1:x"}, "aws:r": 1}}))
    file = open_stack_file("organization/spark-vllm/dev")
    assert (file.path, file.project) == (chosen, "spark-vllm")
    assert [node.name for node in file.settings().nodes] == ["spark-a", "spark-b"]
    chosen.write_text("config:\n  spark-vllm:nodes: []\n")
    with pytest.raises(SettingsError):
        open_stack_file("dev").settings()


def test_without_a_chosen_file_it_is_the_stack_s_own_beside_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PULUMI_OPTION_CONFIG_FILE", raising=False)
    assert open_stack_file("organization/spark-vllm/spark").path == stack_file.PROJECT / "Pulumi.spark.yaml"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "expected the file of the stack dev, found: No such file or directory"),
        (b"\xff\xfe", "found: no text"),
        (b"config: [\n", "expected YAML, found: "),
        (b"- a\n", "expected a mapping with `config`, found list"),
        (b"", "expected a mapping with `config`, found NoneType"),
    ],
    ids=["none", "no text", "cut", "a list", "empty"],
)
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, words: str, chosen: Path) -> None:
    if content is not None:
        chosen.write_bytes(content)
    with pytest.raises(SparkError) as refused:
        open_stack_file("dev")
    assert refused.value.where == str(chosen)
    assert words in refused.value.line
