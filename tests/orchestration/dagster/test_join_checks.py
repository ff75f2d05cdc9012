"""What the assets of an application show besides its data: match rates of joins, rules of
validators, declarations.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import AssetCheckKey, AssetKey, Definitions

from dagster_adjunct import Application, bounded_dataset, build_definitions
from dagster_adjunct.assets.validation.validators import (
    custom,
    describe_rule,
    no_nulls,
    row_count_within,
    sql_check,
    validator_arguments,
    values_in,
)
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState
from dagster_adjunct.orchestration.step.context import StepContext
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.resources.errors import ConfigurationError
from tests.orchestration.dagster.lab import (
    APPLES,
    NO_SPARK,
    SCHEMA,
    FinishedRun,
    Lab,
    key_of,
    plain,
    running_lab,
    steps_run_by,
)

ITEMS = bounded_dataset(
    "items",
    input="lake.items",
    key="item",
    partitions=2,
    validators=[row_count_within(0.5, minimum_rows=3), no_nulls("label", severity="warn")],
)
OTHER = bounded_dataset("other", input="lake.other", key="item", broadcast=True)
COPY = AssetKey(["lake", "copy"])


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with running_lab(tmp_path) as lab:
        lab.streams.create("orders", schema=SCHEMA, key=["item"], partitions=2)
        yield lab


def application() -> Application:
    app = Application("shop")
    joined = app.input_stream("lake.orders").join(
        app.table(ITEMS), on="item", how="left", select=["label as title"], min_match_rate=0.9
    )
    other = app.table(OTHER)
    (
        joined.join(other, on="item", how="left", select=["price as other_price"])
        .join(other, on="item", select=["label as other_label"])
        .send_to(app.output_stream("lake.copy", partitions=2, key="item"))
        .join(other, on="item", how="left", select=["price as late_price"])
        .send_to(app.output_stream("lake.late", partitions=2, key="item"))
    )
    return app


def run(lab: Lab, counters: dict[str, dict[str, int]]) -> FinishedRun:
    report = StepReport(
        1, True, counters, {}, {"work": 1.25}, ApplicationState(batch=len(counters))
    )
    for name in ("items", "other"):
        lab.deliver(name, APPLES, f"v{len(counters)}")
    with steps_run_by(lambda context: report):
        return lab.run(defined(lab), COPY, AssetKey(["lake", "late"]))


def defined(lab: Lab) -> Definitions:
    return build_definitions(application(), lake=lab.lake.url, spark=NO_SPARK)


def no_batches(context: StepContext) -> StepReport:
    raise AssertionError("no batch is to run")


@pytest.mark.lengthy
def test_a_join_has_a_check_of_its_match_rate_which_fails_below_what_is_declared(lab: Lab) -> None:
    counts = {"rows": 200, "unmatched": 20}
    finished = run(lab, {"join-2-items": counts, "join-3-other": {"rows": 200, "unmatched": 190}})
    assert finished.passed == {"copy match_rate_items": True, "copy match_rate_other": True}, (
        "no minimum is declared of other"
    )
    facts = plain(finished.checks["copy match_rate_items"].metadata)
    assert (
        facts["adjunct/match_rate"],
        facts["adjunct/unmatched"],
        facts["adjunct/min_match_rate"],
    ) == (0.9, 20, 0.9)
    assert finished.made["copy"]["adjunct/unmatched/join-2-items"] == 20
    assert finished.made["copy"]["adjunct/seconds/work"] == 1.25

    finished = run(lab, {"join-2-items": {"rows": 200, "unmatched": 21}, "a": {}, "b": {}})
    failed = finished.checks["copy match_rate_items"]
    assert (failed.passed, failed.severity.value) == (False, "ERROR")
    assert (
        failed.description
        == "89.50% of 200 records matched an entry of items; at least 90.0% is required"
    )
    assert finished.success
    assert "did not yield" not in finished.log

    quiet = run(lab, {})
    assert quiet.checks == {}
    assert "did not yield" not in quiet.log


@pytest.mark.lengthy
def test_outputs_can_be_asked_for_without_their_checks_and_checks_without_a_batch(lab: Lab) -> None:
    assert run(lab, {"join-2-items": {"rows": 2, "unmatched": 0}}).success
    one = StepReport(1, True, {}, {}, {}, ApplicationState(batch=1))
    job = defined(lab).resolve_implicit_global_asset_job_def()
    bare = job.get_subset(asset_selection={COPY}, asset_check_selection=set())
    with steps_run_by(lambda context: one):
        finished = FinishedRun(bare.execute_in_process(instance=lab.instance), lab.instance)
    assert (finished.success, finished.checks) == (True, {})
    alone = job.get_subset(
        asset_selection=set(), asset_check_selection={AssetCheckKey(COPY, "match_rate_items")}
    )
    with steps_run_by(no_batches):
        finished = FinishedRun(alone.execute_in_process(instance=lab.instance), lab.instance)
    assert (finished.success, finished.made) == (True, {})


def test_a_joins_check_is_on_the_first_output_that_its_records_reach() -> None:
    graph = build_definitions(application()).resolve_asset_graph()
    assert {
        (key.asset_key.path[-1], key.name) for key in graph.asset_check_keys if "match" in key.name
    } == {
        ("copy", "match_rate_items"),
        ("copy", "match_rate_other"),
        ("copy", "match_rate_join_4_other"),
        ("late", "match_rate_join_6_other"),
    }


def test_a_match_rate_that_can_not_be_held_is_refused() -> None:
    app = Application("shop")
    orders, items = app.input_stream("lake.orders"), app.table(ITEMS)
    with pytest.raises(ConfigurationError) as caught:
        orders.join(items, on="item", how="left", min_match_rate=95)
    assert (caught.value.operator, caught.value.argument) == ("join-2-items", "min_match_rate")


@pytest.mark.lengthy
def test_a_check_has_its_rule_and_threshold_before_and_after_it_is_evaluated(lab: Lab) -> None:
    lab.deliver("items", APPLES, "v1")
    finished = lab.advance(ITEMS)
    metadata = plain(finished.checks["items row_count_within"].metadata)
    assert metadata["adjunct/rule"] == "row_count_within(fraction=0.5, minimum_rows=3)"
    assert (
        metadata["adjunct/fraction"],
        metadata["adjunct/minimum_rows"],
        metadata["adjunct/rows"],
    ) == (0.5, 3, 2)
    specs = {
        spec.name: spec
        for asset in lab.definitions(ITEMS).assets or ()
        for spec in getattr(asset, "check_specs", ())
    }
    assert str(specs["row_count_within"].description).startswith(
        "row_count_within(fraction=0.5, minimum_rows=3): eval"
    )
    assert specs["no_nulls_label"].metadata["adjunct/severity"] == "warn"


def test_a_rule_is_reported_with_what_its_function_was_given() -> None:
    assert describe_rule(no_nulls("a", "b")) == "no_nulls(columns=['a', 'b'])"
    assert describe_rule(values_in("a", ["x"])) == "values_in(column='a', values=['x'])"
    assert describe_rule(sql_check("seats", "seats > 0")) == "sql(sql='seats > 0')"
    assert validator_arguments(custom("mine", lambda candidate: True)) == {}


def test_key_input_and_partitions_are_there_before_the_first_run() -> None:
    specs = {spec.key: spec for spec in build_definitions(application()).resolve_all_asset_specs()}
    items, other, copy = (specs[key].metadata for key in (key_of(ITEMS), key_of(OTHER), COPY))
    assert items["adjunct/input"] == "lake.items"
    assert (items["adjunct/partitions"], items["adjunct/partitioning"]) == (2, "2 by item")
    assert items["adjunct/key"].value == ["item"]
    assert other["adjunct/partitioning"] == "one broadcast copy"
    assert copy["adjunct/partitions"] == 2
