"""A sealed version: what is needed to read it, its verdicts, and its entry in the manifest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AwareDatetime,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

from dagster_adjunct.assets.declaration.change_values import PositionType
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    BoundedDataset,
    DatasetKind,
    LocalTable,
    QuerySource,
    UnboundedDataset,
)
from dagster_adjunct.assets.declaration.policies import DeltaCompaction, DiscardPolicy
from dagster_adjunct.resources.bucketing.files import (
    HAS_ENDS,
    IS_FIRST,
    SET_AT,
    VALID_FROM,
    VALID_TO,
    BucketLayout,
    Generation,
)
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.schemas.column_changes import ColumnChanges
from dagster_adjunct.resources.schemas.paths import Path, split_path, steps_among, write_path
from dagster_adjunct.resources.schemas.schema import AS_NAMED, Schema, StoredNames, StoredNamesField
from dagster_adjunct.resources.schemas.types import Struct, parse_type
from dagster_adjunct.resources.schemas.values import MICROS
from dagster_adjunct.resources.schemas.version_columns import NamedColumns
from dagster_adjunct.resources.streams.system import PARTITION
from dagster_adjunct.resources.validation import validated

StoredSchema = Annotated[
    Schema,
    BeforeValidator(lambda value: value if isinstance(value, Schema) else Schema.from_json(value)),
    PlainSerializer(Schema.to_json),
]
StoredGeneration = Annotated[
    Generation,
    BeforeValidator(
        lambda value: value if isinstance(value, Generation) else Generation.from_json(value)
    ),
    PlainSerializer(Generation.to_json),
]
Offset = Annotated[str, Field(min_length=1)]


class ManifestPart(StoredDocument):
    """A frozen part of a manifest; unknown fields make it malformed."""

    # For Schema and Generation. Fields with a schema are called `columns`, because pydantic has a
    # method `schema`.
    model_config = ConfigDict(arbitrary_types_allowed=True)

    def after(self, **changes: Any) -> Self:
        """Return this document with some fields replaced, validated again as a whole."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **changes})


HISTORY = ((VALID_FROM, "timestamp"), (VALID_TO, "timestamp"), (IS_FIRST, "boolean"))
"""The columns that rows with history have in files next to `__position` and `__tombstone`.

A row is valid from `__valid_from` (included) to `__valid_to` (excluded). A base stores the end of
each row, null if it is still valid, and in `__first` whether it is the first row of its key. Rows
of deltas have null in both: the values follow from reading base and deltas together.
"""

_EPOCH = datetime.fromtimestamp(0, UTC)


def datetime_from_micros(micros: int) -> datetime:
    """Return the UTC time of this number of microseconds since the epoch."""
    return _EPOCH + timedelta(microseconds=micros)


class KeptHistory(ManifestPart):
    """The history of a version: which times it uses, and how far back it reaches.

    `valid_from` is the column with the time since when an entry is valid; None is the record's
    time. `kept` is how far below the newest `__valid_from` answers are exact, in microseconds; None
    is without limit. `pruned` is the time up to which a major compaction has dropped rows, in
    microseconds since the epoch; None if it dropped none.
    """

    valid_from: str | None = None
    kept: int | None = Field(default=None, ge=0)
    pruned: int | None = None

    def edge(self, newest: int | None) -> int | None:
        """Return the history's edge: the earliest time with exact answers, None if all times have
        them.

        Times are in microseconds since the epoch. `newest` is the highest `__valid_from` of the
        version, None without rows. An edge before the year 1 is none, because nothing is valid from
        before it.
        """
        edges = [MICROS[0] - 1]  # before the year 1
        if self.pruned is not None:
            edges.append(self.pruned)
        if self.kept is not None and newest is not None:
            edges.append(newest - self.kept)
        edge = max(edges)
        if edge < MICROS[0]:
            return None
        return edge


def describe_history_length(history: KeptHistory | None) -> str:
    """Return how far back a history is kept, in words; "none" without a history."""
    if history is None:
        return "none"
    if history.kept is None:
        return "all"
    return str(timedelta(microseconds=history.kept))


def has_row_ends(generation: Generation) -> bool:
    """Whether a generation's rows over time store when they end: those of a base do, those of
    deltas don't. False without files.
    """
    have_ends = [bool(file.stats.get(HAS_ENDS)) for file in generation.files]
    return bool(have_ends) and all(have_ends)


