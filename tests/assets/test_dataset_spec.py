"""`AdjunctDataset`: what a declaration holds, and which ones are refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from dagster_adjunct.assets.declaration.change_formats import Upserts
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.declaration.policies import DeadLetters, DeltaCompaction
from dagster_adjunct.assets.declaration.snapshots import ParquetSnapshot, PostgresSnapshot, QuerySnapshot
from dagster_adjunct.resources.errors import ConfigurationError, InvalidNameError


def test_a_bounded_dataset_is_partitioned_by_its_whole_key_unless_told():
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
        "weather", input="lake.weather", key=["origin", "time_hour"], partition_by="origin", partitions=8
    )
    assert weather.kind == "unbounded"
    assert weather.key == ("origin", "time_hour")
    assert weather.partition_by == ("origin",)


def test_a_broadcast_dataset_has_no_partitions():
    airlines = bounded_dataset("airlines", input="lake.airlines", key="carrier", broadcast=True, owners="team:ops")
    assert airlines.broadcast
    assert airlines.partitions is None
    assert airlines.partition_by == ()
    assert airlines.owners == ("team:ops",)


def test_a_specification_is_a_value():
    one = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=8, columns=["tailnum", "seats"])
    assert pickle.loads(pickle.dumps(one)) == one
    assert hash(one) == hash(pickle.loads(pickle.dumps(one)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partitions": None}, "neither partitions nor broadcast=True"),
        ({"broadcast": True}, "both partitions and broadcast=True"),
        ({"partitions": 0}, "partitions=0: expected a whole number from 1 to 100,000"),
        ({"partitions": 100_001}, "partitions=100001"),
        ({"partitions": True}, "partitions=True: expected a whole number"),
        ({"key": []}, "has no key"),
        ({"key": ["a", "A"]}, "names column 'a' twice in key"),
        ({"key": ["__offset"]}, "does not begin with '__'"),
        ({"partition_by": "b"}, "partitioned by 'b', which is not in its key (a)"),
        ({"partition_by": []}, "has no partition_by"),
        ({"partitions": None, "broadcast": True, "partition_by": "a"}, "is broadcast and has partition_by"),
        ({"columns": ["b"]}, "does not store its key column 'a'"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused_in_words(change, message):
    with pytest.raises(ConfigurationError) as caught:
        bounded_dataset("planes", **{"input": "lake.planes", "key": "a", "partitions": 8, **change})
    assert message in str(caught.value)
    assert "'planes'" in str(caught.value)
    assert caught.value.argument or caught.value.next_step


@pytest.mark.parametrize("change", [{"name": "a/b"}, {"name": "../x"}, {"input": "planes"}, {"input": "lake.a/b"}])
def test_an_unsafe_name_is_refused(change):
    with pytest.raises(InvalidNameError):
        unbounded_dataset(**{"name": "planes", "input": "lake.planes", "key": "a", "partitions": 1, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_age": 7}, "max_age is 7: expected a positive timedelta"),
        ({"max_age": "7d"}, "max_age is '7d': expected a positive timedelta"),
        ({"freshness": 3}, "freshness is 3: expected a positive timedelta"),
        ({"keep_tombstones": "x", "order_by": "n"}, "keep_tombstones is 'x': expected a whole number"),
        ({"keep_tombstones": 1.5, "order_by": "n"}, "keep_tombstones is 1.5: expected a whole number"),
        ({"keep_tombstones": True, "order_by": "n"}, "keep_tombstones is True: expected a whole number"),
        ({"order_by": 5}, "order_by is 5: expected the name of a column"),
        ({"order_by": "*"}, "ordering column name '*' is not safe"),
        ({"changes": "x"}, "changes is 'x': expected a change format"),
        ({"changes": Upserts}, "expected a change format"),
        ({"initial": "x"}, "initial is 'x': expected a bulk snapshot"),
        ({"initial": ParquetSnapshot}, "expected a bulk snapshot"),
        ({"compaction": "x"}, "compaction is 'x': expected a DeltaCompaction"),
        ({"compaction": ""}, "compaction is '': expected a DeltaCompaction"),
        ({"persistent": "no"}, "persistent is 'no': expected True or False"),
        ({"discard": "x"}, "discard='x': expected a DiscardPolicy"),
        ({"extractor": "x"}, "extractor='x': expected an extractor"),
        ({"extractor": Projection}, "expected an extractor"),
        ({"bootstrap": "no"}, "bootstrap='no': expected True or False"),
        ({"on_bad_change": DeadLetters("lake.people")}, "dead letters to its own input lake.people"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_the_names_of_both(change, message):
    with pytest.raises(ConfigurationError) as caught:
        unbounded_dataset(**{"name": "people", "input": "lake.people", "key": "k", "partitions": 2, **change})
    assert message in str(caught.value)
    assert "dataset 'people'" in str(caught.value)
    assert caught.value.argument or caught.value.next_step


@pytest.mark.parametrize("change", [{"bootstrap": "no"}, {"extractor": "x"}, {"discard": "x"}, {"discard": 0}])
def test_a_bounded_dataset_is_refused_alike(change):
    with pytest.raises(ConfigurationError, match=f"dataset 'planes' has {next(iter(change))}="):
        bounded_dataset("planes", **{"input": "lake.planes", "key": "a", "partitions": 8, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fraction": float("nan")}, "fraction=nan: expected more than 0"),
        ({"fraction": 0}, "fraction=0: expected more than 0"),
        ({"inside_commit": "x"}, "inside_commit='x': expected True or False"),
    ],
)
def test_a_compaction_policy_that_cannot_work_is_refused(change, message):
    with pytest.raises(ConfigurationError, match=message):
        DeltaCompaction(**change)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: ParquetSnapshot(5), "a Parquet snapshot has url=5"),
        (lambda: ParquetSnapshot("x", position=5), "a Parquet snapshot has position=5: expected the next offset"),
        (lambda: ParquetSnapshot("x", position=None), "position=None: expected the next offset"),
        (lambda: ParquetSnapshot("x", position={}), "position={}: expected the next offset"),
        (lambda: ParquetSnapshot("x", position={"0": None}), "position={'0': None}: expected the next offset"),
        (lambda: QuerySnapshot(sql="x", position=5), "a query snapshot has position=5"),
        (lambda: QuerySnapshot(sql=5, position={"0": "1"}), "a query snapshot has sql=5"),
        (lambda: QuerySnapshot(query="x", position={"0": "1"}), "a query snapshot has query='x'"),
        (lambda: PostgresSnapshot("DSN", "SELECT 1", position=5), "a PostgreSQL snapshot has position=5"),
        (lambda: PostgresSnapshot(5, "SELECT 1", position={"0": "1"}), "a PostgreSQL snapshot has dsn_env=5"),
    ],
)
def test_a_bulk_snapshot_that_cannot_work_is_refused(declare, message):
    with pytest.raises(ConfigurationError) as caught:
        declare()
    assert message in str(caught.value)


def test_a_bulk_snapshot_can_be_declared_anew_with_another_field():
    snapshot = ParquetSnapshot("x", position={"0": 1, "1": "2"})
    assert replace(snapshot, url="y") == ParquetSnapshot("y", position={"0": "1", "1": "2"})


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigurationError, match="kind 'endless'"):
        AdjunctDataset("planes", "endless", "lake.planes", ("a",), ("a",), 8)  # type: ignore[arg-type]


def test_declaring_imports_nothing_heavy():
    code = (
        "import sys; import dagster_adjunct.assets.declaration.dataset, dagster_adjunct.orchestration.planner; "
        "import dagster_adjunct.orchestration.application.application; "
        "print([m for m in ('pyspark', 'pandas', 'boto3') if m in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"
