"""How an image comes onto the first node: pulled by its own daemon, or built there."""

from __future__ import annotations

import io
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

from spark_core.errors import CommandError, SettingsError, SparkError
from spark_core.settings.image import BuildSettings
from spark_core.transport.base import Command, Result, Transport, script, tail_lines

PULL_TIMEOUT_S = 4 * 3600
BUILD_TIMEOUT_S = 8 * 3600
BUILD_REPOSITORY = "spark-vllm/build"
_SAY_EVERY_S = 15.0
_TICK_S = 0.25
_CHUNK = 1 << 20
_LEFT_OUT = (".git", "__pycache__")

# Its standard input stays open as long as we want it: when it ends, so does the program.
_WATCHED = """
exec 3<&0
"$@" </dev/null & pid=$!
( while read -r _ <&3; do :; done; kill "$pid" 2>/dev/null ) & watch=$!
exec 3<&-
status=0; wait "$pid" || status=$?
kill "$watch" 2>/dev/null || true
exit "$status"
"""
_BUILD = """
umask 077; mkdir -p "$1/cache"; context="$1/cache/build-$$.tar"; trap 'rm -f "$context"' EXIT
head -c "$2" > "$context"; [ "$(stat -c %s "$context")" = "$2" ] || { echo "the context was cut" >&2; exit 5; }
shift 2
exec 3<&0
"$@" <"$context" & pid=$!
( while read -r _ <&3; do :; done; kill "$pid" 2>/dev/null ) & watch=$!
exec 3<&-
status=0; wait "$pid" || status=$?
kill "$watch" 2>/dev/null || true
exit "$status"
"""


def pull_image(transport: Transport, reference: str, report: Callable[[str], None], check: Callable[[], None]) -> None:
    """Let a node's own daemon pull an image, with the credentials that it has.

    Raises:
        CommandError: it could not.
    """
    cmd = script(_WATCHED, "docker", "pull", "--quiet", reference, timeout_s=PULL_TIMEOUT_S)
    result = _run_long(transport, cmd, (), f"image: {transport.node} pulls {reference}", report, check)
    if not result.ok:
        tail = tail_lines(result.stderr)
        raise CommandError(
            f"expected the daemon to pull {reference}, found: {tail[-1].strip() if tail else result.status}",
            where=f"{transport.node} (image.registry)",
            do="see that the node reaches the registry and has its credentials (`docker login` on that node)",
            evidence=tail,
        )


class BuildContext:
    """The Dockerfile and what it may copy, as one tar that is the same wherever the checkout lies.

    Args:
        build: The settings.
        project: The project folder.

    Raises:
        SettingsError: the folder or the Dockerfile is not there.
    """

    def __init__(self, build: BuildSettings, project: Path) -> None:
        self.build, folder = build, project / build.context
        problems = []
        if not folder.is_dir():
            problems.append(f"image.build.context: found no folder {build.context} in the project folder")
        elif not (folder / build.dockerfile).is_file():
            problems.append(f"image.build.dockerfile: found no file {build.dockerfile} in {build.context}")
        if problems:
            raise SettingsError(problems)
        self.paths = [
            path
            for path in sorted(folder.rglob("*"))
            if not set(_LEFT_OUT) & set(path.relative_to(folder).parts) and (path.is_symlink() or path.is_file())
        ]
        self.folder = folder

    @property
    def tag(self) -> str:
        """Name under which the image of exactly this context and these arguments is found on a node."""
        digest = sha256(repr((self.build.dockerfile, self.build.target, sorted(self.build.arguments.items()))).encode())
        for path in self.paths:
            digest.update(f"\0{path.relative_to(self.folder)}\0{self._mode(path):o}\0".encode())
            if path.is_symlink():
                digest.update(str(path.readlink()).encode())
            else:
                with path.open("rb") as file:
                    digest.update(_digest(file))
        return f"{BUILD_REPOSITORY}:{digest.hexdigest()[:16]}"

    def tar(self) -> bytes:
        """The context. Dates and owners are left out, so that layers are cached by content alone."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in self.paths:
                member = tar.gettarinfo(path, str(path.relative_to(self.folder)))
                member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
                member.mode = self._mode(path)
                if path.is_symlink():
                    tar.addfile(member)
                else:
                    with path.open("rb") as file:
                        tar.addfile(member, file)
        return out.getvalue()

    @staticmethod
    def _mode(path: Path) -> int:
        return 0o755 if path.lstat().st_mode & 0o100 else 0o644


def build_image(
    transport: Transport,
    root: str,
    context: BuildContext,
    report: Callable[[str], None],
    check: Callable[[], None],
) -> None:
    """Build an image on a node; its base images are that node's, or pulled by its daemon.

    Raises:
        CommandError: it could not be built.
    """
    build, tar = context.build, context.tar()
    words = ["docker", "build", "--quiet", "--tag", context.tag, "--file", build.dockerfile]
    words += ["--target", build.target] if build.target else []
    for name, value in sorted(build.arguments.items()):
        words += ["--build-arg", f"{name}={value}"]
    cmd = script(_BUILD, root, str(len(tar)), *words, "-", timeout_s=BUILD_TIMEOUT_S)
    chunks = [tar[start : start + _CHUNK] for start in range(0, len(tar), _CHUNK)]
    result = _run_long(transport, cmd, chunks, f"image: {transport.node} builds {build.context}", report, check)
    if not result.ok:
        tail = tail_lines(f"{result.stdout}\n{result.stderr}", 20)
        raise CommandError(
            f"expected {build.context}/{build.dockerfile} to build, found: "
            f"{tail[-1].strip() if tail else f'exit status {result.status}'}",
            where=f"{transport.node} (image.build)",
            do="correct the Dockerfile, or see that the node reaches what it downloads; steps that are done are kept",
            evidence=tail,
        )


def _run_long(
    transport: Transport,
    cmd: Command,
    first: list[bytes] | tuple[()],
    told: str,
    report: Callable[[str], None],
    check: Callable[[], None],
) -> Result:
    """Run what takes minutes: told now and then, and ended within seconds when ``check`` raises."""
    ended, stop = threading.Event(), threading.Event()
    found: list[Result] = []
    failed: list[BaseException] = []

    def input_of() -> Iterator[bytes]:
        yield from first
        while not stop.is_set() and not ended.is_set():
            yield b"\n"  # so that we notice when the program has ended
            stop.wait(_TICK_S)

    def work() -> None:
        try:
            found.append(transport.stream(cmd, input_of()))
        except BaseException as error:
            failed.append(error)
        ended.set()

    report(told)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    start = said = time.monotonic()
    try:
        while not ended.wait(_TICK_S):
            check()
            if time.monotonic() - said >= _SAY_EVERY_S:
                said = time.monotonic()
                report(f"{told}, for {said - start:.0f} s so far")
    finally:
        stop.set()
    thread.join()
    for error in failed:
        raise error
    if not found:
        raise SparkError("expected an end of the program, found none", where=transport.node)
    return found[0]


def _digest(file: io.BufferedReader) -> bytes:
    digest = sha256()
    while block := file.read(_CHUNK):
        digest.update(block)
    return digest.digest()