def count_current_rows(generation: Generation) -> int | None:
    """Return the number of a generation's rows that are valid now; None if its rows do not store
    when they end.
    """
    if not generation.files:
        return 0
    if not has_row_ends(generation):
        return None
    return sum(int(file.stats["current"]) for file in generation.files)


def find_newest_valid_from(generations: Iterable[Generation]) -> int | None:
    """Return the highest `__valid_from` in the files of these generations, in microseconds; None
    without rows.
    """
    highest_of_files: list[int] = []
    for generation in generations:
        for file in generation.files:
            span = file.stats.get("range")
            if span:
                _, highest = span
                highest_of_files.append(int(highest))
    return max(highest_of_files, default=None)


POSITION = "__position"
TOMBSTONE = "__tombstone"


@validated
class Verdict(ManifestPart):
    """One validator's result for a version. With `severity` "warn" it never rejects the version."""

    name: str
    passed: bool
    severity: Literal["error", "warn"] = "error"
    message: str = ""
    facts: dict[str, Any] = Field(default_factory=dict)
    # the message without values of sensitive columns
    without_values: str = Field(default="", exclude=True)


class VersionFacts(ManifestPart):
    """What a version's own document and its entry in the manifest both say of it.

    `rows` is exact, and None if only merging deltas would tell. `valid_from` is the time since when
    its entries are valid, if the dataset declares it.
    """

    id: str = Field(pattern=r"^v\d{6,}-[A-Za-z0-9][A-Za-z0-9_-]*$")
    number: int = Field(ge=1)
    name: str | None
    rows: int | None = Field(default=None, ge=0)
    sealed_at: AwareDatetime
    verdicts: tuple[Verdict, ...] = ()
    valid_from: AwareDatetime | None = None


class StoredPositions(ManifestPart):
    """What rows store about the changes that they come from.

    Each row has its position, of this `type`: its input offset, or the values of `order_by`.
    `with_partition` means that it has the partition of its stream, too, and `by_column` which
    changes have set its columns.
    """

    type: PositionType = "bigint"
    with_partition: bool = False
    by_column: bool = False


_OFFSET_POSITIONS = StoredPositions()


class RowForm(ManifestPart):
    """How rows are identified, spread and ordered: the same in a declaration and in a version.

    `partitions` None is one file, a broadcast copy. `positions` says what rows store that have
    positions. With `history`, each key has one row per `__valid_from`. An interval of a key ends
    where one of `history_columns` changes; None are all columns.
    """

    key: tuple[str, ...] = Field(min_length=1)
    partition_by: tuple[str, ...]
    partitions: int | None = Field(default=None, ge=1)
    order_by: tuple[str, ...] | None = None
    positions: StoredPositions = _OFFSET_POSITIONS
    history: KeptHistory | None = None
    history_columns: tuple[str, ...] | None = None


