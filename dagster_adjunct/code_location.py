"""Adjust a Dagster code location: names of assets, when jobs are launched, inputs and tables as
resources, services.
"""

from typing import TYPE_CHECKING

_NAMES = {  # what is imported below for type checkers; tests compare the two
    "dagster_adjunct.orchestration.code_location.definitions": ("prepare_dagster_home",),
    "dagster_adjunct.orchestration.code_location.nodes": ("AdjunctTranslator", "AssetSubject"),
    "dagster_adjunct.orchestration.code_location.resources": ("AdjunctLoader",),
    "dagster_adjunct.orchestration.code_location.sensors": ("LaunchWhen",),
    "dagster_adjunct.orchestration.code_location.spark_services": (
        "EmrCluster",
        "EmrServerless",
        "Glue",
        "Kubernetes",
    ),
    "dagster_adjunct.orchestration.code_location.table_resources": (
        "DynamoDbTableResource",
        "HttpTableResource",
        "KeyValueRowsResource",
        "KeyValueTableResource",
        "PostgresTableResource",
        "RedisTableResource",
        "SqliteTableResource",
    ),
}

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.code_location.definitions import (
        prepare_dagster_home as prepare_dagster_home,
    )
    from dagster_adjunct.orchestration.code_location.nodes import (
        AdjunctTranslator as AdjunctTranslator,
    )
    from dagster_adjunct.orchestration.code_location.nodes import AssetSubject as AssetSubject
    from dagster_adjunct.orchestration.code_location.resources import AdjunctLoader as AdjunctLoader
    from dagster_adjunct.orchestration.code_location.sensors import LaunchWhen as LaunchWhen
    from dagster_adjunct.orchestration.code_location.spark_services import EmrCluster as EmrCluster
    from dagster_adjunct.orchestration.code_location.spark_services import (
        EmrServerless as EmrServerless,
    )
    from dagster_adjunct.orchestration.code_location.spark_services import Glue as Glue
    from dagster_adjunct.orchestration.code_location.spark_services import Kubernetes as Kubernetes
    from dagster_adjunct.orchestration.code_location.table_resources import (
        DynamoDbTableResource as DynamoDbTableResource,
    )
    from dagster_adjunct.orchestration.code_location.table_resources import (
        HttpTableResource as HttpTableResource,
    )
    from dagster_adjunct.orchestration.code_location.table_resources import (
        KeyValueRowsResource as KeyValueRowsResource,
    )
    from dagster_adjunct.orchestration.code_location.table_resources import (
        KeyValueTableResource as KeyValueTableResource,
    )
    from dagster_adjunct.orchestration.code_location.table_resources import (
        PostgresTableResource as PostgresTableResource,
    )
    from dagster_adjunct.orchestration.code_location.table_resources import (
        RedisTableResource as RedisTableResource,
    )
    from dagster_adjunct.orchestration.code_location.table_resources import (
        SqliteTableResource as SqliteTableResource,
    )
else:
    from dagster_adjunct.resources.lazy_modules import lazy_names

    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
