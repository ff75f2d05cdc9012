"""End-of-dataset markers in Kafka: records without key and value, with a header that names the version that ends.

Any producer may write one: a header `adjunct-end-of-dataset` with JSON, as in `{"version": "v7", "rows": 1200}`.
Optional are `rows` (of that partition), `checksum`, `valid_from` (a time with its zone) and `partitions` (their count).
Kafka has no index of headers, so finding markers reads all records, about 100,000 a second.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from dagster_adjunct.resources.common import first_validation_problem
from dagster_adjunct.resources.errors import MalformedDocumentError
from dagster_adjunct.resources.streams.kafka.task_producer import END_OF_DATASET
from dagster_adjunct.resources.streams.system import Marker, SystemStreamPartition

if TYPE_CHECKING:
    from confluent_kafka import Message


class _MarkerHeader(BaseModel):
    model_config = ConfigDict(frozen=True)

    version: str = Field(min_length=1)
    rows: int | None = Field(default=None, ge=0)
    checksum: str | None = None
    valid_from: AwareDatetime | None = None
    partitions: int | None = Field(default=None, ge=1)


def marker_header(
    version: str,
    partitions: int,
    rows: int | None = None,
    checksum: str | None = None,
    valid_from: datetime | None = None,
) -> bytes:
    """Return the header of a marker in a topic with this number of partitions."""
    header = _MarkerHeader(version=version, rows=rows, checksum=checksum, valid_from=valid_from, partitions=partitions)
    return header.model_dump_json(exclude_none=True).encode()


def marker_from_message(message: Message, ssp: SystemStreamPartition) -> Marker:
    """Return the marker in a message. Raises MalformedDocumentError if it can't be read."""
    headers: list[tuple[str, bytes | None]] = message.headers() or []  # type: ignore[assignment]
    header = next((value for name, value in headers if name == END_OF_DATASET), None)
    try:
        body = _MarkerHeader.model_validate_json(header or b"")
    except ValidationError as error:
        problem = f"{ssp}: the end-of-dataset marker at offset {message.offset()} is {(header or b'')[:200]!r}: "
        problem += f"{first_validation_problem(error)}."
        step = 'Write markers as {"version": "v7"}, optionally with "rows", "checksum", "valid_from" and "partitions".'
        raise MalformedDocumentError(problem, step, stream=ssp.qualified_stream) from error
    return Marker(
        ssp,
        str(message.offset()),
        body.version,
        body.rows,
        body.checksum,
        valid_from=body.valid_from,
        partitions=body.partitions,
    )
