"""A checksum over records that does not depend on their order, so that a producer can promise it in a marker."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from resources.columns import column
from resources.spark_errors import unwrapped
from resources.streams.system import PARTITION

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from resources.schema import Schema

_FORM = re.compile(r"[0-9a-fA-F]{16}")
NOTHING = "0" * 16


def records_checksum(df: DataFrame, schema: Schema) -> str:
    """Return the checksum of the records: the sum modulo 2**64 of Spark's xxhash64 of each, as 16 hex digits.

    The hash is over the columns of `schema`, in its order; whatever else the frame has does not count. Equal
    records in any order and partitioning have equal checksums. Runs one Spark job.
    """
    with unwrapped():
        found = df.agg(*_halves(schema)).first()
    assert found is not None
    return _told(found[0], found[1])


def checksums_by_partition(df: DataFrame, schema: Schema) -> dict[int, str]:
    """Return the checksum of each partition's records, by the number in `__partition`; one Spark job."""
    with unwrapped():
        found = df.groupBy(PARTITION).agg(*_halves(schema)).collect()
    return {row[0]: _told(row[1], row[2]) for row in found}


def is_records_checksum(text: str | None) -> bool:
    """Whether this has the form of a checksum over records: 16 hex digits. Any other form is its producer's own."""
    return text is not None and _FORM.fullmatch(text) is not None


def _halves(schema: Schema) -> tuple[Column, Column]:
    """Return the sums of the hashes' upper and lower 32 bits: neither overflows below 2**31 records."""
    from pyspark.sql import functions as F

    hashed = F.xxhash64(*[column(name) for name in schema.names])
    high, low = F.shiftrightunsigned(hashed, 32), hashed.bitwiseAND(F.lit(0xFFFFFFFF))
    return F.sum(high), F.sum(low)


def _told(high: int | None, low: int | None) -> str:
    return f"{(((high or 0) << 32) + (low or 0)) % 2**64:016x}"
