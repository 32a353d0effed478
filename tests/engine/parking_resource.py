"""Resources that take as long as a file says, look for Ctrl-C meanwhile as our long operations do, and may fail."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pulumi.dynamic import CreateResult, DiffResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, say, told
from providers.cancel import check_cancel
from spark_core.errors import SparkError

BAD = "13"
"""The value that no resource can be made with."""


class ParkingProvider(SparkProvider):
    """Files in its folder say what it does: ``seconds``, ``deaf``, ``fail``; its mark is in a file of its name."""

    replaces = False

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        self._pass(props)
        return CreateResult(str(props["name"]), dict(props))

    @told
    def update(self, _id: str, _olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        self._pass(news)
        return UpdateResult(dict(news))

    @told
    def diff(self, _id: str, _olds: Mapping[str, Any], _news: Mapping[str, Any]) -> DiffResult:
        changes = _olds["mark"] != _news["mark"]
        replaces = ["mark"] if changes and self.replaces else []
        return DiffResult(changes=changes, replaces=replaces, stables=[], delete_before_replace=True)

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        file = _file(props)
        live = {**props, "mark": file.read_text() if file.is_file() else "gone"}
        return ReadResult(id_, live, live)

    @told
    def delete(self, _id: str, props: Mapping[str, Any]) -> None:
        _file(props).unlink(missing_ok=True)

    def _pass(self, props: Mapping[str, Any]) -> None:
        folder = Path(props["folder"])
        (folder / "begun").touch()
        seconds = folder / "seconds"
        end = time.monotonic() + float(seconds.read_text() if seconds.is_file() else 0)
        while time.monotonic() < end:
            if not (folder / "deaf").exists():
                check_cancel("what was made stays")
            time.sleep(0.05)
        leak = folder / "leak"
        told = leak.read_text().splitlines() if leak.is_file() else []
        for line in told:
            say(line)
        if (folder / "fail").exists() or props["mark"] == BAD:
            raise SparkError("expected to be made, found that it cannot be", do="give it another mark", evidence=told)
        say(f"{props['name']}: it is made now")
        _file(props).write_text(str(props["mark"]))


class RestartingProvider(ParkingProvider):
    """The same, replaced by every change."""

    replaces = True


def _file(props: Mapping[str, Any]) -> Path:
    return Path(props["folder"]) / f"made-{props['name']}"


class Parking(Resource, module="test", name="Parking"):
    """A resource that changes in place."""

    def __init__(self, resource_name: str, *, folder: str, mark: str, opts: Any = None) -> None:
        props = {"folder": folder, "mark": mark, "name": resource_name}
        super().__init__(ParkingProvider(), resource_name, props, opts)


class Restarting(Resource, module="test", name="Restarting"):
    """A resource that stands for a rank's container."""

    def __init__(self, resource_name: str, *, folder: str, mark: str, opts: Any = None) -> None:
        props = {"folder": folder, "mark": mark, "name": resource_name}
        super().__init__(RestartingProvider(), resource_name, props, opts)
