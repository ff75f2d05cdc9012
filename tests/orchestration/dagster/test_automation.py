"""Automation conditions of datasets and applications: what is launched, what is refused, and with
the sensors on.

That the ready-made ones launch what the sensors launch is in the tests of the sensors, which run
for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.freshness import FreshnessState, FreshnessStateChange

from dagster_adjunct import (
    AdjunctDataset,
    Application,
    Lake,
    Schema,
    VersionPartitions,
    bounded_dataset,
    build_definitions,
    unbounded_dataset,
    version_set,
)
from dagster_adjunct.automation import new_records, new_startpoints, new_version, stale
from dagster_adjunct.code_location import AdjunctTranslator, AssetSubject, LaunchWhen
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.code_location.automation import Answer, Steps, complete_requests
from dagster_adjunct.orchestration.code_location.sensor_ticks import Launcher
from dagster_adjunct.sources import QuerySource
from tests.clocks import on_clock
from tests.faulty_store import FaultyStore
from tests.orchestration.dagster.lab import APPLES, NO_SPARK, Lab, key_of, running_lab
from tests.orchestration.dagster.ticking import Ticker

Condition = dg.AutomationCondition[Any]
COPY, ORDERS = dg.AssetKey(["lake", "copy"]), dg.AssetKey(["lake", "orders"])


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with running_lab(tmp_path) as lab:
        yield lab


class Switch(dg.AutomationCondition[Any]):
    """A condition of a user's own, true while it is on."""

    def __init__(self, on: bool = True) -> None:
        self.on = on

    def evaluate(self, context: Any) -> dg.AutomationResult[Any]:
        true = context.candidate_subset if self.on else context.get_empty_subset()
        return dg.AutomationResult(context, true)


def items(condition: Condition | None = None, **more: Any) -> AdjunctDataset:
    return bounded_dataset(
        "items",
        input="lake.items",
        key="item",
        partitions=2,
        automation_condition=condition,
        **more,
    )


def rates(condition: Condition | None = None, **more: Any) -> AdjunctDataset:
    more = {"freshness": timedelta(minutes=30), **more}
    return unbounded_dataset(
        "rates",
        input="lake.rates",
        key="item",
        partitions=2,
        automation_condition=condition,
        **more,
    )


def shop(condition: Condition | None, *datasets: AdjunctDataset) -> Application:
    app = Application("shop", automation_condition=condition)
    orders = app.input_stream("lake.orders", default_offset="oldest")
    orders.send_to(app.output_stream("lake.copy", partitions=1))
    orders.filter("price > 1").send_to(app.output_stream("lake.dear", partitions=1))
    for dataset in datasets:
        app.table(dataset)
    return app


def ticker(lab: Lab, app: Application, lake: Lake | None = None, **options: Any) -> Ticker:
    return Ticker(lake or lab.lake, app, lab.instance, "shop_automation", spark=NO_SPARK, **options)


def names(request: dg.RunRequest) -> list[str]:
    return [key.path[-1] for key in request.asset_selection or ()]


def test_without_conditions_there_is_no_sensor_for_them() -> None:
    sensors = [sensor.name for sensor in build_definitions(shop(None, items())).sensors or ()]
    assert "shop_automation" not in sensors


def test_a_condition_for_records_runs_the_datasets_too_with_the_sensors_tags(lab: Lab) -> None:
    lab.deliver("items", APPLES, "v1")
    lab.deliver("orders", APPLES, None)
    request = ticker(lab, shop(new_records(), items())).asked()
    assert names(request) == ["items_dataset", "copy", "dear"]
    assert (request.tags["adjunct/lag"], request.tags["adjunct/application"]) == ("2", "shop")
    assert str(request.run_key).startswith(f"shop:{lab.lake.id}:")


