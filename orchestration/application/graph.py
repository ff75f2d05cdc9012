"""The operator graph of an application, and its handles for streams and tables."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, is_dataclass
from datetime import timedelta

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, QuerySource
from dagster_adjunct.assets.reading.change_streams import followed_dataset
from dagster_adjunct.orchestration.operators.operator import Operator, Spec
from dagster_adjunct.orchestration.operators.stream_facts import TableReplay, Tombstones
from dagster_adjunct.resources.code_lines import find_calling_line
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.output_tables.opening import AnyOutputTable
from dagster_adjunct.resources.schemas.column_changes import NO_CHANGES, ColumnChanges
from dagster_adjunct.resources.streams.system import EPOCH, POSITION, TOMBSTONE
from dagster_adjunct.resources.tables.table import AnyTable


def to_dagster_name(name: str) -> str:
    """Return a valid Dagster name: every character other than an ASCII letter, digit or "_"
    becomes "_".
    """
    return re.sub(r"\W", "_", name, flags=re.ASCII)


DatasetGroup = tuple["AdjunctDataset", ...]


def is_advanced_by_partition(dataset: AdjunctDataset) -> bool:
    """Whether each version of the dataset is a Dagster partition and built on request, so that
    no run advances it.
    """
    return dataset.versions is not None and isinstance(dataset.input, QuerySource)


def describe_partitions(dataset: AdjunctDataset) -> str:
    """Return the plan's note on who builds the versions of a dataset with partitions; "" for any
    other dataset.
    """
    if dataset.versions is None:
        return ""
    job = f"the Dagster job {to_dagster_name(dataset.name)}_versions"
    if is_advanced_by_partition(dataset):
        command = f"adjunct dataset advance {dataset.name} MODULE:APP --partition VERSION"
        return (
            f"Dataset {dataset.name} has a version for each partition, built on request: no run of"
            f" the application builds one. Request it with {job}, or {command}."
        )
    sensor = f"the sensor {to_dagster_name(dataset.name)}_new_versions"
    return (
        f"Dataset {dataset.name} has its versions as partitions: adjunct run MODULE:APP publishes"
        f" delivered versions, the application's job in Dagster does not. Launch {job} for them, or"
        f" switch on {sensor}."
    )


def is_advanced_by_runs(dataset: AdjunctDataset) -> bool:
    """Whether runs of applications advance the dataset: it is stored, and not built on request."""
    return not is_advanced_by_partition(dataset) and dataset.persistent


def advances_between_batches(dataset: AdjunctDataset, fed: Collection[str | None]) -> bool:
    """Whether a run advances the dataset before each batch, and not only before the first.

    That is if batches do not wait for its bootstrap, or if it is among `fed`, the datasets that the
    application itself sends records to.
    """
    if dataset.bootstrap and dataset.name not in fed:
        return False
    return dataset.follows_changes and is_advanced_by_runs(dataset)


@dataclass(frozen=True, slots=True, eq=False)
class DatasetHandle:
    """A dataset as a table of one application; `max_staleness` is described at
    `Application.table`.
    """

    graph: OperatorGraph = field(repr=False)
    dataset: AdjunctDataset
    max_staleness: timedelta | None = None

    @property
    def name(self) -> str:
        return self.dataset.name


@dataclass(frozen=True, slots=True, eq=False)
class RemoteTableHandle:
    """A remote table as a table of one application."""

    graph: OperatorGraph = field(repr=False)
    table: AnyTable

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def key(self) -> tuple[str, ...]:
        return self.table.key


@dataclass(frozen=True, slots=True, eq=False)
class OutputStream:
    """A stream that one application writes: what `Application.output_stream` returns."""

    graph: OperatorGraph = field(repr=False)
    name: str
    partitions: int
    key: tuple[str, ...]
    description: str = ""
    changes: ColumnChanges = NO_CHANGES


@dataclass(frozen=True, slots=True, eq=False)
class OutputTable:
    """A table that one application writes: what `Application.output_table` returns."""

    graph: OperatorGraph = field(repr=False)
    table: AnyOutputTable
    on_replay: TableReplay = "append"
    tombstones: Tombstones = "fail"
    description: str = ""
    changes: ColumnChanges = NO_CHANGES

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def hidden(self) -> tuple[tuple[str, str], ...]:
        """The columns that rows get besides those of the records, with their types."""
        columns: list[tuple[str, str]]
        if self.on_replay == "replace":
            columns = list(POSITION.items())
        else:
            columns = [(EPOCH, "int")]
        if self.tombstones == "keep":
            columns.append((TOMBSTONE, "boolean"))
        return tuple(columns)


class OperatorGraph:
    """The operators of the application `name`, in order of definition; an operator follows its
    inputs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.operators: dict[str, Operator] = {}
        self._read: set[str] = set()
        # Ids of operators: by what they write (the first one), by the name of a join, and by the
        # name of state.
        self.writers: dict[str, str] = {}
        self._joins: dict[str, str] = {}
        self._states: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.operators)} operators)"

    def next_id(self, kind: str, name: str = "") -> str:
        """Return the id that the next operator gets if it has this kind and name."""
        number = f"{kind}-{len(self.operators) + 1}"
        if not name:
            return number
        return f"{number}-{name}"

    def add(self, spec: Spec, inputs: tuple[str, ...], name: str = "") -> str:
        """Add an operator after the operators `inputs`, and return its id; `name` ends the id.

        Raises PlanningError or ConfigurationError for what the graph can't take, such as a name
        that is taken.
        """
        operator = Operator(self.next_id(spec.kind, name), inputs, spec, find_calling_line())
        _check_schemas_declared(operator)
        if len(inputs) > 1 and (spec.writes is not None or spec.match is not None):
            problem = (
                f"{operator.id} has the inputs {', '.join(inputs)}: expected one, because it writes"
                " records, or looks them up in a dataset."
            )
            step = "Merge the records before it, for example with merge()."
            raise PlanningError(problem, step, operator=operator.id)
        states = set(spec.states)
        if spec.over_time is not None:  # a stream join also has the state table NAME-left
            states.add(spec.over_time)
        for state in sorted(states):
            other = self._states.setdefault(state, operator.id)
            if other != operator.id:
                problem = (
                    f"two operators keep state under the name {state!r}: {other} and {operator.id}."
                )
                raise PlanningError(problem, "Give one another name=.", operator=operator.id)
        self.operators[operator.id] = operator
        if spec.reads is not None:
            self._read.add(spec.reads)
        if spec.writes is not None:
            self.writers.setdefault(spec.writes, operator.id)
        self._check_followed()
        if spec.match is not None and name:
            self._joins.setdefault(name, operator.id)
        return operator.id

    def check_join_name(self, name: str, operator: str) -> None:
        """Raise an error for an invalid join name, or one that another join has."""
        check_name("join", name)
        if name in self._joins:
            problem = f"two joins are called {name!r}: {self._joins[name]} and {operator}."
            raise PlanningError(problem, "Give one another name=.", operator=operator)

    def _check_followed(self) -> None:
        """Raise PlanningError for a dataset whose changes are read and that is written, too."""
        for stream in sorted(self._read):
            if followed_dataset(stream) in self.writers:
                raise self.loop_error(stream, "of a dataset that the application sends to")

    def refuse_writing(self, stream: str, what: str) -> None:
        """Raise PlanningError for a stream that is written and that the application also reads: its
        records would loop forever. `what` says as what it is written.
        """
        if stream in self._read:
            raise self.loop_error(stream, what)

    def loop_error(self, stream: str, what: str) -> PlanningError:
        """Return the error for an input stream that the application also writes; `what` says as
        what: "an output stream".
        """
        problem = (
            f"application {self.name!r}: stream {stream!r} is an input stream and is also {what};"
            " its records would loop forever."
        )
        step = "Continue with the stream that send_to() returns instead of reading it again."
        return PlanningError(problem, step, application=self.name, stream=stream)


def _check_schemas_declared(operator: Operator) -> None:
    """Raise ConfigurationError for an operator that is no dataclass and does not define
    `declared_schemas`.

    Without its schemas, errors could show values of sensitive columns.
    """
    kind = type(operator.spec)
    if not is_dataclass(kind) and kind.declared_schemas is Spec.declared_schemas:
        problem = (
            f"{operator.id}: {kind.__name__} is not a dataclass and does not define"
            " declared_schemas, so its sensitive columns are unknown."
        )
        step = (
            "Make it a frozen dataclass, or let declared_schemas return the schemas that it was"
            " given."
        )
        raise ConfigurationError(problem, step, argument="spec", operator=operator.id)
