"""Fakes of streams and remote tables for tests, stored in files that Spark's workers can read."""

from __future__ import annotations

import fcntl
import pickle
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from dagster_adjunct.orchestration.operators.columns import validate_column_names
from dagster_adjunct.orchestration.operators.stream_facts import Catalog, StreamFacts
from dagster_adjunct.resources.arrow import pa
from dagster_adjunct.resources.backends.memory import MemoryTable
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema, to_exact_array
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import LAKE, TOMBSTONE, NewStreams, Partitioner, StreamInfo, StreamSystem
from dagster_adjunct.resources.tables.functions import StoreFunction
from dagster_adjunct.resources.tables.layers import Capabilities
from dagster_adjunct.resources.tables.operation import Operation, Outcomes
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.resources.validation import validated_methods


@validated_methods
@dataclass(frozen=True)
class TestStream:
    """A stream of a test: its columns (None: unknown), key columns, number of partitions, partitioner
    ("spark-murmur3", "kafka-murmur2" or "unknown"), and whether offsets are numbers."""

    __test__: ClassVar[bool] = False
    schema: Schema | None = None
    key: str | Sequence[str] = ()
    partitions: int = 1
    partitioner: Partitioner = "spark-murmur3"
    numbered_offsets: bool = True


Streams: TypeAlias = Mapping[str, TestStream]


def catalog_from_streams(streams: Streams) -> Catalog:
    """Return the planner's catalog of these streams. Raises ConfigurationError for an invalid name or key."""
    facts = {}
    for name, stream in streams.items():
        system, _ = split_stream_name(name)
        key = validate_column_names(f"stream {name!r}: key", stream.key)
        partitioner = stream.partitioner if key else "unknown"
        evolves = system == "lake"
        facts[name] = StreamFacts(
            name, stream.partitions, key, partitioner, stream.schema, evolves, stream.numbered_offsets
        )
    return facts


class FakeStreams(LakeStreams):
    """Streams of a lake under the system name `name`; `partitioners` overrides the partitioner of some streams."""

    def __init__(self, lake: Lake, name: str, partitioners: Mapping[str, Partitioner]) -> None:
        super().__init__(lake)
        self.name = name
        if name != LAKE:
            self.new_streams = NewStreams()  # the real system's settings are unknown here
        self._partitioners = dict(partitioners)

    def info(self, stream: str) -> StreamInfo:
        described = super().info(stream)
        return replace(described, partitioner=self._partitioners.get(stream, described.partitioner))

    def snapshot(self, stream: str) -> StreamSystem:
        """Return itself, because nobody else writes to the streams of a test."""
        return self


def stream_schema(stream: str, given: TestStream | None, rows: Sequence[Mapping[str, Any]]) -> Schema:
    """Return the declared columns of a stream, or else those of its first records."""
    if given is not None and given.schema is not None:
        return given.schema
    if not rows:
        problem = f"stream {stream!r} has no columns: neither a schema nor records are given."
        step = "Describe it: TestApplication(app, {…: TestStream(Schema.of(…))})."
        raise ConfigurationError(problem, step, stream=stream)

    return Schema.from_arrow(pa.Table.from_pylist(list(rows)).schema)


def arrow_table(
    stream: str, schema: Schema, rows: Sequence[Mapping[str, Any]], deleted: Sequence[Mapping[str, Any]]
) -> pa.Table:
    """Return records, then tombstones, as a table. Raises ConfigurationError with the number of an invalid record."""
    everything = [*rows, *deleted]
    for number, row in enumerate(everything):
        unknown = [name for name in row if name not in schema]
        if unknown:
            problem = (
                f"stream {stream!r}: record {number} has a column {unknown[0]!r}; its columns are "
                f"{', '.join(schema.names)}."
            )
            raise ConfigurationError(problem, "Correct the record, or the columns of the stream.", stream=stream)
    columns = {}
    for field in schema.to_arrow():
        try:
            columns[field.name] = to_exact_array([row.get(field.name) for row in everything], field.type)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            problem = f"stream {stream!r}: column {field.name!r} is {schema.field(field.name, stream).type}: {error}."
            step = "Correct the records, or the columns of the stream."
            raise ConfigurationError(problem, step, stream=stream) from error
    columns[TOMBSTONE] = pa.array([False] * len(rows) + [True] * len(deleted), pa.bool_())
    return pa.table(columns)


Record = dict[str, Any]


class FakeTable(StoreFunction[Hashable, Record, Any]):
    """A table function over records in a file, with the capabilities of the function that it replaces."""

    def __init__(self, path: str, replaced: Any) -> None:
        key = getattr(replaced, "key", None)
        self.path, self.key = path, key if key is None or isinstance(key, str) else tuple(key)
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
    """Return a table with the contract of `table`, and its records in a file."""
    read, write = (
        None if function is None else FakeTable(str(path), function)
        for function in (table.read_function, table.write_function)
    )
    return RemoteTable(
        table.name,
        key=table.key,
        read_function=read,
        write_function=write,
        retry=table.retry,
        rate_limit=table.rate_limit,
        batches=table.batches,
        in_flight=table.in_flight,
        newest_by=table.conditions.newest_by,
        idempotent=table.conditions.idempotent,
        on_replay=table.conditions.on_replay,
        defaults_may_overwrite=table.defaults_may_overwrite,
        cache=table.cache,
    )


@contextmanager
def _locked_table(path: str) -> Iterator[MemoryTable]:
    """Open the table of a file under a lock, and write it back at the end."""
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = MemoryTable(path)
        table.clear()
        file = Path(path)
        if file.exists():
            table.restore(pickle.loads(file.read_bytes()))
        yield table
        written = file.with_suffix(".new")
        written.write_bytes(pickle.dumps(table.content()))
        written.replace(file)
