"""What the stream tests share besides fixtures."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from dagster_adjunct.resources.schemas.schema import Schema

SCHEMA = Schema.of(k="string", v="bigint")


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def forward(self, **by: float) -> datetime:
        self.now += timedelta(**by)
        return self.now
