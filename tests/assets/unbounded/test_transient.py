"""Tables of one run: SAMZA-1278's recovery table for non-persistent stores, and what batches are
promised of them.

marked for bootstrap        bootstrap is always forced
not marked                  continue from last offset
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.unbounded.transient_table import (
    TransientTable,
    ranges_from_version,
    version_from_ranges,
)
from dagster_adjunct.resources.errors import (
    BadChangeError,
    ConfigurationError,
    DatasetError,
    MalformedDocumentError,
    OffsetOutOfRangeError,
    StaleDatasetError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.streams.lake.manifest import Retention, list_segments
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import StreamInfo, SystemStreamPartition
from tests.assets.conftest import World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

COLUMNS = Schema.of(k="string", n="int")
Content = dict[str, int]


class UpcomingStreams(LakeStreams):
    """Streams that are read from their end on where nothing else is known."""

    def info(self, stream: str) -> StreamInfo:
        return replace(super().info(stream), default_offset="upcoming")


@dataclass
class Runs:
    """A dataset that lives for one run, and runs of an application that reads it."""

    world: World
    spec: AdjunctDataset
    last: str | None = None
    run: TransientTable | None = None

    def send(self, **rows: int | None) -> None:
        self.world.send("table", list(rows.items()))

    def start(self, *, streams: LakeStreams | None = None) -> TransientTable:
        """Begin a run, after the end of the one before."""
        self.end()
        self.run = TransientTable(
            {"lake": streams or self.world.streams}, self.spec, last=self.last
        )
        return self.run

    def batch(self) -> Content:
        """Bring the table up to date, as is done before each batch; return what the batch meets."""
        assert self.run is not None
        self.report = self.run.advance(self.world.spark)
        self.last = self.report.version
        return entries(self.world, self.run)

    def end(self) -> None:
        if self.run is not None:
            self.run.release()

    def drop_the_front(self) -> None:
        """Let retention drop all but the newest append."""
        streams = self.world.streams
        newest = list(list_segments(streams.state("table").state, streams.files_of("table")))[-1]
        streams.configure("table", retention=Retention(max_bytes=newest.size), compaction=None)
        streams.maintain("table")


def entries(world: World, table: TransientTable) -> Content:
    assert table.view is not None
    rows = [(row.k, row.n) for row in table.view.frame(world.spark()).collect()]
    assert len(dict(rows)) == len(rows) == table.view.rows, "a key stands twice"
    return dict(rows)


@pytest.fixture
def runs(sparkling: World) -> Iterator[Runs]:
    sparkling.stream("table", COLUMNS, ["k"], 2)
    made = Runs(sparkling, declared())
    yield made
    made.end()


def declared(**options: Any) -> AdjunctDataset:
    if "broadcast" not in options:
        options = {"partitions": 2, **options}
    return unbounded_dataset("table", input="lake.table", key="k", persistent=False, **options)


# -- the recovery table


def test_non_persistent_and_marked_always_forces_bootstrap(runs: Runs) -> None:
    runs.send(a=1, b=2)
    for _ in range(2):
        runs.start()
        assert runs.batch() == {"a": 1, "b": 2}
        assert (runs.report.action, runs.report.counters["read"]) == ("bootstrapped", 2)
        decision = runs.report.decision
        assert decision is not None
        assert (decision.action, decision.store) == ("bootstrap", "none")
        assert "bootstrapped in each run" in decision.reason


def test_non_persistent_and_not_marked_continues_from_last_offset(runs: Runs) -> None:
    runs.spec = declared(bootstrap=False)
    runs.send(a=1, b=2)
    runs.start()
    runs.batch()
    runs.send(c=3)
    runs.start()
    assert runs.batch() == {"c": 3}, "what the run before has read is not read again"
    assert runs.report.counters["read"] == 1
    assert "from the last offset" in runs.report.note
    runs.send(c=4, d=5)
    assert runs.batch() == {"c": 4, "d": 5}


def test_an_unmarked_transient_table_begins_at_the_default_offset(runs: Runs) -> None:
    runs.spec = declared(bootstrap=False)
    runs.send(a=1)
    runs.start()
    assert runs.batch() == {"a": 1}, "a lake stream is read from its oldest offset by default"
    runs.last = "v000003-stored"  # it was a stored table when the last batch ran
    runs.start(streams=UpcomingStreams(runs.world.lake))
    assert runs.batch() == {}
    assert "from the default offset" in runs.report.note
    runs.send(b=2)
    assert runs.batch() == {"b": 2}


def test_a_bootstrap_needs_a_stream_that_reports_of_every_key(runs: Runs) -> None:
    runs.send(a=1)
    runs.send(b=2)
    runs.drop_the_front()
    runs.start()
    with pytest.raises(
        DatasetError, match=r"'table' .*it is transient.* does not hold all changes"
    ):
        runs.batch()


def test_a_last_offset_that_the_stream_lost_is_skipped_or_fails_as_declared(runs: Runs) -> None:
    runs.spec = declared(bootstrap=False)
    runs.start()
    runs.batch()
    for key in ("a", "b", "c"):
        runs.send(**{key: 1, f"{key}2": 1, f"{key}3": 1, f"{key}4": 1})
    runs.drop_the_front()
    begun = runs.last
    runs.start()
    assert runs.batch() == {"c": 1, "c2": 1, "c3": 1, "c4": 1}
    assert "the table continues at" in runs.report.note
    runs.spec, runs.last = declared(bootstrap=False, on_lost_offset="fail"), begun
    runs.start()
    with pytest.raises(OffsetOutOfRangeError) as caught:
        runs.batch()
    assert caught.value.dataset == "table"


def test_a_last_offset_beyond_the_streams_end_is_of_another_stream(runs: Runs) -> None:
    runs.spec = declared(bootstrap=False)
    runs.last = 'offsets-1:{"lake.table.0":["0","0"],"lake.table.1":["0","99"]}'
    runs.send(a=1)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        runs.start().advance(runs.world.spark)
    assert (caught.value.dataset, caught.value.partition, caught.value.offset) == ("table", 1, "99")
    assert "Declare the dataset under a new name" in caught.value.next_step
    with pytest.raises(OffsetOutOfRangeError) as failure:
        runs.start().restore(str(runs.last), runs.world.spark)
    assert (failure.value.dataset, failure.value.stream) == ("table", "lake.table")
    runs.spec = declared()
    runs.start()
    assert runs.batch() == {"a": 1}, "marked for bootstrap, it is built of what is there"


# -- kept current


@pytest.mark.parametrize(
    "spread", [{"partitions": 2}, {"broadcast": True}], ids=["partitioned", "broadcast"]
)
def test_a_table_takes_in_what_is_new_and_nothing_again(runs: Runs, spread: dict[str, Any]) -> None:
    runs.spec = declared(**spread)
    runs.send(a=1, b=2, c=3)
    runs.start()
    runs.batch()
    runs.send(a=4, b=None, d=5)
    assert runs.batch() == {"a": 4, "c": 3, "d": 5}
    assert (runs.report.action, runs.report.counters["read"]) == ("applied", 3)
    version = runs.last
    assert runs.batch() == {"a": 4, "c": 3, "d": 5}
    assert (runs.report.action, runs.last) == ("up-to-date", version)


def test_bucket_i_is_partition_i_and_a_broadcast_copy_is_one(runs: Runs) -> None:
    from pyspark.sql import functions as F

    runs.send(**{f"key{i}": i for i in range(40)})
    view = _view(runs)
    frame = view.frame(runs.world.spark()).withColumn("at", F.spark_partition_id())
    assert frame.where("at <> pmod(hash(k), 2)").count() == 0
    assert frame.select("at").distinct().count() == 2
    runs.spec = declared(broadcast=True)
    assert _view(runs).frame(runs.world.spark()).rdd.getNumPartitions() == 1


def _view(runs: Runs) -> Any:
    table = runs.start()
    runs.batch()
    return table.view


def test_an_empty_table_is_spread_as_declared_and_markers_alone_change_nothing(runs: Runs) -> None:
    view = _view(runs)
    assert view.rows == 0
    plan = view.frame(runs.world.spark())._jdf.queryExecution().executedPlan()
    assert plan.outputPartitioning().toString().startswith("hashpartitioning(k#")
    assert runs.world.spark is not None
    runs.world.mark("table", "v1", [0, 1])
    kept = view.kept
    assert runs.batch() == {}
    assert runs.run is not None
    assert runs.run.view is not None
    assert runs.run.view.kept is kept
    assert runs.last == 'offsets-1:{"lake.table.0":["0","1"],"lake.table.1":["0","1"]}'


def test_by_the_order_of_a_column_what_comes_late_loses_also_against_a_deletion(runs: Runs) -> None:
    runs.world.stream("ordered", Schema.of(k="string", n="int", at="bigint"), ["k"], 1)
    runs.spec = unbounded_dataset(
        "table",
        input="lake.ordered",
        key="k",
        partitions=2,
        order_by="at",
        persistent=False,
        extractor=None,
    )
    send = runs.world.streams
    _ordered(send, 1, ("a", 1, 5, False), ("b", 2, 5, False), ("c", 3, 9, True))
    runs.start()
    assert runs.batch() == {"a": 1, "b": 2}
    _ordered(send, 2, ("a", 9, 4, False), ("b", 8, 5, False), ("c", 7, 8, False))
    assert runs.batch() == {"a": 1, "b": 8}
    again = TransientTable(runs.world.systems, runs.spec)
    again.restore(str(runs.last), runs.world.spark)
    assert entries(runs.world, again) == {"a": 1, "b": 8}
    again.release()


def _ordered(streams: LakeStreams, sequence: int, *rows: tuple[str, int, int, bool]) -> None:
    import pyarrow as pa

    columns = list(zip(*rows, strict=True))
    table = pa.table(
        {
            "k": pa.array(columns[0]),
            "n": pa.array(columns[1], pa.int32()),
            "at": pa.array(columns[2], pa.int64()),
            "__tombstone": pa.array(columns[3]),
        }
    )
    streams.append("ordered", table, producer="test", sequence=sequence)


# -- what batches are promised


def test_a_version_read_again_gives_the_same_table_whatever_has_come_since(runs: Runs) -> None:
    runs.send(a=1, b=2)
    runs.start()
    runs.batch()
    runs.send(a=3, c=None)
    matched = runs.batch()
    version = str(runs.last)
    runs.send(a=9, b=9, d=9)
    table = runs.start()
    assert table.restore(version, runs.world.spark).version == version
    assert entries(runs.world, table) == matched == {"a": 3, "b": 2}
    assert table.restore(version, runs.world.spark) is table.view
    assert runs.batch() == {"a": 9, "b": 9, "d": 9}, "the run goes on from there"
    assert (runs.report.action, runs.report.counters["read"]) == ("applied", 3)


def test_a_version_that_the_stream_does_not_hold_any_more_is_named(runs: Runs) -> None:
    runs.send(a=1)
    runs.start()
    runs.batch()
    runs.send(a=2)
    runs.drop_the_front()
    with pytest.raises(OffsetOutOfRangeError) as failure:
        runs.start().restore(str(runs.last), runs.world.spark)
    assert (failure.value.dataset, failure.value.stream) == ("table", "lake.table")


def test_a_version_that_lost_changes_is_restored_without_them_where_declared(runs: Runs) -> None:
    runs.spec = declared(bootstrap=False)
    runs.send(a=1)
    runs.send(b=2)
    streams = runs.world.streams
    ends = streams.upcoming(streams.partitions("table"))
    runs.last = version_from_ranges({ssp: ("0", end) for ssp, end in ends.items()})
    runs.drop_the_front()
    table = runs.start()
    view = table.restore(str(runs.last), runs.world.spark)
    assert view.version != runs.last
    assert entries(runs.world, table) == {"b": 2}
    runs.spec = declared(bootstrap=False, on_lost_offset="fail")
    with pytest.raises(OffsetOutOfRangeError) as refused:
        runs.start().restore(str(runs.last), runs.world.spark)
    assert "adjunct checkpoint abandon APPLICATION" in refused.value.next_step


def test_a_version_of_another_stream_is_refused(runs: Runs) -> None:
    version = version_from_ranges({SystemStreamPartition("lake", "other", 0): ("0", "1")})
    with pytest.raises(
        DatasetError, match=r"began with offsets of lake\.other\.0, and the declared input is lake"
    ):
        runs.start().restore(version, runs.world.spark)


@pytest.mark.parametrize(
    "text", ["offsets-2:{}", "offsets-1:{", 'offsets-1:{"x":["0","1"]}', "v000001-a"]
)
def test_a_text_that_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(MalformedDocumentError) as failure:
        ranges_from_version("table", text)
    assert failure.value.dataset == "table"


def test_a_table_outlives_the_catalogue_entry_of_what_it_was_read_from(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_adjunct.resources.bucketing.files._MAX_TABLES", 1)
    runs.send(a=1)
    table = runs.start()
    runs.batch()
    runs.send(b=2)
    runs.world.streams.read(runs.world.spark(), runs.world.streams.all_ranges("table"))
    assert entries(runs.world, table) == {"a": 1}
    assert runs.batch() == {"a": 1, "b": 2}


def test_memory_is_given_back_when_a_view_is_superseded_and_when_the_run_ends(
    runs: Runs, spark: SparkSession
) -> None:
    def kept() -> int:
        return int(spark.sparkContext._jsc.getPersistentRDDs().size())

    before = kept()
    runs.send(a=1)
    runs.start()
    runs.batch()
    assert kept() == before + 1
    runs.send(b=2)
    runs.batch()
    assert kept() == before + 1
    runs.end()
    assert kept() == before


def test_a_change_that_can_not_be_applied_is_named(runs: Runs) -> None:
    import pyarrow as pa

    runs.world.stream("unkeyed", COLUMNS, [], 1)
    runs.spec = unbounded_dataset(
        "table", input="lake.unkeyed", key="k", partitions=2, persistent=False
    )
    rows = pa.table({"k": pa.array([None], pa.string()), "n": pa.array([1], pa.int32())})
    runs.world.streams.append("unkeyed", rows, producer="test", sequence=1)
    runs.start()
    with (
        pytest.raises(
            BadChangeError, match=r"dataset 'table': the change at offset 0 .* null key column 'k'"
        ),
        translate_spark_errors(),
    ):
        runs.batch()


def inserted(transaction: str, k: str, n: int) -> tuple[str]:
    """A change as Debezium tells it."""
    within = {"id": transaction, "total_order": 1, "data_collection_order": 1}
    return (json.dumps({"op": "c", "after": {"k": k, "n": n}, "transaction": within}),)


def transaction(name: str, *, ended: bool) -> tuple[str]:
    """What Debezium tells of a transaction of one change."""
    counts = [{"data_collection": "public.t", "event_count": 1}] if ended else None
    reported = {
        "id": name,
        "event_count": 1 if ended else None,
        "data_collections": counts,
        "ts_ms": 1,
    }
    return (json.dumps({"status": "END" if ended else "BEGIN", **reported}),)


def test_a_transaction_that_is_not_whole_waits_and_makes_the_table_stale_in_the_end(
    runs: Runs,
) -> None:
    for stream in ("single", "transactions"):
        runs.world.stream(stream, Schema.of(value="string"), [], 1)
    form = DebeziumEnvelope(
        "k STRING, n INT", transactions="lake.transactions", collection="public.t"
    )
    runs.spec = unbounded_dataset(
        "table", input="lake.single", key="k", partitions=2, persistent=False, changes=form
    )
    runs.world.send("single", [inserted("t1", "a", 1), inserted("t2", "b", 2)])
    reported = [
        transaction("t1", ended=False),
        transaction("t1", ended=True),
        transaction("t2", ended=False),
    ]
    runs.world.send("transactions", reported)
    table = runs.start()
    assert runs.batch() == {"a": 1}
    assert runs.report.lag == {"lake.single.0": 1}
    table.raise_if_stale(timedelta(minutes=10))
    table.raise_if_stale(timedelta.max)
    with pytest.raises(StaleDatasetError, match=r"1 offsets of lake\.single\.0") as caught:
        table.raise_if_stale(timedelta(0))
    assert caught.value.dataset == "table"


# -- what can be declared


def test_what_needs_a_store_is_refused_for_a_table_of_one_run() -> None:
    with pytest.raises(ConfigurationError) as caught:
        declared(on_bad_change=DeadLetters("lake.dead"))
    assert caught.value.argument == "on_bad_change"
    with pytest.raises(ConfigurationError) as caught:
        declared(on_lost_offset="serve_stale")
    assert caught.value.argument == "on_lost_offset"


def test_it_is_not_advanced_by_itself(world: World) -> None:
    world.stream("table", COLUMNS, ["k"], 2)
    with pytest.raises(DatasetError) as failure:
        advance_dataset(
            declared(), lake=world.lake, systems=world.systems, spark=world.spark, by="test"
        )
    assert failure.value.dataset == "table"
