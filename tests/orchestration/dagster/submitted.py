"""An application whose tasks wait for a file, for runs that are killed meanwhile; and one with a
dataset.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    Schema,
    SparkResource,
    build_definitions,
    unbounded_dataset,
)
from tests.orchestration.dagster import small

TARIFFS = "def charge(number: int) -> int:\n    return 3 * number + 1\n"
"""The module that only executors have, from an archive."""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def charged(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Say that the first batch has begun, and in which executor; wait until it may go on; then
    charge the call.
    """
    folder = Path(record["item"])
    if not (folder / "begun").exists():
        writing = folder / f"writing-{os.getpid()}"
        # the executor: that of the daemon of Python's workers
        writing.write_text(str(parent_of(os.getppid())))
        writing.replace(folder / "begun")
    deadline = time.monotonic() + 120
    while not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    import tariffs  # type: ignore[import-not-found]

    print(f"charging {record['id']}")

    yield {"id": record["id"], "charge": tariffs.charge(record["id"])}


def charge_calls(app: Application) -> Application:
    """Return the application, which charges the calls."""
    (
        app.input_stream("lake.calls", default_offset="oldest")
        .flat_map(charged, schema=Schema.of(id="bigint", charge="int"), keeps_partitioning=True)
        .send_to(app.output_stream("lake.charges", partitions=2, key="id"))
    )
    return app


app = charge_calls(Application("charges"))


def refuse(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Fail as a user's function may."""
    raise ValueError(f"no tariff for {record['id']}")


refusing = Application("refusals")
(
    refusing.input_stream("lake.calls", default_offset="oldest")
    .flat_map(refuse, schema=Schema.of(id="bigint"), keeps_partitioning=True)
    .send_to(refusing.output_stream("lake.refused", partitions=2, key="id"))
)


passing = Application("passing")
(
    passing.input_stream("lake.orders", default_offset="oldest")
    .join(
        passing.table(
            unbounded_dataset(
                "passing-rates",
                input="lake.rates",
                key="currency",
                broadcast=True,
                persistent=False,
            )
        ),
        on="currency",
        how="left",
        select=["rate"],
    )
    .send_to(passing.output_stream("lake.rated", partitions=2, key="item"))
)


def call(lake: Lake, folder: Path, sequence: int, numbers: range) -> None:
    """Append calls whose function waits in this folder."""
    small.append(lake, "calls", sequence, [(number, str(folder)) for number in numbers])


def charges(lake: Lake) -> list[tuple[int, int]]:
    """Return what the application has written, in order."""
    streams = LakeStreams(lake)
    table = streams.read_arrow(streams.all_ranges("charges"), columns=["id", "charge"])
    return sorted(zip(*[table.column(name).to_pylist() for name in ("id", "charge")], strict=True))


def expected(numbers: range) -> list[tuple[int, int]]:
    return [(number, 3 * number + 1) for number in numbers]


def resource(folder: str | Path, lake: str | None = None, **settings: Any) -> SparkResource:
    """Return the resource, with the archive of this folder for the executors."""
    root = Path(__file__).parents[3]
    config = {
        "spark.archives": f"{folder}/tariffs.tar.gz#deps",
        "spark.executorEnv.PYTHONPATH": f"deps:{root}",
    }
    return SparkResource(lake=lake, submit="spark-submit", spark_config=config, **settings)


def load(folder: str | Path, app: Application) -> Any:
    return build_definitions(app, lake=f"{folder}/lake", spark=resource(folder, f"{folder}/lake"))
