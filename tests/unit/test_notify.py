"""The file that says whom a head tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spark_core.errors import SettingsError
from spark_core.notify import notify_digest, notify_document, put_notify
from spark_core.settings import NotifySettings
from tests.fake_host import FakeHost

HOOK = "https://chat.example/hooks/token-of-mine"


def test_nobody_is_told_without_a_webhook_or_a_command() -> None:
    assert notify_document(NotifySettings(), None) == b""
    assert notify_digest(b"") == ""


def test_the_file_holds_what_the_supervisor_reads_and_the_digest_nothing_of_it() -> None:
    content = notify_document(NotifySettings(command=("/tell",), deadline_s=60), HOOK)
    assert json.loads(content) == {"webhook": HOOK, "command": ["/tell"], "deadline_s": 60}
    assert "token" not in notify_digest(content)
    assert notify_digest(content) != notify_digest(notify_document(NotifySettings(), HOOK))


def test_something_that_is_no_address_is_refused_without_being_shown() -> None:
    with pytest.raises(SettingsError) as refused:
        notify_document(NotifySettings(), "token-of-mine")
    assert "token-of-mine" not in refused.value.render()


def test_the_file_is_for_its_owner_only_never_in_an_argument_and_goes_when_nobody_is_told(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "host")
    content = notify_document(NotifySettings(), HOOK)
    put_notify(host.node, str(tmp_path / "state"), content)
    path = tmp_path / "state" / "notify.json"
    assert path.read_bytes() == content and path.stat().st_mode & 0o777 == 0o600
    assert not any("token-of-mine" in str(asked) for asked in host.node.asked)
    put_notify(host.node, str(tmp_path / "state"), b"")
    assert not path.exists()
    put_notify(host.node, str(tmp_path / "state"), b"")
