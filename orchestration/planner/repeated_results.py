"""Finds expressions that give other records when a batch is repeated: by the clock, by chance, by where they run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.planner.refusals import placed
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.sql.parsing import functions_called
from dagster_adjunct.resources.sql.special_times import special_times

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.columns.known_columns import Types

_CHANGING = frozenset(
    {
        "aes_encrypt", "curdate", "current_date", "current_time", "current_timestamp", "current_user",
        "input_file_block_length", "input_file_block_start", "input_file_name", "java_method", "localtime",
        "localtimestamp", "monotonically_increasing_id", "now", "rand", "randn", "random", "randstr", "reflect",
        "session_user", "shuffle", "spark_partition_id", "try_reflect", "uniform", "user", "uuid",
    }
)  # fmt: skip
_NAMED = re.compile(rf"\b(?:{'|'.join(sorted(_CHANGING))}|unix_timestamp)\b", re.IGNORECASE)
_BARE = re.compile(
    r"\b(current_date|current_time|current_timestamp|current_user|localtimestamp|session_user)\b(?!\s*\()",
    re.IGNORECASE,
)
_NO_TIME = re.compile(r"\bunix_timestamp\s*\(\s*\)", re.IGNORECASE)
# What Spark takes for the day or the moment: a literal of a time, and a text that is made one; `special_times` knows
# those that it makes one by itself.
_SPECIAL = re.compile(
    r"\b(?:date|timestamp(?:_ntz|_ltz)?|cast|try_cast|to_date|to_timestamp(?:_ntz|_ltz)?)\s*\(?\s*"
    r"(['\"])\s*(now|today|tomorrow|yesterday)\b[^'\"]*\1",
    re.IGNORECASE,
)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`(?:[^`]|``)*`")


def results_that_change(app: Application, types: Mapping[str, Types]) -> tuple[str, ...]:
    """Return a note for each operator whose expressions are not the same in a repeated batch; `types` are those after
    each operator.

    PlanningError instead, where the application is strict. What functions of the user's do can't be seen.
    """
    notes = []
    for operator in app.operators:
        arriving = types.get((operator.inputs or (operator.id,))[0]) or {}
        changing = list(dict.fromkeys(name for text in operator.spec.sql for name in _changing(text, arriving)))
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


def _changing(text: str, types: Mapping[str, str | None]) -> list[str]:
    named = [match[2].lower() for match in _SPECIAL.finditer(text)]
    special = [f"'{name}' as a time" for name in dict.fromkeys((*named, *special_times(text, types)))]
    if not _NAMED.search(text):  # most name none, and are not taken apart for that
        return special
    plain = _TEXT.sub("''", text)
    names = [name for name in functions_called(text) if name in _CHANGING]
    names += [match[1].lower() for match in _BARE.finditer(plain)]
    names += ["unix_timestamp"] if _NO_TIME.search(plain) else []
    return [f"{name}()" for name in names] + special
