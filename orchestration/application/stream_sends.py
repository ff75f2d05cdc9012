"""The operators of a `MessageStream` that write its records: to streams, to tables, and to functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from dagster_adjunct.orchestration.application.applies_operators import AppliesOperators
from dagster_adjunct.orchestration.application.declared_handles import DatasetHandle, OutputStream, RemoteTableHandle
from dagster_adjunct.orchestration.application.undeclared import check_ours, not_declared
from dagster_adjunct.orchestration.operators.columns.update_columns import checked_update
from dagster_adjunct.orchestration.operators.sends.send_dead_letters import SendDeadLetters
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
    from dagster_adjunct.orchestration.operators.arguments import OnNullKey
    from dagster_adjunct.orchestration.operators.columns.update_columns import Columns, Update
    from dagster_adjunct.orchestration.operators.spec.sink_context import SinkFunction
    from dagster_adjunct.resources.schemas.schema import Schema


class StreamSends(AppliesOperators):
    """What writes the records of a stream, beside or before the way on."""

    __slots__ = ()

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
    ) -> Self:
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
            raise not_declared(target, f"send_to after {self.operator}", "output stream or table", self.graph.name)
        check_ours(self.graph, target, target.name)
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
    ) -> Self:
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
            raise not_declared(table, f"update after {self.operator}", "remote table", self.graph.name)
        what = f"update of {table.name} after {self.operator}"
        update = checked_update(what, table.key, set, add, append, remove, if_missing)
        contract = UpdateContract.UPDATE_ONLY if if_missing is None else UpdateContract.UPDATE_WITH_DEFAULTS
        return self._send_to_table(
            "update", table, contract, update, on_null_key, dead_letters, at_most, args, marks_as
        )

    def sink(self, function: SinkFunction, *, returns: Schema | None = None, keeps_partitioning: bool = False) -> Self:
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
    ) -> Self:
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
        check_ours(self.graph, target, target.name)
        if marks_as is not None:
            check_name("marks", marks_as)
        letters = None if dead_letters is None else bound
        send = TableSend(target.name, contract, on_null_key, update, tuple(args), letters, marks_as)
        sent = self.apply(SendToTable(send), name=target.name)
        if dead_letters is not None:
            if not isinstance(dead_letters, OutputStream):
                where = f"{method}(dead_letters=) after {self.operator}"
                raise not_declared(dead_letters, where, "output stream", self.graph.name)
            check_ours(self.graph, dead_letters, dead_letters.name)
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

    def _send_to_local(self, target: DatasetHandle, deleted: str | None, on_null_key: OnNullKey) -> Self:
        check_ours(self.graph, target, target.name)
        spec = checked_send_to_local(self.graph.name, self.operator, target.dataset, deleted, on_null_key)
        return self.apply(spec, name=target.name)

    def _send_to_dataset(self, target: DatasetHandle) -> Self:
        check_ours(self.graph, target, target.name)
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
