"""Counts what a join found, while it runs and without a second pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dagster_adjunct.orchestration.operators.joins.join_arguments import BEFORE_HISTORY, MATCHED, NO_TIME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_BY_TIME = {BEFORE_HISTORY: "before_history", NO_TIME: "null_times"}


def as_it_is(frame: DataFrame) -> DataFrame:
    """Return the same records, of which Spark moves nothing past this place: they are counted here, for nobody."""
    from pyspark.sql import functions as F

    return frame.observe(f"here-{uuid4().hex}", F.count(F.lit(1)))


class JoinCounts:
    """Rows that came to one join, and those of them that met no entry of the dataset; of a join by time also those from
    before the history, and those without a time.

    Spark counts them as the rows pass, so `result` is there once an output has consumed them all. `metric` is what the
    counting is called in Spark's plans.
    """

    def __init__(self, name: str) -> None:
        from pyspark.sql import Observation

        self.name, self.metric = name, f"{name}-{uuid4().hex}"
        self._observation = Observation(self.metric)

    def observe(self, joined: DataFrame) -> DataFrame:
        """Return `joined`, counted; it has the column `__matched`, null where no entry was met."""
        from pyspark.sql import functions as F

        return joined.observe(
            self._observation,
            F.count(F.lit(1)).alias("rows"),
            F.count_if(F.col(MATCHED).isNull()).alias("unmatched"),
            *[F.count_if(told).alias(name) for told, name in _BY_TIME.items() if told in joined.columns],
        )

    def result(self) -> dict[str, int]:
        """Return {"rows", "unmatched"}, of a join by time also {"before_history", "null_times"}.

        Waits for the output if it has not run yet.
        """
        counts: dict[str, Any] = self._observation.get
        return {name: int(value) for name, value in counts.items()}
