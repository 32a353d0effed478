"""What the hub says of a revision, as far as it is believed."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spark_core.errors import ObservationError
from spark_core.hub.listing import Listing, from_compact, git_id, needed, parse_listing
from spark_core.transfer.manifest import Manifest

COMMIT = "a" * 40
SHA256 = "b" * 64


def answer(*files: tuple[str, int, str], commit: str = COMMIT) -> dict[str, Any]:
    return {"commit": commit, "files": [list(file) for file in files]}


def test_serving_needs_one_form_of_the_weights_and_what_is_read_beside_them() -> None:
    kept = [
        "config.json",
        "tokenizer.json",
        "merges.txt",
        "modeling_x.py",
        "chat_template.jinja",
        "tokenizer/vocab.json",
    ]
    other = ["pytorch_model.bin", "model.gguf", "original/consolidated.00.pth", "onnx/model.onnx", "README.md"]
    names = [*kept, "model.safetensors", *other, "LICENSE.txt", "picture.png", ".gitattributes"]
    assert needed(dict.fromkeys(names)) == sorted([*kept, "model.safetensors"])


def test_without_safetensors_the_other_forms_are_needed() -> None:
    assert needed(dict.fromkeys(["config.json", "pytorch_model.bin"])) == ["config.json", "pytorch_model.bin"]


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"commit": COMMIT, "files": "none"},
        answer(commit="main"),
        answer(("../../.ssh/authorized_keys.json", 1, SHA256)),
        answer(("/etc/passwd.json", 1, SHA256)),
        answer(("a\nb.json", 1, SHA256)),
        answer(("config.json", -1, SHA256)),
        answer(("config.json", 1, "md5")),
    ],
)
def test_an_answer_that_is_none_or_leads_out_of_the_folder_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ObservationError, match="expected a list of files with their hashes from the hub"):
        parse_listing(broken, "spark-a")


def test_a_listing_is_kept_in_state_and_read_again() -> None:
    listing = parse_listing(answer(("config.json", 3, "c" * 40), ("model.safetensors", 9, SHA256)), "spark-a")
    assert from_compact(COMMIT, listing.compact()) == listing
    assert listing.small == ["config.json"]
    assert listing.total_bytes == 12


def test_git_s_object_id_is_that_of_git(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content\0\n")
    said = subprocess.run(["git", "hash-object", tmp_path / "file"], capture_output=True, text=True, check=True)
    assert git_id(b"content\0\n") == said.stdout.strip()


def test_what_is_not_as_the_hub_has_it_is_named_with_what_is_wrong() -> None:
    small = b'{"a": 1}'
    sha256 = hashlib.sha256(small).hexdigest()
    files = {"config.json": (8, git_id(small)), "gone.json": (1, "c" * 40)}
    listing = Listing(COMMIT, files | {"m.safetensors": (5, SHA256), "n.safetensors": (5, SHA256)})
    found = Manifest({"config.json": (8, sha256), "m.safetensors": (4, "d" * 64), "n.safetensors": (5, "d" * 64)})
    assert listing.differences(found, {"config.json": git_id(small)}) == [
        "gone.json: missing",
        "m.safetensors: 4 bytes instead of 5",
        "n.safetensors: content differs",
    ]
    assert listing.differences(found, {})[0] == "config.json: content differs"
    assert sorted(listing.of(Manifest({**found.files, "other": (1, SHA256)})).files) == sorted(found.files)
