"""What the times of operators follow from: the inputs above each, and what is on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator, Spec

_ZERO = timedelta(0)


def watermark_inputs(operators: Iterable[Operator]) -> dict[str, dict[str, timedelta]]:
    """Return, by stateful operator, the input streams above it, and how far what is on the way holds each back."""
    arriving = _spans(operators, lambda spec: spec.holds_back)
    return {operator.spec.over_time: spans for operator, spans in arriving if operator.spec.over_time is not None}


def needed_for(operators: Iterable[Operator]) -> dict[str, timedelta]:
    """Return, by input stream, for how long after its time a record may be needed below it."""
    needed: dict[str, timedelta] = {}
    for operator, spans in _spans(operators, lambda spec: spec.reaches):
        for stream, span in spans.items():
            needed[stream] = max(needed.get(stream, _ZERO), span + operator.spec.keeps_for)
    return needed


def _spans(
    operators: Iterable[Operator], own: Callable[[Spec], timedelta]
) -> list[tuple[Operator, dict[str, timedelta]]]:
    """Return each operator with the input streams above it, and the most that those on the way have as their own."""
    leaving: dict[str, dict[str, timedelta]] = {}
    found = []
    for operator in operators:
        arriving: dict[str, timedelta] = {} if operator.spec.reads is None else {operator.spec.reads: _ZERO}
        for source in operator.inputs:
            for stream, span in leaving[source].items():
                arriving[stream] = max(span, arriving.get(stream, _ZERO))
        found.append((operator, arriving))
        leaving[operator.id] = {stream: span + own(operator.spec) for stream, span in arriving.items()}
    return found
