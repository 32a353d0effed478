"""What all providers share: configuration, comparison, and errors told in one line."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from pulumi.dynamic import CheckResult, ConfigureRequest, DiffResult, ResourceProvider

from providers.cancel import check_cancel, in_hand, listen
from providers.connections import Run, raw_configuration, run_of
from spark_core.errors import SparkError, join_errors
from spark_core.journal import StackFolder

P = ParamSpec("P")
R = TypeVar("R")


class _Told(Exception):
    """An error as the person reads it; the servicer prints it as a trace prints it: name, colon, text."""


_Told.__module__ = "builtins"  # the trace then leaves the module out
_Told.__qualname__ = "spark-vllm"


_WAITS_FOR_BOOT = ("create", "update")
"""Only ``up`` waits for a node that may be booting; reading and deleting say at once that it does not answer."""


def _while_waiting() -> None:
    check_cancel("the node was not reached")


def told(method: Callable[P, R]) -> Callable[P, R]:
    """Turn what a person can cause into one clear text without a traceback; a fault of ours keeps its trace."""

    @functools.wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        # The servicer sends format_exc(); with this limit that is the exception's own text (seen, Python 3.11 to 3.13).
        sys.tracebacklimit = 0
        try:
            if method.__name__ in _WAITS_FOR_BOOT and args and isinstance(args[0], SparkProvider):
                args[0].run.wait_for_boot(say, _while_waiting)
            with in_hand():
                return method(*args, **kwargs)
        except SparkError as error:
            raise _Told(error.render()) from None
        except Exception as error:
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-6))
            raise _Told(f"a fault of spark-vllm itself: {type(error).__name__}: {error}\n{trace}") from None

    return wrapper


class SparkProvider(ResourceProvider):
    """Base of our providers: reads the run in ``configure``, compares declared properties in ``diff``.

    Attributes:
        compared: Names of the inputs whose change is an update.
        replaced_by: Names of the inputs whose change is a replacement.
    """

    compared: tuple[str, ...] = ()
    replaced_by: tuple[str, ...] = ()
    _run: Run | None = None

    @told
    def configure(self, req: ConfigureRequest) -> None:
        listen()
        self._run = run_of(raw_configuration(req.config.get))

    @property
    def run(self) -> Run:
        if self._run is None:
            raise SparkError("expected the stack's configuration, found none: the provider was never configured")
        return self._run

    def abandoned(self, node: str) -> bool:
        """Whether the settings give a node up: it is never contacted again, and what is on it is forgotten."""
        return node in self.run.settings.abandoned_nodes

    @told
    def check(self, _olds: Mapping[str, Any], news: Mapping[str, Any]) -> CheckResult:
        """Everything was validated with the settings already; unknown values pass through."""
        return CheckResult(dict(news), [])

    @told
    def diff(self, _id: str, _olds: Mapping[str, Any], _news: Mapping[str, Any]) -> DiffResult:
        differs = [
            key for key in (*self.compared, *self.replaced_by) if canonical(_olds.get(key)) != canonical(_news.get(key))
        ]
        replaces = [key for key in differs if key in self.replaced_by]
        return DiffResult(changes=bool(differs), replaces=replaces, stables=[], delete_before_replace=True)


def canonical(value: Any) -> Any:
    """A value in the form in which two of them can be compared: engine numbers are floats, maps have no order."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in sorted(value.items())}
    if isinstance(value, Sequence):
        return [canonical(item) for item in value]
    return value


def inputs_of(props: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The named inputs among a resource's properties."""
    return {name: props[name] for name in names if name in props}


def folder_of(props: Mapping[str, Any]) -> StackFolder:
    """The stack's folder on the node of a resource."""
    return StackFolder(str(props["root"]), str(props["stack"]))


def each_node(nodes: Sequence[str], work: Callable[[str], R]) -> dict[str, R]:
    """Do the same work for all nodes at once; every node's error is told."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(nodes))) as pool:
        futures = {node: pool.submit(work, node) for node in nodes}
    errors = [error for future in futures.values() if isinstance(error := future.exception(), SparkError)]
    if errors:
        raise join_errors(errors)
    return {node: future.result() for node, future in futures.items()}


def report(text: str) -> None:
    """One line of progress of an operation that can be interrupted at this point."""
    check_cancel("what has arrived whole is kept")
    say(text)


def say(text: str) -> None:
    """One line for the person while a long operation goes on; the engine shows a dynamic provider's output.

    Where the engine is gone nobody reads it, which is no reason to leave the operation half done.
    """
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)
