"""How a Dagster code location is adjusted: the keys and words of its assets, when its jobs are launched, its tables."""

from __future__ import annotations

from dagster_adjunct._arguments import guard
from dagster_adjunct.orchestration.code_location.dagster_home import prepare_dagster_home
from dagster_adjunct.orchestration.code_location.nodes.asset_subject import AssetSubject
from dagster_adjunct.orchestration.code_location.nodes.translator import AdjunctTranslator
from dagster_adjunct.orchestration.code_location.sensing.launch_when import LaunchWhen
from dagster_adjunct.orchestration.code_location.shared.key_value_rows_resource import KeyValueRowsResource
from dagster_adjunct.orchestration.code_location.shared.key_value_table_resource import KeyValueTableResource
from dagster_adjunct.resources.backends.table_resources import (
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

guard(globals(), __all__)
