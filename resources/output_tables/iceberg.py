"""Batches as commits of an Iceberg table, by PyIceberg.

The property `adjunct.producer.NAME` of the table has the newest batch of a producer, and of which
lake it is. It is set in
the transaction that appends the rows, so that it stays when snapshots expire, and when others roll
the table back. The summary of the snapshot has the same.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.iceberg import IcebergTable, translate_client_errors
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.output_tables.batches import (
    ATTEMPTS,
    CommittedBatch,
    OutputBatch,
    OutputColumns,
    TableOutput,
    check_same_replay,
    conflict_error,
    describe_added,
    describe_creation,
    describe_kept_partitions,
    fitted_parts,
    readable_schema,
    replaced_sql,
    same_batch,
)
from dagster_adjunct.resources.output_tables.iceberg_files import DataFiles, rewrite_without
from dagster_adjunct.resources.schemas.column_changes import Evolution
from dagster_adjunct.resources.schemas.paths import split_path
from dagster_adjunct.resources.schemas.schema import AS_NAMED, Schema, quote_text
from dagster_adjunct.resources.streams.system import READER, SOURCE_OFFSET
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.manifest import DataFile
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema as IcebergSchema
    from pyiceberg.table import Table, Transaction
    from pyiceberg.transforms import Transform

WRITTEN_FOR = ("0.12",)
"""The versions of PyIceberg of which this module uses a private function."""
PRODUCER = "adjunct.producer."
_SUMMARY = ("adjunct.producer", "adjunct.batch", "adjunct.commit", "adjunct.lake")
_TRANSFORM = re.compile(r"(?P<name>[a-z]+)\((?:(?P<number>[0-9]+)\s*,\s*)?(?P<column>.+)\)")
_UNIT = {"year": "years", "month": "months", "day": "days", "hour": "hours", "date": "days"}
_PAUSE = 0.2


@dataclass(frozen=True, slots=True)
class PartitionField:
    """A field of a partition spec: the transform ("identity", "days", "bucket" and so on) of a
    column, with the `number` of buckets or the width.
    """

    transform: str
    column: str
    number: int | None = None

    @property
    def name(self) -> str:
        """The name of the field, as Spark names it."""
        if self.transform == "identity":
            return self.column
        suffix = {"bucket": "bucket", "truncate": "trunc"}
        return f"{self.column}_{suffix.get(self.transform, self.transform.removesuffix('s'))}"

    @property
    def text(self) -> str:
        """The field as `partition_by` has it."""
        if self.transform == "identity":
            return self.column
        if self.number is None:
            return f"{self.transform}({self.column})"
        return f"{self.transform}({self.number}, {self.column})"

    def to_pyiceberg(self) -> Transform[Any, Any]:
        """Return PyIceberg's transform."""
        from pyiceberg import transforms

        if self.transform == "bucket":
            return transforms.BucketTransform(self.number or 1)
        if self.transform == "truncate":
            return transforms.TruncateTransform(self.number or 1)
        kinds: Mapping[str, Callable[[], Transform[Any, Any]]] = {
            "identity": transforms.IdentityTransform,
            "years": transforms.YearTransform,
            "months": transforms.MonthTransform,
            "days": transforms.DayTransform,
            "hours": transforms.HourTransform,
        }
        return kinds[self.transform]()


def parse_partition_field(text: str) -> PartitionField:
    """Return the partition field that a text of `partition_by` means. Raises ConfigurationError."""
    match = _TRANSFORM.fullmatch(text.strip())
    if match is None:  # the name of a column
        return PartitionField("identity", text.strip())
    name = match["name"]
    name = _UNIT.get(name, name)
    needs_number = name in ("bucket", "truncate")
    is_known = needs_number or name in ("identity", *_UNIT.values())
    has_number = match["number"] is not None
    if not is_known or needs_number != has_number:
        raise errors.ConfigurationError(
            f"partition_by has {text!r}: expected a column, or a transform of one.",
            "Write one of: days(at), months(at), years(at), hours(at), bucket(16, id),"
            " truncate(4, code).",
            argument="partition_by",
        )
    number = None if match["number"] is None else int(match["number"])
    return PartitionField(name, match["column"].strip(), number)


