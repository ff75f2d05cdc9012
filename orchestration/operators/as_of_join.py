"""`AsOfJoin`, which adds the columns of the dataset entry that was valid at the time of the
record.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.interval_ids import INTERVAL_ID
from dagster_adjunct.orchestration.operators.batch import Batch, Frame, Planned
from dagster_adjunct.orchestration.operators.event_times import TIME_TYPES
from dagster_adjunct.orchestration.operators.joins import Join
from dagster_adjunct.orchestration.operators.lookups import (
    BEFORE_HISTORY,
    NO_TIME,
    AsOf,
    selects_interval_id,
)
from dagster_adjunct.orchestration.operators.operator import Match
from dagster_adjunct.orchestration.operators.stream_facts import CURRENT, ColumnFacts, Columns
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import OperatorFailedError, PlanningError
from dagster_adjunct.resources.schemas.paths import column_of, flat_name, value_of
from dagster_adjunct.resources.sql.result_types import INTEGERS, NUMBERS
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
        return Match(
            self.dataset,
            self.min_match_rate,
            as_of=self.as_of,
            wait=self.wait,
            restate=self.restate,
            on=self.on,
            selects_interval=selects_interval_id(self.select),
        )

    def summary(self) -> str:
        known = ", as known then" if self.as_of.known_then else ""
        return f"{Join.summary(self)} as of {self.as_of.column}{known}"

    def _join_columns(
        self, operator: str, stream: Columns, entries: Columns, dataset: AdjunctDataset
    ) -> Columns:
        """Return the columns of joined records, with the id of the entry's interval if it is
        selected; raises PlanningError also for a column of the record's time that is missing or no
        time.
        """
        step = "Correct as_of=, or join before the column is dropped."
        time = self.as_of.column
        stream.require(operator, (time,), step)
        stream.require_simple(operator, (time,), "with the record's time")
        kind = stream.type_of(time)
        if kind is not None and kind not in TIME_TYPES:
            problem = f"{operator}: the stream's {time!r} is {kind}: expected timestamp or date."
            converted = expression_of_time(time, kind)
            if converted is None:
                step = "Name a column with the record's time."
            else:
                step = "Convert it first, for example"
                step += f' .with_columns({flat_name(time)}="{converted}").'
            raise PlanningError(problem, step, column=time, dataset=self.dataset, operator=operator)
        if selects_interval_id(self.select) and entries.find(INTERVAL_ID) is None:
            if self.as_of.known_then:
                problem = (
                    f"{operator} has versions='known-then' and select={INTERVAL_ID!r}: what was"
                    " served has no intervals."
                )
                raise PlanningError(
                    problem, "Leave one of them out.", dataset=self.dataset, operator=operator
                )
            entries = entries.add(
                {INTERVAL_ID: ColumnFacts("string")}, typed=entries.types is not None
            )
        return Join._join_columns(self, operator, stream, entries, dataset)

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        """Return the joined records; raises OperatorFailedError for one whose time must fail."""
        if batch.planned.reading == CURRENT:  # current entries, whatever the records' times are
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
        failing = []
        if self.as_of.before_history == "error":
            failing.append(BEFORE_HISTORY)
        if self.as_of.on_null_time == "fail":
            failing.append(NO_TIME)
        return failing

    def _time_error(
        self, operator: str, record: Mapping[str, Any], sensitive: Collection[str], planned: Planned
    ) -> OperatorFailedError:
        """Return the error for a record whose time must fail the batch: it is null, or from before
        the history or before what was served is known.
        """
        # A key has one value on both sides, so it is hidden if it is sensitive on one of them.
        hidden = set(map(str.lower, sensitive))
        hidden_entries = set(map(str.lower, planned.app.dataset(self.dataset).masked))
        for own, entry in self.on:
            if entry.lower() in hidden_entries:
                hidden.add(own.lower())
        key = ", ".join(_describe(record, name, hidden) for name in dict(self.on))
        stream = planned.stream_of(operator)
        partition = record[PARTITION]
        offset = str(record[OFFSET])
        place = ""
        if stream is not None:
            place = f" (at {stream}.{partition} offset {offset})"
        time = _describe(record, self.as_of.column, hidden)
        if record[NO_TIME]:
            what = (
                f"joined with dataset {self.dataset} as of {self.as_of.column}, which is"
                f" null{place}"
            )
            step = 'Correct the record, or join such records with no entry: on_null_time="null".'
        elif self.as_of.known_then:
            what = f"from before what is known of dataset {self.dataset} was served: {time}{place}"
            step = (
                'Choose before_history="null" for such records; to keep what is served for longer,'
                " discard=DiscardPolicy(keep=…, grace=…)."
            )
        else:
            what = f"from before the history of dataset {self.dataset}: {time}{place}"
            step = (
                'Load the entries of that time, or choose before_history="null" or "oldest" for'
                " such records."
            )
        problem = f"{operator}: a record of {key} is {what}."
        return OperatorFailedError(
            problem, step, operator=operator, stream=stream, partition=partition, offset=offset
        )


def _describe(record: Mapping[str, Any], name: str, hidden: Collection[str]) -> str:
    """Return a name with its value, which is left out if it or its column is among the `hidden`."""
    value = value_of(record, name)
    if isinstance(value, datetime):
        value = value.replace(tzinfo=None)  # the time is in UTC
    if name.lower() in hidden or column_of(name, record).lower() in hidden:
        return f"{name} = {MASKED}"
    return f"{name} = {truncate_text(str(value))}"


def check_as_of(operator: str, dataset: AdjunctDataset, as_of: AsOf) -> None:
    """Raise ConfigurationError for an empty column, and PlanningError for a dataset without a
    history, or of which nobody knows what it served.
    """
    if not as_of.column:
        expected = "the name of the stream's column with the record's time, a timestamp or a date"
        raise argument_error(
            f"{operator} has as_of={as_of.column!r}", expected, argument="as_of", operator=operator
        )
    if as_of.known_then:
        _check_known_then(operator, dataset, as_of)
        return
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


def _check_known_then(operator: str, dataset: AdjunctDataset, as_of: AsOf) -> None:
    """Raise PlanningError for a dataset of which nobody knows what it served, and for
    before_history="oldest".
    """
    what = f"{operator} has versions='known-then'"
    if as_of.before_history == "oldest":
        raise PlanningError(
            f"{what} and before_history='oldest': before the first known commit nobody knows which"
            " entry was served.",
            'Choose "null" or "error".',
            dataset=dataset.name,
            operator=operator,
        )
    if dataset.is_local or not dataset.persistent:
        kind = "a local table" if dataset.is_local else "a table of one run (persistent=False)"
        raise PlanningError(
            f"{what}, but dataset {dataset.name!r} is {kind}, of which it is not kept what was"
            " served when.",
            "Leave versions= out, or use a dataset that is stored in the lake.",
            dataset=dataset.name,
            operator=operator,
        )


def expression_of_time(column: str, kind: str) -> str | None:
    """Return an expression that makes a timestamp of a column of this type, None if there is no
    usual one.
    """
    if kind in ("string", "timestamp_ntz"):
        return f"cast({column} as timestamp)"
    if kind in INTEGERS:
        return f"timestamp_millis({column})"
    if kind in NUMBERS or kind.startswith("decimal("):
        return f"timestamp_millis(cast({column} as bigint))"
    return None
