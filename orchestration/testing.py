"""`TestApplication`: run an application on records of a test, without a server.

It runs the production code over a temporary lake (in `/dev/shm` if it exists, because Spark's
workers are separate processes) and fakes of external systems, so tests see the batches, datasets,
state and errors of real runs.
"""

from __future__ import annotations

import copy
import fcntl
import pickle
import shutil
import tempfile
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, BoundedDataset
from dagster_adjunct.assets.declaration.policies import MARKER
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.columns import validate_column_names
from dagster_adjunct.orchestration.operators.stream_facts import StreamFacts
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import build_plan, plan_application
from dagster_adjunct.orchestration.step.run import RunReport, run_application
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.output_tables.delta import DeltaLakeTable
from dagster_adjunct.resources.output_tables.opening import AnyOutputTable
from dagster_adjunct.resources.schemas.exact_values import to_exact_array
from dagster_adjunct.resources.schemas.paths import missing_part, nest_value, normal_path
from dagster_adjunct.resources.schemas.records import require_zones, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.streams.checked_reads import read_table
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    LAKE,
    RECORD_META,
    TOMBSTONE,
    NewStreams,
    OffsetRange,
    Partitioner,
    StreamInfo,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.functions import StoreFunction
from dagster_adjunct.resources.tables.operation import (
    Capabilities,
    Operation,
    Outcomes,
    SystemClock,
)
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.resources.validation import validated, validated_methods

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@validated_methods
@dataclass(frozen=True)
class TestStream:
    """A stream of a test: its columns (None: unknown), key columns, number of partitions,
    partitioner ("spark-murmur3", "kafka-murmur2" or "unknown"), and whether offsets are numbers."""

    __test__: ClassVar[bool] = False
    schema: Schema | None = None
    key: str | Sequence[str] = ()
    partitions: int = 1
    partitioner: Partitioner = "spark-murmur3"
    numbered_offsets: bool = True


@dataclass(frozen=True, slots=True)
class ScratchTable(DeltaLakeTable):
    """A Delta table in a test's folder, in place of the output table called `shown`."""

    shown: str = ""

    def __init__(self, url: str, shown: str) -> None:
        object.__setattr__(self, "url", url)
        object.__setattr__(self, "partition_by", ())
        object.__setattr__(self, "shown", shown)

    @property
    def name(self) -> str:
        """The name of the table that it replaces."""
        return self.shown


def _read_rows(table: AnyOutputTable) -> Records:
    """Return all rows of an output table of a test, without hidden columns; none before its first
    batch.
    """
    from deltalake import DeltaTable

    assert isinstance(table, ScratchTable)
    if not DeltaTable.is_deltatable(table.url):
        return []
    rows = DeltaTable(table.url).to_pyarrow_table()
    own = [name for name in rows.column_names if not name.startswith("__")]
    records: Records = rows.select(own).to_pylist()
    return records


Streams: TypeAlias = Mapping[str, TestStream]


class FakeStreams(LakeStreams):
    """A stream system with the name `name` that keeps its streams in a lake.

    `partitioners` has, by stream, the partitioner to report instead of the lake's.
    """

    def __init__(self, lake: Lake, name: str, partitioners: Mapping[str, Partitioner]) -> None:
        super().__init__(lake)
        self.name = name
        if name != LAKE:
            # The real system's settings are unknown here.
            self.capabilities = replace(self.capabilities, new_streams=NewStreams())
        self._partitioners = dict(partitioners)

    def info(self, stream: str) -> StreamInfo:
        described = super().info(stream)
        return replace(described, partitioner=self._partitioners.get(stream, described.partitioner))

    def snapshot(self, stream: str) -> StreamSystem:
        """Return itself, because nobody else writes to the streams of a test."""
        return self


