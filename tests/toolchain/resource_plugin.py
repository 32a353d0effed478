"""A resource plugin as its engine sees it: a process that speaks gRPC."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf import empty_pb2, json_format, struct_pb2
from pulumi.runtime.proto import engine_pb2, engine_pb2_grpc, provider_pb2, provider_pb2_grpc

START_LIMIT_S = 20
CALL_LIMIT_S = 60
SIGNATURE = "4dabf18193072939515e22adb298388d"
SECRET = "1b47061264138c4ac30d75fd1eb44270"
ASSET = "c44067f5952c0a294b673a41bacd8c17"
ARCHIVE = "0def7320c3a5731c473e5ecbe6d01bc7"
DIFF = provider_pb2.DiffResponse
Properties = dict[str, Any]


def secret(value: Any) -> Properties:
    """A value as the engine passes a secret."""
    return {SIGNATURE: SECRET, "value": value}


def is_secret(value: Any) -> bool:
    """Whether a value is marked secret as a whole."""
    return isinstance(value, dict) and value.get(SIGNATURE) == SECRET


def plain(value: Any) -> Any:
    """The same without any secret marks."""
    if is_secret(value):
        return plain(value["value"])
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list) else value


def to_struct(values: Mapping[str, Any]) -> struct_pb2.Struct:
    """Python values as the engine sends them."""
    return json_format.ParseDict(dict(values), struct_pb2.Struct())


def from_struct(values: Any) -> Properties:
    """What the engine would keep."""
    found: Properties = json_format.MessageToDict(values)
    return found


def urn(token: str) -> str:
    """The name of the one resource of a type that a test has."""
    return f"urn:pulumi:dev::test::{token}::it"


def find_plugin(name: str) -> Path:
    """The plugin that SPARK_VLLM_<NAME>_PLUGIN names, or the one on PATH; without one the test is skipped."""
    chosen = os.environ.get(f"SPARK_VLLM_{name.upper()}_PLUGIN") or shutil.which(f"pulumi-resource-{name}")
    if chosen is None:
        pytest.skip(f"no pulumi-resource-{name} on PATH: `make bootstrap`, then `. ./env`")
    return Path(chosen)


class Checked(NamedTuple):
    """An answer to Check."""

    inputs: Properties
    failures: dict[str, str]


class Diffed(NamedTuple):
    """An answer to Diff."""

    changed: bool
    replaces: bool
    keys: set[str]


class Engine(engine_pb2_grpc.EngineServicer):
    """The side of the engine that plugins log to."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def Log(self, request: Any, context: Any) -> Any:
        """Keep what is logged."""
        self.lines.append((engine_pb2.LogSeverity.Name(request.severity), request.message))
        return empty_pb2.Empty()

    def GetRootResource(self, request: Any, context: Any) -> Any:
        """There is no stack."""
        return engine_pb2.GetRootResourceResponse(urn="")


