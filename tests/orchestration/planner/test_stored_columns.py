"""What is sent to a stream that is there: more and wider columns are planned, all else is
refused.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, Catalog, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.tables import RemoteTable, SqliteTable

INPUT = StreamFacts("lake.s", 2, ("k",), SPARK, Schema.of(k="string", v="int", x="double"))


def sending(*expressions: str) -> Application:
    app = Application("app")
    app.input_stream("lake.s").map(*expressions).send_to(
        app.output_stream("lake.out", partitions=2, key="k")
    )
    return app


def world(*, evolves: bool = True, **columns: str) -> Catalog:
    return {
        "lake.s": INPUT,
        "lake.out": StreamFacts("lake.out", 2, ("k",), SPARK, Schema.of(columns), evolves),
    }


@pytest.mark.parametrize(
    "expressions",
    [
        ("*",),
        ("*", "1 as one"),
        ("k", "cast(v as bigint) as v"),
        ("k", "v + 1 as v"),
        ("v", "k"),
        ("k", "one_of_ours(k) as v"),
    ],
)
def test_more_and_wider_columns_in_any_order_are_planned(expressions: tuple[str, ...]) -> None:
    build_plan(sending(*expressions), world(k="string", v="int"))


@pytest.mark.parametrize(
    ("expressions", "message"),
    [
        (
            ("k",),
            (
                r"map|send-to-3: the records do not fit the columns of stream lake\.out: v \(int\)"
                r" is removed"
            ),
        ),
        (("k", "v as w"), r"v \(int\) is removed"),
        (("k", "v as V"), r"v \(int\) is renamed to V"),
        (("k", "cast(v as tinyint) as v"), "v is tinyint, was int"),
        (("k", "upper(k) as v"), "v is string, was int"),
        (("k", "x as v"), "v is double, was int|whose values"),
        (("cast(v as bigint) as k", "v"), "k is bigint, was string, and is a part of the key"),
    ],
)
def test_what_records_that_are_there_can_not_be_read_with_is_refused(
    expressions: tuple[str, ...], message: str
) -> None:
    if expressions == ("k", "x as v"):
        # every int is a double: it is widened
        build_plan(sending(*expressions), world(k="string", v="int"))
        expressions, message = ("k", "cast(x as string) as v"), "v is string, was int"
    with pytest.raises(PlanningError, match=message) as caught:
        build_plan(sending(*expressions), world(k="string", v="int"))
    assert "adjunct stream delete out" in str(caught.value)


def test_a_system_that_says_nothing_of_evolving_is_left_to_itself() -> None:
    build_plan(sending("k"), world(evolves=False, k="string", v="int"))


def notes_of(app: Application, catalog: Catalog) -> list[str]:
    return [note for note in build_plan(app, catalog).notes if "unproven" in note]


def test_columns_of_unknown_types_that_a_stream_has_are_unproven() -> None:
    """A strict application is refused."""
    unknown = ("k", "nth_of(k) as v", "nth_of(v) as w")
    reported = (
        "send-to-3: the types of 'v' (to be int), 'w' (to be string), as stream lake.out declares,"
        " are not known"
    )
    assert reported in " ".join(notes_of(sending(*unknown), world(k="string", v="int", w="string")))
    app = Application("app", strict=True)
    app.input_stream("lake.s").map(*unknown).send_to(
        app.output_stream("lake.out", partitions=2, key="k")
    )
    with pytest.raises(PlanningError) as caught:
        build_plan(app, world(k="string", v="int", w="string"))
    assert (caught.value.operator, caught.value.column) == ("send-to-3", "v")
    assert 'with_columns(v="cast(v as int)")' in caught.value.next_step
    assert notes_of(sending("k", "v + 1 as v"), world(k="string", v="int")) == []
    assert notes_of(sending("k", "null as v"), world(k="string", v="int")) == []


def test_columns_of_unknown_types_of_a_new_stream_are_unproven() -> None:
    (note, *_) = [
        note
        for note in notes_of(sending("k", "nth_of(k) as v"), {"lake.s": INPUT})
        if "can hold" in note
    ]
    assert (
        note
        == "send-to-3: whether stream lake.out can hold 'v' is unproven: the type is not known yet."
    )


def test_columns_of_unknown_types_that_a_table_declares_are_unproven() -> None:
    columns = {"k": "string", "n": "int", "words": "array<string>", "more": "json"}
    store = SqliteTable("never.sqlite", "t", key="k", columns=columns)
    for strict in (False, True):
        for number in range(4):
            app = Application("app", strict=strict)
            table = app.table(RemoteTable("t", key="k", read_function=store, write_function=store))
            local = app.local_table(
                "own", key="k", schema=Schema.of(k="string", n="int"), partitions=2
            )
            records = app.input_stream("lake.s")
            if number == 0:
                records.map("k", "nth_of(k) as n", "nth_of(k) as more").send_to(table)
            if number == 1:
                records.update(
                    table, set={"n": "nth_of(k)"}, append={"words": "nth_of(k)"}, remove=["more"]
                )
            if number == 2:
                records.map("nth_of(k) as key").join(table, on={"key": "k"})
            if number == 3:
                records.map("k", "nth_of(k) as n").send_to(local)
            unproven = (
                r"type of 'n' \(to be int\), as table t declares, is not known",
                (
                    r"types of 'n' \(to be int\), 'words' \(to be array<string>\), as table t"
                    r" declares, are not known"
                ),
                r"type of 'key' \(to be string\), as table t declares, is not known",
                r"type of 'n' \(to be int\), as local table own declares, is not known",
            )[number]
            if strict:
                with pytest.raises(PlanningError, match=unproven):
                    build_plan(app, {"lake.s": INPUT})
            else:
                assert re.search(unproven, " ".join(build_plan(app, {"lake.s": INPUT}).notes))


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        ("to_timestamp_ntz(k)", "timestamp_ntz"),
        ("array(to_timestamp_ntz(k))", "array<timestamp_ntz>"),
        ("named_struct('at', to_timestamp_ntz(k))", "struct<at:timestamp_ntz>"),
    ],
)
def test_what_can_not_be_stored_is_refused_by_streams_and_tables(made: str, kind: str) -> None:
    with pytest.raises(PlanningError, match=f"has type '{kind}") as caught:
        build_plan(sending("k", f"{made} as v"), {"lake.s": INPUT})
    assert (caught.value.operator, caught.value.stream, caught.value.column) == (
        "send-to-3",
        "lake.out",
        "v",
    )
    with pytest.raises(PlanningError, match=f"has type '{kind}") as caught:
        build_plan(sending("k", f"{made} as v"), world(k="string", v="int"))
    assert (caught.value.operator, caught.value.stream, caught.value.column) == (
        "send-to-3",
        "lake.out",
        "v",
    )
    store = SqliteTable(
        "never.sqlite", "t", key="k", columns={"k": "string", "n": "int", "more": "json"}
    )
    app = Application("app")
    table = app.table(RemoteTable("t", key="k", write_function=store))
    records = app.input_stream("lake.s")
    records.map("k", "struct(v) as more").send_to(table)
    build_plan(app, {"lake.s": INPUT})
    records.map("k", f"{made} as n").send_to(table)
    with pytest.raises(PlanningError, match=f"has the column 'n' as int, and {kind}"):
        build_plan(app, {"lake.s": INPUT})


def test_an_output_on_another_system_takes_no_renames_and_removals() -> None:
    app = Application("app")
    out = app.output_stream("lake.out", partitions=2, key="k", renamed={"v": "w"})
    app.input_stream("lake.s").map("k", "v as w").send_to(out)
    notes = build_plan(app, world(k="string", v="int")).notes
    assert [note for note in notes if "v is renamed to w" in note]
    assert not [note for note in build_plan(app, world(k="string", w="int")).notes if "w" in note]
    with pytest.raises(PlanningError) as caught:
        build_plan(app, world(evolves=False, k="string", v="int"))
    assert caught.value.stream == "lake.out"


@pytest.mark.parametrize(
    ("changes", "expressions"),
    [
        ({"renamed": {"v": "w"}}, ("k", "v")),
        ({"renamed": {"v": "w"}}, ("k", "v", "v as w")),
        ({"drop": "v"}, ("k", "v")),
        ({"renamed": {"k": "key"}}, ("k as key", "v")),
        ({"renamed": {"v": "w"}, "drop": ["v"]}, ("k", "v as w")),
        ({"renamed": {"v": "k"}}, ("k",)),
    ],
)
def test_declared_changes_that_contradict_what_is_sent_are_refused(
    changes: dict[str, Any], expressions: tuple[str, ...]
) -> None:
    app = Application("app")
    out = app.output_stream("lake.out", partitions=2, key="k", **changes)
    app.input_stream("lake.s").map(*expressions).send_to(out)
    with pytest.raises(PlanningError):
        build_plan(app, world(k="string", v="int"))


def test_a_change_of_what_was_never_there_is_noted() -> None:
    app = Application("app")
    renamed = {"vv": "w", "gone": "here"}
    out = app.output_stream("lake.out", partitions=2, key="k", renamed=renamed, drop=["x", "old"])
    app.input_stream("lake.s").map("k", "v").send_to(out)
    catalog = world(k="string", v="int")
    former = {"old": "dropped", "gone": "renamed to here"}
    catalog["lake.out"] = replace(catalog["lake.out"], former=former)
    notes = [note for note in build_plan(app, catalog).notes if "nor has had" in note]
    assert [note.split(" names ")[1].split(",")[0] for note in notes] == ["vv", "x"]


def test_a_mistyped_new_name_is_refused_with_the_new_columns() -> None:
    app = Application("app")
    out = app.output_stream("lake.out", partitions=2, key="k", renamed={"v": "valeu"})
    app.input_stream("lake.s").map("k", "v as value").send_to(out)
    with pytest.raises(PlanningError, match=r"renamed to valeu, .* new there is value"):
        build_plan(app, world(k="string", v="int"))


def feeding(**declared: Any) -> Application:
    app = Application("app")
    dataset = unbounded_dataset("ref", input="lake.out", key="k", partitions=2, **declared)
    app.input_stream("lake.s").map("k", "v as w").send_to(app.table(dataset))
    return app


def test_a_dataset_declares_the_renames_of_the_stream_that_it_is_sent() -> None:
    build_plan(feeding(renamed={"v": "w"}), world(k="string", v="int"))
    with pytest.raises(PlanningError):
        build_plan(feeding(), world(k="string", v="int"))


def test_another_dataset_on_the_stream_is_asked_about_renamed_columns() -> None:
    app = feeding(renamed={"v": "w"})
    app.table(unbounded_dataset("other", input="lake.out", key="k", partitions=2))
    with pytest.raises(PlanningError) as caught:
        build_plan(app, world(k="string", v="int"))
    assert (caught.value.dataset, caught.value.stream) == ("other", "lake.out")


def test_a_column_of_before_is_told_with_what_became_of_it() -> None:
    catalog = world(k="string", v="int")
    former = {"old": "renamed to v", "gone": "dropped"}
    catalog["lake.s"] = replace(INPUT, former=former)
    for name, became in former.items():
        with pytest.raises(PlanningError) as caught:
            build_plan(sending("k", f"{name} as v"), catalog)
        assert caught.value.column == name
        assert f"{name} was {became}" in caught.value.problem
