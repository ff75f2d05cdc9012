"""The parts of a plan on as-of joins, state, and sends to remote tables: order per key, marks,
effects of replays.

A mark is the position of the last record that a table has applied from a source partition; it skips
earlier ones.

A stream is ordered within a partition. If a table's key includes the unchanged partitioning columns
of the input, all records of one key come from one partition, and the table gets them in the order
of that, even after exchanges. Otherwise they come from several partitions, and only a time in the
records can order them. Sums need no order.

A local table is written while the batch runs: a join defined after a send sees its records in the
same batch, a join defined before it in the next one. A dataset with a stream takes its changes
between batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from dagster_adjunct.assets.declaration.dataset import UnboundedDataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.lookup_join import AnyTable
from dagster_adjunct.orchestration.operators.operator import Flow, Operator, PlanContext
from dagster_adjunct.orchestration.operators.stream_facts import Catalog, Columns, watermark_inputs
from dagster_adjunct.orchestration.operators.table_updates import ChangedColumns
from dagster_adjunct.orchestration.planner.columns import add_location, note_unless_strict
from dagster_adjunct.orchestration.planner.plan import (
    FedJoin,
    JoinByTime,
    PlannedState,
    PlannedTable,
)
from dagster_adjunct.resources.errors import PlanningError


def plan_joins_by_time(app: Application) -> tuple[JoinByTime, ...]:
    """Return the as-of joins, in order of definition."""
    joins = []
    for operator in app.operators:
        match = operator.spec.match
        if match is not None and match.dataset is not None and match.as_of is not None:
            by = match.as_of
            dataset = app.dataset(match.dataset)
            history = dataset.following.history if isinstance(dataset, UnboundedDataset) else None
            known = "its retained versions" if history is None else "its whole history"
            if isinstance(history, timedelta):
                known = f"{str(history).removesuffix(', 0:00:00')} before its newest change"
            joins.append(
                JoinByTime(
                    operator.id, match.dataset, by.column, by.before_history, by.on_null_time, known
                )
            )
    return tuple(joins)


STATE_REPLAY = (
    "A startpoint that goes back sends its records to it again, on top of its current rows:"
    " counters count them again. A bounded replay (until) sends it nothing."
)


def plan_fed_joins(app: Application) -> tuple[FedJoin, ...]:
    """Return the joins with datasets that the application itself sends records to: in which
    batch they see these.
    """
    last = {
        operator.spec.feeds: operator.id
        for operator in app.operators
        if operator.spec.feeds is not None
    }
    sent: dict[str, str] = {}
    joins = []
    for operator in app.operators:
        match = operator.spec.match
        feeds = operator.spec.feeds
        if match is not None and match.dataset in last:
            last_sent = sent.get(match.dataset) if app.dataset(match.dataset).is_local else None
            if last_sent is None:
                joins.append(FedJoin(operator.id, match.dataset, "next batch", None))
            else:
                whole = last_sent == last[match.dataset]
                joins.append(
                    FedJoin(
                        operator.id, match.dataset, "this batch" if whole else "both", last_sent
                    )
                )
        if feeds is not None:
            sent[feeds] = operator.id
    return tuple(joins)


def plan_state(app: Application) -> tuple[PlannedState, ...]:
    """Return the local tables that the application writes, each with its sends and the effect of
    a replay on it.
    """
    sends: dict[str, list[str]] = {}
    again = trace_records_read_again(app)
    for operator in app.operators:
        feeds = operator.spec.feeds
        if feeds is not None and app.dataset(feeds).is_owned_by(app.name):
            sends.setdefault(feeds, []).append(operator.id)
    planned = []
    for table, operators in sends.items():
        reached = any(again[operator].streams for operator in operators)
        holding = sorted({held for operator in operators for held in again[operator].held_by})
        if reached:
            replay = STATE_REPLAY
        else:
            replay = f"A startpoint changes nothing in it: {describe_holding(holding)}."
        planned.append(PlannedState(table, tuple(operators), replay))
    return tuple(planned)


@dataclass(frozen=True, slots=True)
class ReadAgain:
    """The input `streams` whose records, if they are read again, reach an operator's results again.

    Records of other streams are left out by the stateful operators `held_by` before it.
    """

    streams: frozenset[str] = frozenset()
    held_by: frozenset[str] = frozenset()


def trace_records_read_again(app: Application) -> dict[str, ReadAgain]:
    """Return, by operator id, which records that are read again it passes on."""
    found: dict[str, ReadAgain] = {}
    for operator in app.operators:
        spec = operator.spec
        before = [found[source] for source in operator.inputs]
        if spec.reads is not None:
            found[operator.id] = ReadAgain(frozenset({spec.reads}))
        elif spec.over_time is not None:
            found[operator.id] = ReadAgain(held_by=frozenset({operator.id}))
        else:
            found[operator.id] = ReadAgain(
                frozenset().union(*(one.streams for one in before)),
                frozenset().union(*(one.held_by for one in before)),
            )
    return found


def describe_holding(operators: Sequence[str]) -> str:
    """Return that these operators leave out records that are read again."""
    return (
        f"{' and '.join(operators)} {'leaves' if len(operators) == 1 else 'leave'} out records that"
        " were read before"
    )


def check_state_names(app: Application) -> None:
    """Raise PlanningError if an operator's state table would have the name of a declared
    dataset.
    """
    datasets = {dataset.name for dataset in app.datasets}
    for operator in app.operators:
        for state in operator.spec.states:
            name = f"{app.name}-{state}"
            if name in datasets:
                error = PlanningError(
                    f"{operator.id} keeps its state in the table {name!r}, and application"
                    f" {app.name!r} has a dataset of that name.",
                    "Rename the operator or the dataset.",
                    operator=operator.id,
                )
                raise add_location(error, operator)


def note_state(app: Application) -> Iterator[str]:
    """Yield a note for each stream join and window: its state tables, and the streams that its
    watermark depends on.

    Another note, an error in a strict application, says that it takes the updates of a window for
    records.
    """
    spans = watermark_inputs(app.operators)
    for operator in app.operators:
        name = operator.spec.over_time
        if name is None:
            continue
        tables = ", ".join(f"{app.name}-{state}" for state in operator.spec.states) or "no table"
        sources = []
        for stream, span in spans[name].items():
            declared = app.inputs[stream].event_time if stream in app.inputs else None
            words = "no event time" if declared is None else declared.describe()
            sources.append(f"{stream} ({words}{f', held back by {span}' if span else ''})")
        yield (
            f"{operator.id} keeps state under the name {name} ({tables}), each row until its"
            f" watermark has passed it: the lowest of all partitions of {' and '.join(sources)}."
        )
        for window in _find_updating_windows(app, operator):
            problem = (
                f"{operator.id} gets each update of a window of {window} as a separate record."
            )
            step = 'Keep only final results: .filter("final")'
            yield f"{note_unless_strict(app, operator, problem, f'{step} before it.')} {step}."


def _find_updating_windows(app: Application, operator: Operator) -> list[str]:
    """Return the ids of the windows whose updates, not only final results, reach an operator."""
    updating = []
    waiting = list(operator.inputs)
    seen = set[str]()
    while waiting:
        before = app.operator(waiting.pop())
        if before.id in seen or before.spec.keeps_only_final:
            continue
        seen.add(before.id)
        if before.spec.emits_updates:
            updating.append(before.id)
        elif before.spec.over_time is None:
            waiting.extend(before.inputs)
    return sorted(updating)


def name_writers(app: Application, writer: str) -> dict[str, str]:
    """Return the name under which the table stores the marks of each send to a remote table, by
    operator id.

    It is `writer`, followed for all but the first unnamed send by "#" and its `marks_as`, or its
    number among the unnamed ones. Sends to two declared tables over one table of a store are
    numbered together. Raises PlanningError for duplicate names, and for `marks_as` on a table
    without marks.
    """
    names: dict[str, str] = {}
    unnamed: Counter[str] = Counter()
    taken: dict[tuple[str, str], str] = {}
    for operator in app.operators:
        send = operator.spec.send
        if send is None:
            continue
        store = store_key(app, send.table)
        if send.marks_as is None:
            unnamed[store] += 1
        elif not has_marks(app.tables[send.table]):
            raise PlanningError(
                f"{operator.id}: marks_as={send.marks_as!r} names the marks of applied records, but"
                f" table {send.table} stores no marks: it is declared without idempotent and"
                " newest_by.",
                "Leave marks_as out, or declare the table with idempotent=True or newest_by.",
                operator=operator.id,
            )
        number = unnamed[store]
        name = (
            writer
            if send.marks_as is None and number == 1
            else f"{writer}#{send.marks_as or number}"
        )
        names[operator.id] = name
        other = taken.setdefault((store, name), operator.id)
        if other != operator.id:
            problem = (
                f"{operator.id}: table {send.table} would keep its marks under {name!r}, as those"
                f" of {other}: each would skip records that the other has applied."
            )
            raise PlanningError(
                problem, 'Give one of them another name: marks_as="…".', operator=operator.id
            )
    return names


def store_key(app: Application, table: str) -> str:
    """Return a text that is equal for declared tables which are over the same table of a store."""
    return repr(app.tables[table].write_function or table)


def has_marks(table: AnyTable) -> bool:
    return table.idempotent or table.newest_by is not None


def note_marks(app: Application) -> list[str]:
    """Return a warning for each idempotent table with several unnamed sends: their marks have
    the sends' numbers.
    """
    sends: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for operator in app.operators:
        send = operator.spec.send
        if send is not None and send.marks_as is None and app.tables[send.table].idempotent:
            store = store_key(app, send.table)
            names.setdefault(store, send.table)
            sends.setdefault(store, []).append(operator.id)
    return [
        f"Table {names[store]} tells {' and '.join(operators)} apart by their order: if one is"
        " added or removed before them, the others get its marks. Name all but the first:"
        ' marks_as="…".'
        for store, operators in sends.items()
        if len(operators) > 1
    ]


def note_storage(app: Application) -> list[str]:
    """Return what readers of the tables' stores should know about how values are stored."""
    found = []
    for name, table in app.tables.items():
        notes: dict[str, None] = {}
        for function in (table.read_function, table.write_function):
            describe = getattr(function, "storage_notes", list)
            notes |= dict.fromkeys(describe())
        found += [f"Table {name}: {note}" for note in notes]
    return found


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where the records that leave an operator come from: the input `streams`, which have
    `partitions` partitions.

    `flow` is their partitioning as if no exchange had moved them, `keyed` the input's partitioning
    columns, `lost_at` the operator that drops or changes these, and `why` the reason if there are
    none. `renumbered` is the operator that writes an output stream whose positions have replaced
    those of several inputs. With several inputs, `partitions` is
    0. `positions` is the stream that their positions are in, or the operator that gave them others.
       `made_by` is the
    operator whose results the records are, if it gives them an order of its own: of those with
    equal columns `keyed`.
    """

    flow: Flow
    streams: frozenset[str]
    why: str = ""
    partitions: int = 0
    keyed: tuple[str, ...] = ()
    lost_at: str = ""
    renumbered: str = ""
    positions: str = ""
    made_by: str = ""


@dataclass(frozen=True, slots=True)
class _SendConflicts:
    """A send to a table, and how other sends to that table conflict with it.

    `changed` are the columns that it changes, None for all. `same_columns` are the ids of the sends
    that change the same columns, so that the order between them matters; `other_columns` those that
    set other columns, which one newer record would hide. `mixed`: this send or one of
    `same_columns` adds or appends.
    """

    changed: ChangedColumns | None
    same_columns: Sequence[str] = ()
    other_columns: Sequence[str] = ()
    mixed: bool = False


def plan_tables(
    app: Application, catalog: Catalog, columns: Mapping[str, Columns]
) -> tuple[PlannedTable, ...]:
    """Return the sends to remote tables with the guaranteed order of records; `columns` are those
    after each operator.

    Raises PlanningError for a table that can't mark records: their offsets are not numbers, or a
    replay can't be recognised. For a strict application, it is also raised for an order per source
    partition only, and for a table that keeps the newest record and loses columns of late ones.
    """
    read: dict[str, _Origin] = {}
    tables = []
    sent = _find_send_conflicts(app, columns)
    writers = name_writers(app, app.name)
    again = trace_records_read_again(app)
    for operator in app.operators:
        read[operator.id] = _trace_origin(operator, app, catalog, read)
        send = operator.spec.send
        if send is None:
            continue
        (source,) = operator.inputs
        before = read[source]
        table = app.tables[send.table]
        planned = _plan_table(operator, table, before, sent[operator.id], again[source])
        for stream in sorted(before.streams) if has_marks(table) else ():
            if not catalog[stream].numbered:
                raise PlanningError(
                    f"{operator.id}: table {send.table} marks applied records by offset, and"
                    f" offsets of {stream} are not numbers that could be compared.",
                    "Send the records through a lake stream first; or leave idempotent and"
                    " newest_by out: a repeated batch then adds again.",
                    operator=operator.id,
                )
        if before.renumbered and table.on_replay == "skip":  # a replay can't be recognised
            raise PlanningError(
                f'{operator.id}: table {send.table} has on_replay="skip", which can\'t recognise'
                " replayed records: "
                f"{before.renumbered} combines {' and '.join(sorted(before.streams))} and gives"
                " records new positions.",
                f'Send them to the table before {before.renumbered}, or leave on_replay="skip"'
                " out.",
                operator=operator.id,
            )
        if app.strict and planned.harm:
            problem = (
                f"{operator.id}: application {app.name!r} is strict. Table {planned.table}:"
                f" {planned.harm}. The reason: {planned.why}."
            )
            raise PlanningError(problem, planned.mends, operator=operator.id)
        tables.append(replace(planned, marks=writers[operator.id]) if has_marks(table) else planned)
    return tuple(tables)


def _find_send_conflicts(
    app: Application, columns: Mapping[str, Columns]
) -> dict[str, _SendConflicts]:
    """Return, by operator id, which columns each send to a remote table changes, and which sends
    conflict with it.
    """
    to_tables: dict[str, dict[str, ChangedColumns | None]] = {}
    for operator in app.operators:
        if operator.spec.send is not None:
            (source,) = operator.inputs
            changed = operator.spec.changed(app, columns[source])
            to_tables.setdefault(store_key(app, operator.spec.send.table), {})[operator.id] = (
                changed
            )
    conflicts = {}
    for sends in to_tables.values():
        for one, changed in sends.items():
            same_columns = []
            other_columns = []
            for other, theirs in sends.items():
                if other == one:
                    continue
                if changed is None or theirs is None:
                    same_columns.append(other)
                    if changed is not theirs:
                        other_columns.append(other)
                    continue
                if changed.depends_on_order_with(theirs):
                    same_columns.append(other)
                if changed.set and theirs.set and changed.set != theirs.set:
                    other_columns.append(
                        other
                    )  # a newer record of one would hide the other's columns
            mixed = any(
                it is not None and it.adds for it in (changed, *(sends[it] for it in same_columns))
            )
            conflicts[one] = _SendConflicts(changed, same_columns, other_columns, mixed)
    return conflicts


def _trace_origin(
    operator: Operator, app: Application, catalog: Catalog, read: Mapping[str, _Origin]
) -> _Origin:
    spec = operator.spec
    context = PlanContext(operator.id, app, catalog)
    if spec.reads is not None:
        facts = catalog[spec.reads]
        flow = spec.flow(context, [])
        own = replace(flow, partitioned_by=facts.key)
        why = "" if facts.key or facts.partitions == 1 else f"{spec.reads} has no key"
        return _Origin(
            own, frozenset({spec.reads}), why, facts.partitions, facts.key, positions=spec.reads
        )
    before = [read[source] for source in operator.inputs]
    streams = frozenset(stream for one in before for stream in one.streams)
    if spec.ordered_by is not None:
        ordered = tuple(spec.ordered_by)
        flow = before[0].flow
        return _Origin(
            replace(flow, partitioned_by=ordered),
            streams,
            keyed=ordered,
            positions=operator.id,
            made_by=operator.id,
        )
    if len(before) > 1:
        flow = spec.flow(context, [one.flow for one in before])
        held_in = {one.positions for one in before}
        if (
            len(held_in) == 1
            and not spec.assigns_positions
            and not any(one.made_by or one.why for one in before)
        ):
            # Branches of one stream: their records are put back into its order.
            moved = not flow.partitioned_by and before[0].partitions != 1
            return replace(before[0], flow=flow, lost_at=operator.id if moved else "")
        several = "the records come from several streams or branches, which "
        renumbered = next((one.renumbered for one in before if one.renumbered), "")
        return _Origin(flow, streams, f"{several}{operator.id} merges", 0, renumbered=renumbered)
    (one,) = before
    if (
        spec.role is not None
    ):  # records of several input partitions have no order in new partitions, either
        return _enter_stream(operator, one)
    if (
        one.made_by
        and spec.keeps_only_final
        and one.keyed == tuple(app.operator(one.made_by).spec.ordered_by or ())
    ):
        final = one.flow.partitioned_by[:-1]  # without the window's start
        return replace(one, flow=replace(one.flow, partitioned_by=final), keyed=one.keyed[:-1])
    flow = spec.flow(context, [one.flow])
    lost = one.flow.partitioned_by and not flow.partitioned_by and one.partitions != 1
    positions = operator.id if spec.assigns_positions else one.positions
    return replace(
        one, flow=flow, lost_at=operator.id if lost else one.lost_at, positions=positions
    )


def _enter_stream(operator: Operator, one: _Origin) -> _Origin:
    """Return the origin of records that continue after they were repartitioned, or written to an
    output stream.
    """
    if operator.spec.role != "output":
        return one
    renumbered = operator.id if len(one.streams) > 1 else one.renumbered
    return replace(one, renumbered=renumbered, positions=operator.spec.writes or operator.id)


def _plan_table(
    operator: Operator, table: AnyTable, before: _Origin, sent: _SendConflicts, again: ReadAgain
) -> PlannedTable:
    by = before.flow.partitioned_by
    changed = sent.changed
    why = before.why
    if not why and before.partitions != 1 and (before.lost_at or not set(by) <= set(table.key)):
        streams = " and ".join(sorted(before.streams))
        lost = before.lost_at
        how = f", which {lost} drops or changes" if lost else ""
        key = ", ".join(table.key)
        why = (
            f"its key is ({key}), and {streams} is partitioned by ({', '.join(before.keyed)}){how}"
        )
        if before.made_by:
            keyed = ", ".join(before.keyed)
            why = (
                f"its key is ({key}), and {before.made_by} orders its results for each"
                f" ({keyed}){how}"
            )
    if not why and sent.same_columns:
        others = " and ".join(sent.same_columns)
        writes = "write" if len(sent.same_columns) > 1 else "writes"
        why = (
            f"{others} {writes} to it, too, and a batch writes all records of one send before the"
            " next"
        )
    harm = ""
    mends = ""
    if table.newest_by is not None:
        order = "newest"
        reason = f"the store keeps the newest record by {table.newest_by}"
        harm, mends = _describe_late_loss(sent)
    elif not why:
        order = "per key"
        reason = "all records of a key come from one partition"
        if before.made_by:
            reason = f"{before.made_by} emits results of a key in the order of their time"
        elif before.partitions == 1:
            reason = "its input has one partition"
    elif changed is not None and changed.only_sums and not sent.same_columns:
        if changed.begun:
            first = f", and the first one sets {', '.join(sorted(changed.begun))}"
        else:
            first = ""
        order = "any"
        reason = (
            "it only adds numbers, whose sum does not depend on the order while nothing is"
            f" deleted{first}: {why}"
        )
    else:
        order = "per source partition"
        reason = why
        harm = "an older record may replace a newer one"
        if changed is not None and not changed.set:
            harm = "an older record may append, or add to JSON, after a newer one"
        mends = _suggest_order(
            sent, by_key=before.partitions > 0, results=before.keyed if before.made_by else ()
        )
    replay = _describe_replay(order, table, changed is not None and changed.adds)
    left_out = f"unchanged: {describe_holding(sorted(again.held_by))}" if again.held_by else ""
    names = tuple(sorted(before.streams))
    reached = tuple(sorted(again.streams))
    replay = replay if reached else left_out
    return PlannedTable(
        operator.id,
        table.name,
        order,
        reason,
        replay,
        names,
        harm=harm,
        mends=mends,
        again=reached,
        left_out=left_out,
    )


def _suggest_order(sent: _SendConflicts, *, by_key: bool, results: Sequence[str]) -> str:
    """Return the next step: how to give a table the order that it lacks.

    `by_key` says that its input has an order, `results` by which columns the results of a window
    have one.
    """
    changed = sent.changed
    adds = changed is not None and changed.adds
    if sent.same_columns and (sent.mixed or sent.other_columns):
        return (
            f"Give it and {' and '.join(sent.same_columns)} columns or tables of their own; or"
            " bring their records together with merge() and send them once."
        )
    once = ", and declare the table with idempotent=True" if adds else ""
    if by_key and not sent.same_columns:
        ways = [f"partition the input by the table's key{once}"]
    else:
        ways = []
    if results and not sent.same_columns:
        ways = [f"let the table's key have the columns {', '.join(results)}"]
    if sent.other_columns:
        others = " and ".join(sent.other_columns)
        ways.append(f"give it and {others} tables of their own, and declare these with newest_by")
    elif changed is not None and changed.merged:
        if not by_key and not results:
            ways.append("let each input stream add to a column of its own")
    elif changed is not None and not changed.set:
        ways.append(
            "declare the table with idempotent=True, which appends each value once, and sort by a"
            " time in the values where the list is read"
        )
    else:
        both = 'newest_by="column" and idempotent=True' if adds else 'newest_by="column"'
        more = ", and additions of late records are still applied, once" if adds else ""
        ways.insert(
            0, f"declare the table with {both}, so that its store keeps the newest record{more}"
        )
    text = "; or ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


def _describe_late_loss(sent: _SendConflicts) -> tuple[str, str]:
    """Return what a table with `newest_by` may lose of this send's records, and the next step;
    ("", "") for nothing.
    """
    if sent.other_columns:
        return (
            (
                "newest_by compares whole records, so this send is skipped if"
                f" {' or '.join(sent.other_columns)} has sent a newer record, with other columns"
            ),
            (
                "Give each a table of its own; or partition the input by the table's key, leave"
                " newest_by out, and let each set columns of its own."
            ),
        )
    if sent.changed is not None and sent.changed.merged:
        merged = ", ".join(sorted(sent.changed.merged))
        return (
            (
                f"members that a late record adds to {merged} are skipped together with the columns"
                " that it sets"
            ),
            "Partition the input by the table's key, and leave newest_by out.",
        )
    return "", ""


def _describe_replay(order: str, table: AnyTable, adds: bool) -> str:
    """Return in words what a replay leaves of a table: "unchanged: …", "changed: …" or "older
    …".
    """
    if table.idempotent and table.on_replay == "skip":
        return (
            "unchanged: messages up to the last applied one of each key are skipped, and a bounded"
            " replay (until) writes nothing (idempotent, on_replay=skip)"
        )
    if table.newest_by is not None and not adds:
        return (
            f"unchanged: records that are older by {table.newest_by} are skipped, and the newest is"
            " written again"
        )
    if adds:
        often = "exactly once" if table.idempotent else "once, and again if a batch is repeated"
        return f"changed: additions are applied again, {often}"
    if order == "per key":
        return (
            "older while it runs, and as before at its end; a bounded replay (until) leaves it"
            " older until the next record of the key"
        )
    return (
        "older, possibly for good: records of one key come from several partitions, and the last"
        " one read wins, newest or not"
    )


def note_table_order(tables: tuple[PlannedTable, ...]) -> list[str]:
    """Return a warning for each table whose order may do harm."""
    return [
        (
            f"Table {table.table}: order holds per source partition only, because {table.why}:"
            f" {table.harm}. {table.mends}"
            if table.order == "per source partition"
            else f"Table {table.table}: {table.operator}: {table.harm}. {table.mends}"
        )
        for table in tables
        if table.harm
    ]
