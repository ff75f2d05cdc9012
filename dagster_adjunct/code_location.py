"""How a Dagster code location is adjusted: the keys and words of its assets, when its jobs are launched, its tables."""

from dagster_adjunct.orchestration.code_location.definitions import prepare_dagster_home as prepare_dagster_home
from dagster_adjunct.orchestration.code_location.loading import AdjunctLoader as AdjunctLoader
from dagster_adjunct.orchestration.code_location.nodes import AdjunctTranslator as AdjunctTranslator
from dagster_adjunct.orchestration.code_location.nodes import AssetSubject as AssetSubject
from dagster_adjunct.orchestration.code_location.resources import DynamoDbTableResource as DynamoDbTableResource
from dagster_adjunct.orchestration.code_location.resources import HttpTableResource as HttpTableResource
from dagster_adjunct.orchestration.code_location.resources import KeyValueRowsResource as KeyValueRowsResource
from dagster_adjunct.orchestration.code_location.resources import KeyValueTableResource as KeyValueTableResource
from dagster_adjunct.orchestration.code_location.resources import PostgresTableResource as PostgresTableResource
from dagster_adjunct.orchestration.code_location.resources import RedisTableResource as RedisTableResource
from dagster_adjunct.orchestration.code_location.resources import SqliteTableResource as SqliteTableResource
from dagster_adjunct.orchestration.code_location.sensors import LaunchWhen as LaunchWhen
from dagster_adjunct.orchestration.code_location.services import EmrCluster as EmrCluster
from dagster_adjunct.orchestration.code_location.services import EmrServerless as EmrServerless
from dagster_adjunct.orchestration.code_location.services import Kubernetes as Kubernetes