class Plugin:
    """A running plugin, configured to keep secrets apart."""

    def __init__(self, channel: grpc.Channel, engine: Engine) -> None:
        self._stub = provider_pb2_grpc.ResourceProviderStub(channel)
        self.engine = engine

    def configure(self, arguments: Mapping[str, Any]) -> None:
        """As the engine does before anything else."""
        request = provider_pb2.ConfigureRequest(args=to_struct(arguments), acceptSecrets=True, acceptResources=True)
        self._stub.Configure(request, timeout=CALL_LIMIT_S)

    def check_config(self, arguments: Mapping[str, Any]) -> Checked:
        """Check the provider's own arguments."""
        provider = "urn:pulumi:dev::test::pulumi:providers:test::provider"
        request = provider_pb2.CheckRequest(urn=provider, olds=to_struct({}), news=to_struct(arguments))
        answer = self._stub.CheckConfig(request, timeout=CALL_LIMIT_S)
        return Checked(from_struct(answer.inputs), {f.property: f.reason for f in answer.failures})

    def check(self, token: str, news: Properties, olds: Properties | None = None) -> Checked:
        """Check a resource's inputs."""
        request = provider_pb2.CheckRequest(
            urn=urn(token),
            name="it",
            type=token,
            olds=to_struct(olds or {}),
            news=to_struct(news),
            randomSeed=b"0" * 32,
        )
        answer = self._stub.Check(request, timeout=CALL_LIMIT_S)
        return Checked(from_struct(answer.inputs), {f.property: f.reason for f in answer.failures})

    def diff(self, token: str, id_: str, state: Properties, old: Properties, new: Properties) -> Diffed:
        """Compare state and old inputs with new inputs."""
        request = provider_pb2.DiffRequest(
            urn=urn(token),
            name="it",
            type=token,
            id=id_,
            olds=to_struct(state),
            old_inputs=to_struct(old),
            news=to_struct(new),
        )
        answer = self._stub.Diff(request, timeout=CALL_LIMIT_S)
        keys = {*answer.diffs, *answer.detailedDiff, *answer.replaces}
        kinds = {detail.kind for detail in answer.detailedDiff.values()}
        replacing = {
            provider_pb2.PropertyDiff.ADD_REPLACE,
            provider_pb2.PropertyDiff.DELETE_REPLACE,
            provider_pb2.PropertyDiff.UPDATE_REPLACE,
        }
        return Diffed(answer.changes == DIFF.DIFF_SOME, bool(answer.replaces) or bool(kinds & replacing), keys)

    def create(self, token: str, inputs: Properties, *, preview: bool = False) -> tuple[str, Properties]:
        """Create; returns the id and the state."""
        request = provider_pb2.CreateRequest(
            urn=urn(token), name="it", type=token, properties=to_struct(inputs), preview=preview, timeout=30
        )
        answer = self._stub.Create(request, timeout=CALL_LIMIT_S)
        return answer.id, from_struct(answer.properties)

    def update(
        self,
        token: str,
        id_: str,
        state: Properties,
        old: Properties,
        new: Properties,
        *,
        preview: bool = False,
    ) -> Properties:
        """Update; returns the new state."""
        request = provider_pb2.UpdateRequest(
            urn=urn(token),
            name="it",
            type=token,
            id=id_,
            olds=to_struct(state),
            old_inputs=to_struct(old),
            news=to_struct(new),
            preview=preview,
        )
        return from_struct(self._stub.Update(request, timeout=CALL_LIMIT_S).properties)

    def read(self, token: str, id_: str, state: Properties, inputs: Properties) -> Properties:
        """Read; returns the state found."""
        request = provider_pb2.ReadRequest(
            urn=urn(token),
            name="it",
            type=token,
            id=id_,
            properties=to_struct(state),
            inputs=to_struct(inputs),
        )
        return from_struct(self._stub.Read(request, timeout=CALL_LIMIT_S).properties)

    def delete(self, token: str, id_: str, state: Properties) -> None:
        """Delete."""
        request = provider_pb2.DeleteRequest(urn=urn(token), name="it", type=token, id=id_, properties=to_struct(state))
        self._stub.Delete(request, timeout=CALL_LIMIT_S)


@contextmanager
def running(binary: Path, environ: Mapping[str, str] | None = None) -> Iterator[Plugin]:
    """A plugin process with an engine to log to; both are gone afterwards."""
    engine = Engine()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    process = subprocess.Popen(
        [str(binary), f"127.0.0.1:{port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=dict(os.environ if environ is None else environ),
    )
    deadline = threading.Timer(START_LIMIT_S, process.kill)
    deadline.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        deadline.cancel()
        assert line.isdigit(), f"{binary} ended without telling its port"
        with grpc.insecure_channel(f"127.0.0.1:{line}") as channel:
            plugin = Plugin(channel, engine)
            yield plugin
    finally:
        deadline.cancel()
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()
        server.stop(None).wait(5)
