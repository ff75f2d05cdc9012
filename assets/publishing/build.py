"""What bounded and unbounded datasets share when they write: one generation of bucket files, one declaration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from assets.log import Attempt
from assets.manifest import Declaration
from resources.bucketing.files import BucketLayout, Generation
from resources.bucketing.write import write_buckets
from resources.bucketing.writer import WriteOptions
from resources.errors import DatasetError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from resources.objects.lake import Lake


def write_generation(
    lake: Lake,
    attempt: Attempt,
    number: int,
    layout: BucketLayout,
    rows: DataFrame,
    *,
    what: str,
    order_by: Sequence[str],
    keep_tombstones: bool,
    partitioned: bool,
) -> tuple[Generation, dict[str, int]]:
    """Write the last row of each key into one file a bucket; return the generation that they make, and counters.

    `order_by` puts the rows of one key next to each other, the one that counts last. Counted are the rows that a
    later one of their key superseded, those of them that said something else ("conflicting", left out where there
    are none), and, where tombstones are not kept, the keys that ended deleted.
    """
    empty = attempt.generation(number)
    options = WriteOptions(what, last_per_key=True, drop_tombstones=not keep_tombstones)
    files = write_buckets(rows, lake.store, empty.folder, layout, options, order_by=order_by, partitioned=partitioned)
    counters = {
        what: sum(int(file.stats.get(what, 0)) for file in files) for what in ("superseded", "deleted", "conflicting")
    }
    if not counters["conflicting"]:
        del counters["conflicting"]
    return attempt.generation(number, [file for file in files if file.rows]), counters


def check_declaration(name: str, stored: Declaration, declared: Declaration) -> None:
    """Refuse a declaration under which the stored entries could not be found again, naming each difference."""
    changes = [
        f"{what} is {_told(new)}, was {_told(old)}"
        for what, old, new in (
            ("kind", stored.kind, declared.kind),
            ("input", stored.input, declared.input),
            ("key", stored.key, declared.key),
            ("type of the key", stored.key_types, declared.key_types),
            ("partition_by", stored.partition_by, declared.partition_by),
            ("partitions", stored.partitions or "broadcast", declared.partitions or "broadcast"),
            ("number of input partitions", stored.input_partitions, declared.input_partitions),
        )
        if old != new
    ]
    if changes:
        raise DatasetError(
            f"dataset {name!r} was built under another declaration: {'; '.join(changes)}. That needs a rebuild.",
            "Declare it under a new name, which builds it beside the old one, or restore the old declaration.",
        )


def _told(value: object) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, tuple) else str(value)


def add(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    """Return the sums of two sets of counters."""
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}
