"""Times in declarations are seconds above 0: another number would switch off what it is for, in
silence.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.tables import (
    Cache,
    DatasetTable,
    DynamoDbTable,
    HttpTable,
    PostgresTable,
    RedisTable,
    RetryPolicy,
    SqliteTable,
)

WRONG = [math.nan, math.inf, -math.inf, -1, -0.5, True, "5", 10**400]


def sqlite(**settings: Any) -> SqliteTable:
    return SqliteTable("x.sqlite", "t", "id", **settings)


def postgres(**settings: Any) -> PostgresTable:
    return PostgresTable("t", "id", dsn_env="X", **settings)


def dynamodb(**settings: Any) -> DynamoDbTable:
    return DynamoDbTable("t", "id", **settings)


def redis(**settings: Any) -> RedisTable:
    return RedisTable("p", "id", columns={"id": "string"}, url="redis://x", **settings)


def http(**settings: Any) -> HttpTable:
    return HttpTable("http://x", "/t/{id}", "id", **settings)


def dataset(**settings: Any) -> DatasetTable:
    return DatasetTable("lake", "d", **settings)


TIMES: list[
    tuple[Any, str, bool, bool]
] = [  # what is declared, its time, whether it may be None, and 0
    (sqlite, "busy_timeout", False, True),
    (sqlite, "forget_after", True, False),
    (postgres, "forget_after", True, False),
    (dynamodb, "forget_deleted_after", True, False),
    (dynamodb, "connect_timeout", False, False),
    (dynamodb, "read_timeout", False, False),
    (redis, "forget_deleted_after", True, False),
    (redis, "timeout", False, False),
    (http, "timeout", False, False),
    (dataset, "refresh_every", True, True),
    (Cache, "seconds_after_write", True, False),
    (RetryPolicy, "timeout", True, False),
]


@pytest.mark.parametrize(("declare", "name", "none", "zero"), TIMES)
def test_a_time_that_is_none_is_refused_when_it_is_declared(
    declare: Any, name: str, none: bool, zero: bool
) -> None:
    declare(**{name: 5})
    for allowed in [None] * none + [0] * zero:
        declare(**{name: allowed})
    for wrong in [*WRONG, *([] if none else [None]), *([] if zero else [0])]:
        with pytest.raises(ConfigurationError) as reported:
            declare(**{name: wrong})
        assert reported.value.argument == name


@pytest.mark.parametrize(
    ("declare", "name"), [(redis, "connections"), (http, "connections"), (redis, "largest_value")]
)
def test_a_count_is_a_whole_number(declare: Any, name: str) -> None:
    for wrong in (0, -1, 2.5, True, None, math.nan):
        with pytest.raises(ConfigurationError) as caught:
            declare(**{name: wrong})
        assert caught.value.argument == name
