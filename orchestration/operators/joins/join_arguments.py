"""What users say of a join: what it compares, what it adds, and how many of the records have to meet an entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dagster_adjunct.orchestration.operators.arguments import column_names, first_double
from dagster_adjunct.orchestration.operators.columns.expressions import plain_column, split_alias
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError

MATCHED = "__matched"
"""True where a joined record has met an entry, null where it has not."""
BEFORE_HISTORY, NO_TIME = "__before_history", "__no_time"
"""Whether a record that is joined as of its time lies before what is known of its key, or has no time."""

How = Literal["inner", "left"]
On: TypeAlias = str | Sequence[str] | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Selected:
    """A dataset's `column`, and the `name` that it has in the joined record."""

    column: str
    name: str


def check_how(operator: str, how: str, rate: float | None) -> None:
    """Refuse another `how=` than inner or left, and a `min_match_rate=` that is no fraction."""
    if how not in ("inner", "left"):
        raise PlanningError(
            f"{operator} has how={how!r}: expected inner or left.", "Choose one of them.", operator=operator
        )
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ConfigurationError(
            f"{operator} has min_match_rate={rate!r}: expected 0 to 1.",
            "It is a fraction: 0.95 is 95 %.",
            argument="min_match_rate",
            operator=operator,
        )


def key_pairs(
    operator: str, kind: Literal["dataset", "table"], name: str, key: Sequence[str], on: On
) -> tuple[tuple[str, str], ...]:
    """Return pairs (stream column, key column) in the order of the key of this dataset or table."""
    if isinstance(on, Mapping):
        pairs = [(str(stream), str(entry)) for stream, entry in on.items()]
    else:
        pairs = [(column, column) for column in column_names(f"{operator}: on=", on)]
    shown = ", ".join(key)
    by_column: dict[str, str] = {}
    for stream, entry in pairs:
        if entry in by_column:
            raise PlanningError(
                f"{operator}: on= compares {kind} column {entry!r} twice.",
                "Keep one of them.",
                column=entry,
                operator=operator,
            )
        if entry not in key:
            raise PlanningError(
                f"{operator}: on= names {entry!r}, which is not in the key of {kind} {name!r} ({shown}).",
                f"Join on the key; for other names on the stream write on={{stream column: {key[0]!r}}}.",
                dataset=name if kind == "dataset" else None,
                operator=operator,
            )
        by_column[entry] = stream
    missing = ", ".join(repr(part) for part in key if part not in by_column)
    if missing:
        raise PlanningError(
            f"{operator}: on= lacks {missing} of the key of {kind} {name!r} ({shown}), "
            "so a record could meet several entries.",
            "Name every column of the key in on=.",
            dataset=name if kind == "dataset" else None,
            operator=operator,
        )
    column_names(f"{operator}: on=", list(by_column.values()))
    return tuple((by_column[part], part) for part in key)


def selected(operator: str, select: Sequence[str] | None, prefix: str) -> tuple[Selected, ...] | None:
    """Return what `select` asks for: "year as plane_year" as it says, plain names after `prefix`."""
    if select is None:
        return None
    if isinstance(select, str):
        raise ConfigurationError(
            f"{operator}: select={select!r} is one string: expected a list.",
            f"Write select=[{select!r}].",
            argument="select",
            operator=operator,
        )
    chosen = []
    for item in select:
        what, alias = split_alias(str(item))
        name = plain_column(what)
        if name is None:
            raise ConfigurationError(
                f"{operator}: select names {item!r}: expected a column, or 'column as name'.",
                "Compute other values with map() after the join.",
                argument="select",
                operator=operator,
            )
        chosen.append(Selected(name, alias or prefix + name))
    double = first_double([item.name for item in chosen])
    if double:
        raise PlanningError(
            f"{operator}: select gives two columns the name {double!r}.",
            f"Rename one: '{double} as other_name'.",
            operator=operator,
        )
    return tuple(chosen)
