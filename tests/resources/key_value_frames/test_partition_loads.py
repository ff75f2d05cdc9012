"""The rows of one partition of a frame on their way to a key-value table, without Spark."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.key_value import BytesSerializer, KeyValueTableConfiguration, SqliteSegments
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.key_value.frames import PartitionLoad
from dagster_adjunct.resources.key_value.segment import TableId
from dagster_adjunct.resources.key_value.table import OpenTable


@pytest.mark.parametrize("orders", [[math.nan, math.nan], [-0.0, 0.0], [[math.nan], [math.nan]]])
def test_rows_of_a_key_with_numbers_that_spark_takes_for_equal_are_refused(
    tmp_path: Path, orders: list[Any]
) -> None:
    id, backend = TableId("suite", "t", f"{1:016x}"), SqliteSegments(tmp_path / "tables.sqlite")
    backend.create(id, 1)
    table = OpenTable(
        id, KeyValueTableConfiguration(1), backend, BytesSerializer(), BytesSerializer()
    )
    _, key = table.coder.locate("f", b"k")
    columns = {
        "partition": pa.array([0, 0], pa.int32()),
        "table_key": [key, key],
        "value": [b"1", b"2"],
    }
    batch = pa.RecordBatch.from_pydict({**columns, "order": orders})
    with pytest.raises(SchemaMismatchError, match="two rows of the key"):
        PartitionLoad(table).run(iter([batch]))
