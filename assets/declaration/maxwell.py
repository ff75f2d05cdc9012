"""What Maxwell writes of MySQL's changes, declared: the row, and of an update what was other before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dagster_adjunct.assets.declaration.debezium import EnvelopeFormat, check_choice
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENVELOPE = "a Maxwell envelope"
_PATHS = ("source.position", "source.gtid", "source.ts")


@dataclass(frozen=True, slots=True)
class MaxwellEnvelope(EnvelopeFormat):
    """Maxwell's JSON in the STRING column `value`: the row as `data`, and in `old` what an update has changed.

    `columns` are those of the rows ("id BIGINT, name STRING"); what else a row has is left out. `table` is the one that
    counts ("shop.items") where the stream holds others too. `timestamps` says what numbers in TIMESTAMP columns count,
    None where they are ISO texts with a zone. With `on_missing="keep"` an update changes only the columns that `data`
    has, with "null" the others become null. Rows of a bootstrap never replace streamed changes, unless `order_by` says
    otherwise: `source.position` (Maxwell's output_binlog_position), `source.gtid` or `source.ts`.
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
        check_choice(_ENVELOPE, "timestamps", self.timestamps, (None, "millis", "micros"))
        check_choice(_ENVELOPE, "on_missing", self.on_missing, ("null", "keep"))
        if self.table is not None and (not isinstance(self.table, str) or self.table.count(".") < 1):
            raise ConfigurationError(
                f"{_ENVELOPE} has table={self.table!r}: expected DATABASE.TABLE.",
                'Write table="shop.items", say, or leave it out where the stream holds one table.',
                argument="table",
            )

    @property
    def completes(self) -> bool:
        """Whether changes may leave out columns, which keep what the dataset has."""
        return self.on_missing == "keep"

    def orders(self, path: str) -> bool:
        return path in _PATHS

    def describe(self) -> str:
        table = "" if self.table is None else f" of {self.table}"
        return f"Maxwell envelopes{table} ({self.columns})" + (", on_missing='keep'" if self.completes else "")
