"""What a first script leaves out: the lake, its systems, a session, who runs it."""

from __future__ import annotations

import getpass
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from dagster_adjunct import (
    Application,
    LakeStreams,
    Schema,
    SystemStreamPartition,
    advance_dataset,
    bounded_dataset,
    open_dataset,
    open_lake,
    plan_application,
    run_application,
    systems_for,
    unbounded_dataset,
)
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.maintenance import compact_dataset, plan_rewind
from dagster_adjunct.startpoints import StartpointOldest, Startpoints
from dagster_adjunct.streams import OffsetRange


def joined(streams: LakeStreams) -> list[int]:
    out = SystemStreamPartition("lake", "out", 0)
    return (
        streams.read_arrow({out: OffsetRange("0", streams.upcoming([out])[out])})
        .column("m")
        .to_pylist()
    )


@pytest.mark.spark
def test_an_application_runs_with_nothing_but_itself(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADJUNCT_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("ADJUNCT_SPARK_MASTER", "local[1]")
    streams = LakeStreams(open_lake())
    for name in ("planes", "flights"):
        streams.create(name, schema=Schema.of(k="string", n="int"), key=["k"], partitions=1)
    rows = pa.table({"k": ["a", "b"], "n": pa.array([1, 2], pa.int32())})
    streams.append("planes", rows, producer="test", sequence=1, end_of_dataset="v1")
    streams.append("flights", rows, producer="test", sequence=1)
    planes = bounded_dataset("planes", input="lake.planes", key="k", partitions=1)
    app = Application("defaults")
    flights = app.input_stream("lake.flights", default_offset="oldest").join(
        app.table(planes), on="k", select=["n as m"]
    )
    flights.send_to(app.output_stream("lake.out", partitions=1, key="k"))

    assert set(systems_for(app)) == {"lake"}
    assert plan_application(app).tasks
    report = run_application(app)
    assert [advanced.action for advanced in report.datasets] == ["sealed"]
    assert joined(streams) == [1, 2]
    assert advance_dataset(planes).action == "up-to-date"
    asked = Startpoints(app).request("lake.flights.0", StartpointOldest(), by="ada", reason="again")
    assert asked
    run_application(app)
    assert joined(streams) == [1, 2, 1, 2]
    assert spark.range(1).count() == 1, "a session that ran before goes on"


def test_a_dataset_is_kept_with_nothing_but_its_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADJUNCT_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("ADJUNCT_SPARK_MASTER", "none")
    streams = LakeStreams(open_lake())
    streams.create("accounts", schema=Schema.of(k="string", n="int"), key=["k"], partitions=1)
    accounts = unbounded_dataset("accounts", input="lake.accounts", key="k", partitions=1)
    for sequence, value in enumerate((1, 2), 1):
        rows = pa.table({"k": ["a"], "n": pa.array([value], pa.int32())})
        streams.append("accounts", rows, producer="test", sequence=sequence)
        advance_dataset(accounts)
    assert compact_dataset(open_lake(), "accounts", level="major").action == "compacted"
    assert open_dataset(open_lake(), accounts).get("a") == {"k": "a", "n": 2}
    positions = {SystemStreamPartition("lake", "accounts", 0): StartpointOldest()}
    assert plan_rewind(accounts, positions=positions).action == "rebuild"
    newest = open_dataset(open_lake(), accounts).history(limit=1)[0]
    assert newest.by == getpass.getuser()


def test_the_default_engine_without_a_session_is_named_with_what_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADJUNCT_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("ADJUNCT_SPARK_MASTER", "none")
    monkeypatch.delenv("ADJUNCT_ENGINE", raising=False)
    streams = LakeStreams(open_lake())
    streams.create("orders", schema=Schema.of(size="int"), partitions=1)
    streams.append("orders", [{"size": 1}], producer="test", sequence=1)
    app = Application("loud")
    kept = app.input_stream("lake.orders").filter("size > 0")
    kept.send_to(app.output_stream("lake.loud", partitions=1))
    with pytest.raises(ConfigurationError) as caught:
        run_application(app)
    error = caught.value
    first, *others = [operator.id for operator in app.operators]
    assert (error.application, error.operator, error.argument) == ("loud", first, "engine")
    assert all(operator in error.problem for operator in others)
