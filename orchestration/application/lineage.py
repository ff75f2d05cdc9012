"""The lineage of an application: the assets that it reads and writes, and what each is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, FileSource
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import Match
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode


@dataclass(frozen=True, slots=True)
class Output:
    """An asset that the application writes, and the assets that its records are made of, in
    order of definition.
    """

    node: LineageNode
    upstream: tuple[LineageNode, ...]


def find_outputs(app: Application) -> tuple[Output, ...]:
    """Return the assets that the application writes, each with its direct upstream assets.

    They are in order of definition, except that none comes before an asset that it is made of:
    Dagster wants them reported so. Records after an output stream come from that stream and from
    later joins, not from the stream's own inputs. A table with several sends comes from all of
    them.
    """
    # The upstream assets of the records that leave each operator, and of each output.
    made_of: dict[str, tuple[LineageNode, ...]] = {}
    outputs: dict[LineageNode, tuple[LineageNode, ...]] = {}
    for operator in app.operators:
        upstream = _union(*(made_of[source] for source in operator.inputs))
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
    return tuple(_in_order(_remove_cycles(app, outputs)))


def _in_order(outputs: Mapping[LineageNode, tuple[LineageNode, ...]]) -> Iterable[Output]:
    """Return the outputs with their upstream assets, none before those that it is made of."""
    ordered: dict[LineageNode, Output] = {}

    def add(node: LineageNode) -> None:
        if node in outputs and node not in ordered:
            for each in outputs[node]:
                add(each)
            ordered[node] = Output(node, outputs[node])

    for node in outputs:
        add(node)
    return ordered.values()


def _remove_cycles(
    app: Application, outputs: Mapping[LineageNode, Sequence[LineageNode]]
) -> dict[LineageNode, tuple[LineageNode, ...]]:
    """Return the outputs without the edges that would close a cycle, which a lineage graph can't
    have.

    A dataset or remote table that an application writes in one batch and joins in the next one
    makes a cycle. Such an asset stays upstream of an output only if it is not itself made of that
    output.
    """
    # What the application writes and may join: only an edge from one of these can close a cycle.
    written = {LineageNode("dataset", name) for name in _names_of_fed_datasets(app)}
    written |= {table for table in find_lookup_tables(app) if table in outputs}
    made_from = _list_dataset_sources(app)
    for node, upstream in outputs.items():
        made_from[node] += [each for each in upstream if each not in written]
    for node, upstream in outputs.items():
        for each in _keep(upstream, written):
            if not _is_made_of(each, node, made_from):
                made_from[node].append(each)
    return {node: _keep(upstream, made_from[node]) for node, upstream in outputs.items()}


def _keep(nodes: Iterable[LineageNode], kept: Collection[LineageNode]) -> tuple[LineageNode, ...]:
    """Return those of the nodes that are among `kept`."""
    return tuple(node for node in nodes if node in kept)


def _list_dataset_sources(app: Application) -> dict[LineageNode, list[LineageNode]]:
    """Return the asset that each dataset is built from, in a list; [] for all other assets."""
    sources: dict[LineageNode, list[LineageNode]] = defaultdict(list)
    for dataset in app.datasets:
        source = dataset_source(dataset)
        if source is not None:
            sources[LineageNode("dataset", dataset.name)].append(source)
    return sources


def _is_made_of(
    node: LineageNode, sought: LineageNode, made_from: Mapping[LineageNode, list[LineageNode]]
) -> bool:
    """Whether an asset is made of the `sought` one, directly or by others."""
    waiting = [node]
    seen = set[LineageNode]()
    while waiting:
        found = waiting.pop()
        if found == sought:
            return True
        if found not in seen:
            seen.add(found)
            waiting += made_from.get(found, ())
    return False


def _names_of_fed_datasets(app: Application) -> set[str]:
    """Return the datasets that the application sends records to."""
    return {operator.spec.feeds for operator in app.operators if operator.spec.feeds is not None}


def find_first_outputs(app: Application) -> dict[str, LineageNode]:
    """Return {operator's id: asset} of the joins and expectations: the first asset, in order of
    definition, to which their records are written.
    """
    leaving: dict[str, list[str]] = {}  # by operator, the joins and expectations up to it
    reached: dict[str, LineageNode] = {}
    for operator in app.operators:
        above: dict[str, None] = {}
        for source in operator.inputs:
            above |= dict.fromkeys(leaving[source])
        if operator.spec.match is not None or operator.spec.expectation is not None:
            above[operator.id] = None
        target = operator.spec.target(app)
        if target is not None:
            for operator_id in above:
                reached.setdefault(operator_id, target)
        leaving[operator.id] = list(above)
    return reached


def find_unjoined_datasets(app: Application) -> tuple[LineageNode, ...]:
    """Return the declared datasets that the application neither joins nor sends records to.

    No output is made of such a dataset, but batches wait for it.
    """
    used = _names_of_fed_datasets(app)
    nodes = [LineageNode("dataset", dataset.name) for dataset in app.datasets]
    joined = [match.node for match in _list_matches(app)]
    return tuple(node for node in nodes if node.name not in used and node not in joined)


def dataset_source(dataset: AdjunctDataset) -> LineageNode | None:
    """Return the asset that a dataset is built from: a stream or files; None for a query, which
    is no asset.
    """
    if isinstance(dataset.input, FileSource):
        return LineageNode("files", dataset.input.url)
    if dataset.stream is None:
        return None
    return LineageNode("stream", dataset.stream)


def find_sources(app: Application) -> tuple[LineageNode, ...]:
    """Return the streams, files and remote tables that the application or its datasets read,
    each once.
    """
    streams = [LineageNode("stream", stream) for stream in app.inputs]
    made_from = []
    for dataset in app.datasets:
        source = dataset_source(dataset)
        if source is not None:
            made_from.append(source)
    return _union(streams, made_from, find_lookup_tables(app))


def find_lookup_tables(app: Application) -> tuple[LineageNode, ...]:
    """Return the remote tables that records are looked up in."""
    return _union(match.node for match in _list_matches(app) if match.table is not None)


def _list_matches(app: Application) -> list[Match]:
    """Return the lookups of all operators."""
    return [operator.spec.match for operator in app.operators if operator.spec.match is not None]


def _union(*nodes: Iterable[LineageNode]) -> tuple[LineageNode, ...]:
    """Return all nodes, each once, in order."""
    return tuple(dict.fromkeys(chain(*nodes)))