class SealedVersion(VersionFacts, RowForm):
    """One version: everything needed to read it, and its origin.

    A bounded version has one generation and the name given by its markers. An unbounded one has a
    base and the deltas after it, oldest first. `digest` is the sum of the rows' hashes modulo
    2**64. `offsets` are the ranges [start, end) of the input that this version read, by stream
    partition. `positioned` means that rows store their position. `names` are the names that files
    have for the columns, and those of dropped ones. A `projected` version has other columns than
    when it was built; it is never stored.
    """

    columns: StoredSchema
    names: StoredNamesField = AS_NAMED
    projected: bool = Field(default=False, exclude=True)
    positioned: bool
    generations: tuple[StoredGeneration, ...] = Field(min_length=1)
    digest: int | None = None
    offsets: dict[str, tuple[Offset, Offset]]
    counters: dict[str, int] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Raise ValueError for keys that are no columns, and generations out of order or with files
        in wrong buckets.
        """
        columns = self.columns.names
        for name in (*self.key, *self.partition_by):
            if name not in columns:
                raise ValueError(
                    f"key column {name!r} is not among the columns {', '.join(columns)}"
                )
        ids = [generation.id for generation in self.generations]
        if ids != sorted(set(ids)):
            raise ValueError(f"generations are numbered {ids}: expected rising numbers")
        for generation in self.generations:
            _check_buckets(generation, self.layout.partitions)
        return self

    @property
    def layout(self) -> BucketLayout:
        """The layout of rows in files; a broadcast copy is one file."""
        layout = build_layout(
            self.columns,
            self.key,
            self.partition_by,
            self.partitions,
            self.positions if self.positioned else None,
            over_time=self.history is not None,
        )
        return replace(layout, names=self.names, projected=self.projected)

    @property
    def named_columns(self) -> NamedColumns:
        """Its columns with their stored names."""
        return NamedColumns(self.columns, self.names)

    def named_as(self, other: NamedColumns, *, keep_others: bool = False) -> Self:
        """Return this version with the names that its columns have among `other` columns of the
        dataset; unchanged if these are the same.

        Columns that are not among the others, because they were dropped, are left out; with
        `keep_others` only if another column has their name now.
        """
        named = self.named_columns.named_as(other, keep_others=keep_others)
        if named == self.named_columns:
            return self
        name_of_stored = {named.names.of((), name): name for name in named.schema.names}
        history = self.history
        if history is not None and history.valid_from is not None:
            stored = self.names.of((), history.valid_from)
            history = history.after(valid_from=name_of_stored.get(stored))
        history_columns = self.history_columns
        if history_columns is not None:
            stored_columns = [self.names.of((), name) for name in history_columns]
            kept = [name_of_stored[name] for name in stored_columns if name in name_of_stored]
            history_columns = tuple(kept)
        return self._projected_to(named, history=history, history_columns=history_columns)

    def read_as(self, other: NamedColumns) -> Self:
        """Return this version with just these columns of the dataset, null where it lacks one."""
        missing = self.named_columns.named_as(other).names.retired
        names = StoredNames(other.names.names, other.names.retired | missing)
        return self._projected_to(NamedColumns(other.schema, names))

    def _projected_to(self, columns: NamedColumns, **changes: Any) -> Self:
        """Return this version, read with these columns and with other changes."""
        return self.after(columns=columns.schema, names=columns.names, projected=True, **changes)

    @property
    def compared(self) -> tuple[Path, ...]:
        """The values in which adjacent entries of a key are compared: with equal ones, they are one
        entry. These are the `history_columns`; without them, all but the key and the history's
        `valid_from`, which may be a part of a column.
        """
        if self.history_columns is not None:
            fields = [self.columns.field(name) for name in self.history_columns]
            return tuple(Path((field.name,), field.type) for field in fields)
        valid_from: tuple[str, ...] = ()
        if self.history is not None and self.history.valid_from is not None:
            valid_from = steps_among(self.history.valid_from, self.columns.names)
        found: list[Path] = []
        for field in self.columns.fields:
            if field.name not in self.key:
                found += _paths_without(Path((field.name,), field.type), valid_from)
        return tuple(found)

    @property
    def latest_columns(self) -> tuple[str, ...]:
        """The columns that have, in an interval, the values of its end: with `history_columns`, the
        others.
        """
        if self.history_columns is None:
            return ()
        fixed = {*self.key, *self.history_columns}
        if self.history is not None and self.history.valid_from is not None:
            fixed.add(self.history.valid_from)
        return tuple(name for name in self.columns.names if name not in fixed)

    @property
    def edge(self) -> int | None:
        """The history's edge: the earliest time with exact answers, None if all have them (see
        `KeptHistory.edge`).
        """
        if self.history is None:
            return None
        return self.history.edge(find_newest_valid_from(self.generations))

    @property
    def folders(self) -> frozenset[str]:
        """The folders of its generations."""
        return frozenset(generation.folder for generation in self.generations)

    @property
    def nonempty(self) -> tuple[Generation, ...]:
        """Its generations that have rows, oldest first."""
        return tuple(generation for generation in self.generations if generation.files)

    @property
    def lacks_base(self) -> bool:
        """Whether an erasure has removed the base, and all rows are in one delta, which can't be
        read as entries. A delta has tombstones, or with a history rows without their ends.
        """
        stored = self.nonempty
        if len(stored) != 1:
            return False
        if self.history is None:
            has_tombstones = self.rows is None
            return has_tombstones and self.order_by is None  # ordered, a base has some, too
        return False in (file.stats.get(HAS_ENDS) for file in stored[0].files)

    @property
    def stored_rows(self) -> int:
        """The number of rows in all files, with superseded ones and tombstones of deltas."""
        return sum(generation.rows for generation in self.generations)


def _paths_without(value: Path, without: tuple[str, ...]) -> list[Path]:
    """Return the value; if the steps `without` lead to a part of it, its other parts; [] if they
    lead to the value itself.
    """
    depth = len(value.steps)
    if value.steps != without[:depth]:
        return [value]
    found: list[Path] = []
    type_ = parse_type(value.type)
    if isinstance(type_, Struct) and depth < len(without):
        for member in type_.members:
            part = Path((*value.steps, member.name), str(member.type))
            found += _paths_without(part, without)
    return found


def _check_buckets(generation: Generation, partitions: int) -> None:
    """Raise ValueError if a file is of no bucket, or if a bucket has several files."""
    buckets = [file.bucket for file in generation.files]
    allowed = range(partitions)
    distinct = {bucket for bucket in buckets if bucket in allowed}
    if len(distinct) < len(buckets):
        raise ValueError(
            f"generation {generation.id} has files for buckets {buckets}: expected each of "
            f"0 to {partitions - 1} at most once"
        )


def build_layout(
    columns: Schema,
    key: tuple[str, ...],
    partition_by: tuple[str, ...],
    partitions: int | None,
    positions: StoredPositions | None,
    *,
    over_time: bool = False,
) -> BucketLayout:
    """Return the layout of a version's rows in files; `partitions` None is one file.

    `positions` is what rows store about their changes, None for rows without positions. Rows over
    time are unique by key and `__valid_from`, and sorted by them.
    """
    hidden: list[tuple[str, str]] = []
    if positions is not None:
        hidden += [(POSITION, positions.type), (TOMBSTONE, "boolean")]
        if positions.with_partition:
            hidden.append((PARTITION, "int"))
        if positions.by_column:
            hidden.append((SET_AT, "string"))
    if over_time:
        key = (*key, VALID_FROM)
        hidden += HISTORY
    return BucketLayout(columns, partition_by, partitions or 1, key, tuple(hidden))


def mark_sensitive(spec: AdjunctDataset, columns: Schema) -> Schema:
    """Return the columns with the dataset's sensitive ones marked as such."""
    return columns.with_sensitive(*(name for name in spec.masked if name in columns))


