"""`Expect`, which checks records against a condition, and `FailedRecords`, those that it diverts.

The words and the default are those of Delta Live Tables' expectations: a record that fails is kept
and counted, dropped, or fails the batch. Null fails, as it does there and in a filter; to accept
it, the condition says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from dagster_adjunct.orchestration.operators.batch import Batch, Checked, Frame
from dagster_adjunct.orchestration.operators.columns import ORIGIN, check_new_names
from dagster_adjunct.orchestration.operators.operator import (
    Expectation,
    OnFail,
    PassThroughSpec,
    PlanContext,
    expressions_need,
)
from dagster_adjunct.orchestration.operators.stream_facts import ColumnFacts, Columns
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import ExpectationError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.schemas.paths import column_of, value_of
from dagster_adjunct.resources.schemas.schema import quote_name, quote_text
from dagster_adjunct.resources.sql.checking import check_condition
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION
from dagster_adjunct.resources.user_code import MASKED, format_record, truncate_text

_FAILED = "__failed"
FAILED_RULE = "failed_rule"


@dataclass(frozen=True, slots=True)
class Expect(PassThroughSpec):
    """The records, checked against an expectation; those that fail it are counted, and kept only
    with on_fail="warn".
    """

    kind: ClassVar[str] = "expect"
    expectation: Expectation

    def summary(self) -> str:
        return f"{self.expectation.condition}, else {self.expectation.on_fail}"

    @property
    def sql(self) -> Sequence[str]:
        return (self.expectation.condition,)

    @property
    def keeps_each(self) -> bool:
        return self.expectation.on_fail in ("warn", "fail")

    @property
    def diverts(self) -> str:
        if self.expectation.on_fail == "letter":
            return "failed_records"
        return ""

    @property
    def _failed(self) -> str:
        """The SQL condition of records that fail; the line break ends a comment that the user's
        condition may have.
        """
        return f"not coalesce(({self.expectation.condition}\n), false)"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        condition = self.expectation.condition
        check_condition(context.operator, condition, columns.names, columns.types)
        return columns

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        (columns,) = arriving
        return expressions_need((self._failed,), columns)

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        """Count the records that fail; return those that are kept, or raise ExpectationError."""
        records = batch.records
        (frame,) = frames
        # A condition of unknown type is not boolean in every case: Spark would convert it.
        self.check_columns(operator, [records.columns(frame)], batch.planned.app)
        places = self._places(operator, records.names(frame), batch)
        flagged = records.with_columns(frame, ((_FAILED, self._failed),))
        checked = Checked(_FAILED, places.shown, places.describe)
        flagged = records.count_failed(operator, flagged, checked)
        on_fail = self.expectation.on_fail
        if on_fail == "fail":
            flagged = records.materialize(operator, flagged)
            failed = records.first(flagged, (_FAILED,))
            if failed is not None:
                raise self._error(operator, failed, places)
        if on_fail == "letter" and batch.planned.has_diverted_consumer(operator):
            flagged = records.materialize(operator, flagged)
            records.divert(operator, records.filter(flagged, _FAILED))
        if on_fail != "warn":
            kept = records.filter(flagged, f"not {_FAILED}")
        else:
            kept = flagged
        return records.select(kept, _quote_all(records.names(frame)))

    def _places(self, operator: str, names: Sequence[str], batch: Batch[Frame]) -> _Places:
        """Return how records with columns of these names are named in errors and counts."""
        hidden = set(map(str.lower, batch.planned.sensitive(operator, names)))
        shown: list[str] = []
        masked: list[str] = []
        for key in batch.planned.required_partitioning(operator):
            column = column_of(key, names)
            if key.lower() in hidden or column.lower() in hidden:
                masked.append(key)
            else:
                shown.append(key)
        stream = batch.planned.stream_of(operator)
        return _Places(stream, tuple(shown), tuple(masked), frozenset(hidden))

    def _error(self, operator: str, record: Mapping[str, Any], places: _Places) -> ExpectationError:
        """Return the error for a record that fails."""
        expected = self.expectation
        problem = (
            f"{operator}: a record does not meet {expected.name!r} ({expected.condition}):"
            f" {places.describe(record)}."
        )
        step = (
            "Nothing of the batch is written. Correct the condition; or let such records pass,"
            ' on_fail="warn", or divert them, on_fail="letter".'
        )
        return ExpectationError(
            problem,
            step,
            operator=operator,
            expectation=expected.name,
            stream=places.stream_of(record),
            partition=record[PARTITION],
            offset=str(record[OFFSET]),
            record=format_record(record, places.hidden),
        )


@dataclass(frozen=True, slots=True)
class _Places:
    """How records are named: by position, and by the columns, or paths of values, that they are
    partitioned by; values of the `masked` ones are not shown.

    `hidden` are the sensitive columns, in lower case. `stream` has the positions, None if there are
    several.
    """

    stream: str | None
    shown: tuple[str, ...]
    masked: tuple[str, ...]
    hidden: frozenset[str]

    def stream_of(self, record: Mapping[str, Any]) -> str | None:
        """Return the stream that has the position of a record; None if it is unknown."""
        return self.stream or record.get(ORIGIN) or None

    def describe(self, record: Mapping[str, Any]) -> str:
        """Return the key and the position of a record."""
        key = []
        for name in self.shown:
            value = value_of(record, name)
            if isinstance(value, datetime):
                value = value.replace(tzinfo=None)  # the time is in UTC
            key.append(f"{name} = {truncate_text(str(value))}")
        for name in self.masked:
            key.append(f"{name} = {MASKED}")
        stream = self.stream_of(record)
        if stream is not None:
            place = f"{stream}.{record[PARTITION]} offset {record[OFFSET]}"
        else:
            place = f"partition {record[PARTITION]} offset {record[OFFSET]}"
        if not key:
            return place
        return f"{', '.join(key)} at {place}"


@dataclass(frozen=True, slots=True)
class FailedRecords(PassThroughSpec):
    """The records that the expectation before this diverted, with its name in a column."""

    kind: ClassVar[str] = "failed-records"
    keeps_each: ClassVar[bool] = False
    reads_diverted: ClassVar[bool] = True
    works_without_spark: ClassVar[bool] = True
    rule: str

    def summary(self) -> str:
        return f"records that fail {self.rule}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        step = f"Rename the column {FAILED_RULE!r} before expect(): it gets the expectation's name."
        check_new_names(context.operator, [*columns.known, FAILED_RULE], step)
        return columns.add({FAILED_RULE: ColumnFacts("string")})

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        records = batch.records
        failed = records.diverted(operator)
        names = [name for name in records.names(failed) if name != _FAILED]
        rule = f"{quote_text(self.rule)} as {FAILED_RULE}"
        return records.select(failed, [*_quote_all(names), rule])


def _quote_all(names: Sequence[str]) -> list[str]:
    """Return the Spark SQL expressions of columns of these names."""
    return [quote_name(name) for name in names]


def build_expect(operator: str, condition: str, name: str, on_fail: OnFail) -> Expect:
    """Return the expectation for a user's arguments; `operator` is its id, for errors."""
    check_name("expectation", name)
    if not condition.strip():
        found = f"{operator} got {condition!r}"
        raise argument_error(found, "a Spark SQL condition", argument="condition")
    return Expect(Expectation(name, condition, on_fail))
