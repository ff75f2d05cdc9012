"""The arguments of `MessageStream.join`, and the operator that they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.point_in_time import Known
from dagster_adjunct.orchestration.operators.as_of_join import AsOfJoin, check_as_of
from dagster_adjunct.orchestration.operators.calls import RecordFunction
from dagster_adjunct.orchestration.operators.functions import validate_record_function
from dagster_adjunct.orchestration.operators.joins import (
    Join,
    JoinFunction,
    On,
    pair_key_columns,
    parse_selection,
)
from dagster_adjunct.orchestration.operators.lookup_join import LookupJoin
from dagster_adjunct.orchestration.operators.lookups import (
    AsOf,
    BeforeHistory,
    How,
    OnNullTime,
    Restate,
    Wait,
)
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.tables.table import AnyTable

J = TypeVar("J", bound=Join | LookupJoin)
_CALL_AFTER = "Join with select=, and call the function after it: flat_map(function, schema=…)."


@dataclass(frozen=True, slots=True)
class JoinArguments:
    """The arguments of every join with a table; `operator` is the join's id."""

    operator: str
    on: On
    how: How
    select: Sequence[str] | Mapping[str, str] | None
    prefix: str
    min_match_rate: float | None

    def build(self, kind: type[J], table: AdjunctDataset | AnyTable, **more: Any) -> J:
        """Return the join of this kind; `more` has the fields that only this kind has."""
        rate = self.min_match_rate
        if rate is not None and not 0 <= rate <= 1:
            raise argument_error(
                f"{self.operator} has min_match_rate={rate!r}",
                "0 to 1, such as 0.95 for 95 %",
                argument="min_match_rate",
                operator=self.operator,
            )
        pairs = pair_key_columns(self.operator, kind.source, table.name, table.key, self.on)
        selected = parse_selection(self.operator, self.select, self.prefix)
        return kind(table.name, pairs, self.how, selected, self.prefix, rate, **more)


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The arguments of `MessageStream.join` that only some joins take."""

    function: RecordFunction | None
    schema: Schema | None
    as_of: str | None
    before_history: BeforeHistory
    on_null_time: OnNullTime
    versions: Known
    wait: timedelta | Wait | None
    restate: timedelta | Restate | None
    args: tuple[object, ...]

    @property
    def has_function(self) -> bool:
        """Whether the user gave a function, or the columns of its results."""
        return self.function is not None or self.schema is not None

    @property
    def later_changes_argument(self) -> str | None:
        """The name of the first given argument that makes results depend on later changes; None
        if none was given.
        """
        if self.wait is not None:
            return "wait"
        if self.restate is not None:
            return "restate"
        return None

    @property
    def by_time_argument(self) -> str | None:
        """The name of the first given argument that only joins as of a time take; None if none was
        given.
        """
        if self.as_of is not None:
            return "as_of"
        if self.before_history != "null":
            return "before_history"
        if self.on_null_time != "null":
            return "on_null_time"
        if self.versions != "now":
            return "versions"
        return None


def build_lookup_join(given: JoinArguments, options: JoinOptions, table: AnyTable) -> LookupJoin:
    """Return the join with a remote table; raises ConfigurationError for options of datasets."""
    if options.has_function:
        problem = (
            f"{given.operator}: function= and schema= are for datasets; {table.name!r} is a"
            " remote table."
        )
        raise ConfigurationError(problem, _CALL_AFTER, argument="function")
    for_datasets = options.later_changes_argument or options.by_time_argument
    if for_datasets is not None:
        problem = (
            f"{given.operator}: {for_datasets}= is for datasets; {table.name!r} is a remote table."
        )
        step = (
            "Leave it out, or join a dataset that follows the table's changes:"
            " unbounded_dataset(…), with history=… for joins as of a time."
        )
        raise ConfigurationError(problem, step, argument=for_datasets)
    return given.build(LookupJoin, table, args=options.args)


def build_dataset_join(given: JoinArguments, options: JoinOptions, dataset: AdjunctDataset) -> Join:
    """Return the join with a dataset; raises ConfigurationError for options of other joins, and
    PlanningError for a dataset that the options do not fit.
    """
    join = _build_join_of_entries(given, options, dataset)
    argument = options.later_changes_argument
    if argument is not None:
        _check_known_then(given.operator, join, dataset, argument)
    if options.wait is not None:
        check_wait(given.operator, dataset)
        wait = options.wait
        if isinstance(wait, timedelta):
            wait = Wait(wait)
        join = replace(join, wait=wait)
    if options.restate is not None:
        check_restate(given.operator, dataset)
        restate = options.restate
        if isinstance(restate, timedelta):
            restate = Restate(restate)
        join = replace(join, restate=restate)
    return join


def _check_known_then(operator: str, join: Join, dataset: AdjunctDataset, argument: str) -> None:
    """Raise PlanningError if a join that follows later changes wants what was known before."""
    if not isinstance(join, AsOfJoin) or not join.as_of.known_then:
        return
    raise PlanningError(
        f"{operator} has {argument}= and versions='known-then': what was served at a record's"
        " time does not depend on later changes.",
        "Leave one of them out.",
        dataset=dataset.name,
        operator=operator,
    )


def _build_join_of_entries(
    given: JoinArguments, options: JoinOptions, dataset: AdjunctDataset
) -> Join:
    """Return the join with a dataset, before the options about its later changes are added."""
    if options.args or isinstance(given.select, Mapping):
        problem = (
            f"{given.operator}: args= and types in select= are for remote tables;"
            f" {dataset.name!r} is a dataset."
        )
        step = "Leave args= out, and write select=[…]."
        given_argument = "args" if options.args else "select"
        raise ConfigurationError(problem, step, argument=given_argument)
    if options.as_of is not None:
        return _build_as_of_join(given, options, options.as_of, dataset)
    argument = options.by_time_argument
    if argument is not None:
        problem = (
            f"{given.operator} has {argument}= without as_of=: its records are joined with current"
            " entries."
        )
        step = "Name the column with the record's time: as_of=…."
        raise ConfigurationError(problem, step, argument=argument)
    if options.has_function:
        return _build_function_join(given, options, dataset)
    return given.build(Join, dataset)


def _build_as_of_join(
    given: JoinArguments, options: JoinOptions, as_of: str, dataset: AdjunctDataset
) -> AsOfJoin:
    """Return the join as of the time in the stream's column `as_of`."""
    if options.has_function:
        problem = f"{given.operator} has a function, and as_of=, which joins columns only."
        raise ConfigurationError(problem, _CALL_AFTER, argument="function")
    times = AsOf(as_of, options.before_history, options.on_null_time, options.versions)
    check_as_of(given.operator, dataset, times)
    return given.build(AsOfJoin, dataset, as_of=times)