def build_version(
    spec: AdjunctDataset,
    columns: Schema,
    generations: Sequence[Generation],
    *,
    name: str | None = None,
    **facts: Any,
) -> SealedVersion:
    """Return a version of a declared dataset with these columns and generations, oldest first.

    Rows of a dataset that follows changes store their position. `name` is that of a delivered
    version, None for a table. `facts` are the other fields of the version.
    """
    order_by = None
    if isinstance(spec, UnboundedDataset):
        order_by = spec.following.order
    return SealedVersion(
        name=name,
        # So that who reads it without the declaration masks them, too.
        columns=mark_sensitive(spec, columns),
        key=spec.key,
        partition_by=spec.partition_by,
        partitions=spec.partitions,
        history_columns=spec.history_columns,
        positioned=spec.follows_changes,
        order_by=order_by,
        generations=tuple(generations),
        **facts,
    )


@validated
class VersionRef(VersionFacts):
    """A retained version as the manifest lists it: its document and the folders that it needs.

    `document` is the object with its SealedVersion, None for a version rejected before it was
    built. `folders` are those of its generations. `reason` is why it was rejected, revoked or
    accepted. `replaced` is the id of the version that was current before the switch to this one.
    """

    state: Literal["sealed", "rejected", "revoked"] = "sealed"
    document: str | None
    folders: tuple[str, ...] = ()
    bytes: int = 0
    reason: str = ""
    replaced: str | None = None

    @property
    def objects(self) -> tuple[str, ...]:
        """The folders and the document that it needs."""
        if self.document is None:
            return self.folders
        return (*self.folders, self.document)


def version_id(number: int, attempt: str) -> str:
    """Return the id of a version: its number, and the id of the attempt or commit that made it."""
    return f"v{number:06d}-{attempt}"


_VERSION_NUMBER = re.compile(r"v(?P<number>[0-9]+)(?:-|\Z)")


def version_number(version: str) -> int:
    """Return the number in a version's id, which is an unbounded dataset's commit; 0 for any
    other text.
    """
    found = _VERSION_NUMBER.match(version)
    if found is None:
        return 0
    return int(found["number"])


class Ownership(ManifestPart):
    """Which application owns a local table, None for another dataset.

    `expires` is the column of a state table with the expiry of a row, `kept_for` the purpose of
    that table, and `zone_rules` the rules of the time zone that its times depend on.
    """

    owner: str | None = None
    expires: str | None = None
    kept_for: str = ""
    zone_rules: str = ""


