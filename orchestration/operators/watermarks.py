"""`Watermarks` of an operator, how long operators hold them back, and how long records may be
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from dagster_adjunct.orchestration.operators.operator import Operator, Spec

_ZERO = timedelta(0)


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The watermarks of an operator: it has received all records with earlier event times, except
    late ones.

    `before` is the watermark at the start of the batch; `after` includes the records of the batch,
    and is committed with it. None: no watermark yet.
    """

    before: datetime | None
    after: datetime | None


def watermark_inputs(operators: Iterable[Operator]) -> dict[str, dict[str, timedelta]]:
    """Return {state name: {input stream: delay}} for each operator with state over time.

    The delay is how much the operators in between hold back the stream's watermark on its way to
    the operator.
    """
    arriving = sum_along_paths(operators, lambda spec: spec.watermark_delay)
    inputs = {}
    for operator, spans in arriving:
        if operator.spec.over_time is not None:
            inputs[operator.spec.over_time] = spans
    return inputs


def required_retention(operators: Iterable[Operator]) -> dict[str, timedelta]:
    """Return, by input stream, how long after its event time a record may still be needed by an
    operator.
    """
    needed: dict[str, timedelta] = {}
    for operator, spans in sum_along_paths(operators, lambda spec: spec.max_result_delay):
        for stream, span in spans.items():
            needed[stream] = max(needed.get(stream, _ZERO), span + operator.spec.record_retention)
    return needed


def sum_along_paths(
    operators: Iterable[Operator], own: Callable[[Spec], timedelta]
) -> list[tuple[Operator, dict[str, timedelta]]]:
    """Return each operator with {input stream: sum}, for the input streams that it depends on.

    The sum is over the operators between the stream and the operator, of what `own` returns for
    each. If there are several paths, the largest sum counts.
    """
    leaving: dict[str, dict[str, timedelta]] = {}
    found = []
    for operator in operators:
        arriving: dict[str, timedelta] = {}
        if operator.spec.reads is not None:
            arriving[operator.spec.reads] = _ZERO
        for source in operator.inputs:
            for stream, span in leaving[source].items():
                arriving[stream] = max(span, arriving.get(stream, _ZERO))
        found.append((operator, arriving))
        leaving[operator.id] = {
            stream: span + own(operator.spec) for stream, span in arriving.items()
        }
    return found
