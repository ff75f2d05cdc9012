"""What an application's outputs are made of, read off its operator graph: lineage as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from orchestration.graph import Input, Join, SendToStream, SendToTable

if TYPE_CHECKING:
    from orchestration.application import Application

Kind = Literal["stream", "dataset", "table"]


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """One asset to be: a stream ("lake.flights"), a dataset ("planes") or a remote table ("aircraft-state")."""

    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class Output:
    """Something that the application writes, and what its records are made of, in order of the graph."""

    node: Node
    upstream: tuple[Node, ...]


def outputs_of(app: Application) -> tuple[Output, ...]:
    """Return the outputs in order of definition.

    What follows an output stream is made of that stream and of what is joined after it, not of what went into
    it. A table that is sent to in several places is made of all of them.
    """
    made_of: dict[str, tuple[Node, ...]] = {}
    outputs: dict[Node, tuple[Node, ...]] = {}
    for operator in app.operators:
        upstream = _union(*[made_of[parent] for parent in operator.inputs])
        spec = operator.spec
        if isinstance(spec, Input):
            upstream = (Node("stream", spec.stream),)
        elif isinstance(spec, Join):
            upstream = _union(upstream, (Node("dataset", spec.dataset),))
        elif isinstance(spec, SendToStream | SendToTable):
            node = _target(app, spec)
            outputs[node] = _union(outputs.get(node, ()), upstream)
            if isinstance(spec, SendToStream):
                upstream = (node,)
        made_of[operator.id] = upstream
    return tuple(Output(node, upstream) for node, upstream in outputs.items())


def streams_read(app: Application) -> tuple[str, ...]:
    """Return the streams that the application or one of its datasets reads, each once."""
    return tuple(dict.fromkeys([*app.inputs, *(dataset.input for dataset in app.datasets)]))


def _target(app: Application, spec: SendToStream | SendToTable) -> Node:
    if isinstance(spec, SendToStream):
        return Node("stream", spec.stream)
    if spec.dataset:
        return Node("stream", app.dataset(spec.table).input)
    return Node("table", spec.table)


def _union(*nodes: Sequence[Node]) -> tuple[Node, ...]:
    return tuple(dict.fromkeys(node for several in nodes for node in several))
