"""Records that are rows: upserts, an operation in a column, Debezium's unwrapped records; and
what extractors add.
"""

from __future__ import annotations

import datetime as dt
import pickle
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.change_formats import (
    ChangeFormat,
    DebeziumUnwrapped,
    OperationColumn,
    Upserts,
)
from dagster_adjunct.assets.declaration.change_values import SNAPSHOT_ROWS
from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.declaration.extractors import Projection, PythonExtractor
from dagster_adjunct.assets.sources.entries import open_changes, open_stream
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.changes.changing import (
    Change,
    changes_of,
    dataset,
    decoded,
    foreign_stream,
    problems,
    rows_of,
    send,
    stream,
)
from tests.assets.conftest import World

ROWS = Schema.of(id="bigint", name="string")
OPERATIONS = Schema.of(id="bigint", op="string", name="string")
UNWRAPPED = Schema.of(id="bigint", name="string", deleted="string", op="string")


@pytest.mark.parametrize(
    "make",
    [
        Upserts,
        lambda: OperationColumn("op", delete=("d",), ignore=["x"]),  # type: ignore[arg-type]
        lambda: DebeziumUnwrapped("gone", "op"),
        lambda: DebeziumEnvelope("id BIGINT"),
        lambda: DebeziumEnvelope("id BIGINT", format="avro", avro_schema={7: '"long"', 3: '"int"'}),
    ],
)
def test_formats_are_values(make: Any) -> None:
    one, other = make(), make()
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert isinstance(one, ChangeFormat)
    assert "0x" not in one.describe()


def test_an_upsert_is_the_row_and_a_tombstone_deletes_it(either: World) -> None:
    stream(either, ROWS, [(1, "a"), (1, "b"), (1, None, True), (None, "c"), (None, None, True)])
    assert decoded(either, dataset()) == [
        Change(0, (1, "a"), False, 0, None),
        Change(1, (1, "b"), False, 1, None),
        Change(2, (1, None), True, 2, None),
        Change(3, (None, "c"), False, 3, "null key column 'id'"),
        Change(4, (None, None), True, 4, "null key column 'id'"),
    ]


def test_a_column_says_what_happened_and_is_not_stored(either: World) -> None:
    rows = [
        (1, "I", "a"),
        (1, "update", "b"),
        (1, "D", None),
        (2, "noop", "x"),
        (3, "t", "x"),
        (4, None, "x"),
    ]
    stream(either, OPERATIONS, [*rows, (5, None, None, True)])
    spec = dataset(changes=OperationColumn(ignore=("noop",)))
    assert open_changes(either.systems, spec).schema == ROWS
    assert decoded(either, spec) == [
        Change(0, (1, "a"), False, 0, None),
        Change(1, (1, "b"), False, 1, None),
        Change(2, (1, None), True, 2, None),
        Change(4, (3, "x"), False, 4, "unknown operation 't'"),
        Change(5, (4, "x"), False, 5, "unknown operation null"),
        Change(6, (5, None), True, 6, None),
    ]


def test_unwrapped_records_say_in_a_column_that_a_row_was_deleted(either: World) -> None:
    rows = [
        (1, "a", "false", "r"),
        (1, "b", "false", "u"),
        (1, "b", "true", "d"),
        (1, None, None, None, True),
        (2, "c", "maybe", "c"),
        (3, "d", None, "c"),
        (4, "e", "false", "x"),
        (5, "f", "false", "t"),
    ]
    stream(either, UNWRAPPED, rows)
    spec = dataset(changes=DebeziumUnwrapped("deleted", "op"))
    assert open_changes(either.systems, spec).schema == ROWS
    changes = decoded(either, spec)
    assert changes[:4] == [
        Change(0, (1, "a"), False, SNAPSHOT_ROWS, None),
        Change(1, (1, "b"), False, 1, None),
        Change(2, (1, "b"), True, 2, None),
        Change(3, (1, None), True, 3, None),
    ]
    assert [change.problem for change in changes[4:7]] == [
        "column 'deleted' is 'maybe': expected true or false",
        "column 'deleted' is null: expected true or false",
        "unknown operation 'x'",
    ]
    assert "a truncate deletes all rows at once" in str(changes[7].problem)


def test_whether_a_row_was_deleted_may_be_a_boolean(either: World) -> None:
    stream(either, Schema.of(id="bigint", gone="boolean"), [(1, False), (1, True)])
    assert [
        change.deleted for change in decoded(either, dataset(changes=DebeziumUnwrapped("gone")))
    ] == [False, True]


