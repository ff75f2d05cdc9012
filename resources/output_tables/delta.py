"""Batches as commits of a Delta table, by delta-rs.

The table's application transaction (`txn`) of `adjunct:PRODUCER` has the number of its newest
batch, that of `adjunct-clock:PRODUCER` when it was begun, and that of `adjunct-lake:PRODUCER` of
which lake it is. Of two commits at once of one
producer, delta-rs refuses the second. The commit's own metadata has the batch, too, for people who
look at the history.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.delta import delta_options, delta_place
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.objects.lake import check_store_url
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.output_tables.batches import (
    ATTEMPTS,
    MOST_COMPARED,
    CommittedBatch,
    OutputBatch,
    OutputColumns,
    ReplacedRange,
    TableOutput,
    check_same_replay,
    conflict_error,
    describe_added,
    describe_creation,
    describe_kept_partitions,
    fitted_parts,
    group_by_source,
    misfit_error,
    readable_schema,
    replaced_sql,
    same_batch,
)
from dagster_adjunct.resources.schemas.evolution import holds_values_of
from dagster_adjunct.resources.schemas.schema import Schema, schema_struct
from dagster_adjunct.resources.streams.system import READER, SOURCE_OFFSET
from dagster_adjunct.resources.times import to_microseconds
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable

_PAUSE = 0.2
_HISTORY = 100
_MOST_LISTED = 10_000


@validated
@dataclass(frozen=True, slots=True)
class DeltaLakeTable:
    """A Delta table at `s3://BUCKET/PREFIX`, a folder or `file:///…`.

    S3 is accessed as for a lake: with the ADJUNCT_S3_… settings and boto3's credentials. An
    application that creates the table partitions it by the columns `partition_by`.
    """

    url: str
    partition_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_store_url(self.url, "Delta table", ("s3", "s3a", "file"))

    @property
    def name(self) -> str:
        """The name in plans: "delta:s3://tables/enriched"."""
        return f"delta:{self.url}"


@dataclass(frozen=True, slots=True)
class DeltaOutput(TableOutput):
    """A Delta table that an application writes."""

    table: DeltaLakeTable

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.table.name

    @property
    def place(self) -> str:  # type: ignore[override]
        return delta_place(self.table.url)

    # -- what is there

    def stored_columns(self) -> Schema | None:
        table = self._open()
        if table is None:
            return None
        return readable_schema(_arrow_schema(table))

    def check(self, columns: OutputColumns, producer: str) -> Sequence[str]:
        self._refuse_changes(columns)
        table = self._open()
        if table is None:
            self._check_partitions(columns)
            return describe_creation(self.table.partition_by)
        check_same_replay(self.name, _find_in(table, producer), columns)
        stored = _arrow_schema(table)
        partitions = table.metadata().partition_columns
        return (
            *self._evolve(columns, stored).changes,
            *describe_added(columns, stored.names),
            *describe_kept_partitions(self.table.partition_by, partitions),
        )

    def find(self, producer: str) -> CommittedBatch | None:
        table = self._open()
        if table is None:
            return None
        return _find_in(table, producer, 0)

    def has_rows_of(self, readers: Sequence[str]) -> bool:
        table = self._open()
        if table is None or READER not in _arrow_schema(table).names:
            return False
        try:
            found = table.to_pyarrow_dataset().filter(pc.field(READER).isin(list(readers)))
            return bool(found.head(1, columns=[READER]).num_rows)
        except Exception as error:  # of delta-rs
            raise _translate(self.name, error) from error

    def _open(self) -> DeltaTable | None:
        """Return the table as it is now; None if there is none. Raises TableUnavailableError."""
        delta: Any = import_package("Delta", "deltalake", "delta")
        from deltalake.exceptions import DeltaError, TableNotFoundError

        options = delta_options(self.table.url)
        try:
            table: DeltaTable = delta.DeltaTable(
                delta_place(self.table.url), storage_options=options
            )
            return table
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as error:
            raise _unavailable(self.name, error) from None

    # -- columns

    def _refuse_changes(self, columns: OutputColumns) -> None:
        """Raise ConfigurationError for declared renames and removals."""
        if columns.changes:
            raise errors.ConfigurationError(
                f"output table {self.name} has renamed= or drop=: delta-rs can't rename or drop"
                " columns of a Delta table.",
                "Leave both out. Change the table with Spark, which can, or add a column of the new"
                " name.",
                argument="renamed",
            )

    def _check_partitions(self, columns: OutputColumns) -> None:
        """Raise ConfigurationError if the table is partitioned by a column that does not exist."""
        for name in self.table.partition_by:
            if name not in columns.schema:
                raise errors.ConfigurationError(
                    f"table {self.name} is to be partitioned by {name!r}, and its columns are"
                    f" {', '.join(columns.schema.names)}.",
                    "Name columns of the records. Delta has no transforms: add a column such as"
                    ' day with .with_columns(day="date(at)").',
                    argument="partition_by",
                )

    def _evolve(self, columns: OutputColumns, there: pa.Schema) -> _EvolvedColumns:
        """Return the table's columns after the commit. Raises SchemaMismatchError for a column that
        would have to be widened.
        """
        stored = readable_schema(there)
        evolved = columns.evolve(stored, self.name)
        evolved_struct = schema_struct(evolved.schema)
        for member in schema_struct(stored).members:
            after = evolved_struct.member(member.name)
            assert after is not None
            if not _has_only_more_members(after.type, member.type):
                problem = (
                    f"{member.name} is {after.type}, was {member.type}, and delta-rs does not"
                    " widen columns"
                )
                raise misfit_error(self.name, [problem])
        wanted = {each.name: each for each in evolved.schema.to_arrow()}
        fields = [wanted.pop(each.name, each).with_nullable(each.nullable) for each in there]
        hidden = {name for name, _ in columns.hidden} - set(there.names)
        fields += wanted.values()  # the new ones
        fields += [each for each in columns.arrow_schema() if each.name in hidden]
        return _EvolvedColumns(pa.schema(fields), evolved.changes)

    # -- commits

    def commit(self, batch: OutputBatch) -> CommittedBatch:
        self._refuse_changes(batch.columns)
        reason = ""
        for attempt in range(ATTEMPTS):
            table = self._open()
            found = self._find_same(table, batch)
            if found is not None:
                return found
            commit = uuid.uuid4().hex
            try:
                return self._commit_once(table, batch, commit)
            except errors.AdjunctError:
                raise
            except Exception as error:  # of delta-rs
                landed = self._look_again(batch, commit)
                if landed is not None:
                    return landed
                if not _is_conflict(error):
                    raise _translate(self.name, error) from error
                reason = errors.first_line(error)
                time.sleep(_PAUSE * attempt)
        raise conflict_error(self.name, reason)

    def _look_again(self, batch: OutputBatch, commit: str) -> CommittedBatch | None:
        """Return the batch if it is in the table after a commit has failed: this attempt's reply
        may have been lost, or another run was faster. None if it is not.
        """
        found = self._find_same(self._open(), batch)
        if found is None or found.commit != commit:  # another run's
            return found
        return replace(found, duplicate=False)

    def _find_same(self, table: DeltaTable | None, batch: OutputBatch) -> CommittedBatch | None:
        """Return the batch if the table has it, else None. Raises ProducerConflictError as
        `same_batch`, ConfigurationError as `check_same_replay`, and the errors of the batch's
        `check_first`.
        """
        if table is None:
            batch.check_first(False)
            return None
        found = _find_in(table, batch.producer, batch.number)
        if found is None:
            batch.check_first(True)
        same = same_batch(self.name, found, batch.producer, batch.number, batch.clock, batch.lake)
        if same is None:
            check_same_replay(self.name, found, batch.columns)
        return same

    def _commit_once(
        self, table: DeltaTable | None, batch: OutputBatch, commit: str
    ) -> CommittedBatch:
        """Commit a batch to the table as it was opened, None to create it. A batch without rows
        that replaces none is not committed.
        """
        result = CommittedBatch(batch.number, to_microseconds(batch.clock), commit, lake=batch.lake)
        properties = _commit_properties(batch, result, creates=table is None)
        options: dict[str, Any] = {"commit_properties": properties}
        if table is None:
            self._check_partitions(batch.columns)
            sent = _SentRows(batch, batch.columns.arrow_schema(), self.name)
            options |= {
                "mode": "error",
                "partition_by": list(self.table.partition_by) or None,
                "storage_options": delta_options(self.table.url),
            }
            _write(delta_place(self.table.url), sent, options)
            return replace(result, rows=sent.rows)
        stored = _arrow_schema(table)
        columns = self._evolve(batch.columns, stored).schema
        sent = _SentRows(batch, columns, self.name)
        removed = self._find_removed(stored, batch.replaces)
        if removed is not None:
            options |= {"mode": "overwrite", "predicate": removed}
        elif sent.has_rows():
            options["mode"] = "append"
        else:
            return replace(result, rows=0)
        if not columns.equals(stored):
            options["schema_mode"] = "merge"
        _write(table, sent, options)
        return replace(result, rows=sent.rows)

    def _find_removed(self, stored: pa.Schema, ranges: Sequence[ReplacedRange]) -> str | None:
        """Return the SQL condition for the rows that a batch removes; None if it removes none, as
        from a table whose rows have no positions. Raises TableError for too many.
        """
        if not ranges or SOURCE_OFFSET not in stored.names:
            return None
        _check_few(self.name, ranges)
        return replaced_sql(ranges)


class _EvolvedColumns(NamedTuple):
    """A table's columns after a commit, and what changes, in words."""

    schema: pa.Schema
    changes: Sequence[str]


