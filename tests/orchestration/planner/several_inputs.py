"""Operators with several inputs as planning sees them: a join of two streams, a window, records
of several streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.operator import (
    ComparedColumn,
    Flow,
    PassThroughSpec,
    PlanContext,
    Requirement,
    check_equal_types,
    merge_flows,
)
from dagster_adjunct.orchestration.operators.stream_facts import ColumnFacts, Columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.batch import SparkBatch


class Planned(PassThroughSpec):
    """An operator that is planned only."""

    __slots__ = ()

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class StreamJoin(Planned):
    """Records of streams that have the same key: each input by its own `columns`, in equally
    many partitions.
    """

    kind: ClassVar[str] = "stream-join"
    columns: tuple[tuple[str, ...], ...]

    def summary(self) -> str:
        return " = ".join(map(", ".join, self.columns))

    def requirements(self, app: Application) -> Sequence[Requirement | None]:
        return [Requirement(None, None, columns) for columns in self.columns]

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        first, *others = [
            [(one.types or {}).get(name) for name in by]
            for by, one in zip(self.columns, arriving, strict=True)
        ]
        context.compared.extend(
            ComparedColumn(
                self.columns[0][at],
                first[at],
                f"{self.columns[number][at]!r} of input {number + 1}",
                kind,
            )
            for number, types in enumerate(others, 1)
            for at, kind in enumerate(types)
        )
        check_equal_types(context.operator, context.compared)
        return arriving[0]


@dataclass(frozen=True, slots=True)
class Window(Planned):
    """Counts by key: records of one key have to be together, in however many partitions."""

    kind: ClassVar[str] = "window"
    columns: tuple[str, ...]

    def summary(self) -> str:
        return f"counts by {', '.join(self.columns)}"

    def requirements(self, app: Application) -> Sequence[Requirement | None]:
        return [Requirement(None, None, self.columns)]

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        kept = {name: arriving[0].known.get(name, ColumnFacts()) for name in self.columns}
        return Columns(kept | {"count": ColumnFacts("bigint")})


@dataclass(frozen=True, slots=True)
class Together(Planned):
    """The records of all inputs, which lie as all of them do."""

    kind: ClassVar[str] = "together"

    def summary(self) -> str:
        return "all records"

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return merge_flows(context, arriving)


BY_K = StreamJoin((("k",), ("k",)))
