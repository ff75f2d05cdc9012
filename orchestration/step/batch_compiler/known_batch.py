"""What is known of a batch before any of its operators is compiled, as one value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.planner.table_writers import writers_of
from dagster_adjunct.orchestration.step.batch_compiler.join_counts import as_it_is
from dagster_adjunct.orchestration.step.batch_compiler.table_marks import producers_of, streams_of_positions
from dagster_adjunct.orchestration.step.batch_records.sent_records import upstream_of_outputs
from dagster_adjunct.orchestration.step.record_times.record_positions import origins
from dagster_adjunct.resources.names import split_stream_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.orchestration.planner import Exchange, PlannedOperator
    from dagster_adjunct.orchestration.step.context.batch_inputs import BatchInputs
    from dagster_adjunct.orchestration.step.context.step_context import StepContext
    from dagster_adjunct.orchestration.step.record_times.record_positions import Origin
    from dagster_adjunct.resources.streams.interface.source_ranges import Sources
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


@dataclass(frozen=True, slots=True)
class KnownBatch:
    """What a batch reads, and what its application and plan say of each operator, by id; nothing here changes.

    `operators` are those whose records are written, in their order. `takers` counts who takes the records of each,
    `late_takers` are those whose left out records somebody takes. `origins` and `positions` say where records have
    their positions from, `producers` and `writers` by which names they are appended to streams and written to tables.
    """

    context: StepContext
    inputs: BatchInputs
    operators: Sequence[Operator]
    planned: Mapping[str, PlannedOperator]
    exchanges: Mapping[str, Sequence[Exchange]]
    takers: Mapping[str, int]
    late_takers: frozenset[str]
    origins: Mapping[str, Origin]
    positions: Mapping[str, str | None]
    producers: Mapping[str, str]
    writers: Mapping[str, str]

    @property
    def app(self) -> Application:
        return self.context.app

    @property
    def spark(self) -> SparkSession:
        return self.context.spark()

    @property
    def replays(self) -> bool:
        """Whether it is read beside the main position: a bounded replay, or a rehearsal."""
        return self.inputs.consumed is None

    @property
    def tasks(self) -> int:
        return self.inputs.tasks or len(self.context.plan.tasks)

    def partitions_at(self, operator: str) -> int:
        return self.planned[operator].partitions

    def lying_by(self, operator: str) -> tuple[str, ...]:
        return self.planned[operator].partitioned_by

    def stream_of(self, operator: str) -> str | None:
        """Return the stream that the positions of the records after an operator are in; None for several."""
        return self.positions[operator]

    def goes_on(self, operator: str) -> bool:
        return self.takers.get(operator, 0) > 0

    def several_take(self, operator: Operator) -> bool:
        """Whether several operators take records that nothing keeps yet: what is read or written is there as it is."""
        spec = operator.spec
        return self.takers.get(operator.id, 0) > 1 and spec.reads is None and spec.writes is None

    def moves(self, operator: str) -> Sequence[Exchange]:
        """Return the exchanges that the planner's auto_repartition has before an operator."""
        return [move for move in self.exchanges.get(operator, ()) if move.reason == "auto_repartition"]

    def system_of(self, stream: str) -> StreamSystem:
        return self.context.systems[split_stream_name(stream)[0]]

    def sources(self, operator: str) -> Sources | None:
        """Return what is read of the one stream that an operator's records are made of; None where it is not one."""
        stream = self.origins[operator].made_of
        return None if stream is None else self.inputs.sources(self.context.writer, stream)

    def together(self, frame: DataFrame) -> DataFrame:
        """Return records that are moved next: few are brought into one task first."""
        # Spark would drop what brings records together right before they are moved.
        return as_it_is(frame.coalesce(1)) if self.inputs.few else frame


def known_batch(context: StepContext, inputs: BatchInputs) -> KnownBatch:
    """Return what is known of the batch of a planned application that reads these inputs."""
    operators = context.app.operators
    written = upstream_of_outputs(operators)
    exchanges: dict[str, list[Exchange]] = {}
    for exchange in context.plan.exchanges:
        exchanges.setdefault(exchange.operator, []).append(exchange)
    return KnownBatch(
        context,
        inputs,
        operators=[operator for operator in operators if operator.id in written],
        planned={planned.id: planned for planned in context.plan.operators},
        exchanges=exchanges,
        takers=Counter(source for operator in operators for source in set(operator.inputs)),
        late_takers=frozenset(
            source for operator in operators if operator.spec.takes_left_out for source in operator.inputs
        ),
        origins=origins(operators),
        positions=streams_of_positions(
            operators, lambda stream: context.systems[split_stream_name(stream)[0]].appends_alone
        ),
        producers=producers_of(context.app, context.writer),
        writers=writers_of(context.app, context.writer),
    )
