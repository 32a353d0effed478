"""Fixtures of the runtime tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import spark_runtime
from tests.unit.runtime.runtime_group import SCENARIO, Group, Outcomes, Scenario

SIDE_BY_SIDE = 6


@pytest.fixture(scope="session")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder as it is mounted into a container."""
    folder = tmp_path_factory.mktemp("mount")
    source = Path(spark_runtime.__file__).parent
    shutil.copytree(source, folder / "spark_runtime", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(source / "entry" / "__main__.py", folder / "__main__.py")
    return folder


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, mount: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outcomes]:
    """The selected scenarios, under way a few at a time. Each leaves no process behind."""

    def run(function: Scenario) -> None:
        group = Group(tmp_path_factory.mktemp("group"), mount)
        try:
            function(group)
        finally:
            group.close()

    functions = [getattr(item, "function", None) for item in request.session.items]
    scenarios = [getattr(function, SCENARIO) for function in functions if hasattr(function, SCENARIO)]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {function.__name__: pool.submit(run, function) for function in scenarios}
        pool.shutdown(cancel_futures=True)
