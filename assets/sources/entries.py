"""Entries made from an input's records: extractor, columns, and keys made of offsets.

Streams, files and queries share this, so that a declaration means the same for each of them.
Entries can be made without Spark if the stream system reads Arrow (the lake's streams do) and the
extractor is none, a Projection without expressions, or a PythonExtractor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.change_formats import Upserts
from dagster_adjunct.assets.declaration.change_values import (
    PositionType,
    find_path_problem,
    is_orderable,
    order_as_code,
    position_type,
)
from dagster_adjunct.assets.declaration.dataset import (
    BY_OFFSET,
    AdjunctDataset,
    BoundedDataset,
    LocalTable,
    UnboundedDataset,
    select_stored_columns,
)
from dagster_adjunct.assets.declaration.extractors import Projection, PythonExtractor, mask_columns
from dagster_adjunct.assets.declaration.policies import ColumnGroups
from dagster_adjunct.assets.versions.version import (
    DatasetDeclaration,
    StoredPositions,
    declaration_from_spec,
)
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams.streams import FileStreams
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.column_changes import find_known_part
from dagster_adjunct.resources.schemas.paths import (
    column_of,
    find_path,
    path_expression,
    read_path,
    require_value,
    split_path,
)
from dagster_adjunct.resources.schemas.schema import (
    AS_NAMED,
    Field,
    Schema,
    check_key_types,
    named_column,
    named_columns,
)
from dagster_adjunct.resources.streams.checked_reads import read_frame, read_table
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    META,
    OFFSET,
    PARTITION,
    TOMBSTONE,
    OffsetRange,
    StreamInfo,
    StreamSystem,
    SystemStreamPartition,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


_NO_KEY = "is a tombstone that has no entry's key: the key is not the record's own."
_NO_KEY_STEP = (
    "Key the dataset by columns that the extractor keeps, or deliver versions without tombstones."
)
_POSITION = (Field(BY_OFFSET[0], "int"), Field(BY_OFFSET[1], "bigint"))


def describe_input(spec: AdjunctDataset) -> str:
    """Return the dataset and its input, for errors."""
    return f"dataset {spec.name!r} (input {spec.input})"


def hides_values(spec: AdjunctDataset) -> bool:
    """Whether errors hide all values, because one may be that of a sensitive column."""
    return bool(spec.sensitive or getattr(spec.extractor, "sensitive", ()))


def derive_entry_schema(spec: AdjunctDataset, records: Schema) -> Schema:
    """Return the columns of entries made from records with these columns, after extractor and
    `columns`.

    For a change stream, `records` are the columns of the changed rows (see `derive_row_schema`).
    Raises SchemaMismatchError, naming the dataset, if key or `columns` name an unknown column, or
    if the key's type can't be compared exactly.
    """
    what = describe_input(spec)
    schema = records if spec.extractor is None else spec.extractor.schema(records, what)
    schema = select_stored_columns(spec, schema, what)
    if spec.by_offset:
        schema = _add_position_columns(spec, schema, what)
    check_key_types(schema, spec.key, what)
    _check_history_columns(spec, schema, what)
    if not spec.follows_changes:
        _check_sensitive(spec, records, schema, what)
    if isinstance(spec, UnboundedDataset) and spec.following.groups:
        _check_groups(spec, schema, what)
    return schema


def _check_groups(spec: UnboundedDataset, schema: Schema, what: str) -> None:
    """Raise SchemaMismatchError unless each stored column is in one group of `order_by`, whose
    ordering columns are numbers, dates or timestamps. Groups of which nothing is stored are those
    of other writers.
    """
    stored = [name for name in schema.names if name not in spec.key]
    for name, problem in _list_group_problems(spec, schema, stored):
        raise errors.SchemaMismatchError(
            f"{what}: the column {name!r} {problem}.",
            "Name each stored column in one group: order_by={ORDERING_COLUMN: [COLUMN, …], …}. Or"
            " leave columns out of the dataset with columns=, all of a group to pass over its"
            " changes.",
            dataset=spec.name,
            column=name,
            argument="order_by",
        )


def _list_group_problems(
    spec: UnboundedDataset, schema: Schema, stored: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield each column that is not in one group of these stored columns, or can't order one, and
    why.
    """
    named = []
    for order, columns in spec.following.groups:
        group = [order, *columns]
        if not set(group) & set(stored):  # it is stored elsewhere
            continue
        named += group
        if order in stored and position_type((order,), schema) != "bigint":
            kind = schema.field(order).type
            yield (
                order,
                f"orders a group, but is {kind}: expected an integer, a date or a timestamp",
            )
    if not named:
        yield spec.following.ordering[0], "orders a group, but no column of any group is stored"
    for name in named:
        if name not in stored:
            yield name, "is in a group of order_by, but is no stored column outside of the key"
    for name in stored:
        if name not in named:
            yield name, "is in no group of order_by, so nothing orders its changes"


