"""What the stream tests share besides fixtures."""

from __future__ import annotations

from dagster_adjunct.resources.schemas.schema import Schema

SCHEMA = Schema.of(k="string", v="bigint")
