"""A resource that takes as long as a file says, looks for Ctrl-C meanwhile as our long operations do, and may fail."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pulumi.dynamic import CreateResult, DiffResult, ReadResult, Resource, ResourceProvider, UpdateResult

from providers.cancel import check_cancel, listen
from spark_core.errors import SparkError


class ParkingProvider(ResourceProvider):
    """Its folder says what it does: ``seconds``, ``fail``, ``deaf``; it keeps its mark in ``made``."""

    def configure(self, req: Any) -> None:
        listen()

    def create(self, props: Mapping[str, Any]) -> CreateResult:
        self._pass(Path(props["folder"]))
        return CreateResult("parking", dict(props))

    def update(self, _id: str, _olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        self._pass(Path(news["folder"]))
        return UpdateResult(dict(news))

    def diff(self, _id: str, olds: Mapping[str, Any], news: Mapping[str, Any]) -> DiffResult:
        return DiffResult(changes=olds["mark"] != news["mark"], replaces=[], stables=[])

    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        file = Path(props["folder"]) / "made"
        live = {**props, "mark": file.read_text() if file.is_file() else "gone"}
        return ReadResult(id_, live, live)

    def delete(self, _id: str, props: Mapping[str, Any]) -> None:
        (Path(props["folder"]) / "made").unlink(missing_ok=True)

    def _pass(self, folder: Path) -> None:
        (folder / "begun").touch()
        seconds = folder / "seconds"
        end = time.monotonic() + float(seconds.read_text() if seconds.is_file() else 0)
        while time.monotonic() < end:
            if not (folder / "deaf").exists():
                check_cancel("what was made stays")
            time.sleep(0.05)
        if (folder / "fail").exists():
            raise SparkError("expected to be made, found the file `fail`", do="remove it")
        (folder / "made").write_text("as wanted")


class Parking(Resource, module="test", name="Parking"):
    """One such resource."""

    def __init__(self, resource_name: str, *, folder: str, opts: Any = None) -> None:
        super().__init__(ParkingProvider(), resource_name, {"folder": folder, "mark": "as wanted"}, opts)
