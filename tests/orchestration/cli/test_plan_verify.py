"""`adjunct plan --verify`: what Spark would do, over no records, beside what the plan says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from dagster_adjunct import LakeStreams, Schema, open_lake
from dagster_adjunct.orchestration.cli import applications
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

APP = """
from dagster_adjunct import Application, bounded_dataset
{declared}

def rows(frame):
    return {rows}

app = Application("shop")
kinds = app.table(bounded_dataset("kinds", input="lake.kinds", key="k", partitions=2, extractor=extractor))
names = app.table(bounded_dataset("names", input="lake.names", key="n", broadcast=True))
orders = app.input_stream("lake.orders").join(kinds, on="k").join(names, on="n", how="left")
orders = orders.map(rows, keeps_partitioning=True).partition_by("name", partitions=2)
orders = orders.join(kinds, on={{"name": "k"}}, prefix="a_", name="again")
orders.send_to(app.output_stream("lake.out", partitions=2, key="name"))
"""


def plan(*options: str) -> Any:
    return CliRunner().invoke(root, ["plan", "verified_app:app", *options], env={"COLUMNS": "250"})


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession) -> Iterator[Any]:
    streams = LakeStreams(open_lake(str(tmp_path / "lake")))
    streams.create("orders", schema=Schema.of(k="string", n="int"), key=["k"], partitions=2)
    streams.create("kinds", schema=Schema.of(k="string", kind="string"), key=["k"], partitions=2)
    streams.create("names", schema=Schema.of(n="int", name="string"), key=["n"], partitions=1)

    @contextmanager
    def shared(**given: object) -> Iterator[Any]:
        yield lambda: spark

    def command(rows: str, *more: str, declared: str = "extractor = None") -> Any:
        (tmp_path / "verified_app.py").write_text(APP.format(rows=rows, declared=declared))
        sys.modules.pop("verified_app", None)
        return plan("--lake", str(tmp_path / "lake"), "--verify", *more)

    monkeypatch.setattr(applications, "session_scope", shared)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield command
    assert sorted(streams.list_streams()) == ["kinds", "names", "orders"]


@pytest.mark.spark
def test_what_spark_would_do_is_reported_of_each_join_without_a_version_or_a_record(
    verify: Any,
) -> None:
    result = verify("frame", "--json")
    assert result.exit_code == 0, result.output
    reported = json.loads(result.stdout)
    assert reported["plan"]["application"] == "shop"
    assert [list(join.values()) for join in reported["spark"]["joins"]] == [
        ["join-2-kinds", "kinds", "sort-merge join", "a bucketed scan of 2", 0, 0],
        ["join-3-names", "names", "broadcast join", "all of it in every task", 0, 0],
        ["join-6-again", "kinds", "sort-merge join", "a bucketed scan of 2", 0, 0],
    ]
    assert reported["spark"]["differences"] == []


@pytest.mark.spark
def test_an_unplanned_exchange_is_reported_with_its_operator_and_exit_code_4(verify: Any) -> None:
    result = verify('frame.dropDuplicates(["n"]).repartition(2, "k")')
    assert result.exit_code == 4, result.output
    assert (
        "join-2-kinds  sort-merge join with kinds, a bucketed scan of 2; exchanges: 0 of records"
        in result.output
    )
    assert (
        "NOT IN THE PLAN: map-4: Spark shuffles the records 2 times more than the plan lists"
        in result.output
    )


@pytest.mark.spark
def test_a_mistake_is_reported_as_a_run_would(verify: Any) -> None:
    result = verify("frame.withColumn('z', frame['nowhere'])")
    assert result.exit_code != 0
    assert "map-4" in str(result.exception)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("kind", "mistake"), [("upper(kind)", False), ("regexp_replace(kind)", True)]
)
def test_spark_is_asked_about_the_projection_of_a_dataset(
    verify: Any, kind: str, mistake: bool
) -> None:
    projection = f"Projection('k STRING, kind STRING', {{'kind': '{kind}'}}, where='__offset >= 0')"
    result = verify(
        "frame",
        declared=f"from dagster_adjunct.changes import Projection\nextractor = {projection}",
    )
    assert (result.exit_code != 0) == mistake, result.output
    if mistake:
        assert isinstance(result.exception, AdjunctError)
        assert "kinds" in str(result.exception)


def test_a_drawing_of_what_spark_would_do_is_refused(tmp_path: Path) -> None:
    result = plan("--lake", str(tmp_path / "lake"), "--verify", "--format", "mermaid")
    assert isinstance(result.exception, ConfigurationError)
    assert result.exception.facts["setting"] == "--format"
