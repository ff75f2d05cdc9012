"""`Application`: declares the streams, tables and operators of one job.

Declaring reads and writes nothing. Each call adds a node to a graph, which is later checked by the
planner and computed by the step.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from pydantic import NonNegativeInt, PositiveInt, SkipValidation

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    Condition,
    LocalTable,
    LocalTableOptions,
    OwnedBy,
    local_table,
    to_name_tuple,
)
from dagster_adjunct.orchestration.application.component_files import find_component_mistake
from dagster_adjunct.orchestration.application.declared_lines import locate_errors, with_line
from dagster_adjunct.orchestration.application.graph import (
    DatasetGroup,
    DatasetHandle,
    OperatorGraph,
    OutputStream,
    OutputTable,
    RemoteTableHandle,
)
from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.orchestration.operators.columns import check_duration, validate_column_names
from dagster_adjunct.orchestration.operators.event_times import build_event_time
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.operators.records import (
    BroadcastInput,
    DefaultOffset,
    Input,
    InputSpec,
    OnLost,
    check_task_column,
)
from dagster_adjunct.orchestration.operators.stream_facts import (
    DeclaredApplication,
    TableReplay,
    Tombstones,
    validate_partition_count,
)
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.code_lines import find_calling_line
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ComponentError,
    ConfigurationError,
    PlanningError,
)
from dagster_adjunct.resources.iceberg import IcebergTable
from dagster_adjunct.resources.names import check_name, split_stream_name
from dagster_adjunct.resources.output_tables.delta import DeltaLakeTable
from dagster_adjunct.resources.output_tables.opening import AnyOutputTable, partition_columns
from dagster_adjunct.resources.schemas.column_changes import NO_CHANGES, ColumnChanges
from dagster_adjunct.resources.schemas.paths import normal_path
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.small_work import SMALL_RECORDS
from dagster_adjunct.resources.streams.system import CHANGE_IMAGES, CHANGES
from dagster_adjunct.resources.tables.table import AnyTable, RemoteTable
from dagster_adjunct.resources.user_code import failing_line
from dagster_adjunct.resources.validation import validated_methods

T = TypeVar("T")


def _choose_engine(engine: str | None, application: str) -> str:
    """Return the engine of an application: the declared one, else that of the environment,
    else spark. Raises ConfigurationError for another value in the environment.
    """
    chosen = engine
    if chosen is None:
        chosen = os.environ.get("ADJUNCT_ENGINE") or "spark"
    if chosen not in ("spark", "auto"):
        problem = (
            f"application {application!r}: ADJUNCT_ENGINE is {chosen!r}: expected spark or auto."
        )
        step = "Set it to one of them, or unset it (spark)."
        raise ConfigurationError(problem, step, setting="ADJUNCT_ENGINE")
    return chosen


def _check_limit(application: str, argument: str, value: Any, least: Any, expected: str) -> None:
    """Raise ConfigurationError for a number or a duration that is less than `least`."""
    if value is not None and value < least:
        found = f"application {application!r}: {argument} is {value}"
        raise argument_error(found, expected, argument=argument, application=application)


@locate_errors
@validated_methods
class Application:
    """One job: its inputs, outputs, tables and operators.

    `auto_repartition` lets the planner insert the exchanges that joins lack; otherwise planning
    fails. `intermediate_partitions` is the default partition count of intermediate streams; -1
    means None. `tasks` limits the number of tasks, so that a task may own several partitions; by
    default, each has a task. `max_batch_records` limits how many input records one batch reads,
    over all inputs. A batch of at most `few_records` over small datasets uses one Spark task per
    stage, and is read and written by the run's process; its result is the same. With the `engine`
    "auto", such a batch is also computed in the run's process, without Spark, if the plan says that
    nothing of the application needs Spark; with "spark", no batch is. The default is the
    environment variable ADJUNCT_ENGINE, else "spark". Startpoint requests that no run has applied
    within `startpoints_expire_after` are ignored. With `startpoints=False`, requests are rejected,
    and runs ignore and report stored ones. `log_retention` is how long the batch log keeps the
    commits of batches (None: for ever); the newest 200 stay whatever their age.
    `automation_condition` says when Dagster materializes the outputs by itself. A `strict`
    application turns these notes of the plan into errors: the order of a remote table's records
    holds per source partition only; a table that keeps the newest record loses columns of late
    records; the type of a join key or of a declared column is unknown; an expression changes from
    run to run or sees one batch only; a window or stream join takes the updates of another window
    for records.
    """

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        *,
        description: str = "",
        owners: str | Collection[str] = (),
        auto_repartition: bool = False,
        intermediate_partitions: int | None = None,
        tasks: PositiveInt | None = None,
        max_batch_records: PositiveInt = 100_000,
        few_records: NonNegativeInt = SMALL_RECORDS,
        engine: Literal["spark", "auto"] | None = None,
        startpoints: bool = True,
        startpoints_expire_after: timedelta = timedelta(hours=12),
        log_retention: timedelta | None = timedelta(days=90),
        strict: bool = False,
        automation_condition: Condition | None = None,
    ) -> None:
        self.name = check_name("application", name)
        self.declared_at = find_calling_line()
        self.description = description
        if isinstance(owners, str):
            self.owners: tuple[str, ...] = (owners,)
        else:
            self.owners = tuple(owners)
        self.auto_repartition = auto_repartition
        if intermediate_partitions == -1:
            intermediate_partitions = None
        what = f"application {name!r}: intermediate_partitions"
        self.intermediate_partitions = validate_partition_count(what, intermediate_partitions)
        brief = timedelta(milliseconds=1)
        expected = "at least a millisecond"
        _check_limit(name, "startpoints_expire_after", startpoints_expire_after, brief, expected)
        _check_limit(name, "log_retention", log_retention, brief, expected)
        self.max_batch_records = max_batch_records
        self.tasks = tasks
        self.few_records = few_records
        self.engine = _choose_engine(engine, name)
        self.startpoints = startpoints
        if strict and auto_repartition:
            problem = (
                f"application {name!r} has strict=True and auto_repartition=True: a strict"
                " application moves records only where it calls partition_by()."
            )
            step = "Leave one of them out."
            raise ConfigurationError(problem, step, argument="strict", application=name)
        self.strict = strict
        self.automation_condition = automation_condition
        self.startpoints_expire_after = startpoints_expire_after
        self.log_retention = log_retention
        self.error_of_source: Callable[[AdjunctError], AdjunctError] | None = None
        """Returns an error of the planner in the words of the text that declares the application,
        such as YAML; None for one that is declared in Python.
        """
        self._graph = OperatorGraph(self.name)
        self._inputs: dict[str, InputSpec] = {}
        self._outputs: dict[str, OutputStream] = {}
        self._output_tables: dict[str, OutputTable] = {}
        self._datasets: dict[str, DatasetHandle] = {}
        self._tables: dict[str, AnyTable] = {}

    def __repr__(self) -> str:
        return f"Application({self.name!r}, {len(self._graph.operators)} operators)"

    def input_stream(  # noqa: PLR0913
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

        `default_offset` is where reading starts without a checkpoint or startpoint; None leaves it
        to the stream. With `reset_offset`, every run ignores its checkpoint of this stream and
        starts there. `on_lost` applies when retention has deleted records after the checkpoint:
        "fail" (OffsetOutOfRangeError), or continue at the "oldest" remaining offset and count the
        lost records.

        With `broadcast`, every task reads the whole stream: each record appears once per task, with
        the task's number (from 0) in the column "task", or in the column that `broadcast` names.
        All tasks share one position.

        `event_time` is when the event of a record happened: a Spark SQL expression of type
        timestamp or date, or ARRIVAL, the time when it was written to the stream. Windows and
        stream joins use it. Within a partition, a record may arrive up to `delay` after records
        with later times; after that it is late. A partition without records for `idle_after` does
        not hold back the watermark; by default every partition does. Dagster warns of a watermark
        that is `max_watermark_lag` behind the clock.
        """
        time = build_event_time(name, event_time, delay, idle_after, max_watermark_lag)
        split_stream_name(name)  # raises for an invalid name
        spec: InputSpec
        if broadcast is False:
            spec = Input(name, default_offset, reset_offset, on_lost, time)
        else:
            task = "task" if broadcast is True else broadcast
            found = f"input stream {name!r} has broadcast={broadcast!r}"
            check_task_column(task, found, argument="broadcast", stream=name)
            spec = BroadcastInput(name, default_offset, reset_offset, on_lost, time, task=task)
        if name in self._inputs:
            problem = f"application {self.name!r} declares the input stream {name!r} twice."
            step = "Keep what the first input_stream() returned, and use it in both places."
            raise PlanningError(problem, step, application=self.name, stream=name)
        self._refuse_reading(name)
        self._inputs[name] = spec
        return MessageStream(self._graph, self._graph.add(spec, ()))

    def input_changes(
        self,
        dataset: SkipValidation[AdjunctDataset],
        *,
        images: bool = False,
        default_offset: DefaultOffset | None = None,
        event_time: str | None = None,
    ) -> MessageStream:
        """Return the changes of a dataset, as the input stream "changes.NAME".

        Each batch reads the difference between what was served when the last one read it and what
        is served now: one record for each key whose entry differs, which is the entry, or a
        tombstone if there is none any more. With `images`, the input is "change-images.NAME": the
        key, `kind` ("insert", "update" or "delete"), the structs `before` and `after`, and
        `version` and `at` of what is served. The first batch reads all entries;
        `default_offset="upcoming"` begins with later changes. Times are those when versions were
        sealed (ARRIVAL).

        Versions that the application has not read on from are kept for as long as the dataset's
        `discard` policy says (`followed`). The run does not advance the dataset.
        """
        is_dataset = isinstance(dataset, AdjunctDataset)
        if not is_dataset or dataset.is_local or not dataset.persistent:
            problem = (
                f"application {self.name!r}: {dataset!r} has no changes to read: expected a stored"
                " dataset that is not a local table."
            )
            step = "Pass what bounded_dataset or unbounded_dataset returned."
            raise ConfigurationError(problem, step, application=self.name, argument="dataset")
        system = CHANGE_IMAGES if images else CHANGES
        return self.input_stream(
            f"{system}.{dataset.name}", default_offset=default_offset, event_time=event_time
        )

    def output_stream(
        self,
        name: str,
        *,
        partitions: int,
        key: str | Sequence[str] | None = None,
        description: str = "",
        renamed: Mapping[str, str] | None = None,
        drop: str | Sequence[str] = (),
    ) -> OutputStream:
        """Declare a stream that records can be sent to, partitioned by the columns `key`, or paths
        of values in columns, into `partitions`.

        Without a key, records stay in their partitions, and the planner takes them for
        unpartitioned from then on. The plan and the stream's asset in Dagster show the
        `description`. The next run renames columns of the existing stream to the names in `renamed`
        (by old name, or by path, `{"customer.mail": "email"}`), and drops the columns `drop`; both
        may stay declared.
        """
        split_stream_name(name)  # raises for an invalid name
        what = f"output stream {name!r}"
        validate_partition_count(f"{what}: partitions", partitions)
        if name in self._outputs:
            problem = f"application {self.name!r} declares the {what} twice."
            step = "Keep what the first output_stream() returned, and use it in both places."
            raise PlanningError(problem, step, application=self.name)
        columns = tuple(map(normal_path, validate_column_names(f"{what}: key", key)))
        changes = ColumnChanges(renamed or {}, to_name_tuple(drop))
        output = OutputStream(self._graph, name, partitions, columns, description, changes)
        self._graph.refuse_writing(name, "an output stream")
        self._outputs[name] = output
        self._reject_dataset_input(name)
        return output

    def output_table(
        self,
        table: SkipValidation[AnyOutputTable],
        *,
        on_replay: TableReplay = "append",
        tombstones: Tombstones = "fail",
        description: str = "",
        renamed: Mapping[str, str] | None = None,
        drop: str | Sequence[str] = (),
    ) -> OutputTable:
        """Declare an Iceberg or Delta table that records can be sent to: a batch is one commit.

        The table is created if needed, with the columns of the records, and other writers may write
        it, too. New columns are added, and columns of Iceberg tables widened, renamed and dropped
        (`renamed`, `drop`) as those of an output stream. Columns that only the table has are null.

        With `on_replay="append"`, rows have the column `__epoch`, which is higher in the results of
        records that are read again. With "replace", rows have their source position (`__source`,
        `__source_offset`, `__source_epoch`, `__source_reader`), and results of records that are
        read again replace earlier ones in the same commit; then all records must be made of one
        input stream. A tombstone fails the batch, or is dropped and counted, or is a row with true
        in the column `__tombstone` ("keep").
        """
        if not isinstance(table, IcebergTable | DeltaLakeTable):
            problem = f"application {self.name!r}: {table!r} is not an output table."
            step = "Pass an IcebergTable or a DeltaLakeTable."
            raise ConfigurationError(problem, step, application=self.name, argument="table")
        if table.name in self._output_tables:
            problem = f"application {self.name!r} declares the output table {table.name!r} twice."
            step = "Keep what the first output_table() returned, and use it in both places."
            raise PlanningError(problem, step, application=self.name)
        partition_columns(table)  # raises for a transform that does not exist
        changes = ColumnChanges(renamed or {}, to_name_tuple(drop))
        output = OutputTable(self._graph, table, on_replay, tombstones, description, changes)
        self._output_tables[table.name] = output
        return output

    if TYPE_CHECKING:

        @overload
        def table(
            self, table: AdjunctDataset, *, max_staleness: timedelta | None = None
        ) -> DatasetHandle: ...
        @overload
        def table(self, table: AnyTable) -> RemoteTableHandle: ...

    def table(
        self,
        table: SkipValidation[AdjunctDataset | AnyTable],
        *,
        max_staleness: timedelta | None = None,
    ) -> DatasetHandle | RemoteTableHandle:
        """Declare a table: a dataset to join, or a remote table to send to or look up in.

        With `max_staleness`, for an unbounded dataset, a run fails with StaleDatasetError instead
        of starting a batch while the dataset lacks a change that is older than that.
        """
        if not isinstance(table, AdjunctDataset | RemoteTable):
            problem = f"application {self.name!r}: {table!r} is not a table."
            step = "Pass a dataset (bounded_dataset, unbounded_dataset) or a RemoteTable."
            raise ConfigurationError(problem, step, application=self.name)
        name = table.name
        if name in self._datasets or name in self._tables:
            raise self._declared_twice(name)
        self._check_staleness(table, name, max_staleness)
        if isinstance(table, AdjunctDataset):
            dataset = DatasetHandle(self._graph, table, max_staleness)
            self._datasets[name] = dataset
            self._reject_dataset_input(table.stream)
            return dataset
        validate_column_names(f"remote table {name!r}: key", table.key)
        self._tables[name] = table
        return RemoteTableHandle(self._graph, table)

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
        """Declare a table of this application's own state, which it can send to and join.

        It is an unbounded dataset `name` of the lake without a stream: entries with the columns of
        `schema`, unique by `key`, in `partitions` buckets by `partition_by` (default: the key).
        Each batch commits its records exactly once. A join defined before a `send_to` sees its
        records in the next batch, a join defined after it in the same batch.
        """
        if name in self._datasets or name in self._tables:
            raise self._declared_twice(name)
        validate_partition_count(f"local table {name!r}: partitions", partitions)
        keys = validate_column_names(f"local table {name!r}: key", key)
        by = validate_column_names(f"local table {name!r}: partition_by", partition_by)
        owner = OwnedBy(self.name, schema)
        spec = local_table(name, owner, key=keys, partitions=partitions, partition_by=by, **options)
        self._datasets[name] = DatasetHandle(self._graph, spec)
        return self._datasets[name]

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All operators in order of definition; an operator follows its inputs."""
        return tuple(self._graph.operators.values())

    def operator(self, operator_id: str) -> Operator:
        """Return the operator of this id ("join-2-weather")."""
        return self._declared(self._graph.operators, "operator", operator_id)

    @property
    def inputs(self) -> Mapping[str, InputSpec]:
        """The operators that read input streams, by the name of the stream."""
        return MappingProxyType(self._inputs)

    @property
    def restated(self) -> Mapping[str, AdjunctDataset]:
        """The datasets whose later changes results follow, by the stream of their changes: the
        application has positions in these streams, but no operator reads them.
        """
        found = {}
        for operator in self.operators:
            match = operator.spec.match
            if match is not None and match.dataset is not None and match.restate is not None:
                found[f"{CHANGES}.{match.dataset}"] = self.dataset(match.dataset)
        return found

    @property
    def outputs(self) -> Mapping[str, OutputStream]:
        """The declared output streams by name."""
        return MappingProxyType(self._outputs)

    @property
    def output_tables(self) -> Mapping[str, OutputTable]:
        """The declared output tables by name: "iceberg:analytics.enriched"."""
        return MappingProxyType(self._output_tables)

    @property
    def datasets(self) -> tuple[AdjunctDataset, ...]:
        """The declared datasets, in order of declaration."""
        return tuple(table.dataset for table in self._datasets.values())

    def dataset(self, name: str) -> AdjunctDataset:
        """Return the declared dataset of this name."""
        return self._declared(self._datasets, "dataset", name).dataset

    @property
    def max_staleness(self) -> dict[str, timedelta]:
        """The declared `max_staleness` by dataset name, for datasets that have one."""
        limits = {}
        for name, table in self._datasets.items():
            if table.max_staleness is not None:
                limits[name] = table.max_staleness
        return limits

    @property
    def tables(self) -> Mapping[str, AnyTable]:
        """The declared remote tables by name."""
        return MappingProxyType(self._tables)

    def table_key(self, name: str) -> tuple[str, ...]:
        """Return the key columns of a declared remote table."""
        return self._declared(self._tables, "remote table", name).key

    def _declared_twice(self, name: str) -> PlanningError:
        """Return the error for a table that is declared twice."""
        problem = f"application {self.name!r} declares the table {name!r} twice."
        step = "Keep what the first table() returned; two different tables need different names."
        return PlanningError(problem, step, application=self.name)

    def _with_tables(
        self,
        datasets: Mapping[str, AdjunctDataset],
        tables: Mapping[str, AnyTable],
        output_tables: Mapping[str, AnyOutputTable],
    ) -> Application:
        """Return a copy of the application with these datasets and tables instead of its own; the
        output tables have no renames.

        `datasets` must have all names; tables of other names stay as they are.
        """
        twin = copy(self)
        twin._datasets = {}
        for name, handle in self._datasets.items():
            twin._datasets[name] = replace(handle, dataset=datasets[name])
        twin._output_tables = dict(self._output_tables)
        for name, table in output_tables.items():
            twin._output_tables[name] = replace(
                self._output_tables[name], table=table, changes=NO_CHANGES
            )
        twin._tables = {name: tables.get(name, table) for name, table in self._tables.items()}
        return twin

    def _declared(self, declared: Mapping[str, T], kind: str, name: str) -> T:
        """Return what is declared under this name; raises ConfigurationError if nothing is."""
        if name not in declared:
            problem = (
                f"application {self.name!r} has no {kind} {name!r}; it has:"
                f" {', '.join(declared) or 'none'}."
            )
            raise ConfigurationError(problem, "Correct the name.", application=self.name)
        return declared[name]

    def _check_staleness(self, table: object, name: str, limit: timedelta | None) -> None:
        """Raise ConfigurationError for a `limit` (max_staleness=) of what can't be stale, and for
        one that is no duration. None passes.
        """
        if limit is None:
            return
        what = f"application {self.name!r}: table {name!r} has max_staleness"
        if not isinstance(table, AdjunctDataset) or not table.follows_changes or table.is_local:
            problem = f"{what}={limit}, but it is not an unbounded dataset that follows a stream."
            step = "Leave max_staleness out."
            raise ConfigurationError(
                problem, step, argument="max_staleness", application=self.name, table=name
            )
        check_duration(limit, what, argument="max_staleness", application=self.name, table=name)

    def _refuse_reading(self, stream: str) -> None:
        """Raise PlanningError for an input stream that this application also writes: its records
        would loop forever.
        """
        if stream in self._outputs:
            raise self._graph.loop_error(stream, "an output stream")
        for dataset in self.datasets:
            if dataset.stream == stream and dataset.name in self._graph.writers:
                raise self._graph.loop_error(stream, "fed to a dataset")

    def _reject_dataset_input(self, stream: str | None) -> None:
        """Raise PlanningError for an output stream that is a declared dataset's input: users
        send to the dataset.
        """
        for dataset in self.datasets:
            if dataset.stream == stream and stream in self._outputs:
                problem = (
                    f"application {self.name!r}: stream {stream!r} is an output stream and the"
                    f" input of dataset {dataset.name!r}."
                )
                step = (
                    "Send to the dataset's table instead of declaring its input as an output"
                    " stream."
                )
                raise PlanningError(
                    problem, step, application=self.name, stream=stream, dataset=dataset.name
                )


def load_application(reference: str) -> Application:
    """Import the application of a reference MODULE:APP, with the working directory on the import
    path. Raises ConfigurationError if there is none, and as `import_user_module` does.
    """
    module_name, colon, attribute = reference.partition(":")
    is_complete = bool(colon and module_name and attribute)
    if not is_complete:
        problem = f"{reference!r} names no application: expected MODULE:APP."
        step = "Write, for example, dagster_adjunct.examples.flights.pipeline:app."
        raise ConfigurationError(problem, step, argument="reference")
    module = import_user_module(module_name)
    application = getattr(module, attribute, None)
    if not isinstance(application, Application):
        members = vars(module).items()
        names = sorted(name for name, value in members if isinstance(value, Application))
        if hasattr(module, attribute):
            found = f"is {type(application).__name__}, not an Application"
        else:
            found = "is not there"
        problem = f"{module_name}:{attribute} {found}; the module has {', '.join(names) or 'none'}."
        if names:
            step = "Correct the name after the colon."
        else:
            step = "Name a module with an application. One in YAML is loaded in a module first: "
            step += "app = load_applications(PROJECT)[NAME], of dagster_adjunct.components."
        raise ConfigurationError(problem, step, module=module_name)
    return application


def import_user_module(name: str) -> ModuleType:
    """Import a user's module, with the working directory on the import path; any failure is a
    ConfigurationError.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = f"{error.name}."
        is_module_or_its_package = error.name is not None and f"{name}.".startswith(missing)
        if not is_module_or_its_package:  # but one that it imports
            raise _import_error(name, error) from error
        problem = f"module {name!r} is not found (from {here})."
        step = (
            "Run from the folder that holds it, and name it as an import does, without .py and"
            " slashes."
        )
        raise ConfigurationError(problem, step, module=name) from error
    except (Exception, SystemExit) as error:  # importing runs the user's code
        cause = _own_cause(error)
        if isinstance(cause, AdjunctError):
            line = failing_line(cause)
            if line is None or isinstance(cause, ComponentError):
                raise cause from None
            raise with_line(cause, line) from None
        mistake = find_component_mistake(name, cause)
        if mistake is not None:
            raise mistake from error
        raise _import_error(name, cause) from error


