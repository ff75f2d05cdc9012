"""What operators over time leave out in a batch, and what they count of the records that pass them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation

Counters = dict[str, dict[str, int]]


class LeftOut:
    """The records left out, by the operator, and counts that Spark makes as records pass."""

    def __init__(self) -> None:
        self._records: dict[str, DataFrame] = {}
        self._counts: list[tuple[str, Observation]] = []

    def counted(self, operator: str, frame: DataFrame, conditions: Mapping[str, Column]) -> DataFrame:
        """Return the records, counted as they pass: how many meet each condition."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        observation = Observation(f"{operator}-{uuid4().hex}")
        self._counts.append((operator, observation))
        return frame.observe(observation, *[F.count_if(met).alias(name) for name, met in conditions.items()])

    def leave(self, operator: str, records: DataFrame) -> None:
        """Note what an operator has left out, beside what it has noted already."""
        before = self._records.get(operator)
        self._records[operator] = records if before is None else before.unionByName(records)

    def of(self, operator: str) -> DataFrame:
        """Return what an operator has left out."""
        return self._records[operator]

    def counts(self) -> Counters:
        """Return what was counted, by operator, of records that outputs or state have consumed by now."""
        counters: Counters = {}
        for operator, observation in self._counts:
            of_operator = counters.setdefault(operator, {})
            assert observation._jo is not None, "it observes"
            if not observation._jo.getRow().length():  # nothing can come there, so Spark has left it out
                continue
            for name, count in observation.get.items():
                of_operator[name] = of_operator.get(name, 0) + int(count)
        return counters
