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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, UnboundedDataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import (
    Flow,
    Operator,
    PlanContext,
    find_written,
    watermark_inputs,
)
from dagster_adjunct.orchestration.operators.stream_facts import Catalog, Columns
from dagster_adjunct.orchestration.operators.updates import ChangedColumns
from dagster_adjunct.orchestration.operators.waiting import WaitsFor, waits_by_input
from dagster_adjunct.orchestration.planner.columns import (
    add_location,
    arriving_columns,
    derive_flow,
    note_unless_strict,
)
from dagster_adjunct.orchestration.planner.planned import (
    FedJoin,
    JoinByTime,
    PlannedState,
    PlannedTable,
    PlannedWait,
)
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.paths import normal_path
from dagster_adjunct.resources.streams.system import LAKE
from dagster_adjunct.resources.tables.table import AnyTable


def plan_joins_by_time(app: Application) -> tuple[JoinByTime, ...]:
    """Return the as-of joins with datasets, in order of definition."""
    joins = []
    for operator in app.operators:
        match = operator.spec.match
        if match is None or match.dataset is None or match.as_of is None:
            continue
        by = match.as_of
        if by.known_then:
            known = "what it served then, as long as commits are kept"
        else:
            known = _describe_history(app.dataset(match.dataset))
        joins.append(
            JoinByTime(
                operator.id,
                match.dataset,
                as_of=by.column,
                before_history=by.before_history,
                on_null_time=by.on_null_time,
                known=known,
            )
        )
    return tuple(joins)


def _describe_history(dataset: AdjunctDataset) -> str:
    """Return how far back the history of a dataset goes, in words; without a declared history, only
    versions are kept.
    """
    history = None
    if isinstance(dataset, UnboundedDataset):
        history = dataset.following.history
    if history is None:
        return "its retained versions"
    if isinstance(history.keep, timedelta):
        return f"{str(history.keep).removesuffix(', 0:00:00')} before its newest change"
    return "its whole history"


def plan_waits(app: Application) -> tuple[PlannedWait, ...]:
    """Return the joins whose records wait for their dataset, input stream by input stream."""
    planned = []
    for stream, waits in waits_by_input(app.operators).items():
        declared = app.inputs[stream].event_time
        assert declared is not None, "records without event times can't wait"
        for waiting in waits:
            planned.append(
                PlannedWait(
                    waiting.join,
                    waiting.dataset,
                    known_by=_describe_what_tells(app, waiting),
                    stream=stream,
                    time=declared.expression,
                    wait=waiting.wait.describe(),
                )
            )
    return tuple(planned)


def _describe_what_tells(app: Application, waiting: WaitsFor) -> str:
    """Return in words what tells up to which time the dataset of a join is complete."""
    if app.dataset(waiting.dataset).follows_changes:
        return "its changes"
    if waiting.over_time:
        return "its newest version"
    return "its current version"


STATE_REPLAY = (
    "A startpoint that goes back sends its records to it again, on top of its current rows:"
    " counters count them again. A bounded replay (until) sends it nothing."
)


def plan_fed_joins(app: Application) -> tuple[FedJoin, ...]:
    """Return the joins with datasets that the application itself sends records to, each with the
    batch in which it sees these records.

    A join sees in the same batch what is sent to a local table before the join, and in the next
    batch everything else. `last_send` is the last send of the former, None without one.
    """
    # By dataset, the last send to it: of all operators, and of those before the join.
    last_of_all = {operator.spec.feeds: operator.id for operator in app.operators}
    last_so_far: dict[str | None, str] = {}
    joins = []
    for operator in app.operators:
        match = operator.spec.match
        if match is not None and match.dataset is not None and match.dataset in last_of_all:
            last_send = None
            if app.dataset(match.dataset).is_local:
                last_send = last_so_far.get(match.dataset)
            sees: Literal["this batch", "next batch", "both"]
            if last_send is None:
                sees = "next batch"
            elif last_send == last_of_all[match.dataset]:
                sees = "this batch"
            else:
                sees = "both"
            joins.append(FedJoin(operator.id, match.dataset, sees, last_send))
        last_so_far[operator.spec.feeds] = operator.id
    return tuple(joins)


