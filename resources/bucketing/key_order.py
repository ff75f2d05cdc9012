"""The order of rows in a sealed file: ascending by key. Lookups search in it, and joins use it instead of sorting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dagster_adjunct.resources.errors import ManifestMismatchError


def check_key_order(key: Sequence[str], what: str, last: pa.Table | None, rows: pa.Table) -> None:
    """Raise ManifestMismatchError unless keys ascend within `rows` and from `last`, the row before them.

    Keys have no nulls; equal keys may be adjacent.
    """
    if not key:
        return

    pairs = [(rows.slice(0, rows.num_rows - 1), rows.slice(1))]
    if last is not None:
        pairs.append((last, rows.slice(0, 1)))
    if any(pc.any(_descends(key, before, after)).as_py() for before, after in pairs):
        raise ManifestMismatchError(
            f"{what}: rows reached their file in another order than that of {', '.join(key)}.",
            "Nothing was committed. Report this as a bug, with the physical plan.",
        )


def _descends(key: Sequence[str], before: pa.Table, after: pa.Table) -> Any:
    """Return for each pair of rows whether the first key is greater."""
    greater = equal = None
    for name in key:
        one, other = before.column(name), after.column(name)
        here = pc.greater(one, other)
        greater = here if equal is None else pc.or_(greater, pc.and_(equal, here))
        same = pc.equal(one, other)
        equal = same if equal is None else pc.and_(equal, same)
    return greater
