"""The declaration of Maxwell's envelopes of MySQL's changes: the row, and the earlier values that an update changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from dagster_adjunct.assets.declaration.debezium import EnvelopeFormat
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.validation import validated

_ENVELOPE = "a Maxwell envelope"
_PATHS = ("source.position", "source.gtid", "source.ts")


@validated
@dataclass(frozen=True, slots=True)
class MaxwellEnvelope(EnvelopeFormat):
    """Maxwell's JSON in the STRING column `value`: the row in `data`, and earlier values of changed columns in `old`.

    `columns` are those of the rows ("id BIGINT, name STRING"); others are ignored. `table` selects one ("shop.items")
    if the stream has several. `timestamps` is the unit of numbers in TIMESTAMP columns, None for ISO strings with a
    zone. With `on_missing="keep"` an update changes only the columns in `data`, with "null" the others become null.
    Rows of a bootstrap never replace streamed changes, unless `order_by` is declared: `source.position` (Maxwell's
    output_binlog_position), `source.gtid` or `source.ts`.
    """

    columns: str
    value: str = "value"
    table: str | None = None
    timestamps: Literal["millis", "micros"] | None = None
    on_missing: Literal["null", "keep"] = "null"

    layout: ClassVar[Literal["maxwell"]] = "maxwell"
    format: ClassVar[Literal["json"]] = "json"
    decimals: ClassVar[Literal["string"]] = "string"
    unavailable: ClassVar[None] = None
    on_unavailable: ClassVar[Literal["refuse"]] = "refuse"
    schemas: ClassVar[Mapping[int | None, str]] = {}
    name: ClassVar[str] = _ENVELOPE

    def __post_init__(self) -> None:
        Schema.from_ddl(self.columns, _ENVELOPE)
        if self.table is not None and "." not in self.table:
            problem = f"{_ENVELOPE} has table={self.table!r}: expected DATABASE.TABLE."
            step = 'Write, for example, table="shop.items", or leave it out if the stream has one table.'
            raise ConfigurationError(problem, step, argument="table")

    @property
    def completes(self) -> bool:
        """Whether changes may leave out columns, which keep their stored values."""
        return self.on_missing == "keep"

    def orders(self, path: str) -> bool:
        return path in _PATHS

    def describe(self) -> str:
        table = "" if self.table is None else f" of {self.table}"
        return f"Maxwell envelopes{table} ({self.columns})" + (", on_missing='keep'" if self.completes else "")
