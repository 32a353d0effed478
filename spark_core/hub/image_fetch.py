"""Runs in a throw-away container of the serving image, sent there as text: the hub's own client downloads files.

``hf_hub_download`` throws away what an interrupted run had of a file (huggingface/huggingface_hub PR 4228), so the
client's own ``http_get`` is given a file of ours and where to go on in it. Only files above ``plain_limit`` bytes,
which the hub does not give over plain HTTP, go through ``hf_hub_download`` and Xet.

Orders are a line of JSON on standard input, the token among them; when it ends, this does. It prints a line of JSON for
each file that is there, and one for each that cannot be had.
"""

from __future__ import annotations

import concurrent.futures
import errno
import json
import os
import re
import shutil
import sys
import threading
import time
import urllib.parse
from typing import Any

OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)
STATUSES = {401: "unauthorized", 403: "gated", 404: "missing", 429: "limited"}
TRIES = 3
"""How often a file is begun again without a further byte of it."""
MOST_WAIT_S = 20
ASK_TIMEOUT_S = 20
SAYING, GIVING_UP = threading.Lock(), threading.Lock()


def say(**told: Any) -> None:
    """One line for who started this."""
    with SAYING:
        print(json.dumps(told), flush=True)


def classify(error: BaseException) -> tuple[str, str, int]:
    """(kind of fault, in words, seconds that the hub asks to wait)."""
    while error.__cause__ is not None and getattr(error, "response", None) is None:
        error = error.__cause__
    response = getattr(error, "response", None)
    if response is not None:
        status, headers = int(response.status_code), response.headers
        code, message = headers.get("X-Error-Code") or "", headers.get("X-Error-Message") or ""
        told = f"HTTP status {status}" + (f" ({message or code})" if message or code else "")
        kind = "gated" if code == "GatedRepo" else STATUSES.get(status, "broken")
        waits = re.search(r"t=(\d+)", headers.get("RateLimit") or "") or re.match(
            r"(\d+)", headers.get("Retry-After") or ""
        )
        return kind, told, int(waits.group(1)) if waits and kind == "limited" else 0
    if isinstance(error, OSError) and error.errno in OF_THE_DISK:
        return "disk", os.strerror(error.errno), 0
    name = type(error).__name__
    if "Timeout" in name:
        return "silent", f"no answer in time ({name})", 0
    if name in ("ConnectError", "ConnectionError", "NewConnectionError", "gaierror", "SSLError"):
        return "offline", str(error)[:200] or name, 0
    return "cut", f"{name}: {str(error).splitlines()[0][:200] if str(error) else ''}".rstrip(": "), 0


class Fetcher:
    """Downloads files into a folder."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.orders = orders
        self.token = orders["token"] or False
        self.given_up = threading.Event()

    def fetch(self, name: str, size: int) -> bool:
        """Bring a file to its end, from what there is of it; False if it cannot be had, which is said."""
        path, tries = os.path.join(self.orders["folder"], name), 0  # noqa: PTH118
        while not self.given_up.is_set():
            have = os.path.getsize(path) if os.path.exists(path) else 0  # noqa: PTH110, PTH202
            if have == size and os.path.exists(path):  # noqa: PTH110
                say(file=name)
                return True
            try:
                if size > self.orders["plain_limit"]:
                    self.whole(name, path)
                else:
                    self.rest(name, path, have, size)
            except Exception as error:
                kind, told, wait_s = classify(error)
                grown = os.path.exists(path) and os.path.getsize(path) > have  # noqa: PTH110, PTH202
                tries = 0 if grown else tries + 1
                again = kind in ("cut", "silent", "offline", "broken") or (kind == "limited" and wait_s <= MOST_WAIT_S)
                if tries < TRIES and again:
                    time.sleep(wait_s or tries)
                    continue
                return self.give_up(name, kind, told, wait_s)
            if os.path.getsize(path) > size:  # noqa: PTH202
                os.truncate(path, size)
            tries += 1
            if tries > TRIES:
                return self.give_up(name, "cut", "fewer bytes than the hub says that it has", 0)
        return True

    def give_up(self, name: str, kind: str, told: str, wait_s: int) -> bool:
        """What is wrong with one file is wrong with all: one line tells it."""
        with GIVING_UP:
            if not self.given_up.is_set():
                self.given_up.set()
                say(file=name, fault=kind, found=told, wait_s=wait_s)
        return False

    def rest(self, name: str, path: str, have: int, size: int) -> None:
        """The rest of a file, over plain HTTP."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        orders = self.orders
        url = hf_hub_url(orders["repository"], name, revision=orders["commit"], endpoint=orders["endpoint"])
        where = get_hf_file_metadata(url, token=self.token, timeout=ASK_TIMEOUT_S).location
        headers = build_hf_headers(token=self.token)
        if urllib.parse.urlsplit(where).netloc not in ("", urllib.parse.urlsplit(url).netloc):
            headers.pop("authorization", None)
            headers.pop("Authorization", None)
        headers["Accept-Encoding"] = "identity"
        with open(path, "r+b" if have else "wb", buffering=0) as file:  # noqa: PTH123
            file.seek(have)
            http_get(urllib.parse.urljoin(url, where), file, resume_size=have, headers=headers, expected_size=size)
            os.fdatasync(file.fileno())

    def whole(self, name: str, path: str) -> None:
        """A file that the hub does not give over plain HTTP; it is begun again when it is interrupted."""
        from huggingface_hub import hf_hub_download

        orders, beside = self.orders, f"{path}.whole"
        source = {"revision": orders["commit"], "endpoint": orders["endpoint"], "token": self.token}
        shutil.rmtree(beside, ignore_errors=True)
        os.replace(hf_hub_download(orders["repository"], name, local_dir=beside, **source), path)  # noqa: PTH105
        shutil.rmtree(beside, ignore_errors=True)


def end_with_input() -> None:
    """Nobody waits for this any more."""
    while sys.stdin.buffer.read(1 << 16):
        pass
    os._exit(3)


def main() -> None:
    """Answer the orders."""
    os.umask(0o022)
    orders = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=end_with_input, daemon=True).start()
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        say(file="", fault="client", found=str(error), wait_s=0)
        say(end=True)
        os._exit(0)
    fetcher = Fetcher(orders)
    pool = concurrent.futures.ThreadPoolExecutor(orders["streams"])
    works = [pool.submit(fetcher.fetch, name, size) for name, size in orders["files"]]
    for done in concurrent.futures.as_completed(works):
        if not done.result():
            break  # what has arrived of the others lies there
    say(end=True)
    os._exit(0)


if __name__ == "__main__":
    main()