def check_expectations(app: Application) -> None:
    """Raise PlanningError for an expectation that no batch would check, because its records reach
    no output, and for one whose diverted records would be lost.
    """
    reaching_outputs = find_written(app.operators)
    sends_failed: set[str] = set()  # expectations whose failed records reach an output
    for operator in reaching_outputs:
        if operator.spec.reads_diverted:
            sends_failed.update(operator.inputs)
    for operator in app.operators:
        expected = operator.spec.expectation
        if expected is None:
            continue
        is_lost = operator not in reaching_outputs
        if reaching_outputs and is_lost:  # that nothing at all is written is a note only
            problem = f"{operator.id} is never checked: its records reach no output."
            step = "Continue with the stream that expect() returns, and send it somewhere."
            raise PlanningError(problem, step, operator=operator.id)
        if expected.on_fail == "letter" and operator.id not in sends_failed:
            problem = (
                f'{operator.id} has on_fail="letter", and its failed records are sent nowhere.'
            )
            step = (
                "Send them to a stream, checked.failed_records().send_to(…) of what expect()"
                ' returned; or choose on_fail="drop".'
            )
            raise PlanningError(problem, step, operator=operator.id)


def plan_state(app: Application) -> tuple[PlannedState, ...]:
    """Return the local tables that the application writes, each with its sends and the effect of
    a replay on it.
    """
    sends: dict[str, list[str]] = {}  # the operators, by local table
    again = trace_records_read_again(app)
    for operator in app.operators:
        feeds = operator.spec.feeds
        if feeds is not None and app.dataset(feeds).is_owned_by(app.name):
            sends.setdefault(feeds, []).append(operator.id)
    planned = []
    for table, operators in sends.items():
        replayed = ReadAgain.union(again[operator] for operator in operators)
        if replayed.streams:
            replay = STATE_REPLAY
        else:
            replay = f"A startpoint changes nothing in it: {replayed.describe_holding()}."
        planned.append(PlannedState(table, tuple(operators), replay))
    return tuple(planned)


@dataclass(frozen=True, slots=True)
class ReadAgain:
    """The input `streams` whose records reach an operator's results again if they are read again.

    The stateful operators `held_by` before it leave out such records of other streams.
    """

    streams: frozenset[str] = frozenset()
    held_by: frozenset[str] = frozenset()

    @classmethod
    def union(cls, several: Iterable[ReadAgain]) -> ReadAgain:
        """Return the streams and stateful operators of all of `several`."""
        streams: set[str] = set()
        held_by: set[str] = set()
        for each in several:
            streams |= each.streams
            held_by |= each.held_by
        return cls(frozenset(streams), frozenset(held_by))

    def describe_holding(self) -> str:
        """Return the sentence that the operators `held_by` leave out records that are read
        again.
        """
        leaves = "leaves" if len(self.held_by) == 1 else "leave"
        operators = " and ".join(sorted(self.held_by))
        return f"{operators} {leaves} out records that were read before"


