"""How the records that are written to a table are marked: by which positions, under which names, in which epochs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.operators.columns.hidden_columns import ORIGIN
from dagster_adjunct.resources.streams.interface.stream_system import (
    OFFSET,
    PARTITION,
    SOURCE,
    SOURCE_OFFSET,
)
from dagster_adjunct.resources.tables.record_marks import MarkedSource, Marking

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.orchestration.step.context.batch_inputs import BatchInputs


def streams_of_positions(operators: Iterable[Operator], has_own: Callable[[str], bool]) -> dict[str, str | None]:
    """Return the stream that the positions of the records after each operator are in, None where there are several.

    Made records have their own: it is named by the operator that makes them.
    `has_own` says of an output stream whether what goes on after it is read from there.
    """
    result: dict[str, str | None] = {}
    for operator in operators:
        spec = operator.spec
        before = {result[source] for source in operator.inputs}
        result[operator.id] = before.pop() if len(before) == 1 else None
        if spec.makes_records:
            result[operator.id] = operator.id
        elif spec.reads is not None:
            result[operator.id] = spec.reads
        elif spec.role == "output" and spec.writes is not None and has_own(spec.writes):
            result[operator.id] = spec.writes
    return result


def marking_of(
    table: Any, columns: Iterable[str], stream: str | None, inputs: BatchInputs, writer: str, *, made_of_one: bool
) -> Marking | None:
    """Return how the records of a batch are marked for a table with conditions; None for one without.

    `columns` are the records', `stream` that of their positions. `writer` begins the names of all sources: two who
    write the same table from the same stream don't take the other's marks for their own. So does a stream that was made
    anew have other names, and a bounded replay: what is read beside the main position has marks of its own, or the main
    position would be behind them. With on_replay="skip" replays are no others.
    """
    if not table.idempotent and table.newest_by is None:
        return None
    there = set(columns)
    again = table.idempotent and table.on_replay == "apply"
    replays = inputs.consumed is None
    sources = {}
    for ssp in inputs.ranges:
        identity = inputs.identities.get(ssp.qualified_stream)
        epoch = inputs.epochs.get(ssp, 0) if again else 0
        name = f"{writer}/{ssp}" + (f"@{identity[:8]}" if identity else "")
        sources[str(ssp)] = MarkedSource(f"{name}~{epoch}", 0) if replays and epoch else MarkedSource(name, epoch)
    if made_of_one and SOURCE in there:
        return Marking((SOURCE,), SOURCE_OFFSET, sources, prefix=f"{writer}/")
    if ORIGIN in there:
        return Marking((ORIGIN, PARTITION), OFFSET, sources, prefix=f"{writer}/")
    return Marking((PARTITION,), OFFSET, sources, stream or "", f"{writer}/")


def producers_of(app: Application, writer: str) -> dict[str, str]:
    """Return under which name each operator appends to its stream: `writer`, with its number where it is not the first
    one to send there."""
    names: dict[str, str] = {}
    senders: Counter[str] = Counter()
    for operator in app.operators:
        target = operator.spec.target(app)
        if target is not None and target.kind == "stream":
            senders[target.name] += 1
            number = senders[target.name]
            names[operator.id] = writer if number == 1 else f"{writer}#{number}"
    return names
