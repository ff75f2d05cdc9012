"""`MessageStream`: the methods that add operators to an application.

Each method adds one operator and returns a new stream. The stream that it is called on does not
change and can be used again, which branches the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from pydantic import PositiveInt, SkipValidation

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.change_streams import followed_dataset
from dagster_adjunct.assets.reading.point_in_time import Known
from dagster_adjunct.orchestration.application.declared_lines import locate_errors
from dagster_adjunct.orchestration.application.graph import (
    DatasetHandle,
    OperatorGraph,
    OutputStream,
    OutputTable,
    RemoteTableHandle,
    to_dagster_name,
)
from dagster_adjunct.orchestration.operators import records, sends
from dagster_adjunct.orchestration.operators.calls import RecordFunction, SinkFunction
from dagster_adjunct.orchestration.operators.columns import DataFrameFunction, OnNullKey
from dagster_adjunct.orchestration.operators.dead_letters import SendDeadLetters
from dagster_adjunct.orchestration.operators.expectations import Expect, FailedRecords, build_expect
from dagster_adjunct.orchestration.operators.functions import build_flat_map
from dagster_adjunct.orchestration.operators.join_arguments import (
    JoinArguments,
    JoinOptions,
    build_dataset_join,
    build_lookup_join,
)
from dagster_adjunct.orchestration.operators.joins import Join, On, pair_key_columns
from dagster_adjunct.orchestration.operators.lookup_join import LookupJoin
from dagster_adjunct.orchestration.operators.lookups import (
    BeforeHistory,
    How,
    OnNullTime,
    Restate,
    Wait,
)
from dagster_adjunct.orchestration.operators.made_records import LateRecords
from dagster_adjunct.orchestration.operators.operator import Expectation, OnFail, Spec
from dagster_adjunct.orchestration.operators.stream_join import (
    HowStreams,
    StreamJoin,
    Within,
    build_stream_join,
)
from dagster_adjunct.orchestration.operators.table_outputs import SendToOutputTable
from dagster_adjunct.orchestration.operators.table_updates import (
    Expressions,
    SendToTable,
    build_update,
)
from dagster_adjunct.orchestration.operators.updates import Pairs, TableSend
from dagster_adjunct.orchestration.operators.windows.aggregates import Aggregation
from dagster_adjunct.orchestration.operators.windows.kinds import Kind
from dagster_adjunct.orchestration.operators.windows.window import Results, build_window
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.tables.operation import UpdateContract
from dagster_adjunct.resources.validation import validated_methods


def check_event_times(graph: OperatorGraph, operator: str, what: str) -> None:
    """Raise PlanningError if records reach `operator` from an input without an event time, or from
    an output stream, which does not store event times.

    `what` names in the error what needs event times.
    """
    to_visit = [operator]
    seen = set()
    while to_visit:
        above = graph.operators[to_visit.pop()]
        if above.id in seen or above.spec.over_time is not None:  # its results have an event time
            continue
        seen.add(above.id)
        if above.spec.role == "output":
            problem = (
                f"{what}: after {above.id}, records are read from {above.spec.writes}, which stores"
                " no event time."
            )
            step = (
                f"Put it before send_to, or read {above.spec.writes} in another application, with"
                " an event_time."
            )
            raise PlanningError(problem, step, operator=above.id, stream=above.spec.writes)
        to_visit += above.inputs
        if above.spec.reads is not None and above.spec.event_time is None:
            problem = f"{what}: the records of {above.spec.reads} have no event time."
            step = (
                f'Declare it at the input: app.input_stream("{above.spec.reads}", event_time="a'
                ' column", …), or event_time=ARRIVAL for the time when they were written to the'
                " stream."
            )
            raise PlanningError(problem, step, operator=above.id, stream=above.spec.reads)


def check_waiting_records(graph: OperatorGraph, operator: str, what: str) -> None:
    """Raise PlanningError if records that reach `operator` can't wait in the stream that they are
    read from: if it has no event time, if it has the changes of a dataset, or if windows and stream
    joins make them; `what` waits.
    """
    check_event_times(graph, operator, what)
    to_visit = [operator]
    while to_visit:
        above = graph.operators[to_visit.pop()]
        to_visit += above.inputs
        reads = above.spec.reads
        if reads is not None and followed_dataset(reads) is not None:
            problem = (
                f"{what} has wait=, and joins the records of {reads}: the changes of a commit are"
                " read together, and none can wait."
            )
            step = "Leave wait= out, or send the changes to a stream, and join that one's records."
            raise PlanningError(problem, step, operator=above.id, stream=reads)
        if above.spec.over_time is not None:
            problem = f"{what} has wait=, and {above.id} makes the records that it joins."
            step = (
                "Join the records before it; or send its results to a stream, and join them in"
                " another application, which reads this stream with an event time."
            )
            raise PlanningError(problem, step, operator=above.id)


def check_expectation(graph: OperatorGraph, operator: str, added: Expectation) -> None:
    """Raise PlanningError if another expectation has the name of the one that is added, or if it
    may fail a batch after something is written, as operators run in the order of definition.
    """
    for before in graph.operators.values():
        known = before.spec.expectation
        if known is not None and to_dagster_name(known.name) == to_dagster_name(added.name):
            problem = f"two expectations are called {added.name!r}: {before.id} and {operator}."
            raise PlanningError(problem, "Give one another name=.", operator=operator)
        if added.on_fail == "fail" and before.spec.writes is not None:
            problem = (
                f'{operator} has on_fail="fail", and {before.id} is defined before it: it would'
                f" write to {before.spec.writes} before the batch fails."
            )
            step = (
                'Define it before everything that is written, or choose on_fail="letter", "drop"'
                ' or "warn".'
            )
            raise PlanningError(problem, step, operator=operator)


# By what a method takes: how to declare it, and what to do with a stream instead.
_DECLARING_CALLS = {
    "dataset or remote table": "Pass what app.table(…) or app.local_table(…) returned.",
    "output stream or table": (
        "Pass what app.output_stream(…), app.output_table(…), app.table(…) or app.local_table(…)"
        " returned."
    ),
    "output stream": "Pass what app.output_stream(…) returned.",
    "remote table": "Pass what app.table(…) returned.",
}
_DECLARED_KINDS: dict[type, str] = {
    DatasetHandle: "a dataset",
    RemoteTableHandle: "a remote table",
    OutputStream: "an output stream",
    OutputTable: "an output table",
}
_ANOTHER_STREAM = {
    "dataset or remote table": (
        "join() takes tables. Join two streams with join_stream(other, on=…, within=…, name=…);"
        " or follow the other one as a table, app.table(unbounded_dataset(…)), or combine the"
        " records of both with merge()."
    )
}


def check_same_application(graph: OperatorGraph, target: Any) -> None:
    """Raise PlanningError if `target` belongs to another application than `graph` does."""
    if target.graph is graph:
        return
    if isinstance(target, MessageStream):
        name = target.operator
        step = (
            "Declare it with this application, too: an input in both is app.input_stream(…) of"
            " each."
        )
    else:
        name = target.name
        step = "Declare it with this application's table(), local_table() or output_stream()."
    problem = (
        f"{name!r} was declared by application {target.graph.name!r}, and is used by"
        f" {graph.name!r}."
    )
    raise PlanningError(problem, step, application=graph.name)


@locate_errors
@validated_methods
@dataclass(frozen=True, slots=True, eq=False)
class MessageStream:
    """The records that leave one operator of an application; methods add operators that take
    them.
    """

    graph: OperatorGraph = field(repr=False)
    operator: str

    def filter(
        self, condition: str | DataFrameFunction, *, keeps_partitioning: bool = False
    ) -> MessageStream:
        """Return the records that match a Spark SQL condition.

        A DataFrame function may be given instead; it must keep the columns. The partitioning is
        unknown after it, unless `keeps_partitioning=True` promises that records stay in their
        partitions.
        """
        return self.apply(records.build_filter(self.operator, condition, keeps_partitioning))

    def expect(self, condition: str, *, name: str, on_fail: OnFail = "warn") -> MessageStream:
        """Return the records, checked against a Spark SQL condition; null counts as failed.

        Records that fail are counted under `name`, which also names the asset check. With "warn"
        they are kept, with "drop" left out, and with "letter" `failed_records` returns them instead
        of this stream. With "fail" the first one fails the batch before anything is written.
        """
        operator = self.graph.next_id(Expect.kind, name)
        spec = build_expect(operator, condition, name, on_fail)
        check_expectation(self.graph, operator, Expectation(name, condition, on_fail))
        return self.apply(spec, name=name)

    def failed_records(self) -> MessageStream:
        """Return the records that the expectation before this diverted, on_fail="letter".

        They have their columns, and `failed_rule` with the name of the expectation.
        """
        step = 'Call it on the result of expect(…, on_fail="letter"): checked.failed_records().'
        self._check_diverts("failed_records", step)
        expected = self.graph.operators[self.operator].spec.expectation
        assert expected is not None
        return self.apply(FailedRecords(expected.name))

    def map(
        self, *expressions: str | DataFrameFunction, keeps_partitioning: bool = False
    ) -> MessageStream:
        """Return records whose columns are these Spark SQL expressions: "tailnum", "upper(x) as y",
        "*".

        One DataFrame function may be given instead. Plain names, "name as other" and "*" preserve
        the partitioning. It is unknown after a function, unless `keeps_partitioning=True` promises
        that records stay in their partitions and the partitioning columns keep their values.
        """
        return self.apply(records.build_map(self.operator, expressions, keeps_partitioning))

    def select(self, *columns: str) -> MessageStream:
        """Return records with exactly these columns: "tailnum", "dest as faa", or "upper(model)
        as model".
        """
        return self.apply(records.build_select(self.operator, columns))

    def with_columns(self, **columns: str) -> MessageStream:
        """Return records with all their columns and these Spark SQL expressions: gross="spent *
        1.2".

        An existing column of the same name is replaced in place. The partitioning stays known,
        unless a partitioning column is replaced.
        """
        return self.apply(records.build_with_columns(self.operator, columns))

    def flat_map(
        self,
        what: str | RecordFunction,
        *,
        schema: Schema | None = None,
        keep_empty: bool = False,
        keeps_partitioning: bool = False,
    ) -> MessageStream:
        """Return any number of records for each record, in order.

        - An expression, "split(words, ' ') as word", returns one for each element of an array, with
          all columns and the element; an entry of a map is a struct with `key` and `value`. A
          record without elements is dropped; with `keep_empty` it continues with null. The
          partitioning stays known, unless the element replaces a partitioning column.
        - A function is called in Spark tasks with each record, as a dictionary, and returns
          dictionaries with exactly the columns of `schema`. Their partitioning is unknown, unless
          `keeps_partitioning=True` promises that the partitioning columns keep their values.
        """
        return self.apply(
            build_flat_map(self.operator, what, schema, keep_empty, keeps_partitioning)
        )

    def merge(self, *others: MessageStream) -> MessageStream:
        """Return the records of this stream and of the others, which need the same columns of the
        same types.

        Columns have this stream's order. The partitioning stays known where all streams share it.
        Records of one stream keep their order; between streams there is none.
        """
        if not others:
            raise ConfigurationError(
                f"merge after {self.operator} got no other stream.",
                "Name those to merge with.",
                argument="others",
            )
        return self.apply(
            records.Merge((self.operator, *(other.operator for other in others))), *others
        )

    def broadcast(self, *, task: str = "task") -> MessageStream:
        """Return all records once per task, with the task's number (from 0) in the column `task`.

        The records of a batch must fit into the memory of each Spark executor.
        """
        records.check_task_column(
            task, f"broadcast after {self.operator} has task={task!r}", argument="task"
        )
        return self.apply(records.Broadcast(task))

    def partition_by(self, *columns: str, partitions: int | None = None) -> MessageStream:
        """Return the records repartitioned by `columns`: an intermediate stream.

        "upper(city) as city_key" adds a column to the records. Without `partitions`, the planner
        chooses the count.
        """
        names, computed = records.parse_key_columns(columns)
        before = self.with_columns(**computed) if computed else self
        return before.apply(records.build_partition_by(before.operator, names, partitions))

    def join(  # noqa: PLR0913
        self,
        table: SkipValidation[DatasetHandle | RemoteTableHandle],
        *,
        on: On,
        how: How = "inner",
        select: Sequence[str] | Mapping[str, str] | None = None,
        prefix: str = "",
        name: str | None = None,
        min_match_rate: float | None = None,
        args: Sequence[object] = (),
        function: RecordFunction | None = None,
        schema: Schema | None = None,
        as_of: str | None = None,
        before_history: BeforeHistory = "null",
        on_null_time: OnNullTime = "null",
        versions: Known = "now",
        wait: timedelta | Wait | None = None,
        restate: timedelta | Restate | None = None,
    ) -> MessageStream:
        """Return the records with the columns of the entry for their key, from a dataset or a
        remote table.

        `on` names every column of the dataset's key: "tailnum", ["origin", "time_hour"], or {stream
        column: dataset column}. `how` is "inner", or "left" to keep records without an entry.
        `select` lists the dataset's columns to add, "seats" or "year as plane_year"; the default is
        all except the key. `prefix` is put before names that `select` does not change. `name`
        replaces the dataset's name in the operator's id. `min_match_rate` (0 to 1) is the fraction
        of a run's records that must have an entry: below it the join's asset check fails, and the
        outputs are still written.

        Spark tasks call `function` with each record and its entry as dictionaries, the entry None
        where there is none; it returns a dictionary of the columns of `schema` to add, or None to
        drop the record.

        `as_of` names a timestamp or date column: each record is joined with the entry that was
        valid at that time, from a dataset with a history (`history=`, or `valid_from=` of
        versions). A record from before the history of its key has no entry, or the key's first one
        with before_history="oldest" (of a bounded dataset the one in the oldest version, if any),
        or fails the batch ("error"); a record whose time is null has no entry, or fails the batch
        with on_null_time="fail". With versions="known-then" it is the entry that the dataset served
        at that time, by the commit that was current then; the dataset needs no history, and what
        was discarded is before it. With `wait`, records wait at most this long, in their stream,
        until the watermark of the dataset (`watermark=`, or `valid_for=` of versions) has passed
        their event time; a `Wait` also says by which time, and can mark those that come too early.
        With `restate`, results follow later changes of the dataset: when entries have changed, the
        records with their keys that are at most this old are read again, and their results are sent
        in a new epoch; a `Restate` also has limits.

        A remote table is asked once for each key of a batch. `select` may give types of columns
        that the table does not declare, {"seats": "int"}; `args` are passed to the table's
        function.
        """
        kinds = (DatasetHandle, RemoteTableHandle)
        self._check_declared("join", table, kinds, "dataset or remote table")
        operator = self.graph.next_id(Join.kind, name or table.name)
        if name is not None:
            self.graph.check_join_name(name, operator)
        given = JoinArguments(operator, on, how, select, prefix, min_match_rate)
        options = JoinOptions(
            function,
            schema,
            as_of,
            before_history,
            on_null_time,
            versions,
            wait,
            restate,
            tuple(args),
        )
        spec: Join | LookupJoin
        if isinstance(table, RemoteTableHandle):
            spec = build_lookup_join(given, options, table.table)
        else:
            spec = build_dataset_join(given, options, table.dataset)
        if wait is not None:
            check_waiting_records(self.graph, self.operator, operator)
        return self.apply(spec, name=name or table.name)

    def join_stream(
        self,
        right: SkipValidation[MessageStream],
        *,
        on: On,
        within: Within,
        name: str,
        how: HowStreams = "inner",
        select: Sequence[str] | None = None,
        prefix: str = "",
        partition_by: str | Sequence[str] | None = None,
    ) -> MessageStream:
        """Return the pairs of records of this stream and of `right` with equal keys whose times are
        within a bound.

        Both streams need an event time. `within` is how far apart two times may be, or (before,
        after): how much earlier and later than this stream's record the other one may be. `on`
        names the key columns, the same in both, or {column here: column of `right`}. With
        how="left", "right" or "full" an unmatched record is emitted once, when the watermark has
        passed it. `select` lists the columns of `right` to add, "fee" or "fee as paid"; the default
        is all columns except the key, with `prefix` before their names. State is stored under
        `name`. Both streams must be partitioned by `partition_by`, a subset of this stream's
        columns in `on` (default: all of them); the result keeps that partitioning.
        """
        operator = self.graph.next_id(StreamJoin.kind, name)
        if not isinstance(right, MessageStream):
            raise PlanningError(
                f"{operator} got {getattr(right, 'name', None) or right!r:.60}: expected records of"
                " another stream.",
                'Pass a stream: app.input_stream("…", event_time=…), or the result of an operator.'
                " Join tables with join().",
                operator=operator,
            )
        spec = build_stream_join(operator, name, on, within, how, select, prefix, partition_by)
        for side in (self, right):
            check_event_times(self.graph, side.operator, operator)
        return self.apply(spec, right, name=name)

    def window(
        self,
        kind: Kind,
        *,
        by: str | Sequence[str],
        name: str,
        aggregates: Mapping[str, Aggregation],
        results: Results = "final",
        allowed_lateness: timedelta = timedelta(0),
        partition_by: str | Sequence[str] | None = None,
    ) -> MessageStream:
        """Return the aggregates of the records of each key in windows of their event time.

            clicks.window(Tumbling(timedelta(minutes=5)), by="page", name="views",
            aggregates={"views": Count()})

        The columns are those of `by`, `window_start`, `window_end` (exclusive) and the aggregates.
        With "final" results each window is emitted once: when the watermark has passed its end and
        `allowed_lateness`. With "updates" each batch emits the current state of the windows that it
        changed, with the boolean `final`, true once per window. State is stored under `name`, in
        the table `<application>-<name>`. Records must be partitioned by `partition_by`, a subset of
        `by` (default: all of it). `late_records` returns records that arrive too late.
        """
        check_event_times(self.graph, self.operator, f"window after {self.operator}")
        key, computed = records.parse_key_columns((by,) if isinstance(by, str) else by)
        before = self.with_columns(**computed) if computed else self
        spec = build_window(
            before.operator, kind, key, name, aggregates, results, allowed_lateness, partition_by
        )
        return before.apply(spec, name=name)

    def late_records(self) -> MessageStream:
        """Return the records that the stream join or window before this rejected: too late, or
        without a time or key.

        Their columns are `side` ("left" or "right" of a join, "" of a window), `why` ("late", "null
        time" or "null key"), `event_time`, and `record` as JSON.
        """
        step = (
            "Call it on the result of a join of two streams or of a window: joined.late_records()."
        )
        self._check_diverts("late_records", step)
        return self.apply(LateRecords())

    def send_to(  # noqa: PLR0913
        self,
        target: SkipValidation[OutputStream | OutputTable | RemoteTableHandle | DatasetHandle],
        contract: UpdateContract | None = None,
        *,
        on: On | None = None,
        on_null_key: OnNullKey = "fail",
        dead_letters: SkipValidation[OutputStream | None] = None,
        at_most: PositiveInt | None = None,
        args: Sequence[object] = (),
        deleted: str | None = None,
        marks_as: str | None = None,
    ) -> MessageStream:
        """Write the records and return the stream to continue with.

        After an output stream, that is the output stream, with its key and partitions; after any
        table, it is this stream. To an output table, each batch is one commit. The other arguments
        are for remote tables: `contract` declares that the records are updates, and whether they
        may insert a default first. `on` says where the records have the table's key, as for `join`:
        {column or path here: key column}; by default in columns of its names. A column is renamed,
        the value at a path is added. `on_null_key` says whether a record with a null key fails the
        batch or is counted and skipped. With `dead_letters`, records that the table rejects
        permanently go to that output stream before the batch is committed; more than `at_most`
        (100) in a batch fail it. `args` are passed to the table's function. A table with
        `idempotent` or `newest_by` stores marks, the positions of the last records that it applied;
        `marks_as` names this send there. Sending to an unbounded dataset writes changes to its
        input stream.

        A local table stores those columns of the records that it has, and keeps the last record of
        each key. Tombstones, and records that match the Spark SQL condition `deleted`, delete the
        entry of their key. `on_null_key` works as for remote tables.
        """
        kinds = (OutputStream, OutputTable, RemoteTableHandle, DatasetHandle)
        self._check_declared("send_to", target, kinds, "output stream or table")
        is_local = isinstance(target, DatasetHandle) and target.dataset.is_local
        if deleted is not None and not is_local:
            problem = f"send_to after {self.operator}: deleted is for local tables only."
            step = "Leave it out: other targets delete with tombstones."
            raise ConfigurationError(problem, step, argument="deleted")
        if isinstance(target, RemoteTableHandle):
            send = TableSend(target.name, contract, on_null_key, None, (*args,), marks_as=marks_as)
            send = replace(send, on=self._pair_key("send_to", target, on))
            return self._send_to_table("send_to", target, send, dead_letters, at_most)
        # By argument for remote tables, a value that is false if it was left out.
        given = {
            "contract": contract,
            "on": on,
            "on_null_key": on_null_key != "fail" and not is_local,
            "dead_letters": dead_letters,
            "args": args,
            "marks_as": marks_as,
        }
        unfit = [name for name, value in given.items() if value]
        if unfit:
            problem = (
                f"send_to after {self.operator} got {' and '.join(unfit)}, which only remote tables"
                " take."
            )
            raise ConfigurationError(problem, "Leave it out.", argument=unfit[0])
        if isinstance(target, OutputStream):
            self._refuse_second_writer(target)
            return self.apply(sends.SendToStream(target.name))
        if isinstance(target, OutputTable):
            self._refuse_second_writer(target)
            return self.apply(SendToOutputTable(target.name))
        if not is_local:
            return self._send_to_dataset(target.dataset)
        spec = sends.build_send_to_local(
            self.graph.name, self.operator, target.dataset, deleted, on_null_key
        )
        return self.apply(spec, name=target.name)

    def update(  # noqa: PLR0913
        self,
        table: SkipValidation[RemoteTableHandle],
        *,
        on: On | None = None,
        set: Expressions | None = None,
        add: Expressions | None = None,
        append: Expressions | None = None,
        remove: Sequence[str] = (),
        if_missing: Expressions | None = None,
        on_null_key: OnNullKey = "fail",
        dead_letters: SkipValidation[OutputStream | None] = None,
        at_most: PositiveInt | None = None,
        args: Sequence[object] = (),
        marks_as: str | None = None,
    ) -> MessageStream:
        """Update the table's record for the key of each record, and return this stream.

        `on` says where the records have the table's key, as for `join`: {column or path here: key
        column}; by default in columns of its names. `set` assigns columns, `add` adds numbers,
        `append` appends one value or a list of them to lists, each given as {table column: Spark
        SQL expression} or a list of columns that keep their names ("customer.email" is the column
        `email`, unless "as" gives another name); `remove` sets columns to null. `set`, `add` and
        `remove` may name values inside columns of structs, as `address.city`. `if_missing` is the
        record to start from where none exists, without the key, and may be empty ([]); without it a
        missing record fails the batch. The other arguments are those of `send_to`. A tombstone
        deletes the record.

            flights.update(planes, set={"last_dest": "dest"}, add={"flights": "1"},
            if_missing={"flights": "0"})
        """
        if isinstance(table, DatasetHandle | OutputStream | OutputTable):
            problem = (
                f"update after {self.operator}: {table.name!r} is not a remote table; only these"
                " take updates."
            )
            raise PlanningError(
                problem, "Send whole records to it with send_to().", operator=self.operator
            )
        self._check_declared("update", table, (RemoteTableHandle,), "remote table")
        what = f"update of {table.name} after {self.operator}"
        pairs = self._pair_key("update", table, on)
        sources = {name: name for name in table.key}  # by key column, where the records have it
        for source, name in pairs:
            sources[name] = source
        update = build_update(what, sources, set, add, append, remove, if_missing)
        if if_missing is None:
            contract = UpdateContract.UPDATE_ONLY
        else:
            contract = UpdateContract.UPDATE_WITH_DEFAULTS
        send = TableSend(
            table.name,
            contract,
            on_null_key,
            update=update,
            args=tuple(args),
            marks_as=marks_as,
            on=pairs,
        )
        return self._send_to_table("update", table, send, dead_letters, at_most)

    def sink(
        self,
        function: SinkFunction,
        *,
        returns: Schema | None = None,
        keeps_partitioning: bool = False,
    ) -> MessageStream:
        """Pass the records to a function, at least once per batch, and return the stream to
        continue with.

        Spark tasks call it with records of one partition, a pyarrow.RecordBatch in stream order,
        and a `SinkContext`. The records include hidden columns such as `__offset` and
        `__tombstone`.

        Without `returns`, the same records continue. With it, the function returns one row of these
        columns per record, in order, as a RecordBatch or Table, and these rows continue. They are
        recorded first: a repeated batch reuses them and does not call the function. Their
        partitioning is unknown, unless `keeps_partitioning=True` promises that the partitioning
        columns keep their values.
        """
        return self.apply(sends.build_sink(self.operator, function, returns, keeps_partitioning))

    def _pair_key(self, method: str, table: RemoteTableHandle, on: On | None) -> Pairs:
        """Return pairs (column or path of the records, key column); () if all names are equal."""
        if on is None:
            return ()
        what = f"{method} of {table.name} after {self.operator}"
        pairs = pair_key_columns(what, "table", table.name, table.key, on)
        if all(source == name for source, name in pairs):
            return ()
        return pairs

    def _send_to_table(
        self,
        method: str,
        target: RemoteTableHandle,
        send: TableSend,
        dead_letters: OutputStream | None,
        at_most: int | None,
    ) -> MessageStream:
        """Add a send to a remote table, and one of at most `at_most` (None: 100) dead letters of a
        batch if there is a stream for them; return the records that continue.

        Raises ConfigurationError for `at_most` without such a stream, and PlanningError for a
        stream that can't be written.
        """
        if send.marks_as is not None:
            check_name("marks", send.marks_as)
        if dead_letters is None:
            if at_most is not None:
                problem = f"{method} after {self.operator} has at_most, but no dead_letters."
                raise ConfigurationError(problem, "Give both, or neither.", argument="at_most")
            return self.apply(SendToTable(send), name=target.name)
        bound = 100 if at_most is None else at_most
        self._check_declared(
            f"{method}(dead_letters=)", dead_letters, (OutputStream,), "output stream"
        )
        self._refuse_second_writer(dead_letters)
        sent = self.apply(SendToTable(replace(send, dead_letters=bound)), name=target.name)
        sent.apply(SendDeadLetters(dead_letters.name, bound), name=target.name)
        return sent

    def _check_declared(
        self, method: str, passed: object, kinds: tuple[type, ...], what: str
    ) -> None:
        """Raise PlanningError unless `passed` is of one of these kinds, and declared by this
        application; `what` describes the kinds in errors.
        """
        if isinstance(passed, kinds):
            check_same_application(self.graph, passed)
            return
        where = f"{method} after {self.operator}"
        application = self.graph.name
        if isinstance(passed, MessageStream):
            problem = f"{where} got the records of {passed.operator}: expected a declared {what}."
            step = _ANOTHER_STREAM.get(what, _DECLARING_CALLS[what])
            raise PlanningError(problem, step, application=application, operator=passed.operator)
        name = getattr(passed, "name", None) or passed
        kind = _DECLARED_KINDS.get(type(passed))
        if kind is not None:
            found = f"which is {kind}"
        else:
            found = f"which application {application!r} has not declared"
        problem = f"{where} got {name!r}, {found}: expected a declared {what}."
        raise PlanningError(problem, _DECLARING_CALLS[what], application=application)

    def _refuse_second_writer(self, target: OutputStream | OutputTable) -> None:
        """Raise PlanningError for an output that an operator of the application writes already."""
        writer = self.graph.writers.get(target.name)
        if writer is not None:
            if isinstance(target, OutputTable):
                what = "output table"
                step = "Merge the records before they are sent, or declare another output table."
            else:
                what = "output stream"
                step = (
                    "Continue with the stream that the first send_to() returned, or declare another"
                    " output stream."
                )
            problem = (
                f"{what} {target.name!r} is used twice: by {writer} and after {self.operator}."
            )
            raise PlanningError(problem, step, stream=target.name, operator=self.operator)

    def _send_to_dataset(self, dataset: AdjunctDataset) -> MessageStream:
        """Add a send to a dataset's stream. Raises PlanningError for a dataset that takes none, and
        if the application also reads that stream.
        """
        name = dataset.name
        if dataset.stream is None:
            problem = (
                f"send_to after {self.operator}: dataset {name!r} is built from"
                f" {dataset.input}, not from a stream that an application could send to."
            )
            step = "Declare it with unbounded_dataset on a stream, or send to an output stream."
            raise PlanningError(problem, step, dataset=name, operator=self.operator)
        if not dataset.follows_changes:
            problem = (
                f"send_to after {self.operator}: dataset {name!r} is bounded, and its"
                " versions end with markers, which an application does not send."
            )
            step = "Declare it with unbounded_dataset, or send to an output stream."
            raise PlanningError(problem, step, dataset=name, operator=self.operator)
        self.graph.refuse_writing(dataset.stream, f"the input of dataset {name!r}")
        return self.apply(sends.SendToDataset(name), name=name)

    def _check_diverts(self, method: str, next_step: str) -> None:
        """Raise PlanningError unless the operator before diverts the records that `method`
        returns.
        """
        if self.graph.operators[self.operator].spec.diverts != method:
            what = method.replace("_", " ")
            problem = f"{method} after {self.operator}: this operator has no {what}."
            raise PlanningError(problem, next_step, operator=self.operator)

    def apply(self, spec: Spec, *others: MessageStream, name: str = "") -> MessageStream:
        """Add an operator, and return the records that leave it.

        Its inputs are this stream and `others`; `name` ends its id. The other methods do this for
        built-in operators.
        """
        for stream in others:
            check_same_application(self.graph, stream)
        inputs = (self.operator, *(stream.operator for stream in others))
        return MessageStream(self.graph, self.graph.add(spec, inputs, name))