def _check_sensitive(spec: AdjunctDataset, records: Schema, schema: Schema, what: str) -> None:
    """Raise SchemaMismatchError for a sensitive column or path that does not exist: its values
    would be shown.
    """
    for name in spec.sensitive:
        exists = records.column_of(name) is not None or schema.column_of(name) is not None
        if exists:
            continue
        names = sorted({*records.names, *schema.names})
        problem = f"{what} has no column {name!r}, which sensitive= names"
        for columns in (records, schema):
            part, fields = find_known_part(columns, name)  # a path that exists up to here
            if part:
                names = fields
                problem = f"{what} has no {name!r} in {part!r}, which sensitive= names"
        raise errors.SchemaMismatchError(
            f"{problem}; it has {', '.join(names) or 'no fields'}.",
            "Correct sensitive=: values of the column that is meant would be shown.",
            dataset=spec.name,
            argument="sensitive",
            column=name,
        )


def _check_history_columns(spec: AdjunctDataset, schema: Schema, what: str) -> None:
    """Raise SchemaMismatchError for a history column that entries don't have."""
    for name in spec.history_columns or ():
        if name not in schema:
            raise errors.SchemaMismatchError(
                f"{what} has no column {name!r}, which history_columns= names; entries have"
                f" {', '.join(schema.names)}.",
                "Name columns of the entries; a part of one needs a column of its own:"
                ' columns=[…, "address.city as city"].',
                dataset=spec.name,
                argument="history_columns",
                column=name,
            )


def _check_valid_from(name: str, rows: Schema, what: str) -> None:
    """Raise SchemaMismatchError unless `name`, which valid_from is, names a time or a date in the
    rows.
    """
    kind = require_value(
        name, rows.types, f"{what}: valid_from names {name!r}, and the record"
    ).type
    if kind not in ("date", "timestamp"):
        raise errors.SchemaMismatchError(
            f"{what}: valid_from names the column {name!r}, which is {kind}: expected a timestamp"
            " or a date.",
            "Name another column, or leave valid_from out to use the record's time.",
            column=name,
        )


def derive_stored_schema(spec: AdjunctDataset, records: Schema) -> Schema:
    """Return the columns that a dataset stores if the records of its input have these columns.

    Raises SchemaMismatchError, naming the dataset, as `derive_row_schema` and `derive_entry_schema`
    do.
    """
    if isinstance(spec, UnboundedDataset):
        records = derive_row_schema(spec, records)
    return derive_entry_schema(spec, records)


def derive_row_schema(spec: UnboundedDataset, stream_schema: Schema) -> Schema:
    """Return the columns of the rows that the change format makes from records, and the extractor
    receives.

    Raises SchemaMismatchError, naming the dataset, if the stream does not fit the declared change
    format or order.
    """
    what = describe_input(spec)
    following = spec.following
    rows = following.changes.schema(stream_schema, what)
    if following.history is not None and following.history.valid_from is not None:
        _check_valid_from(following.history.valid_from, rows, what)
    for name in following.ordering:
        _check_ordering(spec, rows, name, what)
    ordering = with_read_paths(spec, rows)
    if following.keep_tombstones is not None and (
        position_type(following.order, ordering) != "bigint"
    ):
        raise errors.SchemaMismatchError(
            f"{what}: keep_tombstones is {following.keep_tombstones}, and between values of "
            f"{order_as_code(following.ordering)} there is no distance.",
            "Leave it out, so that deletions are kept for ever, or order by an integer, a date or a"
            " timestamp.",
            dataset=spec.name,
            argument="keep_tombstones",
        )
    if spec.extractor is None:  # else sensitive columns may be those of its entries
        _check_sensitive(spec, stream_schema, rows, what)
    return rows


