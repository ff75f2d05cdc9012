"""Windows of time: their kinds, and what is computed of the records in them."""

from __future__ import annotations

from dagster_adjunct.orchestration.operators.windows.aggregates import (
    Aggregate,
    Count,
    Distinct,
    Max,
    Mean,
    Min,
    Session,
    Sliding,
    Sum,
    Tumbling,
)

__all__ = ["Aggregate", "Count", "Distinct", "Max", "Mean", "Min", "Session", "Sliding", "Sum", "Tumbling"]
