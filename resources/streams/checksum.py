"""A checksum of records that does not depend on their order, so that a producer can put it into a marker."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dagster_adjunct.resources.bucketing.hashing import row_digests, row_hash
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.errors import translate_spark_errors
from dagster_adjunct.resources.streams.system import PARTITION
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_PATTERN = re.compile(r"r2-[0-9a-f]{16}", re.IGNORECASE)
EMPTY_CHECKSUM = f"r2-{0:016x}"


@validated
def records_checksum(df: DataFrame, schema: Schema) -> str:
    """Return the checksum of the records: `r2-` and 16 hex digits, as in r2-51d0bd7a9c5e0f6b.

    It is the sum modulo 2**64 of a hash of each record: Spark's xxhash64 of the positions and values of the non-null
    columns of `schema`, in its order. Other columns of the frame are ignored. Equal records in any order and
    partitioning have equal checksums. Runs one Spark job.
    """
    with translate_spark_errors():
        row = df.agg(*_sum_hash_halves(schema)).first()
    assert row is not None
    return _format_checksum(row[0], row[1])


def checksums_by_partition(df: DataFrame, schema: Schema) -> dict[int, str]:
    """Return the checksum of each partition's records, by the number in `__partition`; one Spark job."""
    with translate_spark_errors():
        rows = df.groupBy(PARTITION).agg(*_sum_hash_halves(schema)).collect()
    return {row[0]: _format_checksum(row[1], row[2]) for row in rows}


def arrow_checksums_by_partition(table: pa.Table, schema: Schema) -> dict[int, str]:
    """Return the checksum of each partition's records in an Arrow table."""
    sums: dict[int, int] = {}
    digests = row_digests(table, schema).to_pylist()
    for partition, digest in zip(table.column(PARTITION).to_pylist(), digests, strict=True):
        sums[partition] = sums.get(partition, 0) + digest
    return {partition: _format_checksum(0, total) for partition, total in sums.items()}


def arrow_checksum(table: pa.Table, schema: Schema) -> str:
    """Return the checksum of the records in an Arrow table."""
    return _format_checksum(0, sum(row_digests(table, schema).to_pylist()))


def parse_records_checksum(text: str | None) -> str | None:
    """Return the records' checksum in `text`; None without one, or for a checksum of the producer's own form."""
    return text.lower() if text is not None and _PATTERN.fullmatch(text) else None


def _sum_hash_halves(schema: Schema) -> tuple[Column, Column]:
    """Return the sums of the hashes' upper and lower 32 bits: neither overflows below 2**31 records."""
    hashed = row_hash(schema.names)
    high, low = F.shiftrightunsigned(hashed, 32), hashed.bitwiseAND(F.lit(0xFFFFFFFF))
    return F.sum(high), F.sum(low)


def _format_checksum(high: int | None, low: int | None) -> str:
    return f"r2-{(((high or 0) << 32) + (low or 0)) % 2**64:016x}"
