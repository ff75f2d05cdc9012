"""Assets of users take datasets and streams as inputs, in the form that their parameter is
annotated with.
"""

from __future__ import annotations

from typing import Any

import dagster as dg
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    Schema,
    SparkResource,
    VersionPartitions,
    advance_dataset,
    bounded_dataset,
    build_definitions,
    open_lake,
    unbounded_dataset,
)
from dagster_adjunct.assets.versions.leases import list_leases
from dagster_adjunct.errors import AdjunctError, ConfigurationError
from dagster_adjunct.orchestration.code_location.resources import _pandas
from dagster_adjunct.resources.spark.in_process import IN_PROCESS

PRICES = Schema.of(k="string", price="double")
prices = bounded_dataset("prices", input="lake.prices", key="k", partitions=2)
people = unbounded_dataset("people", input="lake.people", key="k", partitions=2)


def application() -> Application:
    app = Application("shop")
    orders = (
        app.input_stream("lake.orders")
        .join(app.table(prices), on="k")
        .join(app.table(people), on="k")
    )
    orders.send_to(app.output_stream("lake.priced", partitions=2, key="k"))
    return app


@pytest.fixture
def lake(tmp_path: Any) -> Lake:
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    for name in ("prices", "people", "priced"):
        streams.create(name, schema=PRICES, key=["k"], partitions=2)
    streams.append("prices", rows(a=1.0, b=2.0), producer="t", sequence=1, end_of_dataset="v1")
    streams.append("people", rows(a=5.0, b=6.0, c=7.0), producer="t", sequence=1)
    advance(lake)
    streams.append("people", rows(a=8.0), producer="t", sequence=2)  # a delta over the base
    gone = pa.table({"k": ["b"], "price": pa.nulls(1, pa.float64()), "__tombstone": [True]})
    streams.append("people", gone, producer="t", sequence=3)
    streams.append("priced", rows(a=1.5, x=2.5), producer="t", sequence=1)
    streams.append("priced", gone, producer="t", sequence=2)
    advance(lake)
    return lake


def rows(**values: float) -> pa.Table:
    return pa.table({"k": list(values), "price": list(values.values())})


def advance(lake: Lake) -> None:
    for dataset in (prices, people):
        advance_dataset(dataset, lake=lake, spark=IN_PROCESS)


def loaded(lake: Lake, key: list[str], annotation: Any) -> Any:
    """Return what an asset gets whose parameter has this annotation, in a run of its own."""
    got: list[Any] = []

    def read(given: Any) -> None:
        got.append(given)

    read.__annotations__["given"] = annotation
    taken = {"given": dg.AssetIn(key=key, input_manager_key="adjunct_loader")}
    asset = dg.asset(name="reads", ins=taken)(read)
    job = dg.define_asset_job("read", selection=["reads"])
    mine = dg.Definitions(assets=[asset], jobs=[job])
    merged = dg.Definitions.merge(build_definitions(application(), lake=lake.url), mine)
    result = merged.resolve_job_def("read").execute_in_process(raise_on_error=True)
    assert result.success
    return got[0]


PEOPLE = [{"k": "a", "price": 8.0}, {"k": "c", "price": 7.0}]
FORMS = {
    "anything": (Any, pa.Table, lambda given: given.to_pylist()),
    "arrow": (pa.Table, pa.Table, lambda given: given.to_pylist()),
    "pandas": (pd.DataFrame, pd.DataFrame, lambda given: given.to_dict("records")),
    "polars": (pl.DataFrame, pl.DataFrame, lambda given: given.to_dicts()),
    "lazy polars": (pl.LazyFrame, pl.LazyFrame, lambda given: given.collect().to_dicts()),
    "duckdb": (
        duckdb.DuckDBPyRelation,
        duckdb.DuckDBPyRelation,
        lambda given: given.to_arrow_table().to_pylist(),
    ),
    "rows": (list[dict[str, Any]], list, list),
}


@pytest.mark.lengthy
@pytest.mark.parametrize("form", FORMS)
def test_a_dataset_with_changes_comes_in_the_form_that_is_annotated(lake: Lake, form: str) -> None:
    annotation, kind, as_rows = FORMS[form]
    given = loaded(lake, ["datasets", "people_dataset"], annotation)
    assert isinstance(given, kind)
    assert sorted(as_rows(given), key=lambda row: row["k"]) == PEOPLE


def test_whole_numbers_with_gaps_are_exact_in_pandas() -> None:
    table = pa.table(
        {"k": ["a", "b"], "n": pa.array([2**53 + 1, None]), "i": pa.array([1, None], pa.int32())}
    )
    frame = _pandas(table)
    assert list(frame.columns) == ["k", "n", "i"]
    assert frame["n"].tolist() == [2**53 + 1, pd.NA]
    assert _pandas(table[:1]).dtypes["n"] == "int64"


@pytest.mark.lengthy
def test_versions_and_streams_come_without_hidden_columns_and_deletions(lake: Lake) -> None:
    assert loaded(lake, ["datasets", "prices_dataset"], pa.Table).sort_by("k") == rows(a=1.0, b=2.0)
    assert loaded(lake, ["lake", "priced"], pa.Table).sort_by("k") == rows(a=1.5, x=2.5)
    assert loaded(lake, ["lake", "people"], pa.Table).num_rows == 4, (
        "a stream that is only read here"
    )


