"""`AsOfJoin`, which adds the columns of the dataset entry that was valid at the time of the
record.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.orchestration.operators.batch import Batch, Frame, Planned
from dagster_adjunct.orchestration.operators.columns import require_columns
from dagster_adjunct.orchestration.operators.event_time import TIME_TYPES
from dagster_adjunct.orchestration.operators.joins import Join
from dagster_adjunct.orchestration.operators.lookups import BEFORE_HISTORY, NO_TIME, AsOf
from dagster_adjunct.orchestration.operators.operator import Match
from dagster_adjunct.orchestration.operators.stream_facts import CURRENT, Columns
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import OperatorFailedError, PlanningError
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION
from dagster_adjunct.resources.user_code import MASKED, truncate_text


@dataclass(frozen=True, slots=True)
class AsOfJoin(Join):
    """Records with the columns of the entry that was valid at the time in their column
    `as_of.column`.

    A record from before the history of its key, or without a time, may fail the batch.
    """

    kind: ClassVar[str] = "join"
    as_of: AsOf = field(kw_only=True)

    @property
    def match(self) -> Match:
        return Match(self.dataset, self.min_match_rate, as_of=self.as_of)

    def summary(self) -> str:
        return f"{Join.summary(self)} as of {self.as_of.column}"

    def _join_columns(
        self, operator: str, stream: Columns, entries: Columns, dataset: AdjunctDataset
    ) -> Columns:
        step = "Correct as_of=, or join before the column is dropped."
        time = self.as_of.column
        require_columns(operator, "the stream", (time,), stream.names, step)
        kind = (stream.types or {}).get(time)
        if kind is not None and kind not in TIME_TYPES:
            is_text = kind in ("string", "timestamp_ntz")
            converted = f"cast({time} as timestamp)" if is_text else f"timestamp_millis({time})"
            problem = f"{operator}: the stream's {time!r} is {kind}: expected timestamp or date."
            step = f'Convert it first, for example .with_columns({time}="{converted}").'
            raise PlanningError(problem, step, column=time, dataset=self.dataset, operator=operator)
        return Join._join_columns(self, operator, stream, entries, dataset)

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        if batch.planned.reading == CURRENT:
            return Join.compile(self, operator, frames, batch)
        (frame,) = frames
        matched = self._match(operator, frame, batch, self.as_of)
        if self._failing:
            matched = batch.records.materialize(operator, matched)
            failed = batch.records.first(matched, self._failing)
            if failed is not None:
                hidden = batch.planned.sensitive(operator, batch.records.names(frame))
                raise self._time_error(operator, failed, hidden, batch.planned)
        return batch.records.keep_matches(operator, matched, self.how)

    @property
    def _failing(self) -> list[str]:
        """Those of BEFORE_HISTORY and NO_TIME that fail the batch if they are true for a record."""
        fails = {
            BEFORE_HISTORY: self.as_of.before_history == "error",
            NO_TIME: self.as_of.on_null_time == "fail",
        }
        return [name for name, is_failure in fails.items() if is_failure]

    def _time_error(
        self, operator: str, record: Mapping[str, Any], sensitive: Collection[str], planned: Planned
    ) -> OperatorFailedError:
        """Return the error for a record whose time must fail the batch."""
        hidden = {name.lower() for name in sensitive}
        hidden_entries = {name.lower() for name in planned.app.dataset(self.dataset).sensitive}

        def describe(name: str, entry: str = "") -> str:
            is_hidden = name.lower() in hidden or entry.lower() in hidden_entries
            value = record[name]
            value = (
                value.replace(tzinfo=None) if isinstance(value, datetime) else value
            )  # the time is in UTC
            return f"{name} = {MASKED if is_hidden else truncate_text(str(value))}"

        key = ", ".join(describe(stream, entry) for stream, entry in self.on)
        stream = planned.stream_of(operator)
        partition = record[PARTITION]
        offset = str(record[OFFSET])
        place = "" if stream is None else f" (at {stream}.{partition} offset {offset})"
        what = (
            f"from before the history of dataset {self.dataset}:"
            f" {describe(self.as_of.column)}{place}"
        )
        step = (
            'Load the entries of that time, or choose before_history="null" or "oldest" for such'
            " records."
        )
        if record[NO_TIME]:
            what = (
                f"joined with dataset {self.dataset} as of {self.as_of.column}, which is"
                f" null{place}"
            )
            step = 'Correct the record, or join such records with no entry: on_null_time="null".'
        problem = f"{operator}: a record of {key} is {what}."
        return OperatorFailedError(
            problem, step, operator=operator, stream=stream, partition=partition, offset=offset
        )


def check_as_of(operator: str, dataset: AdjunctDataset, as_of: str) -> None:
    """Raise ConfigurationError for an empty `as_of`, and PlanningError for a dataset without a
    history.
    """
    if not as_of:
        expected = "the name of the stream's column with the record's time, a timestamp or a date"
        raise argument_error(
            f"{operator} has as_of={as_of!r}", expected, argument="as_of", operator=operator
        )
    if dataset.over_time:
        return
    if dataset.is_local:
        problem = "is a local table, which keeps current entries only"
        step = "Join it without as_of=, or use an unbounded dataset with history=."
    elif dataset.follows_changes:
        problem = "keeps no history"
        step = 'Declare it with history=timedelta(days=…), or "all".'
    else:
        problem = "does not declare from when its versions are valid"
        step = 'Declare it, for example valid_from="name".'
    problem = f"{operator}: dataset {dataset.name!r} is joined as of a time, but {problem}."
    raise PlanningError(problem, step, dataset=dataset.name, operator=operator)
