"""What people are told, each thing once, and how it is sent."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spark_runtime.notices import Channel, Notice, Outbox, Watch, send
from tests.unit.runtime.runtime_group import eventually

NOBODY: dict[str, str] = {}
LOST = {"rank 1 on spark-b": "its node does not answer: no power, no link, or booting"}


def told(watch: Watch, now: float, phase: str, silent: dict[str, str] = NOBODY, detail: str = "why") -> list[str]:
    return [notice.event for notice in watch.look(now, phase, detail, silent)]


def test_a_verdict_is_told_once_and_the_end_of_it_too() -> None:
    watch = Watch("main")
    assert told(watch, 0, "loading") == []
    found = watch.look(10, "failed", "crash loop: ValueError", {})
    assert [(n.event, n.text) for n in found] == [
        ("verdict", "main does not serve and does not try again by itself: crash loop: ValueError")
    ]
    assert told(watch, 11, "failed") == []
    assert told(watch, 20, "serving") == ["serving"]
    assert told(watch, 21, "serving") == []


def test_a_group_that_does_not_heal_in_time_is_told_and_a_quick_one_is_not() -> None:
    watch = Watch("main", deadline_s=100)
    assert told(watch, 0, "serving") == []
    assert told(watch, 1, "ending") == told(watch, 90, "loading") == []
    assert told(watch, 95, "serving") == []  # healed before anybody was told
    assert told(watch, 200, "ending") == told(watch, 299, "loading") == []
    assert told(watch, 301, "loading") == ["not healed"]


def test_a_lost_node_is_told_after_a_minute_and_again_when_it_is_lost_again() -> None:
    watch = Watch("main")
    assert told(watch, 0, "waiting_for_ranks", LOST) == told(watch, 50, "waiting_for_ranks", LOST) == []
    found = watch.look(61, "waiting_for_ranks", "", LOST)
    assert [n.text for n in found] == [
        "main has lost rank 1 on spark-b: its node does not answer: no power, no link, or booting"
    ]
    assert told(watch, 62, "waiting_for_ranks", LOST) == told(watch, 63, "loading") == []
    assert told(watch, 70, "waiting_for_ranks", LOST) == []
    assert told(watch, 140, "waiting_for_ranks", LOST) == ["node lost"]


def test_a_group_that_is_stopped_on_request_is_no_trouble() -> None:
    watch = Watch("main", deadline_s=10)
    assert told(watch, 0, "stopping") == told(watch, 0, "stopped") == told(watch, 1e6, "stopped") == []


@contextmanager
def hook(*codes: int) -> Iterator[tuple[str, list[Any]]]:
    """A webhook that answers with these codes in turn, and what it got."""
    got: list[Any] = []
    left = list(codes)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(left.pop(0) if len(left) > 1 else left[0])
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/token-of-mine", got
        server.shutdown()


NOTICE = Notice("verdict", "main", "main does not serve")


def test_a_notice_is_posted_as_json_and_its_outcome_kept_without_the_address() -> None:
    with hook(200) as (url, got):
        outbox = Outbox()
        outbox.post(url, NOTICE, 5.0)
        eventually(lambda: outbox.sent[0]["outcome"] == "sent", lambda: outbox.sent)
    assert got == [{"event": "verdict", "group": "main", "text": "main does not serve"}]
    assert "token-of-mine" not in json.dumps(outbox.sent)


def test_what_cannot_be_sent_says_why_and_never_where() -> None:
    with hook(500) as (url, _):
        assert send(url, NOTICE) == "HTTP 500"
    assert send(url, NOTICE) == "not sent: ConnectionRefusedError"
    assert send("not-an-address-with-token", NOTICE) == "not sent: ValueError"


def test_whom_to_tell_is_read_from_the_node_and_nothing_of_it_is_needed(tmp_path: Path) -> None:
    assert Channel.read(tmp_path) == Channel()
    (tmp_path / "notify.json").write_text('{"webhook": "http://x", "command": ["/tell", "me"], "deadline_s": 60}')
    assert Channel.read(tmp_path) == Channel("http://x", ("/tell", "me"), 60.0)
    (tmp_path / "notify.json").write_text('{"command": "no list", "deadline_s": "soon"}')
    assert Channel.read(tmp_path) == Channel()
