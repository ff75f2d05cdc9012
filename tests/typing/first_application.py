"""What a first application writes, as mypy and editors see it: names of `dagster_adjunct`
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import assert_type

from dagster import Definitions
from pyspark.sql import SparkSession

from dagster_adjunct import (
    AdvanceReport,
    Application,
    ApplicationState,
    ColumnRules,
    DiscardPolicy,
    FileRetention,
    FileRules,
    Lake,
    LakeResource,
    LakeStreams,
    MessageStream,
    RunReport,
    Schema,
    SparkResource,
    StepReport,
    SystemStreamPartition,
    UpdateContract,
    advance_dataset,
    application_state,
    bounded_dataset,
    build_definitions,
    file_stream,
    open_lake,
    run_application,
    session_scope,
    systems_for,
    unbounded_dataset,
    update_message,
    version_set,
)
from dagster_adjunct.streams import StreamSystem
from dagster_adjunct.tables import RemoteTable, SqliteTable

lake = open_lake("lake")
assert_type(lake, Lake)

streams = LakeStreams(lake)
streams.create("orders", schema=Schema.of(item="string", amount="int"), key=["item"], partitions=2)
assert_type(streams.partitions("orders"), list[SystemStreamPartition])

clicks = file_stream(
    "clicks",
    "s3://landing/clicks",
    format="jsonl",
    schema="user string, page string",
    key=["user"],
    min_age=timedelta(minutes=1),
    rules=FileRules(changed="append", damaged="set-aside"),
    column_rules=ColumnRules(missing="null", renamed={"site": "page"}),
    retention=FileRetention(max_age=timedelta(days=7)),
)
assert_type(clicks, str)

items = bounded_dataset(
    "items", input="lake.items", key="item", partitions=2, discard=DiscardPolicy(keep=5)
)
prices = unbounded_dataset("prices", input="lake.prices", key="item", partitions=2)
version_set("shop", items)

app = Application("shop", max_batch_records=100)
orders = app.input_stream("lake.orders")
assert_type(orders, MessageStream)
joined = orders.join(app.table(items), on="item", how="left", select=["name"]).filter("amount > 0")
assert_type(joined, MessageStream)
table = SqliteTable(
    path="sales.sqlite", table="sales", key="item", columns={"item": "string"}, create=True
)
sales = RemoteTable("sales", key="item", read_function=table, write_function=table)
joined.map(*update_message(key="item", update={"sold": "amount"})).send_to(
    app.table(sales), UpdateContract.UPDATE_WITH_DEFAULTS
)
assert_type(
    build_definitions(app, lake="lake", spark=SparkResource(master="local[2]")), Definitions
)
LakeResource(url="lake")


def run(lake: Lake) -> StepReport:
    systems = systems_for(app, lake=lake)
    assert_type(systems, dict[str, StreamSystem])
    with session_scope(master="local[2]") as spark:
        assert_type(spark, Callable[[], SparkSession])
        advanced = advance_dataset(items, lake=lake, systems=systems, spark=spark, by="ada")
        assert_type(advanced, AdvanceReport)
        report = run_application(
            app, lake=lake, systems=systems, spark=spark, run="first", max_batches=1
        )
    assert_type(report, RunReport)
    assert_type(application_state(lake, "shop"), ApplicationState)
    return report.step
