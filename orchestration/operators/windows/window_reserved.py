"""Names of columns that windows keep things under: records that are to be added up can not bring others of these."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from dagster_adjunct.orchestration.operators.windows.exact_sums import WIDEST
from dagster_adjunct.orchestration.operators.windows.window_aggregates import Aggregate, Aggregation
from dagster_adjunct.orchestration.operators.windows.window_functions import KEPT_TIME, LIMIT
from dagster_adjunct.orchestration.operators.windows.window_records import PLACE
from dagster_adjunct.orchestration.operators.windows.window_rows import END, EXPIRES, RECORDS, START
from dagster_adjunct.resources.errors import PlanningError

_OF_RECORDS = (PLACE, KEPT_TIME, LIMIT, EXPIRES)
_OF_WINDOWS = (START, END, RECORDS)


def check_reserved(
    operator: str,
    names: Iterable[str],
    by: Sequence[str],
    aggregates: Sequence[tuple[str, Aggregation]],
) -> None:
    """Raise PlanningError for a key or an aggregate of records' columns that are called as what is kept.

    `names` are the columns of the records, which a function without `of` takes.
    """
    partials = [
        partial.name for name, made in aggregates for kind in ("", WIDEST) for partial in made.partials(name, kind)
    ]
    _refuse(operator, "by=", by, {*_OF_RECORDS, *_OF_WINDOWS, *partials})
    own = [name for name in names if not name.startswith("__")]
    for name, made in aggregates:
        taken = made.columns or (own if isinstance(made, Aggregate) else ())
        _refuse(operator, f"the aggregate {name!r}", taken, _OF_RECORDS)


def _refuse(operator: str, what: str, taken: Iterable[str], reserved: Collection[str]) -> None:
    clash = next((name for name in taken if name.lower() in {other.lower() for other in reserved}), None)
    if clash is not None:
        raise PlanningError(
            f"{operator}: {what} takes the column {clash!r}, and windows keep something of their own under that name.",
            f'Give the column another name before: .select("… as {clash.replace("$", "")}_of_record"), say; a function '
            "takes the columns that of= names.",
            operator=operator,
            column=clash,
        )
