"""What order the records of one key have on their way into a remote table, and what a replay does to it.

A stream has an order within a partition. Where the columns that choose the partition of an input are in a table's key,
unchanged, all records of one key come from one partition and the table gets them in its order, wherever they have to
move. Else they come from several, between which there is none but time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator, Spec
from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, PlanContext
from dagster_adjunct.orchestration.planner.plans.plan_parts import PlannedTable
from dagster_adjunct.orchestration.planner.table_writers import keeps_marks, writers_of
from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.stream_facts import Catalog
    from dagster_adjunct.orchestration.operators.spec.table_sends import TableSend


@dataclass(frozen=True, slots=True)
class _Read:
    """Of the records after an operator: the columns that choose the partition of their input, as they are called there,
    and the input streams. `keyed` are the columns as the input calls them, `lost_at` the operator that makes others of
    them; `why` says why there are none. `renumbered` is the output whose positions they have, where these don't tell
    those of the inputs."""

    flow: Flow
    streams: frozenset[str]
    why: str = ""
    partitions: int = 0
    keyed: tuple[str, ...] = ()
    lost_at: str = ""
    renumbered: str = ""


def planned_tables(app: Application, catalog: Catalog) -> tuple[PlannedTable, ...]:
    """Return each send to a remote table with the order that it keeps; refuses marks where offsets are no numbers.

    With `strict`, PlanningError for a table whose order holds per source partition only.
    """
    read: dict[str, _Read] = {}
    tables = []
    ways, writers = _ways_to_tables(app), writers_of(app)
    for operator in app.operators:
        read[operator.id] = _after(operator, app, catalog, read)
        send = operator.spec.sends
        if send is None:
            continue
        before = read[operator.inputs[0]]
        planned = _planned(operator, app, send, before, ways[operator.id])
        _check_offsets(planned, app, catalog, before)
        _check_recognised(planned, app, before)
        if app.strict and planned.order == "per source partition":
            raise PlanningError(
                f"{operator.id}: table {planned.table}: {planned.why}: an older record may replace a newer one, and "
                f"application {app.name!r} is strict.",
                'Declare the table with newest_by="column", its store keeps what is newest then; or partition the '
                "input by the table's key.",
                operator=operator.id,
            )
        tables.append(replace(planned, marks=writers[operator.id]) if keeps_marks(app.tables[send.table]) else planned)
    return tuple(tables)


def _ways_to_tables(app: Application) -> dict[str, list[str]]:
    """Return, for each operator that sends to a remote table, the others whose records may replace its own there."""
    to_tables: dict[str, list[Operator]] = {}
    for operator in app.operators:
        if operator.spec.sends is not None:
            to_tables.setdefault(operator.spec.sends.table, []).append(operator)
    return {
        one.id: [other.id for other in sends if other is not one and _may_replace(one.spec, other.spec)]
        for sends in to_tables.values()
        for one in sends
    }


def _may_replace(one: Spec, other: Spec) -> bool:
    """Whether it matters which of two sends to a table comes last: one sets what the other changes, or puts all."""
    first, second = one.changed, other.changed
    if first is None or second is None:
        return True
    return bool(first.set & (second.set | second.added)) or bool(second.set & first.added)


def _after(operator: Operator, app: Application, catalog: Catalog, read: Mapping[str, _Read]) -> _Read:
    spec = operator.spec
    context = PlanContext(operator.id, app, catalog)
    if spec.reads is not None:
        facts = catalog[spec.reads]
        flow = spec.flow(context, [])
        own = replace(flow, partitioned_by=facts.key)
        why = "" if facts.key or facts.partitions == 1 else f"{spec.reads} has no key"
        return _Read(own, frozenset({spec.reads}), why, facts.partitions, facts.key)
    before = [read[source] for source in operator.inputs]
    streams = frozenset(stream for one in before for stream in one.streams)
    if len(before) > 1:
        flow = spec.flow(context, [one.flow for one in before])
        several = "the records come from several streams, or by several ways, which "
        renumbered = next((one.renumbered for one in before if one.renumbered), "")
        return _Read(flow, streams, f"{several}{operator.id} brings together", 0, renumbered=renumbered)
    (one,) = before
    if spec.role is not None:  # other partitions, and the order between those of the input is none still
        columns = spec.flow(context, [one.flow]).columns
        renumbered = operator.id if spec.role == "output" and len(streams) > 1 else one.renumbered
        return replace(one, flow=replace(one.flow, columns=columns), renumbered=renumbered)
    flow = spec.flow(context, [one.flow])
    lost = one.flow.partitioned_by and not flow.partitioned_by and one.partitions != 1
    return replace(one, flow=flow, lost_at=operator.id if lost else one.lost_at)


def _planned(operator: Operator, app: Application, send: TableSend, before: _Read, ways: Sequence[str]) -> PlannedTable:
    table = app.tables[send.table]
    newest_by, idempotent = getattr(table, "newest_by", None), bool(getattr(table, "idempotent", False))
    skips = idempotent and getattr(table, "on_replay", "apply") == "skip"
    key = ", ".join(table.key)
    by = before.flow.partitioned_by
    why = before.why
    if not why and before.partitions != 1 and (before.lost_at or not set(by) <= set(table.key)):
        streams, lost = " and ".join(sorted(before.streams)), before.lost_at
        changed = f", which {lost} drops or changes" if lost else ""
        why = f"its key is ({key}), and {streams} is partitioned by ({', '.join(before.keyed)}){changed}"
    if not why and ways:
        why = f"{' and '.join(ways)} write to it, too: a batch has all records of one come before those of another"
    adds = operator.spec.adds
    if newest_by is not None:
        order, told = "newest", f"the store keeps what is newest by {newest_by}"
    elif not why:
        one = before.partitions == 1
        order, told = (
            "per key",
            "its input has one partition" if one else "all records of a key come from one partition",
        )
    else:
        order, told = "per source partition", why
    replay = replay_of(order, newest_by, idempotent, skips, adds)
    return PlannedTable(operator.id, send.table, order, told, replay, tuple(sorted(before.streams)))


def replay_of(order: str, newest_by: str | None, idempotent: bool, skips: bool, adds: bool) -> str:
    """Return in words what a table is after records were read again that it had before. Pure."""
    if skips:
        return (
            "unchanged: of each key, what comes before the last message that was applied is skipped, and a bounded "
            "replay (until) writes nothing (idempotent, on_replay=skip)"
        )
    if newest_by is not None and not adds:
        return f"unchanged: what is older by {newest_by} is skipped, and what is newest is written as it is"
    if adds:
        often = "once, whatever crashes" if idempotent else "once, and once more where a batch is run again"
        return f"changed: what was added and appended is applied again, {often}"
    if order == "per key":
        return (
            "older while it runs, and as before at its end; a bounded replay (until) leaves it older until the next "
            "record of the key"
        )
    return (
        "older, and it may stay so: records of one key come from several partitions, and the last that is read again "
        "wins, newest or not"
    )


def _check_offsets(planned: PlannedTable, app: Application, catalog: Catalog, before: _Read) -> None:
    table = app.tables[planned.table]
    if not keeps_marks(table):
        return
    for stream in sorted(before.streams):
        if not catalog[stream].numbered:
            raise PlanningError(
                f"{planned.operator}: table {planned.table} marks what it has had by offsets, and those of {stream} "
                "are no numbers that could be compared.",
                "Leave idempotent and newest_by out, or send the records through a lake stream first.",
                operator=planned.operator,
            )


def _check_recognised(planned: PlannedTable, app: Application, before: _Read) -> None:
    """Refuse to skip what is read again where nothing tells that it is."""
    if before.renumbered and getattr(app.tables[planned.table], "on_replay", "apply") == "skip":
        raise PlanningError(
            f'{planned.operator}: table {planned.table} is to skip what a startpoint reads again (on_replay="skip"), '
            f"and behind {before.renumbered}, where {' and '.join(sorted(before.streams))} are one stream, records "
            "that are read again have positions of their own.",
            f'Send them to the table before {before.renumbered}, or leave on_replay="skip" out.',
            operator=planned.operator,
        )


def order_notes(tables: tuple[PlannedTable, ...]) -> list[str]:
    """Return what there is to be warned of."""
    return [
        f"Table {table.table}: order holds per source partition only, because {table.why}: an older record may replace "
        'a newer one. Declare it with newest_by="column" to have its store keep what is newest.'
        for table in tables
        if table.order == "per source partition"
    ]