@pytest.mark.spark
def test_frames_are_of_the_run_s_session_and_keep_their_version_until_its_end(lake: Lake) -> None:
    from pyspark.sql import DataFrame

    got: list[Any] = []
    held: list[Any] = []

    def reads(given: Any, adjunct_spark: dg.ResourceParam[SparkResource]) -> None:
        assert given.sparkSession is adjunct_spark.spark_session
        held.extend(list_leases(lake, "people"))
        got.append(sorted(map(tuple, given.collect())))

    def streamed(given: Any) -> None:
        got.append(sorted(map(tuple, given.collect())))

    assets = []
    for function, key in ((reads, ["datasets", "people_dataset"]), (streamed, ["lake", "priced"])):
        function.__annotations__["given"] = DataFrame
        taken = {"given": dg.AssetIn(key, input_manager_key="adjunct_loader")}
        assets.append(dg.asset(name=function.__name__, ins=taken)(function))
    mine = dg.Definitions(assets=assets, jobs=[dg.define_asset_job("read", selection=assets)])
    spark = SparkResource(master="local[2]", lake=lake.url)
    merged = dg.Definitions.merge(
        build_definitions(application(), lake=lake.url, spark=spark), mine
    )
    assert merged.resolve_job_def("read").execute_in_process(raise_on_error=True).success
    assert sorted(got) == [[("a", 1.5), ("x", 2.5)], [("a", 8.0), ("c", 7.0)]]
    assert held
    assert not list_leases(lake, "people")


daily = bounded_dataset(
    "daily",
    input="lake.daily",
    key="k",
    broadcast=True,
    versions=VersionPartitions("day", start="2026-01-01"),
)


@pytest.mark.lengthy
def test_a_partition_takes_the_version_of_its_own_name_and_several_come_by_partition(
    lake: Lake,
) -> None:
    streams = LakeStreams(lake)
    streams.create("daily", schema=PRICES, key=["k"], partitions=1)
    days = [f"2026-01-{day:02}" for day in range(4, 11)]
    for number, day in enumerate(days):
        streams.append(
            "daily", rows(a=float(number)), producer="t", sequence=number, end_of_dataset=day
        )
    advance_dataset(daily, lake=lake, spark=IN_PROCESS)
    app = Application("days")
    app.table(daily)
    got: list[Any] = []
    taken = {
        "given": dg.AssetIn(key=["datasets", "daily_dataset"], input_manager_key="adjunct_loader")
    }

    @dg.asset(partitions_def=dg.DailyPartitionsDefinition("2026-01-01"), ins=taken)
    def each(given: pa.Table) -> None:
        got.append(given.to_pylist())

    @dg.asset(partitions_def=dg.WeeklyPartitionsDefinition("2026-01-04"), ins=taken)
    def week(given: dict[str, list]) -> None:  # type: ignore[type-arg]
        got.append(given)

    @dg.asset(partitions_def=dg.WeeklyPartitionsDefinition("2026-01-04"), ins=taken)
    def wrong(given: pa.Table) -> None:
        raise AssertionError

    jobs = [
        dg.define_asset_job(f"read_{asset.key.path[0]}", selection=[asset])
        for asset in (each, week, wrong)
    ]
    mine = dg.Definitions(assets=[each, week, wrong], jobs=jobs)
    merged = dg.Definitions.merge(build_definitions(app, lake=lake.url), mine)
    assert (
        merged.resolve_job_def("read_each").execute_in_process(partition_key="2026-01-06").success
    )
    assert got.pop() == [{"k": "a", "price": 2.0}]
    assert (
        merged.resolve_job_def("read_week").execute_in_process(partition_key="2026-01-04").success
    )
    assert got.pop() == {
        day: [{"k": "a", "price": float(number)}] for number, day in enumerate(days)
    }
    with pytest.raises(ConfigurationError, match="7 partitions"):
        merged.resolve_job_def("read_wrong").execute_in_process(partition_key="2026-01-04")


def test_a_partition_takes_the_whole_of_what_has_no_partitions(lake: Lake) -> None:
    got: list[Any] = []

    def read(day: pa.Table, stream: pa.Table) -> None:
        got.append((day, stream))

    loader = "adjunct_loader"
    taken = {
        "day": dg.AssetIn(key=["datasets", "people_dataset"], input_manager_key=loader),
        "stream": dg.AssetIn(key=["lake", "priced"], input_manager_key=loader),
    }
    asset = dg.asset(
        name="reads", ins=taken, partitions_def=dg.DailyPartitionsDefinition("2026-01-01")
    )(read)
    mine = dg.Definitions(assets=[asset], jobs=[dg.define_asset_job("read", selection=[asset])])
    merged = dg.Definitions.merge(build_definitions(application(), lake=lake.url), mine)
    assert merged.resolve_job_def("read").execute_in_process(partition_key="2026-01-02").success
    ((people_then, priced),) = got
    assert (people_then.sort_by("k").to_pylist(), priced.num_rows) == (PEOPLE, 2)


def test_it_stores_nothing_and_says_so(lake: Lake) -> None:
    @dg.asset(io_manager_key="adjunct_loader")
    def lost() -> int:
        return 5

    mine = dg.Definitions(assets=[lost], jobs=[dg.define_asset_job("lose", selection=[lost])])
    merged = dg.Definitions.merge(build_definitions(application(), lake=lake.url), mine)
    with pytest.raises(ConfigurationError, match="only loads"):
        merged.resolve_job_def("lose").execute_in_process()


@pytest.mark.lengthy
def test_what_can_not_be_loaded_is_refused(lake: Lake) -> None:
    with pytest.raises(ConfigurationError, match=r"pandas\.DataFrame"):
        loaded(lake, ["datasets", "people_dataset"], dict)
    with pytest.raises(ConfigurationError, match="no partitions"):
        loaded(lake, ["datasets", "people_dataset"], dict[str, pd.DataFrame])
    with pytest.raises(AdjunctError):
        loaded(lake, ["lake", "orders"], pa.Table)  # nobody has written it yet