def stream_schema(stream: str, given: TestStream, rows: Sequence[Mapping[str, Any]]) -> Schema:
    """Return the declared columns of a stream, or else those of its first records. Raises
    ConfigurationError if there are neither, or if the records have no types.
    """
    if given.schema is not None:
        return given.schema
    if not rows:
        problem = f"stream {stream!r} has no columns: neither a schema nor records are given."
        step = "Describe it: TestApplication(app, {…: TestStream(Schema.of(…))})."
        raise errors.ConfigurationError(problem, step, stream=stream)
    what = "its first records"
    try:
        for name in dict.fromkeys(chain.from_iterable(rows)):
            require_zones([row.get(name) for row in rows], name, what)
        return Schema.from_arrow(to_arrow_table(rows, what).schema)
    except errors.SchemaMismatchError as error:
        problem = f"stream {stream!r}: {error.problem}"
        step = (
            f"{error.next_step} Or describe the stream: TestApplication(app, {{…:"
            " TestStream(Schema.of(…))})."
        )
        raise errors.ConfigurationError(problem, step, stream=stream) from error


def arrow_table(
    stream: str,
    schema: Schema,
    rows: Sequence[Mapping[str, Any]],
    deleted: Sequence[Mapping[str, Any]],
    key: Sequence[str] = (),
) -> pa.Table:
    """Return records, then tombstones, as a table.

    Raises ConfigurationError for a record with an unknown column or a value that its column can't
    hold, and if no record has a column of the key.
    """
    everything = [*rows, *deleted]
    for number, row in enumerate(everything):
        unknown = [name for name in row if name not in schema]
        if unknown:
            problem = (
                f"stream {stream!r}: record {number} has a column {unknown[0]!r}; its columns are "
                f"{', '.join(schema.names)}."
            )
            raise errors.ConfigurationError(
                problem, "Correct the record, or the columns of the stream.", stream=stream
            )
    _check_keys(stream, schema, everything, key)
    columns = {}
    for field in schema.to_arrow():
        try:
            columns[field.name] = to_exact_array(
                [row.get(field.name) for row in everything], field.type
            )
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            problem = (
                f"stream {stream!r}: column {field.name!r} is"
                f" {schema.field(field.name, stream).type}: {error}."
            )
            step = "Correct the records, or the columns of the stream."
            raise errors.ConfigurationError(problem, step, stream=stream) from error
    columns[TOMBSTONE] = pa.array([False] * len(rows) + [True] * len(deleted), pa.bool_())
    return pa.table(columns)


Record = dict[str, Any]


class FakeTable(StoreFunction[Hashable, Record, Any]):
    """A read and write function of a remote table, with records in a file and the capabilities
    of what it replaces.
    """

    def __init__(self, path: str, replaced: Any) -> None:
        key = getattr(replaced, "key", None)
        if key is not None and not isinstance(key, str):
            key = tuple(key)
        self.path = path
        self.key = key
        self._capabilities: Capabilities = replaced.capabilities
        self._columns: dict[str, str] | None = replaced.column_types()

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def column_types(self) -> dict[str, str] | None:
        return self._columns

    async def send(self, operation: Operation[Any]) -> Outcomes:
        with _locked_table(self.path) as table:
            return await table.send(operation)

    def records(self) -> dict[Hashable, Record]:
        """Return all records by their keys."""
        with _locked_table(self.path) as table:
            return table.records()

    def fill(self, records: Mapping[Hashable, Record]) -> None:
        """Put these records, replacing those of the same keys."""
        with _locked_table(self.path) as table:
            table.fill(records)


def fake_table(table: RemoteTable[Any, Any, Any], path: Path) -> RemoteTable[Any, Any, Any]:
    """Return a copy of `table` with the same declaration and capabilities that keeps its records
    in a file.
    """
    fake = copy.copy(table)
    if table.read_function is not None:
        fake.read_function = FakeTable(str(path), table.read_function)
    if table.write_function is not None:
        fake.write_function = FakeTable(str(path), table.write_function)
    fake.clock = SystemClock()
    return fake


