"""What is known of a batch before its records are read: of its operators, and of its datasets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, LocalTable
from dagster_adjunct.assets.reading.valid_time import Reader, VersionsOverTime
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.sources.entries import derive_stored_schema
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import Exchange, Operator, find_written
from dagster_adjunct.orchestration.operators.stream_facts import JoinVersions
from dagster_adjunct.orchestration.operators.stream_facts import Sources as ColumnSources
from dagster_adjunct.orchestration.planner.notes import name_writers
from dagster_adjunct.orchestration.planner.planned import PlannedOperator
from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext, View
from dagster_adjunct.orchestration.step.recorded_answers import RecordedAnswers
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import Sources, StreamSystem


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the records of an operator come from.

    - `streams`: the streams that they come from, by the operator where they enter the graph: an
      input, or an output that the graph continues from. An operator that assigns new positions
      counts as a stream of its own name.
    - `made_of`: the one input stream that all records are made of; None if there are several.
    - `positions`: the stream that their positions are in, or the operator that assigned these; None
      if several.
    """

    streams: Mapping[str, str]
    made_of: str | None
    positions: str | None


def trace_origins(
    operators: Iterable[Operator], system_of: Callable[[str], StreamSystem]
) -> dict[str, Origin]:
    """Return the origin of the records that leave each operator, by operator.

    After an output stream, records continue with positions in that stream if its system
    `appends_alone`: then they are read back from it.
    """
    result: dict[str, Origin] = {}
    for operator in operators:
        arriving = merge_origins([result[source] for source in operator.inputs])
        result[operator.id] = _origin_after(operator, arriving, system_of)
    return result


def merge_origins(origins: Sequence[Origin]) -> Origin:
    """Return the origin of the merged records of several inputs."""
    if len(origins) == 1:  # not copied: after a merge of many inputs it may have many streams
        return origins[0]
    streams: dict[str, str] = {}
    positions: set[str | None] = set()
    for origin in origins:
        streams |= origin.streams
        positions.add(origin.positions)
    made_of = None
    if len(streams) == 1:
        made_of = origins[0].made_of
    one_position = None
    if len(positions) == 1:
        (one_position,) = positions
    return Origin(streams, made_of, one_position)


def _origin_after(
    operator: Operator, arriving: Origin, system_of: Callable[[str], StreamSystem]
) -> Origin:
    """Return the origin of the records that leave an operator."""
    spec = operator.spec
    if spec.assigns_positions:
        return Origin({operator.id: operator.id}, None, operator.id)
    if spec.reads is not None:
        return Origin({operator.id: spec.reads}, spec.reads, spec.reads)
    if spec.role != "output" or spec.writes is None:
        return arriving
    system = system_of(spec.writes)
    is_read_back = system.capabilities.appends_alone
    positions = spec.writes if is_read_back else arriving.positions
    return Origin({operator.id: spec.writes}, arriving.made_of, positions)


