"""Key-value tables: families, a version per key, conditional and atomic changes, iterators."""

from __future__ import annotations

from dagster_adjunct._arguments import guard
from dagster_adjunct.resources.key_value.avro_serializer import AvroSerializer
from dagster_adjunct.resources.key_value.blocking_key_value_table import BlockingKeyValueTable
from dagster_adjunct.resources.key_value.changes_of_keys import (
    Insert,
    MustBeAbsent,
    MustHaveVersion,
    Put,
    Remove,
    Replace,
)
from dagster_adjunct.resources.key_value.iterator_state import IteratorState
from dagster_adjunct.resources.key_value.json_serializers import JsonSerializer, ModelSerializer
from dagster_adjunct.resources.key_value.key_value_table import KeyValueTable
from dagster_adjunct.resources.key_value.key_version import KeyVersion
from dagster_adjunct.resources.key_value.listed_tables import SegmentInfo, TableInfo
from dagster_adjunct.resources.key_value.serializers import (
    BytesSerializer,
    FunctionSerializer,
    IntegerSerializer,
    Serializer,
    TextSerializer,
)
from dagster_adjunct.resources.key_value.table_configuration import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.table_entries import TableEntry, TableKey
from dagster_adjunct.resources.key_value.table_manager import KeyValueTableManager
from dagster_adjunct.resources.key_value.table_pages import IteratorPage
from dagster_adjunct.resources.key_value_backends import (
    DynamoDbSegments,
    ObjectSegments,
    PostgresSegments,
    SqliteSegments,
)
from dagster_adjunct.resources.key_value_errors import FailedCondition
from dagster_adjunct.resources.key_value_frames import FrameWritten, read_key_value_table, write_key_value_table

__all__ = [
    "AvroSerializer",
    "BlockingKeyValueTable",
    "BytesSerializer",
    "DynamoDbSegments",
    "FailedCondition",
    "FrameWritten",
    "FunctionSerializer",
    "Insert",
    "IntegerSerializer",
    "IteratorPage",
    "IteratorState",
    "JsonSerializer",
    "KeyValueTable",
    "KeyValueTableConfiguration",
    "KeyValueTableManager",
    "KeyVersion",
    "ModelSerializer",
    "MustBeAbsent",
    "MustHaveVersion",
    "ObjectSegments",
    "PostgresSegments",
    "Put",
    "Remove",
    "Replace",
    "SegmentInfo",
    "Serializer",
    "SqliteSegments",
    "TableEntry",
    "TableInfo",
    "TableKey",
    "TextSerializer",
    "read_key_value_table",
    "write_key_value_table",
]

guard(globals(), __all__)
