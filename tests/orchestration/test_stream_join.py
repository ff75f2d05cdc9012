"""Streams that meet within a time, against plain Python over the whole input: each result once,
whatever dies.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest

from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.maintenance.expire import expire_versions
from dagster_adjunct.resources.errors import DatasetNotFoundError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.windows import Count, Tumbling
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.orchestration.meeting_streams import KINDS, create, drawn, expected, joined_rows, meeting
from tests.orchestration.seen_times import at
from tests.orchestration.step_world import StepWorld, crash_at

pytestmark = pytest.mark.spark


def send(world: StepWorld, chance: random.Random, now: int, count: int, keys: int = 6) -> None:
    """Send so many records to each stream, one a second from now on."""
    for stream in ("orders", "payments"):
        first = world.sequences.setdefault("numbers", 0)
        world.sequences["numbers"] += count
        world.send(
            stream, *[drawn(chance, first + index, now + index, keys) for index in range(count)]
        )


def kept(world: StepWorld, name: str) -> tuple[int, int]:
    """Return the rows and the generations of a table of state."""
    generations = StoredVersions(world.lake, name).require_current().sealed.generations
    return sum(generation.rows for generation in generations), sum(
        bool(generation.files) for generation in generations
    )


def test_each_result_comes_once_though_batches_die_and_are_given_up_and_state_goes(
    step_world: StepWorld,
) -> None:
    create(step_world)
    chance, app = random.Random(3), meeting(130, "full", late=True)
    send(step_world, chance, 0, 60)
    with pytest.raises(Crash):
        # its output and its state are in, and it is open
        step_world.run(app, run="dies", on_event=crash_at("outputs"))
    step_world.run(app, run="goes on")
    first = expected(step_world, "full")[0]
    assert joined_rows(step_world, "full") == first
    before = kept(step_world, "meeting-full-left")[0]

    send(step_world, chance, 100, 60)
    with pytest.raises(Crash):
        step_world.run(app, run="dies", on_event=crash_at("outputs"))
    BatchLog(step_world.lake, app.name).abandon(reason="a mistake", by="me", skip=False)
    step_world.run(app, run="later")
    wanted, counts = expected(step_world, "full")
    assert joined_rows(step_world, "full") == wanted + (wanted - first), (
        "what the one given up has sent comes twice"
    )
    assert sum(result[2] is None for result in wanted) > 5
    assert sum(result[1] is None for result in wanted) > 5
    rows, generations = kept(step_world, "meeting-full-left")
    assert generations == 1, "the first batch's rows have gone together"
    assert rows <= before
    (totals,) = (
        of for name, of in step_world.state(app).totals.items() if name.startswith("stream-join")
    )
    assert {name: totals[name] for name in ("late", "null_times", "again")} == {
        "late": counts["late"],
        "null_times": counts["null_times"],
        "again": 0,
    }
    assert totals["matched"] + totals["unmatched"] == sum(wanted.values())
    assert counts["late"] > 5


@pytest.mark.long  # plans are strict above, too
def test_pairs_alone_move_no_more_than_the_plan_lists(step_world: StepWorld) -> None:
    create(step_world)
    app = meeting(40, "inner")
    for round in range(2):  # the second with state
        send(step_world, random.Random(round), 30 * round, 30)
        step_world.run(app, run=f"{round}")  # strict: what is not in the plan is an error
    assert joined_rows(step_world, "inner") == expected(step_world, "inner")[0]


@pytest.mark.long  # the kinds by themselves; "full" has the results of all of them
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", KINDS)
def test_all_kinds_are_what_plain_python_makes_however_batches_are_cut_and_die(
    step_world: StepWorld, how: str
) -> None:
    create(step_world)
    chance, died = random.Random(KINDS.index(how)), 0
    for now in range(0, 80, 20):
        app = meeting(chance.choice([20, 35, 60, 200]), how, late=True)
        send(step_world, chance, now, 20, keys=4)
        fault = Fault(
            "*", chance.randrange(40, 250), chance.choice(["crash-before", "crash-after"])
        )
        try:
            faulty = Lake(FaultyStore(step_world.lake.store, [fault]), step_world.lake.id)
            replace(step_world, lake=faulty).run(app, run=f"a-{now}")
        except Crash:
            died += 1
        if step_world.state(app).open is not None and chance.random() < 0.3:
            give_up(step_world, app, how)
        with suppress(DatasetNotFoundError):
            expire_versions(
                step_world.lake, f"meeting-{how}-left", DiscardPolicy(1, timedelta(0)), by="test"
            )
        if chance.random() < 0.5:
            step_world.run(app, run=f"b-{now}")
            assert joined_rows(step_world, how) == expected(step_world, how)[0]
    step_world.run(app, run="last")
    assert died > 1
    results = expected(step_world, how)[0]
    assert len(results) > 70
    assert joined_rows(step_world, how) == results


def give_up(world: StepWorld, app: Application, stream: str) -> None:
    """Abandon the open batch where its output has not been written: else its records come twice,
    as is said.
    """
    batch = world.state(app).batch + 1
    if (
        stream not in world.streams.list_streams()
        or world.streams.appended(stream, app.name, batch) is None
    ):
        BatchLog(world.lake, app.name).abandon(reason="test", by="test", skip=False)


# test_stream_join_splits.py holds it of joins alone, test_windows_behind_others of windows
@pytest.mark.long
def test_what_is_late_behind_a_join_does_not_depend_on_the_cut(step_world: StepWorld) -> None:
    create(step_world, 1)

    def app(name: str) -> Application:
        made = Application(name, auto_repartition=True)
        options = {"default_offset": "oldest", "event_time": "ts"}
        orders = made.input_stream("lake.orders", **options)  # type: ignore[arg-type]
        payments = made.input_stream("lake.payments", **options)  # type: ignore[arg-type]
        ten = timedelta(seconds=10)
        joined = orders.join_stream(
            payments, on={"k": "order_key"}, within=ten, how="left", name="j", select=[]
        )
        for what, records, by in (("joined", joined, "n"), ("late", joined.late_records(), "why")):
            windows = records.partition_by(by).window(
                Tumbling(ten), by=by, name=what, aggregates={"rows": Count()}
            )
            windows.send_to(made.output_stream(f"lake.{name}-{what}", partitions=1, key=by))
        return made

    step_world.send("payments", ("p", 1, at(300)))
    rounds = (
        [("a", 1, at(0)), ("a", 2, at(100))],
        [(None, 3, at(97)), (None, 4, at(85)), ("a", 5, at(50))],
    )
    for orders in (*rounds, [("a", 6, at(300))]):
        step_world.send("orders", *orders)
        step_world.run(app("cut"))
    counted = [step_world.run(app("whole")).counters, step_world.state(app("cut")).totals]
    # The watermark was at 100 when 3, 4 and 5 came, and is 10 s less behind the join: only [90,
    # 100) was still open.
    for name, counts in zip(("whole", "cut"), counted, strict=True):
        assert sorted(row["n"] for row in step_world.rows(f"{name}-joined")) == [1, 2, 3]
        assert step_world.rows(f"{name}-late") == []
        (joined,) = (of for operator, of in counts.items() if operator.startswith("stream-join"))
        assert (joined["null_keys"], joined["late"]) == (2, 1)


@pytest.mark.long
def test_streams_of_one_partition_meet(step_world: StepWorld) -> None:
    create(step_world, 1)
    chance, app = random.Random(8), meeting(130, "full", "inner", partitions=1)
    for now in (0, 60):
        send(step_world, chance, now, 60)
        step_world.run(app, run=f"run-{now}")
    for how in ("full", "inner"):
        assert joined_rows(step_world, how) == expected(step_world, how)[0]