def name_producers(app: Application, writer: str) -> dict[str, str]:
    """Return the name under which each operator appends to its stream: `writer`; for a stream's
    second operator `writer#2`, and so on.
    """
    names: dict[str, str] = {}
    senders: Counter[str] = Counter()
    for operator in app.operators:
        target = operator.spec.target(app)
        if target is not None and target.kind == "stream":
            senders[target.name] += 1
            number = senders[target.name]
            names[operator.id] = writer if number == 1 else f"{writer}#{number}"
    return names


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """What is known of a batch before its records are read: `Planned` of operators, and more.

    - `operators`: those whose records reach an output, in order; the others need not run.
    - `planned`: each operator as the plan has it; `exchanges`: those before each.
    - `origins`: the origin of each operator's records.
    - `producers` and `writers`: the names under which operators write to streams and tables.
    - `consumers`: how many operators use the records of each; `diverted_from`: the operators whose
      diverted records are read.
    - `gathered`: whether all records are in one partition, so that none are moved.
    - `unsent`: the operators that do not send their records, because a table has them.
    """

    context: StepContext
    inputs: BatchInputs
    operators: tuple[Operator, ...]
    planned: Mapping[str, PlannedOperator]
    exchanges: Mapping[str, Sequence[Exchange]]
    origins: Mapping[str, Origin]
    producers: Mapping[str, str]
    writers: Mapping[str, str]
    consumers: Mapping[str, int]
    diverted_from: frozenset[str]
    gathered: bool
    unsent: frozenset[str] = frozenset()

    @staticmethod
    def of(context: StepContext, inputs: BatchInputs, *, gathered: bool = False) -> PlannedBatch:
        """Return what the plan of the application says of a batch with these inputs."""
        app = context.app
        exchanges: dict[str, list[Exchange]] = defaultdict(list)
        for exchange in context.plan.exchanges:
            exchanges[exchange.operator].append(exchange)
        consumers: Counter[str] = Counter()
        diverted_from: set[str] = set()
        for operator in app.operators:
            consumers.update(operator.inputs)
            if operator.spec.reads_diverted:
                diverted_from.update(operator.inputs)
        operators = find_written(app.operators)
        unsent: frozenset[str] = frozenset()
        restating = inputs.intent.restating
        if restating is not None:
            needed = context.plan.operators_that_restate(restating.datasets)
            unsent = needed.unsent
            operators = tuple(each for each in operators if each.id in needed.operators)
        return PlannedBatch(
            context,
            inputs,
            operators=operators,
            planned={planned.id: planned for planned in context.plan.operators},
            exchanges=exchanges,
            origins=trace_origins(app.operators, partial(system_of, context, inputs)),
            producers=name_producers(app, context.writer),
            writers=name_writers(app, context.writer),
            consumers=consumers,
            diverted_from=frozenset(diverted_from),
            gathered=gathered,
            unsent=unsent,
        )

    @property
    def app(self) -> Application:
        return self.context.app

    @property
    def number(self) -> int:
        """The number of the batch."""
        return self.inputs.intent.batch

    @property
    def clock(self) -> datetime:
        """The start of the batch, by the lake's clock; a repeated batch has the same."""
        return self.inputs.intent.clock

    @property
    def reading(self) -> JoinVersions:
        """Which versions joins use."""
        return self.inputs.intent.joined.reading

    @property
    def tasks(self) -> int:
        """The number of tasks, each of which gets a copy of broadcast records."""
        return self.inputs.intent.tasks or len(self.context.plan.tasks)

    @property
    def is_dry_run(self) -> bool:
        """Whether the batch reads and writes nothing: it is number 0."""
        return self.number == 0

    def partitions_at(self, operator: str) -> int:
        """Return the planned partition count of the records that leave an operator."""
        return self.planned[operator].partitions

    def required_partitioning(self, operator: str) -> Sequence[str]:
        """Return the columns that records are partitioned by after an operator; () where nothing
        relies on it.
        """
        return self.planned[operator].partitioned_by

    def stream_of(self, operator: str) -> str | None:
        """Return the stream that the positions of an operator's records are in; None if there are
        several.
        """
        return self.origins[operator].positions

    def may_be_early(self, operator: str) -> bool:
        """Whether records of a join may be read before its dataset is complete up to their time."""
        joined = self.inputs.intent.joined
        return operator in joined.known and operator not in joined.in_time

    def known_until(self, operator: str) -> datetime | None:
        """Return the watermark of the dataset that the records of a join wait for; None for
        none.
        """
        return self.inputs.intent.joined.known.get(operator)

    def has_consumers(self, operator: str) -> bool:
        """Whether another operator uses the records of this one."""
        return self.consumers.get(operator, 0) > 0

    def has_diverted_consumer(self, operator: str) -> bool:
        """Whether an operator reads the records that this one diverts."""
        return operator in self.diverted_from

    def is_shared(self, operator: Operator) -> bool:
        """Whether several operators use this operator's records, and no stream or table stores
        them.
        """
        if operator.spec.reads is not None or operator.spec.writes is not None:
            return False
        return self.consumers.get(operator.id, 0) > 1

    def moves(self, operator: str) -> list[Exchange]:
        """Return the plan's auto_repartition exchanges before an operator."""
        moves = []
        for exchange in self.exchanges.get(operator, ()):
            if exchange.reason == "auto_repartition" and not self.gathered:
                moves.append(exchange)
        return moves

    def is_partitioned(self, operator: str) -> bool:
        """Whether the records that an operator writes arrive in the partitions of its output."""
        return not self.gathered and operator not in self.exchanges

    def operator_before(self, operator: str) -> str:
        """Return the id of the operator before `operator`, which has one input."""
        (before,) = self.app.operator(operator).inputs
        return before

    def system_of(self, stream: str) -> StreamSystem:
        """Return the system of a stream, for an input as it was when the batch was planned."""
        return system_of(self.context, self.inputs, stream)

    def sources(self, operator: str) -> Sources | None:
        """Return the ranges of the input stream that an operator's records are made of; None if
        there are several.
        """
        stream = self.origins[operator].made_of
        if stream is None:
            return None
        return self.inputs.sources(self.context.writer, stream)

    def recorded_answers(self, operator: str, asked: dict[str, Any]) -> RecordedAnswers:
        """Return what an operator has recorded in this batch of answers to what it has `asked`."""
        return RecordedAnswers(self.context.lake, self.app.name, self.number, operator, asked)

    def sensitive(self, operator: str, *arriving: Collection[str]) -> frozenset[str]:
        """Return the columns of an operator's input whose values must not appear in errors;
        `arriving` has the names of the columns of each input.
        """
        compiled = self.app.operator(operator)
        match = compiled.spec.match
        names: set[str] = set()
        for node, name in self.context.sensitive:
            # Errors of a join may show values of its dataset, too.
            if match is not None and match.dataset is not None and node == match.node:
                names.add(name)
        for source, columns in zip(compiled.inputs, arriving, strict=True):
            names |= sensitive_columns(self.context, source, columns)
        return frozenset(names)