class _FoundBatch(Exception):
    """Somebody has committed the batch meanwhile: this process, or another run."""

    def __init__(self, found: CommittedBatch) -> None:
        super().__init__()
        self.found = found


@dataclass(frozen=True, slots=True)
class IcebergOutput(TableOutput):
    """An Iceberg table that an application writes."""

    table: IcebergTable

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.table.name

    @property
    def place(self) -> str:  # type: ignore[override]
        return self.table.name

    # -- what is there

    def stored_columns(self) -> Schema | None:
        catalog = self.table.open()
        with translate_client_errors(catalog.name):
            table = self._load(catalog)
        return None if table is None else readable_schema(table.schema().as_arrow())

    def check(self, columns: OutputColumns, producer: str) -> Sequence[str]:
        catalog = self.table.open()
        with translate_client_errors(catalog.name):
            table = self._load(catalog)
        if table is None:
            _build_spec(self.table, _new_schema(columns))
            return describe_creation(self.table.partition_by)
        check_same_replay(self.name, _find_in(table, producer), columns)
        schema = table.schema()
        evolved = columns.evolve(readable_schema(schema.as_arrow()), self.name)
        declared = [parse_partition_field(text).text for text in self.table.partition_by]
        return (
            *evolved.changes,
            *describe_added(columns, schema.column_names),
            *describe_kept_partitions(declared, _list_partitions(table)),
        )

    def find(self, producer: str) -> CommittedBatch | None:
        catalog = self.table.open()
        with translate_client_errors(catalog.name):
            table = self._load(catalog)
            return None if table is None else _find_in(table, producer)

    def has_rows_of(self, readers: Sequence[str]) -> bool:
        condition = _parse(f"{READER} in ({', '.join(map(quote_text, readers))})")
        catalog = self.table.open()
        with translate_client_errors(catalog.name):
            table = self._load(catalog)
            if table is None or READER not in table.schema().column_names:
                return False
            found = table.scan(condition, (READER,), limit=1).to_arrow()
            return bool(found.num_rows)

    def _load(self, catalog: Catalog) -> Table | None:
        """Return the table as it is now; None if there is none."""
        from pyiceberg.exceptions import NoSuchTableError

        try:
            return catalog.load_table(self.table.identifier)
        except NoSuchTableError:
            return None

    def _load_or_create(self, catalog: Catalog, batch: OutputBatch) -> Table:
        """Return the table as it is now; create it, and its namespace, if there is none and the
        batch may be its producer's first one.
        """
        from pyiceberg.exceptions import NoSuchNamespaceError

        table = self._load(catalog)
        if table is not None:
            return table
        batch.check_first(False)
        schema = _new_schema(batch.columns)
        spec = _build_spec(self.table, schema)
        create = catalog.create_table_if_not_exists
        try:
            return create(self.table.identifier, schema, self.table.location, spec)
        except NoSuchNamespaceError:
            catalog.create_namespace_if_not_exists(self.table.identifier.rpartition(".")[0])
            return create(self.table.identifier, schema, self.table.location, spec)

    # -- commits

    def commit(self, batch: OutputBatch) -> CommittedBatch:
        import_package("Iceberg", "pyiceberg.table", "iceberg")
        from pyiceberg.exceptions import CommitFailedException, ValidationException

        catalog = self.table.open()
        reason = ""
        for attempt in range(ATTEMPTS):
            with translate_client_errors(catalog.name):
                table = self._load_or_create(catalog, batch)
                found = _find_same(table, batch, self.name)
            if found is not None:
                return found
            commit = uuid.uuid4().hex
            try:
                return _Commit(batch, commit, self.name).run(table)
            except _FoundBatch as done:
                return done.found
            except (CommitFailedException, ValidationException) as error:
                reason = str(error).partition("\n")[0].rstrip(".")
                time.sleep(_PAUSE * attempt)
            except errors.AdjunctError:
                raise
            except Exception as error:
                with translate_client_errors(catalog.name):
                    landed = self._find_landed(catalog, batch, commit, error)
                    if landed is None:
                        raise
                return landed
        raise conflict_error(self.name, reason)

    def _find_landed(
        self, catalog: Catalog, batch: OutputBatch, commit: str, error: Exception
    ) -> CommittedBatch | None:
        """Return the batch if this attempt has committed it, although it ended with an `error`: its
        reply may have been lost. None if it has not.

        If the table can't be read either, the batch is run again, and looks first. Raises
        TableError for a table that has become another one meanwhile, and the errors of the batch's
        `check_first` for one that is gone.
        """
        table = self._load(catalog)
        if table is None:
            batch.check_first(False)
            return None
        landed = _find_commit(table, batch, commit)
        if landed is None and isinstance(error, ValueError):  # as PyIceberg raises for such a table
            raise _changed_error(self.name, error) from error
        return landed


