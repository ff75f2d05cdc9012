"""The forms in which changes arrive on a stream: what a record says of which row.

`Upserts`, `OperationColumn` and `DebeziumUnwrapped` are here: each record is one row, and a column of it or a mark says
whether it is written or deleted. `DebeziumEnvelope`, with the row before and after, is in debezium.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dagster_adjunct.assets.declaration.changes.problem_texts import (
    TRUNCATE,
    shown,
    shown_text,
    unknown_operation,
    unknown_operation_text,
)
from dagster_adjunct.assets.declaration.extractors.extractor import companions
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.schemas.readable_values import readable_values
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.interface.stream_system import TOMBSTONE

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

PROBLEM = "__problem"
ORDER = "__order"
SNAPSHOT = "__snapshot"
_WRITE = ("c", "i", "r", "u", "create", "insert", "read", "update", "upsert")


@runtime_checkable
class ChangeFormat(Protocol):
    """Turns the records of a change stream into changes of rows. A frozen value, comparable and picklable."""

    def schema(self, records: Schema, what: str) -> Schema:
        """Return the columns of the rows that change; `what` names the dataset in errors.

        Raises SchemaMismatchError for a stream whose columns can't be changes of this form.
        """
        ...

    def keeps(self, columns: Sequence[str]) -> bool:
        """Whether these columns of every change are the record's own, so that it lies in the row's partition."""
        ...

    def orders(self, path: str) -> bool:
        """Whether `decode` knows this path of `order_by`, which is no column of the rows."""
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
        """Return changes with the columns of `schema`, META and PROBLEM: none, one or two a record.

        PROBLEM is null, or says why the change can't be applied. `__tombstone` says that the row of its key is deleted;
        only its `key` columns, and those of `order_by`, need values then. Of each path in `order_by` the column
        `path_column(path)` has the value as a text. `comparable` says whether positions tell which change is newer also
        where a key comes in several partitions. Further columns that begin with `__` pass through.

        A format that tells rows of a snapshot from streamed changes has `tells_snapshots = True`, and says of each
        change in SNAPSHOT which it is.
        """
        ...

    def describe(self) -> str:
        """Return the format in one line."""
        ...


@runtime_checkable
class ArrowChangeFormat(ChangeFormat, Protocol):
    """A change format that can be read without Spark too: with the same changes as `decode` makes."""

    def decode_arrow(self, records: pa.Table, schema: Schema) -> pa.Table:
        """Return changes as `decode` does, of records in Arrow."""
        ...


def path_column(path: str) -> str:
    """Return the column with the values of a path."""
    return f"{ORDER}_{path.replace('.', '_')}"


def tells_snapshots(changes: ChangeFormat) -> bool:
    """Whether a format tells rows of a snapshot from streamed changes."""
    return bool(getattr(changes, "tells_snapshots", False))


class _RecordIsRow:
    """What holds where a record is a row itself, with all its columns."""

    __slots__ = ()

    def keeps(self, columns: Sequence[str]) -> bool:
        return True

    def orders(self, path: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Upserts(_RecordIsRow):
    """Each record is the new row of its key; a tombstone deletes it."""

    def schema(self, records: Schema, what: str) -> Schema:
        return records

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
        from pyspark.sql import functions as F

        return records.withColumn(PROBLEM, F.lit(None).cast("string"))

    def decode_arrow(self, records: pa.Table, schema: Schema) -> pa.Table:
        import pyarrow as pa

        return records.append_column(PROBLEM, pa.nulls(records.num_rows, pa.string()))

    def describe(self) -> str:
        return "upserts"


@dataclass(frozen=True, slots=True)
class OperationColumn(_RecordIsRow):
    """Each record is a row, and its text column `column` says what happened to it; the column is not stored.

    `delete`, `write` and `ignore` are the operations that delete the row, write it, or say nothing of it; case does not
    matter. Any other operation, or none, is a bad change. A tombstone deletes, whatever it says.
    """

    column: str = "op"
    delete: tuple[str, ...] = ("d", "delete")
    write: tuple[str, ...] = _WRITE
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        declared: list[str] = []
        for name in ("delete", "write", "ignore"):
            given = getattr(self, name)
            words = tuple(dict.fromkeys(str(word).lower() for word in ((given,) if isinstance(given, str) else given)))
            object.__setattr__(self, name, words)
            declared += words
        twice = sorted({word for word in declared if declared.count(word) > 1})
        if twice:
            raise ConfigurationError(
                f"the operation {twice[0]!r} of column {self.column!r} is declared in two ways.",
                "Name each operation in one of delete, write and ignore; the two others can be given as ().",
                argument="operations",
            )

    def schema(self, records: Schema, what: str) -> Schema:
        _check_type(records, self.column, ("string",), f"{what}: the record", "the operation")
        return _without(records, {self.column}, what)

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
        from pyspark.sql import functions as F

        operation = F.lower(column(self.column))
        if self.ignore:
            records = records.where(F.coalesce(~operation.isin(*self.ignore), F.lit(True)) | F.col(TOMBSTONE))
        known = F.coalesce(operation.isin(*self.delete, *self.write), F.lit(False)) | F.col(TOMBSTONE)
        problem = F.when(~known, unknown_operation(column(self.column)))
        tombstone = F.col(TOMBSTONE) | F.coalesce(operation.isin(*self.delete), F.lit(False))
        return changed(records, schema, tombstone, problem)

    def decode_arrow(self, records: pa.Table, schema: Schema) -> pa.Table:
        texts, marks = (readable_values(records.column(name), "replace") for name in (self.column, TOMBSTONE))
        words = [None if text is None else text.lower() for text in texts]
        problems = [
            None if mark or word in (*self.delete, *self.write) else unknown_operation_text(text)
            for text, word, mark in zip(texts, words, marks, strict=True)
        ]
        tombstones = [mark or word in self.delete for word, mark in zip(words, marks, strict=True)]
        kept = [mark or word is None or word not in self.ignore for word, mark in zip(words, marks, strict=True)]
        return changed_rows(records, schema, tombstones, problems).filter(kept)

    def describe(self) -> str:
        ignored = f", {'/'.join(self.ignore)} ignored" if self.ignore else ""
        return f"operation in {self.column}: {'/'.join(self.delete)} delete{ignored}"


@dataclass(frozen=True, slots=True)
class DebeziumUnwrapped(_RecordIsRow):
    """Rows that Debezium's ExtractNewRecordState made of its envelopes, with deletions rewritten.

    `deleted` is the column that says whether the row was deleted: boolean, or "true" and "false". `op` is the column
    with the operation, where there is one. Debezium calls them `__deleted` and `__op`; a stream's own columns do not
    begin with `__`, so whoever writes the stream renames them. Neither is stored. With `op`, rows of a snapshot ("r")
    never replace streamed changes, unless `order_by` says otherwise.
    """

    deleted: str = "deleted"
    op: str | None = None

    @property
    def tells_snapshots(self) -> bool:
        return self.op is not None

    def schema(self, records: Schema, what: str) -> Schema:
        _check_type(records, self.deleted, ("string", "boolean"), f"{what}: the record", "whether the row was deleted")
        if self.op is not None:
            _check_type(records, self.op, ("string",), f"{what}: the record", "the operation")
        return _without(records, {self.deleted, self.op}, what)

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
        from pyspark.sql import functions as F

        mark = F.col(TOMBSTONE)
        mark_text = F.lower(column(self.deleted).cast("string"))
        deleted = mark_text == "true"
        problem = F.when(
            ~F.coalesce(mark_text.isin("true", "false"), F.lit(False)) & ~mark,
            F.concat(
                F.lit(f"column {self.deleted!r} is "), shown(column(self.deleted).cast("string")),
                F.lit(": expected true or false"),
            ),
        )  # fmt: skip
        if self.op is not None:
            op = F.lower(column(self.op))
            known = F.coalesce(op.isin("c", "r", "u", "d"), F.lit(False)) | mark
            truncate = F.when(op == "t", F.lit(TRUNCATE))
            problem = F.coalesce(problem, truncate, F.when(~known, unknown_operation(column(self.op))))
            deleted = deleted | F.coalesce(op == "d", F.lit(False))
            records = records.withColumn(SNAPSHOT, F.coalesce(op == "r", F.lit(False)))
        return changed(records, schema, mark | F.coalesce(deleted, F.lit(False)), problem)

    def decode_arrow(self, records: pa.Table, schema: Schema) -> pa.Table:
        import pyarrow as pa

        marks, deleted = (readable_values(records.column(name), "replace") for name in (TOMBSTONE, self.deleted))
        texts = [str(value).lower() if isinstance(value, bool) else value for value in deleted]
        operations = (
            [None] * records.num_rows if self.op is None else readable_values(records.column(self.op), "replace")
        )
        rows = list(zip(marks, texts, operations, strict=True))
        tombstones = [mark or (text or "").lower() == "true" or (op or "").lower() == "d" for mark, text, op in rows]
        if self.op is not None:
            records = records.append_column(SNAPSHOT, pa.array([(op or "").lower() == "r" for op in operations]))
        return changed_rows(records, schema, tombstones, [self._problem(*row) for row in rows])

    def _problem(self, mark: bool, text: str | None, op: str | None) -> str | None:
        """Return what is wrong with a record that says this, None for nothing."""
        if not mark and (text or "").lower() not in ("true", "false"):
            return f"column {self.deleted!r} is {shown_text(text)}: expected true or false"
        if self.op is None:
            return None
        if (op or "").lower() == "t":
            return TRUNCATE
        return None if mark or (op or "").lower() in ("c", "r", "u", "d") else unknown_operation_text(op)

    def describe(self) -> str:
        return f"Debezium, unwrapped ({self.deleted}{f', {self.op}' if self.op else ''})"


def changed(records: DataFrame, schema: Schema, tombstone: Column, problem: Column) -> DataFrame:
    """Return the rows of records that are one change each, with what is known of them."""
    from pyspark.sql import functions as F

    rest = [F.col(name) for name in companions(records) if name != TOMBSTONE]
    return records.select(
        *[column(name) for name in schema.names],
        *rest,
        tombstone.alias(TOMBSTONE),
        problem.cast("string").alias(PROBLEM),
    )


def changed_rows(
    records: pa.Table, schema: Schema, tombstones: Sequence[bool], problems: Sequence[str | None]
) -> pa.Table:
    """Return what `changed` does, of records in Arrow."""
    import pyarrow as pa

    rest = [name for name in records.column_names if name.startswith("__") and name != TOMBSTONE]
    rows = records.select([*schema.names, *rest])
    return rows.append_column(TOMBSTONE, pa.array(tombstones, pa.bool_())).append_column(
        PROBLEM, pa.array(problems, pa.string())
    )


def _check_type(records: Schema, column: str, kinds: tuple[str, ...], whose: str, meaning: str) -> None:
    field = records.field(column, whose)
    if field.type not in kinds:
        raise SchemaMismatchError(
            f"{whose} has column {column!r} as {field.type}, and it is declared to say {meaning}: expected "
            f"{' or '.join(kinds)}.",
            "Name the right column in the change format.",
            column=column,
        )


def _without(records: Schema, columns: set[str | None], what: str) -> Schema:
    kept = tuple(field for field in records.fields if field.name not in columns)
    if not kept:
        raise SchemaMismatchError(
            f"{what}: the record has no columns but {', '.join(records.names)}, which only say what happened.",
            "Name the right columns in the change format.",
            column=next(iter(records.names), None),
        )
    return Schema(kept)
