"""Which change of a key is newer, by what each connector sends; what can't say it is refused."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.assets.declaration.change_formats import DebeziumUnwrapped, OperationColumn
from dagster_adjunct.assets.declaration.change_values import (
    ordering_pattern,
    sortable_array,
    sortable_column,
)
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope, MaxwellEnvelope
from dagster_adjunct.assets.declaration.policies import DeadLetters, DeltaCompaction
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import read_entries
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.errors import (
    BadChangeError,
    ConfigurationError,
    DatasetError,
    SchemaMismatchError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.changes.changing import as_record, dataset, envelopes, problems, send, stream
from tests.assets.conftest import World

FORM = DebeziumEnvelope("id BIGINT, v STRING")
BY_HAND = DeltaCompaction(inside_commit=False)


def change(
    v: str | None, source: dict[str, Any], *, key: int = 1, op: str | None = None
) -> dict[str, Any]:
    row = {"id": key, "v": v}
    deleted = v is None
    return {
        "op": op or ("d" if deleted else "u"),
        "before": row if deleted else None,
        "after": None if deleted else row,
        "source": source,
        "ts_ms": 1,
    }


def held(world: World, name: str = "table") -> dict[Any, Any]:
    """What the table holds: by key, all in order of keys, and in Arrow."""
    reader = StoredVersions(world.lake, name).require_current()
    entries = {key: entry["v"] for key, entry in reader.items()}
    assert {key: entry["v"] for key, entry in reader.get_all(range(20)).items()} == entries
    rows = read_entries(reader, None)
    assert dict(zip(rows["id"].to_pylist(), rows["v"].to_pylist(), strict=True)) == entries
    return entries


def mysql(file: int, pos: int, *, width: int = 6) -> dict[str, Any]:
    return {
        "connector": "mysql",
        "file": f"mysql-bin.{file:0{width}}",
        "pos": pos,
        "row": 0,
        "gtid": None,
        "ts_ms": 1,
    }


def lsn(number: int) -> str:
    digits = f"{number:020x}"
    return f"{digits[:8]}:{digits[8:16]}:{digits[16:]}"


def sqlserver(commit: int, changed: int | None) -> dict[str, Any]:
    reported = None if changed is None else lsn(changed)
    return {"connector": "sqlserver", "commit_lsn": lsn(commit), "change_lsn": reported, "ts_ms": 1}


# (connector, its order, sources from the oldest to the newest)
CONNECTORS: list[tuple[str, Any, list[dict[str, Any]]]] = [
    (
        "mysql",
        ["source.file", "source.pos"],
        [
            mysql(9, 120),
            mysql(9, 900),
            mysql(10, 4),
            mysql(10, 120),
            mysql(99, 7),
            mysql(100, 6),
            mysql(10**6, 5),
        ],
    ),
    (
        "mysql by GTID",
        "source.gtid",
        [
            {"connector": "mysql", "gtid": f"3E11FA47-71CA-11E1-9E33-C80AA9429562:{n}"}
            for n in (2, 10, 99, 1000)
        ],
    ),
    (
        "mariadb by GTID",
        "source.gtid",
        [{"connector": "mariadb", "gtid": f"0-{n % 3}-{n}"} for n in (7, 20, 100)],
    ),
    (
        "sqlserver",
        ["source.commit_lsn", "source.change_lsn"],
        [
            sqlserver(9, 8),
            sqlserver(16, 3),
            sqlserver(16, 15),
            sqlserver(16, 16),
            sqlserver(2**70, 1),
        ],
    ),
    (
        "oracle",
        "source.scn",
        [{"connector": "oracle", "scn": text} for text in ("99", "100", "2122184", "9" * 18)],
    ),
    (
        "postgresql",
        "source.lsn",
        [{"connector": "postgresql", "lsn": n} for n in (9, 10, 24023128)],
    ),
    (
        "mongodb",
        ["source.ts_ms", "source.ord"],
        [
            {"connector": "mongodb", "ts_ms": t, "ord": o}
            for t, o in ((1, 9), (1, 10), (2, 1), (10, 0))
        ],
    ),
    (
        "cockroach",
        "source.mvcc",
        [{"connector": "cockroach", "mvcc": f"{n}"} for n in (5, 10, 10**30)],
    ),
]


ONE_OF_A_KIND = ("mysql by GTID",)


@pytest.mark.parametrize(
    ("connector", "order", "sources"),
    [
        pytest.param(*case, id=case[0], marks=() if case[0] in ONE_OF_A_KIND else pytest.mark.long)
        for case in CONNECTORS
    ],
)
def test_the_newest_change_of_each_connector_wins(
    sparkling: World, connector: str, order: Any, sources: list[dict[str, Any]]
) -> None:
    changes = [change(f"{number}", source) for number, source in enumerate(sources)]
    envelopes(sparkling, *reversed(changes[1:]))
    spec = dataset(changes=FORM, order_by=order, compaction=BY_HAND)
    sparkling.advance(spec)
    assert held(sparkling) == {1: f"{len(sources) - 1}"}
    send(sparkling, [as_record(change("older", sources[0]))])
    sparkling.advance(spec)
    assert held(sparkling) == {1: f"{len(sources) - 1}"}
    rows = (
        StoredVersions(sparkling.lake, "table").require_current().frame(sparkling.spark()).collect()
    )
    assert [row.v for row in rows] == [f"{len(sources) - 1}"]


def test_a_snapshots_row_is_older_than_the_changes_of_its_transaction(sparkling: World) -> None:
    envelopes(
        sparkling, change("new", sqlserver(16, 1)), change("old", sqlserver(16, None), op="r")
    )
    spec = dataset(changes=FORM, order_by=["source.commit_lsn", "source.change_lsn"])
    sparkling.advance(spec)
    assert held(sparkling) == {1: "new"}
    send(sparkling, [as_record(change("lost", sqlserver(17, None)))])
    assert list(problems(sparkling, spec).values()) == [
        "no value to order by: 'source.change_lsn' is null"
    ]


@pytest.mark.parametrize(
    "order",
    [
        "source.pos", "source.file", "source.row", "source.ord", "source.change_lsn", "source.table", "source.sequence",
        "source.txId", ["source.pos", "source.file"], ["source.file", "source.row"], "source.snapshot", "source.db",
        "source.event_serial_no", ["source.ts_ms", "source.pos"],
    ],
)  # fmt: skip
def test_a_path_that_can_not_order_is_refused_when_the_input_is_opened(
    world: World, order: Any
) -> None:
    envelopes(world)
    with pytest.raises(SchemaMismatchError) as caught:
        world.advance(dataset(changes=FORM, order_by=order))
    assert caught.value.dataset == "table"
    assert caught.value.column in ([order] if isinstance(order, str) else order)


@pytest.mark.parametrize(
    "dead", [pytest.param("fail", marks=pytest.mark.long), DeadLetters("lake.dead")]
)
@pytest.mark.parametrize(
    ("order", "reported"),
    [
        ("source.lsm", "lsn"),  # mistyped
        ("source.scn", 'order_by="source.lsn"'),  # another connector's
        ("source.name_of_it", "shop"),  # a text that orders nothing
        pytest.param(["source.lsn", "source.at"], "at", marks=pytest.mark.long),
        pytest.param("ts_us", "ts_ms", marks=pytest.mark.long),
    ],
)
def test_what_the_first_change_lacks_is_an_error_and_no_letter(
    sparkling: World, dead: Any, order: Any, reported: str
) -> None:
    source = {"connector": "postgresql", "lsn": 7, "name_of_it": "shop"}
    envelopes(sparkling, "no JSON", change("a", source), change("b", source))
    with pytest.raises(SchemaMismatchError) as caught:
        sparkling.advance(dataset(changes=FORM, order_by=order, on_bad_change=dead))
    assert (caught.value.dataset, caught.value.argument) == ("table", "order_by")
    assert reported in caught.value.problem
    assert "is null" not in caught.value.problem
    assert StoredVersions(sparkling.lake, "table").require_manifest().offsets == {
        "lake.changes.0": "0"
    }
    with pytest.raises(StreamNotFoundError):
        sparkling.streams.info("dead")


def test_a_later_change_without_a_value_is_reported_as_what_it_is(sparkling: World) -> None:
    envelopes(
        sparkling,
        change("a", {"lsn": 1}),
        change("b", {"lsn": None}),
        change("c", {"lsm": 3}),
        change("d", {"lsn": "16/B374D848"}),
        change("e", {"lsn": 2**63}),
        {"op": "u", "after": {"id": 1, "v": None}},
    )
    assert problems(sparkling, dataset(changes=FORM, order_by="source.lsn")) == {
        1: "no value to order by: 'source.lsn' is null",
        2: "no value to order by: it has no 'source.lsn', but lsm",
        3: "'16/B374D848' in 'source.lsn' can't be ordered: expected a bigint",
        4: f"'{2**63}' in 'source.lsn' can't be ordered: expected a bigint",
        5: "no value to order by: it has no 'source.lsn', but nothing",
    }


def test_what_the_first_change_was_ordered_by_is_remembered_over_commits(sparkling: World) -> None:
    envelopes(sparkling, change("a", mysql(9, 900)))
    spec = dataset(
        changes=FORM, order_by=["source.file", "source.pos"], on_bad_change=DeadLetters("lake.dead")
    )
    sparkling.advance(spec)
    renamed = mysql(3, 10) | {"file": "binlog.000010"}
    send(
        sparkling,
        [as_record(change("b", renamed)), as_record(change("c", {"connector": "mysql", "pos": 7}))],
    )
    assert sparkling.advance(spec).counters["quarantined"] == 2
    reasons = sparkling.streams.read_arrow(sparkling.streams.all_ranges("dead"))[
        "reason"
    ].to_pylist()
    assert reasons == [
        "'binlog.000010' in 'source.file' can't be ordered: expected one like 'mysql-bin.000009'",
        (
            "no value to order by: it has no 'source.file', but connector, pos; changes of its"
            ' connector take order_by=["source.file", "source.pos"]'
        ),
    ]
    assert held(sparkling) == {1: "a"}


# -- columns of rows, in process

ROWS = Schema.of(
    id="bigint",
    v="string",
    seq="string",
    exact="decimal(38,0)",
    file="string",
    pos="bigint",
    day="date",
)


@pytest.fixture
def quick(world: World) -> World:
    world.spark = IN_PROCESS
    return world


def row(
    key: int, v: str | None, seq: str = "0", file: str = "", pos: int = 0, day: int = 0
) -> tuple[Any, ...]:
    exact = Decimal(seq) if seq.lstrip("-").isdigit() else None
    return (key, v, seq, exact, file, pos, dt.date(2020, 1, 1) + dt.timedelta(day), v is None)


DMS = "20240102030405000000000000000{:06}"


@pytest.mark.parametrize("order", ["seq", "exact", ["day", "seq"]])
def test_a_sequence_of_35_digits_orders_as_text_and_as_decimal(quick: World, order: Any) -> None:
    numbers = [DMS.format(number) for number in (7, 10, 9)]
    assert len(numbers[0]) == 35
    stream(quick, ROWS, [row(1, f"{number}", number) for number in numbers])
    spec = dataset(order_by=order)
    quick.advance(spec)
    assert held(quick) == {1: numbers[1]}
    send(
        quick,
        [
            row(1, "older", DMS.format(8)),
            row(2, None, DMS.format(11)),
            row(2, "late", DMS.format(3)),
        ],
    )
    quick.advance(spec)
    assert held(quick) == {1: numbers[1]}
    send(quick, [row(1, None, "9" * 36), row(2, "back", "9" * 38)])
    quick.advance(spec)
    assert held(quick) == {2: "back"}


@pytest.mark.lengthy
@pytest.mark.parametrize("order", [["file", "pos"], ["pos", "day"], ["day", "pos", "seq"]])
def test_several_columns_order_by_the_first_that_differs(quick: World, order: list[str]) -> None:
    chance = random.Random(str(order))
    spec, oracle = dataset(order_by=order, compaction=BY_HAND), dict[int, tuple[Any, str | None]]()
    stream(quick, ROWS, [])
    for number in range(8):
        rows = [
            row(
                chance.randrange(6),
                chance.choice((None, *[f"{number}-{place}"] * 4)),
                f"{chance.randrange(-9, 99)}",
                f"binlog.{chance.choice((8, 9, 10, 11, 99, 100)):03}",
                chance.randrange(-3, 12),
                chance.randrange(3),
            )
            for place in range(12)
        ]
        send(quick, rows)
        for sent in rows:
            values = dict(zip(ROWS.names, sent, strict=False))
            values |= {"file": int(values["file"].partition(".")[2]), "seq": int(values["seq"])}
            place = tuple(values[name] for name in order)
            if sent[0] not in oracle or place >= oracle[sent[0]][0]:
                oracle[sent[0]] = (place, sent[1])
        quick.advance(spec)
        if number in (3, 6):
            compact_dataset(
                quick.lake,
                "table",
                spark=quick.spark,
                by="test",
                level="minor" if number == 3 else "major",
            )
        assert held(quick) == {key: v for key, (_, v) in oracle.items() if v is not None}


@pytest.mark.parametrize("text", ["Ann", "", "2024-01-02", "1.5", "12.25", "true", "1e5"])
def test_a_text_that_orders_nothing_is_an_error_at_the_first_change(
    quick: World, text: str
) -> None:
    stream(quick, Schema.of(id="bigint", seq="string"), [(1, None), (1, text)])
    with pytest.raises(SchemaMismatchError) as caught:
        quick.advance(dataset(order_by="seq", on_bad_change=DeadLetters("lake.dead")))
    assert (caught.value.dataset, caught.value.column) == ("table", "seq")


def test_a_first_value_of_a_sensitive_column_is_not_reported(quick: World) -> None:
    stream(quick, ROWS, [row(1, "a", "secret")])
    with pytest.raises(SchemaMismatchError) as caught:
        quick.advance(dataset(order_by="seq", sensitive=["seq"]))
    assert "secret" not in str(caught.value)


def test_a_value_that_is_null_or_no_number_is_a_bad_change_of_its_own(quick: World) -> None:
    stream(quick, ROWS, [row(1, "a", "5")])
    spec = dataset(order_by=["seq", "day"])
    quick.advance(spec)
    send(quick, [row(1, "b", "six")])
    with pytest.raises(BadChangeError) as caught:
        quick.advance(spec)
    assert "'six' in 'seq' can't be ordered: expected a whole number" in caught.value.problem
    assert held(quick) == {1: "a"}


@pytest.mark.parametrize("kind", ["double", "boolean", "binary", "decimal(10,2)", "float"])
def test_a_column_of_a_type_that_has_no_order_is_refused(world: World, kind: str) -> None:
    stream(world, Schema.of(id="bigint", at=kind), [])
    with pytest.raises(SchemaMismatchError) as caught:
        world.advance(dataset(order_by=["id", "at"]))
    assert caught.value.column == "at"


@pytest.mark.parametrize("order", [[], [""], ["a", "a"], 7, ["a", None], {"a": 1}])
def test_an_order_that_is_none_is_refused_when_declared(order: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        dataset(order_by=order)
    assert caught.value.argument == "order_by"


@pytest.mark.parametrize("order", ["seq", "exact", ["pos", "day"]])
def test_deletions_are_not_forgotten_by_a_distance_that_there_is_not(
    quick: World, order: Any
) -> None:
    stream(quick, ROWS, [])
    with pytest.raises((ConfigurationError, SchemaMismatchError)) as caught:
        quick.advance(dataset(order_by=order, keep_tombstones=5))
    assert caught.value.argument == "keep_tombstones"


def test_another_order_than_the_stored_one_needs_a_rebuild(quick: World) -> None:
    stream(quick, ROWS, [row(1, "a", "5", pos=1), row(1, "b", "4", pos=2)])
    quick.advance(dataset(order_by="pos"))
    assert held(quick) == {1: "b"}
    for other in (dataset(order_by="seq"), dataset(), dataset(order_by=["pos", "seq"])):
        with pytest.raises(DatasetError) as caught:
            quick.advance(other)
        assert "rebuild table" in caught.value.next_step
    spec = dataset(order_by="seq")
    rebuild_dataset(
        spec,
        lake=quick.lake,
        systems=quick.systems,
        spark=quick.spark,
        reason="another order",
        by="test",
    )
    assert held(quick) == {1: "a"}
    send(quick, [row(1, "c", "6")])
    quick.advance(spec)
    assert held(quick) == {1: "c"}


# -- what a position is made of

LSN = st.lists(st.integers(0, 2**40), min_size=3, max_size=3)
KINDS: dict[str, tuple[Any, Any]] = {
    "number": (st.integers(-(10**38), 10**38), str),
    "lsn": (LSN, lambda parts: ":".join(f"{part:08x}" for part in parts)),
    "file": (st.integers(0, 2**31), lambda number: f"a-b.c_(9.{number:06}"),
    "position": (LSN.map(lambda parts: parts[:2]), lambda parts: f"bin.{parts[0]:06}:{parts[1]}"),
    "pg_lsn": (
        LSN.map(lambda parts: [part % 2**32 for part in parts[:2]]),
        lambda parts: "{:X}/{:X}".format(*parts),
    ),
}


@settings(max_examples=60)
@given(data=st.data(), name=st.sampled_from(sorted(KINDS)))
def test_positions_sort_as_the_values_do(data: st.DataObject, name: str) -> None:
    values, written = KINDS[name]
    drawn = data.draw(st.lists(values, min_size=2, max_size=8))
    texts = [written(value) for value in drawn]
    places = sortable_array(pa.chunked_array([pa.array(texts)]), name, texts[0]).to_pylist()
    by_place = sorted(range(len(drawn)), key=lambda index: places[index])
    assert [drawn[index] for index in by_place] == sorted(drawn)
    assert all((a == b) == (p == q) for a, p in zip(drawn, places) for b, q in zip(drawn, places))  # noqa: B905


@pytest.mark.spark
def test_both_engines_make_the_same_positions(spark: Any) -> None:
    chance = random.Random(3)
    for name, sample in (
        ("n", "7"),
        ("lsn", lsn(3)),
        ("f", "mysql-bin.000009"),
        ("p", "master.000006:800911"),
        ("a_lsn", "16/B374D848"),
        ("gtid", "3E11FA47-71CA-11E1-9E33-C80AA9429562:23"),
        ("x_gtid", "0-1-42"),
    ):
        assert ordering_pattern(name, sample) is not None
        digits = "0123456789"
        texts: list[str | None] = [
            "".join(chance.choice(digits) if c in digits else c for c in sample) for _ in range(50)
        ]
        texts += [
            "-12",
            "+5",
            "-0",
            "00012",
            "",
            None,
            "x",
            "ABCD:1:2",
            sample,
            sample.upper(),
            "9" * 38,
        ]
        expected = sortable_array(pa.chunked_array([pa.array(texts)]), name, sample).to_pylist()
        frame = spark.createDataFrame(
            [(place, text) for place, text in enumerate(texts)], "i int, t string"
        )
        made = (
            frame.select("i", sortable_column(frame.t, name, sample).alias("p"))
            .orderBy("i")
            .collect()
        )
        assert [found.p for found in made] == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gtid", "2024-01-02T03:04"), ("day", "2024-01-02"), ("day", "01/02"), ("n", "1.25"), ("n", "0x1f"), ("n", "٣"),
        ("n", "v1"), ("n", '["1","2"]'), ("n", "4F2B-11"),
        ("at", "2026-01-01T00:00:00.000123"), ("at", "2026-01-01 CET.000123"), ("by", "ann@example.1"),
    ],
)  # fmt: skip
def test_texts_that_only_look_ordered_are_not(name: str, text: str) -> None:
    assert ordering_pattern(name, text) is None


# -- rows of a snapshot


def test_a_streamed_change_wins_over_a_snapshots_row_that_comes_late(sparkling: World) -> None:
    at = {"lsn": 1}
    envelopes(
        sparkling,
        change("streamed", at, key=1),
        change("late", at, key=1, op="r"),
        change(None, at, key=2),
        change("late", at, key=2, op="r"),
        change("first", at, key=3, op="r"),
        change("second", at, key=3, op="r"),
        change("first", at, key=4, op="r"),
        change("streamed", at, key=4),
    )
    spec = dataset(changes=FORM, compaction=BY_HAND)
    sparkling.advance(spec)
    expected = {1: "streamed", 3: "second", 4: "streamed"}
    assert held(sparkling) == expected
    compact_dataset(sparkling.lake, "table", spark=sparkling.spark, by="test", level="major")
    send(sparkling, [as_record(change("later", at, key=key, op="r")) for key in (1, 2, 3, 4, 5)])
    sparkling.advance(spec)
    expected |= {3: "later", 5: "later"}
    assert held(sparkling) == expected
    rows = (
        StoredVersions(sparkling.lake, "table").require_current().frame(sparkling.spark()).collect()
    )
    assert {row.id: row.v for row in rows} == expected


INCREMENTAL = {"connector": "postgresql", "snapshot": "incremental"}


def test_rows_of_incremental_snapshots_take_their_place_among_the_offsets(sparkling: World) -> None:
    at = {"lsn": 1}
    envelopes(
        sparkling,
        change("streamed", at, key=1),
        change("repaired", INCREMENTAL | {"lsn": None}, key=1, op="r"),
        change("repaired", INCREMENTAL | {"lsn": None}, key=2, op="r"),
        change("streamed", at, key=2),
        change("initial", {"snapshot": "last"}, key=2, op="r"),
    )
    spec = dataset(changes=FORM, compaction=BY_HAND)
    sparkling.advance(spec)
    assert held(sparkling) == {1: "repaired", 2: "streamed"}
    wrapped = {"schema": {}, "payload": change("again", INCREMENTAL, key=2, op="r")}
    send(sparkling, [as_record(wrapped), as_record(change("later", at, key=1))])
    sparkling.advance(spec)
    assert held(sparkling) == {1: "later", 2: "again"}


@pytest.mark.parametrize(
    ("order", "streamed", "unplaced", "placed"),
    [
        ("source.lsn", {"lsn": 5}, [{"lsn": None}, {}, {"lsn": 0}], {"lsn": 9}),
        pytest.param(
            ["source.file", "source.pos"],
            {"file": "mysql-bin.000003", "pos": 5},
            [
                {"file": "", "pos": 0},
                {"file": "mysql-bin.000003", "pos": 0},
                {"file": "mysql-bin.000003"},
            ],
            {"file": "mysql-bin.000003", "pos": 70},
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["source.commit_lsn", "source.change_lsn"],
            {"commit_lsn": "00000010:00000001:0001", "change_lsn": "00000010:00000001:0001"},
            [{"commit_lsn": None, "change_lsn": None}, {"commit_lsn": "00000000:00000000:0000"}],
            {"commit_lsn": "00000011:00000001:0001", "change_lsn": None},
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["source.ts_ms", "source.ord"],
            {"ts_ms": 1700, "ord": 1},
            [{"ts_ms": 0, "ord": 0}, {"ts_ms": None}],
            {"ts_ms": 1800, "ord": 1},
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_incremental_row_without_a_position_is_a_letter_that_says_how_to_repair(
    sparkling: World,
    order: Any,
    streamed: dict[str, Any],
    unplaced: list[dict[str, Any]],
    placed: dict[str, Any],
) -> None:
    rows = [change(f"bad {number}", INCREMENTAL | at, op="r") for number, at in enumerate(unplaced)]
    envelopes(sparkling, *rows, change("streamed", streamed), *rows)
    spec = dataset(changes=FORM, order_by=order, on_bad_change=DeadLetters("lake.dead"))
    assert sparkling.advance(spec).counters["quarantined"] == 2 * len(rows)
    assert held(sparkling) == {1: "streamed"}
    letters = sparkling.streams.read_arrow(sparkling.streams.all_ranges("dead"))[
        "reason"
    ].to_pylist()
    assert all("row of an incremental snapshot without a position" in letter for letter in letters)
    assert all("write them again in the source" in letter for letter in letters)
    send(
        sparkling,
        [
            as_record(change("repaired", INCREMENTAL | placed, op="r")),
            as_record(change("old", streamed)),
        ],
    )
    sparkling.advance(spec)
    assert held(sparkling) == {1: "repaired"}, "one with a position is ordered by it"


def test_a_null_order_in_a_snapshots_row_says_how_to_repair_in_each_format(
    sparkling: World,
) -> None:
    form = MaxwellEnvelope("id BIGINT, v STRING")
    at = {"database": "d", "table": "t", "ts": 1, "data": {"id": 1, "v": "x"}}
    rows = [
        at | {"type": "insert", "position": "mysql-bin.000009:120"},
        at | {"type": "bootstrap-insert", "position": None},
        at | {"type": "update", "position": None, "old": {"v": "y"}},
    ]
    envelopes(sparkling, *rows)
    found = problems(sparkling, dataset(changes=form, order_by="source.position"))
    assert {number: "write them again in the source" in text for number, text in found.items()} == {
        1: True,
        2: False,
    }


@pytest.mark.parametrize("engine", ["in process", pytest.param("spark", marks=pytest.mark.spark)])
def test_a_null_order_in_an_unwrapped_snapshots_row_says_how_to_repair(
    world: World, request: pytest.FixtureRequest, engine: str
) -> None:
    session = request.getfixturevalue("spark") if engine == "spark" else None
    world.spark = IN_PROCESS if session is None else lambda: session
    schema = Schema.of(id="bigint", v="string", deleted="string", op="string", lsn="bigint")
    rows = [
        (1, "streamed", "false", "u", 5),
        (1, "repair", "false", "r", None),
        (2, "lost", "false", "u", None),
    ]
    stream(world, schema, rows)
    spec = dataset(changes=DebeziumUnwrapped("deleted", "op"), order_by="lsn")
    found = problems(world, spec)
    assert {number: "write them again in the source" in text for number, text in found.items()} == {
        1: True,
        2: False,
    }


SNAPS = Schema.of(id="bigint", v="string", deleted="string", op="string")


@pytest.mark.lengthy
def test_snapshots_and_changes_in_any_order_and_cut_give_what_a_dict_gives(quick: World) -> None:
    chance, spec = (
        random.Random(5),
        dataset(changes=DebeziumUnwrapped("deleted", "op"), compaction=BY_HAND),
    )
    stream(quick, SNAPS, [])
    streamed, snapshot = dict[int, str | None](), dict[int, str]()
    for number in range(12):
        rows: list[tuple[Any, ...]] = []
        for place in range(6):
            key, v, kind = chance.randrange(12), f"{number}-{place}", chance.choice("rrcud")
            rows.append((key, v, "true" if kind == "d" else "false", kind))
            if kind == "r":
                snapshot[key] = v
            else:
                streamed[key] = None if kind == "d" else v
        send(quick, rows)
        quick.advance(spec)
        if number % 4 == 3:
            level: Any = "minor" if number == 3 else "major"
            compact_dataset(quick.lake, "table", spark=quick.spark, by="test", level=level)
        assert held(quick) == {
            key: v for key, v in {**snapshot, **streamed}.items() if v is not None
        }


def test_deletions_that_snapshots_are_compared_with_can_be_forgotten_by_offsets(
    quick: World,
) -> None:
    spec = dataset(
        changes=DebeziumUnwrapped("deleted", "op"), compaction=BY_HAND, keep_tombstones=3
    )
    stream(
        quick,
        SNAPS,
        [
            (1, "a", "false", "c"),
            (1, None, "true", "d"),
            (2, None, "true", "d"),
            (3, "c", "false", "c"),
        ],
    )
    quick.advance(spec)
    send(quick, [(4, "d", "false", "c")])
    quick.advance(spec)
    compact_dataset(quick.lake, "table", spark=quick.spark, by="test", level="major")
    send(quick, [(1, "late", "false", "r"), (2, "late", "false", "r"), (9, "new", "false", "r")])
    assert quick.advance(spec).counters.get("late", 0) == 0
    assert held(quick) == {1: "late", 3: "c", 4: "d", 9: "new"}, (
        "the deletion of 2 is near enough to be remembered"
    )


def test_operations_that_say_nothing_of_snapshots_stay_in_the_order_of_offsets(
    quick: World,
) -> None:
    stream(quick, Schema.of(id="bigint", v="string", op="string"), [(1, "a", "u"), (1, "b", "r")])
    quick.advance(dataset(changes=OperationColumn("op")))
    assert held(quick) == {1: "b"}