@contextmanager
def _locked_table(path: str) -> Iterator[MemoryTable]:
    """Lock the file, yield the table that it stores, and write the table back at the end."""
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = MemoryTable(path)  # has what this process left under the name
        table.clear()
        file = Path(path)
        if file.exists():
            table.restore(pickle.loads(file.read_bytes()))
        yield table
        written = file.with_suffix(".new")
        written.write_bytes(pickle.dumps(table.content()))
        written.replace(file)


def _check_keys(
    stream: str, schema: Schema, rows: Sequence[Mapping[str, Any]], key: Sequence[str]
) -> None:
    """Raise ConfigurationError if no record has a column of the key; without records it does
    nothing.
    """
    for name in key:
        missing = [missing_part(row, name, schema.names) for row in rows]
        is_in_one = None in missing  # a record that has the column misses no part of it
        if missing and not is_in_one:
            first, *_ = missing
            problem = (
                f"stream {stream!r}: no record has the column {first!r}, which is part of the key."
            )
            null = nest_value(name, schema.names, None)
            step = f"Add it; give a record without a key {null!r}."
            raise errors.ConfigurationError(problem, step, stream=stream)


@validated
def assert_plannable(app: Application, streams: Streams) -> ExecutionPlan:
    """Return the plan of an application over these streams, which are named "system.stream".

    Inputs of the application and its datasets must be given, outputs need not. It takes
    milliseconds, without Spark or a lake. Raises PlanningError for what a run would reject before
    it begins.
    """
    catalog = {}
    for name, stream in streams.items():
        system, _ = split_stream_name(name)
        key = validate_column_names(f"stream {name!r}: key", stream.key)
        catalog[name] = StreamFacts(
            name=name,
            partitions=stream.partitions,
            key=tuple(map(normal_path, key)),
            partitioner=stream.partitioner if key else "unknown",
            schema=stream.schema,
            evolves=system == LAKE,
            numbered=stream.numbered_offsets,
        )
    return build_plan(app, catalog)


Rows = Sequence[Mapping[str, Any]]
Records = list[dict[str, Any]]
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class TestResult:
    """The result of one run.

    `outputs` and `deletions` have the records and deletions that the run sent, by output stream;
    of an output table ("iceberg:shop.paid"), `outputs` has all rows, without hidden columns.
    `tables` has all records by table and key. `counters` are by output and join.
    """

    __test__: ClassVar[bool] = False
    outputs: Mapping[str, Records]
    deletions: Mapping[str, Records]
    tables: Mapping[str, Mapping[Any, dict[str, Any]]]
    counters: Mapping[str, Mapping[str, int]]
    report: RunReport
    plan: ExecutionPlan

    def output(self, name: str) -> Records:
        """Return the records that this run sent to an output stream, ordered by partition and
        offset.
        """
        return self.outputs[_require_known("output", name, self.outputs)]

    def deleted(self, name: str) -> Records:
        """Return the deletions that this run sent to an output stream, ordered by partition and
        offset.

        They have the key columns, and null in columns without a value.
        """
        return self.deletions[_require_known("output", name, self.deletions)]

    def table(self, name: str) -> Mapping[Any, dict[str, Any]]:
        """Return the records after this run, by key, of a remote table, or of a local table or
        dataset that the application writes; a key of several columns is a tuple."""
        return self.tables[_require_known("table", name, self.tables)]


