"""What a dataset was declared as when it was made: read back to refuse a changed declaration by name."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from dagster_adjunct.assets.declaration.dataset import Kind
from dagster_adjunct.assets.declaration.discard_policy import DiscardPolicy
from dagster_adjunct.assets.versions.document_base import Document
from dagster_adjunct.assets.versions.kept_history import KeptHistory

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.following_changes import DeltaCompaction


class Declaration(Document):
    """What must not change while a dataset's entries live: read back to refuse a changed declaration by name.

    `computed` says that the input is a query, and `owner` which application owns a local table; `expires` is the column
    of a table of state that says when a row is gone, and `kept_for` what it is kept for. `partitions` None is a
    broadcast copy. `columns` are what new versions store, None for all of the input's. `input_partitions` is how many
    partitions the input had when the dataset was made (0: files, a query or a local table).
    `order` says whether versions follow each other as they arrive, or by name (version partitions). `keep` and
    `grace_seconds` are the discard policy; of an unbounded dataset `compact_…` are the compaction policy, and
    `keep_tombstones` is how far below the newest position deletions are remembered. `history` says whose rows are kept
    over time, and how far back. Order and policies may change: they are those of the last advance.
    """

    kind: Kind
    input: str
    computed: bool = False
    owner: str | None = None
    expires: str | None = None
    kept_for: str = ""
    key: tuple[str, ...] = Field(min_length=1)
    key_types: tuple[str, ...]
    partition_by: tuple[str, ...]
    partitions: int | None = Field(default=None, ge=1)
    input_partitions: int = Field(ge=0)
    columns: tuple[str, ...] | None = None
    bootstrap: bool = True
    order: Literal["arrival", "name"] = "arrival"
    keep: int | None = Field(default=3, ge=1)
    grace_seconds: float = Field(default=86_400.0, ge=0)
    keep_tombstones: int | None = Field(default=None, ge=0)
    history: KeptHistory | None = None
    compact_deltas: int = Field(default=8, ge=2)
    compact_fraction: float = Field(default=0.2, gt=0)
    compact_rows: int = Field(default=2_000_000, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _computed_of_before(cls, fields: Any) -> Any:
        # Declarations that were stored before the field say it in the input's name only.
        if isinstance(fields, dict) and "computed" not in fields:
            return {**fields, "computed": str(fields.get("input", "")).startswith("query ")}
        return fields

    @property
    def discard(self) -> DiscardPolicy:
        """The discard policy that was declared last."""
        return DiscardPolicy(self.keep, timedelta(seconds=self.grace_seconds))

    @property
    def compaction(self) -> DeltaCompaction:
        """The compaction policy that was declared last."""
        from dagster_adjunct.assets.declaration.following_changes import DeltaCompaction

        return DeltaCompaction(self.compact_deltas, self.compact_fraction, self.compact_rows)
