"""Reads of stream systems that anybody may have written: what they return is checked, so that a
mistake of one is an error and not a lost record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    OFFSET,
    PARTITION,
    RECORD_META,
    OffsetRange,
    StreamSystem,
    SystemStreamPartition,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Ranges = Mapping[SystemStreamPartition, OffsetRange]


def read_frame(
    system: StreamSystem, spark: SparkSession, ranges: Ranges, **options: Any
) -> DataFrame:
    """Return the records of these ranges as `StreamSystem.read` does. Raises StreamReadError if
    a column of RECORD_META is missing.
    """
    frame = system.read(spark, ranges, **options)
    _Read(system, "read", ranges).check_columns(frame.columns, RECORD_META)
    return frame


def read_options(system: StreamSystem) -> dict[str, Any]:
    """Return the options of a read whose records are joined: with copies of the key's values inside
    columns, if the system makes them.
    """
    return {"copies": True} if system.capabilities.copies_keys else {}


def read_table(
    system: StreamSystem, ranges: Ranges, columns: Sequence[str] | None = None, **options: Any
) -> pa.Table:
    """Return the records of these ranges as `StreamSystem.read_arrow` does.

    Raises StreamReadError if columns, partitions, offsets or epochs are missing, if records are out
    of order or of other partitions, or if there are more or fewer than the system counts. If it
    counts only by reading them all, fewer are accepted: its offsets may have gaps.
    """
    if columns is not None:
        options["columns"] = columns
    table = system.read_arrow(ranges, **options)
    read = _Read(system, "read_arrow", ranges)
    read.check_columns(table.column_names, (*(columns or ()), *RECORD_META))
    read.check_nulls(table)
    read.check_order(table)
    read.check_counts(table)
    return table


@dataclass(frozen=True, slots=True)
class _Read:
    """A call of a system's `method`, for the checks of its result."""

    system: StreamSystem
    method: str
    ranges: Ranges

    def check_columns(self, found: Sequence[str], needed: Sequence[str]) -> None:
        """Raise StreamReadError if a column is missing."""
        missing = [name for name in needed if name not in found]
        if missing:
            raise self._error(
                f"the columns {', '.join(found) or '(none)'}",
                f"also {', '.join(missing)}",
                column=missing[0],
            )

    def check_nulls(self, table: pa.Table) -> None:
        """Raise StreamReadError for a record without partition, offset or epoch."""
        for name in (PARTITION, OFFSET, EPOCH):
            if table.column(name).null_count:
                raise self._error(f"a null {name}", "a value in each record", column=name)

    def check_order(self, table: pa.Table) -> None:
        """Raise StreamReadError unless the records are ordered by partition and offset, each
        once.
        """
        if table.num_rows < 2:
            return
        partitions = table.column(PARTITION).combine_chunks()
        offsets = table.column(OFFSET).combine_chunks()
        grows = pc.if_else(
            pc.equal(partitions[1:], partitions[:-1]),
            pc.greater(offsets[1:], offsets[:-1]),
            pc.greater(partitions[1:], partitions[:-1]),
        )
        last = pc.index(grows, value=False).as_py()  # the last record in order
        if last < 0:  # all are
            return
        partition = partitions[last + 1].as_py()
        found = (
            f"offset {offsets[last + 1]} of partition {partition} after offset {offsets[last]} of"
            f" partition {partitions[last]}"
        )
        raise self._error(found, "records by partition and offset, each once", partition, OFFSET)

    def check_counts(self, table: pa.Table) -> None:
        """Raise StreamReadError for a partition that has more or fewer records than the system
        counts.
        """
        rows: dict[int, int] = {}
        for count in table.column(PARTITION).value_counts().to_pylist():
            rows[count["values"]] = count["counts"]
        for ssp, span in self.ranges.items():
            self._check_count(ssp, span, rows.pop(ssp.partition, 0))
        if rows:
            other = min(rows)
            expected = f"records of {', '.join(map(str, self.ranges))} only"
            raise self._error(f"{rows[other]} records of partition {other}", expected, other)

    def _check_count(self, ssp: SystemStreamPartition, span: OffsetRange, found: int) -> None:
        """Raise StreamReadError if `found` records of a range are more than its offsets, or not as
        many as the system counts without reading.
        """
        offsets = self.system.distance(ssp, span.start, span.end)
        if found == offsets:  # as many as there can be
            return
        expected = f"at most {offsets} records"
        is_wrong = found > offsets
        if not is_wrong and _counts_unread(self.system):
            records = self.system.records_between({ssp: span})
            expected = f"{records} records, as records_between() counts"
            is_wrong = found != records
        if is_wrong:
            raise self._error(f"{found} records", expected, ssp.partition)

    def _error(
        self, found: str, expected: str, partition: int | None = None, column: str | None = None
    ) -> errors.StreamReadError:
        """Return the error for what was returned for a partition, by default the first one."""
        ssp = next(iter(self.ranges))
        for each in self.ranges:
            if each.partition == partition:
                ssp = each
        span = self.ranges[ssp]
        called = f"{type(self.system).__name__}.{self.method}()"
        problem = (
            f"{called} of stream system {self.system.name!r} returned {found} for the offsets"
            f" {span.start} to {span.end} of {ssp}: expected {expected}."
        )
        return errors.StreamReadError(
            problem,
            f"Correct {called}. If offsets of the system have gaps, write records_between(), too.",
            system=self.system.name,
            stream=ssp.qualified_stream,
            partition=ssp.partition if partition is None else partition,
            start=span.start,
            end=span.end,
            found=found,
            expected=expected,
            column=column,
        )


def _counts_unread(system: StreamSystem) -> bool:
    """Return whether `records_between` counts without reading: by the default, each offset is a
    record.
    """
    is_default = type(system).records_between is StreamSystem.records_between
    return is_default or system.capabilities.counts_unread
