"""The engine's side of a dynamic provider: the SDK's own servicer in its own process, spoken to over gRPC.

The servicer is started as Pulumi starts it, with the project folder as its working folder. Properties are
what the engine keeps: no value that is None, numbers as floats, ``__provider`` beside them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from google.protobuf import json_format, struct_pb2
from pulumi.dynamic import ResourceProvider
from pulumi.dynamic.dynamic import serialize_provider
from pulumi.runtime.proto import provider_pb2, provider_pb2_grpc

PROJECT = Path(__file__).resolve().parents[2]
UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
"""What stands in preview for a value that only ``up`` will know."""
TIMEOUT_S = 120


class ProviderError(Exception):
    """What a person reads when a provider's method fails."""


class Servicer:
    """A process with the SDK's servicer.

    Args:
        config: Key of a stack file to its value, secrets included, as the engine hands it to ``Configure``.
        programs: Folder that comes first on its ``PATH``.
        home: Its home folder.
        words: What Python runs to start it.
    """

    def __init__(
        self, config: Mapping[str, Any], programs: Path, home: Path, words: Sequence[str] = ("-m", "pulumi.dynamic")
    ) -> None:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PULUMI_", "PYTHON"))},
            "PULUMI_PROJECT": "spark-vllm",
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home),
        }
        self._log = (home / "servicer.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-u", *words],
            cwd=PROJECT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        if self._process.stdout is None:
            raise AssertionError("a process without standard output")
        port = int(self._process.stdout.readline())
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._stub = provider_pb2_grpc.ResourceProviderStub(self._channel)
        texts = {
            f"spark-vllm:{key}": value if isinstance(value, str) else json.dumps(value) for key, value in config.items()
        }
        self._stub.Configure(provider_pb2.ConfigureRequest(args=_struct(texts)), timeout=TIMEOUT_S)

    def __enter__(self) -> Servicer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    @property
    def pid(self) -> int:
        """The process that was started, which leads a session."""
        return self._process.pid

    def kill(self) -> None:
        """End it and everything that it started, as a killed ``pulumi up`` does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=TIMEOUT_S)

    def said(self) -> str:
        """End it; everything that it has printed for the person."""
        self.kill()
        return self._process.stdout.read() if self._process.stdout is not None else ""

    def call(self, method: str, request: Any) -> Any:
        """One call; what it tells the person when it fails is the exception's text."""
        try:
            return getattr(self._stub, method)(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise ProviderError(error.details()) from None

    def start(self, method: str, request: Any) -> Any:
        """Begin a call and do not wait for it."""
        return getattr(self._stub, method).future(request, timeout=TIMEOUT_S)


class Managed:
    """One resource as the engine keeps it.

    Attributes:
        id: None while it is not in state.
        inputs: Inputs of the last step.
        outputs: Outputs of the last step.
    """

    def __init__(self, servicer: Servicer, provider: ResourceProvider) -> None:
        self.servicer = servicer
        self.provider = serialize_provider(provider)
        self.id: str | None = None
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}

    def check(self, props: Mapping[str, Any]) -> dict[str, Any]:
        answer = self.servicer.call(
            "Check", provider_pb2.CheckRequest(olds=self._props(self.inputs), news=self._props(props))
        )
        if answer.failures:
            raise ProviderError("; ".join(failure.reason for failure in answer.failures))
        return _plain(answer.inputs)

    def diff(self, news: Mapping[str, Any]) -> tuple[bool, list[str]]:
        """(whether anything changes, inputs that replace)."""
        answer = self.servicer.call(
            "Diff",
            provider_pb2.DiffRequest(id=self._known_id, olds=self._props(self.outputs), news=self._props(news)),
        )
        return answer.changes == provider_pb2.DiffResponse.DIFF_SOME, list(answer.replaces)

    def create(self, props: Mapping[str, Any]) -> None:
        inputs = self.check(props)
        answer = self.servicer.call("Create", provider_pb2.CreateRequest(properties=self._props(inputs)))
        self.id, self.inputs, self.outputs = answer.id, inputs, _plain(answer.properties)

    def up(self, props: Mapping[str, Any]) -> str:
        """What ``pulumi up`` does with it: ``same``, ``update``, or ``replace`` (not gone on with)."""
        inputs = self.check(props)
        changes, replaces = self.diff(inputs)
        if replaces:
            return "replace"
        if not changes:
            self.inputs = inputs
            return "same"
        answer = self.servicer.call(
            "Update",
            provider_pb2.UpdateRequest(id=self._known_id, olds=self._props(self.outputs), news=self._props(inputs)),
        )
        self.inputs, self.outputs = inputs, _plain(answer.properties)
        return "update"

    def refresh(self) -> bool:
        """Read it; False if the node says that it is gone."""
        answer = self.servicer.call(
            "Read",
            provider_pb2.ReadRequest(
                id=self._known_id, properties=self._props(self.outputs), inputs=self._props(self.inputs)
            ),
        )
        if not answer.id:
            self.id = None
            return False
        self.outputs = _plain(answer.properties)
        if answer.HasField("inputs"):
            self.inputs = _plain(answer.inputs)
        return True

    def delete(self) -> None:
        """Delete it; it may be asked again, as after a run that was killed in between."""
        self.servicer.call(
            "Delete", provider_pb2.DeleteRequest(id=self._known_id, properties=self._props(self.outputs))
        )

    @property
    def _known_id(self) -> str:
        if self.id is None:
            raise AssertionError("not in state")
        return self.id

    def create_request(self, props: Mapping[str, Any]) -> Any:
        return provider_pb2.CreateRequest(properties=self._props(props))

    def _props(self, props: Mapping[str, Any]) -> struct_pb2.Struct:
        return _struct({**props, "__provider": self.provider})


def _struct(value: Mapping[str, Any]) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    struct.update(_without_none(value))
    return struct


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(struct: struct_pb2.Struct) -> dict[str, Any]:
    value: dict[str, Any] = json_format.MessageToDict(struct)
    value.pop("__provider", None)
    return value