def _changed_error(name: str, error: ValueError) -> errors.TableError:
    """Return the error for a table that PyIceberg can't commit to as it has become."""
    return errors.TableError(
        f"table {name} does not take the batch: {errors.first_line(error)}. Its history was rolled"
        " back, expired or replaced while the batch was committed, or PyIceberg can't write it.",
        "Run it again: it starts from the table as it is now.",
        table=name,
    )


@dataclass(frozen=True, slots=True)
class _Commit:
    """One attempt, named `commit`, to commit a batch to the table of this name."""

    batch: OutputBatch
    commit: str
    name: str

    def run(self, table: Table) -> CommittedBatch:
        """Write the rows and commit them; raise _FoundBatch if the table has the batch by then."""
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        batch = self.batch
        clock = to_microseconds(batch.clock)
        transaction = _call_before_retries(table, self._look_again).transaction()
        evolved = batch.columns.evolve(readable_schema(table.schema().as_arrow()), self.name)
        _change_columns(transaction, batch.columns, evolved)
        metadata = transaction.table_metadata
        columns = schema_to_pyarrow(metadata.schema(), include_field_ids=False)
        written = DataFiles(table.io, metadata)
        for part in fitted_parts(batch, columns, self.name):
            written.write(part)
        result = CommittedBatch(
            batch.number,
            clock,
            self.commit,
            written.rows,
            lake=batch.lake,
            positions=batch.columns.have_positions,
        )
        condition = self._find_replaced(table)
        removed: list[DataFile] = []
        if condition is not None:
            tasks = list(table.scan(row_filter=condition).plan_files())
            removed = rewrite_without(tasks, batch.replaces, written, self.name)
        if not written.files and not removed:  # nothing to commit
            return result
        facts = (batch.producer, str(batch.number), self.commit, str(batch.lake))
        summary = dict(zip(_SUMMARY, facts, strict=True))
        transaction.set_properties({PRODUCER + batch.producer: _to_json(result)})
        batch.before_commit()
        update = transaction.update_snapshot(snapshot_properties=summary)
        with update.overwrite() if removed else update.fast_append() as snapshot:
            if removed:
                assert condition is not None
                snapshot.delete_by_predicate(_parse(condition))
            for file in removed:
                snapshot.delete_data_file(file)
            for file in written.files:
                snapshot.append_data_file(file)
        transaction.commit_transaction()
        return result

    def _find_replaced(self, table: Table) -> str | None:
        """Return a condition for files that may have rows which the batch replaces; None if there
        can't be any.
        """
        if SOURCE_OFFSET not in table.schema().column_names:
            return None
        return replaced_sql(self.batch.replaces, exact=False)

    def _look_again(self, table: Table) -> None:
        """Raise _FoundBatch if somebody has committed the batch, and the error of `before_commit`
        if this run may not write any more.

        If the batch replaces rows, also raises CommitFailedException: other files may have these
        rows now, so that the next attempt looks for them again.
        """
        from pyiceberg.exceptions import CommitFailedException

        found = _find_commit(table, self.batch, self.commit)
        if found is None:
            found = _find_same(table, self.batch, self.name)
        if found is not None:
            raise _FoundBatch(found)
        self.batch.before_commit()
        if self.batch.replaces:  # `IcebergOutput.commit` begins again
            raise CommitFailedException("rows to replace may have moved")


