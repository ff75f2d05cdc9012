"""What a batch sends: of which operators, with which columns, and whether it was sent before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError, StreamNotFoundError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.resources.streams.interface.stream_system import AppendResult, StreamSystem


def sent_before(system: StreamSystem, stream: str, producer: str, batch: int) -> AppendResult | None:
    """Return the result of what this batch has sent to a stream before, None where it has not."""
    try:
        return system.appended(stream, producer, batch)
    except (StreamNotFoundError, ConfigurationError):  # a system of the user's that can't tell, maybe
        return None


def sent_schema(frame: DataFrame) -> Schema:
    """Return the columns of records that an output stream gets."""
    return Schema.from_spark(
        frame.select(*[column(name) for name in frame.columns if not name.startswith("__")]).schema
    )


def upstream_of_outputs(operators: Sequence[Operator]) -> set[str]:
    """Return the operators whose records reach an output; the others need not run."""
    needed: set[str] = set()
    for operator in reversed(operators):
        if operator.spec.writes is not None or operator.id in needed:
            needed |= {operator.id, *operator.inputs}
    return needed
