"""Datasets as assets: what a run reports of the versions that it published, refused or
found.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dagster import AssetCheckSeverity, AssetKey

from dagster_adjunct import AdjunctDataset, bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.declaration.dataset import version_set
from dagster_adjunct.assets.declaration.policies import DeadLetters, Validator
from dagster_adjunct.assets.validation.validators import (
    Candidate,
    custom,
    min_rows,
    row_count_within,
    sql_check,
    unique_keys,
)
from dagster_adjunct.resources.errors import ConfigurationError
from tests.orchestration.dagster.lab import APPLES, FinishedRun, Lab, check_of, key_of

ITEMS = bounded_dataset(
    "items",
    input="lake.items",
    key="item",
    partitions=2,
    validators=[unique_keys(), min_rows(2), row_count_within(0.5, severity="warn")],
)
PRICES = bounded_dataset("prices", input="lake.prices", key="item", partitions=2)
WHY = {"reason": "ticket 7", "by": "ada"}


def accept_all(candidate: Candidate) -> bool:
    return True


def facts(finished: FinishedRun, check: str) -> dict[str, Any]:
    reported: dict[str, Any] = finished.checks[check].metadata["adjunct/facts"].value
    return reported


@pytest.mark.lengthy
def test_validators_are_checks_with_their_facts_and_the_version_that_they_judged(lab: Lab) -> None:
    lab.deliver("items", APPLES, "v1")
    finished = lab.advance(ITEMS)
    assert finished.success
    assert finished.passed == {
        "items adjunct_accepted": True,
        "items unique_keys": True,
        "items min_rows": True,
        "items row_count_within": True,
    }
    assert facts(finished, "items min_rows") == {"rows": 2}
    version = finished.made["items"]["adjunct/version"]
    assert finished.checks["items min_rows"].metadata["adjunct/version"].value == version
    assert finished.made["items"]["data version"] == version
    assert "report" in finished.made


def test_a_validator_may_have_the_name_of_the_check_of_tables(lab: Lab) -> None:
    named = replace(ITEMS, validators=(custom("bootstrapped", accept_all),))
    lab.deliver("items", APPLES, "v1")
    finished = lab.advance(named)
    assert finished.success
    assert finished.passed == {"items adjunct_accepted": True, "items bootstrapped": True}
    with pytest.raises(ConfigurationError) as caught:
        lab.definitions(replace(ITEMS, validators=(custom("adjunct_accepted", accept_all),)))
    assert caught.value.dataset == "items"


@pytest.mark.lengthy
def test_a_rejected_version_fails_its_check_and_the_previous_one_stays_in_use(lab: Lab) -> None:
    lab.deliver("items", APPLES, "v1")
    first = lab.advance(ITEMS).made["items"]["adjunct/version"]
    lab.deliver("items", APPLES[:1], "v2")
    finished = lab.advance(ITEMS)
    assert finished.success
    assert finished.passed["items min_rows"] is False
    assert finished.passed["items adjunct_accepted"] is False
    assert finished.checks["items min_rows"].severity.value == "ERROR"
    assert finished.checks["items row_count_within"].severity.value == "WARN"
    assert "items" not in finished.made, "nothing about it is fresh"
    items = finished.observed["items"]
    assert (items["adjunct/action"], items["adjunct/version"]) == ("rejected", first)
    (rejected,) = items["adjunct/rejected"]
    ((reported, event),) = finished.rejections
    assert reported is not None
    assert reported.startswith(
        f"dataset items: version 'v2' ({rejected['id']}) is rejected, version {first} stays"
        " served: "
    )
    assert (event["adjunct/rejected_version"], event["adjunct/served"]) == (rejected["id"], first)
    assert [verdict["name"] for verdict in event["adjunct/verdicts"]] == ["min_rows"]
    assert "switch took" not in finished.log
    assert "version v2: rejected and stored took" in finished.log
    assert rejected["name"] == "v2"
    assert f"adjunct dataset accept items {rejected['id']} --reason" in finished.log
    assert f"adjunct dataset diff items {first} {rejected['id']}" in finished.log
    assert "report" in finished.made


@pytest.mark.lengthy
def test_a_rejected_version_fails_its_check_until_it_is_removed_or_replaced(lab: Lab) -> None:
    lab.deliver("items", APPLES, "v1")
    lab.deliver("items", APPLES[:1], "v2")
    assert lab.advance(ITEMS).passed["items min_rows"] is False
    assert lab.advance(ITEMS).passed["items min_rows"] is False
    lab.store("items").remove_version("v2", **WHY)
    assert lab.advance(ITEMS).passed["items min_rows"] is True
    lab.deliver("items", [], "v3")
    assert lab.advance(ITEMS).passed["items min_rows"] is False
    lab.deliver("items", [*APPLES, ("c", "Cheese", 3)], "v4")
    assert set(lab.advance(ITEMS).passed.values()) == {True}


@pytest.mark.lengthy
def test_each_rejected_version_has_its_own_event_even_if_a_better_one_follows(lab: Lab) -> None:
    lab.deliver("items", APPLES[:1], "v1")
    lab.deliver("items", APPLES[1:], "v2")
    lab.deliver("items", APPLES, "v3")
    finished = lab.advance(ITEMS)
    assert [event["adjunct/name"] for _, event in finished.rejections] == ["v1", "v2"]
    assert finished.made["items"]["adjunct/name"] == "v3"


@pytest.mark.lengthy
def test_an_unchanged_dataset_is_observed_and_downstream_assets_still_run(lab: Lab) -> None:
    lab.deliver("items", APPLES, "v1")
    first = lab.advance(ITEMS)
    lab.deliver("items", list(reversed(APPLES)), "v2")
    for action in ("unchanged", "up-to-date"):
        finished = lab.advance(ITEMS)
        assert set(finished.made) == {"report"}
        assert finished.observed["items"]["adjunct/action"] == action
        assert finished.passed["items adjunct_accepted"] is True
        made = lab.instance.get_latest_materialization_event(key_of(ITEMS))
        assert made is not None
        assert made.run_id == first.result.run_id
        used = lab.instance.get_latest_materialization_event(AssetKey("report"))
        assert used is not None
        assert used.asset_materialization is not None
        tags = used.asset_materialization.tags or {}
        assert (
            tags["dagster/input_data_version/datasets/items_dataset"]
            == first.made["items"]["data version"]
        )


@pytest.mark.lengthy
def test_what_a_validator_warns_of_is_in_the_runs_log(lab: Lab) -> None:
    lab.deliver("items", APPLES, "v1")
    lab.deliver("items", [*APPLES, *[(str(number), "", 1) for number in range(9)]], "v2")
    finished = lab.advance(ITEMS)
    assert (
        "30 dataset items: version 'v2': row_count_within: 11 rows, +450.0% of the 2 of version"
        in finished.log
    )
    assert finished.made["items"]["adjunct/name"] == "v2"


@pytest.mark.lengthy
def test_a_rejected_first_version_materializes_nothing_and_skips_downstream_assets(
    lab: Lab,
) -> None:
    lab.deliver("items", APPLES[:1], "v1")
    finished = lab.advance(ITEMS)
    assert finished.success
    assert finished.made == {}
    assert finished.passed["items min_rows"] is False
    assert "there is no version to serve" in finished.log
    assert finished.observed["items"]["adjunct/version"] == "none"


@pytest.mark.lengthy
def test_a_version_rejected_before_any_validator_fails_the_check_of_acceptance(lab: Lab) -> None:
    lab.deliver("items", APPLES, "v1")
    lab.advance(ITEMS)
    lab.deliver("items", APPLES, None)
    lab.mark("items", "v2", {0: 5, 1: 5})
    finished = lab.advance(ITEMS)
    assert finished.passed == {"items adjunct_accepted": False}
    assert "expects 5 records" in finished.checks["items adjunct_accepted"].description


@pytest.mark.lengthy
def test_waiting_names_the_markers_and_since_when(lab: Lab) -> None:
    lab.deliver("items", APPLES, None)
    finished = lab.advance(ITEMS)
    assert finished.observed["items"]["adjunct/waiting"] == ["lake.items.0", "lake.items.1"]
    since = finished.observed["items"]["adjunct/waiting_since"]
    assert lab.advance(ITEMS).observed["items"]["adjunct/waiting_since"] == since
    assert finished.checks == {}
    assert finished.made == {}
    assert "did not yield" not in finished.log


@pytest.mark.lengthy
def test_each_stage_is_logged_with_its_duration(lab: Lab) -> None:
    lab.deliver("items", APPLES, "v1")
    finished = lab.advance(ITEMS)
    for stage in ("build", "validate", "seal", "switch"):
        assert f"dataset items, version v1: {stage} took" in finished.log
    stages = {key.removeprefix("adjunct/seconds/") for key in finished.made["items"]}
    assert stages >= {"collect", "build", "validate", "seal", "switch"}


@pytest.mark.lengthy
def test_what_an_operator_did_is_reported_by_the_next_run(lab: Lab) -> None:
    versions = []
    for number in (1, 2):
        lab.deliver("items", [*APPLES, ("c", "Cheese", number)], f"v{number}")
        versions.append(lab.advance(ITEMS).made["items"]["data version"])
    lab.store("items").rollback(**WHY)
    finished = lab.advance(ITEMS)
    assert (finished.made["items"]["data version"], finished.made["items"]["adjunct/name"]) == (
        versions[0],
        "v1",
    )
    lab.store("items").pin("v1", **WHY)
    lab.deliver("items", APPLES, "v3")
    pinned = lab.advance(ITEMS).observed["items"]
    assert (pinned["adjunct/version"], pinned["adjunct/retained"]) == (versions[0], 3)
    assert (pinned["adjunct/pin"]["reason"], pinned["adjunct/pin"]["by"]) == ("ticket 7", "ada")
    assert pinned["adjunct/head"].startswith("v000003-")


@pytest.mark.usefixtures("either_engine")
@pytest.mark.lengthy
def test_a_run_of_the_outputs_alone_reports_a_rollback_once(lab: Lab) -> None:
    defs = lab.definitions(ITEMS)
    copy = AssetKey(["lake", "copy"])
    for number in (1, 2):
        lab.deliver("items", [*APPLES, ("c", "Cheese", number)], f"v{number}")
        lab.run(defs, key_of(ITEMS))
    lab.store("items").rollback(**WHY)
    finished = lab.run(defs, copy)
    assert finished.made["items"]["adjunct/name"] == "v1"
    assert finished.made["items"]["adjunct/change"]["reason"] == "ticket 7"
    assert "items" not in lab.run(defs, copy).made


@pytest.mark.lengthy
def test_checks_selected_alone_are_reported_again_and_nothing_advances(lab: Lab) -> None:
    lab.deliver("items", APPLES, "v1")
    defs = lab.definitions(ITEMS)
    lab.run(defs, key_of(ITEMS))
    lab.deliver("items", APPLES[:1], "v2")
    job = defs.resolve_implicit_global_asset_job_def()
    subset = job.get_subset(
        asset_selection=set(), asset_check_selection={check_of(ITEMS, "min_rows")}
    )
    finished = FinishedRun(subset.execute_in_process(instance=lab.instance), lab.instance)
    assert finished.passed == {"items min_rows": True}
    assert finished.made == {}
    assert len(lab.store("items").versions()) == 1


@pytest.mark.lengthy
def test_the_members_of_a_version_set_are_one_op_and_published_together(lab: Lab) -> None:
    items, prices = version_set("catalogue", ITEMS, PRICES)
    lab.deliver("items", APPLES, "v1")
    lab.deliver("prices", APPLES, None)
    finished = lab.advance(items, prices)
    assert finished.success
    assert finished.made == {}
    assert "lake.prices.0" in " ".join(finished.observed["items"]["adjunct/waiting"])
    lab.deliver("prices", APPLES, "v1")
    finished = lab.advance(items, prices)
    assert [finished.made[name]["adjunct/name"] for name in ("items", "prices")] == ["v1", "v1"]
    steps = {event.step_key for event in finished.events if event.is_step_materialization}
    assert steps == {"version_set_catalogue", "report"}

    lab.deliver("items", [*APPLES, ("c", "Cheese", 3)], "v2")
    lab.deliver("prices", APPLES[:1], "v2")
    alone = lab.run(lab.definitions(items, prices), key_of(prices))
    assert [alone.made[name]["adjunct/name"] for name in ("items", "prices")] == ["v2", "v2"]


@pytest.mark.lengthy
def test_the_applications_job_evaluates_the_checks_and_runs_on(lab: Lab) -> None:
    items, prices = version_set("catalogue", ITEMS, PRICES)
    lab.deliver("items", APPLES, "v1")
    lab.deliver("prices", APPLES, "v1")
    job = lab.definitions(items, prices).resolve_job_def("shop")
    finished = FinishedRun(job.execute_in_process(instance=lab.instance), lab.instance)
    assert finished.success
    assert set(finished.made) == {"items", "prices"}
    assert finished.passed["items min_rows"] is True
    assert finished.passed["prices adjunct_accepted"] is True


def test_a_version_set_of_which_one_member_is_declared_is_refused_by_name(lab: Lab) -> None:
    items, _ = version_set("catalogue", ITEMS, PRICES)
    with pytest.raises(
        Exception, match=r"dataset 'items' of the version set 'catalogue' and none of its other"
    ):
        lab.definitions(items)


@pytest.mark.lengthy
def test_a_dataset_with_another_validator_is_another_declaration(lab: Lab) -> None:
    first, second = ITEMS, replace(ITEMS, validators=(min_rows(5),))
    lab.deliver("items", APPLES, "v1")
    lab.advance(first)
    finished = lab.advance(second)
    assert finished.passed == {"items adjunct_accepted": True, "items min_rows": True}, (
        "as it was judged, not anew"
    )


@pytest.mark.lengthy
def test_validators_of_changes_are_checks_with_counts_and_a_sample(lab: Lab) -> None:
    def following(*validators: Validator, **options: Any) -> AdjunctDataset:
        return unbounded_dataset(
            "items", input="lake.items", key="item", partitions=2, validators=validators, **options
        )

    cheap = sql_check("cheap", "price < 10")
    lab.deliver("items", [*APPLES, ("c", "Caviar", 99)], None)
    failed = lab.advance(following(cheap))
    assert not failed.success
    assert failed.passed["items cheap"] is False
    assert failed.made == {}
    finished = lab.advance(following(cheap, on_bad_change=DeadLetters("lake.dead")))
    assert finished.success
    assert finished.passed == {"items bootstrapped": True, "items cheap": False}
    check = finished.checks["items cheap"]
    assert check.severity is AssetCheckSeverity.WARN
    counted = {name: check.metadata[f"adjunct/{name}"].value for name in ("rows", "failed")}
    assert counted == {"rows": 3, "failed": 1}
    (shown,) = facts(finished, "items cheap")["sample"]
    assert shown.startswith("item = c at lake.items.")
    with pytest.raises(ConfigurationError):
        lab.definitions(following(sql_check("bootstrapped", "price < 10")))