def trace_records_read_again(app: Application) -> dict[str, ReadAgain]:
    """Return, by operator id, the input streams whose records the operator passes on again when
    they are read again.
    """
    found: dict[str, ReadAgain] = {}
    for operator in app.operators:
        if operator.spec.reads is not None:
            found[operator.id] = ReadAgain(frozenset({operator.spec.reads}))
        elif operator.spec.over_time is not None:
            found[operator.id] = ReadAgain(held_by=frozenset({operator.id}))
        else:
            found[operator.id] = ReadAgain.union(found[source] for source in operator.inputs)
    return found


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

    Another note, an error in a strict application, warns of an operator that gets each update of a
    window as a record of its own.
    """
    spans = watermark_inputs(app.operators)
    for operator in app.operators:
        name = operator.spec.over_time
        if name is None:
            continue
        tables = "no table"
        if operator.spec.states:
            tables = ", ".join(f"{app.name}-{state}" for state in operator.spec.states)
        sources = [_describe_time(app, stream, span) for stream, span in spans[name].items()]
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


def _describe_time(app: Application, stream: str, held_back: timedelta) -> str:
    """Return an input stream with its event time, and by how much a watermark holds it back."""
    words = "no event time"
    if stream in app.inputs:
        declared = app.inputs[stream].event_time
        if declared is not None:
            words = declared.describe()
    if held_back:
        words += f", held back by {held_back}"
    return f"{stream} ({words})"


def _find_updating_windows(app: Application, operator: Operator) -> list[str]:
    """Return the ids of the windows whose updates, not only final results, reach an operator.

    Windows before another operator with state are left out: that one has a note of its own.
    """
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


def check_replaced_rows(app: Application) -> None:
    """Raise PlanningError for records without positions in one input stream that are sent to an
    output table in which results replace earlier ones.
    """
    made_of = _trace_parts(app)
    for operator in app.operators:
        parts = made_of[operator.id]
        has_positions_of_one_input = len(parts) == 1
        table = app.output_tables.get(operator.spec.writes or "")
        if table is None or table.on_replay != "replace" or has_positions_of_one_input:
            continue
        problem = (
            f'{operator.id}: output table {table.name} has on_replay="replace", and its records are'
            f" made of {' and '.join(sorted(parts))}: they have no positions in one input, by"
            " which they could be replaced."
        )
        step = (
            'Declare the table with on_replay="append", or send what is made of each input to a'
            " table of its own."
        )
        raise PlanningError(problem, step, operator=operator.id)


def _trace_parts(app: Application) -> dict[str, set[str]]:
    """Return, by operator id, the input streams and the operators that gave its records their
    positions.
    """
    made_of: dict[str, set[str]] = {}
    for operator in app.operators:
        spec = operator.spec
        parts = set()
        for source in operator.inputs:
            parts |= made_of[source]
        if spec.reads is not None:
            parts = {spec.reads}
        elif spec.assigns_positions:
            parts.add(operator.id)
        made_of[operator.id] = parts
    return made_of


def note_merged_records(app: Application) -> Iterator[str]:
    """Yield a note for each send of merged records of several inputs to a stream of the lake:
    readers of the latest results need their positions in one.
    """
    made_of = _trace_parts(app)
    for operator in app.operators:
        stream = operator.spec.writes
        parts = made_of[operator.id]
        are_merged = len(parts) > 1 and parts <= app.inputs.keys()
        if not are_merged or operator.spec.role != "output" or stream is None:
            continue
        if split_stream_name(stream).system != LAKE:
            continue
        yield (
            f"{operator.id}: the records of {stream} are merged from {' and '.join(sorted(parts))},"
            ' and have no positions of one input. So it can\'t be read with epochs="latest", which'
            " leaves out what a replay has replaced. For that, send what is made of each input to"
            " a stream of its own."
        )


def name_writers(app: Application, writer: str) -> dict[str, str]:
    """Return the name under which the table stores the marks of each send to a remote table, by
    operator id.

    The first send without `marks_as` has the name `writer`. Others have "#" after it, and then
    their `marks_as` or their number among those without. Sends to two declared tables over one
    table of a store are numbered together. Raises PlanningError for duplicate names, and for
    `marks_as` on a table without marks.
    """
    names: dict[str, str] = {}
    unnamed: Counter[str] = Counter()
    senders: dict[tuple[str, str], str] = {}  # by table of a store and name
    for operator in app.operators:
        send = operator.spec.send
        if send is None:
            continue
        store = store_key(app, send.table)
        name = writer
        if send.marks_as is None:
            unnamed[store] += 1
            if unnamed[store] > 1:
                name = f"{writer}#{unnamed[store]}"
        else:
            name = f"{writer}#{send.marks_as}"
            if not has_marks(app.tables[send.table]):
                raise PlanningError(
                    f"{operator.id}: marks_as={send.marks_as!r} names the marks of applied"
                    f" records, but table {send.table} stores no marks: it is declared without"
                    " idempotent and newest_by.",
                    "Leave marks_as out, or declare the table with idempotent=True or newest_by.",
                    operator=operator.id,
                )
        names[operator.id] = name
        other = senders.setdefault((store, name), operator.id)
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
    """Whether a table stores which records it has applied."""
    return table.idempotent or table.newest_by is not None


def note_marks(app: Application) -> list[str]:
    """Return a warning for each idempotent table with several sends without `marks_as`: their marks
    are stored under numbers, which change if a send is added or removed.
    """
    sends: dict[str, list[Operator]] = {}  # by table of a store
    for operator in app.operators:
        send = operator.spec.send
        if send is not None and send.marks_as is None and app.tables[send.table].idempotent:
            sends.setdefault(store_key(app, send.table), []).append(operator)
    notes = []
    for first, *others in sends.values():
        if others:
            assert first.spec.send is not None
            together = " and ".join(operator.id for operator in (first, *others))
            notes.append(
                f"Table {first.spec.send.table} tells {together} apart by their order: if one is"
                " added or removed before them, the others get its marks. Name all but the first:"
                ' marks_as="…".'
            )
    return notes


def note_storage(app: Application) -> list[str]:
    """Return what readers of the tables' stores should know about how values are stored, as far as
    the tables' functions have `storage_notes`.
    """
    found = []
    for name, table in app.tables.items():
        notes: dict[str, None] = {}
        for function in (table.read_function, table.write_function):
            describe = getattr(function, "storage_notes", None)
            if describe is not None:
                notes |= dict.fromkeys(describe())
        found += [f"Table {name}: {note}" for note in notes]
    return found


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where the records that leave an operator come from, and what is left of their order there.

    They are from the input `streams`. If that is one, it has `partitions` partitions by the columns
    `keyed`; `partitions` is 0 for several inputs. `flow` is the partitioning as if no exchange had
    moved the records. `why` is the reason if they have no order by columns, and `lost_at` the
    operator that drops or changes the columns `keyed`.

    `positions` is the stream that their positions are in, or the operator that gave them others.
    `renumbered` is the operator that writes an output stream whose positions have replaced those of
    several inputs. `made_by` is set for the results of an operator that orders results with equal
    columns `keyed` by time.
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

    @property
    def results_by(self) -> tuple[str, ...]:
        """The columns for whose values the results of `made_by` have an order."""
        return self.keyed if self.made_by else ()


@dataclass(frozen=True, slots=True)
class _SendConflicts:
    """A send to a table, and how other sends to that table conflict with it.

    `changed` are the columns that it changes. `same_columns` are the ids of the sends that change
    the same columns, so that the order between them and this send matters. `other_columns` are the
    ids of those that set other columns: where the newest record wins, it would hide those columns
    of an older one. `mixed`: this send or one of `same_columns` adds or appends. `idempotent`: the
    table is declared so. `on` is the argument by which the table would get its key from what the
    records are partitioned by, if the key is only a copy of that.
    """

    changed: ChangedColumns
    same_columns: Sequence[str]
    other_columns: Sequence[str]
    mixed: bool
    idempotent: bool = False
    on: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs_no_order(self) -> bool:
        """Whether this is the only send that changes its columns, and it only adds numbers."""
        return self.changed.only_sums and not self.same_columns


def plan_tables(
    app: Application, catalog: Catalog, columns: Mapping[str, Columns], *, writer: str
) -> tuple[PlannedTable, ...]:
    """Return the sends to remote tables with the guaranteed order of records; `columns` are those
    after each operator, and `writer` is the name by which tables know the application.

    Raises PlanningError for a table that can't mark records: their offsets are not numbers, or a
    replay can't be recognised. For a strict application, it is also raised for an order per source
    partition only, and for a table that keeps the newest record and loses columns of late ones.
    `name_writers` raises for names of marks.
    """
    origins: dict[str, _Origin] = {}
    tables = []
    sent = _find_send_conflicts(app, columns)
    writers = name_writers(app, writer)
    again = trace_records_read_again(app)
    for operator in app.operators:
        origins[operator.id] = _trace_origin(operator, app, catalog, columns, origins)
        send = operator.spec.send
        if send is None:
            continue
        (source,) = operator.inputs
        table = app.tables[send.table]
        before = origins[source]
        this = replace(
            sent[operator.id],
            idempotent=table.idempotent,
            on=_find_copied_key(app, operator, send.key_pairs(table.key), before, columns),
        )
        planned = _plan_table(operator, table, before, this, again[source])
        if has_marks(table):
            _check_marks(operator, table, before, catalog)
            planned = replace(planned, marks=writers[operator.id])
        if app.strict and planned.harm:
            problem = (
                f"{operator.id}: application {app.name!r} is strict. Table {planned.table}:"
                f" {planned.harm}. The reason: {planned.why}."
            )
            raise PlanningError(problem, planned.mends, operator=operator.id)
        tables.append(planned)
    return tuple(tables)


def _find_copied_key(
    app: Application,
    operator: Operator,
    key: Sequence[tuple[str, str]],
    before: _Origin,
    columns: Mapping[str, Columns],
) -> dict[str, str]:
    """Return the `on` by which a send would get the table's key from the columns, or paths, that
    the records are partitioned by; {} unless the `key`, as pairs (name in the records, column of
    the table), has copies of all of these.
    """
    partitioned_by = before.flow.partitioned_by
    if before.lost_at or not partitioned_by:
        return {}
    copied = _find_copies(app, operator, [name for name, _ in key], partitioned_by, columns)
    on = {copied.get(name, name): column for name, column in key}
    if not copied or not set(partitioned_by) <= set(on):
        return {}
    return on


def _find_copies(
    app: Application,
    operator: Operator,
    names: Collection[str],
    originals: Collection[str],
    columns: Mapping[str, Columns],
) -> dict[str, str]:
    """Return which of these columns are copies of which of the originals, among the records that
    arrive at an operator.
    """
    before = {name: name for name in (*names, *originals)}
    found: dict[str, str] = {}
    for above in _list_above(app, operator):
        before = _trace_above(above, before, columns)
        by_source = {before[name]: name for name in originals if name in before}
        for name in names:
            original = by_source.get(before.get(name, ""), name)
            if original != name:
                found.setdefault(name, original)
    return found


def _list_above(app: Application, operator: Operator) -> Iterator[Operator]:
    """Yield the operators above this one, up to the first that has not one input."""
    while len(operator.inputs) == 1:
        operator = app.operator(operator.inputs[0])
        if len(operator.inputs) != 1:
            return
        yield operator


def _trace_above(
    operator: Operator, names: Mapping[str, str], columns: Mapping[str, Columns]
) -> dict[str, str]:
    """Return where values were before an operator, by the key of `names`, which says where they are
    after it; without those that it computes.
    """
    arriving = columns[operator.inputs[0]]
    traced = {}
    for name, after in names.items():
        source = operator.spec.came_from(after, arriving)
        if source is not None:
            traced[name] = normal_path(source)
    return traced


def _check_marks(operator: Operator, table: AnyTable, before: _Origin, catalog: Catalog) -> None:
    """Raise PlanningError if a table can't mark records: their offsets are not numbers, or a
    replay can't be recognised.
    """
    for stream in sorted(before.streams):
        if not catalog[stream].numbered:
            raise PlanningError(
                f"{operator.id}: table {table.name} marks applied records by offset, and"
                f" offsets of {stream} are not numbers that could be compared.",
                "Send the records through a lake stream first; or leave idempotent and"
                " newest_by out: a repeated batch then adds again.",
                operator=operator.id,
            )
    if before.renumbered and table.on_replay == "skip":
        raise PlanningError(
            f'{operator.id}: table {table.name} has on_replay="skip", which can\'t recognise'
            f" replayed records: {before.renumbered} combines"
            f" {' and '.join(sorted(before.streams))} and gives records new positions.",
            f'Send them to the table before {before.renumbered}, or leave on_replay="skip" out.',
            operator=operator.id,
        )


def _find_send_conflicts(
    app: Application, columns: Mapping[str, Columns]
) -> dict[str, _SendConflicts]:
    """Return, by operator id, which columns each send to a remote table changes, and which sends
    conflict with it.
    """
    # By table of a store, and operator that sends to it.
    to_tables: dict[str, dict[str, ChangedColumns]] = {}
    for operator in app.operators:
        if operator.spec.send is not None:
            (source,) = operator.inputs
            sends = to_tables.setdefault(store_key(app, operator.spec.send.table), {})
            sends[operator.id] = operator.spec.changed(app, columns[source])
    conflicts = {}
    for sends in to_tables.values():
        for operator_id in sends:
            conflicts[operator_id] = _compare_sends(operator_id, sends)
    return conflicts


def _compare_sends(operator: str, sends: Mapping[str, ChangedColumns]) -> _SendConflicts:
    """Return how the other sends to a table conflict with the send of `operator`. `sends` has the
    columns that each send changes, by operator.
    """
    changed = sends[operator]
    same = []
    hidden = []
    mixed = changed.adds
    for other, changed_by_other in sends.items():
        if other == operator:
            continue
        if changed.depends_on_order_with(changed_by_other):
            same.append(other)
            mixed = mixed or changed_by_other.adds
        if changed.hides(changed_by_other):
            hidden.append(other)
    return _SendConflicts(changed, same_columns=same, other_columns=hidden, mixed=mixed)


def _trace_origin(
    operator: Operator,
    app: Application,
    catalog: Catalog,
    columns: Mapping[str, Columns],
    origins: Mapping[str, _Origin],
) -> _Origin:
    """Return where the records that leave an operator come from; `origins` has the same of the
    operators before it.

    The cases come in this order: an input, results with an order of their own, several inputs, the
    beginning of a stream, the final results of a window, and any other operator.
    """
    spec = operator.spec
    context = PlanContext(operator.id, app, catalog, columns=arriving_columns(operator, columns))
    if spec.reads is not None:
        return _begin_origin(spec.reads, spec.flow(context, []), catalog)
    before = [origins[source] for source in operator.inputs]
    flows = [origin.flow for origin in before]
    flow = derive_flow(context, spec, flows, columns[operator.id])
    ordered_by = spec.ordered_by(context.columns)
    if ordered_by is not None:
        return _order_origin(operator, tuple(ordered_by), before)
    if len(before) > 1:
        return _merge_origins(operator, flow, before)
    (origin,) = before
    if spec.role is not None:
        # Also in new partitions, which mix them, records have only the order of their old ones.
        return _enter_stream(operator, origin)
    if spec.keeps_only_final and origin.made_by:
        maker = app.operator(origin.made_by)
        ordered_by = maker.spec.ordered_by(arriving_columns(maker, columns))
        if ordered_by is not None and origin.keyed == tuple(ordered_by):
            return _keep_final(origin)
    return _pass_on(operator, flow, origin)


def _keep_final(origin: _Origin) -> _Origin:
    """Return the origin of a window's final results. For updates, key and window are `keyed`; the
    final results of a key are in the order of windows, so the last column, the window's start, is
    left out.
    """
    flow = replace(origin.flow, partitioned_by=origin.flow.partitioned_by[:-1])
    return replace(origin, flow=flow, keyed=origin.keyed[:-1])


def _pass_on(operator: Operator, flow: Flow, origin: _Origin) -> _Origin:
    """Return the origin of records that stay in the stream that they came from."""
    if operator.spec.assigns_positions:
        origin = replace(origin, positions=operator.id)
    loses_key = origin.flow.partitioned_by and not flow.partitioned_by
    if loses_key and origin.partitions != 1:  # one partition has its order without a key
        origin = replace(origin, lost_at=operator.id)
    return replace(origin, flow=flow)


def _begin_origin(stream: str, flow: Flow, catalog: Catalog) -> _Origin:
    """Return the origin of records that are read from an input stream."""
    facts = catalog[stream]
    has_order = facts.key or facts.partitions == 1
    return _Origin(
        replace(flow, partitioned_by=facts.key),
        frozenset({stream}),
        why="" if has_order else f"{stream} has no key",
        partitions=facts.partitions,
        keyed=facts.key,
        positions=stream,
    )


def _order_origin(
    operator: Operator, ordered_by: tuple[str, ...], before: Sequence[_Origin]
) -> _Origin:
    """Return the origin of results to which an operator gives an order of its own."""
    return _Origin(
        replace(before[0].flow, partitioned_by=ordered_by),
        _all_streams(before),
        keyed=ordered_by,
        positions=operator.id,
        made_by=operator.id,
    )


def _merge_origins(operator: Operator, flow: Flow, before: Sequence[_Origin]) -> _Origin:
    """Return where the records of an operator with several inputs come from; their order is lost
    unless all inputs are branches of one stream.
    """
    first = before[0]
    has_order = not operator.spec.assigns_positions
    renumbered = ""
    for origin in before:
        if not renumbered:
            renumbered = origin.renumbered
        is_other_stream = origin.positions != first.positions
        if origin.made_by or origin.why or is_other_stream:
            has_order = False
    if has_order:
        # Branches of one stream: their records are put back into its order.
        loses_key = not flow.partitioned_by and first.partitions != 1
        return replace(first, flow=flow, lost_at=operator.id if loses_key else "")
    why = f"the records come from several streams or branches, which {operator.id} merges"
    return _Origin(flow, _all_streams(before), why=why, renumbered=renumbered)


def _all_streams(several: Sequence[_Origin]) -> frozenset[str]:
    """Return the input streams of all these records."""
    streams: set[str] = set()
    for origin in several:
        streams |= origin.streams
    return frozenset(streams)


def _enter_stream(operator: Operator, origin: _Origin) -> _Origin:
    """Return the origin of records that begin a stream: unchanged after an exchange; after an
    output stream, with the positions that they have there.
    """
    if operator.spec.role != "output":
        return origin
    if len(origin.streams) > 1:
        renumbered = operator.id
    else:
        renumbered = origin.renumbered
    positions = operator.spec.writes or operator.id
    return replace(origin, renumbered=renumbered, positions=positions)


@dataclass(frozen=True, slots=True)
class _TableOrder:
    """The guaranteed order of the records of a key; see `PlannedTable`."""

    order: str
    why: str
    harm: str = ""
    mends: str = ""


def _plan_table(
    operator: Operator, table: AnyTable, before: _Origin, sent: _SendConflicts, again: ReadAgain
) -> PlannedTable:
    """Return a send to a remote table with the order of its records, and the effect of a replay."""
    guaranteed = _decide_order(operator, table, before, sent)
    left_out = ""
    if again.held_by:
        left_out = f"unchanged: {again.describe_holding()}"
    if again.streams:
        replay = _describe_replay(guaranteed.order, table, sent.changed.adds)
    else:
        replay = left_out
    return PlannedTable(
        operator.id,
        table.name,
        order=guaranteed.order,
        why=guaranteed.why,
        replay=replay,
        streams=tuple(sorted(before.streams)),
        harm=guaranteed.harm,
        mends=guaranteed.mends,
        again=tuple(sorted(again.streams)),
        left_out=left_out,
    )


def _decide_order(
    operator: Operator, table: AnyTable, before: _Origin, sent: _SendConflicts
) -> _TableOrder:
    """Return the order of the records of a key in a table: "newest" if its store keeps the newest
    one, "per key" if the table gets them in order, "any" if their order does not matter, else "per
    source partition".
    """
    if table.newest_by is not None:
        reason = f"the store keeps the newest record by {table.newest_by}"
        return _add_late_loss(_TableOrder("newest", reason), sent)
    assert operator.spec.send is not None, "it sends to the table"
    why = _explain_disorder(operator.spec.send.key_sources(table.key), before, sent)
    if not why:
        return _TableOrder("per key", _explain_order(before))
    if sent.needs_no_order:
        first = ""
        if sent.changed.begun:
            first = f", and the first one sets {', '.join(sorted(sent.changed.begun))}"
        reason = (
            "it only adds numbers, whose sum does not depend on the order while nothing is"
            f" deleted{first}: {why}"
        )
        return _TableOrder("any", reason)
    harm = "an older record may replace a newer one"
    if sent.changed.sets_nothing:
        harm = "an older record may append, or add to JSON, after a newer one"
    return _TableOrder("per source partition", why, harm, _suggest_order(sent, before))


def _explain_order(before: _Origin) -> str:
    """Return why a table gets the records of a key in their order."""
    if before.made_by:
        return f"{before.made_by} emits results of a key in the order of their time"
    if before.partitions == 1:
        return "its input has one partition"
    return "all records of a key come from one partition"


def _explain_disorder(key: Sequence[str], before: _Origin, sent: _SendConflicts) -> str:
    """Return why a table does not get the records of a key in their order; "" if it does. `key`
    are the columns or paths where the records have the table's key.
    """
    if before.why:
        return before.why
    is_in_key = set(before.flow.partitioned_by) <= set(key) and not before.lost_at
    if before.partitions != 1 and not is_in_key:
        its_key = f"its key is ({', '.join(key)})"
        keyed = ", ".join(before.keyed)
        how = f", which {before.lost_at} drops or changes" if before.lost_at else ""
        if before.made_by:
            return f"{its_key}, and {before.made_by} orders its results for each ({keyed}){how}"
        streams = " and ".join(sorted(before.streams))
        return f"{its_key}, and {streams} is partitioned by ({keyed}){how}"
    if sent.same_columns:
        verb = "write" if len(sent.same_columns) > 1 else "writes"
        return (
            f"{' and '.join(sent.same_columns)} {verb} to it, too, and a batch writes all"
            " records of one send before the next"
        )
    return ""


def _suggest_order(sent: _SendConflicts, before: _Origin) -> str:
    """Return the next step: how to give a table the order that it lacks."""
    can_newest_by_order = not sent.mixed and not sent.other_columns
    if sent.same_columns and not can_newest_by_order:
        return (
            f"Give it and {' and '.join(sent.same_columns)} columns or tables of their own; or"
            " bring their records together with merge() and send them once."
        )
    by_key = _suggest_key(sent, before)
    text = "; or ".join(_suggest_table(sent, before, by_key))
    return f"{text[0].upper()}{text[1:]}."


def _suggest_key(sent: _SendConflicts, before: _Origin) -> list[str]:
    """Return how another key of the input or of the table would give the order; [] if none
    would.
    """
    if sent.same_columns:  # no key orders the records of two sends
        return []
    if before.results_by:
        return [f"let the table's key have the columns {', '.join(before.results_by)}"]
    if sent.on:
        pairs = ", ".join(f'"{name}": "{column}"' for name, column in sent.on.items())
        return [f"write on={{{pairs}}} in place of the copied key"]
    if before.partitions > 0:
        needs_marks = sent.changed.adds and not sent.idempotent
        once = ", and declare the table with idempotent=True" if needs_marks else ""
        return [f"partition the input by the table's key{once}"]
    return []


def _suggest_table(sent: _SendConflicts, before: _Origin, by_key: list[str]) -> list[str]:
    """Return the ways to give the order: those `by_key`, and a declaration of the table, which
    depends on how the send changes columns.
    """
    if sent.other_columns:
        others = " and ".join(sent.other_columns)
        apart = f"give it and {others} tables of their own, and declare these with newest_by"
        return [*by_key, apart]
    if sent.changed.merged:
        key_may_order = before.partitions > 0 or bool(before.results_by)
        if key_may_order:
            return by_key
        return [*by_key, "let each input stream add to a column of its own"]
    if sent.changed.sets_nothing:
        in_any_order = "sort by a time in the values where the list is read"
        if not sent.idempotent:
            in_any_order = (
                "declare the table with idempotent=True, which appends each value once, and"
                f" {in_any_order}"
            )
        return [*by_key, in_any_order]
    declared = 'newest_by="column"'
    more = ""
    if sent.changed.adds:
        if not sent.idempotent:
            declared += " and idempotent=True"
        more = ", and additions of late records are still applied, once"
    newest = f"declare the table with {declared}, so that its store keeps the newest record{more}"
    return [newest, *by_key]


def _add_late_loss(newest: _TableOrder, sent: _SendConflicts) -> _TableOrder:
    """Return the order `newest` of a table with `newest_by`, with the harm that it does: what it
    may lose of this send's records. Unchanged if it loses nothing.
    """
    if sent.other_columns:
        return replace(
            newest,
            harm=(
                "newest_by compares whole records, so this send is skipped if"
                f" {' or '.join(sent.other_columns)} has sent a newer record, with other columns"
            ),
            mends=(
                "Give each a table of its own; or partition the input by the table's key, leave"
                " newest_by out, and let each set columns of its own."
            ),
        )
    if sent.changed.merged:
        merged = ", ".join(sorted(sent.changed.merged))
        return replace(
            newest,
            harm=(
                f"members that a late record adds to {merged} are skipped together with the columns"
                " that it sets"
            ),
            mends="Partition the input by the table's key, and leave newest_by out.",
        )
    return newest


def _describe_replay(order: str, table: AnyTable, adds: bool) -> str:
    """Return in words what a replay leaves of a table with this `order` (`_decide_order`):
    "unchanged: …", "changed: …" or "older …". `adds`: the send adds or appends values.
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
    notes = []
    for table in tables:
        if not table.harm:
            continue
        if table.order == "per source partition":
            effect = f"order holds per source partition only, because {table.why}: {table.harm}"
        else:
            effect = f"{table.operator}: {table.harm}"
        notes.append(f"Table {table.table}: {effect}. {table.mends}")
    return notes
