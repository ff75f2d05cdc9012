"""Where a declaration wants the name of an environment variable, a value that is none is refused
and never shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.http import HttpTable
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.redis import RedisTable

COLUMNS = {"parcel": "string"}


def redis(**where: str) -> RedisTable:
    return RedisTable("parcel", "parcel", columns=COLUMNS, **where)


@pytest.mark.parametrize(
    ("argument", "declared"),
    [
        (
            "dsn_env",
            lambda: PostgresTable("parcels", "parcel", dsn_env="postgresql://me:sesame@db/depot"),
        ),
        ("url_env", lambda: redis(url_env="redis://:sesame@db/0")),
        ("password_env", lambda: redis(url="redis://db/0", password_env="open sesame")),
        (
            "credentials_env",
            lambda: DynamoDbTable("parcels", "parcel", credentials_env=("KEY_ID", "sesame/sesame")),
        ),
        (
            "secret_headers['Authorization']",
            lambda: HttpTable(
                "http://x", "/{parcel}", "parcel", secret_headers={"Authorization": "Bearer sesame"}
            ),
        ),
    ],
)
def test_a_secret_in_the_place_of_a_variables_name_is_refused_and_not_displayed(
    argument: str, declared: Callable[[], Any]
) -> None:
    with pytest.raises(ConfigurationError) as reported:
        declared()
    assert reported.value.facts["argument"] == argument
    assert "sesame" not in f"{reported.value} {reported.value!r}"
    assert argument in reported.value.problem