@pytest.mark.parametrize(
    ("kind", "value", "position"),
    [
        ("int", 7, 7),
        ("date", dt.date(1970, 1, 3), 2),
        ("timestamp", dt.datetime(1970, 1, 1, 0, 0, 1, 5, tzinfo=dt.UTC), 1_000_005),
    ],
)
def test_positions_are_the_values_of_the_ordering_column(
    either: World, kind: str, value: Any, position: int
) -> None:
    stream(either, Schema.of(id="bigint", version=kind), [(1, value), (2, None)])
    changes = decoded(either, dataset(order_by="version"))
    assert changes[0].position == position
    assert changes[1].problem == "no value to order by: 'version' is null"


def test_an_extractor_makes_none_one_or_several_entries_of_a_change(either: World) -> None:
    records = Schema.of(id="bigint", tailnum="string", seats="int", op="string")
    rows = [
        (1, "N1", 2, "c"),
        (2, "N2", 0, "c"),
        (3, "N1", 1, "x"),
        (4, None, 1, "c"),
        (5, "N3", 1, "d"),
    ]
    stream(either, records, rows)
    by_seat = PythonExtractor(
        "tests.assets.extractors:by_seat", "tailnum STRING, seat INT", ("tailnum",)
    )
    spec = dataset(
        key=["tailnum", "seat"], changes=OperationColumn(), extractor=by_seat, order_by="id"
    )
    reported = "a deletion of an unknown entry: the key is computed by the extractor"
    assert decoded(either, spec) == [
        Change(0, ("N1", 0), False, 1, None),
        Change(0, ("N1", 1), False, 1, None),
        Change(2, ("N1", None), True, 3, "unknown operation 'x'"),
        Change(3, (None, 0), False, 4, "null key column 'tailnum'"),
        Change(4, ("N3", None), True, 5, reported),
    ]


def test_a_projection_gets_the_rows_and_never_those_that_could_not_be_read(
    sparkling: World,
) -> None:
    stream(sparkling, OPERATIONS, [(1, "c", "a"), (2, "x", "b"), (1, "d", "a"), (3, "c", "no")])
    projection = Projection("id BIGINT, upper STRING", {"upper": "upper(name)"}, "name <> 'no'")
    spec = dataset(changes=OperationColumn(), extractor=projection, order_by="id")
    assert decoded(sparkling, spec) == [
        Change(0, (1, "A"), False, 1, None),
        Change(1, (2, None), True, 2, "unknown operation 'x'"),
        Change(2, (1, None), True, 1, None),
        Change(3, (3, None), True, 3, None),
    ]


SEATS = Schema.of(tailnum="string", seats="int")
PLANES = [("N1", 2), ("N2", 3), ("N1", 0), ("N2", None), ("N3", 1), (None, 0)]
PASSING = [
    Projection("tailnum STRING, seats INT", where="seats > 0"),
    PythonExtractor("tests.assets.extractors:seated", "tailnum STRING, seats INT", ("tailnum",)),
]


@pytest.mark.parametrize("extractor", PASSING)
def test_a_change_that_makes_no_entry_deletes_the_one_that_was_there(
    sparkling: World, extractor: Any
) -> None:
    stream(sparkling, SEATS, PLANES[:2])
    spec = dataset(key="tailnum", extractor=extractor)
    sparkling.advance(spec)
    send(sparkling, PLANES[2:])
    sparkling.advance(spec)
    assert dict(sparkling.view(spec).items()) == {"N3": {"tailnum": "N3", "seats": 1}}


def test_a_change_that_makes_no_entry_deletes_nothing_where_the_key_is_computed(
    sparkling: World,
) -> None:
    stream(sparkling, SEATS, PLANES[:4])
    computed = Projection("plane STRING, seats INT", {"plane": "upper(tailnum)"}, "seats > 0")
    changes = decoded(sparkling, dataset(key="plane", extractor=computed))
    assert [(change.row, change.deleted) for change in changes] == [
        (("N1", 2), False),
        (("N2", 3), False),
    ]


DAYS = Schema.of(id="bigint", day="date", at="timestamp")
_LAST_MICRO = 253_402_300_799_999_999


def test_dates_and_times_that_python_has_not_are_problems_whatever_the_format(
    either: World,
) -> None:
    edges = [(1, -719_162, -62_135_596_800_000_000), (2, 2_932_896, _LAST_MICRO), (3, None, None)]
    beyond = [
        (4, -719_163, 0),
        (5, 2_932_897, 0),
        (6, 0, -62_135_596_800_000_001),
        (7, 0, _LAST_MICRO + 1),
    ]
    foreign_stream(either, DAYS, edges + beyond)
    functions = PythonExtractor(
        "tests.assets.extractors:same", "id BIGINT, day DATE, at TIMESTAMP", ("id",)
    )
    for extractor in (None, functions):
        changes = changes_of(either, dataset(extractor=extractor)).select(["__offset", "__problem"])
        problem_at = {row["__offset"]: row["__problem"] for row in rows_of(changes)}
        assert [problem_at[offset] for offset in range(3)] == [None] * 3
        assert problem_at[3] == "column 'day' is '0000-12-31', declared date: years are 1 to 9999"
        assert problem_at[4] == "column 'day' is '+10000-01-01', declared date: years are 1 to 9999"
        assert all(problem_at[offset].startswith("column 'at' is ") for offset in (5, 6))


