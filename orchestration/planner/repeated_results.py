"""Finds expressions that give other records when a batch is repeated: by the clock, by chance, by where they run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.planner.refusals import placed
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.sql.parsing import functions_called

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application

_CHANGING = frozenset(
    {
        "curdate", "current_date", "current_time", "current_timestamp", "input_file_block_length",
        "input_file_block_start", "input_file_name", "localtimestamp", "monotonically_increasing_id", "now", "rand",
        "randn", "random", "randstr", "shuffle", "spark_partition_id", "uniform", "uuid",
    }
)  # fmt: skip
_NAMED = re.compile(rf"\b(?:{'|'.join(sorted(_CHANGING))})\b", re.IGNORECASE)
_BARE = re.compile(r"\b(current_date|current_time|current_timestamp|localtimestamp)\b(?!\s*\()", re.IGNORECASE)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`(?:[^`]|``)*`")


def results_that_change(app: Application) -> tuple[str, ...]:
    """Return a note for each operator whose expressions are not the same in a repeated batch.

    PlanningError instead, where the application is strict. What functions of the user's do can't be seen.
    """
    notes = []
    for operator in app.operators:
        found = list(dict.fromkeys(name for text in operator.spec.sql for name in _changing(text)))
        if not found:
            continue
        problem = (
            f"{operator.id} gives other records when a batch is repeated after a crash, because of "
            f"{', '.join(f'{name}()' for name in found)}: an output stream that has the first ones refuses the others "
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


def _changing(text: str) -> list[str]:
    if not _NAMED.search(text):  # most name none, and are not taken apart for that
        return []
    bare = [match[1].lower() for match in _BARE.finditer(_TEXT.sub("''", text))]
    return [*(name for name in functions_called(text) if name in _CHANGING), *bare]
