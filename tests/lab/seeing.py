"""What tests look with: a real browser for pages, a real Prometheus for metrics. Unpacked, never installed."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
FETCH = PROJECT / "toolchain" / "seeing.sh"

# Asked in the browser itself: how wide the page is, its colours, and the least contrast between a text and what is
# behind it (WCAG 2, relative luminance).
_LOOK = """
<script>
function rgb(text) { return (text.match(/[0-9.]+/g) || []).map(Number); }
function light(c) {
  const part = c.slice(0, 3).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
}
function behind(node) {
  for (let at = node; at; at = at.parentElement) {
    const style = getComputedStyle(at);
    if (at.tagName === 'g') continue;
    const found = rgb(style.backgroundColor);
    if (found.length === 3 || found[3] === 1) return found;
  }
  return [255, 255, 255];
}
const worst = {ratio: 99, text: ''};
for (const node of document.querySelectorAll('body *')) {
  const own = [...node.childNodes].some(c => c.nodeType === 3 && c.data.trim());
  if (!own || !node.getClientRects().length || node.closest('desc,title')) continue;
  const style = getComputedStyle(node);
  const a = light(rgb(node.closest('svg') ? style.fill : style.color)), b = light(behind(node));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < worst.ratio) { worst.ratio = ratio; worst.text = node.textContent.slice(0, 60); }
}
const pictures = [...document.querySelectorAll('svg')].filter(s => s.getClientRects().length);
document.title = JSON.stringify({
  wide: document.documentElement.scrollWidth, window: innerWidth, worst: worst,
  background: rgb(getComputedStyle(document.body).backgroundColor),
  pictures: pictures.map(s => [s.getBoundingClientRect().width, s.getBoundingClientRect().height]),
  small: Math.min(...pictures.flatMap(s => [...s.querySelectorAll('text')].map(t => t.getBoundingClientRect().height))),
  asked: performance.getEntriesByType('resource').map(e => e.name),
});
</script>
"""
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


def program(name: str) -> str:
    """Path of a program that is looked with; Debian's is unpacked into the cache where none is installed."""
    done = subprocess.run([FETCH, name], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@dataclass(frozen=True)
class Look:
    """What the browser says of a page.

    Attributes:
        dom: The page as the browser has it.
        seen: Its width, colours, least contrast, sizes of its pictures, and what it asked for.
        picture: The screenshot.
    """

    dom: str
    seen: dict[str, Any]
    picture: Path


def look(page: Path, folder: Path, name: str, *, width: int = 1100, dark: bool = False) -> Look:
    """Open a page in the browser: once as it is for a screenshot, once with a script of ours that measures it."""
    measured = folder / f"{name}-measured.html"
    text = page.read_text()
    assert _POLICY.search(text), "the page has no content policy"
    measured.write_text(_POLICY.sub("", text).replace("</body>", f"{_LOOK}</body>"))
    picture = folder / f"{name}.png"
    _browse(page, f"--screenshot={picture}", width, dark)
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000
    dom = _browse(measured, "--dump-dom", width, dark)
    title = re.search(r"<title>(\{.*?\})</title>", dom, re.DOTALL)
    assert title is not None, dom[:2000]
    plain = title.group(1).replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
    return Look(_browse(page, "--dump-dom", width, dark), json.loads(plain), picture)


def _browse(page: Path, what: str, width: int, dark: bool) -> str:
    words = [program("chromium"), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    words += ["--hide-scrollbars", f"--window-size={width},2400", "--host-resolver-rules=MAP * ~NOTFOUND"]
    words += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", what, f"file://{page}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(words: list[str], log: Path, port: int) -> Iterator[None]:
    """A server while this lasts; it must listen soon."""
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file)
    try:
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(30)


def ask_prometheus(base: str, query: str) -> list[dict[str, Any]]:
    """The series that a query gives now; an error is a failure."""
    url = f"{base}/api/v1/query?{urllib.parse.urlencode({'query': of_grafana(query)})}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=30) as response:
            return series_of(response.read().decode(), query)
    except urllib.error.HTTPError as error:
        assert error.code == 503, (query, error.read())  # it is still starting
        return []


def series_of(answer: str, query: str) -> list[dict[str, Any]]:
    """The series in an answer of Prometheus."""
    value = json.loads(answer)
    assert value["status"] == "success", (query, value)
    found: list[dict[str, Any]] = value["data"]["result"]
    return found


def of_grafana(query: str) -> str:
    """A query of the dashboard as Grafana would send it."""
    return query.replace("$__rate_interval", "1m")