@validated_methods
class TestApplication:
    """An application under test: give it records, run it, and inspect what it wrote.

        with TestApplication(app, streams) as test:
            test.dataset("members", [{"visitor": "ann", "level": "gold"}])
            test.input("lake.visits", [{"visitor": "ann", "shop": "north", "spent": 3.5}])
            assert test.run(spark).output("lake.known-visits") == [...]

    `streams` describes existing streams (see `TestStream`); one that is not described has the
    columns of its first records, no key and one partition. Streams of all systems are stored in a
    temporary lake; remote tables are replaced by fakes with the same contract. Each run continues
    after the previous one. User functions are called unchanged. Data is deleted at the end of the
    block, or by `close()`.
    """

    __test__ = False

    def __init__(self, app: Application, streams: Streams | None = None) -> None:
        self._described = dict(streams or {})
        parent = _MEMORY if _MEMORY.is_dir() else None
        folder = tempfile.mkdtemp(prefix="adjunct-test-", dir=parent)
        self._folder = Path(folder)
        self._close = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._lake = open_lake(self._folder / "lake")
        self._datasets = {dataset.name: _with_stream_input(dataset) for dataset in app.datasets}
        self._tables: dict[str, RemoteTable[Any, Any, Any]] = {}
        for name, table in app.tables.items():
            if isinstance(table, RemoteTable):
                self._tables[name] = fake_table(table, self._folder / f"{name}.table")
        self._output_tables: dict[str, AnyOutputTable] = {}
        for number, name in enumerate(app.output_tables):
            self._output_tables[name] = ScratchTable(str(self._folder / f"output-{number}"), name)
        self._app = app._with_tables(self._datasets, self._tables, self._output_tables)
        # With its own tables: of the fakes, a plan would not find what production rejects, such as
        # a partition field that the records lack.
        self._planned = app._with_tables(self._datasets, {}, {})
        self._sequence = 0
        self._runs = 0
        named = {*app.inputs, *app.outputs, *self._described}
        for dataset in self._datasets.values():
            if dataset.stream is not None:
                named.add(dataset.stream)
        systems = set()
        for name in named:
            system, _ = split_stream_name(name)
            systems.add(system)
        self._systems = {system: self._open_system(system) for system in sorted(systems)}
        for name, stream in self._described.items():
            if stream.schema is not None:
                self._create(name, ())

    def __enter__(self) -> TestApplication:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete all records."""
        self._close()

    def input(self, stream: str, records: Rows, *, deleted: Rows = ()) -> None:
        """Append records to the stream "system.stream", then deletions for the keys in
        `deleted`.
        """
        split_stream_name(stream)
        self._append(stream, records, deleted, None)

    def dataset(
        self, name: str, records: Rows, *, deleted: Rows = (), valid_from: datetime | None = None
    ) -> None:
        """Deliver records of a dataset's input, for the next run.

        For a bounded dataset they are a complete new version; for an unbounded one they are
        changes, followed by deletions for the keys in `deleted`. `valid_from` (with its zone) is
        the time from which the version is valid, if the bounded dataset declares such a time.
        """
        dataset = self._datasets[_require_known("dataset", name, self._datasets)]
        _check_valid_from(dataset, valid_from)
        if dataset.stream is None:
            problem = f"dataset {name!r} can't be given records: it is built from {dataset.input}."
            raise errors.ConfigurationError(
                problem, "Give records to its inputs, and run the application.", dataset=name
            )
        if dataset.follows_changes:
            self._append(dataset.stream, records, deleted, None)
            return
        if deleted:
            problem = (
                f"dataset {name!r} is bounded: each delivery is a complete version, without"
                " deletions."
            )
            step = "Omit the deleted records from the version instead."
            raise errors.ConfigurationError(problem, step, argument="deleted", dataset=name)
        self._append(dataset.stream, records, (), f"v{self._sequence + 1:06d}", valid_from)

    def table(self, name: str, records: Mapping[Any, Mapping[str, Any]]) -> None:
        """Put records into a remote table by key (a tuple if the key has several columns)."""
        table = self._tables[_require_known("remote table", name, self._tables)]
        filled = {}
        for key, record in records.items():
            has_several = isinstance(key, tuple) and len(table.key) > 1
            parts = key if has_several else (key,)
            if len(parts) != len(table.key):
                problem = (
                    f"remote table {name!r} got {key!r:.80} as a key; its key is"
                    f" ({', '.join(table.key)})."
                )
                step = "Pass a tuple with a value for each of these columns."
                raise errors.ConfigurationError(problem, step, argument="records", table=name)
            filled[key] = {**dict(zip(table.key, parts, strict=True)), **record}
        self._fake(name).fill(filled)

    def run(
        self,
        spark: SparkSession | Callable[[], SparkSession] | None = None,
        *,
        max_batches: int | None = None,
    ) -> TestResult:
        """Bring the datasets up to date and run batches until the inputs are read, or `max_batches`
        of them.

        `spark` is a session or a function that returns one; by default a local session is started
        once per process. Raises the same errors as in production.
        """
        plan = plan_application(self._planned, systems=self._systems)
        before = {name: self._ends(name) for name in self._app.outputs}
        self._runs += 1
        report = run_application(
            self._app,
            lake=self._lake,
            systems=self._systems,
            spark=spark or _local_session,
            run=f"test-{self._runs}",
            max_batches=max_batches,
        )
        outputs: dict[str, Records] = {}
        for name, table in self._output_tables.items():
            outputs[name] = _read_rows(table)
        deletions: dict[str, Records] = {}
        for name, start in before.items():
            sent = self._read_output(name, start)
            outputs[name] = sent.records
            deletions[name] = sent.deletions
        tables: dict[str, Mapping[Any, dict[str, Any]]] = {}
        for name in self._tables:
            tables[name] = self._fake(name).records()
        for operator in self._app.operators:
            written = operator.spec.writes
            if written in self._datasets:
                tables[written] = self._entries(written)
        return TestResult(outputs, deletions, tables, report.step.counters, report, plan)

    def output(self, name: str) -> Records:
        """Return all records of an output stream, ordered by partition and offset, without
        deletions.
        """
        return self._read_output(_require_known("output", name, self._app.outputs), {}).records

    def _open_system(self, name: str) -> FakeStreams:
        """Return the stream system of a test with this name."""
        if name == "lake":
            return FakeStreams(self._lake, name, {})
        partitioners = {}
        for described, given in self._described.items():
            system, stream = split_stream_name(described)
            if system == name:
                partitioners[stream] = given.partitioner
        return FakeStreams(open_lake(self._folder / f"system-{name}"), name, partitioners)

    def _fake(self, name: str) -> FakeTable:
        """Return the fake of a remote table."""
        fake = self._tables[name].write_function or self._tables[name].read_function
        assert isinstance(fake, FakeTable)
        return fake

    def _entries(self, dataset: str) -> dict[Any, dict[str, Any]]:
        """Return the entries of a dataset by key, none before it has a version."""
        try:
            with open_dataset(self._lake, dataset) as opened:
                return {key: dict(entry) for key, entry in opened.items()}
        except (errors.DatasetNotFoundError, errors.NoSealedVersionError):
            return {}

    def _create(self, name: str, records: Rows) -> None:
        """Create a stream as it is described; else with the columns of these records."""
        system, stream = split_stream_name(name)
        given = self._described.get(name, TestStream())
        key = (given.key,) if isinstance(given.key, str) else tuple(given.key)
        schema = stream_schema(name, given, records)
        self._systems[system].create(stream, schema=schema, key=key, partitions=given.partitions)

    def _append(
        self,
        name: str,
        records: Rows,
        deleted: Rows,
        version: str | None,
        valid_from: datetime | None = None,
    ) -> None:
        """Append records, then deletions, to a stream, which is created if it does not exist; with
        a `version`, its marker follows. Raises ConfigurationError for a stream of a system that the
        application does not use, and for records that do not fit its columns.
        """
        system, stream = split_stream_name(name)
        if system not in self._systems:
            problem = (
                f"application {self._app.name!r} uses no stream of system {system!r}; its systems: "
                f"{', '.join(self._systems) or 'none'}."
            )
            raise errors.ConfigurationError(problem, "Correct the name.", stream=name)
        try:
            info = self._systems[system].info(stream)
        except errors.StreamNotFoundError:
            self._create(name, [*records, *deleted])
            info = self._systems[system].info(stream)
        assert info.schema is not None
        self._sequence += 1
        table = arrow_table(name, info.schema, records, deleted, info.key)
        self._systems[system].append(
            stream,
            table,
            producer="test",
            sequence=self._sequence,
            end_of_dataset=version,
            valid_from=valid_from,
        )

    def _ends(self, name: str) -> dict[SystemStreamPartition, str]:
        """Return the upcoming offset of each partition of a stream; none if it does not exist."""
        system, stream = split_stream_name(name)
        try:
            return self._systems[system].upcoming(self._systems[system].partitions(stream))
        except errors.StreamNotFoundError:
            return {}

    def _read_output(self, name: str, start: Mapping[SystemStreamPartition, str]) -> _Sent:
        """Return what was sent to an output stream, from these positions on; from its oldest
        offsets where there is none. Nothing if it does not exist.
        """
        system_name, _ = split_stream_name(name)
        system = self._systems[system_name]
        sent = _Sent([], [])
        ends = self._ends(name)
        if not ends:
            return sent
        oldest = system.oldest(ends)
        ranges = {ssp: OffsetRange(start.get(ssp, oldest[ssp]), end) for ssp, end in ends.items()}
        for row in python_rows(read_table(system, ranges)):
            record = {column: value for column, value in row.items() if column not in RECORD_META}
            if row.get(TOMBSTONE):
                sent.deletions.append(record)
            else:
                sent.records.append(record)
        return sent


class _Sent(NamedTuple):
    """The records and the deletions that were sent to an output stream."""

    records: Records
    deletions: Records


def _with_stream_input(dataset: AdjunctDataset) -> AdjunctDataset:
    """Return the dataset with a stream as its input instead of files or a query.

    If its versions are valid from declared times, these come from the stream's markers. Raises
    ConfigurationError for versions that are Dagster's partitions.
    """
    if not isinstance(dataset, BoundedDataset):
        return dataset
    if dataset.stream is None:
        if dataset.versions is not None:
            raise errors.ConfigurationError(
                f"dataset {dataset.name!r} has versions that are Dagster's partitions, which tests"
                " do not support.",
                "Test the application with a dataset that is declared without versions=.",
                dataset=dataset.name,
            )
        dataset = replace(dataset, input=f"lake.{dataset.name}-of-the-test")
    if dataset.valid_from is None:
        return dataset
    return replace(dataset, valid_from=MARKER)


def _check_valid_from(dataset: AdjunctDataset, valid_from: datetime | None) -> None:
    """Raise ConfigurationError if `valid_from` is missing, or given for a dataset without such
    times.
    """
    needs_time = isinstance(dataset, BoundedDataset) and dataset.over_time
    has_time = valid_from is not None
    if has_time == needs_time:
        return
    if valid_from is None:
        problem = f"dataset {dataset.name!r} declares valid_from, but this version has no time."
        next_step = (
            "Pass the time from which it is valid: valid_from=datetime(2026, 1, 31, tzinfo=UTC)."
        )
    elif dataset.follows_changes:
        problem = (
            f"dataset {dataset.name!r} is unbounded, but valid_from={valid_from!r} is for bounded"
            " ones."
        )
        next_step = (
            "Omit it: each change has its own time, in the column that the dataset's valid_from"
            " names."
        )
    else:
        problem = (
            f"dataset {dataset.name!r} got valid_from={valid_from!r}, but does not declare"
            " valid_from."
        )
        next_step = "Omit it, or declare the dataset with valid_from=…."
    raise errors.ConfigurationError(problem, next_step, argument="valid_from", dataset=dataset.name)


def _require_known(kind: str, name: str, known: Mapping[str, object]) -> str:
    """Return a name that is known; raises ConfigurationError for others."""
    if name not in known:
        problem = f"the application has no {kind} {name!r}; it has {', '.join(known) or 'none'}."
        raise errors.ConfigurationError(problem, "Correct the name.", argument=kind)
    return name


@cache
def _local_session() -> SparkSession:
    """Return a local session for small data, which ends with the process."""
    from dagster_adjunct.resources.spark.session import new_session

    return new_session({"spark.sql.shuffle.partitions": "4"}, master="local[2]")
