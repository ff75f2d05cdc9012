"""Counts the changes of a commit that change nothing, because a stored change of their key has a
higher position.

The stats of each file have its lowest and highest position. Where no new change of a bucket is
below a stored one, which is usual, nothing is read. Else the keys of the older changes are looked
up in the row groups that may have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from dagster_adjunct.assets.reading.stored_file import (
    StoredFile,
    column_paths,
    list_generation_files,
)
from dagster_adjunct.assets.versions.version import POSITION, TOMBSTONE
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.objects.store import ObjectStore

POSITIONS = "positions"
"""The name in a file's stats of its lowest and its highest position."""


@dataclass(frozen=True, slots=True)
class OlderChanges:
    """A file of new changes (`made`), some of which may be older than rows in these `stored` files
    of its bucket: the lowest position of the changes is below the highest of each stored file.
    """

    made: StoredFile
    stored: tuple[StoredFile, ...]

    @property
    def highest(self) -> Any:
        """The highest position of the stored files."""
        return max(map(_highest, self.stored))


def find_older_changes(
    store: ObjectStore, what: str, stored: Sequence[Generation], made: Generation
) -> list[OlderChanges]:
    """Return the files of the new generation `made` with changes that may be ignored, by the stats
    of all files alone. `what` names the dataset in errors.
    """
    by_bucket: dict[int, list[StoredFile]] = {}
    for generation in stored:
        for one in list_generation_files(store, what, generation):
            by_bucket.setdefault(one.file.bucket, []).append(one)
    found = []
    for file in list_generation_files(store, what, made):
        lowest = file.file.stats[POSITIONS][0]
        known = by_bucket.get(file.file.bucket, [])
        above = tuple(one for one in known if _highest(one) > lowest)
        if above:
            found.append(OlderChanges(file, above))
    return found


def _highest(stored: StoredFile) -> Any:
    """Return the highest position in a stored file."""
    _, highest = stored.file.stats[POSITIONS]
    return highest


class IgnoredChanges(NamedTuple):
    """How many changes are ignored, and how many of these are deletions."""

    changes: int
    deletions: int


NOTHING_IGNORED = IgnoredChanges(0, 0)


def count_ignored(older: Sequence[OlderChanges], key: Sequence[str]) -> IgnoredChanges:
    """Return how many of the new changes are ignored because a stored one of their key is newer.

    Raises ManifestMismatchError for a stored file that is missing or damaged.
    """
    ignored = 0
    deletions = 0
    for one in older:
        made = one.made.open()
        rows = one.made.reading(partial(made.read, columns=[*key, POSITION, TOMBSTONE]))
        rows = rows.filter(pc.less(rows.column(POSITION), one.highest))
        newest = _newest_positions(one, rows, key)
        columns = rows.select([*key, POSITION, TOMBSTONE]).to_pydict().values()
        for *values, position, deleted in zip(*columns, strict=True):
            stored = newest.get(tuple(values))
            if stored is not None and stored > position:
                ignored += 1
                deletions += deleted
    return IgnoredChanges(ignored, deletions)


def _newest_positions(
    one: OlderChanges, rows: pa.Table, key: Sequence[str]
) -> dict[tuple[Any, ...], Any]:
    """Return the highest stored position of the keys of these rows, as far as it is above the
    lowest position of the rows. Other keys that begin with the same value may be in it, too.
    """
    newest: dict[tuple[Any, ...], Any] = {}
    lowest = pc.min(rows.column(POSITION)).as_py()
    wanted = rows.column(key[0]).combine_chunks().unique()
    bounds = pc.min_max(wanted).as_py()
    for stored in one.stored:
        for group in _row_groups(stored, key, lowest, bounds):
            first = group.column(key[0]).cast(wanted.type)
            is_wanted = pc.is_in(first, value_set=wanted)
            is_above = pc.greater(group.column(POSITION), lowest)
            matching = group.filter(pc.and_(is_wanted, is_above))
            columns = matching.select([*key, POSITION]).to_pydict().values()
            for *values, position in zip(*columns, strict=True):
                key_values = tuple(values)
                newest[key_values] = max(position, newest.get(key_values, position))
    return newest


def _row_groups(
    stored: StoredFile, key: Sequence[str], lowest: Any, bounds: dict[str, Any]
) -> Iterator[pa.Table]:
    """Yield the keys and positions in the row groups that may have a position above `lowest` and a
    key whose first column is within `bounds` ("min" and "max").
    """
    file = stored.open()
    names = column_paths(file.metadata)
    for group in range(file.num_row_groups):
        metadata = file.metadata.row_group(group)
        positions = metadata.column(names.index(POSITION)).statistics
        if positions is not None and positions.has_min_max and positions.max <= lowest:
            continue
        if not _is_outside(metadata.column(names.index(key[0])).statistics, bounds):
            yield stored.reading(partial(file.read_row_group, group, columns=[*key, POSITION]))


def _is_outside(statistics: Any, bounds: dict[str, Any]) -> bool:
    """Return whether all values of a column are certainly outside the bounds, by its statistics;
    False if that is unknown.
    """
    low = bounds["min"]
    high = bounds["max"]
    if statistics is None or not statistics.has_min_max:
        return False
    # Only of types whose values in statistics compare as the columns do.
    if not isinstance(low, int | str) or type(statistics.min) is not type(low):
        return False
    return bool(statistics.max < low or statistics.min > high)
