"""Runs on a node, sent there as text: asks the hub what a revision is. It reads nothing and writes nothing there.

Standard library only, since hosts have no installs. Orders are a line of JSON on standard input, the token among them;
the answer is a line of JSON on standard output. What is asked for is what huggingface_hub asks for too:
``/api/models/NAME/revision/REVISION?blobs=true`` and ``/NAME/resolve/COMMIT/FILE``.
"""

from __future__ import annotations

import http.client
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

TIMEOUT_S = 15
TRIES = 2
MOST_BYTES = 64 << 20
STATUSES = {401: "unauthorized", 403: "gated", 404: "missing", 429: "limited"}


class Asked(Exception):
    """An answer of the hub that is none."""

    def __init__(self, kind: str, found: str, wait_s: int = 0) -> None:
        super().__init__(found)
        self.kind, self.found, self.wait_s = kind, found, wait_s


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token goes to the hub's own address only."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urllib.parse.urlsplit(newurl).netloc == urllib.parse.urlsplit(req.full_url).netloc:
            for name, value in req.unredirected_hdrs.items():
                request.add_unredirected_header(name, value)
        return request


def get(url: str, token: str) -> bytes:
    """What is at an address of the hub."""
    request = urllib.request.Request(url, headers={"User-Agent": "spark-vllm"})  # noqa: S310
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(Redirects)
    for last in (attempt == TRIES for attempt in range(1, TRIES + 1)):
        try:
            with opener.open(request, timeout=TIMEOUT_S) as answer:
                return bytes(answer.read(MOST_BYTES))
        except urllib.error.HTTPError as error:
            if error.code < 500 or last:
                raise of_status(error.code, error.headers) from None
        except TimeoutError:
            if last:
                raise Asked("silent", f"no answer in {TIMEOUT_S} s") from None
        except (http.client.HTTPException, ConnectionError) as error:
            if last:
                raise Asked("cut", f"the answer broke off ({type(error).__name__})") from None
        except urllib.error.URLError as error:
            if last:
                late = isinstance(error.reason, TimeoutError)
                reason = getattr(error.reason, "strerror", None) or str(error.reason)
                raise Asked("silent" if late else "offline", "no connection in time" if late else reason) from None
    raise Asked("offline", "no answer")


def of_status(status: int, headers: Any) -> Asked:
    """What a status means; the hub's own words are told with it."""
    code, message = headers.get("X-Error-Code") or "", headers.get("X-Error-Message") or ""
    kind = "gated" if code == "GatedRepo" else STATUSES.get(status, "broken")
    waits = re.search(r"t=(\d+)", headers.get("RateLimit") or "") or re.fullmatch(
        r"(\d+)", headers.get("Retry-After") or ""
    )
    told = f"HTTP status {status}" + (f" ({message or code})" if message or code else "")
    return Asked(kind, told, int(waits.group(1)) if waits and kind == "limited" else 0)


def ask(orders: dict[str, Any]) -> dict[str, Any]:
    """Commit, files, and the text of ``config.json``."""
    endpoint, name = orders["endpoint"].rstrip("/"), urllib.parse.quote(orders["repository"])
    revision = urllib.parse.quote(orders["revision"], safe="")
    try:
        told = json.loads(get(f"{endpoint}/api/models/{name}/revision/{revision}?blobs=true", orders["token"]))
        files = [
            [one["rfilename"], (one.get("lfs") or one)["size"], (one.get("lfs") or {}).get("sha256") or one["blobId"]]
            for one in told["siblings"]
        ]
        commit = told["sha"]
    except (ValueError, KeyError, TypeError) as error:
        raise Asked("garbled", f"no description of a model ({type(error).__name__})") from None
    config = b""
    if any(file == "config.json" for file, _, _ in files):
        config = get(f"{endpoint}/{name}/resolve/{commit}/config.json", orders["token"])
    return {"commit": commit, "files": files, "config": config.decode(errors="replace")}


def main() -> None:
    """Answer the orders."""
    try:
        answer = ask(json.loads(sys.stdin.buffer.readline()))
    except Asked as error:
        answer = {"fault": {"kind": error.kind, "found": error.found, "wait_s": error.wait_s}}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
