"""The net changes between two states of a table, by key."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.schemas.equality import differing_values

OPERATION = "op"
_BEFORE = "__before"
_AFTER = "__after"


def net_changes(before: pa.Table, after: pa.Table, key: Sequence[str], what: str) -> pa.Table:
    """Return what turns the rows `before` into those `after`, with the operation in the column
    `op`: "delete", "insert", "update".

    Rows that are equal in both are left out; NaN equals NaN. The order depends on the rows alone:
    deletions by key, then insertions and updates by key. Raises AdmittedFileError if two rows of
    one side have the same key.
    """
    for side in (before, after):
        _check_unique(side, key, what)
    left = before.select(key).append_column(_BEFORE, _numbers(before.num_rows))
    right = after.select(key).append_column(_AFTER, _numbers(after.num_rows))
    pairs = left.join(right, keys=list(key), join_type="full outer")
    # By key, the place of its row in each table, null where the table does not have the key.
    place_before = pairs.column(_BEFORE)
    place_after = pairs.column(_AFTER)
    deleted = place_before.filter(pc.is_null(place_after))
    inserted = place_after.filter(pc.is_null(place_before))
    in_both = pc.and_(pc.is_valid(place_before), pc.is_valid(place_after))
    kept_before = place_before.filter(in_both)
    kept_after = place_after.filter(in_both)
    differs = _differ(before.take(kept_before), after.take(kept_after), after.column_names, key)
    updated = kept_after.filter(pa.array(differs))
    written = pa.concat_tables(
        [
            with_operation(after.take(inserted), "insert"),
            with_operation(after.take(updated), "update"),
        ]
    )
    return pa.concat_tables(
        [
            sort_by_key(with_operation(before.take(deleted), "delete"), key),
            sort_by_key(written, key),
        ]
    )


def with_operation(rows: pa.Table, operation: str) -> pa.Table:
    """Return rows with their operation in the column `op`."""
    return rows.append_column(OPERATION, pa.array([operation] * rows.num_rows, pa.string()))


def sort_by_key(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return the rows in the order of their keys."""
    if rows.num_rows < 2:
        return rows
    return rows.take(pc.sort_indices(rows, [(name, "ascending") for name in key]))


def _numbers(count: int) -> pa.Array:
    return pa.array(np.arange(count, dtype=np.int64))


def _check_unique(rows: pa.Table, key: Sequence[str], what: str) -> None:
    """Raise AdmittedFileError if a key occurs twice: which of the rows counts is not known."""
    counted = rows.select(key).group_by(list(key)).aggregate([([], "count_all")])
    if counted.num_rows == rows.num_rows:
        return
    twice = rows.num_rows - counted.num_rows
    raise errors.AdmittedFileError(
        f"{what} has several rows of one key ({', '.join(key)}): {twice} of the rows that changed"
        " repeat a key, so it is not known what became of it.",
        "Declare a key that is unique in the table, or remove the duplicates there.",
        rule="unique",
    )


def _differ(was: pa.Table, now: pa.Table, names: Sequence[str], key: Sequence[str]) -> np.ndarray:
    """Return whether the rows of two tables differ, one by one, in a column of these `names` that
    is not in the key.
    """
    differs = np.zeros(now.num_rows, np.bool_)
    for name in names:
        if name not in key:
            left = was.column(name).combine_chunks()
            right = now.column(name).combine_chunks()
            differs |= differing_values(left, right)
    return differs
