"""`Application`: a user's description of streams, tables and what happens between them.

Describing reads and writes nothing: every call adds a node to a graph, which the planner proves and
the Spark step compiles later.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, local_table
from dagster_adjunct.orchestration.application.graph import (
    DatasetHandle,
    OperatorGraph,
    OutputStream,
    RemoteTableHandle,
)
from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.orchestration.operators.arguments import validate_column_names, validate_partition_count
from dagster_adjunct.orchestration.operators.event_time import build_event_time
from dagster_adjunct.orchestration.operators.inputs import build_input
from dagster_adjunct.orchestration.operators.operator import KeyedTable
from dagster_adjunct.resources.common import check_name, check_whole_number, find_calling_line, split_stream_name
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, PlanningError

if TYPE_CHECKING:
    from typing import Unpack, overload

    from dagster_adjunct.assets.declaration.dataset import LocalTableOptions
    from dagster_adjunct.orchestration.operators.inputs import DefaultOffset, Input, OnLost
    from dagster_adjunct.orchestration.operators.operator import Operator
    from dagster_adjunct.resources.schemas.schema import Schema

T = TypeVar("T")


class Application:
    """One job: its inputs, outputs, tables and operators.

    `auto_repartition` lets the planner insert the exchanges that joins lack, instead of refusing.
    `intermediate_partitions` is the count of intermediate streams that nothing else decides; -1 is the same as None.
    With `tasks`, there are at most so many, and one owns several partitions, instead of one for each partition.
    `max_batch_records` bounds how many input records the step reads in one batch, over all inputs. A batch of at most
    `few_records`, over datasets of few rows, takes one task a stage in place of one a partition, and leaves the same.
    Requests for startpoints that no run has taken up `startpoints_expire_after` they were made are not followed any
    more. With `startpoints=False` there are none: requests are refused, runs leave those alone that are stored, and
    say so.
    A `strict` application is not planned where something is not proven that else is only said in the plan: where the
    order of a remote table's records holds per source partition only, where a table that keeps what is newest skips
    columns that only a late record brings, and where the type of a join's key is not known.
    Records move only where it says so itself.
    """

    def __init__(
        self,
        name: str,
        *,
        description: str = "",
        owners: str | Sequence[str] = (),
        auto_repartition: bool = False,
        intermediate_partitions: int | None = None,
        tasks: int | None = None,
        max_batch_records: int = 100_000,
        few_records: int = 5_000,
        startpoints: bool = True,
        startpoints_expire_after: timedelta = timedelta(hours=12),
        strict: bool = False,
    ) -> None:
        self.name = check_name("application", name)
        self.declared_at = find_calling_line()
        self.description = description
        self.owners = (owners,) if isinstance(owners, str) else tuple(owners)
        self.auto_repartition = auto_repartition
        self.intermediate_partitions = validate_partition_count(
            f"application {name!r}: intermediate_partitions",
            None if intermediate_partitions == -1 else intermediate_partitions,
        )
        what = f"application {name!r}: max_batch_records is {max_batch_records!r}"
        check_whole_number(max_batch_records, what, "1 or more", argument="max_batch_records")
        self.max_batch_records = max_batch_records
        if tasks is not None:
            check_whole_number(tasks, f"application {name!r}: tasks is {tasks!r}", "1 or more", argument="tasks")
        self.tasks = tasks
        what = f"application {name!r}: few_records is {few_records!r}"
        check_whole_number(few_records, what, "0 or more", argument="few_records", least=0)
        self.few_records = few_records
        if not isinstance(startpoints, bool):
            raise ConfigurationError(
                f"application {self.name!r} has startpoints={startpoints!r}: expected True or False.",
                "Leave it out for True.",
                argument="startpoints",
                application=self.name,
            )
        self.startpoints = startpoints
        if strict and auto_repartition:
            raise ConfigurationError(
                f"application {self.name!r} has strict=True and auto_repartition=True: a strict one moves records only "
                "where it says so itself.",
                "Leave one of them out.",
                argument="strict",
                application=self.name,
            )
        self.strict = bool(strict)
        if startpoints_expire_after < timedelta(milliseconds=1):
            raise ConfigurationError(
                f"application {self.name!r}: startpoints_expire_after is {startpoints_expire_after}: expected at least "
                "a millisecond.",
                "Leave it out for 12 hours.",
                argument="startpoints_expire_after",
                application=self.name,
            )
        self.startpoints_expire_after = startpoints_expire_after
        self._graph = OperatorGraph(self.name)
        self._inputs: dict[str, Input] = {}
        self._outputs: dict[str, OutputStream] = {}
        self._datasets: dict[str, DatasetHandle] = {}
        self._followed: dict[str, list[AdjunctDataset]] = {}  # the datasets that are made from a stream
        self._remote_tables: dict[str, RemoteTableHandle] = {}
        self._tables: dict[str, KeyedTable] = {}

    def __repr__(self) -> str:
        return f"Application({self.name!r}, {len(self._graph.operators)} operators)"

    # -- declaring streams and tables

    def input_stream(
        self,
        name: str,
        *,
        default_offset: DefaultOffset | None = None,
        reset_offset: bool = False,
        on_lost: OnLost = "fail",
        broadcast: bool | str = False,
        event_time: str | None = None,
        delay: timedelta = timedelta(0),
        idle_after: timedelta | None = None,
        max_watermark_lag: timedelta | None = None,
    ) -> MessageStream:
        """Return the records of the stream "system.stream".

        `default_offset` is where to begin when neither a checkpoint nor a startpoint says so; None
        leaves that to the stream. With `reset_offset`, every run forgets its checkpoint of this stream and begins
        there. `on_lost` says what to do where retention has passed the checkpoint: "fail" (OffsetOutOfRangeError), or
        go on from the "oldest" offset that is left, and count what is lost.

        With `broadcast`, every task of the plan reads the whole stream: each record is there once for each task, with
        the task's number, from 0, in the column "task", or in the one that `broadcast` names. It is read with one
        position for all tasks.

        `event_time` says when what a record tells of happened: a Spark SQL expression that is a timestamp or a date, or
        ARRIVAL, when it was written to the stream. Windows, and joins with other streams, go by it. Records of one
        partition may come up to `delay` after others of later times; those that come later still are late. A
        partition without records for `idle_after` is not waited for; left out, each one is. A watermark that is
        `max_watermark_lag` behind the clock is warned of in Dagster.
        """
        time = build_event_time(name, event_time, delay, idle_after, max_watermark_lag)
        spec = build_input(name, default_offset, reset_offset, on_lost, broadcast, time)
        if name in self._inputs:
            raise PlanningError(
                f"application {self.name!r} declares the input stream {name!r} twice.",
                "Keep what the first input_stream() returned, and use it in both places.",
                application=self.name,
                stream=name,
            )
        self._refuse_reading(name)
        self._inputs[name] = spec
        return MessageStream(self._graph, self._graph.add(spec, ()))

    def output_stream(
        self, name: str, *, partitions: int, key: str | Sequence[str] | None = None, description: str = ""
    ) -> OutputStream:
        """Return a stream that records can be sent to, partitioned by `key` into `partitions`.

        Without a key, records keep whatever partitioning they have, and count as unpartitioned after. The `description`
        is shown in the plan and on the stream's asset in Dagster.
        """
        split_stream_name(name)
        what = f"output stream {name!r}"
        if validate_partition_count(f"{what}: partitions", partitions) is None:
            raise ConfigurationError(
                f"{what} has no partitions.", "Write partitions=N.", argument="partitions", stream=name
            )
        if name in self._outputs:
            raise PlanningError(
                f"application {self.name!r} declares the {what} twice.",
                "Keep what the first call returned.",
                application=self.name,
            )
        output = OutputStream(self._graph, name, partitions, validate_column_names(f"{what}: key", key), description)
        self._graph.refuse_writing(name, "an output stream")
        self._outputs[name] = output
        self._refuse_two_ways(name)
        return output

    if TYPE_CHECKING:

        @overload
        def table(  # type: ignore[overload-overlap]
            self, table: AdjunctDataset, *, max_staleness: timedelta | None = None
        ) -> DatasetHandle: ...
        @overload
        def table(self, table: KeyedTable) -> RemoteTableHandle: ...

    def table(
        self, table: AdjunctDataset | KeyedTable, *, max_staleness: timedelta | None = None
    ) -> DatasetHandle | RemoteTableHandle:
        """Declare a table: an adjunct dataset can be joined, a remote table can be sent to.

        With `max_staleness`, of an unbounded dataset, no batch begins while the table lacks a change that is older: the
        step fails with StaleDatasetError.
        """
        name = getattr(table, "name", None)
        if name is None or not hasattr(table, "key"):
            raise ConfigurationError(
                f"application {self.name!r}: {table!r} is no table.",
                "Pass a dataset (bounded_dataset, unbounded_dataset) or a RemoteTable.",
                application=self.name,
            )
        check_name("table", name)
        if name in self._datasets or name in self._remote_tables:
            raise self._twice(name)
        self._check_staleness(table, name, max_staleness)
        if isinstance(table, AdjunctDataset):
            dataset = DatasetHandle(self._graph, table, max_staleness)
            self._datasets[name] = dataset
            if table.stream is not None:
                self._followed.setdefault(table.stream, []).append(table)
            self._refuse_two_ways(table.stream)
            return dataset
        remote = RemoteTableHandle(self._graph, table, validate_column_names(f"remote table {name!r}: key", table.key))
        if not remote.key:
            raise ConfigurationError(
                f"remote table {name!r} has no key.", "Name its key columns.", argument="key", table=name
            )
        self._remote_tables[name], self._tables[name] = remote, table
        return remote

    def local_table(
        self,
        name: str,
        *,
        key: str | Sequence[str],
        schema: Schema,
        partitions: int,
        partition_by: str | Sequence[str] | None = None,
        **options: Unpack[LocalTableOptions],
    ) -> DatasetHandle:
        """Declare a table that is this application's own state: its records are sent to it, and it can be joined.

        It is an unbounded dataset `name` of the lake without a stream: entries with the columns of `schema`, unique by
        `key`, in `partitions` buckets by `partition_by` (the whole key unless given). Each batch commits what it sends
        once, whatever crashes. A join that is defined before a `send_to` meets it in the next batch, one that is
        defined after it in the same.
        """
        if name in self._datasets or name in self._remote_tables:
            raise self._twice(name)
        if validate_partition_count(f"local table {name!r}: partitions", partitions) is None:
            raise ConfigurationError(
                f"local table {name!r} has no partitions.", "Write partitions=N.", argument="partitions", dataset=name
            )
        keys = validate_column_names(f"local table {name!r}: key", key)
        by = validate_column_names(f"local table {name!r}: partition_by", partition_by)
        spec = local_table(
            name, application=self.name, key=keys, schema=schema, partitions=partitions, partition_by=by, **options
        )
        self._datasets[name] = declared = DatasetHandle(self._graph, spec)
        return declared

    # -- what was declared, in the order of declaration

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All operators as they were defined; an operator stands after its inputs."""
        return tuple(self._graph.operators.values())

    def operator(self, operator_id: str) -> Operator:
        """Return the operator of this id."""
        return self._declared(self._graph.operators, "operator", operator_id)

    @property
    def inputs(self) -> Mapping[str, Input]:
        """The input streams by name, each with its default offset."""
        return MappingProxyType(self._inputs)

    @property
    def outputs(self) -> Mapping[str, OutputStream]:
        """The output streams by name."""
        return MappingProxyType(self._outputs)

    @property
    def datasets(self) -> tuple[AdjunctDataset, ...]:
        return tuple(table.dataset for table in self._datasets.values())

    def dataset(self, name: str) -> AdjunctDataset:
        """Return the declared dataset of this name."""
        return self._declared(self._datasets, "dataset", name).dataset

    @property
    def max_staleness(self) -> dict[str, timedelta]:
        """How stale a dataset may be at most when a batch begins, of those that a limit is declared for."""
        limits = {name: table.max_staleness for name, table in self._datasets.items()}
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def tables(self) -> Mapping[str, KeyedTable]:
        """The remote tables by name, as they were declared."""
        return MappingProxyType(self._tables)

    def table_key(self, name: str) -> tuple[str, ...]:
        """Return the key columns of a declared remote table."""
        return self._declared(self._remote_tables, "remote table", name).key

    def _twice(self, name: str) -> PlanningError:
        return PlanningError(
            f"application {self.name!r} declares the table {name!r} twice.",
            "Keep what the first table() returned; two different tables need different names.",
            application=self.name,
        )

    def _with_tables(self, datasets: Mapping[str, AdjunctDataset], tables: Mapping[str, KeyedTable]) -> Application:
        """Return a copy that reaches these datasets and remote tables by the names of its own."""
        twin = copy(self)
        twin._datasets = {name: replace(held, dataset=datasets[name]) for name, held in self._datasets.items()}
        twin._tables = {name: tables.get(name, table) for name, table in self._tables.items()}
        handles = self._remote_tables.items()
        twin._remote_tables = {name: replace(held, table=twin._tables[name]) for name, held in handles}
        return twin

    def _declared(self, declared: Mapping[str, T], kind: str, name: str) -> T:
        if name not in declared:
            raise ConfigurationError(
                f"application {self.name!r} has no {kind} {name!r}; it has: {', '.join(declared) or 'none'}.",
                "Correct the name.",
                application=self.name,
            )
        return declared[name]

    def _check_staleness(self, table: object, name: str, limit: timedelta | None) -> None:
        if limit is None:
            return
        shown = limit if isinstance(limit, timedelta) else repr(limit)
        what = f"application {self.name!r}: table {name!r} has max_staleness={shown}"
        if not isinstance(table, AdjunctDataset) or not table.follows_changes or table.is_local:
            raise ConfigurationError(
                f"{what}, and follows no change stream.",
                "Leave it out: it is for unbounded datasets.",
                argument="max_staleness",
                application=self.name,
                table=name,
            )
        if not isinstance(limit, timedelta) or limit <= timedelta(0):
            raise ConfigurationError(
                f"{what}: expected a timedelta of more than nothing.",
                "Write how old a missing change may be: max_staleness=timedelta(minutes=10), say.",
                argument="max_staleness",
                application=self.name,
                table=name,
            )

    def _refuse_reading(self, stream: str) -> None:
        """Refuse an input stream that this application writes: its records would come back for ever."""
        if stream in self._outputs:
            raise self._graph.loop(stream, "an output stream")
        if any(self._graph.writer_of(dataset.name) for dataset in self._followed.get(stream, ())):
            raise self._graph.loop(stream, "fed to a dataset")

    def _refuse_two_ways(self, stream: str | None) -> None:
        """Refuse an output stream that feeds a declared dataset: sending to the dataset's table is the way."""
        if stream in self._outputs:
            for dataset in self._followed.get(stream, ()):
                raise PlanningError(
                    f"application {self.name!r}: stream {dataset.stream!r} is an output stream and the input of "
                    f"dataset {dataset.name!r}.",
                    "Send to the dataset's table instead of declaring its input as an output stream.",
                    application=self.name,
                    stream=dataset.stream,
                    dataset=dataset.name,
                )


