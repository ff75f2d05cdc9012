"""What tests of the code location share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from dagster import DagsterInstance

from dagster_adjunct import Lake, open_lake
from tests.orchestration.dagster import small
from tests.orchestration.dagster.lab import SCHEMA, Lab, running_lab


@pytest.fixture(scope="session", autouse=True)
def migrations_are_read_once() -> Iterator[None]:
    """Each new instance stamps its databases, and would look for, and run, the sixty files of
    migrations for each.
    """
    read = ScriptDirectory.from_config
    known: dict[str | None, ScriptDirectory] = {}

    def read_once(config: Config) -> ScriptDirectory:
        place = config.get_main_option("script_location")
        if place not in known:
            known[place] = read(config)
        return known[place]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ScriptDirectory, "from_config", read_once)
        yield


@pytest.fixture
def instance() -> Iterator[DagsterInstance]:
    """An instance in memory."""
    with DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake with the streams of the small application, all empty."""
    lake = open_lake(tmp_path / "lake")
    small.create_streams(lake)
    return lake


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab with an empty stream of orders."""
    with running_lab(tmp_path) as lab:
        lab.streams.create("orders", schema=SCHEMA, key=["item"], partitions=1)
        yield lab