def _write(target: DeltaTable | str, sent: _SentRows, options: dict[str, Any]) -> None:
    """Write rows to a table. Raises the error that ended them, or what delta-rs raises."""
    from deltalake import write_deltalake

    try:
        write_deltalake(target, sent.reader(), **options)
    except Exception as error:
        if sent.failed is not None:
            raise sent.failed from error
        raise


def _commit_properties(
    batch: OutputBatch, result: CommittedBatch, *, creates: bool
) -> CommitProperties:
    """Return the properties of a batch's commit, by which `_find_in` finds it again."""
    from deltalake import CommitProperties, Transaction

    named = {
        "adjunct.producer": batch.producer,
        "adjunct.batch": str(batch.number),
        "adjunct.clock": str(result.clock),
        "adjunct.commit": result.commit,
        "adjunct.lake": str(result.lake),
    }
    return CommitProperties(
        custom_metadata=named,
        # To create a table, delta-rs would otherwise repeat its commit on top of one that somebody
        # else has created meanwhile, without looking at that one's transactions.
        max_commit_retries=0 if creates else None,
        app_transactions=[
            Transaction(_app_id(batch.producer), batch.number),
            Transaction(_clock_id(batch.producer), result.clock),
            Transaction(_lake_id(batch.producer), result.lake),
            Transaction(_positions_id(batch.producer), int(batch.columns.have_positions)),
        ],
    )


