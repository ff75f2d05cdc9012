"""The main job against one bare PySpark script, session start-up included in both; goal: at most
2x.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.timing import alternate, module, show


def run(rounds: int) -> None:
    print("main job: 336,776 flights, four joins, 8 batches, two outputs")
    with TemporaryDirectory() as folder:
        root = Path(folder)

        def fresh(name: str, number: int) -> Path:
            path = root / f"{name}-{number}"
            path.mkdir()
            return path

        def demo(number: int) -> None:
            here = Path.cwd()
            os.environ["PYTHONPATH"] = str(here)
            os.chdir(fresh("demo", number))
            try:
                module("dagster_adjunct.orchestration.cli.main", "demo")
            finally:
                os.chdir(here)

        measured = alternate(
            rounds,
            bare=lambda number: module("benchmarks.bare_flights", fresh("bare", number)),
            adjunct=lambda number: module("benchmarks.adjunct_flights", fresh("adjunct", number)),
            demo_through_dagster=demo,
        )
    show(measured, "adjunct", "bare", "at most 2")
    overhead = measured["demo_through_dagster"].median - measured["adjunct"].median
    print(f"  Dagster, the second session and the demo's report add {overhead:.1f} s\n")