def _own_cause(error: BaseException) -> BaseException:
    """Return the error itself, or the error that Dagster's component tree has wrapped in one of its
    own, with the state of the tree.
    """
    module = sys.modules.get("dagster.components.core.component_tree")
    wrapper = getattr(module, "ComponentTreeException", ())  # () is no class of any error
    while isinstance(error, wrapper) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _import_error(module: str, error: BaseException) -> ConfigurationError:
    """Return the error for a module that can't be imported, with the failing line of the user's
    code.
    """
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
        problem = f"{error.msg}: {(error.text or '').strip()}"
    else:
        where = _failing_line(error) or module
        problem = f"{type(error).__name__}: {error}"
    act = "Fix"
    if isinstance(error, ModuleNotFoundError):
        act = f"Install {error.name!r}, or fix"
    step = f"{act} the import there; ADJUNCT_DEBUG=1 shows the whole traceback."
    return ConfigurationError(
        f"module {module!r} can't be imported: {problem} at {where}.", step, module=module
    )


def _failing_line(error: BaseException) -> str:
    """Return the last line below the working directory that an import ran, else the last one of
    other code; "" if it ran none.
    """
    own: list[traceback.FrameSummary] = []
    others: list[traceback.FrameSummary] = []
    for frame in traceback.extract_tb(error.__traceback__):
        if "importlib" in frame.filename or frame.filename == __file__:
            continue
        is_own = Path(frame.filename).is_relative_to(Path.cwd())
        if is_own:
            own.append(frame)
        else:
            others.append(frame)
    if not own and not others:
        return ""
    frame = (own or others)[-1]
    return f"{frame.filename}, line {frame.lineno} ({frame.line})"


def group_datasets(datasets: Iterable[AdjunctDataset], where: str) -> tuple[DatasetGroup, ...]:
    """Return the datasets in groups that advance together, in order of declaration; `where` is
    named in errors.

    Raises ConfigurationError for a version set with only one declared member.
    """
    # By "set NAME", its declared members; by any other dataset's name, the dataset alone.
    groups: dict[str, list[AdjunctDataset]] = {}
    for dataset in datasets:
        group_name = f"set {dataset.version_set}" if dataset.version_set else dataset.name
        groups.setdefault(group_name, []).append(dataset)
    for first, *others in groups.values():
        if first.version_set and not others:
            problem = (
                f"{where} declares dataset {first.name!r} of the version set {first.version_set!r}"
                " and none of its other members, which are published together with it."
            )
            step = "Declare the other members too, with app.table(…); they need not be joined."
            raise ConfigurationError(problem, step, dataset=first.name)
    return tuple(map(tuple, groups.values()))


def list_own_tables(app: DeclaredApplication) -> list[LocalTable]:
    """Return the local tables that this application owns, in order of declaration."""
    tables = [dataset for dataset in app.datasets if isinstance(dataset, LocalTable)]
    return [table for table in tables if table.is_owned_by(app.name)]
