"""`AdjunctDataset`: what a declaration holds, and which ones are refused."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from assets.dataset import AdjunctDataset, bounded_dataset, unbounded_dataset
from resources.errors import ConfigurationError, InvalidNameError


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
        ({"partitions": 0}, "0 partitions: expected 1 to 100,000"),
        ({"partitions": 100_001}, "100001 partitions"),
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
    assert caught.value.next_step


@pytest.mark.parametrize("change", [{"name": "a/b"}, {"name": "../x"}, {"input": "planes"}, {"input": "lake.a/b"}])
def test_an_unsafe_name_is_refused(change):
    with pytest.raises(InvalidNameError):
        unbounded_dataset(**{"name": "planes", "input": "lake.planes", "key": "a", "partitions": 1, **change})


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigurationError, match="kind 'endless'"):
        AdjunctDataset("planes", "endless", "lake.planes", ("a",), ("a",), 8)  # type: ignore[arg-type]


def test_declaring_imports_nothing_heavy():
    code = (
        "import sys; import assets.dataset, orchestration.application, orchestration.planner; "
        "print([m for m in ('pyspark', 'pandas', 'boto3', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
