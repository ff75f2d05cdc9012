"""What a run without Spark keeps in memory of datasets: entries by their key, or by key and
time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dagster_adjunct.assets.reading.interval_ids import add_interval_id
from dagster_adjunct.assets.reading.keyed_entries import KeyedEntries, TimedEntries
from dagster_adjunct.assets.reading.served_over_time import ServedOverTime
from dagster_adjunct.assets.reading.valid_time import Reader, VersionsOverTime, read_rows_over_time
from dagster_adjunct.assets.reading.version_reader import VersionReader, read_entries

_MAX_KEPT = 32


@dataclass(frozen=True, slots=True)
class _Kept:
    """A value, and the version that it was read of."""

    version: Any
    value: Any


class EntryCache:
    """The entries that the batches of a run have joined, of each dataset in the version that was
    used last.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], _Kept] = OrderedDict()

    def get(self, view: VersionReader, key: tuple[str, ...]) -> KeyedEntries:
        """Return the entries of a version by its key."""
        found: KeyedEntries = self._get(
            (view.dataset, key),
            view.version,
            lambda: KeyedEntries.of(read_entries(view, None, threads=False), key),
        )
        return found

    def get_over_time(
        self, reader: Reader, key: tuple[str, ...], known_from: int | None, *, with_ids: bool
    ) -> TimedEntries:
        """Return the rows over time of a version with history, or of several versions, by their
        key; `with_ids` as `read_rows_over_time` does.
        """
        schema = reader.schema
        if with_ids:
            schema = add_interval_id(schema)
        versions = reader.versions if isinstance(reader, VersionsOverTime) else (reader.version,)
        found: TimedEntries = self._get(
            (reader.dataset, key, "over time", with_ids),
            versions,
            lambda: TimedEntries.of(
                read_rows_over_time(reader, with_ids=with_ids), schema, key, known_from
            ),
        )
        return found

    def get_served(self, reader: ServedOverTime, key: tuple[str, ...]) -> TimedEntries:
        """Return the rows that a dataset has served, by their key."""
        found: TimedEntries = self._get(
            (reader.dataset, key, "served"),
            reader.commits,
            lambda: TimedEntries.of(reader.rows(), reader.schema, key, reader.known_from),
        )
        return found

    def _get(self, what: tuple[Any, ...], version: Any, read: Callable[[], Any]) -> Any:
        """Return the value kept as `what` in this version; else `read` it, and keep it instead
        of another version's.
        """
        kept = self._kept.pop(what, None)  # taken out, as several threads do this at the same time
        if kept is None or kept.version != version:
            kept = _Kept(version, read())
        self._kept[what] = kept
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return kept.value


def count_stored_rows(reader: Reader | ServedOverTime) -> int:
    """Return the rows in all files of a version, or of several."""
    if isinstance(reader, VersionReader):
        generations = reader.sealed.generations
    else:
        generations = reader.generations
    return sum(generation.rows for generation in generations)
