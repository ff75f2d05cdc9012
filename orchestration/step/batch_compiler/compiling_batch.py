"""What operators have at hand while a batch is compiled (`operators/spec/compiling.py`), as one interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.step.batch_compiler.batch_counts import BatchCounts, Counted
from dagster_adjunct.orchestration.step.batch_compiler.function_outputs import FunctionOutputs
from dagster_adjunct.orchestration.step.batch_compiler.join_counts import as_it_is
from dagster_adjunct.orchestration.step.batch_compiler.met_entries import entries_met, rows_over_time
from dagster_adjunct.orchestration.step.batch_compiler.state_tables import StateTables
from dagster_adjunct.orchestration.step.batch_compiler.stream_outputs import StreamOutputs
from dagster_adjunct.orchestration.step.batch_compiler.table_outputs import TableOutputs
from dagster_adjunct.orchestration.step.batch_compiler.user_functions import result_of
from dagster_adjunct.orchestration.step.batch_records.left_out_records import LeftOut
from dagster_adjunct.orchestration.step.batch_records.local_sends import LocalSends
from dagster_adjunct.orchestration.step.failures.sensitive_columns import sensitive_columns, sensitive_entries
from dagster_adjunct.orchestration.step.record_times.batch_times import BatchTimes
from dagster_adjunct.resources.spark.kept_frames import KeptFrames

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.unbounded.state_spec import StateSpec
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.arguments import DataFrameFunction, OnNullKey
    from dagster_adjunct.orchestration.operators.spec.compiling import StateHandle, TimedRows, Watermarks
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.orchestration.operators.spec.sink_context import SinkFunction
    from dagster_adjunct.orchestration.operators.spec.table_lookups import TableLookup
    from dagster_adjunct.orchestration.operators.spec.table_sends import TableSend
    from dagster_adjunct.orchestration.operators.spec.versions_met import VersionsMet
    from dagster_adjunct.orchestration.step.batch_compiler.known_batch import KnownBatch
    from dagster_adjunct.resources.schemas.schema import Schema
    from dagster_adjunct.resources.streams.interface.stream_system import AppendResult, StreamSystem


class CompilingBatch:
    """One batch as its operators meet it; what it does for them is in its parts, which all go by what is `known`.

    `before_output` is called with the name of an output before anything is written to it.
    """

    def __init__(self, known: KnownBatch, before_output: Callable[[str], None]) -> None:
        context, inputs = known.context, known.inputs
        self.known = known
        self._before_output = before_output
        self._arrived: dict[str, list[DataFrame]] = {}
        self._kept = KeptFrames()
        self._times = BatchTimes(context, inputs)
        self._states = StateTables(context, inputs)
        self._left_out = LeftOut()
        self._local = LocalSends(context, inputs, known.stream_of)
        self._counts = BatchCounts()
        self._streams = StreamOutputs(known, self._counts, before_output)
        self._tables = TableOutputs(known, self._counts, before_output)
        self._functions = FunctionOutputs(known, self._counts, before_output)

    def commit(self) -> Counted:
        """Commit what was written to local tables, when all outputs are; return what the batch has counted."""
        counters = self._counts.counters
        counters |= self._local.commit(self._before_output)
        counters |= self._states.commit(self._before_output)
        counters |= self._counts.of_joins()
        counters |= self._left_out.counts()
        return Counted(counters, self._counts.measured, self._times.after())

    def close(self) -> None:
        """Let go of what is not committed, and of records that were kept while the batch ran."""
        self._local.close()
        self._states.close()
        self._kept.release()  # before the records that they were made of
        self._times.close()

    # -- of the operator that is compiled

    def note_arriving(self, operator: str, frames: Sequence[DataFrame]) -> None:
        """Note what arrives at an operator, for who looks for a record that has failed there."""
        self._arrived[operator] = list(frames)

    def arriving(self, operator: Operator) -> list[DataFrame]:
        """Return what has arrived at an operator, of each input."""
        return self._arrived[operator.id]

    def with_watermark(self, operator: Operator, frame: DataFrame) -> DataFrame:
        return self._times.arriving(operator, frame)

    def sensitive(self, operator: str) -> frozenset[str]:
        compiled = self.app.operator(operator)
        dataset = None if compiled.spec.match is None else compiled.spec.match.dataset
        names = frozenset() if dataset is None else sensitive_entries(self.known.context, dataset)
        for source, frame in zip(compiled.inputs, self._arrived[operator], strict=True):
            own = [name for name in frame.columns if not name.startswith("__")]
            names |= sensitive_columns(self.known.context, source, own)
        return names

    # -- what is known

    @property
    def app(self) -> Application:
        return self.known.app

    @property
    def tasks(self) -> int:
        return self.known.tasks

    @property
    def reading(self) -> VersionsMet:
        return self.known.inputs.reading

    @property
    def number(self) -> int:
        return self.known.inputs.batch

    @property
    def clock(self) -> datetime:
        return self.known.inputs.clock

    def system_of(self, stream: str) -> StreamSystem:
        return self.known.system_of(stream)

    def partitions_at(self, operator: str) -> int:
        return self.known.partitions_at(operator)

    def lying_by(self, operator: str) -> tuple[str, ...]:
        return self.known.lying_by(operator)

    def stream_of(self, operator: str) -> str | None:
        return self.known.stream_of(operator)

    def goes_on(self, operator: str) -> bool:
        return self.known.goes_on(operator)

    def late_wanted(self, operator: str) -> bool:
        return operator in self.known.late_takers

    # -- records, and what they meet

    def read(self, stream: str) -> DataFrame:
        return self._times.read(stream)

    def together(self, frame: DataFrame) -> DataFrame:
        return self.known.together(frame)

    def computed_once(self, operator: str, frame: DataFrame) -> DataFrame:
        return self._kept.keep(frame)

    def first(self, frame: DataFrame) -> Row | None:
        return frame.first()

    def call(self, operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
        # Spark asks a filter behind it below it, too, and would call what is in it twice for a record.
        return as_it_is(result_of(operator, function, frame))

    def entries(self, dataset: str) -> tuple[DataFrame, Schema]:
        return entries_met(self.known, dataset, self._local, self._no_entries)

    def _no_entries(self, dataset: AdjunctDataset, schema: Schema) -> DataFrame:
        return self.known.spark.createDataFrame([], schema.ddl())

    def over_time(self, dataset: str) -> TimedRows:
        return rows_over_time(self.known, dataset)

    def matched(self, operator: str, dataset: str, frame: DataFrame) -> DataFrame:
        return self._counts.of_join(operator, frame)

    def looked_up(self, operator: str, frame: DataFrame, lookup: TableLookup) -> DataFrame:
        return self._tables.looked_up(operator, self.computed_once(operator, frame), lookup, self.sensitive(operator))

    # -- time and state

    def watermarks(self, name: str) -> Watermarks:
        return self._times.watermarks(name)

    def state(self, name: str, spec: StateSpec, *, of: str | None = None) -> StateHandle:
        return self._states.table(name, spec, self.watermarks(of or name))

    def counted(self, operator: str, frame: DataFrame, conditions: Mapping[str, Column]) -> DataFrame:
        return self._left_out.counted(operator, frame, conditions)

    def leave_out(self, operator: str, records: DataFrame) -> None:
        self._left_out.leave(operator, records)

    def left_out(self, operator: str) -> DataFrame:
        (before,) = self.app.operator(operator).inputs
        return self._left_out.of(before)

    # -- outputs

    def send(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> AppendResult | None:
        return self._streams.send(operator, frame, stream, key=key, partitions=partitions)

    def write(self, operator: str, frame: DataFrame, send: TableSend) -> None:
        self._tables.write(operator, frame, send, self.sensitive(operator))

    def letters(self, operator: str) -> DataFrame:
        return self._tables.letters(operator)

    def send_letters(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        self._streams.send_letters(operator, frame, stream, key=key, partitions=partitions)

    def keep(self, operator: str, frame: DataFrame, table: str, *, deleted: str | None, on_null_key: OnNullKey) -> None:
        lying = operator not in self.known.exchanges
        self._local.send(operator, frame, table, deleted=deleted, on_null_key=on_null_key, partitioned=lying)

    def hand_to(self, operator: str, frame: DataFrame, function: SinkFunction) -> None:
        self._functions.hand_to(operator, frame, function, self.sensitive(operator))

    def results_of(self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema) -> DataFrame:
        return self._functions.results_of(operator, frame, function, returns, self.sensitive(operator))
