"""`MessageStream`: the operators of an application.

Every method adds one operator and returns a new stream; the stream that it is called on stays as it
was and may be used again, which branches the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.application.declared_handles import DatasetHandle, RemoteTableHandle
from dagster_adjunct.orchestration.application.joined_tables import ByTime, joined
from dagster_adjunct.orchestration.application.stream_over_time import StreamOverTime
from dagster_adjunct.orchestration.application.stream_sends import StreamSends
from dagster_adjunct.orchestration.application.undeclared import check_ours, not_declared
from dagster_adjunct.orchestration.operators.inputs.broadcast_stream import Broadcast, checked_broadcast
from dagster_adjunct.orchestration.operators.joins.join import Join
from dagster_adjunct.orchestration.operators.records.filter import checked_filter
from dagster_adjunct.orchestration.operators.records.flat_map import checked_flat_map
from dagster_adjunct.orchestration.operators.records.map import checked_map
from dagster_adjunct.orchestration.operators.records.merge import checked_merge
from dagster_adjunct.orchestration.operators.records.partition_by import PartitionBy, checked_partition_by, key_columns
from dagster_adjunct.orchestration.operators.records.select import checked_select
from dagster_adjunct.orchestration.operators.records.with_columns import checked_with_columns
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.names import check_name

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.operator_graph import OperatorGraph
    from dagster_adjunct.orchestration.operators.arguments import DataFrameFunction
    from dagster_adjunct.orchestration.operators.functions.record_functions import RecordFunction
    from dagster_adjunct.orchestration.operators.joins.join_arguments import How, On
    from dagster_adjunct.orchestration.operators.spec.operator_spec import BeforeHistory, OnNullTime, Spec
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True, eq=False)
class MessageStream(StreamOverTime, StreamSends):
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
            raise not_declared(table, f"join after {self.operator}", "dataset or remote table", self.graph.name)
        check_ours(self.graph, table, table.name)
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

    def apply(self, spec: Spec, *others: MessageStream, name: str = "") -> MessageStream:
        """Return the records that an operator makes of these, and of those of `others` where it takes several inputs.

        The other methods are short ways to the operators that there are; `name` ends the operator's id.
        """
        for stream in others:
            check_ours(self.graph, stream, stream.operator)
        inputs = (self.operator, *(stream.operator for stream in others))
        return MessageStream(self.graph, self.graph.add(spec, inputs, name))
