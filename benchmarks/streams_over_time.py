"""Streams that meet within a time, and a window, against Structured Streaming with its RocksDB
state store.

Each run is a process of its own, session start-up included, over the same records: clicks and buys
of an hour by key, which meet within 10 minutes, or clicks counted by key in windows of 5 minutes.
Then runs over small batches, each of them a process again, in which state is what the runs before
it have left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.timing import Measured, alternate, module, show
from dagster_adjunct import LakeStreams, Schema, open_lake

if TYPE_CHECKING:
    import pyarrow as pa

RECORDS = 5_000_000
KEYS = 250_000
LASTS = timedelta(hours=1)
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
PARTITIONS = 2
FILES = 10
RESTARTS = 100
SMALL = 2_000
SIDES = {"clicks": "click", "buys": "buy"}
WHAT = {
    "join": "streams that meet within 10 minutes",
    "window": "counts by key in windows of 5 minutes",
}
GOAL = "at least the rate of Structured Streaming: at most 1"


@dataclass(frozen=True, slots=True)
class Sent:
    """A folder with a lake, and beside it the same records as files for the peer."""

    folder: Path
    streams: LakeStreams

    @classmethod
    def into(cls, folder: Path) -> Sent:
        streams = LakeStreams(open_lake(folder / "lake"))
        for side, number in SIDES.items():
            schema = Schema.of(k="bigint", ts="timestamp", **{number: "bigint"})
            streams.create(side, schema=schema, key=["k"], partitions=PARTITIONS)
            (folder / side).mkdir()
        return cls(folder, streams)

    def send(self, start: int, count: int, whole: int) -> None:
        """Send records `start` to `start + count` of both sides; `whole` of them take LASTS."""
        import pyarrow.parquet as pq

        for side, number in SIDES.items():
            made = records(start, count, whole, number)
            self.streams.append(side, made, producer="benchmark", sequence=start + 1)
            pq.write_table(made, self.folder / side / f"{start:09d}.parquet")


def records(start: int, count: int, whole: int, number: str) -> pa.Table:
    """Return records in order of their times, with keys all over; the two sides meet by chance."""
    import numpy as np
    import pyarrow as pa

    numbers = np.arange(start, start + count, dtype=np.int64)
    step = LASTS // timedelta(microseconds=1) // whole
    times = int(BEGAN.timestamp() * 1_000_000) + numbers * step
    factor = 2_654_435_761 if number == "click" else 2_246_822_519
    return pa.table(
        {
            "k": pa.array(numbers * factor % KEYS),
            "ts": pa.array(times, pa.timestamp("us")).cast(pa.timestamp("us", tz="UTC")),
            number: pa.array(numbers),
        }
    )


def run(rounds: int, count: int = RECORDS, restarts: int = RESTARTS) -> None:
    for what, told in WHAT.items():
        print(f"streams over time: {told}, {count:,} records a stream")
        show(whole(what, rounds, count), "adjunct", "structured", GOAL)
        print(
            f"streams over time: {told}, {restarts} restarts with {SMALL:,} records a stream, quick"
            " JVMs for both"
        )
        show(small(what, restarts), "adjunct", "structured", "below 1")


def whole(what: str, rounds: int, count: int) -> dict[str, Measured]:
    """Time runs over all the records, each from nothing; the results of both must be the same."""
    with TemporaryDirectory() as folder:
        sides = [Sent.into(_made(Path(folder) / f"{number}")) for number in range(rounds)]
        for sent in sides:
            for start in range(0, count, count // FILES):
                sent.send(start, min(count // FILES, count - start), count)
        timings = alternate(
            rounds, **_both(what, lambda number: sides[number].folder, count // FILES)
        )
        for sent in sides:
            compare(what, sent)
    return timings


def small(what: str, restarts: int) -> dict[str, Measured]:
    """Time runs over a few records each, which go on from where the one before has ended."""
    with TemporaryDirectory() as folder:
        sent = Sent.into(Path(folder))
        sent.send(0, SMALL, SMALL * (restarts + 1))
        both = _both(what, lambda _: sent.folder, SMALL, quick=True)
        seconds: dict[str, list[float]] = {name: [] for name in both}
        for number in range(restarts):
            if number:
                sent.send(number * SMALL, SMALL, SMALL * (restarts + 1))
            for name, measured in alternate(1, **both).items():
                seconds[name] += measured.seconds
        compare(what, sent)
    return {name: Measured(name, tuple(durations)) for name, durations in seconds.items()}


def _both(
    what: str, folder: Callable[[int], Path], batch: int, *, quick: bool = False
) -> dict[str, Callable[[int], object]]:
    jvm = {"ADJUNCT_SPARK_QUICK": "true"} if quick else {}
    jvm["PYSPARK_SUBMIT_ARGS"] = (
        "--driver-memory 4g pyspark-shell"  # as the peer has; a million records need over 1 GB
    )
    return {
        "adjunct": lambda number: module(
            "benchmarks.adjunct_over_time", what, folder(number), str(2 * batch), **jvm
        ),
        "structured": lambda number: module(
            "benchmarks.structured_over_time", what, folder(number), **jvm
        ),
    }


def compare(what: str, sent: Sent) -> None:
    """Both have the same pairs; the same windows, of those that both have closed."""
    import duckdb

    ours = sent.streams.read_arrow(sent.streams.all_ranges("results"))
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    connection.register("ours", ours)
    theirs = f"read_parquet('{sent.folder}/structured/*.parquet')"
    columns, end = (
        ("k, click, buy", "") if what == "join" else ("k, window_end, clicks", "window_end")
    )
    until = ""
    if end:
        closed = connection.execute(
            f"SELECT least((SELECT max({end}) FROM ours), (SELECT max({end}) FROM {theirs}))"
        ).fetchone()
        assert closed is not None
        until = f" WHERE {end} <= TIMESTAMPTZ '{closed[0]}'" if closed[0] else " WHERE false"
    for one, other in (("ours", theirs), (theirs, "ours")):
        differing = connection.execute(
            f"SELECT count(*) FROM (SELECT {columns} FROM {one}{until} EXCEPT ALL SELECT"
            f" {columns} FROM {other}{until})"
        ).fetchone()
        assert differing == (0,), f"{differing} results differ"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
