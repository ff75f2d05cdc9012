"""Runs with Spark whose disk becomes full at any point name it; once there is room, the batch that
they left open gives the same results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct import Application, LakeStreams, Schema, open_lake, unbounded_dataset
from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.errors import StoreUnavailableError
from dagster_adjunct.orchestration.step.run import run_application
from tests.resources.small_disks import mounted, no_room
from tests.rounds import rounds

SCHEMA = Schema.of(k="string", n="bigint")
RECORDS = 3000
KEYS = 100


def shop() -> Application:
    app = Application("shop", engine="spark", max_batch_records=1000)
    fleet = app.table(unbounded_dataset("fleet", input="lake.changes", key="k", partitions=2))
    seen = app.local_table("seen", key="k", schema=SCHEMA, partitions=2)
    orders = app.input_stream("lake.orders", default_offset="oldest")
    joined = orders.join(fleet, on="k", how="left", select=["n as m"])
    joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    orders.select("k", "n").send_to(seen)
    return app


@pytest.mark.spark
@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("room", rounds([64, 120], [0, 8, 16, 24, *range(32, 160, 8)]))
def test_a_batch_is_repeated_with_the_same_results_once_a_full_disk_has_room(
    room: int, spark: Any, tmp_path: Path
) -> None:
    app = shop()
    with mounted(tmp_path / "disk", "size=32m") as disk:
        lake = open_lake(disk / "lake")
        streams = LakeStreams(lake)
        for name in ("orders", "changes"):
            streams.create(name, schema=SCHEMA, key=["k"], partitions=2)
            rows = [{"k": f"k{number % KEYS}", "n": number} for number in range(RECORDS)]
            streams.append(name, rows, producer="p", sequence=1)
        advance_dataset(
            app.datasets[0], lake=lake, systems={"lake": streams}, spark=lambda: spark, by="me"
        )
        spare = disk / "spare"
        spare.write_bytes(b"x" * room * 1024)
        with no_room(disk):
            spare.unlink()
            with pytest.raises(StoreUnavailableError) as full:
                run_application(app, lake=lake, spark=lambda: spark, run="first")
        assert "No space left on device" in full.value.problem
        assert str(disk) in str(full.value)
        run_application(app, lake=lake, spark=lambda: spark, wait=60, run="second")
        written = streams.read_arrow(streams.all_ranges("out")).to_pylist()
        newest = {f"k{number}": RECORDS - KEYS + number for number in range(KEYS)}
        assert sorted((row["n"], row["k"], row["m"]) for row in written) == [
            (number, f"k{number % KEYS}", newest[f"k{number % KEYS}"]) for number in range(RECORDS)
        ]
        seen = StoredVersions(lake, "seen").require_current()
        assert {key: entry["n"] for key, entry in seen.items()} == newest