def with_read_paths(spec: UnboundedDataset, rows: Schema) -> Schema:
    """Return the columns of the rows, and one for each path into them by which changes are ordered
    or valid. That column has the path as its name, and is read, not stored.

    Names that the change format itself gives as an order, such as "source.lsn", are no such paths.
    """
    following = spec.following
    fields = list(rows.fields)
    for name in following.placing:
        if following.changes.orders(name):
            continue
        path = find_path(name, rows.types)
        if path is not None:
            fields.append(Field(name, path.type))
    return Schema(tuple(fields))


def select_relevant_columns(spec: UnboundedDataset, rows: Schema) -> Schema:
    """Return those columns of the rows that the dataset stores or uses: all without `columns`, or
    with an extractor. Bad values in other columns are ignored.
    """
    if spec.columns.names is None or spec.extractor is not None:
        return rows
    used = {spec.steps_to(name)[0] for name in spec.columns.names}
    for name in spec.following.placing:
        used |= {name, *split_path(name)[:1]}  # a column of that name, or with that path
    return Schema(tuple(field for field in rows.fields if field.name in used))


def _check_ordering(spec: UnboundedDataset, rows: Schema, name: str, what: str) -> None:
    """Raise SchemaMismatchError if changes can't be ordered by this name of `order_by`: a column or
    a path of another type, nothing that the changes have, or an order of the format that does not
    fit the other names.
    """
    changes = spec.following.changes
    order = spec.following.ordering
    readable = with_read_paths(spec, rows)
    if name in readable:
        kind = readable.field(name).type
        if is_orderable(kind):
            return
        problem = (
            f"order_by names the column {name!r}, which is {kind}: expected an integer, a decimal"
            " without fraction, a date, a timestamp, or a text of numbers."
        )
        step = "Order by another column, or by offset (leave order_by out)."
    elif not changes.orders(name):
        if column_of(name, rows.names) in rows.names:
            # A path into a column, which ends at no value: this raises, with the fields there.
            require_value(name, rows.types, f"{what}: order_by names {name!r}, and the row")
        problem = (
            f"order_by is {name!r}, and changes ({changes.describe()}) have no such column or"
            f" position: their columns are {', '.join(rows.names)}."
        )
        step = (
            "Name one of them; of Debezium's envelopes also source.lsn, source.ts_ms, ts_ms and"
            " their like."
        )
    elif (found := find_path_problem(order, name)) is not None:
        why, step = found
        problem = f"order_by names {name!r}: {why}."
    else:
        return
    raise errors.SchemaMismatchError(f"{what}: {problem}", step, dataset=spec.name, column=name)


def entries_from_frame(spec: AdjunctDataset, records: DataFrame, schema: Schema) -> DataFrame:
    """Return the entries made from records, with the columns of `schema` and those of META.

    If the records do not have the entries' key, a tombstone fails the job with SchemaMismatchError,
    because it is unknown which entry it deletes.
    """
    what = describe_input(spec)
    if spec.extractor is not None:
        extractor = mask_columns(spec.extractor, spec.masked)
        own = [name for name in records.columns if not name.startswith("__")]
        given = Schema.from_spark(records.select(*named_columns(own)).schema)
        records = extractor.apply(records, extracted_columns(spec, schema, given), what)
    values = {name: F.expr(path_expression(spec.steps_to(name))) for name in schema.names}
    values |= {name: named_column(name) for name in META}
    if spec.by_offset:
        values |= zip(BY_OFFSET, named_columns([PARTITION, OFFSET]), strict=True)
    if not _keeps_key(spec):
        values[TOMBSTONE] = _reject_tombstones_column(what)
    return records.select(*[value.alias(name) for name, value in values.items()])


def extracted_columns(spec: AdjunctDataset, schema: Schema, records: Schema) -> Schema:
    """Return the columns that the extractor has to make of `records` for entries with the columns
    of `schema`: without the record's position, which is a key, and with the columns into which
    paths lead.
    """
    assert spec.extractor is not None
    if not spec.columns.paths:
        return Schema(tuple(field for field in schema.fields if field.name not in BY_OFFSET))
    made = spec.extractor.schema(records, describe_input(spec))
    return made.select(dict.fromkeys(spec.steps_to(name)[0] for name in schema.names))