class DeclaredInput(ManifestPart):
    """The input of a dataset, as its declaration stores it.

    `computed` means that it is a query. `input_partitions` is the number of its partitions (0:
    files, a query or a local table). `input_names` are the stored names of its columns, if entries
    are its records.
    """

    input: str
    computed: bool = False
    input_partitions: int = Field(ge=0)
    input_names: StoredNamesField = AS_NAMED


class DatasetDeclaration(RowForm, DeclaredInput, Ownership):
    """The stored declaration of a dataset, compared with the current one to reject incompatible
    changes.

    `columns` are those that new versions store, None for all of the input's; `paths` are what some
    of them are made of, by name. `order` is the order of
    versions: by arrival or by name (version partitions); with `by_time` it is by the time since
    when they are valid. For an unbounded dataset, `groups` are the columns that each name of
    `order_by` orders, if they have orders of their own, and `keep_tombstones` is how far below the
    newest position deletions are kept. Order and policies may change: they are those of the last
    advance.
    """

    kind: DatasetKind
    key_types: tuple[str, ...]
    columns: tuple[str, ...] | None = None
    paths: dict[str, str] = Field(default_factory=dict)
    bootstrap: bool = True
    order: Literal["arrival", "name"] = "arrival"
    by_time: bool = False
    discard: DiscardPolicy = DiscardPolicy()
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    keep_tombstones: int | None = Field(default=None, ge=0)
    compaction: DeltaCompaction = DeltaCompaction()

    def describe_column(self, name: str) -> str:
        """Return the name of a stored column, and what it is made of if that is a path."""
        if name not in self.paths:
            return name
        return f"{self.paths[name]} as {name}"

    def named_now(self, changes: ColumnChanges) -> Self:
        """Return this declaration with the names that its columns have after these renames."""
        paths = {name: changes.follow(path) for name, path in self.paths.items()}
        history = self.history
        if history is not None and history.valid_from is not None:
            history = history.after(valid_from=changes.follow(history.valid_from))
        return self.model_copy(update={"paths": paths, "history": history})

    @property
    def history_time(self) -> str:
        """Which times the history uses, in words: these must not change, but how far back it
        reaches may.
        """
        if self.history is None:
            return "none"
        return f"by {self.history.valid_from or 'the time of the record'}"


def declaration_from_spec(
    spec: AdjunctDataset,
    schema: Schema,
    *,
    input_partitions: int = 0,
    positions: StoredPositions = _OFFSET_POSITIONS,
    input_names: StoredNames = AS_NAMED,
) -> DatasetDeclaration:
    """Return the stored declaration of a dataset whose entries have these columns; the other
    parameters are its fields of these names.
    """
    return DatasetDeclaration(
        kind=spec.kind,
        input=str(spec.input),
        computed=isinstance(spec.input, QuerySource),
        key=spec.key,
        history=history_from_spec(spec),
        history_columns=spec.history_columns,
        key_types=tuple(schema.field(name).type for name in spec.key),
        partition_by=spec.partition_by,
        partitions=spec.partitions,
        input_partitions=input_partitions,
        input_names=input_names,
        columns=spec.columns.names,
        paths=paths_of(spec),
        bootstrap=spec.bootstrap,
        discard=spec.discard,
        positions=positions,
        **_kind_facts(spec),
    )


def paths_of(spec: AdjunctDataset) -> dict[str, str]:
    """Return what the stored columns that are made of paths, or renamed, are made of."""
    return {column.name: write_path(column.steps) for column in spec.columns.paths}


def _kind_facts(spec: AdjunctDataset) -> dict[str, Any]:
    """Return the fields of the stored declaration that only this kind of dataset has."""
    match spec:
        case BoundedDataset():
            order = "arrival" if spec.versions is None else "name"
            return {"order": order, "by_time": spec.over_time}
        case UnboundedDataset():
            following = spec.following
            return {
                "order_by": following.order,
                "groups": dict(following.groups),
                "keep_tombstones": following.keep_tombstones,
                "compaction": following.compaction,
            }
        case LocalTable():
            owned = spec.input
            return {
                "owner": owned.application,
                "expires": owned.expires,
                "kept_for": owned.kept_for,
                "zone_rules": owned.zone_rules,
                "compaction": spec.compaction,
            }
        case _:
            raise TypeError(f"unknown kind of dataset: {type(spec).__name__}")


def history_from_spec(spec: AdjunctDataset) -> KeptHistory | None:
    """Return the history that a dataset declares, as versions store it; None if it declares
    none.
    """
    if not isinstance(spec, UnboundedDataset) or spec.following.history is None:
        return None
    history = spec.following.history
    kept = None
    if history.keep != "all":
        kept = history.keep // timedelta(microseconds=1)
    return KeptHistory(valid_from=history.valid_from, kept=kept)


