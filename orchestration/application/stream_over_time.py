"""The operators of a `MessageStream` that go by time and keep state from batch to batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from dagster_adjunct.orchestration.application.applies_operators import AppliesOperators
from dagster_adjunct.orchestration.operators.event_times.late_records import checked_late_records
from dagster_adjunct.orchestration.operators.stream_joins.stream_join import StreamJoin
from dagster_adjunct.orchestration.operators.stream_joins.stream_join_arguments import checked_stream_join
from dagster_adjunct.orchestration.operators.windows.window_arguments import checked_window
from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.operator_graph import OperatorGraph
    from dagster_adjunct.orchestration.operators.joins.join_arguments import On
    from dagster_adjunct.orchestration.operators.stream_joins.stream_join import HowStreams
    from dagster_adjunct.orchestration.operators.stream_joins.stream_join_arguments import Within
    from dagster_adjunct.orchestration.operators.windows.window_aggregates import Aggregation
    from dagster_adjunct.orchestration.operators.windows.window_kinds import Kind
    from dagster_adjunct.orchestration.operators.windows.window_results import Results


class StreamOverTime(AppliesOperators):
    """What a stream of records is asked for that have an event time."""

    __slots__ = ()

    def join_stream(
        self,
        right: Self,
        *,
        on: On,
        within: Within,
        name: str,
        how: HowStreams = "inner",
        select: Sequence[str] | None = None,
        prefix: str = "",
        partition_by: str | Sequence[str] | None = None,
    ) -> Self:
        """Return the pairs of records of this stream and of `right` that have equal keys and meet within a time.

        Both streams have an event time. `within` is how far apart two times may be, or (before, after): how much
        earlier and later than this stream's record the other one may be. `on` names the columns of the key, the same
        in both, or {column here: column of `right`}. With how="left", "right" or "full" a record that has met nothing
        comes out once, when its time has passed. `select` lists the columns of `right` to add, "fee" or "fee as
        paid"; without it all but the key are added, with `prefix` before their names. What is kept of both streams is
        kept under `name`. Both streams have to lie by the columns `partition_by`, some of this stream's in `on`, all of
        them unless given. Where records lie is known after it as before it.
        """
        operator = self.graph.next_id(StreamJoin.kind, name if isinstance(name, str) else "")
        if not isinstance(right, StreamOverTime):
            raise PlanningError(
                f"{operator} got {getattr(right, 'name', None) or right!r:.60}: expected records of another stream.",
                'Give a stream: app.input_stream("…", event_time=…), or what an operator returned; tables take join().',
                operator=operator,
            )
        spec = checked_stream_join(operator, name, on, within, how, select, prefix, partition_by)
        for side in (self, right):
            check_times(self.graph, side.operator, operator)
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
    ) -> Self:
        """Return what the records of each key add up to in windows of their event time.

            clicks.window(Tumbling(timedelta(minutes=5)), by="page", name="views", aggregates={"views": Count()})

        The columns are those of `by`, `window_start`, `window_end` (exclusive) and the aggregates. With "final" results
        each window comes out once: when the watermark has passed its end and `allowed_lateness`. With "updates" each
        batch gives the windows that it has changed, as far as they are, with the boolean `final`, true once for each.
        `name` is what state is kept under, in the table `<application>-<name>`. Records have to lie by the columns
        `partition_by`, some of `by`, and all of it unless given. See `late_records` for what comes too late.
        """
        check_times(self.graph, self.operator, f"window after {self.operator}")
        spec = checked_window(self.operator, kind, by, name, aggregates, results, allowed_lateness, partition_by)
        return self.apply(spec, name=name)

    def late_records(self) -> Self:
        """Return the records that the operator before has left out, as too late or without a time, behind a join of
        two streams or a window.

        Their columns are `side` ("left" or "right" of a join), `why`, `event_time`, and `record` as JSON.
        """
        return self.apply(checked_late_records(self.operator, self.graph.operators[self.operator].spec))


def check_times(graph: OperatorGraph, operator: str, what: str) -> None:
    """Raise PlanningError where records that arrive at `operator` come from an input that says no time, or from an
    output stream, which holds none."""
    waiting, seen = [operator], set()
    while waiting:
        above = graph.operators[waiting.pop()]
        if above.id in seen or above.spec.over_time is not None:  # whose results have a time
            continue
        seen.add(above.id)
        if above.spec.role == "output":
            raise PlanningError(
                f"{what}: behind {above.id} records are those that {above.spec.writes} holds: nothing says when they "
                "happened.",
                f"Put it before send_to, or read {above.spec.writes} in another application, with an event_time.",
                operator=above.id,
                stream=above.spec.writes,
            )
        waiting += above.inputs
        if above.spec.reads is not None and not above.spec.says_time:
            raise PlanningError(
                f"{what}: nothing says when the records of {above.spec.reads} happened.",
                f'Say it where they enter: app.input_stream("{above.spec.reads}", event_time="a column", …), or '
                "event_time=ARRIVAL for when they were written to the stream.",
                operator=above.id,
                stream=above.spec.reads,
            )
