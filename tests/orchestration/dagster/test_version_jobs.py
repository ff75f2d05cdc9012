"""The jobs for operators: acting on versions from the launchpad, and discarding."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from dagster import DefaultScheduleStatus, Definitions

from dagster_adjunct import bounded_dataset
from dagster_adjunct.assets.declaration.dataset import version_set
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.validation.validators import min_rows
from tests.orchestration.dagster.lab import APPLES, FinishedRun, Lab, key_of

ITEMS = bounded_dataset("items", input="lake.items", key="item", partitions=2)
NEWEST_ONLY = replace(ITEMS, discard=DiscardPolicy(keep=1, grace=timedelta(0)))
PRICES = bounded_dataset("prices", input="lake.prices", key="item", partitions=2)


def job(lab: Lab, defs: Definitions, name: str, op: str, **config: Any) -> FinishedRun:
    run_config = {"ops": {op: {"config": config}}}
    result = defs.resolve_job_def(name).execute_in_process(
        instance=lab.instance, raise_on_error=False, run_config=run_config
    )
    return FinishedRun(result, lab.instance)


def act(lab: Lab, defs: Definitions, **config: Any) -> FinishedRun:
    asked = {"dataset": "items", "reason": "ticket 7", **config}
    return job(lab, defs, "shop_version_action", "version_action_shop", **asked)


def deliver(lab: Lab, defs: Definitions, count: int) -> list[str]:
    versions = []
    for number in range(1, count + 1):
        lab.deliver("items", [*APPLES, ("c", "Cheese", number)], f"v{number}")
        versions.append(lab.run(defs, key_of(ITEMS)).made["items"]["data version"])
    return versions


@pytest.mark.lengthy
def test_a_version_is_rolled_back_pinned_and_revoked_from_the_launchpad(lab: Lab) -> None:
    defs = lab.definitions(ITEMS)
    versions = deliver(lab, defs, 3)
    back = act(lab, defs, action="rollback")
    assert back.success
    assert back.made["items"]["data version"] == versions[1]
    assert back.made["items"]["adjunct/change"]["reason"] == "ticket 7"
    pinned = act(lab, defs, action="pin", version="v1", expires_in_hours=2, by="ada")
    assert pinned.made["items"]["adjunct/pin"]["by"] == "ada"
    assert pinned.made["items"]["adjunct/pin"]["expires_at"] is not None
    act(lab, defs, action="unpin")
    gone = act(lab, defs, action="revoke", version="v2")
    assert gone.made["items"]["data version"] == versions[0]
    assert lab.store("items").history(1)[0].by == gone.result.run_id


@pytest.mark.lengthy
def test_an_older_forced_version_is_served_only_on_request(lab: Lab) -> None:
    strict = replace(ITEMS, validators=(min_rows(3),))
    defs = lab.definitions(strict)
    for version, rows in (
        ("v1", APPLES[:1]),
        ("v2", [*APPLES, ("c", "Cheese", 1)]),
        ("v3", APPLES[:1]),
    ):
        lab.deliver("items", rows, version)
    lab.run(defs, key_of(strict))
    unserved = act(lab, defs, action="accept", version="v1")
    assert unserved.observed["items"]["adjunct/name"] == "v2"
    assert "adjunct dataset rollback items" in unserved.log
    lab.deliver("items", [*APPLES, ("c", "Cheese", 2)], "v4")
    lab.run(defs, key_of(strict))
    assert (
        act(lab, defs, action="accept", version="v3", make_current=True).made["items"][
            "adjunct/name"
        ]
        == "v3"
    )


@pytest.mark.lengthy
def test_an_action_that_lacks_something_fails_and_says_what(lab: Lab) -> None:
    defs = lab.definitions(ITEMS)
    deliver(lab, defs, 1)
    assert "needs a version" in act(lab, defs, action="accept").failure.description
    assert "no dataset 'item'" in act(lab, defs, action="unpin", dataset="item").failure.description
    failure = act(lab, defs, action="pin", version="v9").failure
    assert "has no version 'v9'" in failure.description
    assert "adjunct dataset versions items" in failure.metadata["next step"].value
    for hours in (1e12, float("inf"), float("nan")):
        failure = act(lab, defs, action="pin", version="v1", expires_in_hours=hours).failure
        assert failure.metadata["error"].value == "ConfigurationError"
        assert "expires_in_hours" in failure.description


@pytest.mark.lengthy
def test_an_action_on_a_member_of_a_version_set_is_reported_for_all_members(lab: Lab) -> None:
    items, prices = version_set("catalogue", ITEMS, PRICES)
    defs = lab.definitions(items, prices)
    for number in (1, 2):
        for stream in ("items", "prices"):
            lab.deliver(stream, [*APPLES, ("c", "Cheese", number)], f"v{number}")
        lab.run(defs, key_of(items), key_of(prices))
    back = act(lab, defs, action="rollback")
    assert {name: facts["adjunct/name"] for name, facts in back.made.items()} == {
        "items": "v1",
        "prices": "v1",
    }


@pytest.mark.lengthy
def test_discarding_follows_each_datasets_policy_and_a_dry_run_only_lists(lab: Lab) -> None:
    deliver(lab, lab.definitions(ITEMS), 3)
    # prices was never delivered: there is nothing to discard in it
    defs = lab.definitions(NEWEST_ONLY, PRICES)
    dry = job(lab, defs, "shop_discard", "discard_shop", dry_run=True)
    assert dry.success
    assert [version["name"] for version in report(dry)["discarded"]] == ["v1", "v2"]
    assert len(lab.store("items").versions()) == 3
    done = job(lab, defs, "shop_discard", "discard_shop")
    assert report(done)["objects"] > 0
    assert [ref.name for ref in lab.store("items").versions()] == ["v3"]
    kept = lab.definitions(replace(ITEMS, discard=DiscardPolicy(keep=None, grace=timedelta(0))))
    assert report(job(lab, kept, "shop_discard", "discard_shop"))["discarded"] == []


@pytest.mark.lengthy
def test_what_a_new_version_makes_needless_is_discarded_in_the_same_run(lab: Lab) -> None:
    defs = lab.definitions(NEWEST_ONLY)
    deliver(lab, defs, 2)
    assert [ref.name for ref in lab.store("items").versions()] == ["v2"]


def report(finished: FinishedRun) -> dict[str, Any]:
    (output,) = [event for event in finished.events if event.is_successful_output]
    listed: dict[str, Any] = output.step_output_data.metadata["items"].value
    return listed


def test_the_discarding_schedule_is_off_until_somebody_switches_it_on(lab: Lab) -> None:
    (schedule,) = lab.definitions(ITEMS).schedules or ()
    assert (schedule.name, schedule.default_status) == (
        "shop_discard_daily",
        DefaultScheduleStatus.STOPPED,
    )
