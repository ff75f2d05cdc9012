"""What users say of a join of two streams, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TypeAlias

from dagster_adjunct.orchestration.operators.arguments import LONGEST, column_names
from dagster_adjunct.orchestration.operators.joins.join_arguments import On, selected
from dagster_adjunct.orchestration.operators.stream_joins.stream_join import HowStreams, StreamJoin
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.names import check_name

Within: TypeAlias = timedelta | tuple[timedelta, timedelta]
_KINDS = ("inner", "left", "right", "full")


def checked_stream_join(
    operator: str,
    name: str,
    on: On,
    within: Within,
    how: HowStreams,
    select: Sequence[str] | None,
    prefix: str,
    partition_by: str | Sequence[str] | None,
) -> StreamJoin:
    """Return the join that a user's arguments ask for; `operator` is the id that it will have."""
    check_name("stream join", name)
    if how not in _KINDS:
        raise PlanningError(
            f"{operator} has how={how!r}: expected {', '.join(_KINDS[:-1])} or {_KINDS[-1]}.",
            "Choose one of them.",
            operator=operator,
        )
    before, after = _bound(operator, within)
    if isinstance(on, Mapping):
        pairs = tuple((str(left), str(right)) for left, right in on.items())
    else:
        pairs = tuple((column, column) for column in column_names(f"{operator}: on=", on))
    if not pairs:
        raise ConfigurationError(
            f"{operator}: on= names no column.", "Name what is equal in both streams.", argument="on", operator=operator
        )
    column_names(f"{operator}: on=", [right for _, right in pairs])
    key = tuple(left for left, _ in pairs)
    lying = key if partition_by is None else column_names(f"{operator}: partition_by=", partition_by)
    if not lying or set(lying) - set(key):
        raise ConfigurationError(
            f"{operator} has partition_by={partition_by!r}: expected some of this stream's columns in on= "
            f"({', '.join(key)}).",
            "Name columns of the key, so that all records of a key lie together; or leave it out for all of them.",
            argument="partition_by",
            operator=operator,
        )
    return StreamJoin(name, pairs, lying, before, after, how, selected(operator, select, prefix), prefix)


def _bound(operator: str, within: Within) -> tuple[timedelta, timedelta]:
    bound = within if isinstance(within, tuple) else (within, within)
    if len(bound) != 2 or not all(
        isinstance(distance, timedelta) and timedelta(0) <= distance <= LONGEST for distance in bound
    ):
        raise ConfigurationError(
            f"{operator} has within={within!r}: expected a timedelta, or two (before, after), none below 0, and of 100 "
            "years at most.",
            "Write how far apart the times may be: within=timedelta(minutes=10), say; or (before, after) of the left "
            "record's time.",
            argument="within",
            operator=operator,
        )
    return bound[0], bound[1]
