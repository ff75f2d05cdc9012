"""Runs the main job as a process of its own, and can kill that process at a named point of its way.

    python -m tests.examples.drive LAKE [--every N] [--batch N] [--app MODULE] [--disruptions]
    [--over-time] [--kill AT]

Points, each counted from 1 in this process:

    delivered 1, delivered 2      a part is delivered whole
    dataset NAME                  a dataset is up to date
    intent, outputs, batch        what the step tells its listener
    output NAME                   the step is about to write this output
    swap PREFIX                   a commit below PREFIX: manifest written, pointer not swapped yet
    swapped PREFIX                that commit is done

`POINT@2+0.5` kills half a second after the second time, in the midst of whatever happens then.
Killed is the whole process group, JVM and Python workers included, with SIGKILL: start it in a
session of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections import Counter
from importlib import import_module
from typing import Any

from dagster_adjunct import Lake, open_lake, run_application, session_scope, systems_for
from dagster_adjunct.examples.flights import deliver as delivery
from dagster_adjunct.examples.flights.data import load


class Killer:
    """Ends the process group when a point is reached for the n-th time."""

    def __init__(self, plan: str | None) -> None:
        self.point, self.nth, self.delay = "", 0, 0.0
        if plan:
            self.point, _, rest = plan.rpartition("@")
            nth, _, delay = rest.partition("+")
            self.nth, self.delay = int(nth), float(delay or 0)
        self._seen: Counter[str] = Counter()

    def reached(self, point: str) -> None:
        self._seen[point] += 1
        if point != self.point or self._seen[point] != self.nth:
            return
        print(f"killed at {point}", flush=True)
        if self.delay:
            timer = threading.Timer(self.delay, _die)
            timer.daemon = True
            timer.start()
        else:
            _die()


class KillingStore:
    """A store that tells the killer of every commit, before and after its one decisive request."""

    def __init__(self, inner: Any, killer: Killer) -> None:
        self._inner, self._killer = inner, killer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put_if_absent(self, key: str, data: bytes) -> str:
        return self._swap(key, lambda: self._inner.put_if_absent(key, data))

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        return self._swap(key, lambda: self._inner.put_if_match(key, data, etag))

    def _swap(self, key: str, request: Any) -> str:
        pointer = key.endswith("/CURRENT")
        prefix = key.removesuffix("/CURRENT")
        if pointer:
            self._killer.reached(f"swap {prefix}")
        etag: str = request()
        if pointer:
            self._killer.reached(f"swapped {prefix}")
        return etag


def _die() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("lake")
    parser.add_argument("--every", type=int, default=1, help="deliver every n-th flight only")
    parser.add_argument(
        "--batch", type=int, help="records a batch, in place of the application's own"
    )
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--kill")
    parser.add_argument(
        "--disruptions", action="store_true", help="run the second application, too, at the end"
    )
    parser.add_argument(
        "--over-time", action="store_true", help="run the third application, too, at the end"
    )
    parser.add_argument(
        "--app",
        default="pipeline",
        help="the module of the application that is run after each part",
    )
    options = parser.parse_args()
    if options.kill and os.getpgrp() != os.getpid():
        parser.error("--kill needs a process group of its own (start_new_session=True)")

    app = import_module(f"dagster_adjunct.examples.flights.{options.app}").app
    killer = Killer(options.kill)
    opened = open_lake(options.lake)
    lake = Lake(KillingStore(opened.store, killer), opened.id, shared=opened.shared)  # type: ignore[arg-type]
    if options.batch:
        app.max_batch_records = options.batch
    if options.every > 1:
        delivery.load = lambda name: every_nth(name, options.every)  # type: ignore[attr-defined]

    def received(event: Any) -> None:
        if hasattr(event, "dataset"):
            killer.reached(f"dataset {event.dataset}")
        elif event.what == "output":
            killer.reached(f"output {event.detail['output']}")
        else:
            killer.reached(event.what)

    reports = []
    seconds: dict[str, float] = {}
    started = False
    with session_scope(master=options.master, lake_url=lake.url) as session:

        def spark() -> Any:
            nonlocal started
            began, first = time.monotonic(), not started
            started = True
            running = session()
            if first:
                seconds["session"] = time.monotonic() - began
            return running

        for part in (1, 2):
            began = time.monotonic()
            delivery.deliver(lake, part)
            killer.reached(f"delivered {part}")
            seconds[f"deliver {part}"] = time.monotonic() - began
            began = time.monotonic()
            report = run_application(
                app,
                lake=lake,
                systems=systems_for(app, lake=lake),
                spark=spark,
                run=f"drive-{part}",
                on_event=received,
            )
            seconds[f"run {part}"] = time.monotonic() - began
            reports.append(report.to_json())
        if options.disruptions:
            from dagster_adjunct.examples.flights.disruptions import app as behind

            run_application(
                behind,
                lake=lake,
                systems=systems_for(behind, lake=lake),
                spark=spark,
                run="drive-behind",
                on_event=received,
            )
        if options.over_time:
            from dagster_adjunct.examples.flights.over_time import app as nearby

            run_application(
                nearby,
                lake=lake,
                systems=systems_for(nearby, lake=lake),
                spark=spark,
                run="drive-beside",
                on_event=received,
            )
    print(
        json.dumps({"reports": reports, "spark_started": started, "seconds": seconds}, default=str)
    )


def every_nth(name: str, every: int) -> Any:
    """Return a table of the demo; of the flights every n-th in order of delivery, from the
    first.
    """
    table = load(name)
    return table.take(list(range(0, table.num_rows, every))) if name == "flights" else table


if __name__ == "__main__":
    main()
