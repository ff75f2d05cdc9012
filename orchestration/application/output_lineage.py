"""What an application's outputs are made of, read off its operator graph: lineage as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.inputs_besides_streams import FileSource
from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageNode

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application


@dataclass(frozen=True, slots=True)
class Output:
    """Something that the application writes, and what its records are made of, in order of the graph."""

    node: LineageNode
    upstream: tuple[LineageNode, ...]


def outputs_of(app: Application) -> tuple[Output, ...]:
    """Return the outputs in order of definition.

    What follows an output stream is made of that stream and of what is joined after it, not of what went into
    it. A table that is sent to in several places is made of all of them.
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
            if not spec.writes_aside:
                upstream = (target,)
        made_of[operator.id] = upstream
    return tuple(Output(node, upstream) for node, upstream in _without_cycles(app, outputs).items())


def _without_cycles(
    app: Application, outputs: Mapping[LineageNode, Sequence[LineageNode]]
) -> dict[LineageNode, tuple[LineageNode, ...]]:
    """Return the outputs without what would make them of themselves.

    State is: what a batch writes to a table, the next one joins. A lineage graph has no place for that, so of datasets
    that the application itself feeds only those are left that are not made of the output.
    """
    fed = {LineageNode("dataset", operator.spec.feeds) for operator in app.operators if operator.spec.feeds is not None}
    made_from: dict[LineageNode, list[LineageNode]] = {node: [] for node in outputs}
    for dataset in app.datasets:
        source = source_of(dataset)
        if source is not None:
            made_from[LineageNode("dataset", dataset.name)] = [source]

    def is_made_of(node: LineageNode, sought: LineageNode) -> bool:
        waiting, seen = [node], set[LineageNode]()
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


def joins_of(app: Application) -> dict[str, LineageNode]:
    """Return the joins whose records reach an output, by their ids, each with the first output that they reach."""
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


def unused_datasets(app: Application) -> tuple[LineageNode, ...]:
    """Return the datasets that are declared and not joined: no output is made of them, but batches wait for them.

    Without those that the application itself feeds, which are made of its outputs, or are some.
    """
    joined = {operator.spec.match.dataset for operator in app.operators if operator.spec.match is not None}
    joined |= {operator.spec.feeds for operator in app.operators}
    return tuple(LineageNode("dataset", dataset.name) for dataset in app.datasets if dataset.name not in joined)


def source_of(dataset: AdjunctDataset) -> LineageNode | None:
    """Return what a dataset is made from: a stream or a folder of files; None for a query, which is no asset."""
    if isinstance(dataset.input, FileSource):
        return LineageNode("files", dataset.input.url)
    return None if dataset.stream is None else LineageNode("stream", dataset.stream)


def sources_read(app: Application) -> tuple[LineageNode, ...]:
    """Return what the application or one of its datasets reads: streams, files and remote tables, each once."""
    made_from = [source for source in map(source_of, app.datasets) if source is not None]
    return _union([LineageNode("stream", stream) for stream in app.inputs], made_from, tables_read(app))


def tables_read(app: Application) -> tuple[LineageNode, ...]:
    """Return the remote tables that records are looked up in."""
    matches = [operator.spec.match for operator in app.operators if operator.spec.match is not None]
    return _union([match.node for match in matches if match.table is not None])


def _union(*nodes: Sequence[LineageNode]) -> tuple[LineageNode, ...]:
    return tuple(dict.fromkeys(node for several in nodes for node in several))
