"""Which inputs wait for which datasets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from dagster_adjunct.orchestration.operators.lookups import Wait
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.operators.watermarks import sum_on_the_way


@dataclass(frozen=True, slots=True)
class WaitsFor:
    """Records wait for the `dataset`, as `wait` says."""

    dataset: str
    wait: Wait


def waits_by_input(operators: Iterable[Operator]) -> dict[str, tuple[WaitsFor, ...]]:
    """Return the datasets that the records of each input stream wait for; only inputs that wait."""
    waits: dict[str, tuple[WaitsFor, ...]] = {}
    for operator, arriving in sum_on_the_way(operators, lambda spec: timedelta(0)):
        match = operator.spec.match
        if match is None or match.dataset is None or match.as_of is None:
            continue
        if match.as_of.wait is None:
            continue
        one = WaitsFor(match.dataset, match.as_of.wait)
        for stream in arriving:
            waits[stream] = (*waits.get(stream, ()), one)
    return waits
