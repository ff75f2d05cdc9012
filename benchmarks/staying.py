"""A run that stays: from an append to the commit of its batch, and the processor's time while
nothing comes.
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pyarrow as pa

from benchmarks.process_time import seconds_by_process
from dagster_adjunct import (
    Application,
    LakeStreams,
    Schema,
    bounded_dataset,
    open_lake,
    run_application,
    session_scope,
)
from dagster_adjunct.orchestration.batch_log.run_lease import ask_to_end, asked_key

RECORDS, PAUSE, KEYS = 300, 2.0, 1_000
APPENDS, IDLE = 30, 20.0


def run(rounds: int) -> None:
    """Append so many records every two seconds, then nothing for a while; print how long commits
    took.
    """
    print(
        f"A run that stays: {RECORDS} records every {PAUSE:g} s, a join with {KEYS:,} rows, an"
        " output stream"
    )
    stay(rounds, "spark")
    stay(rounds, "auto")
    print("  goal: 0.6 s, 99% within 1.5 s; idle at most 3%")


def stay(rounds: int, engine: Literal["spark", "auto"]) -> None:
    """Do so with this engine of the application."""
    with TemporaryDirectory() as folder, session_scope(lake_url=folder) as spark:
        streams = LakeStreams(open_lake(Path(folder) / "lake"))
        columns = Schema.of(k="string", n="int")
        for name in ("rates", "orders"):
            streams.create(name, schema=columns, key=["k"], partitions=2)
        keys = [f"k{number}" for number in range(KEYS)]
        rates = pa.table({"k": keys, "n": pa.array(range(KEYS), pa.int32())})
        streams.append("rates", rates, producer="bench", sequence=1, end_of_dataset="v1")
        app = Application("staying", engine=engine)
        table = app.table(bounded_dataset("rates", input="lake.rates", key="k", partitions=2))
        orders = app.input_stream("lake.orders", default_offset="oldest")
        orders.join(table, on="k", select=["n as rate"]).send_to(
            app.output_stream("lake.priced", partitions=2, key="k")
        )

        appended, committed, idle = list[float](), list[float](), list[float]()
        warm = threading.Event()

        def feed() -> None:
            for number in range(APPENDS * rounds + 1):
                chosen = [keys[(number * RECORDS + place) % KEYS] for place in range(RECORDS)]
                records = pa.table({"k": chosen, "n": pa.array(range(RECORDS), pa.int32())})
                streams.append("orders", records, producer="bench", sequence=number + 1)
                appended.append(time.monotonic())
                if number == 0:
                    warm.wait()
                time.sleep(PAUSE)
            while len(committed) < len(appended):
                time.sleep(0.1)
            before, began = seconds_by_process(), time.monotonic()
            time.sleep(IDLE)
            # Workers that Spark ends meanwhile take what they used before with them.
            used = sum(
                seconds - before.get(pid, 0.0) for pid, seconds in seconds_by_process().items()
            )
            idle.append(used / (time.monotonic() - began))
            ask_to_end(streams.lake.store, asked_key(streams.lake, app.name), "the benchmark")

        def hear(event: object) -> None:
            if getattr(event, "what", "") == "batch":
                records = event.detail["records"]  # type: ignore[attr-defined]
                committed.extend([time.monotonic()] * (records // RECORDS - len(committed)))
                warm.set()

        feeding = threading.Thread(target=feed)
        feeding.start()
        run_application(app, lake=streams.lake, spark=spark, on_event=hear, follow=3600)
        feeding.join()
    took = sorted(done - sent for sent, done in zip(appended[1:], committed[1:], strict=True))
    most = took[int(len(took) * 0.99)]
    print(f"  {engine}: append to commit {statistics.median(took):.2f} s, 99% within {most:.2f} s")
    print(f"  idle: {idle[0]:.1%} of a core")
