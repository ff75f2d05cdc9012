"""Records are found by their keys, and read by their places, as plain Python finds them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.errors import ConfigurationError, OffsetOutOfRangeError, SchemaMismatchError
from dagster_adjunct.examples.sqlite_streams import SqliteStreams
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.matching_keys import WantedKeys
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    OffsetRange,
    StreamWriter,
    SystemStreamPartition,
)

Ranges = Mapping[SystemStreamPartition, OffsetRange]
SYSTEMS = {
    "lake": lambda folder: LakeStreams(open_lake(str(folder / "lake"))),
    "sqlite": lambda folder: SqliteStreams(folder / "streams.sqlite"),
}
ORDERS = Schema.of(id="bigint", customer={"id": "string", "region": "int"}, hours="int")
DAY = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture(params=list(SYSTEMS))
def system(request: pytest.FixtureRequest, tmp_path: Path) -> StreamWriter:
    made: StreamWriter = SYSTEMS[request.param](tmp_path)
    made.create("orders", schema=ORDERS, key=["id"], partitions=3)
    return made


def whole(system: StreamWriter, stream: str = "orders") -> dict[SystemStreamPartition, OffsetRange]:
    ssps = system.partitions(stream)
    oldest, upcoming = system.oldest(ssps), system.upcoming(ssps)
    return {ssp: OffsetRange(oldest[ssp], upcoming[ssp]) for ssp in ssps}


def draw_order(draw: Random) -> dict[str, Any]:
    customer = {"id": draw.choice([*"abc", None]), "region": draw.choice([1, 2, None])}
    return {
        "id": draw.randrange(40),
        "customer": draw.choice([customer, customer, None]),
        "hours": draw.randrange(3),
    }


def append(system: StreamWriter, sequence: int, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows, ORDERS.to_arrow())
    system.append("orders", table, producer="p", sequence=sequence)


@pytest.mark.parametrize("seed", range(3))
def test_records_are_found_by_their_keys(seed: int, system: StreamWriter) -> None:
    draw = Random(seed)
    for sequence in range(5):
        append(system, sequence, [draw_order(draw) for _ in range(draw.randrange(30))])
    ranges = {}
    for ssp, span in whole(system).items():
        start = draw.randint(0, int(span.end))
        ranges[ssp] = OffsetRange(str(start), str(draw.randint(start, int(span.end))))
    customers = [(draw.choice([*"abcd", None]), draw.choice([1, 2, 3, None])) for _ in range(4)]
    keys = {
        "customer.id": [key[0] for key in customers],
        "customer.region": [key[1] for key in customers],
    }
    types = (pa.string(), pa.int32())
    table = pa.table(
        {name: pa.array(keys[name], kind) for name, kind in zip(keys, types, strict=True)}
    )

    found = system.find_records(ranges, table, ["customer.region", "id", "__timestamp"])

    expected = []
    for row in system.read_arrow(ranges).to_pylist():
        customer = row["customer"] or {"id": None, "region": None}
        pair = (customer["id"], customer["region"])
        if None not in pair and pair in customers:
            place = {name: row[name] for name in (PARTITION, OFFSET)}
            more = {"customer.region": pair[1], "id": row["id"], "__timestamp": row["__timestamp"]}
            expected.append(place | more)
    assert found.to_pylist() == expected
    records = system.read_records("orders", found.select([PARTITION, OFFSET]))
    all_rows = system.read_arrow(ranges).to_pylist()
    chosen = {(row[PARTITION], row[OFFSET]) for row in expected}
    assert records.to_pylist() == [
        row for row in all_rows if (row[PARTITION], row[OFFSET]) in chosen
    ]


def test_what_finds_nothing_has_the_same_columns(system: StreamWriter) -> None:
    append(system, 0, [draw_order(Random(1)) for _ in range(9)])
    keys = pa.table({"hours": pa.array([None], pa.int32())})
    for ranges in (whole(system), dict.fromkeys(whole(system), OffsetRange("0", "0"))):
        found = system.find_records(ranges, keys, ["customer"])
        assert (found.num_rows, found.column_names) == (0, [PARTITION, OFFSET, "customer"])
        assert system.read_records("orders", found).num_rows == 0


@pytest.mark.parametrize(
    ("keys", "columns"),
    [
        ({"place": pa.array(["a"])}, []),
        ({"customer.name": pa.array(["a"])}, []),
        ({"id": pa.array([1], pa.int32())}, []),
        ({"customer": pa.array([{"id": "a", "region": 1}])}, []),
        ({"id": pa.array([1])}, ["place"]),
    ],
)
def test_what_cannot_be_compared_is_refused(
    keys: dict[str, pa.Array], columns: list[str], system: StreamWriter
) -> None:
    with pytest.raises(SchemaMismatchError):
        system.find_records(whole(system), pa.table(keys), columns)


def test_keys_need_a_column(system: StreamWriter) -> None:
    with pytest.raises(ConfigurationError):
        system.find_records(whole(system), pa.table({}))


def test_a_place_without_a_record_is_refused(system: StreamWriter) -> None:
    append(system, 0, [draw_order(Random(1)) for _ in range(9)])
    places = pa.table({PARTITION: pa.array([0], pa.int32()), OFFSET: pa.array([99])})
    with pytest.raises(OffsetOutOfRangeError) as caught:
        system.read_records("orders", places)
    assert caught.value.partition == 0


def test_a_place_that_is_named_twice_is_refused_by_its_offset(system: StreamWriter) -> None:
    append(system, 0, [{"id": 7, "customer": None, "hours": hour} for hour in range(9)])
    (partition,) = [ssp.partition for ssp, span in whole(system).items() if span.end == "9"]
    offsets = [2, 3, 3, 5]
    places = pa.table({PARTITION: pa.array([partition] * 4, pa.int32()), OFFSET: pa.array(offsets)})
    with pytest.raises(OffsetOutOfRangeError) as caught:
        system.read_records("orders", places)
    assert (caught.value.partition, caught.value.offset) == (partition, "3")


def test_keys_of_all_types_are_compared_exactly() -> None:
    draw = Random(5)
    values = {
        "string": ["", "a", "ä", "a" * 40],
        "tinyint": [-1, 0, 1],
        "smallint": [-1, 0, 300],
        "int": [-1, 0, 2**31 - 1],
        "bigint": [-(2**63), 0, 2**63 - 1],
        "date": [DAY.date(), DAY.date() + timedelta(days=1)],
        "timestamp": [DAY, DAY + timedelta(microseconds=1)],
        "decimal(20,2)": [Decimal("1.10"), Decimal("-1.10"), Decimal("999999999999999999.99")],
        "binary": [b"", b"\0", b"\0\0"],
    }
    schema = Schema.of({f"c{place}": kind for place, kind in enumerate(values)})
    kinds = dict(zip(schema.names, values, strict=True))

    def rows(count: int) -> pa.Table:
        made = [
            {name: draw.choice([*values[kind], None]) for name, kind in kinds.items()}
            for _ in range(count)
        ]
        return pa.Table.from_pylist(made, schema.to_arrow())

    for _ in range(20):
        names = draw.sample(schema.names, draw.randint(1, 4))
        records = rows(60)
        keys = rows(20).select(names)
        wanted = {tuple(row.values()) for row in keys.to_pylist()}
        found = WantedKeys.of(keys, schema.types, "s").find(
            [records.column(name) for name in names]
        )
        expected = []
        for row in records.select(names).to_pylist():
            key = tuple(row.values())
            expected.append(None not in key and key in wanted)
        assert found.to_pylist() == expected