def _keeps_key(spec: AdjunctDataset) -> bool:
    """Whether records have the key of their entries, so that a tombstone deletes one."""
    if spec.by_offset:
        return False
    return spec.extractor is None or spec.extractor.keeps(spec.key_columns)


def _add_position_columns(spec: AdjunctDataset, schema: Schema, what: str) -> Schema:
    """Return the columns of `schema` after those of the record's position, which are the key.

    Raises SchemaMismatchError if one of these exists already, or if one record may become several
    entries.
    """
    for name in BY_OFFSET:
        if name in schema:
            raise errors.SchemaMismatchError(
                f"{what}: it is keyed by offset, which is stored as {' and '.join(BY_OFFSET)}, and"
                f" records already have a column {name!r}.",
                "Rename that column with a Projection, or leave it out with columns=.",
                dataset=spec.name,
                column=name,
            )
    if isinstance(spec.extractor, PythonExtractor):
        raise errors.SchemaMismatchError(
            f"{what}: it is keyed by offset, and extractor {spec.extractor.factory} may make"
            " several entries from one record, of which only one would be kept.",
            "Declare key columns of the entries, or use a Projection.",
            dataset=spec.name,
        )
    return Schema((*_POSITION, *schema.fields))


def _reject_tombstones_column(what: str) -> Column:
    """Return a column that is false, and fails the job with SchemaMismatchError for a tombstone."""
    from dagster_adjunct.resources.spark.tasks import raise_error_column

    place = F.concat(
        F.lit(f"{what}: the record at offset "),
        named_column(OFFSET).cast("string"),
        F.lit(" of partition "),
        named_column(PARTITION).cast("string"),
        F.lit(f" {_NO_KEY}"),
    )
    error = raise_error_column(errors.SchemaMismatchError, place, _NO_KEY_STEP)
    return F.when(named_column(TOMBSTONE), error).otherwise(F.lit(False))


def list_spark_needs(source: OpenedStream) -> list[str]:
    """Return, in words, why this dataset's entries can't be made without Spark; empty if they
    can.
    """
    return list_stream_spark_needs(source.spec, in_arrow=source.system.capabilities.reads_arrow)


def list_stream_spark_needs(spec: AdjunctDataset, *, in_arrow: bool) -> list[str]:
    """Return, in words, why the entries of a dataset with a stream can't be made without Spark;
    empty if they can. `in_arrow` says whether the stream can be read without Spark.
    """
    system = split_stream_name(str(spec.input)).system
    needed = list_extractor_spark_needs(spec)
    if not in_arrow:
        needed.insert(0, f"stream system {system!r}, whose records only Spark reads")
    return needed


def list_extractor_spark_needs(spec: AdjunctDataset) -> list[str]:
    """Return this dataset's extractor, in words, if it needs Spark; empty otherwise."""
    extractor = spec.extractor
    if extractor is None:
        return []
    if isinstance(extractor, Projection | PythonExtractor) and not extractor.needs_spark:
        return []
    return [f"the extractor ({extractor.describe()})"]


def raise_if_spark_needed(spec: AdjunctDataset, needed: list[str]) -> None:
    """Raise ConfigurationError if anything needs Spark."""
    if needed:
        raise errors.ConfigurationError(
            f"dataset {spec.name!r} (input {spec.input}) can't be made without Spark:"
            f" {'; '.join(needed)}.",
            "Pass a Spark session, or session_scope(), instead of IN_PROCESS.",
            dataset=spec.name,
        )


def entries_from_arrow(spec: AdjunctDataset, records: pa.Table, schema: Schema) -> pa.Table:
    """Return the entries made from records, with the columns of `schema` and those of META, in
    Arrow.

    Raises SchemaMismatchError for a tombstone if the records do not have the entries' key. The
    extractor is one that needs no Spark.
    """
    what = describe_input(spec)
    if spec.extractor is not None:
        extractor = mask_columns(spec.extractor, spec.masked)
        assert isinstance(extractor, Projection | PythonExtractor), "others were rejected before"
        data = [name for name in records.column_names if not name.startswith("__")]
        record_schema = Schema.from_arrow(records.select(data).schema)
        extracted = extracted_columns(spec, schema, record_schema)
        records = extractor.apply_arrow(records, extracted, what)
    if not _keeps_key(spec):
        deleted = records.filter(records.column(TOMBSTONE))
        if deleted.num_rows:
            offset, partition = (deleted.column(name)[0].as_py() for name in (OFFSET, PARTITION))
            raise errors.SchemaMismatchError(
                f"{what}: the record at offset {offset} of partition {partition} {_NO_KEY}",
                _NO_KEY_STEP,
                dataset=spec.name,
            )
    steps = {name: spec.steps_to(name) for name in schema.names}
    steps |= {name: (name,) for name in META}
    if spec.by_offset:
        steps |= zip(BY_OFFSET, [(PARTITION,), (OFFSET,)], strict=True)
    return pa.table({name: read_path(records, path) for name, path in steps.items()})


