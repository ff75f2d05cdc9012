"""Operators with several inputs as planning sees them: a join of two streams, a window, records of several streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.operator import (
    ComparedColumn,
    Flow,
    PlanContext,
    Requirement,
    Spec,
    merge_flows,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.columns import Types
    from dagster_adjunct.orchestration.operators.operator import Declarations
    from dagster_adjunct.orchestration.step.batch import BatchContext


class Planned(Spec):
    """An operator that is planned only."""

    __slots__ = ()

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class StreamJoin(Planned):
    """Records of streams that have the same key: each input by its own `columns`, in equally many partitions."""

    kind: ClassVar[str] = "stream-join"
    columns: tuple[tuple[str, ...], ...]

    def summary(self) -> str:
        return " = ".join(map(", ".join, self.columns))

    def requirements(self, app: Declarations) -> Sequence[Requirement | None]:
        return [Requirement(None, None, columns) for columns in self.columns]

    def compared_columns(self, context: PlanContext, arriving: Sequence[Types]) -> Sequence[ComparedColumn]:
        first, *others = [
            [(types or {}).get(name) for name in by] for by, types in zip(self.columns, arriving, strict=True)
        ]
        return [
            ComparedColumn(self.columns[0][at], first[at], f"{self.columns[number][at]!r} of input {number + 1}", kind)
            for number, types in enumerate(others, 1)
            for at, kind in enumerate(types)
        ]

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return arriving[0]


@dataclass(frozen=True, slots=True)
class Window(Planned):
    """Counts by key: records of one key have to be together, in however many partitions."""

    kind: ClassVar[str] = "window"
    columns: tuple[str, ...]

    def summary(self) -> str:
        return f"counts by {', '.join(self.columns)}"

    def requirements(self, app: Declarations) -> Sequence[Requirement | None]:
        return [Requirement(None, None, self.columns)]

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return replace(arriving[0], columns=(*self.columns, "count"))


@dataclass(frozen=True, slots=True)
class Together(Planned):
    """The records of all inputs, which lie as all of them do."""

    kind: ClassVar[str] = "together"

    def summary(self) -> str:
        return "all records"

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return merge_flows(context, arriving)


BY_K = StreamJoin((("k",), ("k",)))