def _parse(condition: str) -> BooleanExpression:
    from pyiceberg.expressions.parser import parse

    return parse(condition)


def _call_before_retries(table: Table, look: Callable[[Table], None]) -> Table:
    """Return the table as one that calls `look` with itself before PyIceberg repeats a commit on
    top of another writer's.
    """
    from pyiceberg.table import Table

    class Watched(Table):
        def refresh(self) -> Table:  # PyIceberg's commits call it before they are repeated
            super().refresh()
            look(self)
            return self

    parts = (table.metadata, table.metadata_location, table.io, table.catalog)
    return Watched(table.name(), *parts, table.config)


def _find_in(table: Table, producer: str) -> CommittedBatch | None:
    """Return the newest batch of a producer by the table's property; without it, by the snapshots
    that are left. None if the table has none.
    """
    stored = table.properties.get(PRODUCER + producer)
    if stored is not None:
        return _from_json(stored, table.name()[-1])
    newest = None
    for snapshot in table.snapshots():
        facts = snapshot.summary.additional_properties if snapshot.summary else {}
        name, number, commit, lake = (facts.get(key) for key in _SUMMARY)
        if name == producer and number is not None and number.isdecimal():
            found = CommittedBatch(int(number), 0, commit or "", lake=int(lake or 0))
            newest = found if newest is None or newest.number <= found.number else newest
    return newest


def _find_same(table: Table, batch: OutputBatch, name: str) -> CommittedBatch | None:
    """Return the batch if the table has it, else None. Raises ProducerConflictError as
    `same_batch`, ConfigurationError as `check_same_replay`, and the errors of the batch's
    `check_first`.
    """
    found = _find_in(table, batch.producer)
    if found is None:
        batch.check_first(True)
    same = same_batch(name, found, batch.producer, batch.number, batch.clock, batch.lake)
    if same is None:
        check_same_replay(name, found, batch.columns)
    return same


def _find_commit(table: Table, batch: OutputBatch, commit: str) -> CommittedBatch | None:
    """Return the batch if this very attempt has committed it, else None."""
    found = _find_in(table, batch.producer)
    return found if found is not None and found.commit == commit else None


def _to_json(done: CommittedBatch) -> str:
    """Return what the table's property has of a batch; `_from_json` reads it."""
    facts = {
        "batch": done.number,
        "clock": done.clock,
        "commit": done.commit,
        "rows": done.rows,
        "lake": done.lake,
        "positions": done.positions,
    }
    return json.dumps(facts)


