"""The operator graph of an application, its handles for streams and tables, and the lineage of
its outputs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, FileSource, QuerySource
from dagster_adjunct.orchestration.operators.lookup_join import AnyTable
from dagster_adjunct.orchestration.operators.operator import Operator, Spec
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode
from dagster_adjunct.resources.code_lines import find_calling_line
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.names import check_name

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application


def to_dagster_name(name: str) -> str:
    """Return a valid Dagster name: every character other than an ASCII letter, digit or "_"
    becomes "_".
    """
    return re.sub(r"\W", "_", name, flags=re.ASCII)


DatasetGroup = tuple["AdjunctDataset", ...]


def group_datasets(datasets: Iterable[AdjunctDataset], where: str) -> tuple[DatasetGroup, ...]:
    """Return the datasets in groups that advance together, in order of declaration; `where` is
    named in errors.

    Raises ConfigurationError for a version set with only one declared member.
    """
    units: dict[str, list[AdjunctDataset]] = {}
    for dataset in datasets:
        units.setdefault(
            f"set {dataset.version_set}" if dataset.version_set else dataset.name, []
        ).append(dataset)
    for unit in units.values():
        if unit[0].version_set and len(unit) == 1:
            raise ConfigurationError(
                f"{where} declares dataset {unit[0].name!r} of the version set"
                f" {unit[0].version_set!r} and none of its other members, which are published"
                " together with it.",
                "Declare the other members too, with app.table(…); they need not be joined.",
                dataset=unit[0].name,
            )
    return tuple(map(tuple, units.values()))


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
    return not is_advanced_by_partition(dataset) and dataset.following.persistent


def advances_between_batches(dataset: AdjunctDataset, fed: Collection[str | None]) -> bool:
    """Whether a run advances the dataset before each batch, and not only before the first.

    That is if batches do not wait for its bootstrap, or if it is among `fed`, the datasets that the
    application itself sends records to.
    """
    followed = not dataset.bootstrap or dataset.name in fed
    return dataset.follows_changes and followed and is_advanced_by_runs(dataset)


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


class OperatorGraph:
    """The operators of the application `name`, in order of definition; an operator follows its
    inputs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.operators: dict[str, Operator] = {}
        self._read: set[str] = set()
        self.writers: dict[str, str] = {}
        self._joins: dict[str, str] = {}
        self._states: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.operators)} operators)"

    def next_id(self, kind: str, name: str = "") -> str:
        """Return the id that the next operator gets if it has this kind and name."""
        return f"{kind}-{len(self.operators) + 1}" + (f"-{name}" if name else "")

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
            raise PlanningError(
                problem,
                "Merge the records before it, for example with merge().",
                operator=operator.id,
            )
        named = {spec.over_time} if spec.over_time is not None else set()
        for state in sorted(
            named.union(spec.states)
        ):  # a stream join also has the state table NAME-left
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
        if spec.match is not None and name:
            self._joins.setdefault(name, operator.id)
        return operator.id

    def check_join_name(self, name: str, operator: str) -> None:
        """Raise an error for an invalid join name, or one that another join has."""
        check_name("join", name)
        if name in self._joins:
            problem = f"two joins are called {name!r}: {self._joins[name]} and {operator}."
            raise PlanningError(problem, "Give one another name=.", operator=operator)

    def refuse_writing(self, stream: str, what: str) -> None:
        """Raise PlanningError for a stream that the application also reads: its records would
        loop forever.
        """
        if stream in self._read:
            raise self.loop(stream, what)

    def loop(self, stream: str, what: str) -> PlanningError:
        """Return the error for an input stream that the application also writes; `what` says by
        what it is written.
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


@dataclass(frozen=True, slots=True)
class Output:
    """An asset that the application writes, and the assets that its records are made of, in
    order of definition.
    """

    node: LineageNode
    upstream: tuple[LineageNode, ...]


def find_outputs(app: Application) -> tuple[Output, ...]:
    """Return the assets that the application writes, in order of definition, each with its direct
    upstream assets.

    Records after an output stream come from that stream and from later joins, not from the stream's
    own inputs. A table with several sends comes from all of them.
    """
    made_of: dict[str, tuple[LineageNode, ...]] = {}
    outputs: dict[LineageNode, tuple[LineageNode, ...]] = {}
    for operator in app.operators:
        upstream = _union(*[made_of[parent] for parent in operator.inputs])
        spec = operator.spec
        if spec.reads is not None:
            upstream = _union(upstream, (LineageNode("stream", spec.reads),))
        if spec.match is not None:
            upstream = _union(upstream, (spec.match.node,))
        target = spec.target(app)
        if target is not None:
            outputs[target] = _union(outputs.get(target, ()), upstream)
            if not spec.is_side_output:
                upstream = (target,)
        made_of[operator.id] = upstream
    return tuple(Output(node, upstream) for node, upstream in _remove_cycles(app, outputs).items())


def _remove_cycles(
    app: Application, outputs: Mapping[LineageNode, Sequence[LineageNode]]
) -> dict[LineageNode, tuple[LineageNode, ...]]:
    """Return the outputs without the edges that would close a cycle.

    A dataset that an application writes in one batch and joins in the next one makes a cycle, which
    a lineage graph can't have. So such a dataset stays upstream of an output only if it is not
    itself made of that output.
    """
    fed = {
        LineageNode("dataset", operator.spec.feeds)
        for operator in app.operators
        if operator.spec.feeds is not None
    }
    made_from: dict[LineageNode, list[LineageNode]] = {node: [] for node in outputs}
    for dataset in app.datasets:
        source = dataset_source(dataset)
        if source is not None:
            made_from[LineageNode("dataset", dataset.name)] = [source]

    def is_made_of(node: LineageNode, sought: LineageNode) -> bool:
        waiting = [node]
        seen = set[LineageNode]()
        while waiting:
            one = waiting.pop()
            if one == sought:
                return True
            if one not in seen:
                seen.add(one)
                waiting += made_from.get(one, [])
        return False

    for node, upstream in outputs.items():
        made_from[node] += [one for one in upstream if one not in fed]
    for node, upstream in outputs.items():
        made_from[node] += [one for one in upstream if one in fed and not is_made_of(one, node)]
    return {
        node: tuple(one for one in upstream if one not in fed or one in made_from[node])
        for node, upstream in outputs.items()
    }


def find_output_joins(app: Application) -> dict[str, LineageNode]:
    """Return {join's id: asset}: the first asset, in order of definition, to which the joined
    records are written.
    """
    passed: dict[str, tuple[str, ...]] = {}
    reached: dict[str, LineageNode] = {}
    for operator in app.operators:
        joins = tuple(dict.fromkeys(join for parent in operator.inputs for join in passed[parent]))
        if operator.spec.match is not None:
            joins = (*joins, operator.id)
        target = operator.spec.target(app)
        if target is not None:
            for join in joins:
                reached.setdefault(join, target)
        passed[operator.id] = joins
    return reached


def find_unjoined_datasets(app: Application) -> tuple[LineageNode, ...]:
    """Return the declared datasets that the application neither joins nor sends records to.

    No output is made of them, but batches wait for them.
    """
    joined = {
        operator.spec.match.dataset for operator in app.operators if operator.spec.match is not None
    }
    joined |= {operator.spec.feeds for operator in app.operators}
    return tuple(
        LineageNode("dataset", dataset.name)
        for dataset in app.datasets
        if dataset.name not in joined
    )


def dataset_source(dataset: AdjunctDataset) -> LineageNode | None:
    """Return the asset that a dataset is built from: a stream or files; None for a query, which
    is no asset.
    """
    if isinstance(dataset.input, FileSource):
        return LineageNode("files", dataset.input.url)
    return None if dataset.stream is None else LineageNode("stream", dataset.stream)


def find_sources(app: Application) -> tuple[LineageNode, ...]:
    """Return the streams, files and remote tables that the application or its datasets read,
    each once.
    """
    made_from = [source for source in map(dataset_source, app.datasets) if source is not None]
    return _union(
        [LineageNode("stream", stream) for stream in app.inputs], made_from, find_lookup_tables(app)
    )


def find_lookup_tables(app: Application) -> tuple[LineageNode, ...]:
    """Return the remote tables that records are looked up in."""
    matches = [operator.spec.match for operator in app.operators if operator.spec.match is not None]
    return _union([match.node for match in matches if match.table is not None])


def _union(*nodes: Sequence[LineageNode]) -> tuple[LineageNode, ...]:
    return tuple(dict.fromkeys(node for several in nodes for node in several))
