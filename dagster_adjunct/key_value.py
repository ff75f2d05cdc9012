"""Key-value tables: families, a version per key, conditional and atomic changes, iterators."""

from dagster_adjunct.resources.errors import FailedCondition as FailedCondition
from dagster_adjunct.resources.key_value.entries import Insert as Insert
from dagster_adjunct.resources.key_value.entries import MustBeAbsent as MustBeAbsent
from dagster_adjunct.resources.key_value.entries import MustHaveVersion as MustHaveVersion
from dagster_adjunct.resources.key_value.entries import Put as Put
from dagster_adjunct.resources.key_value.entries import Remove as Remove
from dagster_adjunct.resources.key_value.entries import Replace as Replace
from dagster_adjunct.resources.key_value.entries import TableEntry as TableEntry
from dagster_adjunct.resources.key_value.entries import TableKey as TableKey
from dagster_adjunct.resources.key_value.frames import FrameWritten as FrameWritten
from dagster_adjunct.resources.key_value.frames import read_key_value_table as read_key_value_table
from dagster_adjunct.resources.key_value.frames import (
    write_key_value_table as write_key_value_table,
)
from dagster_adjunct.resources.key_value.iterators import IteratorPage as IteratorPage
from dagster_adjunct.resources.key_value.iterators import IteratorState as IteratorState
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager as KeyValueTableManager
from dagster_adjunct.resources.key_value.manager import SegmentInfo as SegmentInfo
from dagster_adjunct.resources.key_value.manager import TableInfo as TableInfo
from dagster_adjunct.resources.key_value.segment import (
    KeyValueTableConfiguration as KeyValueTableConfiguration,
)
from dagster_adjunct.resources.key_value.segment import KeyVersion as KeyVersion
from dagster_adjunct.resources.key_value.serializers import AvroSerializer as AvroSerializer
from dagster_adjunct.resources.key_value.serializers import BytesSerializer as BytesSerializer
from dagster_adjunct.resources.key_value.serializers import FunctionSerializer as FunctionSerializer
from dagster_adjunct.resources.key_value.serializers import IntegerSerializer as IntegerSerializer
from dagster_adjunct.resources.key_value.serializers import JsonSerializer as JsonSerializer
from dagster_adjunct.resources.key_value.serializers import ModelSerializer as ModelSerializer
from dagster_adjunct.resources.key_value.serializers import Serializer as Serializer
from dagster_adjunct.resources.key_value.serializers import TextSerializer as TextSerializer
from dagster_adjunct.resources.key_value.table import BlockingKeyValueTable as BlockingKeyValueTable
from dagster_adjunct.resources.key_value.table import KeyValueTable as KeyValueTable
from dagster_adjunct.resources.key_value_backends.dynamodb import (
    DynamoDbSegments as DynamoDbSegments,
)
from dagster_adjunct.resources.key_value_backends.objects.segment import (
    ObjectSegments as ObjectSegments,
)
from dagster_adjunct.resources.key_value_backends.postgres import (
    PostgresSegments as PostgresSegments,
)
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments as SqliteSegments
