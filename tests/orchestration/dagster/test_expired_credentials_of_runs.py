"""Runs whose credentials expire fail for now: the restart sensor launches them again, and the run
with fresh credentials ends what they have begun.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from dagster import DagsterInstance

from dagster_adjunct import Application, Lake, LakeStreams, Schema, bounded_dataset, open_lake
from dagster_adjunct.errors import StoreUnavailableError
from dagster_adjunct.orchestration.code_location import metadata
from tests.clocks import on_clock
from tests.orchestration.dagster.test_restart_sensor import Clock
from tests.orchestration.dagster.ticking import Ticker
from tests.orchestration.test_credentials_expire_in_runs import Expiring, expiring
from tests.rounds import rounds
from tests.servers.s3 import S3Server

__all__ = ["expiring"]
pytestmark = [pytest.mark.server, pytest.mark.lengthy, pytest.mark.rounds]
RECORDS = 5


def copying() -> Application:
    app = Application("copy", engine="auto")
    shops = app.table(bounded_dataset("shops", input="lake.shops", key="k", partitions=1))
    sales = app.input_stream("lake.sales", default_offset="oldest")
    sales.join(shops, on="k", select=["town"]).send_to(
        app.output_stream("lake.copy", partitions=1, key="k")
    )
    return app


def prepare(lake: Lake) -> None:
    streams = LakeStreams(lake)
    for name, column, kind in (("sales", "n", "bigint"), ("shops", "town", "string")):
        streams.create(
            name, schema=Schema.of(**{"k": "string", column: kind}), key=["k"], partitions=1
        )
    streams.append(
        "shops", [{"k": "a", "town": "Rome"}], producer="t", sequence=1, end_of_dataset="v1"
    )
    rows = [{"k": "a", "n": number} for number in range(RECORDS)]
    streams.append("sales", rows, producer="t", sequence=1)


@pytest.mark.parametrize("left", rounds([90], [*range(0, 120, 15)]))
def test_a_run_that_fails_by_expired_credentials_is_restarted_with_fresh_ones(
    left: int, expiring: Expiring, moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "_RETRY_SECONDS", 0.0)
    monkeypatch.setenv("ADJUNCT_RUN_TTL", "2")
    clock = Clock()
    lake = on_clock(open_lake(moto_s3.url()), clock)
    prepare(lake)
    with DagsterInstance.ephemeral() as instance:
        sensor = Ticker(lake, copying(), instance, "copy_restart")
        job = sensor.defs.resolve_job_def("copy")
        expiring.left = left
        first = job.execute_in_process(instance=instance, raise_on_error=False)
        assert not first.success
        with pytest.raises(StoreUnavailableError, match="ExpiredToken"):
            sensor.tick()
        expiring.renew()
        clock.passed = timedelta(minutes=3)
        request = sensor.asked()
        assert request.tags["adjunct/restart_of"] == first.run_id
        second = job.execute_in_process(
            instance=instance, raise_on_error=False, tags=dict(request.tags)
        )
        assert second.success
    streams = LakeStreams(lake)
    rows = streams.read_arrow(streams.all_ranges("copy")).to_pylist()
    assert sorted((row["n"], row["town"]) for row in rows) == [(n, "Rome") for n in range(RECORDS)]
