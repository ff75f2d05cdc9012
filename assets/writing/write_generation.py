"""What bounded and unbounded datasets share when they write: one generation of bucket files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.dataset_log import Attempt
from dagster_adjunct.assets.writing.generation_writer import GenerationWriter, Rows_contra
from dagster_adjunct.resources.bucketing.bucket_files import BucketFile, BucketLayout, Generation
from dagster_adjunct.resources.bucketing.writer import WriteOptions
from dagster_adjunct.resources.errors import SchemaMismatchError

if TYPE_CHECKING:
    from dagster_adjunct.resources.bucketing.write_over_time import OverTimeWrite
    from dagster_adjunct.resources.bucketing.writer import Completion
    from dagster_adjunct.resources.objects.lake import Lake

# How many keys or records an error names.
NAMED = 5


def write_generation(
    lake: Lake,
    attempt: Attempt,
    number: int,
    layout: BucketLayout,
    rows: Rows_contra,
    writer: GenerationWriter[Rows_contra],
    *,
    what: str,
    order_by: Sequence[str],
    keep_tombstones: bool,
    partitioned: bool,
    refuse_conflicting: bool = False,
    range_of: str | None = None,
    over_time: OverTimeWrite | None = None,
    completion: Completion | None = None,
) -> tuple[Generation, dict[str, int]]:
    """Write the last row of each key into one file a bucket; return the generation that they make, and counters.

    `order_by` puts the rows of one key next to each other, the one that counts last. Counted are the rows that a
    later one of their key superseded, those of them that said something else ("conflicting", left out where there
    are none), and, where tombstones are not kept, the keys that ended deleted; of rows `over_time` also those that
    correct the past, are before the edge, or forgotten. With `refuse_conflicting` rows of one key that contradict each
    other are a SchemaMismatchError, which names keys. `range_of` is a timestamp column whose range stands with each
    file. `completion` completes rows that leave out columns.
    """
    empty = attempt.generation(number)
    options = write_options(
        what, keep_tombstones=keep_tombstones, refuse_conflicting=refuse_conflicting, range_of=range_of
    )
    options = replace(options, over_time=over_time, completion=completion)
    files = writer(rows, lake.store, empty.folder, layout, options, order_by=order_by, partitioned=partitioned)
    return generation_of(attempt, number, layout, files, what=what, refuse_conflicting=refuse_conflicting)


def write_options(
    what: str, *, keep_tombstones: bool, refuse_conflicting: bool, range_of: str | None = None
) -> WriteOptions:
    """Return how the rows of a generation are written."""
    named = NAMED if refuse_conflicting else 0
    return WriteOptions(
        what, last_per_key=True, drop_tombstones=not keep_tombstones, name_conflicting=named, range_of=range_of
    )


def generation_of(
    attempt: Attempt,
    number: int,
    layout: BucketLayout,
    files: Sequence[BucketFile],
    *,
    what: str,
    refuse_conflicting: bool,
) -> tuple[Generation, dict[str, int]]:
    """Return the generation that these files make, and counters; see `write_generation`."""
    counters = {
        what: sum(int(file.stats.get(what, 0)) for file in files) for what in ("superseded", "deleted", "conflicting")
    }
    if counters["conflicting"] and refuse_conflicting:
        keys = [key for file in files for key in file.stats.get("conflicting_keys", ())]
        raise SchemaMismatchError(
            f"{what}: {counters['conflicting']} record(s) have the key ({', '.join(layout.key)}) of another record and "
            f"say something else, and the dataset is declared with duplicates='error': {listed(keys)}.",
            "Deliver each key once, or declare duplicates='last'.",
            column=layout.key[0],
        )
    if not counters["conflicting"]:
        del counters["conflicting"]
    for name in ("corrections", "pruned", "forgotten"):
        if count := sum(int(file.stats.get(name, 0)) for file in files):
            counters[name] = count
    highest = [int(file.stats["forgotten_to"]) for file in files if "forgotten_to" in file.stats]
    if highest:
        counters["forgotten_to"] = max(highest)  # no count, but nothing of such a file may be left
    return attempt.generation(number, [file for file in files if file.rows]), counters


def listed(things: Sequence[str]) -> str:
    """Return the first of these, for errors."""
    return f"{', '.join(things[:NAMED])}{' …' if len(things) > NAMED else ''}"


def add(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    """Return the sums of two sets of counters."""
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}
