"""Key-value tables: families, a version per key, conditional and atomic changes, iterators."""

from __future__ import annotations

from dagster_adjunct.resources.errors import FailedCondition
from dagster_adjunct.resources.key_value.entries import (
    Insert,
    MustBeAbsent,
    MustHaveVersion,
    Put,
    Remove,
    Replace,
    TableEntry,
    TableKey,
)
from dagster_adjunct.resources.key_value.iterators import IteratorPage, IteratorState
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager, SegmentInfo, TableInfo
from dagster_adjunct.resources.key_value.segment import KeyValueTableConfiguration, KeyVersion
from dagster_adjunct.resources.key_value.serializers import (
    AvroSerializer,
    BytesSerializer,
    FunctionSerializer,
    IntegerSerializer,
    JsonSerializer,
    ModelSerializer,
    Serializer,
    TextSerializer,
)
from dagster_adjunct.resources.key_value.table import BlockingKeyValueTable, KeyValueTable
from dagster_adjunct.resources.key_value_backends.dynamodb import DynamoDbSegments
from dagster_adjunct.resources.key_value_backends.objects.segment import ObjectSegments
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments
from dagster_adjunct.resources.key_value_frames.frames import FrameWritten, read_key_value_table, write_key_value_table

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
