"""What the watermarks of operators that keep state follow from: the inputs above each."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator


def watermark_inputs(operators: Iterable[Operator]) -> dict[str, dict[str, timedelta]]:
    """Return, by stateful operator, the input streams above it, and how far what is on the way holds each back."""
    leaving: dict[str, dict[str, timedelta]] = {}
    named: dict[str, dict[str, timedelta]] = {}
    for operator in operators:
        spec = operator.spec
        arriving: dict[str, timedelta] = {} if spec.reads is None else {spec.reads: timedelta(0)}
        for source in operator.inputs:
            for stream, span in leaving[source].items():
                arriving[stream] = max(span, arriving.get(stream, timedelta(0)))
        if spec.over_time is not None:
            named[spec.over_time] = arriving
        own = spec.holds_back
        leaving[operator.id] = {stream: span + own for stream, span in arriving.items()} if own else arriving
    return named
