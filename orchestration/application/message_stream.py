"""`MessageStream`: the operators of an application.

Every method adds one operator and returns a new stream; the stream that it is called on stays as it
was and may be used again, which branches the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.application.declared_handles import DatasetHandle, OutputStream, RemoteTableHandle
from dagster_adjunct.orchestration.application.joined_tables import ByTime, joined
from dagster_adjunct.orchestration.application.stream_over_time import StreamOverTime
from dagster_adjunct.orchestration.application.undeclared import not_declared
from dagster_adjunct.orchestration.operators.columns.update_columns import checked_update
from dagster_adjunct.orchestration.operators.inputs.broadcast_stream import Broadcast, checked_broadcast
from dagster_adjunct.orchestration.operators.joins.join import Join
from dagster_adjunct.orchestration.operators.records.filter import checked_filter
from dagster_adjunct.orchestration.operators.records.flat_map import checked_flat_map
from dagster_adjunct.orchestration.operators.records.map import checked_map
from dagster_adjunct.orchestration.operators.records.merge import checked_merge
from dagster_adjunct.orchestration.operators.records.partition_by import PartitionBy, checked_partition_by, key_columns
from dagster_adjunct.orchestration.operators.records.select import checked_select
from dagster_adjunct.orchestration.operators.records.with_columns import checked_with_columns
from dagster_adjunct.orchestration.operators.sends.dead_letters import SendDeadLetters
from dagster_adjunct.orchestration.operators.sends.send_to_local import checked_send_to_local
from dagster_adjunct.orchestration.operators.sends.send_to_stream import SendToStream
from dagster_adjunct.orchestration.operators.sends.send_to_table import SendToDataset, SendToTable
from dagster_adjunct.orchestration.operators.sends.sink import checked_sink
from dagster_adjunct.orchestration.operators.spec.table_sends import TableSend
from dagster_adjunct.resources.checked_numbers import check_whole_number
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.tables.partial_update import UpdateContract

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.operator_graph import OperatorGraph
    from dagster_adjunct.orchestration.operators.arguments import DataFrameFunction, OnNullKey
    from dagster_adjunct.orchestration.operators.columns.update_columns import Columns, Update
    from dagster_adjunct.orchestration.operators.functions.record_functions import RecordFunction
    from dagster_adjunct.orchestration.operators.joins.join_arguments import How, On
    from dagster_adjunct.orchestration.operators.spec.operator_spec import BeforeHistory, OnNullTime, Spec
    from dagster_adjunct.orchestration.operators.spec.sink_context import SinkFunction
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True, eq=False)
class MessageStream(StreamOverTime):
    """The records that leave one operator."""

    graph: OperatorGraph = field(repr=False)
    operator: str

    def filter(self, condition: str | DataFrameFunction, *, keeps_partitioning: bool = False) -> MessageStream:
        """Return the records that meet a Spark SQL condition.

        A DataFrame function may be given instead; it must keep the columns. Nothing is known after it of where records
        lie, unless `keeps_partitioning=True` promises that it leaves them there.
        """
        return self.apply(checked_filter(self.operator, condition, keeps_partitioning))

    def map(self, *expressions: str | DataFrameFunction, keeps_partitioning: bool = False) -> MessageStream:
        """Return records whose columns are these Spark SQL expressions: "tailnum", "upper(x) as y", "*".

        One DataFrame function may be given instead. Where records lie stays known through plain names,
        "name as other" and "*"; nothing is known after a function, unless `keeps_partitioning=True`
        promises that it neither changes nor moves the columns by which its records are partitioned.
        """
        return self.apply(checked_map(self.operator, expressions, keeps_partitioning))

    def select(self, *columns: str) -> MessageStream:
        """Return records with exactly these columns: "tailnum", "dest as faa", or "upper(model) as model"."""
        return self.apply(checked_select(self.operator, columns))

    def with_columns(self, **columns: str) -> MessageStream:
        """Return records with all their columns and these, which are Spark SQL expressions: gross="spent * 1.2".

        A column of the same name is replaced, in its place. Where records lie stays known, unless a column by which
        they are partitioned is replaced.
        """
        return self.apply(checked_with_columns(self.operator, columns))

    def flat_map(
        self,
        what: str | RecordFunction,
        *,
        schema: Schema | None = None,
        keep_empty: bool = False,
        keeps_partitioning: bool = False,
    ) -> MessageStream:
        """Return any number of records for each record, in their order.

        "split(words, ' ') as word" gives one for each element of an array (or entry of a map), with all columns and
        the element. A record without elements is gone; with `keep_empty` it goes on with null. A function is called in
        Spark's tasks with each record, as a dictionary, and returns dictionaries with exactly the columns of `schema`.
        Nothing is known of where these lie, unless `keeps_partitioning=True` promises that the columns by which the
        records are partitioned are as they were.
        """
        return self.apply(checked_flat_map(self.operator, what, schema, keep_empty, keeps_partitioning))

    def merge(self, *others: MessageStream) -> MessageStream:
        """Return the records of this stream and of the others, which have the same columns of the same types.

        The columns stand in this stream's order. Where records lie stays known where all streams agree on it. Records
        of one stream keep their order; between streams there is none.
        """
        if not others:
            raise ConfigurationError(
                f"merge after {self.operator} got no other stream.", "Name those to merge with.", argument="others"
            )
        return self.apply(checked_merge(self.operator, [other.operator for other in others]), *others)

    def broadcast(self, *, task: str = "task") -> MessageStream:
        """Return all the records for every task, each with the task's number, from 0, in the column `task`.

        They have to fit into memory, those of a batch, once for each of Spark's executors.
        """
        stream = f"{self.graph.name}-{self.graph.next_id(Broadcast.kind)}"
        return self.apply(checked_broadcast(self.operator, stream, task))

    def partition_by(self, *columns: str, partitions: int | None = None) -> MessageStream:
        """Return the records spread anew by `columns`: an intermediate stream.

        "upper(city) as city_key" is a column of the records from then on. The planner finds the count where
        `partitions` does not give it.
        """
        names, computed = key_columns(columns)
        before = self.with_columns(**computed) if computed else self
        stream = f"{self.graph.name}-{self.graph.next_id(PartitionBy.kind)}"
        return before.apply(checked_partition_by(before.operator, stream, names, partitions))

    def join(
        self,
        table: DatasetHandle | RemoteTableHandle,
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
    ) -> MessageStream:
        """Return the records with the columns of the entry for their key, in a dataset or in a remote table.

        `on` names every column of the dataset's key: "tailnum", ["origin", "time_hour"], or {stream
        column: dataset column}. `how` is "inner", or "left" to keep records without an entry. `select`
        lists the dataset's columns to add, "seats" or "year as plane_year"; without it all but the key
        are added. `prefix` goes before names that `select` does not change. `name` ends the operator's
        id, in place of the dataset's name. `min_match_rate` (0 to 1) is how many of a run's records have to meet an
        entry: below it the join's asset check fails, and the outputs are written all the same.

        `function` is called in Spark's tasks with each record and its entry as dictionaries, the entry None where there
        is none, and returns a dictionary of the columns of `schema`, which are added, or None to drop the record.

        `as_of` names a column, a timestamp or a date: each record meets the entry that was valid at that time, in a
        dataset that says what was valid when (`history=`, or `valid_from=` of versions). A record from before the
        history of its key meets nothing, with before_history="oldest" the oldest entry, or fails the batch ("error");
        one whose time is null meets nothing, or fails it with on_null_time="fail".

        In a remote table each key of a batch is looked up once. `select` may give the types of columns that the table
        does not declare, {"seats": "int"}; `args` are handed through to the table's function.
        """
        if not isinstance(table, DatasetHandle | RemoteTableHandle):
            raise self._not_declared(table, "join", "dataset or remote table")
        self._check_ours(table, table.name)
        operator = self.graph.next_id(Join.kind, name or table.name)
        if name is not None:
            check_name("join", name)
            taken = self.graph.join_called(name)
            if taken is not None:
                raise PlanningError(
                    f"two joins are called {name!r}: {taken} and {operator}.",
                    "Give one another name=.",
                    operator=operator,
                )
        by_time = ByTime(as_of, before_history, on_null_time)
        spec = joined(
            operator, table, on=on, how=how, select=select, prefix=prefix, min_match_rate=min_match_rate, args=args,
            function=function, schema=schema, by_time=by_time,
        )  # fmt: skip
        return self.apply(spec, name=name or table.name)

    def send_to(
        self,
        target: OutputStream | RemoteTableHandle | DatasetHandle,
        contract: UpdateContract | None = None,
        *,
        on_null_key: OnNullKey = "fail",
        dead_letters: OutputStream | None = None,
        at_most: int | None = None,
        args: Sequence[object] = (),
        deleted: str | None = None,
        marks_as: str | None = None,
    ) -> MessageStream:
        """Write the records and return the stream to go on with.

        After an output stream, that is the output stream, with its key and partitions. After a table it
        is this stream. The rest is for remote tables: `contract` says that the records are updates, and whether
        these may put their default first; `on_null_key`, whether a record with a null key fails the batch or is
        counted and skipped. With `dead_letters`, records that the table refuses for good go to that output stream,
        before the batch is committed; more than `at_most` (100) of a batch fail it. `args` are handed through to the
        table's function. `marks_as` names this send in the marks of a table with `idempotent` or `newest_by`. Sending
        to an unbounded dataset writes the changes to the stream that feeds it.

        A local table takes its own columns of the records, and keeps the last record of each key; tombstones, and
        records that meet `deleted`, a Spark SQL condition, delete the entry of their key. `on_null_key` is as with
        remote tables.
        """
        local = isinstance(target, DatasetHandle) and target.dataset.is_local
        if deleted is not None and not local:
            raise ConfigurationError(
                f"send_to after {self.operator}: deleted is for local tables only.",
                "Leave it out: elsewhere tombstones delete.",
                argument="deleted",
            )
        if isinstance(target, RemoteTableHandle):
            return self._send_to_table(
                "send_to", target, contract, None, on_null_key, dead_letters, at_most, args, marks_as
            )
        if isinstance(target, DatasetHandle) and local and not (contract or dead_letters or args or marks_as):
            return self._send_to_local(target, deleted, on_null_key)
        skips = on_null_key != "fail" and not local
        given = {"contract": contract, "on_null_key": skips, "dead_letters": dead_letters, "args": args}
        given |= {"marks_as": marks_as}
        if unfit := [name for name, value in given.items() if value]:
            raise ConfigurationError(
                f"send_to after {self.operator} got {' and '.join(unfit)}, which only remote tables take.",
                "Leave it out.",
                argument=unfit[0],
            )
        if isinstance(target, DatasetHandle):
            return self._send_to_dataset(target)
        if not isinstance(target, OutputStream):
            raise self._not_declared(target, "send_to", "output stream or table")
        self._check_ours(target, target.name)
        self._refuse_second_writer(target)
        return self.apply(SendToStream(target.name))

    def update(
        self,
        table: RemoteTableHandle,
        *,
        set: Columns | None = None,
        add: Columns | None = None,
        append: Columns | None = None,
        remove: Sequence[str] = (),
        if_missing: Columns | None = None,
        on_null_key: OnNullKey = "fail",
        dead_letters: OutputStream | None = None,
        at_most: int | None = None,
        args: Sequence[object] = (),
        marks_as: str | None = None,
    ) -> MessageStream:
        """Update the record of each record's key, and return this stream to go on with.

        The stream has the columns of the table's key. `set` gives columns their values, `add` adds numbers, `append`
        puts values (one, or a list) at the end of lists, each {table column: Spark SQL expression} or a list of columns
        that keep their names; `remove` names columns that become null. `if_missing` is the record to begin with where
        there is none, the key by itself, and may be empty ([]); without it a missing record fails the batch. The rest
        is as with `send_to`. A tombstone deletes the record.

            flights.update(planes, set={"last_dest": "dest"}, add={"flights": "1"}, if_missing={"flights": "0"})
        """
        if not isinstance(table, RemoteTableHandle):
            if isinstance(table, DatasetHandle | OutputStream):
                raise PlanningError(
                    f"update after {self.operator}: {table.name!r} is no remote table, and nothing else takes updates.",
                    "Send whole records to it with send_to().",
                    operator=self.operator,
                )
            raise self._not_declared(table, "update", "remote table")
        what = f"update of {table.name} after {self.operator}"
        update = checked_update(what, table.key, set, add, append, remove, if_missing)
        contract = UpdateContract.UPDATE_ONLY if if_missing is None else UpdateContract.UPDATE_WITH_DEFAULTS
        return self._send_to_table(
            "update", table, contract, update, on_null_key, dead_letters, at_most, args, marks_as
        )

    def sink(
        self, function: SinkFunction, *, returns: Schema | None = None, keeps_partitioning: bool = False
    ) -> MessageStream:
        """Hand the records to a function, at least once for each batch, and return the stream to go on with.

        It is called in Spark's tasks with some records of one partition, a pyarrow.RecordBatch in the order of their
        stream, and a `SinkContext`. The records have their hidden columns, such as `__offset` and `__tombstone`.

        Without `returns` the records go on as they were. With it the function returns a row of these columns for each
        record, in their order, as a RecordBatch or Table, and these rows go on. They are recorded before anything is
        made of them: a batch that is run again has the same, and does not call the function. Nothing is known of where
        they lie, unless `keeps_partitioning=True` promises that the columns by which the records are partitioned are as
        they were.
        """
        return self.apply(checked_sink(self.operator, function, returns, keeps_partitioning))

    def _send_to_table(
        self,
        method: str,
        target: RemoteTableHandle,
        contract: UpdateContract | None,
        update: Update | None,
        on_null_key: OnNullKey,
        dead_letters: OutputStream | None,
        at_most: int | None,
        args: Sequence[object],
        marks_as: str | None,
    ) -> MessageStream:
        if on_null_key not in ("fail", "skip"):
            raise ConfigurationError(
                f"{method} has on_null_key={on_null_key!r}.", "Write fail or skip.", argument="on_null_key"
            )
        what = f"{method} after {self.operator}: at_most is {at_most!r}"
        if at_most is not None and dead_letters is None:
            raise ConfigurationError(
                f"{what}, and there are no dead_letters that it bounds.", "Give both, or neither.", argument="at_most"
            )
        bound = 100 if at_most is None else at_most
        check_whole_number(bound, what, "1 or more", argument="at_most")
        self._check_ours(target, target.name)
        if marks_as is not None:
            check_name("marks", marks_as)
        letters = None if dead_letters is None else bound
        send = TableSend(target.name, contract, on_null_key, update, tuple(args), letters, marks_as)
        sent = self.apply(SendToTable(send), name=target.name)
        if dead_letters is not None:
            if not isinstance(dead_letters, OutputStream):
                raise self._not_declared(dead_letters, f"{method}(dead_letters=)", "output stream")
            self._check_ours(dead_letters, dead_letters.name)
            self._refuse_second_writer(dead_letters)
            sent.apply(SendDeadLetters(dead_letters.name, bound), name=target.name)
        return sent

    def _refuse_second_writer(self, target: OutputStream) -> None:
        writer = self.graph.writer_of(target.name)
        if writer is not None:
            raise PlanningError(
                f"output stream {target.name!r} is used twice: by {writer} and after {self.operator}.",
                "Go on with what the first send_to() returned, or declare another output stream.",
                stream=target.name,
                operator=self.operator,
            )

    def _send_to_local(self, target: DatasetHandle, deleted: str | None, on_null_key: OnNullKey) -> MessageStream:
        self._check_ours(target, target.name)
        spec = checked_send_to_local(self.graph.name, self.operator, target.dataset, deleted, on_null_key)
        return self.apply(spec, name=target.name)

    def _send_to_dataset(self, target: DatasetHandle) -> MessageStream:
        self._check_ours(target, target.name)
        if target.dataset.stream is None:
            raise PlanningError(
                f"send_to after {self.operator}: dataset {target.name!r} is made from {target.dataset.input}, and not "
                "from a stream that an application could send to.",
                "Declare it with unbounded_dataset on a stream, or send to an output stream.",
                dataset=target.name,
                operator=self.operator,
            )
        if not target.dataset.follows_changes:
            raise PlanningError(
                f"send_to after {self.operator}: dataset {target.name!r} is bounded, and its versions end with "
                "markers, which an application does not send.",
                "Declare it with unbounded_dataset, or send to an output stream.",
                dataset=target.name,
                operator=self.operator,
            )
        self.graph.refuse_writing(target.dataset.stream, f"the input of dataset {target.name!r}")
        return self.apply(SendToDataset(target.name), name=target.name)

    def apply(self, spec: Spec, *others: MessageStream, name: str = "") -> MessageStream:
        """Return the records that an operator makes of these, and of those of `others` where it takes several inputs.

        The other methods are short ways to the operators that there are; `name` ends the operator's id.
        """
        for stream in others:
            self._check_ours(stream, stream.operator)
        inputs = (self.operator, *(stream.operator for stream in others))
        return MessageStream(self.graph, self.graph.add(spec, inputs, name))

    def _check_ours(self, target: DatasetHandle | RemoteTableHandle | OutputStream | MessageStream, name: str) -> None:
        if target.graph is not self.graph:
            raise PlanningError(
                f"{name!r} was declared by application {target.graph.name!r}, and is used by {self.graph.name!r}.",
                "Declare it with this application, too: an input in both is app.input_stream(…) of each."
                if isinstance(target, MessageStream)
                else "Declare it with this application's table(), local_table() or output_stream().",
                application=self.graph.name,
            )

    def _not_declared(self, passed: object, method: str, expected: str) -> PlanningError:
        return not_declared(passed, f"{method} after {self.operator}", expected, self.graph.name)