def load_application(reference: str) -> Application:
    """Return the application `APP` of `MODULE`, imported with the working directory on the path."""
    module_name, colon, attribute = reference.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(
            f"{reference!r} names no application: expected MODULE:APP.",
            "For example: dagster_adjunct.examples.flights.pipeline:app.",
            argument="reference",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or f"{module_name}.".startswith(f"{error.name}.") is False:
            raise _import_error(module_name, error) from error
        raise ConfigurationError(
            f"module {module_name!r} is not found (from {here}).",
            "Run from the folder that holds it.",
            module=module_name,
        ) from error
    except AdjunctError:
        raise
    except Exception as error:  # whatever a user's module does while it is imported
        raise _import_error(module_name, error) from error
    application = getattr(module, attribute, None)
    if not isinstance(application, Application):
        names = sorted(name for name, value in vars(module).items() if isinstance(value, Application))
        found = f"is {type(application).__name__}, not an Application" if hasattr(module, attribute) else "is not there"
        raise ConfigurationError(
            f"{module_name}:{attribute} {found}; the module has {', '.join(names) or 'none'}.",
            "Correct the name after the colon.",
            module=module_name,
        )
    return application


def _import_error(module: str, error: Exception) -> ConfigurationError:
    """Return the error that names the line of a user's code that can't be imported."""
    if isinstance(error, SyntaxError):
        where, problem = f"{error.filename}, line {error.lineno}", f"{error.msg}: {(error.text or '').strip()}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
        own = [frame for frame in theirs if Path(frame.filename).is_relative_to(Path.cwd())] or theirs
        where = f"{own[-1].filename}, line {own[-1].lineno} ({own[-1].line})" if own else module
        problem = f"{type(error).__name__}: {error}"
    missing = f"Install what {error.name!r} is of, or mend" if isinstance(error, ModuleNotFoundError) else "Mend"
    return ConfigurationError(
        f"module {module!r} can't be imported: {problem} at {where}.",
        f"{missing} the import there; ADJUNCT_DEBUG=1 shows the whole traceback.",
        module=module,
    )
