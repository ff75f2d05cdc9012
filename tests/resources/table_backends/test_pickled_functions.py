"""A user's subclass of a store's function arrives on executors as itself, with what it was given
besides.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from dagster_adjunct.assets.reading.dataset import DatasetTable
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.redis import RedisTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable


class OfATenant:
    """Made of other arguments than the function beneath, and with a `to_dict` of its own."""

    def __init__(self, tenant: str, **where: Any) -> None:
        super().__init__(key="parcel", columns={"parcel": "string"}, **where)
        self.tenant = tenant
        self._secret_name = f"secret of {tenant}"

    def to_dict(self) -> dict[str, Any]:
        return {"tenant": self.tenant}


class Memory(MemoryTable):
    def __init__(self, tenant: str) -> None:
        super().__init__("parcels")
        self.tenant = tenant
        self._secret_name = f"secret of {tenant}"


class Datasets(DatasetTable):
    def __init__(self, tenant: str) -> None:
        super().__init__("lake", "parcels")
        self.tenant = tenant
        self._secret_name = f"secret of {tenant}"


@pytest.mark.parametrize("kind", [Memory, Datasets])
def test_a_subclass_of_what_has_no_settings_arrives_as_itself_too(kind: Any) -> None:
    function = kind("tenant-7")
    copy = pickle.loads(pickle.dumps(function))
    assert (type(copy), copy.tenant, copy._secret_name) == (kind, "tenant-7", "secret of tenant-7")
    assert copy.to_dict() == function.to_dict()


def test_copies_of_a_table_in_memory_share_its_records() -> None:
    memory = Memory("tenant-7")
    memory.fill({"a": {"n": 1}})
    assert pickle.loads(pickle.dumps(memory)).records() == {"a": {"n": 1}}


class Sqlite(OfATenant, SqliteTable):
    pass


class Postgres(OfATenant, PostgresTable):
    pass


class Redis(OfATenant, RedisTable):
    pass


class DynamoDb(OfATenant, DynamoDbTable):
    pass


@pytest.mark.parametrize(
    "declared",
    [
        lambda: Sqlite("tenant-7", path="/tmp/parcels.sqlite", table="parcels"),
        lambda: Postgres("tenant-7", table="parcels", dsn_env="PARCELS_DSN"),
        lambda: Redis("tenant-7", prefix="parcel", url_env="PARCELS_REDIS"),
        lambda: DynamoDb("tenant-7", table="parcels"),
    ],
)
def test_a_subclass_arrives_as_itself_with_what_it_has_of_its_own(
    declared: Callable[[], Any],
) -> None:
    function = declared()
    copy = pickle.loads(pickle.dumps(function))
    assert type(copy) is type(function)
    assert (copy.tenant, copy._secret_name) == ("tenant-7", "secret of tenant-7")
    assert (copy.key, copy.columns) == (("parcel",), {"parcel": "string"})
    base = type(function).__mro__[2]
    assert base.to_dict(copy) == base.to_dict(function)


class _Counted:
    def __init__(self) -> None:
        self.count = 0


class CountedMemory(MemoryTable, _Counted):
    def __init__(self) -> None:
        super().__init__("counted")
        self.count = 7


def test_another_base_with_a_constructor_declares_nothing() -> None:
    copy = pickle.loads(pickle.dumps(CountedMemory()))
    assert (copy.name, copy.count) == ("counted", 7)
