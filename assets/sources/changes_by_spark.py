"""Changes decoded by Spark: of any format, and as many as there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.change_dead_letters import letters_of, with_reasons, without_problems
from dagster_adjunct.assets.sources.decode_changes import refuse_problems
from dagster_adjunct.assets.sources.order_by_column import without_late

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.assets.declaration.changes.change_order import Samples
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.opened_stream import Ranges, Source


@dataclass(frozen=True, slots=True)
class SparkDecoder:
    """A ChangeDecoder over frames; the session is started by the first read."""

    session: Callable[[], SparkSession]

    def check(self, source: Source) -> None:
        return

    def read_changes(
        self, source: Source, ranges: Ranges, *, positions_from: int = 0, samples: Samples | None = None
    ) -> tuple[DataFrame, Samples | None]:
        return source.read_changes(self.session(), ranges, positions_from=positions_from, samples=samples)

    def without_late(
        self, changes: DataFrame, horizon: int | None, on_bad_change: object
    ) -> tuple[DataFrame, Callable[[], int] | None]:
        return without_late(changes, horizon, on_bad_change)

    def refuse_problems(self, changes: DataFrame, dataset: str) -> DataFrame:
        return refuse_problems(changes, dataset)

    def without_problems(self, changes: DataFrame) -> DataFrame:
        return without_problems(changes)

    def letters(
        self, changes: DataFrame, spec: AdjunctDataset, incomplete: Sequence[tuple[int, int, str]]
    ) -> DataFrame | None:
        if incomplete:
            changes = with_reasons(changes, incomplete)
        letters = letters_of(changes, spec)
        return None if letters.isEmpty() else letters
