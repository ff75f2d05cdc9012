"""Windows in expressions, `over (partition by …)`: records have to lie together for them, and they see one batch only.

Spark would move records that lie otherwise, by itself and into other partitions: the plan would not list it, and what
follows would not find them where they are planned to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.stream_facts import SPARK
from dagster_adjunct.orchestration.planner.refused_operators.refusals import placed
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.sql.parsing import beyond_a_record, windows_of

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.orchestration.operators.spec.planning_values import Flow
    from dagster_adjunct.resources.sql.expression import WindowClause


def check_windows(operator: Operator, arriving: Sequence[Flow]) -> None:
    """Raise PlanningError for a window over records that do not lie together where they arrive."""
    if not arriving:  # an input, whose event time takes no other records at all
        return
    for text in operator.spec.sql:
        for window in windows_of(text):
            (flow,) = arriving
            shared, lie_by = ({name.lower() for name in names} for names in (window.columns, flow.partitioned_by))
            if not lie_by or not lie_by <= shared or flow.partitioner != SPARK:
                raise _apart(operator.id, text, window, flow)


def _apart(operator: str, text: str, window: WindowClause, flow: Flow) -> PlanningError:
    taken = f"the records of one ({window.partition_by})" if window.partition_by else "all records"
    lie = f"lie by ({', '.join(flow.partitioned_by)}) with {flow.partitioner}"
    if not flow.partitioned_by:
        lie = f"lie as {flow.lost_at} leaves them" if flow.lost_at else "lie by no key"
    step = "Partition the window by columns, over (partition by a, b), and write .partition_by(…) with these before it."
    if window.columns:
        quoted = ", ".join(f'"{name}"' for name in window.columns)
        step = f"Write .partition_by({quoted}) before it."
    return PlanningError(
        f"{operator}: {text!r} takes {taken} together, and they {lie}: Spark would move them, which no plan lists.",
        step,
        operator=operator,
    )


def windows_of_batches(app: Application) -> tuple[str, ...]:
    """Return a note for each operator with a window, which is over the records of one batch.

    PlanningError instead, where the application is strict.
    """
    notes = []
    for operator in app.operators:
        texts = [text for text in operator.spec.sql if windows_of(text)]
        if not texts:
            continue
        called = ", ".join(dict.fromkeys(f"{name}()" for text in texts for name, over in beyond_a_record(text) if over))
        problem = (
            f"{operator.id}: {called} over (…) is over the records of one batch: how the input is cut into batches "
            "decides what it gives."
        )
        if app.strict:
            error = PlanningError(
                f"{problem} The application is strict.",
                "Use a window over time, stream.window(…), or a local table, which go on from batch to batch. Or leave "
                "strict out.",
                operator=operator.id,
            )
            raise placed(error, operator)
        notes.append(problem)
    return tuple(notes)