Offsets = Mapping[SystemStreamPartition, str]
Ranges = Mapping[SystemStreamPartition, tuple[str, str]]
"""(start, end) by partition: the first offset, and the one after the last."""


@dataclass(frozen=True, slots=True)
class OpenedStream:
    """A dataset's opened input stream: its partitions (`ssps`) as they were when it was opened.

    `info` describes the stream. `schema` are the columns that the dataset stores.
    """

    spec: AdjunctDataset
    system: StreamSystem
    info: StreamInfo
    ssps: tuple[SystemStreamPartition, ...]
    schema: Schema

    @property
    def records(self) -> Schema:
        """The columns of the stream's records."""
        assert self.info.schema is not None, "raw records are rejected when the stream is opened"
        return self.info.schema

    @property
    def declaration(self) -> DatasetDeclaration:
        """The dataset's declaration, as its manifest stores it."""
        return declaration_from_spec(
            self.spec,
            self.schema,
            input_partitions=len(self.ssps),
            positions=self.positions,
            input_names=self.info.names if self.stores_records else AS_NAMED,
        )

    @property
    def positions(self) -> StoredPositions:
        """What rows store about the records that they come from."""
        return StoredPositions(
            type=self.position_type,
            with_partition=self.stores_partitions,
            by_column=self.merges_columns,
        )

    @property
    def stores_records(self) -> bool:
        """Whether entries have the columns of the stream's records."""
        return self.spec.extractor is None

    @property
    def position_type(self) -> PositionType:
        """The type of the records' positions."""
        return "bigint"

    @property
    def stores_partitions(self) -> bool:
        """Whether stored rows name the partition that they come from."""
        return False

    @property
    def merges_columns(self) -> bool:
        """Whether stored rows say which changes have set their columns."""
        return False

    @property
    def copartitioned(self) -> bool:
        """Whether partition i of the stream holds exactly bucket i of the dataset: no exchange is
        needed.

        That is so if the stream is partitioned by the bucketing columns of the dataset, into as
        many partitions, and if entries have these columns unchanged, also in type: only then do
        they hash like their records.
        """
        info = self.info
        spec = self.spec
        extractor = spec.extractor
        wanted_key = tuple(map(spec.source_of, spec.partition_by))
        if info.partitioner != "spark-murmur3" or info.partitions != spec.partitions:
            return False
        columns = [spec.steps_to(name)[0] for name in spec.partition_by]
        if info.key != wanted_key or not self._keeps(columns):
            return False
        if extractor is None:
            return True
        may_shuffle = not isinstance(extractor, Projection | PythonExtractor)
        if may_shuffle:
            return False
        for name, source in zip(spec.partition_by, info.key, strict=True):
            record_field = require_value(source, self.records.types, describe_input(spec))
            if record_field.type != self.schema.field(name).type:
                return False
        return extractor.keeps(columns)

    def _keeps(self, names: Sequence[str]) -> bool:
        """Whether rows have these columns of their records unchanged."""
        return True

    def start_offsets(
        self, known: Offsets, oldest: Offsets, upcoming: Offsets
    ) -> dict[SystemStreamPartition, str]:
        """Return where a table without bootstrap starts to read: where it had read to, else at the
        stream's default.

        `known` are the next offsets of the partitions that it has read. Records that retention has
        removed are skipped.
        """
        default = oldest if self.info.default_offset == "oldest" else upcoming
        starts = {}
        for ssp in self.ssps:
            starts[ssp] = known.get(ssp, default[ssp])
            if self.system.compare(starts[ssp], oldest[ssp]) < 0:
                starts[ssp] = oldest[ssp]
        return starts

    def recreated_error(
        self, before: str | None, read_to: Offsets, ends: Offsets
    ) -> errors.OffsetOutOfRangeError | None:
        """Return the error for a stream that is not the one that the dataset has read; None if it
        is the same.

        It is another one if its identity differs from `before` (None: unknown), or if it `ends`
        before the offsets `read_to`. The next step depends on whether it was deleted, or
        repartitioned before all of it was read.
        """
        ways_on = self._ways_on()
        name = self.spec.name
        stream = str(self.spec.input)
        beyond = None  # the first partition that was read beyond its end
        for ssp in sorted(read_to.keys() & ends.keys(), reverse=True):
            if self.system.compare(read_to[ssp], ends[ssp]) > 0:
                beyond = ssp
        if beyond is None and not self.info.was_recreated(before):
            return None
        about: dict[str, Any] = {"dataset": name, "stream": stream}
        was_repartitioned = self.info.was_repartitioned(before)
        if was_repartitioned:
            next_step = (
                "Its new offsets can't be compared with the old ones. What is served stays."
                f" {ways_on}"
            )
        else:
            next_step = (
                "The stream was deleted and recreated, so what it holds was not read before."
                f" {ways_on}"
            )
        if was_repartitioned:
            rewritten = f"that was rewritten into {self.info.partitions} partition(s)"
            problem = f"dataset {name!r} had not read all of {stream} when {rewritten}."
        elif beyond is None:
            problem = f"dataset {name!r} was read from another stream under the name {stream}."
        else:
            read = read_to[beyond]
            end = ends[beyond]
            problem = (
                f"dataset {name!r} has read {beyond} up to offset {read}, and the stream ends at"
                f" {end}."
            )
            about |= {"partition": beyond.partition, "offset": read, "upcoming": end}
        return errors.OffsetOutOfRangeError(problem, next_step, **about)

    def _ways_on(self) -> str:
        """Return what helps if the stream is another one than before."""
        return (
            "Declare the dataset under a new name to build it separately from there, or delete"
            f" this one (adjunct dataset delete {self.spec.name} --reason …) and advance it again."
        )

    def count(self, ranges: Ranges) -> int:
        """Return the number of records in the ranges, without reading them."""
        return self.system.records_between(_offset_ranges(ranges))

    def counts(self, ranges: Ranges) -> dict[SystemStreamPartition, int]:
        """Return the number of records in each range; if offsets have no gaps, this takes a
        single count.
        """
        widths = {ssp: int(end) - int(start) for ssp, (start, end) in ranges.items()}
        if self.count(ranges) == sum(widths.values()):
            return widths
        return {ssp: self.count({ssp: span}) for ssp, span in ranges.items()}

    def read(self, spark: SparkSession, ranges: Ranges) -> DataFrame:
        """Return the records of these ranges, with the columns of META, as a frame in no order."""
        with self._explain_lost_records():
            return read_frame(self.system, spark, _offset_ranges(ranges)).drop(EPOCH)

    def read_arrow(self, ranges: Ranges) -> pa.Table:
        """Return the records of these ranges, with the columns of META, as a table in memory,
        ordered by partition and offset.
        """
        with self._explain_lost_records():
            return read_table(self.system, _offset_ranges(ranges)).drop_columns([EPOCH])

    @contextmanager
    def _explain_lost_records(self) -> Iterator[None]:
        """Let an OffsetOutOfRangeError name the dataset, and what to do for it."""
        try:
            yield
        except errors.OffsetOutOfRangeError as error:
            raise errors.OffsetOutOfRangeError(
                f"dataset {self.spec.name!r} lost records that it was about to read:"
                f" {error.problem}",
                "What is served stays. Advance it again: a bounded dataset resumes with the first"
                " complete version on the stream, an unbounded one as on_lost_offset declares. Keep"
                " the stream longer, or advance the dataset more often.",
                dataset=self.spec.name,
            ) from error


