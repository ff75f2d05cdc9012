"""Two tables of entries compared by their keys: pure functions over Arrow, a column at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_CODES = 2**62
_ANCHORS = 32


@dataclass(frozen=True, slots=True)
class Compared:
    """What two tables have in common, and what not, as row numbers (numpy).

    `added` are rows of the new table whose key the old one has not, `removed` rows of the old table the other way
    round. `before` and `after` are the rows of keys in both whose values differ, in the same order.
    """

    added: Any
    removed: Any
    before: Any
    after: Any
    unchanged: int


def compare(old: pa.Table, new: pa.Table, key: Sequence[str], values: Sequence[str]) -> Compared | None:
    """Compare the rows with equal key in the columns `values`; None when a key stands twice in a table.

    A null equals a null and a NaN a NaN. The tables may have further columns, which only travel along. The columns
    compared have the same type in both (see `common_type`).
    """
    import numpy as np
    import pyarrow as pa

    if old.num_rows == new.num_rows and all(old.column(name).equals(new.column(name)) for name in key):
        at = np.arange(new.num_rows)
    else:
        both = key_codes([_joined(old.column(name), new.column(name)) for name in key])
        at = _rows_of(both.slice(0, old.num_rows), both.slice(old.num_rows))
    stays = at >= 0
    known = np.zeros(old.num_rows, np.bool_)
    known[at[stays]] = True
    if np.count_nonzero(known) != np.count_nonzero(stays):
        return None
    rows = at[stays]
    # Sorted files have their common keys in the same order: a filter is cheaper than to take rows one by one.
    ordered = bool(np.all(rows[1:] > rows[:-1]))
    there = pa.array(known) if ordered else pa.array(rows)
    every_old, every_new, common = ordered and bool(known.all()), bool(stays.all()), pa.array(stays)
    differs = np.zeros(rows.size, np.bool_)
    for name in values:
        before, after = old.column(name), new.column(name)
        if not every_old:
            before = before.filter(there) if ordered else before.take(there)
        differs |= _differing(before, after if every_new else after.filter(common))
    return Compared(
        added=np.nonzero(~stays)[0],
        removed=np.nonzero(~known)[0],
        before=rows[differs],
        after=np.nonzero(stays)[0][differs],
        unchanged=int(np.count_nonzero(~differs)),
    )


def _rows_of(old: pa.ChunkedArray, new: pa.ChunkedArray) -> Any:
    """Return for each value of `new` its row in `old`, or -1.

    Sorted versions that differ little are the same sequence with rows left out here and there, so most rows are found
    by guessing: every 32nd value of `old` is looked up, and what follows it is taken to lie at the same distance. Each
    guess is checked; only rows that it missed are looked up in a hash table of values, which is what costs time.
    """
    import numpy as np
    import pyarrow.compute as pc

    at = np.full(len(new), -1, np.int64)
    if not len(old) or not len(new):
        return at
    anchors = np.arange(0, len(old), _ANCHORS)
    hits = pc.index_in(new, value_set=old.take(anchors))
    matched = np.nonzero(hits.is_valid().to_numpy())[0]
    if matched.size:
        distance = anchors[hits.take(matched).to_numpy()] - matched
        rows_until_next = np.diff(np.append(matched, len(new)))
        guess = np.arange(len(new)) + np.concatenate(
            [np.repeat(distance[:1], matched[0]), np.repeat(distance, rows_until_next)]
        )
        right = (guess >= 0) & (guess < len(old))
        right &= pc.equal(new, old.take(np.where(right, guess, 0))).to_numpy()
        at[right] = guess[right]
    missed = np.nonzero(at < 0)[0]
    if missed.size:
        taken = np.zeros(len(old), np.bool_)
        taken[at[at >= 0]] = True
        left = np.nonzero(~taken)[0]
        rest = pc.index_in(new.take(missed), value_set=old.take(left))
        hit = rest.is_valid().to_numpy()
        at[missed[hit]] = left[rest.drop_null().to_numpy()]
    return at


def key_codes(columns: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    """Return one column whose values are equal where all of `columns` are: itself, or numbers for several."""
    import numpy as np
    import pyarrow as pa

    if len(columns) == 1:
        return columns[0]
    codes: Any = np.zeros(len(columns[0]), np.int64)
    span = 1
    for column in columns:
        numbers, count = _numbered(column)
        if span * count > _CODES:
            codes, span = _numbered(pa.chunked_array([pa.array(codes)]))
        codes = codes * count + numbers
        span *= count
    return pa.chunked_array([pa.array(codes, pa.int64())])


def smallest(table: pa.Table, rows: Any, key: Sequence[str], count: int) -> pa.Table:
    """Return of these rows (numpy) the `count` with the smallest keys, in order."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not count or not len(rows):
        return table.schema.empty_table()  # a slice would keep the whole table in memory
    names = [f"k{index}" for index in range(len(key))]  # Arrow reads a dot in a name as a path
    keys = pa.table([table.column(name).take(rows) for name in key], names=names)
    order = [(name, "ascending") for name in names]
    return table.take(rows[pc.select_k_unstable(keys, k=min(count, len(rows)), sort_keys=order).to_numpy()])


def common_type(old: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    """Return a type that holds every value of both exactly; None where there is none."""
    import pyarrow as pa
    import pyarrow.types as t

    if old.equals(new):
        return old
    if not any(kind(old) and kind(new) for kind in (t.is_signed_integer, t.is_floating, t.is_decimal)):
        return None
    schemas = [pa.schema([pa.field("value", kind)]) for kind in (old, new)]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type


def _joined(old: pa.ChunkedArray, new: pa.ChunkedArray) -> pa.ChunkedArray:
    import pyarrow as pa

    return pa.chunked_array([*old.chunks, *new.chunks], old.type)


def _numbered(column: pa.ChunkedArray) -> tuple[Any, int]:
    """Return a number for each row, equal where the values are, and how many numbers there are (1 or more)."""
    import numpy as np

    encoded = column.dictionary_encode().unify_dictionaries()
    if not encoded.num_chunks:
        return np.zeros(0, np.int64), 1
    numbers = np.concatenate([chunk.indices.to_numpy().astype(np.int64) for chunk in encoded.chunks])
    return numbers, max(1, len(encoded.chunk(0).dictionary))


def _differing(old: pa.ChunkedArray, new: pa.ChunkedArray) -> Any:
    """Return where the two differ, as a numpy mask."""
    import numpy as np
    import pyarrow.compute as pc
    import pyarrow.types as t

    differs = pc.not_equal(old, new)
    if t.is_floating(old.type):
        differs = pc.and_not(differs, pc.and_(pc.is_nan(old), pc.is_nan(new)))
    if old.null_count or new.null_count:
        differs = pc.or_(pc.fill_null(differs, False), pc.xor(pc.is_null(old), pc.is_null(new)))
    return np.asarray(differs.to_numpy(), np.bool_)
