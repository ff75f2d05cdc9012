"""What every stream system promises, whatever stores its records: add a new one to SYSTEMS.

Kafka is not here: its offsets have gaps, and its own tests need a broker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from dagster_adjunct import open_lake
from dagster_adjunct.errors import (
    ConfigurationError,
    OffsetOutOfRangeError,
    ProducerConflictError,
    StreamExistsError,
    StreamNotFoundError,
)
from dagster_adjunct.examples.sqlite_streams import SqliteStreams
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.checked_reads import read_frame, read_table
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    RECORD_META,
    RECORD_META_COLUMNS,
    AppendResult,
    OffsetRange,
    StreamWriter,
    SystemStreamPartition,
)

SYSTEMS: dict[str, Callable[[Path], StreamWriter]] = {
    "lake": lambda folder: LakeStreams(open_lake(str(folder / "lake"))),
    "sqlite": lambda folder: SqliteStreams(folder / "streams.sqlite"),
}
DECLARED: dict[str, Any] = {
    "schema": Schema.of(sensor="string", celsius="bigint"),
    "key": ["sensor"],
    "partitions": 3,
}
Reading = tuple[str, int]


@pytest.fixture(params=list(SYSTEMS))
def system(request: pytest.FixtureRequest, tmp_path: Path) -> StreamWriter:
    made = SYSTEMS[request.param](tmp_path)
    made.create("readings", **DECLARED)
    return made


def table(*readings: Reading, **meta: Sequence[Any]) -> pa.Table:
    """Return readings as a table, with these columns of RECORD_META."""
    columns = {
        "sensor": pa.array([sensor for sensor, _ in readings], pa.string()),
        "celsius": pa.array([celsius for _, celsius in readings], pa.int64()),
    }
    return pa.table({**columns, **{f"__{name}": values for name, values in meta.items()}})


def ranges_of(
    system: StreamWriter, result: AppendResult
) -> dict[SystemStreamPartition, OffsetRange]:
    ranges = {}
    for ssp in system.partitions("readings"):
        if ssp.partition in result.first:
            first, after = result.first[ssp.partition], result.next[ssp.partition]
            ranges[ssp] = OffsetRange(first, after)
    return ranges


def whole_stream(system: StreamWriter) -> dict[SystemStreamPartition, OffsetRange]:
    ssps = system.partitions("readings")
    oldest = system.oldest(ssps)
    upcoming = system.upcoming(ssps)
    return {ssp: OffsetRange(oldest[ssp], upcoming[ssp]) for ssp in ssps}


def by_sensor(readings: Sequence[Reading]) -> dict[str, list[int]]:
    found = defaultdict(list)
    for sensor, celsius in readings:
        found[sensor].append(celsius)
    return found


def read(
    system: StreamWriter, ranges: dict[SystemStreamPartition, OffsetRange]
) -> dict[str, list[int]]:
    rows = read_table(system, ranges).to_pylist()
    return by_sensor([(row["sensor"], row["celsius"]) for row in rows])


@pytest.mark.parametrize("seed", range(3))
def test_appends_are_read_as_they_were_made_and_once_if_repeated(
    seed: int, system: StreamWriter
) -> None:
    draw = Random(seed)
    everything: list[Reading] = []
    for sequence in range(10):
        count = draw.randrange(6)
        readings = [(draw.choice("abcdef"), draw.randrange(99)) for _ in range(count)]
        added = system.append("readings", table(*readings), producer="p", sequence=sequence)
        again = system.append("readings", table(*readings), producer="p", sequence=sequence)
        assert (added.rows, added.duplicate, again.duplicate) == (count, False, True)
        assert (again.first, again.next) == (added.first, added.next)
        assert read(system, ranges_of(system, added)) == by_sensor(readings)
        everything += readings
    assert read(system, whole_stream(system)) == by_sensor(everything)
    assert system.records_between(whole_stream(system)) == len(everything)


def test_the_records_of_a_key_are_in_one_partition(system: StreamWriter) -> None:
    for sequence in range(3):
        readings = [(sensor, sequence) for sensor in "abcdef"]
        system.append("readings", table(*readings), producer="p", sequence=sequence)
    rows = read_table(system, whole_stream(system)).to_pylist()
    places = {(row["sensor"], row["__partition"]) for row in rows}
    assert (len(rows), len(places)) == (18, 6)


def test_a_key_may_be_a_value_inside_a_column(system: StreamWriter) -> None:
    schema = Schema.of(place={"sensor": "string"}, celsius="bigint")
    system.create("nested", schema=schema, key=["place.sensor"], partitions=3)
    assert system.info("nested").key == ("place.sensor",)
    rows = [{"place": {"sensor": draw}, "celsius": n} for n, draw in enumerate("abcdeabcde")]
    rows += [{"place": None, "celsius": 10}, {"place": {"sensor": None}, "celsius": 11}]
    sent = pa.Table.from_pylist(rows, schema.to_arrow())
    result = system.append("nested", sent, producer="p", sequence=1)
    found: dict[str | None, set[int]] = defaultdict(set)
    for ssp in system.partitions("nested"):
        first, after = result.first[ssp.partition], result.next[ssp.partition]
        for row in read_table(system, {ssp: OffsetRange(first, after)}).to_pylist():
            found[row["place"] and row["place"]["sensor"]].add(ssp.partition)
    assert set(found) == {*"abcde", None}
    assert all(len(partitions) == 1 for partitions in found.values())
    assert len(set.union(*found.values())) > 1


def test_other_records_under_a_sequence_add_nothing(system: StreamWriter) -> None:
    system.append("readings", table(("a", 1)), producer="p", sequence=1)
    with pytest.raises(ProducerConflictError):
        system.append("readings", table(("a", 2)), producer="p", sequence=1)
    assert read(system, whole_stream(system)) == {"a": [1]}


def test_a_range_is_read_exactly_or_refused(system: StreamWriter) -> None:
    system.append("readings", table(*[("a", i) for i in range(5)]), producer="p", sequence=1)
    ((ssp, span),) = (
        (ssp, span) for ssp, span in whole_stream(system).items() if span.start != span.end
    )
    at = [system.advance(ssp, span.start, count) for count in range(6)]
    assert (at[5], system.distance(ssp, at[1], at[3])) == (span.end, 2)
    assert [system.compare(at[1], other) for other in at[:3]] == [1, 0, -1]
    assert read(system, {ssp: OffsetRange(at[1], at[3])}) == {"a": [1, 2]}
    assert read(system, {ssp: OffsetRange(at[2], at[2])}) == {}
    beyond = system.advance(ssp, span.end, 1)
    for start, end in ((at[1], beyond), (beyond, beyond), (at[3], at[1])):
        with pytest.raises(OffsetOutOfRangeError):
            system.read_arrow({ssp: OffsetRange(start, end)})


def test_the_marks_of_records_are_kept_and_have_defaults(system: StreamWriter) -> None:
    at = datetime(2026, 3, 1, 12, tzinfo=UTC)
    marks = {"timestamp": [at, None], "tombstone": [True, None], "epoch": [2, None]}
    kinds = {
        "timestamp": pa.timestamp("us", tz="UTC"),
        "tombstone": pa.bool_(),
        "epoch": pa.int32(),
    }
    given = {name: pa.array(values, kinds[name]) for name, values in marks.items()}
    system.append("readings", table(("a", 1), ("a", 2), **given), producer="p", sequence=1)
    found = read_table(system, whole_stream(system))
    first, second = found.to_pylist()
    assert (first["__timestamp"], first["__tombstone"], first["__epoch"]) == (at, True, 2)
    assert (second["__tombstone"], second["__epoch"]) == (False, 0)
    assert second["__timestamp"] > at
    assert found.column_names == ["sensor", "celsius", *RECORD_META]


def test_positions_by_time_are_the_first_record_at_or_after_it(system: StreamWriter) -> None:
    if not system.capabilities.finds_times:
        with pytest.raises(ConfigurationError):
            system.offset_for_timestamp(SystemStreamPartition(system.name, "readings", 0), 0)
        return
    times = pa.array([1000, 3000, 2000], pa.timestamp("ms", tz="UTC")).cast(
        pa.timestamp("us", tz="UTC")
    )
    system.append("readings", table(*[("a", 1)] * 3, timestamp=times), producer="p", sequence=1)
    ((ssp, span),) = (
        (ssp, span) for ssp, span in whole_stream(system).items() if span.start != span.end
    )
    at = [system.advance(ssp, span.start, count) for count in range(4)]
    found = [system.offset_for_timestamp(ssp, ms) for ms in (0, 1000, 1001, 2500, 3001)]
    assert found == [at[0], at[0], at[1], at[1], at[3]]


def test_a_missing_stream_is_named_by_every_question(system: StreamWriter) -> None:
    ssp = SystemStreamPartition(system.name, "missing", 0)
    questions: list[Callable[[], object]] = [
        lambda: system.info("missing"),
        lambda: system.oldest([ssp]),
        lambda: system.upcoming([ssp]),
        lambda: system.read_arrow({ssp: OffsetRange("0", "0")}),
        lambda: system.append("missing", table(("a", 1)), producer="p", sequence=1),
    ]
    for question in questions:
        with pytest.raises(StreamNotFoundError) as caught:
            question()
        assert caught.value.stream == f"{system.name}.missing"
    names = system.list_streams()
    assert ("readings" in names, "missing" in names) == (True, False)


@pytest.mark.parametrize(
    "other",
    [
        {"partitions": 4},
        {"key": ["sensor", "celsius"]},
        {"schema": Schema.of(sensor="string", celsius="int")},
    ],
)
def test_another_declaration_of_a_stream_is_refused(
    other: dict[str, Any], system: StreamWriter
) -> None:
    known = system.info("readings")
    assert system.create("readings", **DECLARED) == known
    with pytest.raises(StreamExistsError) as caught:
        system.create("readings", **{**DECLARED, **other})
    assert caught.value.stream == f"{system.name}.readings"
    assert system.info("readings") == known


def test_spark_reads_the_same_records(system: StreamWriter, spark: SparkSession) -> None:
    for sequence in range(2):
        system.append("readings", table(("a", 1), ("f", 2)), producer="p", sequence=sequence)
    ranges = whole_stream(system)
    expected = read_table(system, ranges)
    frame = read_frame(system, spark, ranges)
    found = frame.orderBy("__partition", "__offset").toArrow()
    assert found.to_pylist() == expected.to_pylist()
    kinds = {name: kind for name, kind in frame.dtypes if name in RECORD_META}
    assert kinds == dict(RECORD_META_COLUMNS)
