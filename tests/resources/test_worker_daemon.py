"""Python workers are forked from a process that has imported what our tasks need, and are not
slower than Spark's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_workers_begin_with_the_imports_frozen_and_are_used_again(spark: SparkSession) -> None:
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import gc
        import sys

        import pyarrow

        for _ in batches:
            pass
        # Set by the first task of a worker, so that another task in the same one tells that it was
        # reused.
        used = getattr(sys, "_used_before", False)
        sys._used_before = True  # type: ignore[attr-defined]
        yield pyarrow.RecordBatch.from_pylist([{"frozen": gc.get_freeze_count(), "reused": used}])

    def rows() -> list[tuple[int, bool]]:
        collected = (
            spark.range(2, numPartitions=2)
            .mapInArrow(look, "frozen bigint, reused boolean")
            .collect()
        )
        return [tuple(row) for row in collected]

    rows()
    again = rows()
    assert all(frozen > 10_000 for frozen, _ in again)
    assert any(reused for _, reused in again)
