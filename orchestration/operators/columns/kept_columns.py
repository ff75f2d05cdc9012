"""What can't be kept from batch to batch, found when an application is planned, as far as types are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dagster_adjunct.resources.errors import PlanningError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Field, Schema, check_key_types


def check_kept(operator: str, types: Mapping[str, str | None], names: Iterable[str], key: Sequence[str]) -> None:
    """Raise PlanningError for columns that state can't have, and for a key that can't be compared exactly."""
    known = {name: types[name] for name in dict.fromkeys((*key, *names)) if types.get(name) is not None}
    what = f"{operator} keeps records until their time, and can't keep these"
    for name, kind in known.items():
        try:
            schema = _one_column(name, str(kind), what)
            check_key_types(schema, [name] if name in key else [], what)
        except SchemaMismatchError as error:
            raise PlanningError(error.problem, error.next_step, operator=operator, column=name) from error


def _one_column(name: str, kind: str, what: str) -> Schema:
    try:
        return Schema((Field(name, kind),))
    except SchemaMismatchError as error:
        raise error.reworded(f"{what}: {error.problem}", error.next_step) from error
