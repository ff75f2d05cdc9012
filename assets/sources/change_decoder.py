"""What makes changes of a stream's records: Spark, or this process with all of them in memory.

Both make the same changes of the same records, and refuse the same ones with the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.changes.change_order import Samples
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.opened_stream import Ranges, Source

Rows = TypeVar("Rows")


class ChangeDecoder(Protocol[Rows]):
    """Reads changes, and sets aside those that can't be applied. `Rows` is what it holds them as.

    Changes have the columns of the entries, those of META, `__position`, and PROBLEM: why one can't be applied.
    """

    def check(self, source: Source) -> None:
        """Raise ConfigurationError for a dataset whose changes it can't read."""
        ...

    def read_changes(
        self, source: Source, ranges: Ranges, *, positions_from: int = 0, samples: Samples | None = None
    ) -> tuple[Rows, Samples | None]:
        """Return the changes of entries that the records of these ranges make, and the first values of their order.

        Positions by offset begin at `positions_from`. `samples` are the first values where there were changes before.
        Raises SchemaMismatchError where the first change can't be ordered.
        """
        ...

    def without_late(
        self, changes: Rows, horizon: int | None, on_bad_change: object
    ) -> tuple[Rows, Callable[[], int] | None]:
        """Return the changes above the horizon, and what counts the others once the rest is written.

        With dead letters they become a problem of theirs instead.
        """
        ...

    def refuse_problems(self, changes: Rows, dataset: str) -> Rows:
        """Return the changes without PROBLEM; at one that has any, BadChangeError is raised by the time of writing."""
        ...

    def without_problems(self, changes: Rows) -> Rows:
        """Return the changes that can be applied."""
        ...

    def letters(self, changes: Rows, spec: AdjunctDataset, incomplete: Sequence[tuple[int, int, str]]) -> Rows | None:
        """Return the dead letters of the changes that can't be applied, None where there are none.

        `incomplete` are the partition, offset and reason of further ones.
        """
        ...