@dataclass(frozen=True, slots=True)
class OpenedChanges(OpenedStream):
    """An unbounded dataset's opened change stream."""

    spec: UnboundedDataset

    @property
    def stores_records(self) -> bool:
        """Whether entries have the columns of the stream's records."""
        return self.spec.extractor is None and isinstance(self.spec.following.changes, Upserts)

    @property
    def position_type(self) -> PositionType:
        """The type of the changes' positions."""
        order = self.spec.following.order
        if order is None or self.spec.following.groups:
            return "bigint"
        rows = derive_row_schema(self.spec, self.records)
        return position_type(order, with_read_paths(self.spec, rows))

    @property
    def stored_groups(self) -> ColumnGroups:
        """The groups of columns that are stored; () without groups. Changes of others are passed
        over.
        """
        groups = self.spec.following.groups
        return tuple(group for group in groups if group[0] in self.schema)

    @property
    def only_offsets_order_keys(self) -> bool:
        """Whether only offsets order the changes of a key, so that all of these have to be in one
        partition.

        With `order_by`, and with a history of timestamps, the changes themselves say which one is
        newer.
        """
        return len(self.ssps) > 1 and not self.orders_itself

    @property
    def stores_partitions(self) -> bool:
        """Whether stored rows name the partition that they come from.

        They do where changes of a key may be in several partitions and say themselves which one is
        newer: offsets must not decide between two that say the same. Kafka's partitioner moves keys
        when partitions are added.
        """
        if not self.orders_itself:
            return False
        is_keyed_alike = bool(self.info.key) and set(self.info.key) <= set(self.spec.key_sources)
        is_of_lake = self.info.partitioner == "spark-murmur3"  # rewritten when repartitioned
        return not is_of_lake or not is_keyed_alike

    @property
    def merges_columns(self) -> bool:
        """Whether stored rows say which changes have set their columns."""
        return self.spec.following.merges_columns

    @property
    def orders_itself(self) -> bool:
        """Whether changes say themselves which one of a key is newer: by `order_by`, or by the
        times of a history. Dates do not say it: a key may well change twice a day.
        """
        following = self.spec.following
        if following.order_by is not None:
            return True
        if following.history is None:
            return False
        valid_from = following.history.valid_from
        if valid_from is None:
            return True  # the record's time
        rows = derive_row_schema(self.spec, self.records)
        return require_value(valid_from, rows.types, "the row").type != "date"

    def _keeps(self, names: Sequence[str]) -> bool:
        """Whether rows have these columns of their changes unchanged."""
        return self.spec.following.changes.keeps(names)

    def _ways_on(self) -> str:
        """Return what helps if the stream is another one than before."""
        if not self.spec.persistent:
            return (
                "Declare the dataset under a new name, which begins at the stream's default offset,"
                " or with bootstrap=True, which reads all of the stream in each run."
            )
        rebuild = f"adjunct dataset rebuild {self.spec.name} MODULE:APP --reason …"
        return f"Rebuild the dataset from it ({rebuild}), or declare it under a new name."


