"""One run of an application over time: what is measured against Structured Streaming.

python -m benchmarks.adjunct_over_time join|window FOLDER RECORDS
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

MINUTE = timedelta(minutes=1)
PARTITIONS = 2


def main(what: str, folder: Path, batch: int) -> None:
    from dagster_adjunct import Application, open_lake, run_application, session_scope, systems_for
    from dagster_adjunct.windows import Count, Tumbling

    app = Application("over-time", max_batch_records=batch)
    read: dict[str, Any] = {"default_offset": "oldest", "event_time": "ts", "delay": MINUTE}
    clicks = app.input_stream("lake.clicks", **read)
    if what == "join":
        buys = app.input_stream("lake.buys", **read)
        made = clicks.join_stream(buys, on="k", within=10 * MINUTE, name="bought", select=["buy"])
    else:
        made = clicks.window(
            Tumbling(5 * MINUTE), by="k", name="counted", aggregates={"clicks": Count()}
        )
    made.send_to(app.output_stream("lake.results", partitions=PARTITIONS, key="k"))
    lake = open_lake(folder / "lake")
    with session_scope(master="local[2]", lake_url=lake.url) as spark:
        run_application(
            app, lake=lake, systems=systems_for(app, lake=lake), spark=spark, run="benchmark"
        )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
