"""Says of operators that keep state until its time what that time follows from."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.watermark_inputs import watermark_inputs
from dagster_adjunct.orchestration.planner.refused_operators.refusals import placed
from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator


def check_state_names(app: Application) -> None:
    """Raise PlanningError where an operator would keep its state under the name of a dataset of the application."""
    datasets = {dataset.name for dataset in app.datasets}
    for operator in app.operators:
        for state in operator.spec.states:
            name = f"{app.name}-{state}"
            if name in datasets:
                error = PlanningError(
                    f"{operator.id} keeps its state in the table {name!r}, and application {app.name!r} has a dataset "
                    "of that name.",
                    "Give the operator, or the dataset, another name.",
                    operator=operator.id,
                )
                raise placed(error, operator)


def state_over_time(app: Application) -> Iterator[str]:
    """Yield a note for each operator that keeps state: under which names, and up to which watermark."""
    spans = watermark_inputs(app.operators)
    for operator in app.operators:
        name = operator.spec.over_time
        if name is None:
            continue
        tables = ", ".join(f"{app.name}-{state}" for state in operator.spec.states) or "no table"
        sources = " and ".join(_source(app, stream, span) for stream, span in spans[name].items())
        yield (
            f"{operator.id} keeps state under the name {name} ({tables}), each row until its watermark has passed it: "
            f"the lowest of all partitions of {sources}."
        )
        for window in _updating(app, operator):
            problem = (
                f"{operator.id} gets a window of {window} again with each update of it, and takes each for a record of "
                "its own."
            )
            if app.strict:
                error = PlanningError(
                    f"{problem} The application is strict.",
                    'Let only what is final through: .filter("final") before it.',
                    operator=operator.id,
                )
                raise placed(error, operator)
            yield f'{problem} Let only what is final through: .filter("final").'


def _updating(app: Application, operator: Operator) -> list[str]:
    """Return the windows whose updates reach an operator as they are, with no filter of what is final between."""
    updating, waiting, seen = [], list(operator.inputs), set[str]()
    while waiting:
        before = app.operator(waiting.pop())
        if before.id in seen or before.spec.asks_final:
            continue
        seen.add(before.id)
        if before.spec.gives_updates:
            updating.append(before.id)
        elif before.spec.over_time is None:
            waiting.extend(before.inputs)
    return sorted(updating)


def _source(app: Application, stream: str, span: timedelta) -> str:
    declared = app.inputs[stream].event_time if stream in app.inputs else None
    words = "no event time" if declared is None else declared.words()
    return f"{stream} ({words}{f', held back by {span}' if span else ''})"
