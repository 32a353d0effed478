"""Whose packages are imported, and where Pulumi must be started."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_core.errors import SparkError
from spark_core.project import require_own_packages

PROJECT = Path(__file__).resolve().parents[2]


def test_in_the_project_folder_everything_is_ours() -> None:
    refused: list[SparkError] = []
    try:
        require_own_packages(PROJECT, PROJECT, safe_path=False)
    except SparkError as error:
        refused.append(error)
    assert refused == []


def test_a_package_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SparkError) as refused:
        require_own_packages(tmp_path, tmp_path, safe_path=False)
    assert str(refused.value).startswith(f"expected the package components of {tmp_path}, found {PROJECT}/components")


def test_a_safe_path_is_refused_since_the_provider_process_would_not_find_us() -> None:
    with pytest.raises(SparkError) as refused:
        require_own_packages(PROJECT, PROJECT, safe_path=True)
    assert "PYTHONSAFEPATH" in str(refused.value)


@pytest.mark.parametrize("with_providers", [False, True])
def test_another_working_folder_is_refused_in_one_line(with_providers: bool, tmp_path: Path) -> None:
    if with_providers:
        (tmp_path / "providers").mkdir()
        (tmp_path / "providers" / "__init__.py").touch()
    with pytest.raises(SparkError) as refused:
        require_own_packages(PROJECT, tmp_path, safe_path=False)
    assert str(refused.value).startswith(f"expected Pulumi to run in {PROJECT}, found {tmp_path}")
    assert "\n" not in str(refused.value)
