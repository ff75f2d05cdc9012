"""How a Dagster code location is adjusted: the keys and words of its assets, when its jobs are launched, its tables."""

from __future__ import annotations

from dagster_adjunct.orchestration.code_location.definitions import prepare_dagster_home
from dagster_adjunct.orchestration.code_location.nodes import AdjunctTranslator, AssetSubject
from dagster_adjunct.orchestration.code_location.resources import KeyValueRowsResource, KeyValueTableResource
from dagster_adjunct.orchestration.code_location.sensors import LaunchWhen
from dagster_adjunct.resources.backends.resources import (
    DynamoDbTableResource,
    HttpTableResource,
    PostgresTableResource,
    RedisTableResource,
    SqliteTableResource,
)

__all__ = [
    "AdjunctTranslator",
    "AssetSubject",
    "DynamoDbTableResource",
    "HttpTableResource",
    "KeyValueRowsResource",
    "KeyValueTableResource",
    "LaunchWhen",
    "PostgresTableResource",
    "RedisTableResource",
    "SqliteTableResource",
    "prepare_dagster_home",
]
