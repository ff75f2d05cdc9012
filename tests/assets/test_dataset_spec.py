"""`AdjunctDataset`: what a declaration holds, and which ones are refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta

import pytest

from dagster_adjunct.assets.declaration.change_formats import Upserts
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    QuerySource,
    UnboundedDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.declaration.policies import DeadLetters, DeltaCompaction
from dagster_adjunct.assets.declaration.snapshots import (
    ParquetSnapshot,
    PostgresSnapshot,
    QuerySnapshot,
)
from dagster_adjunct.resources.errors import ConfigurationError, InvalidNameError
from dagster_adjunct.resources.schemas.schema import Field, Schema


def test_a_bounded_dataset_is_partitioned_by_its_whole_key_unless_reported():
    planes = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=8)
    assert (planes.kind, planes.key, planes.partition_by, planes.partitions) == (
        "bounded",
        ("tailnum",),
        ("tailnum",),
        8,
    )
    assert not planes.broadcast
    assert planes.bootstrap


def test_an_unbounded_dataset_may_be_partitioned_by_a_part_of_its_key():
    weather = unbounded_dataset(
        "weather",
        input="lake.weather",
        key=["origin", "time_hour"],
        partition_by="origin",
        partitions=8,
    )
    assert weather.kind == "unbounded"
    assert weather.key == ("origin", "time_hour")
    assert weather.partition_by == ("origin",)


def test_a_broadcast_dataset_has_no_partitions():
    airlines = bounded_dataset(
        "airlines", input="lake.airlines", key="carrier", broadcast=True, owners="team:ops"
    )
    assert airlines.broadcast
    assert airlines.partitions is None
    assert airlines.partition_by == ()
    assert airlines.presentation.owners == ("team:ops",)


def test_a_specification_is_a_value():
    one = bounded_dataset(
        "planes", input="lake.planes", key="tailnum", partitions=8, columns=["tailnum", "seats"]
    )
    assert pickle.loads(pickle.dumps(one)) == one
    assert hash(one) == hash(pickle.loads(pickle.dumps(one)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partitions": None}, "neither partitions nor broadcast=True"),
        ({"broadcast": True}, "both partitions and broadcast=True"),
        ({"partitions": 0}, "partitions=0: expected 1 to 100,000"),
        ({"partitions": 100_001}, "partitions=100001"),
        ({"key": []}, "has no key"),
        ({"key": ["a", "A"]}, "names column 'a' twice in key"),
        ({"key": ["__offset"]}, "does not begin with '__'"),
        ({"partition_by": "b"}, "partitioned by 'b', which is not in its key (a)"),
        ({"partition_by": []}, "has no partition_by"),
        (
            {"partitions": None, "broadcast": True, "partition_by": "a"},
            "is broadcast and has partition_by",
        ),
        ({"columns": ["b"]}, "does not store its key column 'a'"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused_in_words(change, message):
    with pytest.raises(ConfigurationError) as caught:
        bounded_dataset("planes", **{"input": "lake.planes", "key": "a", "partitions": 8, **change})
    assert message in str(caught.value)
    assert "'planes'" in str(caught.value)
    assert caught.value.argument or caught.value.next_step


@pytest.mark.parametrize(
    "change", [{"name": "a/b"}, {"name": "../x"}, {"input": "planes"}, {"input": "lake.a/b"}]
)
def test_an_unsafe_name_is_refused(change):
    with pytest.raises(InvalidNameError):
        unbounded_dataset(
            **{"name": "planes", "input": "lake.planes", "key": "a", "partitions": 1, **change}
        )


@pytest.mark.parametrize(
    "change",
    [
        {"max_age": 7},
        {"max_age": "7d"},
        {"max_age": timedelta(0)},
        {"freshness": 3},
        {"keep_tombstones": "x", "order_by": "n"},
        {"keep_tombstones": 1.5, "order_by": "n"},
        {"keep_tombstones": True, "order_by": "n"},
        {"order_by": 5},
        {"order_by": ["a", "a"]},
        {"changes": "x"},
        {"changes": Upserts},
        {"initial": "x"},
        {"initial": ParquetSnapshot},
        {"compaction": "x"},
        {"compaction": ""},
        {"persistent": "no"},
        {"discard": "x"},
        {"extractor": "x"},
        {"extractor": Projection},
        {"bootstrap": "no"},
        {"on_lost_offset": "skip"},
        {"on_bad_change": "skip"},
        {"on_bad_change": DeadLetters("lake.people")},
    ],
)
def test_a_wrong_argument_is_rejected_with_its_name_and_the_dataset(change):
    with pytest.raises(ConfigurationError) as caught:
        unbounded_dataset(
            **{"name": "people", "input": "lake.people", "key": "k", "partitions": 2, **change}
        )
    assert caught.value.argument == next(iter(change))
    assert "'people'" in caught.value.problem


def test_a_column_that_is_not_safe_as_a_name_can_not_order_changes():
    with pytest.raises(InvalidNameError):
        unbounded_dataset("people", input="lake.people", key="k", partitions=2, order_by="*")


@pytest.mark.parametrize(
    "change",
    [
        {"bootstrap": "no"},
        {"extractor": "x"},
        {"discard": "x"},
        {"discard": 0},
        {"partitions": True},
    ],
)
def test_a_bounded_dataset_rejects_wrong_arguments_too(change):
    with pytest.raises(ConfigurationError) as caught:
        bounded_dataset("planes", **{"input": "lake.planes", "key": "a", "partitions": 8, **change})
    assert caught.value.argument == next(iter(change))


@pytest.mark.parametrize(
    "change",
    [
        {"fraction": float("nan")},
        {"fraction": 0},
        {"fraction": True},
        {"deltas": 1},
        {"inside_commit": "x"},
    ],
)
def test_a_compaction_policy_that_can_not_work_is_rejected(change):
    with pytest.raises(ConfigurationError) as caught:
        DeltaCompaction(**change)
    assert caught.value.argument == next(iter(change))


@pytest.mark.parametrize(
    ("declare", "argument"),
    [
        (lambda: ParquetSnapshot(5), "url"),
        (lambda: ParquetSnapshot("x", position=5), "position"),
        (lambda: ParquetSnapshot("x", position=None), "position"),
        (lambda: ParquetSnapshot("x", position={}), "position"),
        (lambda: ParquetSnapshot("x", position={"0": None}), "position"),
        (lambda: QuerySnapshot(sql="x", position=5), "position"),
        (lambda: QuerySnapshot(sql=5, position={"0": "1"}), "sql"),
        (lambda: QuerySnapshot(query="x", position={"0": "1"}), "query"),
        (lambda: PostgresSnapshot("DSN", "SELECT 1", position=5), "position"),
        (lambda: PostgresSnapshot(5, "SELECT 1", position={"0": "1"}), "dsn_env"),
    ],
)
def test_a_snapshot_that_can_not_work_is_rejected(declare, argument):
    with pytest.raises(ConfigurationError) as caught:
        declare()
    assert caught.value.argument == argument


def test_a_bulk_snapshot_can_be_declared_again_with_another_field():
    snapshot = ParquetSnapshot("x", position={"0": 1, "1": "2"})
    assert replace(snapshot, url="y") == ParquetSnapshot("y", position={"0": "1", "1": "2"})


def test_a_dataset_of_no_kind_is_rejected():
    with pytest.raises(ConfigurationError) as caught:
        AdjunctDataset(
            name="planes", input="lake.planes", key=("a",), partition_by=("a",), partitions=8
        )
    assert caught.value.argument == "kind"


def test_only_a_stream_has_changes_to_follow():
    query = QuerySource(lambda spark, asked: None, Schema((Field("a", "int"),)))
    with pytest.raises(ConfigurationError) as caught:
        UnboundedDataset(
            name="planes",
            input=query,  # type: ignore[arg-type]
            key=("a",),
            partition_by=("a",),
            partitions=8,
        )
    assert caught.value.argument == "input"


@pytest.mark.lengthy
def test_declaring_imports_nothing_heavy():
    code = (
        "import sys; import dagster_adjunct.assets.declaration.dataset,"
        " dagster_adjunct.orchestration.planner; import"
        " dagster_adjunct.orchestration.application.application; print([m for m in ('pyspark',"
        " 'pandas', 'boto3') if m in sys.modules])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert finished.stdout.strip() == "[]"
