"""Results of a few keys in a long stream. Finding and reading their records, with and without an
index, against a bare scan of the same files that filters by the keys; and a whole run that restates
them, against these, and against reading all records again. All in processor time.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.process_time import tree_seconds
from dagster_adjunct import (
    IN_PROCESS,
    Application,
    LakeStreams,
    Schema,
    advance_dataset,
    open_lake,
    run_application,
    unbounded_dataset,
)
from dagster_adjunct.streams import CompactionPolicy

if TYPE_CHECKING:
    import pyarrow as pa

RECORDS, KEYS, CHANGED, APPENDS, PARTITIONS = 3_000_000, 1_000_000, 100, 30, 8
FLIGHTS = Schema.of(
    id="bigint",
    tailnum="string",
    origin="string",
    dest="string",
    at="timestamp",
    dep_delay="int",
    arr_delay="int",
    distance="double",
    note="string",
)
STREAM = "flights"
COMPACTION = CompactionPolicy(min_segments=2)
PLANES = unbounded_dataset("planes", input="lake.planes", key="tailnum", partitions=PARTITIONS)
BATCH = 300_000
GOAL = "at most 1.5"
GOAL_OF_REPLAY = "at most 0.1"


def run(rounds: int, count: int = RECORDS) -> None:
    """Print the processor seconds of each way, in turns, and the ratios to the bare scans."""
    print(f"restate: {CHANGED} of {KEYS:,} keys in {count:,} records")
    with TemporaryDirectory() as folder:
        streams = LakeStreams(open_lake(Path(folder) / "lake"))
        _send(streams, count)
        keys = _keys(count)
        paths = [str(path) for path in sorted(Path(folder).rglob("part-*.parquet"))]
        scans = {
            "pyarrow": lambda: _scan_by_arrow(paths, keys),
            "duckdb": lambda: _scan_by_duckdb(paths, keys),
        }
        ways = {"found": lambda: _found(streams, keys), "read": lambda: _read(streams, keys)}
        plain = _measure(rounds, {**scans, **ways})
        before = tree_seconds()
        streams.configure(STREAM, retention=None, compaction=COMPACTION, find_by=["tailnum"])
        indexes = streams.maintain(STREAM).indexes
        data = sum(Path(path).stat().st_size for path in paths)
        size = sum(path.stat().st_size for path in Path(folder).rglob("_keys-*"))
        print(
            f"  {indexes} indexes of {size / data:.1%} of {len(paths)} files,"
            f" {data / 1e6:.0f} MB, in {tree_seconds() - before:.2f} s"
        )
        indexed = _measure(rounds, ways)
        replayed, restated = _restate(streams, rounds)
    for name in scans:
        print(f"  {name}: {plain[name]:.2f} s")
    for name in ways:
        print(f"  {name}: {plain[name]:.2f} s, {indexed[name]:.2f} s with an index")
    for name in scans:
        ratios = plain["read"] / plain[name], indexed["read"] / plain[name]
        print(f"  ratio to {name} {ratios[0]:.2f}, {ratios[1]:.2f} with an index (goal: {GOAL})")
    print(f"  restated in {restated:.2f} s, all joined in {replayed:.2f} s")
    for name in scans:
        print(f"  ratio of the run to {name} {restated / plain[name]:.2f} (goal: {GOAL})")
    print(f"  ratio to joining all {restated / replayed:.3f} (goal: {GOAL_OF_REPLAY})")


def _send(streams: LakeStreams, count: int) -> None:
    streams.create(
        STREAM, schema=FLIGHTS, key=["tailnum"], partitions=PARTITIONS, compaction=COMPACTION
    )
    for number in range(APPENDS):
        records = _records(number * (count // APPENDS), count // APPENDS)
        streams.append(STREAM, records, producer="benchmark", sequence=number)
    streams.maintain(STREAM)
    data = Path(streams.lake.store.url) / "streams" / STREAM / "data"
    kept = {each.parent.name for each in data.rglob("part-*")}
    merged = max(kept)
    for path in data.rglob("part-*"):  # of the segments that were merged
        if path.parent.name != merged:
            path.unlink()


def _records(first: int, count: int) -> pa.Table:
    import numpy as np
    import pyarrow as pa

    chance = np.random.default_rng(first)
    airports = pa.array([f"A{number:02}" for number in range(100)])
    numbers = np.arange(first, first + count)

    def drawn(most: int) -> pa.Array:
        return pa.array(chance.integers(0, most, count))

    def text(start: str, most: int) -> pa.Array:
        return pa.compute.binary_join_element_wise(start, drawn(most).cast("string"), "")

    return pa.table(
        {
            "id": numbers,
            "tailnum": text("N", KEYS),
            "origin": airports.take(drawn(3)),
            "dest": airports.take(drawn(100)),
            "at": pa.array(numbers * 200_000, pa.timestamp("us", tz="UTC")),
            "dep_delay": drawn(300).cast("int32"),
            "arr_delay": drawn(300).cast("int32"),
            "distance": chance.random(count),
            "note": text("note ", 10**6),
        }
    )


def _keys(count: int) -> pa.Table:
    return _records(0, count // APPENDS).slice(0, CHANGED).select(["tailnum"])


def _scan_by_arrow(paths: list[str], keys: pa.Table) -> int:
    import pyarrow.dataset as ds

    wanted = ds.field("tailnum").isin(keys.column("tailnum").combine_chunks())
    found = ds.dataset(paths).to_table(columns=list(FLIGHTS.names), filter=wanted)
    return int(found.num_rows)


def _scan_by_duckdb(paths: list[str], keys: pa.Table) -> int:
    import duckdb

    with duckdb.connect() as database:
        database.execute("SET threads = 2")
        database.register("keys", keys)
        query = "SELECT * FROM read_parquet(?) WHERE tailnum IN (SELECT tailnum FROM keys)"
        return int(database.sql(query, params=[paths]).to_arrow_table().num_rows)


def _found(streams: LakeStreams, keys: pa.Table) -> int:
    return int(streams.find_records(streams.all_ranges(STREAM), keys).num_rows)


def _read(streams: LakeStreams, keys: pa.Table) -> int:
    places = streams.find_records(streams.all_ranges(STREAM), keys)
    return int(streams.read_records(STREAM, places).num_rows)


def _restate(streams: LakeStreams, rounds: int) -> tuple[float, float]:
    """Return the processor seconds of joining all records, and the median of runs that restate."""
    schema = Schema.of(tailnum="string", model="string", seats="int")
    streams.create("planes", schema=schema, key=["tailnum"], partitions=PARTITIONS)
    _change_planes(streams, 0, KEYS)
    replayed, _ = _run(streams)
    seconds = []
    for number in range(1, rounds + 1):
        _change_planes(streams, number, CHANGED)
        taken, restated = _run(streams)
        assert restated["changed_keys"] <= CHANGED < restated["records"], restated
        seconds.append(taken)
    return replayed, median(seconds)


def _change_planes(streams: LakeStreams, number: int, count: int) -> None:
    """Change this many planes, all in change number 0."""
    import numpy as np
    import pyarrow as pa

    chosen = np.random.default_rng(number).permutation(KEYS)[:count]
    planes = {
        "tailnum": [f"N{plane}" for plane in chosen],
        "model": [f"M{plane % 50}-{number}" for plane in chosen],
        "seats": pa.array(chosen % 300, pa.int32()),
    }
    streams.append("planes", pa.table(planes), producer="benchmark", sequence=number)
    systems = {"lake": streams}
    advance_dataset(PLANES, lake=streams.lake, systems=systems, spark=IN_PROCESS, by="benchmark")


def _run(streams: LakeStreams) -> tuple[float, dict[str, int]]:
    """Return the processor seconds of a run, and how much it has restated."""
    app = Application("models", engine="auto", few_records=BATCH, max_batch_records=BATCH)
    flights = app.input_stream(f"lake.{STREAM}", default_offset="oldest")
    week = timedelta(days=7)
    joined = flights.join(
        app.table(PLANES), on="tailnum", how="left", select=["model", "seats"], restate=week
    )
    joined.send_to(app.output_stream("lake.modelled", key="tailnum", partitions=PARTITIONS))
    before = tree_seconds()
    report = run_application(app, lake=streams.lake, spark=IN_PROCESS, run="benchmark")
    return tree_seconds() - before, dict(report.step.counters.get("restated", {}))


def _measure(rounds: int, ways: dict[str, Callable[[], int]]) -> dict[str, float]:
    """Return the median processor seconds of each way, all of which find as many records."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found = {way() for way in ways.values()}  # all warm
    for _ in range(rounds):
        for name, way in ways.items():
            before = tree_seconds()
            found.add(way())
            seconds[name].append(tree_seconds() - before)
    assert len(found) == 1, found
    return {name: median(taken) for name, taken in seconds.items()}
