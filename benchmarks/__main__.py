"""Run all benchmarks, or some: python -m benchmarks [main-job] [datasets] [seal] … [--rounds N]
[--large ROWS].
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks import (
    bootstrap,
    datasets,
    diff,
    dynamodb_tables,
    file_reading,
    file_streams,
    history,
    joins,
    json_lines,
    kafka,
    key_values,
    key_values_in_objects,
    lake_read,
    main_job,
    nested,
    partial_changes,
    peers,
    planning,
    quick_starts,
    reading,
    redis_tables,
    restate,
    seal,
    serving,
    small_batches,
    spark_tables,
    sql_tables,
    starting,
    staying,
    streams_over_time,
    table_outputs,
    tables,
    time_joins,
    waiting,
)

CHOICES: dict[str, Callable[[argparse.Namespace], None]] = {
    "main-job": lambda chosen: main_job.run(chosen.rounds),
    "datasets": lambda chosen: datasets.run(chosen.rounds, chosen.large),
    "partial-changes": lambda chosen: partial_changes.run(chosen.rounds),
    "history": lambda chosen: history.run(chosen.rounds, chosen.large),
    "seal": lambda chosen: seal.run(chosen.rounds),
    "serving": lambda chosen: serving.run(chosen.rounds),
    "diff": lambda chosen: diff.run(chosen.rounds),
    "small-batches": lambda chosen: small_batches.run(chosen.rounds),
    "starting": lambda chosen: starting.run(chosen.rounds),
    "staying": lambda chosen: staying.run(chosen.rounds),
    "planning": lambda chosen: planning.run(chosen.rounds),
    "quick-starts": lambda chosen: quick_starts.run(chosen.rounds),
    "reading": lambda chosen: reading.run(chosen.rounds),
    "bootstrap": lambda chosen: bootstrap.run(chosen.rounds),
    "json-lines": lambda chosen: json_lines.run(chosen.rounds),
    "file-streams": lambda chosen: file_streams.run(chosen.rounds),
    "kafka": lambda chosen: kafka.run(chosen.rounds),
    "key-values": lambda chosen: key_values.run(chosen.rounds),
    "key-values-in-objects": lambda chosen: key_values_in_objects.run(chosen.rounds),
    "file-reading": lambda chosen: file_reading.run_reading(chosen.rounds),
    "joins": lambda chosen: joins.run(chosen.rounds),
    "nested": lambda chosen: nested.run(chosen.rounds),
    "restate": lambda chosen: restate.run(chosen.rounds),
    "lake-read": lambda chosen: lake_read.run(chosen.rounds),
    "sql-tables": lambda chosen: sql_tables.run(chosen.rounds),
    "dynamodb-tables": lambda chosen: dynamodb_tables.run(chosen.rounds),
    "redis-tables": lambda chosen: redis_tables.run(chosen.rounds),
    "spark-tables": lambda chosen: spark_tables.run(chosen.rounds),
    "peers": lambda chosen: peers.run(chosen.rounds),
    "streams-over-time": lambda chosen: streams_over_time.run(chosen.rounds),
    "table-outputs": lambda chosen: table_outputs.run(chosen.rounds),
    "tables": lambda chosen: tables.run(chosen.rounds),
    "time-joins": lambda chosen: time_joins.run(chosen.rounds),
    "waiting": lambda chosen: waiting.run(chosen.rounds),
}
parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
parser.add_argument(
    "what", nargs="*", metavar="BENCHMARK", help=f"Default: all, which are {', '.join(CHOICES)}."
)
parser.add_argument("--rounds", type=int, default=3, help="Runs of each thing; medians count.")
parser.add_argument(
    "--large", type=int, default=30_000_000, help="Rows of the large dataset; 0 leaves it out."
)
chosen = parser.parse_args()
# argparse's own choices reject an empty list
if unknown := [what for what in chosen.what if what not in CHOICES]:
    parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(CHOICES)}")
for what in chosen.what or CHOICES:
    CHOICES[what](chosen)
