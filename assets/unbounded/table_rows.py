"""What reads the stored rows of a table and merges them: Spark, or this process with all of them in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout, Generation
    from dagster_adjunct.resources.objects.object_store import ObjectStore

Rows = TypeVar("Rows")


class TableRows(Protocol[Rows]):
    """Works on the rows of generations, which have `__position`, `__tombstone` and the number `__gen` beside columns.

    Of a key the row with the highest (position, generation) wins.
    """

    def stored(self, store: ObjectStore, what: str, layout: BucketLayout, generations: Sequence[Generation]) -> Rows:
        """Return all rows of these generations. Raises ManifestMismatchError for files that are not as listed."""
        ...

    def positions(self, rows: Rows) -> tuple[int | None, int | None]:
        """Return the lowest and the highest position of these rows, None where there are none."""
        ...

    def without_forgotten(
        self, rows: Rows, key: tuple[str, ...], horizon: int | None
    ) -> tuple[Rows, Callable[[], dict[str, int]]]:
        """Return the winner of each key but for tombstones up to the horizon, and what counts them once written.

        Counted are "keys", what is "forgotten", and the "tombstones" that stay.
        """
        ...

    def not_expired(self, rows: Rows, expires: str, watermark: datetime) -> Rows:
        """Return the rows whose time, in the column `expires`, the watermark has not reached."""
        ...

    def at_stored_positions(self, changes: Rows, stored: Rows, key: tuple[str, ...]) -> Rows:
        """Return the changes with positions no lower than those that the table holds of their keys."""
        ...

    def late_beside(self, changes: Rows, stored: Rows, key: tuple[str, ...], horizon: int) -> tuple[Rows, Rows, int]:
        """Return the changes that a forgotten deletion can't beat; all, with such a problem on the others; how many.

        Beaten may be all changes of a key that the table does not hold, where the newest is not above the horizon.
        Where it is a deletion they are left out: there is nothing to delete, and the deletion that counts may be
        another.
        """
        ...
