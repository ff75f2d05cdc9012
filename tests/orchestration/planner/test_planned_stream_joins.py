"""Joins of two streams as they are planned: where both sides lie, what their keys are, and what
is kept of them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from dagster_adjunct import bounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    PartitionCountMismatchError,
    PlanningError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.testing import TestStream, assert_plannable
from dagster_adjunct.windows import Aggregate, Count, Session, Sum, Tumbling

MINUTE = timedelta(minutes=1)


def given(partitions: int = 2, kind: str = "string", key: str = "k") -> dict[str, TestStream]:
    right = Schema.of(k=kind, other="string", paid="int", at="timestamp")
    return {
        "lake.left": TestStream(
            Schema.of(k="string", n="int", at="timestamp"), key="k", partitions=2
        ),
        "lake.right": TestStream(right, key=key, partitions=partitions),
    }


def joining(auto: bool = False, **options: Any) -> Application:
    app = Application("app", auto_repartition=auto)
    left, right = (app.input_stream(f"lake.{name}", event_time="at") for name in ("left", "right"))
    chosen: dict[str, Any] = {
        "on": "k",
        "within": MINUTE,
        "name": "met",
        "prefix": "right_",
        **options,
    }
    left.join_stream(right, **chosen).send_to(app.output_stream("lake.out", partitions=2, key="k"))
    return app


def test_both_sides_are_partitioned_by_the_key_and_so_does_what_leaves() -> None:
    plan = assert_plannable(joining(), given())
    joined = next(operator for operator in plan.operators if operator.kind == "stream-join")
    assert (joined.partitions, joined.partitioned_by) == (2, ("k",))
    assert joined.columns == ("k", "n", "at", "right_other", "right_paid", "right_at")
    assert not plan.exchanges, "not even what is sent moves"
    assert any("app-met-left, app-met-right" in note for note in plan.notes)


def test_streams_partitioned_by_part_of_the_key_join_in_place_on_request() -> None:
    two = {"on": {"k": "k", "n": "paid"}}
    plan = assert_plannable(joining(**two, partition_by="k"), given())
    joined = next(operator for operator in plan.operators if operator.kind == "stream-join")
    assert joined.partitioned_by == ("k",)
    assert not plan.exchanges
    with pytest.raises(PlanningError, match=r"needed is \(k, n\)") as caught:
        assert_plannable(joining(**two), given())
    assert (
        'Or give stream-join-3-met partition_by="k", which is how its records'
        in caught.value.next_step
    )
    with pytest.raises(PlanningError, match=r"needed is \(k, n\)") as caught:
        assert_plannable(joining(**two), given(key="other"))  # of which only the left one lies so
    assert 'partition_by("k", "n")' in caught.value.next_step
    for wrong in ("paid", ["k", "at"], []):
        with pytest.raises(ConfigurationError) as failure:
            joining(**two, partition_by=wrong)
        assert failure.value.argument == "partition_by"


def test_a_window_of_records_that_lie_by_a_part_of_its_key_is_told_how_to_take_them() -> None:
    def counting(**lying: str) -> Application:
        app = Application("app")
        left = app.input_stream("lake.left", event_time="at")
        windows = left.window(
            Tumbling(MINUTE), by=["n", "k"], name="c", aggregates={"count": Count()}, **lying
        )
        windows.send_to(app.output_stream("lake.out", partitions=2, key="k"))
        return app

    with pytest.raises(PlanningError, match=r"needed is \(n, k\)") as caught:
        assert_plannable(counting(), given())
    assert 'Or give window-2-c partition_by="k", which is how its records' in caught.value.next_step
    assert not assert_plannable(counting(partition_by="k"), given()).exchanges


def test_streams_that_meet_and_windows_are_listed_apart_from_joins_with_datasets() -> None:
    def with_all(by: str = "k") -> Application:
        app = Application("app")
        left, right = (
            app.input_stream(f"lake.{name}", event_time="at") for name in ("left", "right")
        )
        joined = left.join_stream(right, on="k", within=MINUTE, name="met", prefix="right_")
        joined = joined.join(
            app.table(bounded_dataset("items", input="lake.items", key="k", partitions=2)), on="k"
        )
        windows = joined.partition_by(by).window(
            Tumbling(MINUTE), by=by, name="sums", aggregates={"count": Count()}
        )
        windows.send_to(app.output_stream("lake.out", partitions=2, key=by))
        return app

    streams = {
        **given(),
        "lake.items": TestStream(Schema.of(k="string", price="int"), key="k", partitions=2),
    }
    plan = assert_plannable(with_all(), streams)
    text = plan.render()
    joins, kept = (
        text.partition(title)[2].split("\n\n")[0].splitlines()[2:] for title in (_JOINS, _KEPT)
    )
    assert [line.split()[0] for line in joins] == ["join-4-items"]
    assert [line.split()[0] for line in kept] == ["stream-join-3-met", "window-6-sums"]
    assert _JOINS not in assert_plannable(joining(), given()).render(), (
        "nothing is joined with a dataset"
    )
    reported = assert_plannable(with_all("n"), streams).differences_from(plan)
    assert any(
        line.startswith("state at window-6-sums is partitioned by n, was by k") for line in reported
    ), reported


_JOINS = "Joins that need no exchange on the dataset's side"
_KEPT = "Operators with state, which needs no exchange"


def test_names_that_differ_on_both_sides_are_the_left_ones_after_it() -> None:
    plan = assert_plannable(joining(on={"k": "other"}), given(key="other"))
    joined = next(operator for operator in plan.operators if operator.kind == "stream-join")
    assert joined.partitioned_by == ("k",)
    assert not plan.exchanges


def test_other_counts_and_other_columns_are_refused_or_moved() -> None:
    with pytest.raises(PartitionCountMismatchError) as caught:
        assert_plannable(joining(), given(partitions=3))
    assert (caught.value.operator, caught.value.counts) == (
        "stream-join-3-met",
        (("lake.left", 2), ("lake.right", 3)),
    )
    with pytest.raises(PlanningError, match=r"needed is \(k\)"):
        assert_plannable(joining(), given(key="other"))
    for streams in (given(partitions=3), given(key="other")):
        (moved,) = assert_plannable(joining(auto=True), streams).exchanges
        assert (moved.reason, moved.partitions, moved.partitioned_by) == (
            "auto_repartition",
            2,
            ("k",),
        )


def test_keys_of_different_types_do_not_meet() -> None:
    with pytest.raises(PlanningError) as caught:
        assert_plannable(joining(), given(kind="bigint"))
    assert (caught.value.operator, caught.value.column) == ("stream-join-3-met", "k")


@pytest.mark.parametrize(
    "behind", [lambda sent: sent, lambda sent: sent.filter("n > 0").merge(sent.filter("n < 0"))]
)
def test_records_read_back_from_an_output_have_no_event_time(behind: Any) -> None:
    app = Application("app")
    left, right = (app.input_stream(f"lake.{name}", event_time="at") for name in ("left", "right"))
    sent = behind(left.send_to(app.output_stream("lake.sent", partitions=2, key="k")))
    within: dict[str, Any] = {"on": "k", "within": MINUTE, "name": "met"}
    for one, other in ((sent, right), (right, sent)):
        with pytest.raises(PlanningError) as caught:
            one.join_stream(other, **within)
        assert caught.value.stream == "lake.sent"
    with pytest.raises(PlanningError) as caught:
        sent.window(Tumbling(MINUTE), by="k", name="counted", aggregates={"n": Count()})
    assert caught.value.stream == "lake.sent"
    assert "read lake.sent in another application, with an event_time" in caught.value.next_step


def test_one_side_of_merged_streams_that_says_no_time_is_refused_by_its_name() -> None:
    app = Application("app")
    left, right = app.input_stream("lake.left", event_time="at"), app.input_stream("lake.right")
    merged = left.merge(right.select("k", "paid as n", "at"))
    with pytest.raises(PlanningError) as caught:
        merged.window(Tumbling(MINUTE), by="k", name="counted", aggregates={"n": Count()})
    assert (caught.value.operator, caught.value.stream) == ("input-2", "lake.right")


@pytest.mark.parametrize(
    "within",
    [5, -MINUTE, (MINUTE,), (MINUTE, -MINUTE), None, timedelta.max, (MINUTE, timedelta.max)],
)
def test_a_bound_is_a_time_or_two(within: Any) -> None:
    with pytest.raises(ConfigurationError) as failure:
        joining(within=within)
    assert failure.value.argument == "within"


def test_what_is_longer_than_times_can_be_is_refused_where_it_is_reported() -> None:
    for kind in (Tumbling, Session):
        with pytest.raises(ConfigurationError) as failure:
            kind(timedelta.max)
        assert failure.value.argument == ("size" if kind is Tumbling else "gap")
    app = Application("app")
    records = app.input_stream("lake.left", event_time="at")
    with pytest.raises(ConfigurationError) as failure:
        records.window(
            Tumbling(MINUTE),
            by="k",
            name="n",
            aggregates={"n": Count()},
            allowed_lateness=timedelta(days=40_000),
        )
    assert failure.value.argument == "allowed_lateness"


def test_no_state_has_the_name_of_another_operators() -> None:
    app = Application("app")
    left, right = (app.input_stream(f"lake.{name}", event_time="at") for name in ("left", "right"))
    left.join_stream(right, on="k", within=MINUTE, name="met")
    with pytest.raises(
        PlanningError, match=r"two operators keep state under the name 'met-left': stream-join-3"
    ):
        left.window(Tumbling(MINUTE), by="k", name="met-left", aggregates={"n": Count()})
    left.window(Tumbling(MINUTE), by="k", name="other-left", aggregates={"n": Count()})
    with pytest.raises(PlanningError, match="'other-left'") as caught:
        left.join_stream(right, on="k", within=MINUTE, name="other")
    assert caught.value.operator == "stream-join-5-other"


def test_an_outer_side_holds_back_what_follows_by_its_bound() -> None:
    held = {
        how: joining(how=how, within=(MINUTE, 3 * MINUTE)).operators[2].spec.watermark_delay
        for how in _HOLDS
    }
    assert held == _HOLDS


_HOLDS = {"inner": timedelta(0), "left": 3 * MINUTE, "right": MINUTE, "full": 3 * MINUTE}


def test_state_has_no_name_of_a_dataset() -> None:
    app = joining()
    app.table(bounded_dataset("app-met-left", input="lake.left", key="k", partitions=2))
    with pytest.raises(
        PlanningError,
        match="keeps its state in the table 'app-met-left', and application 'app' has a",
    ):
        assert_plannable(app, given())
    local = joining()
    local.local_table("app-met-right", key="k", schema=Schema.of(k="string"), partitions=2)
    with pytest.raises(PlanningError, match="keeps its state in the table 'app-met-right'"):
        assert_plannable(local, given())


def test_state_rejects_incomparable_keys_and_types_that_the_lake_lacks() -> None:
    app = Application("app")
    left, right = (app.input_stream(f"lake.{name}", event_time="at") for name in ("left", "right"))
    left = left.with_columns(k="cast(n as double)").partition_by("k", partitions=2)
    right = right.with_columns(k="cast(paid as double)").partition_by("k", partitions=2)
    left.join_stream(right, on="k", within=MINUTE, name="met", prefix="right_")
    with pytest.raises(PlanningError) as caught:
        assert_plannable(app, given())
    assert (caught.value.operator, caught.value.column) == ("stream-join-7-met", "k")
    app = Application("app")
    flagged = (
        app.input_stream("lake.left", event_time="at")
        .with_columns(even="n % 2 = 0")
        .partition_by("even")
    )
    flagged.window(Tumbling(MINUTE), by="even", name="w", aggregates={"n": Count()})
    with pytest.raises(PlanningError) as caught:
        assert_plannable(app, given())
    assert (caught.value.operator, caught.value.column) == ("window-4-w", "even")


def test_updates_of_a_window_that_count_again_are_reported() -> None:
    def counted(condition: str | None, **options: Any) -> Application:
        app = Application("app", **options)
        clicks = app.input_stream("lake.left", event_time="at")
        minutes = clicks.window(
            Tumbling(MINUTE), by="k", name="m", aggregates={"n": Count()}, results="updates"
        )
        minutes = minutes.filter(condition) if condition else minutes
        minutes.window(Tumbling(60 * MINUTE), by="k", name="h", aggregates={"n": Count()})
        return app

    reported = [
        note for note in assert_plannable(counted("n > 0"), given()).notes if "each update" in note
    ]
    assert reported == [
        "window-4-h gets each update of a window of window-2-m as a separate record. "
        'Keep only final results: .filter("final").'
    ]
    app = Application("app")
    minutes = app.input_stream("lake.left", event_time="at").window(
        Tumbling(MINUTE), by="k", name="m", aggregates={"n": Count()}, results="updates"
    )
    displayed = minutes.with_columns(shown="if(final, 1, 0)")
    displayed.window(Tumbling(60 * MINUTE), by="k", name="h", aggregates={"n": Count()})
    assert [note for note in assert_plannable(app, given()).notes if "each update" in note], (
        "it lets all through"
    )
    with pytest.raises(
        PlanningError, match=r"window-3-h gets each update of a window of window-2-m .* strict"
    ):
        assert_plannable(counted(None, strict=True), given())
    assert not [
        note
        for note in assert_plannable(counted("final and n > 0"), given()).notes
        if "each update" in note
    ]


@pytest.mark.parametrize(
    ("condition", "final"),
    [
        ("not final", False),
        ("final or n > 0", False),
        ("final = false", False),
        ("Final = true and n > 0", True),
        ("(n > 0 and (final))", True),
    ],
)
def test_only_a_condition_that_holds_for_final_results_alone_lets_no_update_through(
    condition: str, final: bool
) -> None:
    app = Application("app")
    minutes = app.input_stream("lake.left", event_time="at").window(
        Tumbling(MINUTE), by="k", name="m", aggregates={"n": Count()}, results="updates"
    )
    minutes.filter(condition).window(
        Tumbling(60 * MINUTE), by="k", name="h", aggregates={"n": Count()}
    )
    reported = [note for note in assert_plannable(app, given()).notes if "each update" in note]
    assert bool(reported) is not final


@pytest.mark.parametrize(
    "name", ["records$", "expires$", "record$", "at$", "behind$", "window_start", "total$sum"]
)
def test_a_key_of_the_name_of_what_windows_keep_is_refused_where_it_is_planned(name: str) -> None:
    stream = TestStream(
        Schema.of(**{"k": "string", "n": "int", "at": "timestamp", name: "string"}),
        key="k",
        partitions=2,
    )
    app = Application("app")
    total = {"total": Sum("n"), "most": Aggregate(len, "int", of="n")}
    app.input_stream("lake.left", event_time="at").window(
        Tumbling(MINUTE), by=["k", name], partition_by="k", name="m", aggregates=total
    )
    with pytest.raises(PlanningError) as failure:
        assert_plannable(app, {"lake.left": stream})
    assert failure.value.column == name


@pytest.mark.parametrize("name", ["expires$", "record$", "at$", "behind$"])
def test_a_function_of_all_columns_is_refused_one_that_is_kept_next_to_records(name: str) -> None:
    columns = {"k": "string", "at": "timestamp", name: "int"}
    stream = TestStream(Schema.of(**columns), key="k", partitions=2)
    app = Application("app")
    clicks = app.input_stream("lake.left", event_time="at")
    clicks.window(
        Tumbling(MINUTE), by="k", name="m", aggregates={"n": Aggregate(len, "int", of="at")}
    )
    assert_plannable(app, {"lake.left": stream})
    clicks.window(Tumbling(MINUTE), by="k", name="o", aggregates={"n": Aggregate(len, "int")})
    with pytest.raises(PlanningError) as failure:
        assert_plannable(app, {"lake.left": stream})
    assert (failure.value.operator, failure.value.column) == ("window-3-o", name)


@pytest.mark.parametrize("name", ["expires$", "Record$", "at$"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_stream_join_rejects_columns_that_are_named_as_those_of_its_state(
    side: str, name: str
) -> None:
    streams = given()
    columns = {"k": "string", "n": "int", "at": "timestamp", name: "int"}
    streams[f"lake.{side}"] = TestStream(Schema.of(columns), key="k", partitions=2)
    with pytest.raises(PlanningError) as failure:
        assert_plannable(joining(), streams)
    assert (failure.value.operator, failure.value.column) == ("stream-join-3-met", name)
    if side == "right":
        assert_plannable(joining(select=["n as m"]), streams)


def test_a_column_that_can_not_be_aggregated_is_to_be_cast_to_a_type_that_can() -> None:
    app = Application("app")
    left = app.input_stream("lake.left", event_time="at").with_columns(words="'a b'")
    left.window(Tumbling(MINUTE), by="k", name="m", aggregates={"made": Sum("words")})
    with pytest.raises(PlanningError) as failure:
        assert_plannable(app, given())
    assert 'cast(words as double)"' in failure.value.next_step
