"""A user's subclass of a store's function arrives on executors as itself, with what it was given besides."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from dagster_adjunct.resources.backends import DynamoDbTable, PostgresTable, RedisTable, SqliteTable


class OfATenant:
    """Made of other arguments than the function beneath, and with a `to_dict` of its own."""

    def __init__(self, tenant: str, **where: Any) -> None:
        super().__init__(key="parcel", columns={"parcel": "string"}, **where)
        self.tenant = tenant

    def to_dict(self) -> dict[str, Any]:
        return {"tenant": self.tenant}


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
def test_a_subclass_arrives_as_itself_with_what_it_has_of_its_own(declared: Callable[[], Any]) -> None:
    function = declared()
    copy = pickle.loads(pickle.dumps(function))
    assert type(copy) is type(function)
    assert copy.tenant == "tenant-7"
    assert (copy.key, copy.columns) == (("parcel",), {"parcel": "string"})
    base = type(function).__mro__[2]
    assert base.to_dict(copy) == base.to_dict(function)