@dataclass(slots=True)
class _SentRows:
    """The rows of a batch as delta-rs reads them, part by part, before it commits. `failed` is the
    error that ended them.
    """

    batch: OutputBatch
    columns: pa.Schema
    name: str
    rows: int = 0
    failed: BaseException | None = None
    _parts: Iterator[pa.Table] | None = None
    _first: list[pa.Table] = field(default_factory=list)

    def has_rows(self) -> bool:
        """Return whether there are any rows; computes the first part."""
        if self._parts is None:
            self._parts = fitted_parts(self.batch, self.columns, self.name)
            self._first = list(itertools.islice(self._parts, 1))
        return bool(self._first)

    def reader(self) -> pa.RecordBatchReader:
        """Return the rows as delta-rs takes them."""
        return pa.RecordBatchReader.from_batches(
            self.columns.remove_metadata(), self._record_batches()
        )

    def _record_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows, then check that the run may still write."""
        try:
            self.has_rows()
            assert self._parts is not None
            for part in itertools.chain(self._first, self._parts):
                yield from self._count(part)
            self.batch.before_commit()
        except GeneratorExit:
            raise
        except BaseException as error:
            self.failed = error
            raise

    def _count(self, part: pa.Table) -> list[pa.RecordBatch]:
        self.rows += part.num_rows
        batches: list[pa.RecordBatch] = part.to_batches()
        return batches


def _check_few(table: str, ranges: Sequence[ReplacedRange]) -> None:
    """Raise TableError for more separate ranges than delta-rs can look for: its parser overflows
    the stack of the process. Few ranges are compared, whatever their lengths (`replaced_sql`).
    """
    for spans in group_by_source(ranges).values():
        offsets = sum(span.end - span.start for span in spans)
        if len(spans) > MOST_COMPARED and offsets > _MOST_LISTED:
            raise errors.TableError(
                f"a batch replaces the rows of {offsets:,} scattered records in table {table};"
                f" delta-rs takes {_MOST_LISTED:,}.",
                'Declare the table with on_replay="append", or send to an Iceberg table. To go on,'
                " declare a smaller max_batch_records, abandon this batch, and request it again.",
                table=table,
            )


def _app_id(producer: str) -> str:
    return f"adjunct:{producer}"


def _clock_id(producer: str) -> str:
    return f"adjunct-clock:{producer}"


def _lake_id(producer: str) -> str:
    return f"adjunct-lake:{producer}"


def _positions_id(producer: str) -> str:
    return f"adjunct-positions:{producer}"


def _find_in(table: DeltaTable, producer: str, sought: int | None = None) -> CommittedBatch | None:
    """Return the newest batch of a producer by the table's transactions, None if there is none.

    The table's history says which attempt committed it and with how many rows, as long as it has
    the commit. It is read only if the batch has the number `sought` or a later one, never if
    `sought` is None: then the attempt stays "", and the number of rows None.
    """
    number = table.transaction_version(_app_id(producer))
    if number is None:
        return None
    clock = table.transaction_version(_clock_id(producer)) or 0
    lake = table.transaction_version(_lake_id(producer)) or 0
    positions = table.transaction_version(_positions_id(producer))
    without_history = CommittedBatch(
        number, clock, "", lake=lake, positions=None if positions is None else bool(positions)
    )
    if sought is None or number < sought:
        return without_history
    for entry in table.history(_HISTORY):
        if entry.get("adjunct.producer") == producer and entry.get("adjunct.batch") == str(number):
            rows = entry.get("operationMetrics", {}).get("num_added_rows")
            commit = str(entry.get("adjunct.commit", ""))
            return replace(without_history, commit=commit, rows=rows)
    return without_history


def _arrow_schema(table: DeltaTable) -> pa.Schema:
    """Return the table's columns with Arrow's types."""
    return pa.schema(table.schema().to_arrow())


def _has_only_more_members(after: Any, before: Any) -> bool:
    """Return whether a type differs from the one before at most by more members of structs."""
    return holds_values_of(after, before) and _keeps_simple_types(after, before)


def _keeps_simple_types(after: Any, before: Any) -> bool:
    """Return whether all simple types within a type are those of before."""
    from dagster_adjunct.resources.schemas.types import Array, Map, Simple, Struct

    if isinstance(before, Simple):
        return bool(before == after)
    if isinstance(before, Array):
        return _keeps_simple_types(after.element, before.element)
    if isinstance(before, Map):
        return _keeps_simple_types(after.value, before.value)
    assert isinstance(before, Struct)
    for member in before.members:
        if not _keeps_simple_types(after.member(member.name).type, member.type):
            return False
    return True


def _is_conflict(error: Exception) -> bool:
    """Return whether another commit came first, so that the next attempt may succeed.

    delta-rs has an error of its own for that, but raises a plain DeltaError in two cases, which
    only its text tells (in release 1.6).
    """
    from deltalake.exceptions import CommitFailedError

    if isinstance(error, CommitFailedError):
        return True
    text = str(error).lower()
    # By `write_deltalake` with mode="error": "A table already exists at: …".
    was_created = "already exists" in text
    # By `write_deltalake` to a table whose log was cleaned up since it was opened.
    was_cleaned_up = "invalid table version" in text
    return was_created or was_cleaned_up


def _translate(table: str, error: Exception) -> errors.AdjunctError:
    """Return the error of Adjunct for one of delta-rs."""
    from deltalake.exceptions import DeltaProtocolError, SchemaMismatchError

    if isinstance(error, SchemaMismatchError | DeltaProtocolError):
        return errors.SchemaMismatchError(
            f"delta-rs can't write table {table}: {errors.first_line(error)}.",
            "Send to a table that delta-rs can write: without column mapping, generated columns and"
            " the like.",
            table=table,
        )
    return _unavailable(table, error)


def _unavailable(table: str, error: Exception) -> errors.TableUnavailableError:
    """Return the error for a store that does not answer."""
    return errors.TableUnavailableError(
        f"the store of Delta table {table} does not answer, or refuses a request:"
        f" {errors.first_line(error)}.",
        "Check the URL, the credentials and the network; then run it again.",
        table=table,
    )
