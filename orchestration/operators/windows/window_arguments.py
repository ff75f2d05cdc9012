"""What users say of windows, checked and put into one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from dagster_adjunct.orchestration.operators.arguments import LONGEST, column_names, first_double
from dagster_adjunct.orchestration.operators.windows.window import Window
from dagster_adjunct.orchestration.operators.windows.window_aggregates import Aggregation
from dagster_adjunct.orchestration.operators.windows.window_kinds import Kind, Session, Sliding, Tumbling
from dagster_adjunct.orchestration.operators.windows.window_results import Results
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import check_name


def checked_window(
    after: str,
    kind: Kind,
    by: str | Sequence[str],
    name: str,
    aggregates: Mapping[str, Aggregation],
    results: Results,
    allowed_lateness: timedelta,
    partition_by: str | Sequence[str] | None,
) -> Window:
    """Return the windows that a user's arguments ask for, behind the operator `after`."""
    what = f"window after {after}"
    check_name("window", name)
    if not isinstance(kind, Tumbling | Sliding | Session):
        raise ConfigurationError(
            f"{what} got {kind!r}.", "Pass Tumbling(…), Sliding(…) or Session(…).", argument="kind"
        )
    if results not in ("final", "updates"):
        raise ConfigurationError(f"{what} has results={results!r}.", "Write final or updates.", argument="results")
    if not isinstance(allowed_lateness, timedelta) or not timedelta(0) <= allowed_lateness <= LONGEST:
        raise ConfigurationError(
            f"{what} has allowed_lateness={allowed_lateness!r}: expected a timedelta of none or more, and "
            "of 100 years at most.",
            "Correct it.",
            argument="allowed_lateness",
        )
    key = column_names(f"{what}: by=", by)
    if not key:
        raise ConfigurationError(f"{what} has no column in by=.", "Name the key.", argument="by")
    lying = key if partition_by is None else column_names(f"{what}: partition_by=", partition_by)
    if not lying or set(lying) - set(key):
        raise ConfigurationError(
            f"{what} has partition_by={partition_by!r}: expected some of by= ({', '.join(key)}).",
            "Name columns of the key, so that all records of a window lie together; or leave it out for all of them.",
            argument="partition_by",
        )
    return Window(name, kind, key, lying, _aggregates(what, aggregates), results, allowed_lateness)


def _aggregates(what: str, aggregates: Mapping[str, Aggregation]) -> tuple[tuple[str, Aggregation], ...]:
    if not isinstance(aggregates, Mapping) or not aggregates:
        raise ConfigurationError(
            f"{what} has aggregates={aggregates!r}: expected a value or more.",
            'Write {"views": Count()}, say.',
            argument="aggregates",
        )
    names = column_names(f"{what}: aggregates=", list(aggregates))
    double = first_double(names)
    wrong = next((name for name, made in aggregates.items() if not isinstance(made, Aggregation)), None)
    if double is not None or wrong is not None:
        mistake = f"names {double!r} twice" if double is not None else f"gives {wrong!r} {aggregates[wrong or '']!r}"
        raise ConfigurationError(
            f"{what}: aggregates= {mistake}.",
            "Give each name one of Count(), Sum(…), Min(…), Max(…), Mean(…), Distinct(…) and Aggregate(…).",
            argument="aggregates",
        )
    for made in aggregates.values():
        column_names(f"{what}: {made.words()}", made.columns)
    return tuple(aggregates.items())
