"""What tests of the code location share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from alembic.util import pyfiles
from dagster import DagsterInstance


@pytest.fixture(scope="session", autouse=True)
def migrations_are_loaded_once() -> Iterator[None]:
    """Each new instance stamps its databases, and would run the sixty files of Dagster's migrations three times."""
    load = pyfiles.load_module_py
    kept = cache(load)

    def load_once(module_id: str, path: str | os.PathLike[str]) -> ModuleType:
        return load(module_id, path) if Path(path).name == "env.py" else kept(module_id, path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pyfiles, "load_module_py", load_once)
        yield


@pytest.fixture
def instance() -> Iterator[DagsterInstance]:
    """An instance in memory."""
    with DagsterInstance.ephemeral() as instance:
        yield instance
