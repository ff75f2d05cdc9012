"""Finds expressions that give other records when a batch is repeated: by the clock, by chance, by where they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.planner.refused_operators.refusals import placed
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.sql.changing_values import changing_values

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.columns.known_columns import Types


def results_that_change(app: Application, types: Mapping[str, Types]) -> tuple[str, ...]:
    """Return a note for each operator whose expressions are not the same in a repeated batch; `types` are those after
    each operator.

    PlanningError instead, where the application is strict. What functions of the user's do can't be seen.
    """
    notes = []
    for operator in app.operators:
        arriving = types.get((operator.inputs or (operator.id,))[0]) or {}
        changing = list(dict.fromkeys(name for text in operator.spec.sql for name in changing_values(text, arriving)))
        if not changing:
            continue
        problem = (
            f"{operator.id} gives other records when a batch is repeated after a crash, because of "
            f"{', '.join(changing)}: an output stream that has the first ones refuses the others "
            "(ProducerConflictError), and a remote table gets both."
        )
        if app.strict:
            error = PlanningError(
                f"{problem} The application is strict.",
                "Take the value from the record, such as the time that its producer gave it.",
                operator=operator.id,
            )
            raise placed(error, operator)
        notes.append(problem)
    return tuple(notes)