def system_of(context: StepContext, inputs: BatchInputs, stream: str) -> StreamSystem:
    """Return the system of a stream, for an input as it was when the batch was planned."""
    if stream in inputs.streams:
        return inputs.streams[stream]
    return context.system_of(stream)


def sensitive_columns(
    context: StepContext, operator: str, columns: Iterable[str]
) -> frozenset[str]:
    """Return which columns of an operator's records may hold values that a schema or a dataset
    marks as sensitive; none of the hidden columns does.

    If anything is sensitive, a column of unknown origin counts as sensitive too, and a column that
    has the name of a sensitive one.
    """
    if not context.sensitive:
        return frozenset()
    names = {name for _, name in context.sensitive}
    sources = context.plan.columns[operator].sources
    found = set()
    for name in columns:
        if name.startswith("__"):
            continue
        if name.lower() in names or _may_be_sensitive(context, sources.get(name, ())):
            found.add(name)
    return frozenset(found)


def _may_be_sensitive(context: StepContext, sources: ColumnSources) -> bool:
    """Whether a column made of these sources may hold sensitive values; an output's column holds
    what is sent to it.
    """
    if not sources:  # of unknown origin
        return True
    columns = context.plan.columns
    for node, column in sources:
        if (node, column.lower()) in context.sensitive:
            return True
        for operator in context.app.operators:
            if operator.spec.role != "output" or operator.spec.target(context.app) != node:
                continue
            sent = operator.spec.written(columns[operator.inputs[0]])
            if _may_be_sensitive(context, sent.sources.get(column, ())):
                return True
    return False


def schema_of_dataset(planned: PlannedBatch, dataset: str, *, over_time: bool = False) -> Schema:
    """Return the columns that a batch reads of a dataset: those of its entries, or with `over_time`
    of the rows of its history.

    A local table of the application has its declared columns. In a dry run, which takes local
    tables for empty, so has one of another application. A dataset without a version has the
    columns that it will have; none if its input has none yet.
    """
    declared = planned.app.dataset(dataset)
    if isinstance(declared, LocalTable):
        is_own = declared.is_owned_by(planned.app.name)
        if is_own or planned.is_dry_run:
            return declared.stored
    reader: Reader | View
    if over_time:
        reader = find_history(planned, dataset).reader
    else:
        reader = planned.inputs.views[dataset]
    if reader is None:
        return _declared_schema(planned, declared)
    return reader.schema


def _declared_schema(planned: PlannedBatch, dataset: AdjunctDataset) -> Schema:
    """Return the columns that a dataset without a version will have; none if its input has none
    yet.
    """
    if not isinstance(dataset.input, str):
        return derive_stored_schema(dataset, dataset.input.schema)
    stream = split_stream_name(dataset.input)[1]
    records = planned.system_of(dataset.input).info(stream).schema
    if records is None:
        return Schema(())
    return derive_stored_schema(dataset, records)


@dataclass(frozen=True, slots=True)
class DatasetHistory:
    """A reader of a dataset's rows over time, None if it has no version yet.

    The history is known from the time `known_from` on, in microseconds; None if all of it is known.
    """

    reader: Reader | None = None
    known_from: int | None = None


def find_history(planned: PlannedBatch, dataset: str) -> DatasetHistory:
    """Return the history of a dataset that a batch joins by time; an empty one if it has no
    version.

    An unbounded dataset has its history in the version that the batch reads. For a bounded one it
    is made of all versions, or of that version alone if the intent names no others.
    """
    view = planned.inputs.views[dataset]
    versions = planned.inputs.over_time.get(dataset)
    if versions is None and isinstance(view, VersionReader):
        if planned.app.dataset(dataset).follows_changes:
            history = view.sealed.history
            return DatasetHistory(view, None if history is None else history.pruned)
        versions = VersionsOverTime(view.store, dataset, [view.sealed])
    if versions is None:
        return DatasetHistory()
    return DatasetHistory(versions, versions.edge)  # versions before it may have been discarded