def _from_json(text: str, table: str) -> CommittedBatch:
    """Return the batch in a table's property. Raises MalformedDocumentError."""
    try:
        facts = json.loads(text)
        return CommittedBatch(
            int(facts["batch"]),
            int(facts["clock"]),
            str(facts["commit"]),
            facts["rows"],
            lake=int(facts["lake"]),
            positions=facts["positions"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise errors.MalformedDocumentError(
            f"a property {PRODUCER}… of Iceberg table {table} can't be read: {text!r:.200}.",
            "Somebody else has set it: restore it from an earlier metadata file of the table.",
            table=table,
        ) from error


# -- columns


def _new_schema(columns: OutputColumns) -> IcebergSchema:
    """Return the columns of a new table, with ids."""
    from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
    from pyiceberg.schema import assign_fresh_schema_ids

    return assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(columns.arrow_schema()))


def _build_spec(table: IcebergTable, schema: IcebergSchema) -> PartitionSpec:
    """Return the partition spec of a new table. Raises ConfigurationError for a column that does
    not exist, or that the transform does not take.
    """
    from pyiceberg import partitioning

    fields = []
    for number, text in enumerate(table.partition_by):
        parsed = parse_partition_field(text)
        transform = parsed.to_pyiceberg()
        path = ".".join(split_path(parsed.column))
        try:
            column = schema.find_field(path)
        except ValueError:
            column = None
        if column is None or not transform.can_transform(column.field_type):
            there = "is not there" if column is None else f"is {column.field_type}"
            raise errors.ConfigurationError(
                f"table {table.identifier} is to be partitioned by {text}, and column"
                f" {parsed.column!r} {there}.",
                "Name a column of the records, with a transform that takes its type.",
                argument="partition_by",
            )
        field_id = partitioning.PARTITION_FIELD_ID_START + number
        # Of an identity, the name of the field is that of the column.
        name = parsed.name.replace(".", "_") if parsed.transform != "identity" else path
        fields.append(partitioning.PartitionField(column.field_id, field_id, transform, name))
    return partitioning.PartitionSpec(*fields)


def _list_partitions(table: Table) -> list[str]:
    """Return the partition fields of a table as `partition_by` has them."""
    from pyiceberg import transforms

    listed = []
    for each in table.spec().fields:
        column = str(table.schema().find_column_name(each.source_id))
        if isinstance(each.transform, transforms.IdentityTransform):
            listed.append(column)
            continue
        if isinstance(each.transform, transforms.BucketTransform):
            listed.append(PartitionField("bucket", column, each.transform.num_buckets).text)
            continue
        if isinstance(each.transform, transforms.TruncateTransform):
            listed.append(PartitionField("truncate", column, each.transform.width).text)
            continue
        unit = _UNIT.get(str(each.transform), str(each.transform))
        listed.append(PartitionField(unit, column).text)
    return listed


def _change_columns(transaction: Transaction, columns: OutputColumns, evolved: Evolution) -> None:
    """Rename, drop, add and widen columns in the transaction; columns keep their ids."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    stored = readable_schema(transaction.table_metadata.schema().as_arrow())
    there = set(schema_to_pyarrow(transaction.table_metadata.schema()).names)
    missing = [name for name, _ in columns.hidden if name not in there]
    if not evolved.changes and not missing:
        return
    changes = columns.changes
    # Renames and removals first: additions are compared with the names after them.
    with transaction.update_schema() as update:
        for path, name in changes.renamed.items():
            if _has_path(stored, path):
                update.rename_column(_iceberg_path(path), split_path(name)[0])
        for path in changes.drop:
            if _has_path(stored, path):
                update.delete_column(_iceberg_path(path))
    with transaction.update_schema() as update:
        added = pa.schema([*evolved.schema.to_arrow(), *_hidden_fields(columns)])
        update.union_by_name(added)


def _hidden_fields(columns: OutputColumns) -> list[pa.Field]:
    schema = columns.arrow_schema()
    return [schema.field(name) for name, _ in columns.hidden]


def _has_path(stored: Schema, path: str) -> bool:
    """Return whether a table still has a column or member: an earlier commit may have renamed or
    dropped it.
    """
    from dagster_adjunct.resources.schemas.column_changes import ColumnChanges

    return not ColumnChanges(drop=(path,)).unknown(stored, AS_NAMED)


def _iceberg_path(path: str) -> str:
    """Return a path as Iceberg writes it: "lines[].sku" is "lines.element.sku"."""
    plain = path.replace("[]", ".element").replace("[*]", ".value")
    return ".".join(split_path(plain))
