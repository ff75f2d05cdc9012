"""The formats of changes on a stream.

`Upserts`, `OperationColumn` and `DebeziumUnwrapped` are formats in which each record is a row, and
a column or a tombstone says whether it is written or deleted. Formats with the row before and after
are in envelopes.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypedDict,
    Unpack,
    runtime_checkable,
)

from dagster_adjunct.assets.declaration.change_values import (
    PLACEHOLDER,
    TRUNCATE,
    check_placeholder,
    concat_reason,
    contains_unavailable,
    contains_unavailable_array,
    is_true,
    is_unavailable,
    is_unavailable_array,
    nested_texts,
    quote_column,
    quote_value,
    unavailable_reasons,
    unknown_operation_column,
    unknown_operation_reason,
)
from dagster_adjunct.assets.declaration.extractors import metadata_columns
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc
from dagster_adjunct.resources.schemas.schema import Field, Schema, named_column, repeated_names
from dagster_adjunct.resources.schemas.types import is_nested
from dagster_adjunct.resources.schemas.values import readable_values
from dagster_adjunct.resources.streams.system import TOMBSTONE
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

PROBLEM = "__problem"
KEPT = "__kept"
"""The metadata column that names, for each change, the columns of the row that keep their stored
values.
"""
ORDER = "__order"
SNAPSHOT = "__snapshot"
_INSERT = ("c", "i", "r", "create", "insert", "read")
_LARGE = ("string", "binary")
_WRITE = (*_INSERT, "u", "update", "upsert")


@validated
@runtime_checkable
class ChangeFormat(Protocol):
    """Converts the records of a change stream to changes of rows. A frozen value, comparable and
    picklable.

    If changes may leave out columns, which then keep their stored values, the format has a true
    attribute `completes`, and `decode` adds the column KEPT: an array of the names of these
    columns, null or empty for a complete row.
    """

    def schema(self, records: Schema, what: str) -> Schema:
        """Return the columns of the changed rows; `what` names the dataset in errors.

        Raises SchemaMismatchError for a stream whose columns do not fit this format.
        """
        ...

    def keeps(self, columns: Sequence[str]) -> bool:
        """Return whether every change has its record's own values in these columns.

        If so, and the stream is partitioned by these columns, all changes of a row are in one
        partition.
        """
        ...

    def orders(self, path: str) -> bool:
        """Return whether `decode` can read this path of `order_by` ("source.lsn"), which is no
        column of the rows.
        """
        ...

    def decode(
        self,
        records: DataFrame,
        schema: Schema,
        what: str,
        *,
        key: tuple[str, ...],
        order_by: tuple[str, ...],
        comparable: bool,
    ) -> DataFrame:
        """Return none, one or two changes for each record: the columns of `schema`, those of META,
        and PROBLEM.

        PROBLEM is null, or the reason why the change can't be applied. `__tombstone` says that the
        row of its key is deleted; only the columns of its `key`, which has names and paths
        ("customer.id"), and those of `order_by`, need values then. For each path in `order_by` the
        column `path_column(path)` has the value as a string. `comparable` says whether positions
        also order changes of one key that are in different partitions. Further columns that begin
        with `__` pass through.

        A format that distinguishes rows of a snapshot from streamed changes has `marks_snapshots =
        True`, and the boolean column SNAPSHOT.
        """
        ...

    def describe(self) -> str:
        """Return the format in one line."""
        ...


@validated
@runtime_checkable
class ArrowChangeFormat(ChangeFormat, Protocol):
    """A change format that can also be decoded without Spark, to the same changes."""

    def decode_arrow(self, records: pa.Table, schema: Schema) -> pa.Table:
        """Return the same changes as `decode`, for records in Arrow. It has none of `decode`'s
        keyword arguments, so it is for formats that need none of them.
        """
        ...


def path_column(path: str) -> str:
    """Return the name of the column in which `decode` returns the values of this path of
    `order_by`.
    """
    return f"{ORDER}_{path.replace('.', '_')}"


class DecodeOptions(TypedDict):
    """The keyword arguments of `ChangeFormat.decode`."""

    key: tuple[str, ...]
    order_by: tuple[str, ...]
    comparable: bool


class _RecordIsRow:
    """A format in which a record is a row itself."""

    __slots__ = ()

    def keeps(self, columns: Sequence[str]) -> bool:
        return True

    def orders(self, path: str) -> bool:
        return False


@validated
@dataclass(frozen=True, slots=True)
class Upserts(_RecordIsRow):
    """Each record is the new row of its key; a tombstone deletes it."""

    def schema(self, records: Schema, what: str) -> Schema:
        return records

    def decode(
        self, records: DataFrame, schema: Schema, what: str, **asked: Unpack[DecodeOptions]
    ) -> DataFrame:
        return records.withColumn(PROBLEM, F.lit(None).cast("string"))

    def decode_arrow(self, records: pa.Table, schema: Schema) -> pa.Table:
        return records.append_column(PROBLEM, pa.nulls(records.num_rows, pa.string()))

    def describe(self) -> str:
        return "upserts"


@validated
@dataclass(frozen=True, slots=True)
class OperationColumn(_RecordIsRow):
    """Each record is a row with its operation in the string column `column`, which is not stored.

    `delete`, `write` and `ignore` are the operations that delete the row, write it, or are skipped,
    ignoring case. A change with any other operation, or none, is a bad change. A tombstone deletes
    the row, whatever its operation.

    `missing` is the suffix of boolean columns that say whether another column is missing in a
    change ("_isMissing" in Oracle GoldenGate's formatters); they are not stored. A missing column
    keeps its stored value; in an insert (c, i, r, create, insert, read) it is null.
    """

    column: str = "op"
    delete: tuple[str, ...] = ("d", "delete")
    write: tuple[str, ...] = _WRITE
    ignore: tuple[str, ...] = ()
    missing: str | None = None

    def __post_init__(self) -> None:
        declared: list[str] = []
        for name in ("delete", "write", "ignore"):
            words = tuple(dict.fromkeys(map(str.lower, getattr(self, name))))
            object.__setattr__(self, name, words)
            declared += words
        twice = repeated_names(declared)
        if twice:
            raise ConfigurationError(
                f"the operation {twice[0]!r} of column {self.column!r} is declared twice.",
                "Name each operation in only one of delete, write and ignore; pass () for none.",
                argument="operations",
            )

    def schema(self, records: Schema, what: str) -> Schema:
        _check_type(records, self.column, ("string",), f"{what}: the record", "the operation")
        marks = self._marks(records.names)
        if self.missing is not None and not marks:
            raise SchemaMismatchError(
                f"{what}: missing={self.missing!r} is the suffix of no column: the record has "
                f"{', '.join(records.names)}.",
                "Give the suffix of the columns that say whether another one is missing, or leave"
                " missing out.",
                column=self.missing,
            )
        for mark in marks.values():
            _check_type(
                records, mark, ("boolean",), f"{what}: the record", "whether another one is missing"
            )
        return _other_columns(records, {self.column, *marks.values()}, what)

    @property
    def completes(self) -> bool:
        """Whether changes may leave out columns, which then keep their stored values."""
        return self.missing is not None

    def _marks(self, names: Sequence[str]) -> dict[str, str]:
        """Return, for each column that may be missing in a change, the boolean column that says
        whether it is.
        """
        suffix = self.missing
        if suffix is None:
            return {}
        return {name: name + suffix for name in names if name + suffix in names}

    def decode(
        self, records: DataFrame, schema: Schema, what: str, **asked: Unpack[DecodeOptions]
    ) -> DataFrame:
        is_tombstone = F.col(TOMBSTONE)
        operation = F.lower(named_column(self.column))
        if self.ignore:
            records = records.where(~is_true(operation.isin(*self.ignore)) | is_tombstone)
        known = is_true(operation.isin(*self.delete, *self.write)) | is_tombstone
        problem = F.when(~known, unknown_operation_column(named_column(self.column)))
        if self.missing is not None:
            records = self._without_missing(records, is_true(operation.isin(*_INSERT)))
        deletes = is_tombstone | is_true(operation.isin(*self.delete))
        return changes_with_spark(records, schema, deletes, problem)

    def _without_missing(self, records: DataFrame, inserts: Column) -> DataFrame:
        """Return the records with the names of missing columns in KEPT. In inserts, which have no
        stored row, missing columns are null and KEPT is too.
        """
        columns: dict[str, Column] = {}
        missing = []
        for name, mark in self._marks(_own_columns(records.columns)).items():
            is_missing = named_column(mark)
            missing.append(F.when(is_missing, name))
            columns[name] = F.when(~is_true(inserts & is_missing), named_column(name))
        columns[KEPT] = F.when(~inserts, F.array_compact(F.array(*missing)))
        return records.withColumns(columns)

    def decode_arrow(self, records: pa.Table, schema: Schema) -> pa.Table:
        if self.missing is not None:
            records = self._without_missing_in_arrow(records)
        problems: list[str | None] = []
        deletes: list[bool] = []
        applies: list[bool] = []  # False for operations to ignore
        texts = _read_column(records, self.column)
        for text, is_tombstone in zip(texts, _read_column(records, TOMBSTONE), strict=True):
            word = None
            if text is not None:
                word = text.lower()
            problem = None
            if not is_tombstone and word not in (*self.delete, *self.write):
                problem = unknown_operation_reason(text)
            problems.append(problem)
            deletes.append(is_tombstone or word in self.delete)
            applies.append(is_tombstone or word not in self.ignore)
        return changes_in_arrow(records, schema, deletes, problems).filter(applies)

    def _without_missing_in_arrow(self, records: pa.Table) -> pa.Table:
        """Return the records in Arrow as `_without_missing` does, except that KEPT is empty in
        inserts instead of null.
        """
        operations = pc.ascii_lower(records.column(self.column))
        inserts = pc.is_in(operations, value_set=_string_array(_INSERT))
        missing = {}
        for name, mark in self._marks(_own_columns(records.column_names)).items():
            missing[name] = records.column(mark)
            values = records.column(name)
            becomes_null = pc.fill_null(pc.and_(inserts, missing[name]), False)
            values = pc.if_else(becomes_null, pa.scalar(None, values.type), values)
            records = records.set_column(records.column_names.index(name), name, values)
        return records.append_column(KEPT, kept_column(missing, pc.invert(inserts)))

    def describe(self) -> str:
        described = f"operation in {self.column}: {'/'.join(self.delete)} delete"
        if self.ignore:
            described += f", {'/'.join(self.ignore)} ignored"
        if self.missing is not None:
            described += f", *{self.missing} missing"
        return described


@validated
@dataclass(frozen=True, slots=True)
class DebeziumUnwrapped(_RecordIsRow):
    """Rows that Debezium's ExtractNewRecordState has extracted from envelopes.

    `deleted` is the column that says whether the row was deleted, as a boolean or "true" and
    "false"; None if deletions are tombstones only. `op` is the column with the operation, if there
    is one. Debezium names them `__deleted` and `__op`, which the writer of the stream must rename,
    because columns of a stream can't begin with `__`. Neither is stored. With `op`, rows of a
    snapshot ("r") never replace streamed changes, unless `order_by` is declared. For `unavailable`
    and `on_unavailable` see DebeziumEnvelope.
    """

    deleted: str | None = "deleted"
    op: str | None = None
    unavailable: str | None = PLACEHOLDER
    on_unavailable: Literal["refuse", "keep"] = "refuse"

    def __post_init__(self) -> None:
        check_placeholder(self.unavailable, self.on_unavailable, "DebeziumUnwrapped")

    @property
    def completes(self) -> bool:
        """Whether changes may leave out columns, which then keep their stored values."""
        return self.on_unavailable == "keep"

    @property
    def marks_snapshots(self) -> bool:
        return self.op is not None

    def schema(self, records: Schema, what: str) -> Schema:
        if self.deleted is not None:
            meaning = "whether the row was deleted"
            _check_type(
                records, self.deleted, ("string", "boolean"), f"{what}: the record", meaning
            )
        if self.op is not None:
            _check_type(records, self.op, ("string",), f"{what}: the record", "the operation")
        return _other_columns(records, {self.deleted, self.op}, what)

    def decode(
        self, records: DataFrame, schema: Schema, what: str, **asked: Unpack[DecodeOptions]
    ) -> DataFrame:
        is_tombstone = F.col(TOMBSTONE)
        deleted = F.lit(False)
        problem = F.lit(None).cast("string")
        if self.deleted is not None:
            value = named_column(self.deleted).cast("string")
            text = F.lower(value)
            deleted = text == "true"
            reason = concat_reason(
                f"column {self.deleted!r} is ", quote_column(value), ": expected true or false"
            )
            problem = F.when(~is_true(text.isin("true", "false")) & ~is_tombstone, reason)
        if self.op is not None:
            op = F.lower(named_column(self.op))
            known = is_true(op.isin("c", "r", "u", "d")) | is_tombstone
            unknown = F.when(~known, unknown_operation_column(named_column(self.op)))
            problem = F.coalesce(problem, F.when(op == "t", TRUNCATE), unknown)
            deleted = deleted | is_true(op == "d")
            records = records.withColumn(SNAPSHOT, is_true(op == "r"))
        deletes = is_tombstone | is_true(deleted)
        if self.unavailable is not None:
            marked = self._mark_unavailable(records, schema, ~deletes, self.unavailable)
            records = marked.records
            problem = F.coalesce(problem, *marked.reasons)
        return changes_with_spark(records, schema, deletes, problem)

    def _mark_unavailable(
        self, records: DataFrame, schema: Schema, writes: Column, placeholder: str
    ) -> _MarkedRecords:
        """Return the records, and the reasons why unavailable values can't be applied.

        With on_unavailable="keep", the records get the column KEPT instead, where that is possible.
        Only records for which `writes` is true can have such values, and no row of a snapshot
        ("r"): it is complete, so the placeholder is an actual value there.
        """
        inserted = F.lit(False)
        if self.op is not None:
            op = F.lower(named_column(self.op))
            writes &= op != "r"
            inserted = op == "c"
        reasons = []
        unknown = []
        for field in _large_fields(schema):
            value = named_column(field.name)
            if is_nested(field.type):
                value = F.to_json(value)
            is_unknown = is_unavailable(placeholder, value, field.type)
            unknown.append(F.when(is_unknown, field.name))
            found = {  # by kind of problem, which records have it
                "value": is_unknown,
                "insert": is_unknown & inserted,
                "part": ~is_unknown & contains_unavailable(placeholder, value),
            }
            whys = unavailable_reasons(placeholder, field.name, field.type, keeps=self.completes)
            reasons += [F.when(writes & found[what], why) for what, why in whys.items()]
        if self.completes:
            if unknown:
                names = F.array_compact(F.array(*unknown))
            else:
                names = F.array().cast("array<string>")
            records = records.withColumn(KEPT, F.when(writes, names))
        return _MarkedRecords(records, reasons)

    def decode_arrow(self, records: pa.Table, schema: Schema) -> pa.Table:
        operations = _read_column(records, self.op)
        snapshots: list[bool] = []
        deletes: list[bool] = []
        problems: list[str | None] = []
        tombstones = _read_column(records, TOMBSTONE)
        deletions = _read_column(records, self.deleted)
        for is_tombstone, deleted, operation in zip(tombstones, deletions, operations, strict=True):
            text = deleted
            if isinstance(deleted, bool):
                text = str(deleted).lower()
            op = (operation or "").lower()
            is_deleted = op == "d" or (text or "").lower() == "true"
            snapshots.append(op == "r")
            deletes.append(is_tombstone or is_deleted)
            problems.append(self._problem(is_tombstone, text, operation))
        if self.op is not None:
            records = records.append_column(SNAPSHOT, pa.array(snapshots, pa.bool_()))
        if self.unavailable is not None:
            writes = pc.invert(pa.array(deletes, pa.bool_()))
            marked = self._mark_unavailable_in_arrow(records, schema, writes, self.unavailable)
            records = marked.records
            for row, reason in marked.reasons.items():
                problems[row] = problems[row] or reason
        return changes_in_arrow(records, schema, deletes, problems)

    def _mark_unavailable_in_arrow(
        self, records: pa.Table, schema: Schema, writes: pa.Array, placeholder: str
    ) -> _MarkedTable:
        """Return records in Arrow and the reasons as `_mark_unavailable` does: of a record with
        several reasons, the first one.
        """
        inserted = pa.array([False] * records.num_rows, pa.bool_())
        if self.op is not None:
            op = pc.fill_null(pc.ascii_lower(records.column(self.op)), "")
            writes = pc.and_(writes, pc.not_equal(op, "r"))
            inserted = pc.equal(op, "c")
        reasons: dict[int, str] = {}
        unknown = {}
        for field in _large_fields(schema):
            values = records.column(field.name)
            if is_nested(field.type):
                values = nested_texts(values)
            is_unknown = pc.and_(writes, is_unavailable_array(placeholder, values, field.type))
            unknown[field.name] = is_unknown
            whys = unavailable_reasons(placeholder, field.name, field.type, keeps=self.completes)
            for what, why in whys.items():
                if what == "insert":
                    found = pc.and_(is_unknown, inserted)
                elif what == "part":
                    within = pc.and_(writes, contains_unavailable_array(placeholder, values))
                    found = pc.and_not(within, is_unknown)
                else:
                    found = is_unknown
                for row in pc.indices_nonzero(found).to_pylist():
                    reasons.setdefault(row, why)
        if self.completes:
            records = records.append_column(KEPT, kept_column(unknown, writes))
        return _MarkedTable(records, reasons)

    def _problem(self, is_tombstone: bool, text: str | None, op: str | None) -> str | None:
        """Return why a record can't be applied, or None. `text` and `op` are its values in the
        columns `deleted` and `op`; of a tombstone they don't matter, unless `op` is a truncate.
        """
        needs_text = self.deleted is not None and not is_tombstone
        if needs_text and (text or "").lower() not in ("true", "false"):
            return f"column {self.deleted!r} is {quote_value(text)}: expected true or false"
        operation = (op or "").lower()
        if operation == "t":
            return TRUNCATE
        if is_tombstone or self.op is None or operation in ("c", "r", "u", "d"):
            return None
        return unknown_operation_reason(op)

    def describe(self) -> str:
        described = ", ".join(filter(None, (self.deleted, self.op)))
        if self.completes:
            described += ", on_unavailable='keep'"
        return f"Debezium, unwrapped ({described})"


def _large_fields(schema: Schema) -> list[Field]:
    """Return the columns whose values a source may not log."""
    return [field for field in schema.fields if field.type in _LARGE or is_nested(field.type)]


class _MarkedRecords(NamedTuple):
    """Records, and the reasons why unavailable values can't be applied, null where they can."""

    records: DataFrame
    reasons: list[Column]


class _MarkedTable(NamedTuple):
    """Records in Arrow, and by row the reasons why unavailable values can't be applied."""

    records: pa.Table
    reasons: dict[int, str]


def kept_column(
    marked: Mapping[str, pa.ChunkedArray], may_keep: pa.Array | pa.ChunkedArray
) -> pa.Array:
    """Return the column KEPT: for each record, the names in `marked` whose boolean array is true
    for it.

    It is empty for records where `may_keep` is false.
    """
    chosen = pc.fill_null(may_keep, True).to_numpy(zero_copy_only=False)
    is_marked = np.zeros((len(chosen), len(marked)), bool)  # by record and name
    for column, mark in enumerate(marked.values()):
        is_marked[:, column] = pc.fill_null(mark, False).to_numpy() & chosen
    # The names of all records in one array, and for each record where its names end.
    _, columns = np.nonzero(is_marked)
    offsets = np.concatenate([[0], np.cumsum(is_marked.sum(axis=1))]).astype(np.int32)
    names = _string_array(list(marked)).take(pa.array(columns))
    return pa.ListArray.from_arrays(pa.array(offsets), names)


def kept_matrix(kept: pa.ChunkedArray, names: Sequence[str]) -> Any:
    """Return the column KEPT as a boolean NumPy matrix: a row for each change, a column for each
    of `names`. Other names in KEPT are left out.
    """
    lists = kept.combine_chunks()
    rows = pc.list_parent_indices(lists)
    columns = pc.index_in(pc.list_flatten(lists), value_set=_string_array(names))
    known = pc.is_valid(columns)
    matrix = np.zeros((len(lists), len(names)), bool)
    matrix[rows.filter(known).to_numpy(), columns.filter(known).to_numpy()] = True
    return matrix


def _read_column(records: pa.Table, name: str | None) -> list[Any]:
    """Return the values of a column, with replacement characters in texts that are no UTF-8; nulls
    if it has no name.
    """
    if name is None:
        return [None] * records.num_rows
    return readable_values(records.column(name), "replace")


def _string_array(texts: Sequence[str]) -> pa.Array:
    """Return texts in Arrow, as strings even if there are none."""
    return pa.array(texts, pa.string())


def _own_columns(columns: Sequence[str]) -> list[str]:
    """Return these columns without the metadata columns, which begin with `__`."""
    return [name for name in columns if not name.startswith("__")]


def changes_with_spark(
    records: DataFrame, schema: Schema, deletes: Column, problem: Column
) -> DataFrame:
    """Return one change for each record: the columns of `schema`, the metadata columns,
    TOMBSTONE, which is `deletes`, and PROBLEM.
    """
    rest = [name for name in metadata_columns(records.columns) if name != TOMBSTONE]
    return records.select(
        *map(named_column, schema.names),
        *rest,
        deletes.alias(TOMBSTONE),
        problem.cast("string").alias(PROBLEM),
    )


def changes_in_arrow(
    records: pa.Table, schema: Schema, deletes: Sequence[bool], problems: Sequence[str | None]
) -> pa.Table:
    """Return one change for each record in Arrow, with the columns that `changes_with_spark`
    makes.
    """
    rest = [name for name in metadata_columns(records.column_names) if name != TOMBSTONE]
    rows = records.select([*schema.names, *rest])
    rows = rows.append_column(TOMBSTONE, pa.array(deletes, pa.bool_()))
    return rows.append_column(PROBLEM, pa.array(problems, pa.string()))


def _check_type(
    records: Schema, column: str, kinds: tuple[str, ...], whose: str, meaning: str
) -> None:
    """Raise SchemaMismatchError unless a column of the records has one of these types."""
    field = records.field(column, whose)
    if field.type not in kinds:
        raise SchemaMismatchError(
            f"{whose} has column {column!r} as {field.type}, which is declared as the column for"
            f" {meaning}: expected {' or '.join(kinds)}.",
            "Name another column in the change format.",
            column=column,
        )


def _other_columns(records: Schema, columns: set[str | None], what: str) -> Schema:
    """Return the other columns of the records. Raises SchemaMismatchError if there are none."""
    kept = tuple(field for field in records.fields if field.name not in columns)
    if not kept:
        raise SchemaMismatchError(
            f"{what}: the record has only the columns {', '.join(records.names)} of the change"
            " format, and none of a row.",
            "Name other columns in the change format.",
            column=next(iter(records.names), None),
        )
    return Schema(kept)
