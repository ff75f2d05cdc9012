"""Which of a key's rows a partition of a frame writes, without Spark."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pytest

from dagster_adjunct.key_value import BytesSerializer, KeyValueTableConfiguration
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.key_value.segment import TableId, table_key
from dagster_adjunct.resources.key_value.table import OpenTable
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments
from dagster_adjunct.resources.key_value_frames.frames import PartitionLoad


@pytest.mark.parametrize(
    ("orders", "entries"), [((1.0, math.nan), 1), ((math.nan, math.nan), None), ((0.0, 0.0), None)]
)
def test_rows_of_a_key_with_one_order_are_refused_also_if_it_is_no_number(
    tmp_path: Path, orders: tuple[float, float], entries: int | None
) -> None:
    id, backend, serializer = TableId("s", "t", f"{0:016x}"), SqliteSegments(tmp_path / "t"), BytesSerializer()
    backend.create(id, 1)
    load = PartitionLoad(OpenTable(id, KeyValueTableConfiguration(1), backend, serializer, serializer))
    keys = [table_key(b"", b"k")] * 2
    rows = {"partition": [0, 0], "table_key": keys, "value": [b"1", b"2"], "order": orders}
    batches = iter([pa.RecordBatch.from_pydict({name: pa.array(values) for name, values in rows.items()})])
    if entries is None:
        with pytest.raises(SchemaMismatchError, match="with the same order"):
            load.run(batches)
    else:
        load.run(batches)
        assert load.entries == entries
