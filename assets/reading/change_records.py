"""The records of change streams: for each key whose entry differs between two versions of a
dataset, the entry or a tombstone, or the entries before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from dagster_adjunct.assets.reading.diff import common_type
from dagster_adjunct.assets.reading.entry_changes import EntryChanges
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import SealedVersion
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.bucketing.hashing import spark_hash
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.objects.store import ObjectStore, StoreDescriptor
from dagster_adjunct.resources.schemas.arrow_values import cast_to
from dagster_adjunct.resources.schemas.schema import Field, Schema, schema_struct
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.streams.system import RECORD_META_COLUMNS

_IMAGE_COLUMNS = ("kind", "before", "after", "version", "at")


@dataclass(frozen=True, slots=True)
class ChangeRecords:
    """The records of a range of one partition, from the version `old` to `new` (None: nothing),
    with the `compactions` in between (see `EntryChanges`).

    `key` and `partition_by` are those of the dataset, `partitions` the number of partitions of the
    stream. `first` is the offset of the first record, `version` is what was served at the end, and
    `at` is since when. With `images`, records have the entries before and after; without
    `before_known` they must not have the former.
    """

    store: StoreDescriptor
    dataset: str
    partition: int
    partitions: int
    key: tuple[str, ...]
    partition_by: tuple[str, ...]
    columns: Schema
    old: SealedVersion | None
    new: SealedVersion | None
    compactions: tuple[tuple[SealedVersion, SealedVersion], ...]
    first: int
    version: str | None
    at: datetime
    images: bool
    before_known: bool = True

    def read(self, store: ObjectStore | None = None) -> Iterator[pa.Table]:
        """Yield the records in the order of keys."""
        number = self.first
        for changes in self._changes(store or self.store.open()):
            table = self._with_meta(self._columns_of(changes), changes, number)
            number += table.num_rows
            yield table

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the records, in a task."""
        for table in self.read():
            yield from table.to_batches()

    def _changes(self, store: ObjectStore) -> Iterator[pa.RecordBatch]:
        old, new = (self._reader(store, version) for version in (self.old, self.new))
        if new is None:
            if old is not None:  # what was an insert from nothing is now a deletion
                yield from map(_reversed, self._between(None, old))
        else:
            yield from self._between(old, new)

    def _reader(self, store: ObjectStore, version: SealedVersion | None) -> VersionReader | None:
        return None if version is None else VersionReader(store, self.dataset, version)

    def _between(self, old: VersionReader | None, new: VersionReader) -> Iterator[pa.RecordBatch]:
        compactions = []
        for pair in self.compactions:
            one, other = (VersionReader(new.store, self.dataset, version) for version in pair)
            compactions.append((one, other))
        changes = EntryChanges(old, new, compactions)
        readers = [new] if old is None else [old, new]
        if all(reader.sealed.layout.partitions == self.partitions for reader in readers):
            yield from changes.batches(self.partition)
            return
        # The dataset was repartitioned.
        for batch in changes.batches():
            keys = pa.Table.from_batches([pa.RecordBatch.from_struct_array(batch.column("key"))])
            hashed = spark_hash([keys.column(name) for name in self.partition_by])
            mine = batch.filter(pa.array(hashed % self.partitions == self.partition))
            if mine.num_rows:
                yield mine

    def _columns_of(self, changes: pa.RecordBatch) -> list[pa.Array]:
        """Return the columns of the records, without those of RECORD_META."""
        keys = changes.column("key")
        after = changes.column("after")
        if self.images:
            before = self._before(changes.column("before"))
            own = [pc.struct_field(keys, [index]) for index in range(keys.type.num_fields)]
            version = pa.array([self.version] * len(before), pa.string())
            at = pa.array([self.at] * len(before), arrow_type("timestamp"))
            return [*own, changes.column("kind"), before, after, version, at]
        columns = []
        for name in self.columns.names:
            values = pc.struct_field(after, [after.type.get_field_index(name)])
            if name in self.key:  # deletions have no entry, but a key
                values = pc.struct_field(keys, [keys.type.get_field_index(name)])
            columns.append(values)
        return columns

    def _before(self, entries: pa.StructArray) -> pa.StructArray:
        """Return the entries before with the columns of now: null if they are unknown, as is a
        column that they lack, or had with a type of which no value can be one of now.
        """
        members = list(self.columns.to_arrow())
        kind = pa.struct(members)
        if not self.before_known:
            return pa.nulls(len(entries), kind)
        if entries.type == kind:
            return entries
        columns = []
        for member in members:
            index = entries.type.get_field_index(member.name)
            values = pa.nulls(len(entries), member.type)
            if index >= 0:
                known = pc.struct_field(entries, [index])
                if common_type(known.type, member.type, all_members=True) == member.type:
                    values = cast_to(pa.chunked_array([known]), member.type).combine_chunks()
            columns.append(values)
        return pa.StructArray.from_arrays(columns, fields=members, mask=entries.is_null())

    def _with_meta(
        self, columns: Sequence[pa.Array], changes: pa.RecordBatch, number: int
    ) -> pa.Table:
        count = changes.num_rows
        is_deleted = pc.equal(changes.column("kind"), "delete")
        if self.images:
            is_deleted = pa.array(np.zeros(count, bool))
        meta = [
            pa.array(np.full(count, self.partition, np.int32)),
            pa.array(np.arange(number, number + count, dtype=np.int64)),
            pa.array([self.at] * count, arrow_type("timestamp")),
            is_deleted,
            pa.array(np.zeros(count, np.int32)),
        ]
        schema = records_schema(record_columns(self.columns, self.key, images=self.images))
        return pa.Table.from_arrays([*columns, *meta], schema=schema)


def _reversed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return inserts as the deletions that undo them."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns["kind"] = pa.array(["delete"] * batch.num_rows)
    columns["before"], columns["after"] = columns["after"], columns["before"]
    return pa.RecordBatch.from_pydict(columns)


def record_columns(columns: Schema, key: Sequence[str], *, images: bool) -> Schema:
    """Return the columns of the records of a dataset with these columns.

    With images, `before` and `after` are sensitive if one of the dataset's columns is.
    """
    if not images:
        return columns
    taken = sorted({*key} & {*_IMAGE_COLUMNS})
    if taken:
        raise errors.SchemaMismatchError(
            f"changes with the entries before and after have the columns"
            f" {', '.join(_IMAGE_COLUMNS)} next to the key, and the key has {taken[0]!r} itself.",
            "Read the changes without them: leave images out. Or rename the column of the dataset.",
            column=taken[0],
        )
    entry = str(schema_struct(columns))
    is_sensitive = bool(columns.sensitive)
    return Schema(
        (
            *columns.select(key).fields,
            Field("kind", "string"),
            Field("before", entry, sensitive=is_sensitive),
            Field("after", entry, sensitive=is_sensitive),
            Field("version", "string"),
            Field("at", "timestamp"),
        )
    )


def records_schema(columns: Schema) -> pa.Schema:
    """Return the Arrow schema of records with these columns: with those of RECORD_META."""
    meta = [pa.field(name, arrow_type(kind)) for name, kind in RECORD_META_COLUMNS]
    return pa.schema([*columns.to_arrow(), *meta])
