"""Marks for the records of Arrow batches: where the message of each stands in what it was read from.

The rows of one message and one key are told apart by an ordinal, their number in the order in which they arrive here.
So they have to arrive sorted: by source and offset, then by the key, then by all else that they differ in. That they
have the same ordinals when a batch is run again needs the same rows then; where an expression gives others each time
(`rand()`), a tie is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class MarkedSource:
    """What marks say of one source partition: its `name` there, and the `epoch` in which it is read."""

    name: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Marking:
    """How records are marked.

    `columns` hold, joined with dots, the partition that a record comes from: all of "lake.flights.3", or its end, where
    `stream` is the beginning for all records. `offset` is the column of the number there. `sources` are the partitions
    by that text; marks name others by `prefix` and the text. `exact` says that the same batch gives the same rows
    whenever it is run.
    """

    columns: tuple[str, ...]
    offset: str
    sources: Mapping[str, MarkedSource]
    stream: str = ""
    prefix: str = ""
    exact: bool = True

    @property
    def order(self) -> tuple[str, ...]:
        """The columns that records have to be sorted by, before the key's."""
        return (*reversed(self.columns), self.offset)


class Marks:
    """Marks of the batches of one task, which arrive in order."""

    def __init__(self, marking: Marking, key: Sequence[str], what: str) -> None:
        self._marking, self._key, self._what = marking, tuple(key), what
        self._last: tuple[Any, ...] | None = None
        self._ordinal = 0

    def of(self, batch: Any) -> tuple[Any, Any]:
        """Return the sources and the positions (`position_of`) of a batch's records, as Arrow arrays of text."""
        import pyarrow as pa
        import pyarrow.compute as pc

        encoded = self._places(batch).dictionary_encode()
        sources = [self._source(text) for text in encoded.dictionary.to_pylist()]
        names = pa.array([source.name for source in sources], pa.string())
        epochs = pa.array([f"{source.epoch:010d}" for source in sources], pa.string())
        ordinals = self._ordinals(batch, encoded.indices)
        positions = pc.binary_join_element_wise(
            epochs.take(encoded.indices), _digits(batch.column(self._marking.offset), 20), _digits(ordinals, 6), ":"
        )
        return names.take(encoded.indices), positions

    def _places(self, batch: Any) -> Any:
        import pyarrow as pa
        import pyarrow.compute as pc

        columns = [batch.column(name) for name in self._marking.columns]
        if len(columns) == 1:
            return columns[0]
        return pc.binary_join_element_wise(*[column.cast(pa.string()) for column in columns], ".")

    def _source(self, place: Any) -> MarkedSource:
        text = f"{self._marking.stream}.{place}" if self._marking.stream else str(place)
        return self._marking.sources.get(text) or MarkedSource(self._marking.prefix + text)

    def _ordinals(self, batch: Any, places: Any) -> Any:
        """Number the rows of one message and one key; nearly all messages have one."""
        import numpy as np
        import pyarrow as pa

        count = batch.num_rows
        offsets = batch.column(self._marking.offset).to_numpy(zero_copy_only=False)
        where = places.to_numpy(zero_copy_only=False)
        ordinals = np.zeros(count, dtype=np.int64)
        if not count:
            return pa.array(ordinals)
        again = np.flatnonzero((offsets[1:] == offsets[:-1]) & (where[1:] == where[:-1])) + 1
        keys = [batch.column(name) for name in self._key]

        def message(row: int) -> tuple[Any, ...]:
            place = self._places(batch.slice(row, 1))[0].as_py()
            return (place, int(offsets[row]), *(column[row].as_py() for column in keys))

        if self._last is not None and message(0) == self._last:
            ordinals[0] = self._tie(self._ordinal, self._last)
        for row in again.tolist():
            here = message(row)
            if here == message(row - 1):
                ordinals[row] = self._tie(int(ordinals[row - 1]), here)
        self._last, self._ordinal = message(count - 1), int(ordinals[-1])
        return pa.array(ordinals)

    def _tie(self, ordinal: int, message: tuple[Any, ...]) -> int:
        if not self._marking.exact:
            place, offset, *key = message
            raise ConfigurationError(
                f"{self._what}: the message at offset {offset} of {place} gives several records of the key "
                f"{key[0] if len(key) == 1 else tuple(key)!r}, and their expressions give others each time they are "
                "computed: when a batch is run again, nobody could tell which of them the table has.",
                "Leave out rand(), uuid() and the like before this table, or have one record of a key in a message.",
                operator=self._what,
            )
        return ordinal + 1


def _digits(column: Any, width: int) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.utf8_lpad(column.cast(pa.int64()).cast(pa.string()), width=width, padding="0")
