"""What stands on an application's outputs about startpoints and lost offsets after a run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    OffsetState,
    OpenedEpochs,
    Replay,
)
from dagster_adjunct.orchestration.code_location.metadata import (
    output_metadata,
    plan_metadata,
    step_metadata,
)
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.resources.tables.metrics import Meter
from tests.orchestration.planner.planning import application, catalog

REPLAY = Replay(
    id="s@lake.orders.0",
    ssp="lake.orders.0",
    stream=None,
    epoch=2,
    position="oldest",
    start="0",
    next="3",
    until="9",
    by="ann",
    reason="wrong rates",
    began_at=datetime(2026, 1, 2, tzinfo=UTC),
    versions="current",
)
SAID = "lake.orders.1: startpoint oldest (ann: wrong rates), epoch 1, applied in batch 7"


def reported(
    counters: dict[str, dict[str, int]], offsets: OffsetState, *sentences: str
) -> dict[str, Any]:
    state = ApplicationState(batch=7, offsets=offsets)
    metadata = step_metadata(StepReport(1, True, counters, {}, {}, state, sentences))
    return {name: getattr(value, "value", value) for name, value in metadata.items()}


def test_a_run_without_startpoints_says_nothing_of_them() -> None:
    names = reported({"lake.priced": {"rows": 3}}, OffsetState()).keys()
    assert not names & {
        "adjunct/startpoints",
        "adjunct/epochs",
        "adjunct/replays",
        "adjunct/lost_offsets",
    }


def test_a_run_reports_startpoints_their_epochs_and_replays_in_progress() -> None:
    metadata = reported(
        {},
        OffsetState(epochs=OpenedEpochs(main={"lake.orders.1": 1}), replays={REPLAY.id: REPLAY}),
        SAID,
    )
    assert metadata["adjunct/startpoints"] == [SAID]
    assert metadata["adjunct/epochs"] == {"lake.orders.1": 1}
    (replay,) = metadata["adjunct/replays"]
    assert (replay["ssp"], replay["next"], replay["until"], replay["by"]) == (
        "lake.orders.0",
        "3",
        "9",
        "ann",
    )


def test_lost_offsets_of_all_streams_are_counted_together() -> None:
    counters = {
        "lake.orders": {"lost_offsets": 40},
        "lake.clicks": {"lost_offsets": 2},
        "lake.priced": {"rows": 3},
    }
    assert reported(counters, OffsetState())["adjunct/lost_offsets"] == 42


def test_what_was_restated_is_counted() -> None:
    metadata = reported({"restated": {"changed_keys": 3, "records": 40}}, OffsetState())
    assert metadata["adjunct/restated_changed_keys"] == 3
    assert metadata["adjunct/restated_records"] == 40


def test_what_a_table_has_counted_and_measured_is_on_its_asset_as_numbers() -> None:
    meter = Meter()
    meter.add("rate_waits", 1.25)
    meter.attempt(True, 40, 0.5)
    state = ApplicationState(batch=7, totals={"machines": {"writes": 90}})
    measured = {"machines": meter.metrics()}
    report = StepReport(
        1, True, {"machines": {"writes": 40, "null_keys": 2}}, {}, {}, state, measured=measured
    )
    metadata = output_metadata(report, "machines")
    assert metadata.pop("adjunct/totals").value == {"writes": 90}
    assert all(type(value) in (int, float) for value in metadata.values())
    reported = {name.removeprefix("adjunct/"): value for name, value in metadata.items()}
    assert (reported["writes"], reported["null_keys"], reported["rate_waits"]) == (40, 2, 1.25)
    assert reported["write_seconds_max"] == 0.5
    assert reported["batch_sizes_mean"] == 40
    assert report.to_json()["measured"]["machines"]["rate_waits"] == 1.25


def test_outputs_have_the_plan_as_text_in_one_block_and_as_a_document() -> None:
    def chain(filters: int) -> ExecutionPlan:
        app = application()
        stream = app.input_stream("lake.s")
        for _ in range(filters):
            stream = stream.filter("k <> '````' or `k` = 1")
        return build_plan(app, catalog(s=8))

    metadata = plan_metadata(chain(1))
    lines = metadata["adjunct/plan"].value.splitlines()
    assert (lines[0], lines[-1]) == ("`````text", "`````")
    assert "\n".join(lines[1:-1]) + "\n" == chain(1).render()
    assert ExecutionPlan.from_json(metadata["adjunct/plan_document"].value) == chain(1)
    long = plan_metadata(chain(1_500))
    assert len(long["adjunct/plan"].value) < 101_000
    assert "adjunct/plan_document" not in long
