"""Which columns each output's columns are made of, read off the operators: what can't be read off is left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.extractors.extractor import Projection
from dagster_adjunct.orchestration.application.arguments import plain_column, split_alias
from dagster_adjunct.orchestration.application.graph import Input, Join, Map, SendToStream, SendToTable
from dagster_adjunct.orchestration.application.lineage import Node, source_of, target_of
from dagster_adjunct.resources.tables.spark_write import DEFAULT, UPDATE

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.planner import ExecutionPlan

Sources = tuple[tuple[Node, str], ...]
Made = dict[str, Sources]
_TOKEN = re.compile(
    r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`(?P<quoted>[^`]+)`|(?P<name>[A-Za-z_]\w*)(?P<called>\s*\()?"
)
_STRUCT = "named_struct("


def output_columns(app: Application, plan: ExecutionPlan) -> dict[Node, Made]:
    """Return, for each output, the columns of streams and datasets that each of its columns is made of.

    A computed column is made of all that its expression names. What a function returns is not known, nor what comes
    after it. A join's condition makes no column.
    """
    made: dict[str, Made] = {}
    outputs: dict[Node, Made] = {}
    for operator in app.operators:
        spec = operator.spec
        columns: Made = dict(made[operator.inputs[0]]) if operator.inputs else {}
        if isinstance(spec, Input):
            columns = _whole(Node("stream", spec.stream), plan.operator(operator.id).columns or ())
        elif isinstance(spec, Map):
            columns = _mapped(spec, columns)
        elif isinstance(spec, Join):
            columns |= _joined(plan, operator.id, operator.inputs[0], spec)
        elif isinstance(spec, SendToStream | SendToTable):
            node = target_of(app, spec)
            written = _unfolded(columns) if node.kind == "table" else columns
            for name, sources in written.items():
                _add(outputs.setdefault(node, {}), name, sources)
            if isinstance(spec, SendToStream):
                columns = _whole(node, columns)
        made[operator.id] = columns
    return outputs


def dataset_columns(dataset: AdjunctDataset, stored: Iterable[str], records: Iterable[str] | None) -> Made:
    """Return which columns of its input each stored column of a dataset is made of; `records` are the input's."""
    source = source_of(dataset)
    if source is None:
        return {}
    if dataset.extractor is None:
        there = None if records is None else {name.lower() for name in records}
        return _whole(source, [name for name in stored if there is None or name.lower() in there])
    if not isinstance(dataset.extractor, Projection) or records is None:
        return {}
    taken, computed = _whole(source, records), dict(dataset.extractor.select)
    return {name: _named(computed.get(name, f"`{name}`"), taken) for name in stored}


def _whole(node: Node, columns: Iterable[str]) -> Made:
    return {name: ((node, name),) for name in columns}


def _mapped(spec: Map, columns: Made) -> Made:
    made: Made = {}
    for expression in spec.expressions:
        if expression.strip() == "*":
            made |= columns
            continue
        what, alias = split_alias(expression)
        if alias in (UPDATE, DEFAULT) and what.startswith(_STRUCT) and what.endswith(")"):
            for name, value in _pairs(what[len(_STRUCT) : -1]):
                made[f"{alias}.{name}"] = _named(value, columns)
            continue
        named = alias or plain_column(what)
        if named is not None:
            made[named] = _named(what, columns)
    return made


def _joined(plan: ExecutionPlan, operator: str, before: str, spec: Join) -> Made:
    dataset = Node("dataset", spec.dataset)
    if spec.select is not None:
        return {chosen.name: ((dataset, chosen.column),) for chosen in spec.select}
    there = plan.operator(before).columns or ()
    added = [name for name in plan.operator(operator).columns or () if name not in there]
    return {name: ((dataset, name.removeprefix(spec.prefix)),) for name in added}


def _unfolded(columns: Made) -> Made:
    """Return the columns of a table that update messages are written to: those of the update and of the default."""
    made: Made = {}
    for name, sources in columns.items():
        _add(made, name.partition(".")[2] if name.startswith((f"{UPDATE}.", f"{DEFAULT}.")) else name, sources)
    return made


def _add(made: Made, name: str, sources: Sources) -> None:
    made[name] = tuple(dict.fromkeys((*made.get(name, ()), *sources)))


def _named(expression: str, columns: Mapping[str, Sources]) -> Sources:
    """Return the sources of the columns that a SQL expression names; names of functions and texts are none."""
    known = {name.lower(): sources for name, sources in columns.items()}
    found = [
        (match["quoted"] or match["name"]).lower()
        for match in _TOKEN.finditer(expression)
        if match["quoted"] or (match["name"] and not match["called"])
    ]
    return tuple(dict.fromkeys(source for name in found for source in known.get(name, ())))


def _pairs(arguments: str) -> Iterator[tuple[str, str]]:
    """Yield names and expressions of `named_struct`'s arguments: "'a', x, 'b', f(y, z)"."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(arguments):
        text = _TOKEN.match(arguments, at)
        if text is not None and not text["called"]:
            at = text.end()
            continue
        depth += {"(": 1, ")": -1}.get(arguments[at], 0)
        if arguments[at] == "," and not depth:
            parts.append(arguments[start:at].strip())
            start = at + 1
        at += 1
    parts.append(arguments[start:].strip())
    for name, value in zip(parts[::2], parts[1::2], strict=False):
        yield name.strip("'").replace("\\'", "'"), value


def origins(outputs: Mapping[Node, Made]) -> dict[Node, Made]:
    """Return the same with the columns of outputs replaced by what these are made of."""
    found: dict[Node, Made] = {}
    for node, made in outputs.items():
        found[node] = {}
        for name, sources in made.items():
            for source, column in sources:
                earlier = found.get(source, {}).get(column) if source != node else None
                _add(found[node], name, earlier or ((source, column),))
    return found


def descriptions_of(app: Application, made: Mapping[str, Sources]) -> dict[str, str]:
    """Return what is said of columns that are a dataset's own, passed on alone."""
    said = {
        (Node("dataset", dataset.name), name): text
        for dataset in app.datasets
        for name, text in dataset.column_descriptions
    }
    sole = {name: sources[0] for name, sources in made.items() if len(sources) == 1}
    return {name: said[source] for name, source in sole.items() if source in said}


def hidden_columns(app: Application, made: Mapping[str, Sources], columns: Iterable[str]) -> set[str]:
    """Return which of an output's columns are masked: what is made of a sensitive column, or has the name of one.

    Where any is sensitive, a column of unknown origin is masked, too.
    """
    sensitive = {
        (Node("dataset", dataset.name), name.lower()) for dataset in app.datasets for name in dataset.sensitive
    }
    if not sensitive:
        return set()
    names = {name for _, name in sensitive}
    return {
        name
        for name in columns
        if name.lower() in names
        or not made.get(name)
        or any((node, column.lower()) in sensitive for node, column in made[name])
    }