def test_a_date_that_a_projection_computes_is_of_a_year_that_python_has(sparkling: World) -> None:
    stream(sparkling, SEATS, [("N1", 1), ("N2", 10_000_000)])
    projection = Projection(
        "tailnum STRING, day DATE", {"day": "date_add(date'2020-01-01', seats)"}
    )
    changes = decoded(sparkling, dataset(key="tailnum", extractor=projection))
    assert [change.row[1] for change in changes] == [dt.date(2020, 1, 2), None]
    assert "years are 1 to 9999" in str(changes[1].problem)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"changes": OperationColumn("what")}, "has no column 'what'"),
        (
            {"changes": OperationColumn("id")},
            "column 'id' as bigint, which is declared as the column for the operation",
        ),
        (
            {"changes": DebeziumUnwrapped("id")},
            "as bigint, which is declared as the column for whether the row was deleted",
        ),
        ({"changes": DebeziumEnvelope("id BIGINT")}, "has no column 'value'"),
        (
            {"changes": DebeziumEnvelope("id BIGINT", value="id")},
            "expected string for envelopes in json",
        ),
        (
            {"changes": DebeziumEnvelope("id INT", value="op")},
            "declared as int, but the record's own column",
        ),
        ({"order_by": "lsn"}, "order_by is 'lsn', and changes (upserts) have no such column"),
        ({"order_by": "source.lsn"}, "order_by is 'source.lsn'"),
        (
            {"order_by": "name", "keep_tombstones": 1},
            'between values of order_by="name" there is no distance',
        ),
        (
            {"changes": DebeziumEnvelope("id BIGINT", value="op"), "order_by": "source.a.b"},
            "order_by is 'source.a.b'",
        ),
        (
            {
                "changes": DebeziumEnvelope("id BIGINT", value="op"),
                "order_by": "transaction.total_order",
            },
            "order_by is 'transaction.total_order'",
        ),
    ],
)
def test_a_stream_that_can_not_be_of_the_declared_form_is_refused_with_the_dataset(
    world: World, spec: dict[str, Any], problem: str
) -> None:
    stream(world, OPERATIONS, [])
    with pytest.raises(SchemaMismatchError, match="dataset 'table'") as caught:
        open_changes(world.systems, dataset(**spec))
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: OperationColumn(delete=("d", "U")),
            "the operation 'u' of column 'op' is declared twice",
        ),
        (lambda: DebeziumEnvelope("id BIGINT", format="xml"), "expected 'json' or 'avro'"),
        (lambda: DebeziumEnvelope("id BIGINT", format="avro"), "format='avro' and no avro_schema"),
        (
            lambda: DebeziumEnvelope("id BIGINT", avro_schema="{}"),
            "format='json' and an avro_schema",
        ),
        (lambda: DebeziumEnvelope("id BIGINT", format="avro", avro_schema="{"), "is not JSON"),
        (
            lambda: DebeziumEnvelope("id BIGINT, price DECIMAL(10,2)"),
            "declares 'price' as decimal(10,2), but not how",
        ),
        (lambda: DebeziumEnvelope("id BIGINT", timestamps="days"), "expected 'millis' or 'micros'"),
        (lambda: DebeziumEnvelope("id BIGINT", transactions="lake.tx"), "collection=None"),
    ],
)
def test_formats_that_can_not_work_are_refused_at_once(make: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert problem in caught.value.problem


def test_a_format_that_moves_rows_between_partitions_is_exchanged(world: World) -> None:
    world.streams.create(
        "changes", schema=Schema.of(id="bigint", value="string"), key=["id"], partitions=4
    )
    spread = {"broadcast": False, "partitions": 4}
    assert open_changes(world.systems, dataset(columns=["id"], **spread)).copartitioned
    assert not open_changes(
        world.systems, dataset(changes=DebeziumEnvelope("id BIGINT"), **spread)
    ).copartitioned


def test_bounded_datasets_take_their_records_as_they_are(world: World) -> None:
    stream(world, OPERATIONS, [])
    spec = bounded_dataset("b", input="lake.changes", key="id", broadcast=True)
    assert open_stream(world.systems, spec).schema == OPERATIONS


def test_a_key_that_is_null_is_a_problem_whatever_the_format(either: World) -> None:
    stream(either, OPERATIONS, [(None, "c", "a"), (None, "d", "a")])
    assert problems(either, dataset(changes=OperationColumn())) == {
        0: "null key column 'id'",
        1: "null key column 'id'",
    }
