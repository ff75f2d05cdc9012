"""The main job through the public API, without Dagster: what is measured against the bare script.

python -m benchmarks.adjunct_flights FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(folder: Path) -> None:
    os.environ["ADJUNCT_DEMO_SQLITE"] = str(folder / "adjunct.sqlite")
    from dagster_adjunct import open_lake, run_application, session_scope, systems_for
    from dagster_adjunct.examples.flights.deliver import deliver
    from dagster_adjunct.examples.flights.pipeline import app

    lake = open_lake(folder / "lake")
    systems = systems_for(app, lake=lake)
    with session_scope(lake_url=lake.url) as spark:
        for part in (1, 2):
            deliver(lake, part)
            run_application(app, lake=lake, systems=systems, spark=spark, run=f"benchmark-{part}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
