"""The records of change streams: for each key whose entry differs between two versions of a
dataset, the entry or a tombstone, or the entries before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from dagster_adjunct.assets.reading.diff import common_type
from dagster_adjunct.assets.reading.entry_changes import ComparedVersions, EntryChanges, ReaderPair
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
class RecordForm:
    """What all records of the changes of a dataset have in common.

    `key` and `partition_by` are those of the dataset, `partitions` the number of partitions of the
    stream. `columns` are those of the dataset. With `images`, records have the entries before and
    after.
    """

    dataset: str
    key: tuple[str, ...]
    partition_by: tuple[str, ...]
    partitions: int
    columns: Schema
    images: bool

    @property
    def schema(self) -> Schema:
        """The columns of the records."""
        return record_columns(self.columns, self.key, images=self.images)


@dataclass(frozen=True, slots=True)
class ChangeRecords:
    """The records of a range of one partition: the changes between the two `compared` versions.

    `first` is the offset of the first record, `version` is what was served at the end, and `at` is
    since when. Without `before_known`, images must not have the entries before.
    """

    store: StoreDescriptor
    form: RecordForm
    partition: int
    compared: ComparedVersions
    first: int
    version: str | None
    at: datetime
    before_known: bool = True

    def read(self, store: ObjectStore | None = None) -> Iterator[pa.Table]:
        """Yield the records in the order of keys, from `store`, by default one that is opened."""
        offset = self.first
        for changes in self._changes(store or self.store.open()):
            table = self._with_meta(self._columns_of(changes), changes, offset)
            offset += table.num_rows
            yield table

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the records, in a task."""
        for table in self.read():
            yield from table.to_batches()

    def _changes(self, store: ObjectStore) -> Iterator[pa.RecordBatch]:
        """Yield the changes of this partition, in the order of keys."""
        old = self.compared.old
        new = self.compared.new
        if new is None:
            if old is not None:  # all entries are deleted: the reverse of inserting them
                inserted = EntryChanges(None, self._reader(store, old))
                yield from map(_reversed, self._in_partition(inserted))
            return
        before = None
        if old is not None:
            before = self._reader(store, old)
        compactions = []
        for pair in self.compared.compactions:
            readers = ReaderPair(self._reader(store, pair.before), self._reader(store, pair.after))
            compactions.append(readers)
        changes = EntryChanges(before, self._reader(store, new), compactions)
        yield from self._in_partition(changes)

    def _reader(self, store: ObjectStore, version: SealedVersion) -> VersionReader:
        """Return a reader of one of the compared versions."""
        return VersionReader(store, self.form.dataset, version)

    def _in_partition(self, changes: EntryChanges) -> Iterator[pa.RecordBatch]:
        """Yield those of the changes that are in this partition."""
        partitions = self.form.partitions
        are_buckets_partitions = all(
            version.layout.partitions == partitions for version in self.compared.ends
        )
        if are_buckets_partitions:
            yield from changes.batches(self.partition)
            return
        # The dataset was repartitioned since.
        for batch in changes.batches():
            keys = pa.Table.from_batches([pa.RecordBatch.from_struct_array(batch.column("key"))])
            hashed = spark_hash([keys.column(name) for name in self.form.partition_by])
            own = batch.filter(pa.array(hashed % partitions == self.partition))
            if own.num_rows:
                yield own

    def _columns_of(self, changes: pa.RecordBatch) -> list[pa.Array]:
        """Return the columns of the records, without those of RECORD_META."""
        keys = changes.column("key")
        after = changes.column("after")
        if self.form.images:
            before = self._before(changes.column("before"))
            key_columns = [pc.struct_field(keys, [index]) for index in range(keys.type.num_fields)]
            version = pa.array([self.version] * len(before), pa.string())
            at = pa.array([self.at] * len(before), arrow_type("timestamp"))
            return [*key_columns, changes.column("kind"), before, after, version, at]
        columns = []
        for name in self.form.columns.names:
            if name in self.form.key:  # deletions have no entry, but a key
                entries = keys
            else:
                entries = after
            columns.append(pc.struct_field(entries, [entries.type.get_field_index(name)]))
        return columns

    def _before(self, entries: pa.StructArray) -> pa.StructArray:
        """Return the entries before with the columns of now; all null if they must not be shown.

        A column is null that they lack, or that they have with a type whose values are not all
        values of the type of now.
        """
        members = list(self.form.columns.to_arrow())
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
        self, columns: Sequence[pa.Array], changes: pa.RecordBatch, offset: int
    ) -> pa.Table:
        """Return the records: these columns, and those of RECORD_META, with offsets from `offset`
        on.
        """
        count = changes.num_rows
        if self.form.images:  # a deletion is a record like others, not a tombstone
            is_tombstone = pa.array(np.zeros(count, bool))
        else:
            is_tombstone = pc.equal(changes.column("kind"), "delete")
        meta = [
            pa.array(np.full(count, self.partition, np.int32)),
            pa.array(np.arange(offset, offset + count, dtype=np.int64)),
            pa.array([self.at] * count, arrow_type("timestamp")),
            is_tombstone,
            pa.array(np.zeros(count, np.int32)),
        ]
        return pa.Table.from_arrays([*columns, *meta], schema=records_schema(self.form.schema))


def _reversed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return inserts as the deletions that undo them."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns["kind"] = pa.array(["delete"] * batch.num_rows)
    inserted = columns["after"]
    columns["after"] = columns["before"]
    columns["before"] = inserted
    return pa.RecordBatch.from_pydict(columns)


def record_columns(columns: Schema, key: Sequence[str], *, images: bool) -> Schema:
    """Return the columns of the records of changes of a dataset with these columns: the same, or
    with `images` the key and those of images.

    `before` and `after` are sensitive if one of the dataset's columns is. Raises
    SchemaMismatchError if a key column has the name of one of images.
    """
    if not images:
        return columns
    shared = sorted({*key} & {*_IMAGE_COLUMNS})
    if shared:
        raise errors.SchemaMismatchError(
            f"changes with the entries before and after have the columns"
            f" {', '.join(_IMAGE_COLUMNS)} next to the key, and the key has {shared[0]!r} itself.",
            "Read the changes without them: leave images out. Or rename the column of the dataset.",
            column=shared[0],
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