def check_declaration(
    spec: AdjunctDataset, stored: DatasetDeclaration, declared: DatasetDeclaration
) -> None:
    """Raise DatasetError, naming each difference, for a declaration under which stored entries
    can't be kept; columns may be renamed as the dataset declares.
    """
    name = spec.name
    stored = stored.named_now(spec.evolution)
    before = _compared_facts(stored)
    after = _compared_facts(declared)
    if declared.kind == "unbounded":
        for column in sorted(stored.paths.keys() & declared.paths.keys()):
            before[f"column {column!r}"] = stored.paths[column]
            after[f"column {column!r}"] = declared.paths[column]
    changed = [what for what, old in before.items() if after[what] != old]
    if not changed:
        return
    step = (
        "Declare it under a new name, which builds it next to the old one, or restore the old"
        f" declaration. To rebuild it, delete it (adjunct dataset delete {name} --reason …) and"
        " advance it again."
    )
    ways = []
    key = _key_with_stored_names(stored, declared)
    if key:
        ways.append(f"key={json.dumps(key)}")
    renames = _possible_renames(stored, declared)
    if renames:
        ways.append(f"renamed={json.dumps(renames)}")
    if ways:
        step = f"If columns were renamed, declare {', '.join(ways)}. Else: {step}"
    partitions = (before["partitions"], after["partitions"])
    if "partitions" in changed and "broadcast" not in partitions:
        step += (
            " Partitions can be changed in place: adjunct dataset repartition"
            f" {name} --partitions N --reason …."
        )
    changes = "; ".join(
        f"{what} is {_format_value(after[what])}, was {_format_value(before[what])}"
        for what in changed
    )
    raise DatasetError(
        f"dataset {name!r} was built under another declaration: {changes}. That needs a rebuild.",
        step,
        dataset=name,
    )


def _key_with_stored_names(stored: DatasetDeclaration, declared: DatasetDeclaration) -> list[str]:
    """Return the key to declare so that its columns, which are at paths, keep their stored names;
    [] if they do, or if a column that differs is not at a path.
    """
    if stored.key == declared.key or len(stored.key) != len(declared.key):
        return []
    key = []
    for was, now in zip(stored.key, declared.key, strict=True):
        if was != now and not (was in stored.paths and now in declared.paths):
            return []
        path = declared.paths.get(now)
        key.append(was if path is None else f"{path} as {was}")
    return key


def _possible_renames(stored: DatasetDeclaration, declared: DatasetDeclaration) -> dict[str, str]:
    """Return the renames, by path, after which the stored declaration would name its columns as
    declared, as far as paths only differ in names; {} without any.
    """
    renames = {}
    for was, now in _paths_of_same_columns(stored, declared):
        before = split_path(was)
        after = split_path(now)
        if len(before) == len(after):
            for at, (old, new) in enumerate(zip(before, after, strict=True), 1):
                if old != new:
                    renames[write_path(before[:at])] = new
    return renames


def _paths_of_same_columns(
    stored: DatasetDeclaration, declared: DatasetDeclaration
) -> list[tuple[str, str]]:
    """Return the paths of each column that may be the same, as stored and as declared."""
    pairs = []
    for column in stored.paths.keys() & declared.paths.keys():
        pairs.append((stored.paths[column], declared.paths[column]))
    if _key_with_stored_names(stored, declared):
        for was, now in zip(stored.key, declared.key, strict=True):
            if was != now:
                pairs.append((stored.paths[was], declared.paths[now]))
    if stored.history is not None and declared.history is not None:
        pairs.append((stored.history.valid_from or "", declared.history.valid_from or ""))
    return pairs


def _compared_facts(declared: DatasetDeclaration) -> dict[str, object]:
    """Return the facts of a declaration that stored entries depend on, by what errors call them."""
    return {
        "kind": declared.kind,
        "input": declared.input,
        "key": tuple(map(declared.describe_column, declared.key)),
        "type of the key": declared.key_types,
        "partition_by": declared.partition_by,
        "partitions": declared.partitions or "broadcast",
        "number of input partitions": declared.input_partitions,
        "history": declared.history_time,
    }


def _format_value(value: object) -> str:
    """Return a fact of a declaration as errors show it."""
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))})"
    return str(value)