def require_changes(spec: AdjunctDataset) -> UnboundedDataset:
    """Return the dataset if it follows a change stream; raise DatasetError for a local table. It
    must not be bounded.
    """
    if isinstance(spec, UnboundedDataset):
        return spec
    assert isinstance(spec, LocalTable), "callers reject bounded datasets, each in its own words"
    raise errors.DatasetError(
        f"dataset {spec.name!r} is a local table: its application writes it, and it has no"
        " input stream.",
        f"To rebuild it, delete it (adjunct dataset delete {spec.name} --reason …), and let"
        " the application read its input again: adjunct startpoint set MODULE:APP STREAM"
        " --oldest --reason ….",
        dataset=spec.name,
    )


def open_stream(systems: Mapping[str, StreamSystem], spec: BoundedDataset) -> OpenedStream:
    """Open the stream of a bounded dataset, and check that its columns fit the dataset.

    All later calls return the ends and markers that the stream has now.
    """
    system, stream = _resolve_input(systems, spec)
    system = system.snapshot(stream)
    info = system.info(stream)
    entries = derive_entry_schema(spec, _require_columns(spec, info))
    return OpenedStream(spec, system, info, tuple(system.partitions(stream)), entries)


def open_changes(systems: Mapping[str, StreamSystem], spec: UnboundedDataset) -> OpenedChanges:
    """Open the stream of an unbounded dataset, and check that its columns and the order of its
    changes fit the dataset.

    Where only offsets order the changes of a key, reads check that no key is in two partitions.
    """
    system, stream = _resolve_input(systems, spec)
    info = system.info(stream)
    rows = derive_row_schema(spec, _require_columns(spec, info))
    ssps = tuple(system.partitions(stream))
    opened = OpenedChanges(spec, system, info, ssps, derive_entry_schema(spec, rows))
    check_changes_ordered(spec, info.key, info.partitions, info.partitioner)
    if not opened.only_offsets_order_keys:
        return opened
    return replace(opened, system=system.checking_keys(spec.name))


