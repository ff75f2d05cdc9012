"""The rows of one key over time: of all generations as one history, joined where nothing changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from math import isnan
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.versions.kept_history import VALID_FROM
from dagster_adjunct.assets.versions.sealed_version import POSITION, TOMBSTONE
from dagster_adjunct.resources.errors import DatasetError

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.key_files import Key, KeyFiles
    from dagster_adjunct.assets.reading.row_group import RowGroup


_NAN = object()


@dataclass(frozen=True, slots=True)
class Validity:
    """What was valid of a key from one moment (included) to another (excluded; None: it still is).

    `entry` is None where the key was deleted.
    """

    valid_from: datetime
    valid_to: datetime | None
    entry: dict[str, Any] | None

    @property
    def is_current(self) -> bool:
        """Whether it is the key's entry now."""
        return self.valid_to is None and self.entry is not None

    def holds(self, moment: datetime) -> bool:
        """Whether the moment lies in it."""
        return self.valid_from <= moment and (self.valid_to is None or moment < self.valid_to)


@dataclass(frozen=True, slots=True)
class RowOverTime:
    """One stored row of a key; rows of the same moment compare by `rank`, (position, generation)."""

    valid_from: datetime
    rank: tuple[int, int]
    rows: RowGroup
    row: int

    @property
    def deleted(self) -> bool:
        """Whether it says that the key was deleted."""
        return bool(self.rows.value(TOMBSTONE, self.row))

    def entry(self, names: tuple[str, ...]) -> dict[str, Any] | None:
        """Return what was valid with it, None for a deletion."""
        return None if self.deleted else self.rows.entry(names, self.row)


def without_history(dataset: str) -> DatasetError:
    """Return the error for a version that keeps no entries over time."""
    return DatasetError(
        f"dataset {dataset!r}: this version keeps no history: of each key it holds the newest entry only.",
        'Declare history=timedelta(…) or "all", which needs a table built anew: under a new name, or after adjunct '
        f"dataset delete {dataset} --reason …. What was served earlier is read by open_dataset(…, as_of=…).",
        dataset=dataset,
    )


def newest_row(generations: Iterable[KeyFiles], bucket: int, key: Key) -> RowOverTime | None:
    """Return the row of a key with the highest (moment, position, generation); None where there is none."""
    newest: RowOverTime | None = None
    for files in generations:
        last = deque(files.find_all(bucket, key), maxlen=1)
        for rows, _, after in last:
            newest = _later(newest, _row(files, rows, after - 1))
    return newest


def history_of_key(
    generations: Iterable[KeyFiles],
    bucket: int,
    key: Key,
    names: tuple[str, ...],
    edge: datetime | None,
    told_by: str | None,
) -> list[Validity]:
    """Return what was valid of a key and when, oldest first, deletions included; nothing for a key without rows.

    `edge` is the earliest moment that the history is exact for: what had ended by then is left out, whether or not a
    compaction has dropped it already. `told_by` is the column that says since when an entry is valid, if one does.
    """
    at: dict[datetime, RowOverTime] = {}
    for files in generations:
        for rows, first, after in files.find_all(bucket, key):
            for row in range(first, after):
                read = _row(files, rows, row)
                at[read.valid_from] = _later(at.get(read.valid_from), read)
    spans = pairwise([*sorted(at), None])
    told = (Validity(begin, end, at[begin].entry(names)) for begin, end in spans if begin is not None)
    exact = (part for part in told if edge is None or part.valid_to is None or part.valid_to > edge)
    return list(joined(exact, told_by))


def joined(parts: Iterable[Validity], told_by: str | None = None) -> Iterator[Validity]:
    """Yield the parts of a history with neighbours of the same content as one; since when it is valid is no content."""

    def content(part: Validity) -> dict[str, Any] | None:
        return None if part.entry is None else {name: _same(v) for name, v in part.entry.items() if name != told_by}

    last: Validity | None = None
    for part in parts:
        if last is not None and content(last) == content(part):
            last = Validity(last.valid_from, part.valid_to, last.entry)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


def _same(value: Any) -> Any:
    """Return the value, or one that equals itself for NaN, as it does to Spark and the engines that read all keys."""
    return _NAN if isinstance(value, float) and isnan(value) else value


def _row(files: KeyFiles, rows: RowGroup, row: int) -> RowOverTime:
    return RowOverTime(rows.value(VALID_FROM, row), (rows.value(POSITION, row), files.id), rows, row)


def _later(one: RowOverTime | None, other: RowOverTime) -> RowOverTime:
    if one is None or (one.valid_from, one.rank) < (other.valid_from, other.rank):
        return other
    return one
