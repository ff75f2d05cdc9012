"""Which join a user's arguments ask for: a dataset's entries, those as of a time, a function's, a remote table's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.application.declared_handles import DatasetHandle, RemoteTableHandle
from dagster_adjunct.orchestration.operators.joins.asof_join import checked_asof_join
from dagster_adjunct.orchestration.operators.joins.join import checked_join
from dagster_adjunct.orchestration.operators.joins.join_function import checked_join_function
from dagster_adjunct.orchestration.operators.joins.lookup_join import checked_lookup_join
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.functions.record_functions import RecordFunction
    from dagster_adjunct.orchestration.operators.joins.join_arguments import How, On
    from dagster_adjunct.orchestration.operators.spec.operator_spec import BeforeHistory, OnNullTime, Spec
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class ByTime:
    """The column that says when a record was (None: the join is not by time), and what else is said of times."""

    as_of: str | None = None
    before_history: BeforeHistory = "null"
    on_null_time: OnNullTime = "null"

    @property
    def given(self) -> str | None:
        """The first of these arguments that is given, None where none is."""
        told = (
            ("as_of", self.as_of is not None),
            ("before_history", self.before_history != "null"),
            ("on_null_time", self.on_null_time != "null"),
        )
        return next((name for name, is_given in told if is_given), None)


def joined(
    operator: str,
    table: DatasetHandle | RemoteTableHandle,
    *,
    on: On,
    how: How,
    select: Sequence[str] | Mapping[str, str] | None,
    prefix: str,
    min_match_rate: float | None,
    args: Sequence[object],
    function: RecordFunction | None,
    schema: Schema | None,
    by_time: ByTime,
) -> Spec:
    """Return the join that these arguments of `MessageStream.join` ask for; `operator` is the id that it will have."""
    calls = function is not None or schema is not None
    if isinstance(table, RemoteTableHandle):
        if calls:
            raise ConfigurationError(
                f"{operator}: function= and schema= are for datasets; {table.name!r} is a remote table.",
                "Join with select=, and call the function behind it: flat_map(function, schema=…).",
                argument="function",
            )
        if by_time.given is not None:
            raise ConfigurationError(
                f"{operator}: {by_time.given}= is for datasets; {table.name!r} is a remote table, which has no past.",
                "Leave it out, or keep what was valid when in a dataset: unbounded_dataset(…, history=…).",
                argument=by_time.given,
            )
        return checked_lookup_join(operator, table.name, table.key, on, how, select, prefix, args, min_match_rate)
    if args or isinstance(select, Mapping):
        raise ConfigurationError(
            f"{operator}: args= and types in select= are for remote tables; {table.name!r} is a dataset.",
            "Leave args= out, and write select=[…].",
            argument="args" if args else "select",
        )
    if by_time.as_of is not None:
        if calls:
            raise ConfigurationError(
                f"{operator} has a function, and as_of=, which joins columns only.",
                "Join with select=, and call the function behind it: flat_map(function, schema=…).",
                argument="function",
            )
        return checked_asof_join(
            operator, table.dataset, on, how, select, prefix, min_match_rate,
            as_of=by_time.as_of, before_history=by_time.before_history, on_null_time=by_time.on_null_time,
        )  # fmt: skip
    if by_time.given is not None:
        raise ConfigurationError(
            f"{operator} has {by_time.given}=, and no as_of=: its records meet what is current.",
            "Name the column that says when a record was: as_of=….",
            argument=by_time.given,
        )
    if calls:
        others = select is not None or bool(prefix)
        return checked_join_function(operator, table.dataset, on, how, function, schema, min_match_rate, others)
    return checked_join(operator, table.dataset, on, how, select, prefix, min_match_rate)