def _build_function_join(
    given: JoinArguments, options: JoinOptions, dataset: AdjunctDataset
) -> JoinFunction:
    """Return the join by a function of record and entry."""
    if given.select is not None or given.prefix:
        problem = (
            f"{given.operator} has a function, and select= or prefix=, which are for joins without"
            " one."
        )
        step = (
            "Leave them out: the function gets the whole entry, and schema= declares what it adds."
        )
        raise ConfigurationError(problem, step, argument="select", operator=given.operator)
    validate_record_function(given.operator, options.function, options.schema, "record", "entry")
    given = replace(given, select=())  # None would add all columns of the entry
    return given.build(JoinFunction, dataset, function=options.function, schema=options.schema)


def check_restate(operator: str, dataset: AdjunctDataset) -> None:
    """Raise PlanningError for a dataset whose changes nobody can read."""
    if not dataset.is_local and dataset.persistent:
        return
    if dataset.is_local:
        kind = "is a local table"
    else:
        kind = "lives for one run"
    problem = (
        f"{operator} has restate=, but dataset {dataset.name!r} {kind}: it keeps no changes to"
        " restate results by."
    )
    step = "Leave restate= out, or join a stored dataset: bounded_dataset or unbounded_dataset."
    raise PlanningError(problem, step, dataset=dataset.name, operator=operator)


def check_wait(operator: str, dataset: AdjunctDataset) -> None:
    """Raise PlanningError for a dataset that does not say up to when it is complete."""
    if dataset.has_watermark:
        return
    if dataset.follows_changes:
        step = "Declare it: watermark=Watermark(delay=…, idle_after=…)."
    else:
        step = "Declare for how long a version is complete: valid_for=timedelta(days=1)."
    problem = (
        f"{operator} has wait=, but dataset {dataset.name!r} does not declare up to when it is"
        " complete."
    )
    raise PlanningError(problem, step, dataset=dataset.name, operator=operator)
