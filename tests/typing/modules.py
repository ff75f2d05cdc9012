"""What applications take from the modules with a purpose, as mypy and editors see it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, assert_type

from dagster import AutomationCondition

import dagster_adjunct.errors as errors_of_adjunct
from dagster_adjunct import (
    AdjunctDataset,
    Application,
    BoundedDataset,
    Lake,
    Schema,
    bounded_dataset,
    open_dataset,
    open_lake,
    unbounded_dataset,
)
from dagster_adjunct.automation import new_records, new_version
from dagster_adjunct.changes import DeadLetters, OperationColumn
from dagster_adjunct.code_location import AdjunctTranslator, LaunchWhen
from dagster_adjunct.errors import (
    AdjunctError,
    OffsetOutOfRangeError,
    RecordNotFoundError,
    VersionDiscardedError,
)
from dagster_adjunct.exchange import IcebergTable
from dagster_adjunct.kafka import Json, KafkaSettings, KafkaTopic, kafka_system
from dagster_adjunct.key_value import (
    BlockingKeyValueTable,
    IntegerSerializer,
    IteratorPage,
    JsonSerializer,
    KeyValueTable,
    KeyVersion,
    Put,
    Remove,
    TableEntry,
    TableKey,
    TextSerializer,
)
from dagster_adjunct.maintenance import DiscardReport, expire_versions
from dagster_adjunct.reading import Dataset, EntryChanges, VersionDiff
from dagster_adjunct.sources import FileSource
from dagster_adjunct.startpoints import StartpointOldest, Startpoints
from dagster_adjunct.streams import (
    AppendResult,
    OffsetRange,
    StreamSystem,
    open_system,
    register_system,
)
from dagster_adjunct.tables import TableReadFunction, TableWriteFunction
from dagster_adjunct.validators import Candidate, Finding, custom, min_rows, no_nulls

lake = open_lake("memory://typed")


def cheap(candidate: Candidate) -> Finding:
    return Finding(candidate.view is not None, "all are cheap")


source = FileSource("deliveries", format="csv", schema=Schema.of(item="string"))
items = bounded_dataset(
    "items",
    input=source,
    key="item",
    partitions=2,
    validators=[min_rows(1), no_nulls("item"), custom("cheap", cheap)],
)
assert_type(items, BoundedDataset)
unbounded_dataset(
    "prices",
    input="lake.prices",
    key="item",
    partitions=2,
    changes=OperationColumn("op"),
    on_bad_change=DeadLetters("lake.bad"),
    freshness=timedelta(minutes=5),
    automation_condition=AutomationCondition.on_cron("@hourly")
    | AutomationCondition.freshness_failed(),
)
bounded_dataset(
    "menu", input="lake.menu", key="item", broadcast=True, automation_condition=new_version()
)
Application(
    "automated", automation_condition=new_records() & ~AutomationCondition.execution_failed()
)
with open_dataset(lake, "items") as opened:
    assert_type(opened, Dataset)
    assert_type(opened.version, str)
    assert_type(opened.get("a"), dict[str, Any] | None)
    assert_type(opened.diff("monday", "tuesday"), VersionDiff)
    assert_type(opened.changes(since="monday"), EntryChanges)
assert_type(expire_versions(lake, "items", by="ada"), DiscardReport)
assert_type(open_system(lake, "lake"), StreamSystem)
assert_type(
    kafka_system(
        "kafka",
        bootstrap_servers="kafka:9092",
        topics={"orders": KafkaTopic(value=Json("item string"))},
    ),
    KafkaSettings,
)
Startpoints(Application("shop"), lake=lake)
StartpointOldest()
OffsetRange("0", "10")
IcebergTable("db.items")
LaunchWhen(records=1_000, age=timedelta(minutes=1))


class Names(AdjunctTranslator):
    """As a project of its own names its assets."""


class Machines(
    TableReadFunction[str, dict[str, Any]], TableWriteFunction[str, dict[str, Any], dict[str, Any]]
):
    """As a project reaches a store of its own."""

    async def get(self, key: str, *args: object) -> dict[str, Any] | None:
        return None

    async def put(self, key: str, value: dict[str, Any], *args: object) -> None: ...

    async def delete(self, key: str, *args: object) -> None: ...

    async def update(self, key: str, update: dict[str, Any], *args: object) -> None:
        raise RecordNotFoundError("there is no such machine.", keys=(key,), table="machines")


def system_of(lake: Lake) -> StreamSystem:
    return open_system(lake, "lake")


register_system("mine", system_of)


def again(error: AdjunctError) -> Mapping[str, Any]:
    assert_type(error.problem, str)
    assert_type(error.next_step, str)
    if isinstance(error, OffsetOutOfRangeError):
        assert_type(error.stream, str | None)
        assert_type(error.partition, int | None)
        assert_type(error.oldest, str | None)
    elif isinstance(error, VersionDiscardedError):
        assert_type(error.dataset, str | None)
        assert_type(error.version, str | None)
    elif isinstance(error, errors_of_adjunct.RecordNotFoundError):
        assert_type(error.keys, tuple[object, ...])
    return error.facts


def appended(result: AppendResult) -> int:
    return result.rows


async def with_key_values(table: KeyValueTable[str, int]) -> None:
    version = await table.put("a", 1, family="f")
    assert_type(version, KeyVersion)
    assert_type(await table.replace("a", 2, version), KeyVersion)
    assert_type(await table.get("a"), TableEntry[str, int] | None)
    assert_type(await table.get_all(["a", TableKey("f", "b")]), list[TableEntry[str, int] | None])
    assert_type(await table.put_all([("a", 1)], family="f"), list[KeyVersion])
    assert_type(
        await table.apply([Put("a", 1), Remove("b", version)], family="f"), list[KeyVersion | None]
    )
    async for page in table.entries("f", start="a"):
        assert_type(page, IteratorPage[TableEntry[str, int]])
        assert_type([entry.value for entry in page.items], list[int])
    blocking = BlockingKeyValueTable(table)
    assert_type(blocking.get("a"), TableEntry[str, int] | None)
    assert_type([key.key for page in blocking.all_keys() for key in page.items], list[str])
    opened = KeyValueTable(
        table.id, table.configuration, table.backend, IntegerSerializer(), JsonSerializer()
    )
    assert_type(opened, KeyValueTable[int, Any])
    TextSerializer().to_bytes(5)  # type: ignore[arg-type]
    await table.put("a", "1")  # type: ignore[arg-type]
    await table.put_all([("a", 1)])  # type: ignore[call-arg]
    await table.put("a", 1, "f")  # type: ignore[call-arg]
