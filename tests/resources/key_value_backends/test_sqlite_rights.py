"""Users who may read the SQLite file of key-value tables, and not write it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dagster_adjunct.resources.errors import TableAccessError
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager
from dagster_adjunct.resources.key_value.segment import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.serializers import TextSerializer
from dagster_adjunct.resources.key_value.table import BlockingKeyValueTable
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore

NOBODY = 65534
ONE = KeyValueTableConfiguration(1)


@contextmanager
def readable_folder() -> Iterator[Path]:
    """A folder that others may look into, as those of pytest are not."""
    folder = Path(tempfile.mkdtemp(prefix="adjunct-rights-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def path() -> Iterator[Path]:
    with readable_folder() as folder:
        yield folder / "values.sqlite"


@contextmanager
def only_reading(path: Path) -> Iterator[None]:
    """Be somebody who may not write the file; root may always."""
    is_root = os.geteuid() == 0
    path.chmod(0o444)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(0o644)


@pytest.mark.parametrize("ending", ["seal", "delete"])
def test_an_ending_of_a_table_whose_file_may_not_be_written_has_not_begun(
    path: Path, ending: str
) -> None:
    lake = lake_in(InMemoryStore())
    owner = KeyValueTableManager(lake, SqliteSegments(path))
    owner.create_scope("plant")
    owner.create("plant", "machines", ONE)
    with BlockingKeyValueTable(
        owner.open("plant", "machines", key=TextSerializer(), value=TextSerializer())
    ) as table:
        table.put("m1", "one")
        other = KeyValueTableManager(lake, SqliteSegments(path))
        with only_reading(path), pytest.raises(TableAccessError, match="readonly") as refused:
            getattr(other, ending)("plant", "machines")
        assert "Nothing was started" in refused.value.__notes__[0]
        assert owner.describe("plant", "machines").state == "active"
        assert owner.create("plant", "machines", ONE) is False
        assert table.get("m1") is not None
    assert getattr(owner, ending)("plant", "machines") is True
    with closing(sqlite3.connect(path)) as bare:
        assert (
            bare.execute("SELECT name FROM sqlite_master WHERE name LIKE '%rehearsed%'").fetchall()
            == []
        )
