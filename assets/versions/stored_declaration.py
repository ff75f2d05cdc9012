"""What a dataset was declared as when it was made, and the refusal of a changed declaration, by name."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dagster_adjunct.assets.declaration.changes.change_order import PositionType
from dagster_adjunct.assets.declaration.dataset import Kind
from dagster_adjunct.assets.declaration.discard_policy import DiscardPolicy
from dagster_adjunct.assets.declaration.inputs_besides_streams import OwnedBy, QuerySource
from dagster_adjunct.assets.versions.document_base import ManifestPart
from dagster_adjunct.assets.versions.kept_history import KeptHistory
from dagster_adjunct.resources.errors import DatasetError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.declaration.following_changes import DeltaCompaction
    from dagster_adjunct.resources.schemas.schema import Schema


class DatasetDeclaration(ManifestPart):
    """What must not change while a dataset's entries live: read back to refuse a changed declaration by name.

    `computed` says that the input is a query, and `owner` which application owns a local table; `expires` is the column
    of a table of state that says when a row is gone, and `kept_for` what it is kept for. `partitions` None is a
    broadcast copy. `columns` are what new versions store, None for all of the input's. `input_partitions` is how many
    partitions the input had when the dataset was made (0: files, a query or a local table).
    `order` says whether versions follow each other as they arrive, or by name (version partitions), and `by_time` that
    the time counts since when they are valid. `keep` and `grace_seconds` are the discard policy; of an unbounded
    dataset `compact_…` are the compaction policy, `order_by` is what positions are made of, and `keep_tombstones` how
    far below the newest position deletions are remembered. `history` says whose rows are kept over time, and how far
    back. Order and policies may change: they are those of the last advance.
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
    by_time: bool = False
    keep: int | None = Field(default=3, ge=1)
    grace_seconds: float = Field(default=86_400.0, ge=0)
    order_by: tuple[str, ...] | None = None
    position_type: PositionType = "bigint"
    keep_tombstones: int | None = Field(default=None, ge=0)
    history: KeptHistory | None = None
    compact_deltas: int = Field(default=8, ge=2)
    compact_fraction: float = Field(default=0.2, gt=0)
    compact_rows: int = Field(default=2_000_000, ge=1)

    @property
    def discard(self) -> DiscardPolicy:
        """The discard policy that was declared last."""
        return DiscardPolicy(self.keep, timedelta(seconds=self.grace_seconds))

    def with_policies_of(self, declared: DatasetDeclaration) -> DatasetDeclaration:
        """Return this declaration of a dataset that arrives in versions with order and policy as they are declared."""
        changing = ("order", "by_time", "keep", "grace_seconds")
        return self.model_copy(update={name: getattr(declared, name) for name in changing})

    @property
    def compaction(self) -> DeltaCompaction:
        """The compaction policy that was declared last."""
        from dagster_adjunct.assets.declaration.following_changes import DeltaCompaction

        return DeltaCompaction(self.compact_deltas, self.compact_fraction, self.compact_rows)


def declaration_of(
    spec: AdjunctDataset, schema: Schema, *, input_partitions: int = 0, position_type: PositionType = "bigint"
) -> DatasetDeclaration:
    """Return what the manifest keeps of a specification whose entries have these columns."""
    return DatasetDeclaration(
        kind=spec.kind,
        input=str(spec.input),
        computed=isinstance(spec.input, QuerySource),
        owner=spec.input.application if isinstance(spec.input, OwnedBy) else None,
        expires=spec.input.expires if isinstance(spec.input, OwnedBy) else None,
        kept_for=spec.input.kept_for if isinstance(spec.input, OwnedBy) else "",
        key=spec.key,
        history=kept_history(spec),
        key_types=tuple(schema.field(name).type for name in spec.key),
        partition_by=spec.partition_by,
        partitions=spec.partitions,
        input_partitions=input_partitions,
        columns=spec.columns,
        bootstrap=spec.bootstrap,
        order="arrival" if spec.versions is None else "name",
        by_time=spec.valid_from is not None,
        keep=spec.discard.keep,
        grace_seconds=spec.discard.grace.total_seconds(),
        order_by=spec.following.order,
        position_type=position_type,
        keep_tombstones=spec.following.keep_tombstones,
        compact_deltas=spec.following.compaction.deltas,
        compact_fraction=spec.following.compaction.fraction,
        compact_rows=spec.following.compaction.rows,
    )


def kept_history(spec: AdjunctDataset) -> KeptHistory | None:
    """Return what a version says of the history that is declared; None where none is."""
    following = spec.following
    if following.history is None:
        return None
    kept = None if following.history == "all" else following.history // timedelta(microseconds=1)
    return KeptHistory(valid_from=following.valid_from, kept=kept)


def check_declaration(name: str, stored: DatasetDeclaration, declared: DatasetDeclaration) -> None:
    """Refuse a declaration under which the stored entries could not be found again, naming each difference."""
    changes = [
        f"{what} is {_told(new)}, was {_told(old)}"
        for what, old, new in (
            ("kind", stored.kind, declared.kind),
            ("input", stored.input, declared.input),
            ("key", stored.key, declared.key),
            ("type of the key", stored.key_types, declared.key_types),
            ("partition_by", stored.partition_by, declared.partition_by),
            ("partitions", stored.partitions or "broadcast", declared.partitions or "broadcast"),
            ("number of input partitions", stored.input_partitions, declared.input_partitions),
            ("history", *(_history(declaration) for declaration in (stored, declared))),
        )
        if old != new
    ]
    if changes:
        in_place = None not in (stored.partitions, declared.partitions) and stored.partitions != declared.partitions
        raise DatasetError(
            f"dataset {name!r} was built under another declaration: {'; '.join(changes)}. That needs a rebuild.",
            "Declare it under a new name, which builds it beside the old one, or restore the old declaration. To build "
            f"it anew, delete it (adjunct dataset delete {name} --reason …) and advance it again."
            + (f" Partitions can be changed in place: adjunct dataset repartition {name} --partitions N." * in_place),
            dataset=name,
        )


def _history(declaration: DatasetDeclaration) -> str:
    """Return whose times rows are kept by; how far back may change."""
    if declaration.history is None:
        return "none"
    return f"by {declaration.history.valid_from or 'the time of the record'}"


def _told(value: object) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, tuple) else str(value)
