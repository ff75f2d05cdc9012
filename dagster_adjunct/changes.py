"""What the records of a change stream may look like, and what an unbounded dataset makes of them."""

from __future__ import annotations

from dagster_adjunct.assets.declaration.change_formats import (
    ArrowChangeFormat,
    ChangeFormat,
    DebeziumUnwrapped,
    OperationColumn,
    Upserts,
)
from dagster_adjunct.assets.declaration.dataset import BY_OFFSET
from dagster_adjunct.assets.declaration.debezium import DebeziumEnvelope
from dagster_adjunct.assets.declaration.extractors import KeyValueExtractor, Projection, PythonExtractor
from dagster_adjunct.assets.declaration.maxwell import MaxwellEnvelope
from dagster_adjunct.assets.declaration.policies import DeadLetters, DeltaCompaction

__all__ = [
    "BY_OFFSET",
    "ArrowChangeFormat",
    "ChangeFormat",
    "DeadLetters",
    "DebeziumEnvelope",
    "DebeziumUnwrapped",
    "DeltaCompaction",
    "KeyValueExtractor",
    "MaxwellEnvelope",
    "OperationColumn",
    "Projection",
    "PythonExtractor",
    "Upserts",
]
