"""What the YAML of test_components.py names in Python."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from dagster_adjunct import bounded_dataset

airports = bounded_dataset("airports", input="lake.airports", key="faa", broadcast=True)


def words(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"k": record["k"], "word": word} for word in record["text"].split()]


def keep(frame: Any) -> Any:
    return frame


def publish(batch: pa.RecordBatch, context: Any) -> None:
    """Do nothing: it is only declared."""
