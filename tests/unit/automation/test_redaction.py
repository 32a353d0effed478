"""No secret gets through, and what is none stays readable."""

from __future__ import annotations

import pytest

from automation import redaction
from automation.redaction import REPLACEMENT, learn, redacted


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abcdEFGH1234.xyz_", "abcdEFGH1234.xyz_"),
        ("HF_TOKEN=hf_abcdefghijklmnop", "hf_abcdefghijklmnop"),
        ("curl http://ann:s3cr3tpass@host/x", "s3cr3tpass"),
        ("sudo_password: 'hunter2222'", "hunter2222"),
        ('"api_key": "0123456789abcdef"', "0123456789abcdef"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nQUJD\nREVG\n-----END OPENSSH PRIVATE KEY-----", "QUJD"),
        ("secure: v1:YWJjZGVmZ2g=:aGlqa2xtbm9wcXJz", "aGlqa2xtbm9wcXJz"),
        ("key AKIAABCDEFGHIJKLMNOP", "AKIAABCDEFGHIJKLMNOP"),
    ],
)
def test_a_secret_is_known_by_its_form(text: str, secret: str) -> None:
    assert secret not in redacted(text)
    assert REPLACEMENT in redacted(text)


def test_a_known_value_is_taken_out_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", set())
    learn(["plainvalue77", None, "abc"])
    assert redacted("x plainvalue77y abc") == f"x {REPLACEMENT}y abc"


@pytest.mark.parametrize(
    "text",
    [
        "spark-a rank 0: loading: shards 3/10",
        "main-api-key: create done in 2 s",
        "serving.api_key is off: whoever reaches the port can use the model",
        "max_tokens: 12",
        "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        "http://10.99.0.12:30000/v1: a completion came back in 0.4 s, 2 ranks serve",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text
