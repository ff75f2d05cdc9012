"""The tables that applications can write, and how each is written."""

from __future__ import annotations

from typing import TypeAlias

from dagster_adjunct.resources.iceberg import IcebergTable
from dagster_adjunct.resources.output_tables.batches import TableOutput
from dagster_adjunct.resources.output_tables.delta import DeltaLakeTable, DeltaOutput
from dagster_adjunct.resources.output_tables.iceberg import IcebergOutput, parse_partition_field

AnyOutputTable: TypeAlias = IcebergTable | DeltaLakeTable


def open_output(table: AnyOutputTable) -> TableOutput:
    """Return what writes a table; nothing is opened yet."""
    if isinstance(table, IcebergTable):
        return IcebergOutput(table)
    return DeltaOutput(table)


def partition_columns(table: AnyOutputTable) -> tuple[str, ...]:
    """Return the columns, or paths, by which a table is partitioned when it is created. Raises
    ConfigurationError for a transform that does not exist.
    """
    if isinstance(table, IcebergTable):
        return tuple(parse_partition_field(text).column for text in table.partition_by)
    return table.partition_by