def look_for_files(systems: Mapping[str, StreamSystem], spec: UnboundedDataset) -> None:
    """Admit the files that have arrived, if the dataset's input is a stream of files. Raises the
    errors of its rules.
    """
    system, stream = _resolve_input(systems, spec)
    if isinstance(system, FileStreams):
        system.snapshot(stream)  # admits them


def _resolve_input(
    systems: Mapping[str, StreamSystem], spec: BoundedDataset | UnboundedDataset
) -> tuple[StreamSystem, str]:
    """Return the stream system of the dataset's input, and the stream's name in it."""
    return resolve_stream(
        systems,
        str(spec.input),
        f"dataset {spec.name!r} has the input {spec.input}",
        dataset=spec.name,
    )


def _require_columns(spec: AdjunctDataset, info: StreamInfo) -> Schema:
    """Return the columns of a stream's records. Raises DatasetError for raw records."""
    if info.schema is None:
        raise errors.DatasetError(
            f"dataset {spec.name!r} (input {spec.input}): the stream's records are raw, without"
            " columns.",
            "Use an input stream that declares its schema.",
            dataset=spec.name,
        )
    return info.schema


def check_changes_ordered(
    spec: UnboundedDataset, key: Sequence[str], partitions: int, partitioner: str
) -> None:
    """Raise DatasetError if two changes of one key may be in two partitions, where nothing
    orders them.
    """
    if spec.following.order_by is not None:
        return
    if has_one_partition_per_key(spec, key, partitions, partitioner):
        return
    keyed = f"keyed by ({', '.join(key)})" if key else "not keyed"
    if spec.key_columns != spec.key_sources:
        next_step = "Key the stream and the dataset by a column with that value, give the stream"
    elif partitioner == "unknown" and key and set(key) <= set(spec.key_sources):
        next_step = "Give the stream"  # its key is right
    else:
        next_step = f"Key the stream by columns of ({', '.join(spec.key_sources)}), give it"
    raise errors.DatasetError(
        f"dataset {spec.name!r}: changes of one key could arrive in different partitions, in no"
        f" defined order. Its key is ({', '.join(spec.key_sources)}), but its input {spec.input} is"
        f" {keyed}, in {partitions} partitions (partitioner: {partitioner}).",
        f"{next_step} one partition, or declare order_by=COLUMN.",
        dataset=spec.name,
    )


def has_one_partition_per_key(
    spec: AdjunctDataset, key: Sequence[str], partitions: int, partitioner: str
) -> bool:
    """Whether all records of one dataset key are in one partition of a stream with this key and
    partitioner: it has only one, or chooses it by nothing but columns of that key.
    """
    if partitions == 1:
        return True
    is_chosen_by_key = bool(key) and partitioner != "unknown"
    return is_chosen_by_key and set(key) <= set(spec.key_sources)


def _offset_ranges(ranges: Ranges) -> dict[SystemStreamPartition, OffsetRange]:
    """Return the ranges as stream systems take them."""
    return {ssp: OffsetRange(start, end) for ssp, (start, end) in ranges.items()}


def offsets_by_partition(offsets: Mapping[str, str]) -> dict[SystemStreamPartition, str]:
    """Return a manifest's offsets by stream partition, in order of the partitions."""
    return dict(
        sorted((SystemStreamPartition.parse(text), offset) for text, offset in offsets.items())
    )


def offsets_to_json(offsets: Offsets) -> dict[str, str]:
    """Return offsets as a manifest stores them."""
    return {str(ssp): offsets[ssp] for ssp in sorted(offsets)}


def resolve_stream(
    systems: Mapping[str, StreamSystem], name: str, what: str, *, dataset: str | None = None
) -> tuple[StreamSystem, str]:
    """Return the system and the stream for a name such as "lake.planes". Raises DatasetError for an
    unknown system.

    `what` describes in the error what the stream is for.
    """
    system, stream = split_stream_name(name)
    if system not in systems:
        raise errors.DatasetError(
            f"{what}, but systems has no stream system {system!r}: it has"
            f" {', '.join(sorted(systems)) or 'none'}.",
            "Pass the result of open_system(lake, name) in systems.",
            dataset=dataset,
        )
    return systems[system], stream
