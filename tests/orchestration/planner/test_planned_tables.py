"""What planning says of remote tables: what they can't be asked, which order holds, and what a
replay does.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.operators.table_updates import update_message
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.functions import TableWriteFunction
from dagster_adjunct.resources.tables.operation import UpdateContract
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.test_adding_an_operator import Union

WITH_DEFAULTS = UpdateContract.UPDATE_WITH_DEFAULTS
SCANS = Schema.of(gate="string", tag="string", place="string", at="timestamp", n="int")
COLUMNS = {
    "tag": "string",
    "place": "string",
    "at": "timestamp",
    "n": "bigint",
    "seen": "array<string>",
    "facts": "json",
}


def scans(key: tuple[str, ...] = ("gate",), partitions: int = 8, **more: Any) -> StreamFacts:
    return StreamFacts("lake.scans", partitions, key, SPARK, SCANS, **more)


def tags(
    function: Any = None, *, key: Any = "tag", columns: Any = COLUMNS, **more: Any
) -> RemoteTable[Any, Any, Any]:
    function = function or SqliteTable("tags.sqlite", "tags", key, columns=columns)
    return RemoteTable("tags", key="tag", write_function=function, **more)


def planned(app: Application, facts: StreamFacts | None = None) -> ExecutionPlan:
    return build_plan(app, {"lake.scans": facts or scans()})


def last_seen(table: RemoteTable[Any, Any, Any], **more: Any) -> Application:
    app = Application("gates", **more)
    app.input_stream("lake.scans").map("tag", "place", "at").send_to(app.table(table))
    return app


class OnlyPuts(TableWriteFunction[str, dict[str, Any], Any]):
    async def put(self, key: str, value: dict[str, Any], *args: object) -> None: ...
    async def delete(self, key: str, *args: object) -> None: ...


class Service(OnlyPuts):
    async def update(self, key: str, update: Any, *args: object) -> None: ...


def test_a_table_by_another_key_than_its_streams_has_order_per_source_partition_only() -> None:
    execution_plan = planned(last_seen(tags()))
    (table,) = execution_plan.tables
    assert (table.order, table.streams) == ("per source partition", ("lake.scans",))
    assert "its key is (tag), and lake.scans is partitioned by (gate)" in table.why
    assert any(
        "order holds per source partition only" in note and "newest_by" in note
        for note in execution_plan.notes
    )
    assert "per source partition" in execution_plan.render()
    assert "possibly for good" in table.replay
    (document,) = execution_plan.to_json()["tables"]
    assert document["order"] == "per source partition"


def two_ways(*updates: dict[str, Any] | None, strict: bool = False, **declared: Any) -> Application:
    """An application that sends one stream, keyed by the table's key, in several ways to one
    table.
    """
    app = Application("ways", strict=strict)
    table, stream = app.table(tags(**declared)), app.input_stream("lake.scans")
    for number, update in enumerate(updates):
        some = stream.filter(f"n % {len(updates)} = {number}")
        if update is None:
            some.map("tag", "place", "at").send_to(table)
        else:
            some.update(table, if_missing=[], **update)
    return app


@pytest.mark.parametrize(
    "updates",
    [
        (None, None),
        (None, {"set": ["place"]}),
        ({"set": ["place"]}, {"set": ["place", "at"]}),
        ({"set": ["place"]}, {"remove": ["place"]}),
        ({"add": {"n": "1"}}, {"set": {"n": "cast(n as bigint)"}}),
        ({"append": {"seen": "place"}}, {"append": {"seen": "place"}}),
        ({"add": {"facts": "named_struct('n', n)"}}, {"add": {"facts": "named_struct('n', -n)"}}),
        ({"add": {"facts": "named_struct('n', n)"}}, {"remove": ["facts"]}),
    ],
)
def test_records_that_come_to_a_table_by_two_ways_have_no_order_between_them(updates: Any) -> None:
    execution_plan = planned(two_ways(*updates), scans(("tag",)))
    assert [table.order for table in execution_plan.tables] == ["per source partition"] * 2
    first, second = execution_plan.tables
    assert f"{second.operator} writes to it, too, and" in first.why
    assert f"{first.operator} writes to it, too, and" in second.why
    with pytest.raises(
        PlanningError, match=r"is strict\. Table tags: .*\. The reason: .* writes to it, too, and"
    ):
        planned(two_ways(*updates, strict=True), scans(("tag",)))


@pytest.mark.parametrize(
    "updates",
    [
        ({"set": ["place"]}, {"set": ["at"]}),
        ({"add": {"n": "1"}}, {"add": {"n": "2"}, "set": ["place"]}),
        ({"append": {"seen": "place"}}, {"add": {"facts": "named_struct('n', n)", "n": "1"}}),
    ],
)
def test_ways_that_change_different_columns_or_only_add_are_in_order(updates: Any) -> None:
    execution_plan = planned(two_ways(*updates, strict=True), scans(("tag",)))
    assert [table.order for table in execution_plan.tables] == ["per key"] * 2


@pytest.mark.parametrize(
    ("update", "says"),
    [
        ({"add": {"n": "place"}}, "has the column 'n' as bigint, and string is sent"),
        ({"add": {"n": "at"}}, "has the column 'n' as bigint, and timestamp is sent"),
        ({"add": {"n": "n * 0.5"}}, "has the column 'n' as bigint, and decimal\\(12,1\\) is sent"),
        ({"add": {"n": "coalesce(n, place)"}}, None),  # Spark's to say
        ({"add": {"n": "cast(1.5 as double)"}}, "has the column 'n' as bigint, and double is sent"),
        ({"append": {"seen": "n"}}, "has the column 'seen' as array<string>, and int is appended"),
        ({"append": {"seen": "place"}}, None),
        ({"add": {"n": "n"}}, None),
    ],
)
def test_what_is_added_and_appended_is_of_the_columns_type(
    update: dict[str, Any], says: str | None
) -> None:
    app = Application("gates")
    app.input_stream("lake.scans").update(app.table(tags()), if_missing=[], **update)
    if says is None:
        planned(app)
        return
    with pytest.raises(PlanningError, match=says):
        planned(app)


@pytest.mark.parametrize(
    ("newest_by", "update", "says"),
    [
        ("at", {"set": ["place"], "remove": ["at"]}, "updates do not set it"),
        ("n", {"add": {"n": "1"}}, "updates do not set it"),
        ("place", {"set": {"place": "n > 1"}}, "'place', which is boolean: expected a time"),
        ("seen", {"set": ["place", "seen"]}, "'seen', which is array<string>: expected a time"),
    ],
)
def test_a_table_keeps_what_is_newest_by_a_time_that_is_set(
    newest_by: str, update: dict[str, Any], says: str
) -> None:
    app = Application("gates")
    stream = app.input_stream("lake.scans").with_columns(seen="split(place, ',')")
    stream.update(app.table(tags(newest_by=newest_by, idempotent=True)), if_missing=[], **update)
    with pytest.raises(PlanningError, match=says):
        planned(app)


def test_a_strict_application_is_refused_where_order_does_not_hold() -> None:
    with pytest.raises(PlanningError) as failure:
        planned(last_seen(tags(), strict=True))
    assert failure.value.operator == "send-to-table-3-tags"
    planned(last_seen(tags(newest_by="at"), strict=True))
    planned(last_seen(tags(), strict=True), scans(("tag",)))


def sums(
    *, columns: Any = COLUMNS, add: Any = None, if_missing: Any = (), **more: Any
) -> Application:
    app = Application("sums", **more)
    table = app.table(tags(columns=columns))
    app.input_stream("lake.scans").update(table, add=add or {"n": "n"}, if_missing=if_missing)
    return app


def test_what_only_adds_numbers_needs_no_order_and_no_newest_by() -> None:
    execution_plan = planned(sums(strict=True))
    (table,) = execution_plan.tables
    assert table.order == "any"
    assert "its key is (tag), and lake.scans is partitioned by (gate)" in table.why
    assert not any(
        "newest_by" in note or "per source partition" in note for note in execution_plan.notes
    )
    assert "changed: additions" in table.replay
    begun = planned(sums(if_missing={"place": "place", "tag": "tag"})).tables[0].why
    assert "and the first one sets place" in begun


def test_a_number_is_known_by_the_tables_column_or_by_its_own_type() -> None:
    orders = [
        planned(sums(columns=None)),
        planned(sums(add={"n": "unknown_function(n)"})),
        planned(sums(columns=None, add={"n": "unknown_function(n)"})),
        planned(sums(columns=None, add={"facts": "named_struct('n', n)"})),
    ]
    assert [execution_plan.tables[0].order for execution_plan in orders] == [
        "any", "any", "per source partition", "per source partition",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("update", "harm", "mends"),
    [
        (
            {"set": ["place"], "add": {"n": "n"}},
            "an older record may replace a newer one",
            'Declare the table with newest_by="column" and idempotent=True',
        ),
        (
            {"append": {"seen": "place"}, "add": {"n": "n"}},
            "after a newer one",
            "sort by a time in the values",
        ),
        (
            {"add": {"facts": "named_struct('n', n)"}},
            "after a newer one",
            "Partition the input by the table's key, and",
        ),
    ],
)
def test_the_advice_for_a_table_is_one_that_loses_nothing(
    update: dict[str, Any], harm: str, mends: str
) -> None:
    """tests/orchestration/test_advice_for_tables.py follows each of them."""
    (note,) = planned(two_ways(update)).notes
    assert harm in note
    assert mends in note
    assert ("newest_by" in note) is ("set" in update)
    with pytest.raises(PlanningError, match=f"is strict.*{harm}"):
        planned(two_ways(update, strict=True))


NESTED = Schema.of(box="struct<tag:string,size:int>", place="string", at="timestamp", n="int")


@pytest.mark.parametrize("copied_by", ["with_columns", "map"])
@pytest.mark.parametrize("change", [{"add": {"facts": "named_struct('n', n)"}}, {"set": ["place"]}])
def test_a_key_that_is_a_copy_is_taken_from_where_it_was_copied(
    copied_by: str, change: dict[str, Any]
) -> None:
    facts = StreamFacts("lake.scans", 8, ("box.tag",), SPARK, NESTED)

    def application(on: dict[str, str] | None) -> Application:
        app = Application("copies")
        records = app.input_stream("lake.scans").filter("n > 0")
        if on is None and copied_by == "with_columns":
            records = (
                records.with_columns(label="box.tag").filter("n > 1").with_columns(tag="label")
            )
        elif on is None:
            records = records.map("box.tag as tag", "box", "place", "n")
        table = app.table(tags(idempotent=True))
        records.update(table, if_missing=[], on=on, **change)
        return app

    (note,) = planned(application(None), facts).notes
    assert 'rite on={"box.tag": "tag"} in place of the copied key' in note
    assert "idempotent" not in note
    followed = planned(application({"box.tag": "tag"}), facts)
    assert followed.notes == ()
    assert followed.tables[0].order == "per key"


@pytest.mark.parametrize("change", ["lower(box.tag)", "cast(n as string)"])
def test_a_key_that_is_computed_is_no_copy(change: str) -> None:
    app = Application("computed")
    records = app.input_stream("lake.scans").with_columns(tag=change)
    records.update(app.table(tags()), if_missing=[], add={"facts": "named_struct('n', n)"})
    facts = StreamFacts("lake.scans", 8, ("box.tag",), SPARK, NESTED)
    (note,) = planned(app, facts).notes
    assert "Partition the input by the table's key, and declare" in note
    assert "on={" not in note


def test_a_table_that_is_idempotent_is_not_to_be_declared_so() -> None:
    """test_the_advice_for_a_table_is_one_that_loses_nothing has the advice for others."""
    updates: tuple[dict[str, Any], ...] = (
        {"set": ["place"], "add": {"n": "n"}},
        {"append": {"seen": "place"}, "add": {"n": "n"}},
        {"add": {"facts": "named_struct('n', n)"}},
    )
    for update in updates:
        (note,) = planned(two_ways(update, idempotent=True)).notes
        assert "idempotent" not in note


@pytest.mark.parametrize(
    ("updates", "mends"),
    [
        (
            ({"set": ["place"]}, {"set": ["place"]}),
            'Declare the table with newest_by="column", so that its store keeps',
        ),
        ((None, {"set": ["place"]}), "columns or tables of their own"),
        (
            ({"add": {"n": "1"}}, {"set": {"n": "cast(n as bigint)"}}),
            "columns or tables of their own",
        ),
    ],
)
def test_where_two_sends_meet_in_a_column_partitioning_is_no_advice(
    updates: Any, mends: str
) -> None:
    for note in planned(two_ways(*updates), scans(("tag",))).notes:
        assert mends in note
        assert "artition the input" not in note


@pytest.mark.parametrize(
    ("updates", "harmed"),
    [
        (({"set": ["place", "at"]}, {"set": ["at"]}), 2),
        ((None, {"set": ["at"]}), 2),
        (({"set": {"n": "cast(n as bigint)", "at": "at"}}, {"set": ["at"], "add": {"n": "n"}}), 2),
        (({"set": ["place", "at"]}, {"set": ["place", "at"], "add": {"n": "1"}}), 0),
        (({"set": ["at"], "add": {"facts": "named_struct('n', n)"}},), 1),
        (({"set": ["at"], "add": {"n": "n"}, "append": {"seen": "place"}},), 0),
    ],
)
def test_the_plan_says_what_a_table_that_keeps_the_newest_would_lose(
    updates: Any, harmed: int
) -> None:
    """And a strict application is refused there."""
    declared = {"newest_by": "at", "idempotent": True}
    for facts in (scans(), scans(("tag",))):
        execution_plan = planned(two_ways(*updates, **declared), facts)
        assert len([note for note in execution_plan.notes if " skipped " in note]) == harmed
        strict = two_ways(*updates, strict=True, **declared)
        if harmed:
            with pytest.raises(
                PlanningError, match=r"is strict\. Table tags: .* skipped .*"
            ) as refused:
                planned(strict, facts)
            assert refused.value.operator == execution_plan.tables[0].operator
        else:
            assert [table.order for table in planned(strict, facts).tables] == ["newest"] * len(
                updates
            )


def test_sums_that_another_send_replaces_depend_on_the_order() -> None:
    execution_plan = planned(two_ways({"add": {"n": "1"}}, {"set": {"n": "cast(n as bigint)"}}))
    assert [table.order for table in execution_plan.tables] == ["per source partition"] * 2


@pytest.mark.parametrize(
    ("facts", "order"),
    [
        (scans(("tag",)), "per key"),
        (scans((), 1), "per key"),
        (scans(("gate", "tag")), "per source partition"),
        (scans(()), "per source partition"),
    ],
)
def test_order_holds_where_the_partitioning_columns_are_in_the_tables_key(
    facts: StreamFacts, order: str
) -> None:
    execution_plan = planned(last_seen(tags()), facts)
    assert [table.order for table in execution_plan.tables] == [order]
    assert bool(execution_plan.notes) is (order != "per key")


def test_a_computed_partition_column_differs_and_repartitioning_brings_no_order() -> None:
    computed, moved, renamed = (Application(f"gates-{number}") for number in range(3))
    computed.input_stream("lake.scans").map("upper(tag) as tag", "place").send_to(
        computed.table(tags())
    )
    moved.input_stream("lake.scans").partition_by("tag").map("tag", "place").send_to(
        moved.table(tags())
    )
    renamed.input_stream("lake.scans").map("gate as tag", "place").send_to(renamed.table(tags()))
    orders = [planned(computed, scans(("tag",))), planned(moved), planned(renamed)]
    assert [execution_plan.tables[0].order for execution_plan in orders] == [
        "per source partition",
        "per source partition",
        "per key",
    ]


@pytest.mark.parametrize(
    ("declared", "adds", "says"),
    [
        ({"newest_by": "at"}, False, "unchanged: records that are older by at are skipped"),
        (
            {"idempotent": True, "on_replay": "skip"},
            True,
            "unchanged: messages up to the last applied one",
        ),
        ({"idempotent": True}, True, "applied again, exactly once"),
        ({}, True, "applied again, once, and again if a batch is repeated"),
        ({}, False, "older, possibly for good"),
    ],
)
def test_the_plan_says_what_a_replay_does(declared: dict[str, Any], adds: bool, says: str) -> None:
    app = Application("gates")
    change: dict[str, Any] = {"add": {"n": "1"}} if adds else {"set": ["place", "at"]}
    app.input_stream("lake.scans").update(app.table(tags(**declared)), if_missing=[], **change)
    assert says in planned(app).tables[0].replay


def test_marks_need_offsets_that_are_numbers() -> None:
    with pytest.raises(PlanningError) as failure:
        planned(last_seen(tags(newest_by="at")), scans(numbered=False))
    assert failure.value.operator == "send-to-table-3-tags"
    planned(last_seen(tags()), scans(numbered=False))


def test_what_is_read_again_can_not_be_skipped_behind_an_output_of_several_streams() -> None:
    facts = {
        name: StreamFacts(name, 8, ("gate",), SPARK, SCANS) for name in ("lake.scans", "lake.more")
    }

    def merged(table: RemoteTable[Any, Any, Any], *, before: bool) -> Application:
        app = Application("gates")
        stream = app.input_stream("lake.scans").apply(Union(), app.input_stream("lake.more"))
        behind = stream.send_to(app.output_stream("lake.all", partitions=8, key="gate"))
        (stream if before else behind).update(app.table(table), add={"n": "1"}, if_missing=[])
        return app

    skipping = tags(idempotent=True, on_replay="skip")
    with pytest.raises(PlanningError) as failure:
        build_plan(merged(skipping, before=False), facts)
    assert failure.value.operator == "send-to-table-5-tags"
    build_plan(merged(skipping, before=True), facts)
    build_plan(merged(tags(idempotent=True), before=False), facts)


def test_dead_letters_need_an_output_stream_that_is_as_it_is_declared() -> None:
    def letting(key: str | None) -> Application:
        app = Application("gates")
        letters = app.output_stream("lake.refused", partitions=2, key=key)
        app.input_stream("lake.scans").map("tag", "place", "at").send_to(
            app.table(tags()), dead_letters=letters
        )
        return app

    there = {"lake.scans": scans(), "lake.refused": StreamFacts("lake.refused", 3, (), SPARK)}
    with pytest.raises(PlanningError) as failure:
        build_plan(letting(None), there)
    assert failure.value.operator == "dead-letters-4-tags"
    assert failure.value.stream == "lake.refused"
    with pytest.raises(PlanningError) as failure:
        build_plan(letting("tag"), {"lake.scans": scans()})
    assert failure.value.operator == "dead-letters-4-tags"
    assert failure.value.column == "tag"
    build_plan(letting("table"), {"lake.scans": scans()})


def refused(
    table: RemoteTable[Any, Any, Any],
    says: str,
    *,
    map: Any = (),
    send: Any = None,
    update: Any = None,
) -> None:
    app = Application("gates")
    stream = app.input_stream("lake.scans")
    stream = stream.map(*map) if map else stream
    if update is None:
        stream.send_to(app.table(table), **(send or {}))
    else:
        stream.update(app.table(table), **update)
    with pytest.raises(PlanningError, match=says):
        planned(app)


MESSAGE = update_message(key="tag", update=["place"], default=["place"])


def test_updates_to_a_plain_sink_and_records_to_an_update_sink_are_refused() -> None:
    refused(tags(), "sent updates without a contract", map=MESSAGE)
    refused(
        tags(),
        "no column 'update'.*stream.update",
        map=["tag", "place"],
        send={"contract": WITH_DEFAULTS},
    )


@pytest.mark.parametrize(
    ("map", "update", "says"),
    [
        (["tag", "place", "n as count"], None, "no column 'count'; it has tag, place"),
        (["tag", "n as place"], None, "'place' as string, and int is sent.*cast"),
        (update_message(key="tag", update={"plce": "place"}), None, "no column 'plce'"),
        (
            update_message(key="tag", update={"place": "n"}),
            None,
            "'place' as string, and int is sent",
        ),
        (
            update_message(key="tag", update=["place"], default={"at": "gate"}),
            None,
            "'at' as timestamp, and string",
        ),
        ((), {"set": {"where": "place"}}, "no column 'where'"),
        ((), {"add": {"place": "1"}}, "'place' as string, and an update would add to it"),
        ((), {"append": ["place"]}, "'place' as string, and an update would append to it"),
        ((), {"set": ["place"], "if_missing": {"m": "1"}}, "no column 'm'"),
        ((), {"remove": ["gone"]}, "no column 'gone'"),
        (
            (),
            {"set": {"place": "cast(at as timestamp_ntz)"}},
            "'place' as string, and timestamp_ntz is sent",
        ),
        (
            (),
            {"set": {"at": "cast(at as timestamp_ntz)"}},
            "'at' as timestamp, and timestamp_ntz is sent",
        ),
        (
            ["cast(at as timestamp_ntz) as tag", "place"],
            None,
            "'tag' as string, and timestamp_ntz is sent",
        ),
        (
            (),
            {"append": {"seen": "cast(at as timestamp_ntz)"}},
            "'seen' as array<string>, and timestamp_ntz is app",
        ),
    ],
)
def test_columns_and_types_that_the_table_does_not_have_are_refused(
    map: Any, update: Any, says: str
) -> None:
    contract = {"contract": WITH_DEFAULTS} if any(" as update" in text for text in map) else None
    refused(tags(), says, map=map, send=contract, update=update)


def test_the_plan_says_that_decimals_in_sqlite_sort_as_text() -> None:
    priced = tags(columns=COLUMNS | {"price": "decimal(10,2)"})
    (note,) = [
        note for note in planned(last_seen(priced)).notes if "SQLite stores decimals" in note
    ]
    assert "(price)" in note
    assert not [
        note for note in planned(last_seen(tags())).notes if "SQLite stores decimals" in note
    ]


def test_keys_that_are_not_the_stores_are_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        tags(key="place")
    assert (caught.value.argument, caught.value.table) == ("key", "tags")


@pytest.mark.parametrize(
    ("function", "more", "send", "update", "says"),
    [
        (OnlyPuts(), {}, None, {"set": ["place"]}, "OnlyPuts supports only whole records"),
        (Service(), {}, None, {"add": {"n": "1"}}, "Service can't add columns; it can set"),
        (
            Service(),
            {},
            None,
            {"set": ["place"], "if_missing": []},
            "can't put a record only where there is none",
        ),
        (None, {}, {"args": ["tenant"]}, None, "SqliteTable takes none"),
        (
            None,
            {"newest_by": "at"},
            None,
            {"set": ["place"]},
            "the newest record by 'at', which is not sent",
        ),
        (
            None,
            {"newest_by": "at"},
            None,
            {"set": ["at"], "add": {"n": "1"}},
            "idempotent=True, too",
        ),
    ],
)
def test_what_a_function_or_a_declaration_can_not_do_is_refused(
    function: Any, more: dict[str, Any], send: Any, update: Any, says: str
) -> None:
    refused(
        tags(function, **more),
        says,
        map=() if update else ["tag", "place"],
        send=send,
        update=update,
    )


def test_defaults_may_overwrite_where_the_declaration_says_so() -> None:
    app = Application("gates")
    table = app.table(tags(Service(), defaults_may_overwrite=True))
    app.input_stream("lake.scans").update(table, set=["place"], if_missing=[])
    planned(app)


@pytest.mark.parametrize(
    ("update", "says"),
    [
        ({}, "changes nothing"),
        ({"set": ["place"], "add": {"place": "1"}}, "changes column 'place' twice"),
        ({"set": ["tag"]}, "'tag', which is in the table's key"),
        ({"set": {"place": ""}}, "expected Spark SQL"),
        ({"set": {"place": "upper(tag) as loud"}}, "without 'as loud'"),
        ({"set": "place"}, "set is 'place'"),
        (
            {"set": ["place"], "if_missing": {"tag": "gate"}},
            "if_missing= gives 'tag', which is in the table's key",
        ),
        ({"set": ["place"], "if_missing": {"tag": "upper(tag)"}}, "For another key, name"),
    ],
)
def test_an_update_that_makes_no_sense_is_refused_where_it_is_written(
    update: dict[str, Any], says: str
) -> None:
    app = Application("gates")
    with pytest.raises(Exception, match=says):
        app.input_stream("lake.scans").update(app.table(tags()), **update)


def test_a_record_begins_with_its_own_key() -> None:
    for if_missing in (["tag", "place"], {"tag": "tag"}, {"tag": "`tag`"}):
        planned(sums(if_missing=if_missing), scans(("tag",)))
    for wrong in ({"update": {"tag": "gate"}}, {"update": ["place"], "default": {"tag": "gate"}}):
        with pytest.raises(ConfigurationError) as failure:
            update_message(key="tag", **wrong)
        assert failure.value.column == "tag"
    update_message(key="tag", update=["place"], default=["tag", "place"])


def counts(*names: str | None, **more: Any) -> Application:
    """An application that adds to a table in a send for each of these names: the last counts,
    others append.
    """
    app = Application("counts")
    table, stream = app.table(tags(**{"idempotent": True, **more})), app.input_stream("lake.scans")
    for number, name in enumerate(names):
        added: dict[str, Any] = (
            {"append": {"seen": "place"}} if number < len(names) - 1 else {"add": {"n": "1"}}
        )
        stream.update(table, if_missing=[], marks_as=name, **added)
    return app


def test_a_send_with_a_name_moves_no_marks_of_others() -> None:
    def marks(*names: str | None) -> list[str | None]:
        return [table.marks for table in planned(counts(*names)).tables]

    assert marks(None) == ["counts"]
    assert marks("late", None) == ["counts#late", "counts"]
    assert marks(None, None) == ["counts", "counts#2"]
    assert marks("2") == ["counts#2"]  # what is left when the first of two is taken away
    assert [table.marks for table in planned(last_seen(tags())).tables] == [None]


def test_two_tables_over_one_table_of_a_store_have_marks_of_their_own() -> None:
    app = Application("counts")
    stream = app.input_stream("lake.scans")
    for name in ("places", "numbers"):
        table = RemoteTable(
            name, key="tag", write_function=tags().write_function, newest_by="at", idempotent=True
        )
        stream.update(app.table(table), set=["at"], add={"n": "1"}, if_missing=[])
    execution_plan = planned(app)
    assert [table.marks for table in execution_plan.tables] == ["counts", "counts#2"]
    assert any('marks_as="…"' in note for note in execution_plan.notes)


def test_the_plan_warns_of_marks_that_go_by_the_order_of_sends() -> None:
    assert any('marks_as="…"' in note for note in planned(counts(None, None)).notes)
    assert not any("marks_as" in note for note in planned(counts(None, "late")).notes)


@pytest.mark.parametrize(
    ("app", "says"),
    [
        (lambda: counts("late", "late"), "as those of"),
        (lambda: counts("2", None, None), "'counts#2'"),
        (lambda: counts("late", idempotent=False), "stores no marks"),
    ],
)
def test_marks_that_two_sends_share_or_that_there_are_none_of_are_refused(
    app: Any, says: str
) -> None:
    with pytest.raises(PlanningError, match=says):
        planned(app())


def test_a_bound_of_dead_letters_without_any_is_refused() -> None:
    app = Application("counts")
    table, stream = app.table(tags()), app.input_stream("lake.scans").map("tag", "place", "at")
    with pytest.raises(ConfigurationError) as failure:
        stream.send_to(table, at_most=5)
    assert failure.value.argument == "at_most"
    with pytest.raises(ConfigurationError) as failure:
        stream.update(table, set=["place"], at_most=5)
    assert failure.value.argument == "at_most"
