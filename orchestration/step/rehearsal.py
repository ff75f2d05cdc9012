"""Asks Spark which columns the outputs of a batch will have, over no records at all, before the batch is begun."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.dataset_inputs import OwnedBy
from dagster_adjunct.orchestration.operators.table_checks import Sink, check_columns
from dagster_adjunct.orchestration.operators.table_lookups import check_stored, read_function
from dagster_adjunct.orchestration.step.batch_inputs import BatchInputs
from dagster_adjunct.orchestration.step.compile_batch import Batch, Counted, sent_schema
from dagster_adjunct.orchestration.step.local_sends import kept_rows
from dagster_adjunct.resources.errors import OperatorFailedError, PermanentError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.tables.arrow_operations import DEFAULT, UPDATE
from dagster_adjunct.resources.tables.spark_write import check_record_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.assets.unbounded.transient_version import TransientVersion
    from dagster_adjunct.orchestration.operators.arguments import DataFrameFunction, OnNullKey
    from dagster_adjunct.orchestration.operators.operator_spec import Operator
    from dagster_adjunct.orchestration.operators.table_lookups import TableLookup
    from dagster_adjunct.orchestration.operators.table_sends import TableSend
    from dagster_adjunct.orchestration.step.step_context import StepContext
    from dagster_adjunct.resources.schemas.schema import Schema
    from dagster_adjunct.resources.streams.interface.stream_system import AppendResult
    from dagster_adjunct.resources.tables.table_functions import TableFunction

_log = logging.getLogger("adjunct.step")


def check_outputs(context: StepContext, views: Mapping[str, VersionReader | TransientVersion | None]) -> None:
    """Raise what creating an output stream would raise for the columns that these dataset versions give it.

    Functions of the application are called with a frame of no records, as a batch may be: one that fails over that is
    refused.
    """
    Rehearsal(context, BatchInputs(0, {}, views), lambda name: None).run()


class Rehearsal(Batch):
    """A batch without records, which writes nothing and runs no Spark job."""

    def __init__(self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> None:
        super().__init__(context, inputs, before_output)
        self._looked_at: dict[str, dict[str, str] | None] = {}

    def run(self) -> Counted:
        for operator in self._context.app.operators:
            if operator.id in self._written:
                self._frames[operator.id] = self._named(operator)
        return Counted({}, {})

    def _named(self, operator: Operator) -> DataFrame:
        """Return the operator's records; what is refused of them is told with its name."""
        try:
            return self._analysed(operator)
        except PermanentError as error:
            if operator.id in error.problem:
                raise
            raise error.reworded(f"{operator.id}: {error.problem}", error.next_step) from error

    def call(self, operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
        try:
            return super().call(operator, function, frame)
        except OperatorFailedError as error:
            raise error.reworded(
                f"{error.problem} It was called with no records, before the batch is begun.",
                "Mend it, so that it gives its columns for no records, too: a batch may have none for it, as where "
                "another stream is replayed.",
            ) from error.__cause__

    def _entries(self, view: VersionReader | TransientVersion | None, schema: Schema) -> DataFrame:
        return super()._entries(None, schema)

    def matched(self, operator: str, dataset: str, frame: DataFrame) -> DataFrame:
        return frame

    def looked_up(self, operator: str, frame: DataFrame, lookup: TableLookup) -> DataFrame:
        """Compare what is taken of the table's records with its columns, as its store has them; nothing is read."""
        from pyspark.sql import functions as F

        table = self.app.tables[lookup.table]
        check_stored(operator, table, lookup, self._stored(lookup.table, read_function(table)))
        added = [F.lit(None).cast(answer.type).alias(answer.name) for answer in lookup.answers]
        return frame.select("*", *added, F.lit(None).cast("boolean").alias("__matched"))

    def computed_once(self, operator: str, frame: DataFrame) -> DataFrame:
        return frame

    def send(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> AppendResult | None:
        name = split_stream_name(stream)[1]
        self.system_of(stream).check_create(name, schema=sent_schema(frame), key=key, partitions=partitions)
        return None

    def entries(self, dataset: str) -> tuple[DataFrame, Schema]:
        source = self.app.dataset(dataset).input
        if isinstance(source, OwnedBy):
            return super()._entries(None, source.schema), source.schema
        return super().entries(dataset)

    def keep(self, operator: str, frame: DataFrame, table: str, *, deleted: str | None, on_null_key: OnNullKey) -> None:
        kept_rows(frame, self.app.dataset(table).key, deleted, on_null_key)

    def write(self, operator: str, frame: DataFrame, send: TableSend) -> None:
        """Compare what Spark makes of the records with the table's columns, as its store has them."""
        table = self.app.tables[send.table]
        check_record_columns(frame.columns, table.name, table.key, updates=send.contract is not None, what=operator)
        spec = self.app.operator(operator).spec
        sink = Sink(table, send, getattr(spec, "update", None))
        check_columns(operator, sink, _types(frame), self._stored_types(sink))

    def _stored_types(self, sink: Sink) -> dict[str, str] | None:
        return sink.columns or self._stored(sink.table.name, sink.function)

    def _stored(self, table: str, function: TableFunction | None) -> dict[str, str] | None:
        if function is None or not hasattr(function, "stored_types"):
            return None
        if table not in self._looked_at:
            try:
                self._looked_at[table] = asyncio.run(_asked(function))
            except PermanentError:
                raise
            except Exception as error:  # noqa: BLE001 - the table's own retries are for the batch, which tells what is wrong
                _log.info("Table %s can't be asked for its columns now: %s", table, error)
                self._looked_at[table] = None
        return self._looked_at[table]

    def send_letters(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        self.send(operator, frame, stream, key=key, partitions=partitions)


async def _asked(function: TableFunction) -> dict[str, str] | None:
    try:
        return await function.stored_types()
    finally:
        await function.close()


def _types(frame: DataFrame) -> dict[str, str | None]:
    """Return the types of the records' columns, and of those in the structs of an update, by "update.name"."""
    from pyspark.sql.types import StructType

    types: dict[str, str | None] = {}
    for field in frame.schema.fields:
        if field.name.startswith("__"):
            continue
        types[field.name] = field.dataType.simpleString()
        if field.name in (UPDATE, DEFAULT) and isinstance(inside := field.dataType, StructType):
            for part in inside.fields:  # of a short update: what is set, added and appended
                columns = part.dataType.fields if isinstance(part.dataType, StructType) else [part]
                types |= {f"{field.name}.{one.name}": one.dataType.simpleString() for one in columns}
    return types