def test_whatever_one_launcher_raises_the_others_are_asked(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang_up(*_: Any) -> Any:
        raise RuntimeError("the server hung up")

    monkeypatch.setattr(
        "dagster_adjunct.orchestration.code_location.sensors._next_delivered", hang_up
    )
    lab.deliver("items", APPLES, "v1")
    lab.deliver("orders", APPLES, None)
    assert "copy" in names(ticker(lab, shop(new_records(), items(new_version()))).asked())
    with pytest.raises(RuntimeError, match="hung up"):
        ticker(lab, shop(None, items(new_version()))).tick()


def test_an_attempt_that_another_condition_held_back_does_not_count(lab: Lab) -> None:
    switch = Switch(on=False)
    lab.deliver("orders", APPLES, None)
    sensor = ticker(lab, shop(new_records() & switch))
    for _ in range(3):
        assert isinstance(sensor.tick(), str)
    switch.on = True
    assert str(sensor.asked().run_key).endswith(":1")
    assert "attempt 1 did not change that" in sensor.skipped()


def test_nothing_is_asked_for_what_another_condition_rules_out(tmp_path: Path) -> None:
    """The lake is not even opened."""
    with running_lab(tmp_path) as lab:
        sensor = ticker(lab, shop(Switch(on=False) & (new_records() | new_startpoints())))
        assert sensor.skipped() == "No condition is true."
        assert not (tmp_path / "lake").exists()


def test_conditions_of_all_outputs_ask_the_lake_as_often_as_the_sensor(lab: Lab) -> None:
    lab.deliver("orders", APPLES[:0], None)
    counts = []
    for name, by in (("shop_new_records", "sensor"), ("shop_new_records", "condition")):
        store = FaultyStore(lab.lake.store)
        sensor = Ticker(
            Lake(store, lab.lake.id), shop(None), lab.instance, name, by, spark=NO_SPARK
        )
        for _ in range(2):
            del store.requests[:]
            assert sensor.skipped() == "No new records."
            # The head of a lease is asked for beside its content, unless that has been found
            # missing before.
            counts.append(
                sum(request != ("head", "applications/shop/run.json") for request in store.requests)
            )
    assert counts[:2] == counts[2:]
    assert counts[1] <= 10


def test_a_users_condition_on_one_output_runs_the_whole_step(lab: Lab) -> None:
    class OnlyDear(AdjunctTranslator):
        def get_automation_condition(self, subject: AssetSubject) -> Condition | None:
            return Switch() if subject.name == "lake.dear" else None

    request = ticker(lab, shop(None, items()), translator=OnlyDear()).asked()
    assert names(request) == ["copy", "dear"]
    assert (request.run_config, [tag for tag in request.tags if tag.startswith("adjunct/")]) == (
        {},
        [],
    )


def test_a_local_table_has_the_condition_of_its_application_or_one_of_its_own() -> None:
    app = shop(new_records())
    own = dg.AutomationCondition.cron_tick_passed("0 3 * * *")
    schema = Schema.of(item="string", price="int")
    for name, condition in (("last", None), ("nightly", own)):
        table = app.local_table(
            name, key="item", schema=schema, partitions=1, automation_condition=condition
        )
        app.input_stream(f"lake.{name}").send_to(table)
    graph = build_definitions(app).resolve_asset_graph()
    conditions = {
        key.path[-1]: graph.get(key).automation_condition for key in graph.materializable_asset_keys
    }
    assert conditions["last_dataset"].name == conditions["copy"].name == "new_records"
    assert conditions["nightly_dataset"] == own


def test_a_users_condition_on_a_member_of_a_version_set_runs_the_set(lab: Lab) -> None:
    prices = bounded_dataset("prices", input="lake.prices", key="item", partitions=2)
    members = version_set("catalogue", items(Switch()), prices)
    assert names(ticker(lab, shop(None, *members)).asked()) == ["items_dataset", "prices_dataset"]


def test_eager_outputs_are_in_the_run_of_the_version_that_they_wait_for(lab: Lab) -> None:
    eager = dg.AutomationCondition.eager().ignore(dg.AssetSelection.assets(ORDERS))
    sensor = ticker(lab, shop(eager, items(new_version())))
    assert "No new version" in sensor.skipped()
    lab.deliver("items", APPLES, "v1")
    assert names(sensor.asked()) == ["items_dataset", "copy", "dear"]


def test_to_dagster_a_stream_that_nothing_here_writes_is_missing_forever(lab: Lab) -> None:
    """What the page says of eager(): it waits for such an input, unless it ignores it."""
    sensor = ticker(lab, shop(dg.AutomationCondition.eager(), items(new_version())))
    lab.instance.report_runless_asset_event(dg.AssetObservation(ORDERS))
    assert "No new version" in sensor.skipped()
    lab.deliver("items", APPLES, "v1")
    assert names(sensor.asked()) == ["items_dataset"]


def test_a_time_of_the_day_needs_no_update_of_what_is_read(lab: Lab) -> None:
    defs = build_definitions(
        shop(dg.AutomationCondition.cron_tick_passed("0 3 * * *"), items()), lake=lab.lake.url
    )
    at, cursor, requested = datetime(2026, 1, 2, 2, 0, tzinfo=UTC), None, []
    for _ in range(3):
        found = dg.evaluate_automation_conditions(
            defs, lab.instance, evaluation_time=at, cursor=cursor
        )
        requested.append(found.get_num_requested(COPY))
        at, cursor = at + timedelta(hours=2), found.cursor
    assert requested == [0, 1, 0]


@pytest.mark.lengthy
def test_a_launcher_that_cannot_decide_holds_no_other_back(lab: Lab) -> None:
    menu = bounded_dataset(
        "menu", input="lake.menu", key="item", partitions=2, automation_condition=new_version()
    )
    sensor = ticker(lab, shop(None, items(new_version()), menu))
    lab.deliver("items", APPLES, "v1")
    assert names(sensor.asked()) == ["items_dataset"]
    assert lab.advance(items()).success
    lab.mark("items", "v1", {0: 9, 1: 9})
    with pytest.raises(Exception, match="v1"):
        sensor.tick()
    lab.deliver("menu", APPLES, "v1")
    assert names(sensor.asked()) == ["menu_dataset"]


@pytest.mark.lengthy
def test_with_a_sensor_and_its_condition_on_the_second_run_finds_nothing(lab: Lab) -> None:
    lab.deliver("items", APPLES, "v1")
    sensor = Ticker(lab.lake, shop(None, items()), lab.instance, "items_delivered", spark=NO_SPARK)
    conditions = ticker(lab, shop(None, items(new_version())))
    requests = [sensor.asked(), conditions.asked()]  # both before one of the runs has begun
    for request in requests:
        job = sensor.defs.resolve_job_def("shop").get_subset(
            asset_selection=set(request.asset_selection or ())
        )
        assert job.execute_in_process(instance=lab.instance).success
    assert [ref.name for ref in lab.store("items").versions()] == ["v1"]
    assert isinstance(sensor.tick(), str)
    assert isinstance(conditions.tick(), str)


def test_a_condition_waits_for_a_run_that_the_sensor_has_launched(lab: Lab) -> None:
    lab.deliver("items", APPLES, "v1")
    conditions = ticker(lab, shop(None, items(new_version())))
    run = dg.DagsterRun(
        "shop", status=dg.DagsterRunStatus.STARTED, asset_selection=frozenset({key_of(items())})
    )
    lab.instance.add_run(run)
    assert "a run is already in progress" in conditions.skipped()


# -- versions that are partitions


@pytest.mark.lengthy
@pytest.mark.parametrize("versions", [VersionPartitions(), VersionPartitions(names=("v1", "v2"))])
def test_a_delivered_version_is_requested_as_its_partition(
    lab: Lab, versions: VersionPartitions
) -> None:
    parted = items(new_version(), versions=versions)
    sensor = ticker(lab, shop(None, parted))
    assert "No new version" in sensor.skipped()
    for number in (1, 2):
        lab.deliver("items", APPLES[:number], f"v{number}")
        request = sensor.asked()
        assert (request.partition_key, names(request)) == (f"v{number}", ["items_dataset"])
        assert str(request.run_key).startswith(f"items:{lab.lake.id}:")
        assert request.tags["dagster/partition"] == f"v{number}"
        assert lab.run(sensor.defs, key_of(parted), partition_key=f"v{number}").success


@pytest.mark.lengthy
def test_a_dated_version_updates_the_day_and_the_week_of_assets_made_from_it(lab: Lab) -> None:
    parted = items(new_version(), versions=VersionPartitions("day", start="2026-01-01"))

    def from_it(name: str, partitions: dg.PartitionsDefinition[str]) -> dg.AssetsDefinition:
        condition = dg.AutomationCondition.any_deps_updated()

        @dg.asset(
            name=name,
            partitions_def=partitions,
            deps=[key_of(parted)],
            automation_condition=condition,
        )
        def made() -> None: ...

        return made

    day = from_it("day", dg.DailyPartitionsDefinition("2026-01-01"))
    week = from_it("week", dg.WeeklyPartitionsDefinition("2026-01-01"))
    ours = build_definitions(shop(None, parted), lake=lab.lake.url, spark=NO_SPARK)
    defs = dg.Definitions.merge(ours, dg.Definitions(assets=[day, week]))
    lab.deliver("items", APPLES, "2026-01-06")
    before = dg.evaluate_automation_conditions(defs, lab.instance)
    assert before.get_requested_partitions(key_of(parted)) == {"2026-01-06"}
    assert lab.run(defs, key_of(parted), partition_key="2026-01-06").success
    after = dg.evaluate_automation_conditions(defs, lab.instance, cursor=before.cursor)
    requested = [after.get_requested_partitions(key) for key in (key_of(parted), day.key, week.key)]
    assert requested == [set(), {"2026-01-06"}, {"2026-01-04"}], "the week begins on Sunday"


# -- tables that fail their freshness policy


def evaluated(lab: Lab, state: FreshnessState) -> None:
    """Store what Dagster's daemon found about the table's freshness."""
    change = FreshnessStateChange(
        key=key_of(rates()),
        previous_state=FreshnessState.UNKNOWN,
        new_state=state,
        state_change_timestamp=datetime.now(UTC).timestamp(),
    )
    lab.instance._report_runless_asset_event(change)


def test_a_table_that_fails_its_freshness_policy_is_checked(lab: Lab) -> None:
    passed = timedelta(0)
    lake = on_clock(lab.lake, lambda: datetime.now(UTC) + passed)
    sensor = ticker(lab, shop(None, rates(stale())), lake)
    assert names(sensor.asked()) == ["rates_dataset"], "nobody has ever checked it"
    lab.instance.report_runless_asset_event(dg.AssetMaterialization(key_of(rates())))
    evaluated(lab, FreshnessState.FAIL)
    assert "was checked for changes within 0:30:00" in sensor.skipped(), (
        "Dagster has not seen the check yet"
    )
    passed = timedelta(minutes=31)
    request = sensor.asked()
    assert names(request) == ["rates_dataset"]
    assert str(request.run_key).startswith(f"rates:{lab.lake.id}:stale:")
    assert "attempt 1 did not change that" in sensor.skipped()
    passed += timedelta(minutes=1)
    assert str(sensor.asked().run_key).endswith(":2")
    lab.instance.report_runless_asset_event(dg.AssetMaterialization(key_of(rates())))
    evaluated(lab, FreshnessState.PASS)
    assert sensor.skipped() == "No condition is true."


# -- what is refused


QUERY = QuerySource("SELECT 1", Schema.of(item="string"))


def only_datasets(condition: Condition | None) -> Application:
    app = Application("shop", automation_condition=condition)
    app.table(items())
    return app


@pytest.mark.parametrize(
    "app",
    [
        shop(new_version()),
        shop(stale() | new_records()),
        only_datasets(new_records()),
        only_datasets(dg.AutomationCondition.eager()),
        shop(None, items(new_records())),
        shop(None, items(stale())),
        shop(None, rates(new_version())),
        shop(None, rates(stale(), freshness=None)),
        shop(
            None,
            bounded_dataset(
                "q", input=QUERY, key="item", broadcast=True, automation_condition=new_version()
            ),
        ),
        shop(None, rates(new_startpoints())),
        shop(None, rates(dg.AutomationCondition.eager(), persistent=False)),
        shop(new_records),  # type: ignore[arg-type]
        shop("hourly"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_a_condition_that_nothing_answers_is_refused_with_the_next_step(app: Application) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build_definitions(app)
    assert caught.value.argument == "automation_condition"
    assert caught.value.next_step


def test_an_application_of_datasets_alone_has_no_sensor_for_records() -> None:
    sensors = [sensor.name for sensor in build_definitions(only_datasets(None)).sensors or ()]
    assert sensors == ["shop_restart", "items_delivered"]


def test_startpoints_that_are_switched_off_have_no_condition() -> None:
    app = Application("shop", startpoints=False, automation_condition=new_startpoints())
    app.input_stream("lake.orders").send_to(app.output_stream("lake.copy", partitions=1))
    with pytest.raises(ConfigurationError):
        build_definitions(app)


def test_a_ready_made_condition_on_an_asset_of_a_users_own_is_refused(lab: Lab) -> None:
    @dg.asset(automation_condition=new_version())
    def mine() -> None: ...

    with pytest.raises(Exception, match="mine") as caught:
        dg.evaluate_automation_conditions([mine], lab.instance)
    assert isinstance(caught.value.__cause__, ConfigurationError)


def test_declarations_that_differ_in_the_condition_alone_are_refused() -> None:
    other = Application("other")
    other.table(items())
    with pytest.raises(ConfigurationError) as caught:
        build_definitions(shop(None, items(new_version())), other)
    assert caught.value.dataset == "items"
    assert items(new_version()) == items(new_version())


# -- as others evaluate them


def test_dagsters_own_tester_evaluates_them(lab: Lab) -> None:
    """What it requests is what Dagster records; the sensor of the code location makes the whole
    run of it.
    """
    lab.deliver("items", APPLES, "v1")
    lab.deliver("orders", APPLES, None)
    defs = build_definitions(
        shop(new_records(), items(new_version())), lake=lab.lake.url, spark=NO_SPARK
    )
    selection = dg.AssetSelection.assets(COPY, key_of(items()))
    first = dg.evaluate_automation_conditions(defs, lab.instance, selection)
    assert first.get_num_requested(COPY) == first.get_num_requested(key_of(items())) == 1
    again = dg.evaluate_automation_conditions(defs, lab.instance, selection, cursor=first.cursor)
    assert again.total_requested == 0


def test_the_sensor_survives_what_dagster_adds_to_it() -> None:
    sensor = build_definitions(shop(new_records())).resolve_sensor_def("shop_automation")
    copied = sensor.with_attributes(metadata={"team": "shop"})
    assert type(copied) is type(sensor)
    assert copied.metadata["team"] == dg.MetadataValue.text("shop")


# -- how the runs of a tick are cut

A, B, C = (dg.AssetKey(name) for name in "abc")


def skip(tick: object) -> dg.SkipReason:
    return dg.SkipReason()


def answer(job: str, keys: list[dg.AssetKey], **request: Any) -> Answer:
    launcher = Launcher(job, dg.define_asset_job(job), keys, "", skip)
    return Answer(launcher, dg.RunRequest(run_key=job, **request), None, True, {keys[-1]})


STEPS = Steps({}, {"first": frozenset({A}), "second": frozenset({B})})


def cut(asked: list[dg.AssetKey], *answers: Answer) -> list[list[str]]:
    parents = {B: {A}, C: {B}}
    requests = complete_requests(
        [dg.RunRequest(asset_selection=asked)], answers, STEPS, lambda key: parents.get(key, set())
    )
    return [[key.to_user_string() for key in one.asset_selection or ()] for one in requests]


def test_each_application_has_a_run_of_its_own_as_by_the_sensors() -> None:
    assert cut([A, B], answer("first", [A]), answer("second", [B])) == [["a"], ["b"]]


def test_what_waits_for_an_asset_of_a_run_is_in_that_run() -> None:
    assert cut([A, B, C], answer("first", [A])) == [["a", "b", "c"]]
    assert cut([A, C], answer("first", [A])) == [["a"], ["c"]]


def test_nothing_waits_for_the_end_of_a_run_that_stays() -> None:
    staying = answer(
        "first", [A], run_config=LaunchWhen(stay=timedelta(hours=1)).run_config("first")
    )
    assert cut([A, B], staying) == [["a"], ["b"]]


def test_an_answer_for_an_asset_that_was_not_requested_changes_nothing() -> None:
    assert cut([B], answer("first", [A])) == [["b"]]


def test_sensors_look_as_often_as_the_code_location_says() -> None:
    def intervals(**options: Any) -> set[int | None]:
        made = build_definitions(shop(new_records()), spark=NO_SPARK, **options).sensors or ()
        assert len(list(made)) > 2
        return {sensor.minimum_interval_seconds for sensor in made}

    assert intervals() == {30}
    assert intervals(look_every=timedelta(seconds=5)) == {5}
    for wrong in (timedelta(milliseconds=999), timedelta(days=1, seconds=1), timedelta(seconds=-5)):
        with pytest.raises(ConfigurationError) as caught:
            intervals(look_every=wrong)
        assert caught.value.argument == "look_every"
