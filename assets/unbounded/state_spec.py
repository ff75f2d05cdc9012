"""What an operator says of a table that it keeps its state in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Rows by key, each until its time.

    `schema` has all columns. `expires` is one of them, a timestamp: a row is gone once the operator's watermark has
    reached it. Where a key is written again, or deleted, its time is never earlier than before: or what was dropped
    with its newest row would come back as an older one. `append_only` says that each key is written once, so that
    reading has nothing to merge. `kept_for` says in words what the rows are kept for: the operator goes on with what it
    has kept for the same, and refuses it for anything else.
    """

    schema: Schema
    key: tuple[str, ...]
    partition_by: tuple[str, ...]
    partitions: int
    expires: str
    append_only: bool = False
    kept_for: str = ""
