from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    InvalidNameError,
    MalformedDocumentError,
    SchemaMismatchError,
    StreamExistsError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy, Retention
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.resources.streams.stream_helpers import SCHEMA


def test_creating_a_stream_twice_changes_nothing(streams: LakeStreams) -> None:
    first = streams.create("s", schema=SCHEMA, key=["k"], partitions=4)
    assert streams.create("s", schema=SCHEMA, key=["k"], partitions=4) == first
    assert streams.list_streams() == ["s"]
    assert streams.describe("s")["commits"] == 1
    assert first.partitioner == "spark-murmur3"
    assert [str(ssp) for ssp in streams.partitions("s")] == [
        "lake.s.0",
        "lake.s.1",
        "lake.s.2",
        "lake.s.3",
    ]


def test_another_declaration_is_refused_with_its_differences(streams: LakeStreams) -> None:
    streams.create("s", schema=SCHEMA, key=["k"], partitions=4)
    with pytest.raises(StreamExistsError) as caught:
        streams.create("s", schema=Schema.of(k="string", v="int"), key=["k"], partitions=8)
    assert "v is int, was bigint" in str(caught.value)
    assert "partitions is 8, expected 4" in str(caught.value)


def test_policies_are_changed_by_configure(streams: LakeStreams) -> None:
    streams.create("s", schema=SCHEMA, key=["k"], partitions=1)
    retention, compaction = Retention(max_age=timedelta(days=7)), CompactionPolicy(min_segments=4)
    streams.configure("s", retention=retention, compaction=compaction)
    streams.create(
        "s", schema=SCHEMA, key=["k"], partitions=1, retention=retention, compaction=compaction
    )
    assert streams.state("s").state.declaration.retention == retention


def test_a_stream_is_declared_again_without_what_was_configured_since(streams: LakeStreams) -> None:
    schema = Schema.of(k="string", at="timestamp")
    streams.create("s", schema=schema, key=["k"], partitions=1, timestamp="at")
    week = Retention(max_age=timedelta(days=7))
    streams.configure("s", retention=week, compaction=None)
    streams.create("s", schema=schema, key=["k"], partitions=1)
    declared = streams.state("s").state.declaration
    assert (declared.retention, declared.timestamp) == (week, "at")
    with pytest.raises(StreamExistsError, match="retention is") as caught:
        streams.create(
            "s", schema=schema, key=["k"], partitions=1, retention=Retention(max_bytes=1)
        )
    assert caught.value.stream == "lake.s"


def test_a_declaration_that_can_not_work_says_why(streams: LakeStreams) -> None:
    with pytest.raises(ConfigurationError, match="no key and 4 partitions"):
        streams.create("s", schema=SCHEMA, partitions=4)
    with pytest.raises(ConfigurationError, match=r"partitions: .*greater than or equal to 1"):
        streams.create("s", schema=SCHEMA, key=["k"], partitions=0)
    with pytest.raises(SchemaMismatchError) as failure:
        streams.create("s", schema=Schema.of(x="double"), key=["x"], partitions=2)
    assert failure.value.facts == {"column": "x"}
    with pytest.raises(SchemaMismatchError) as failure:
        streams.create("s", schema=SCHEMA, key=["k"], partitions=2, timestamp="v")
    assert failure.value.facts == {"column": "v"}
    with pytest.raises(InvalidNameError) as refused:
        streams.create("a b", schema=SCHEMA, partitions=1)
    assert refused.value.facts == {"name": "a b"}
    assert "'a-b'" in refused.value.next_step
    assert streams.list_streams() == []


def test_a_stream_that_is_named_with_its_system_is_reported_its_name(streams: LakeStreams) -> None:
    records = SCHEMA.to_arrow().empty_table()
    for named in (
        lambda: streams.create("lake.s", schema=SCHEMA, partitions=1),
        lambda: streams.append("lake.s", records, producer="p", sequence=1),
        lambda: streams.all_ranges("lake.s"),
    ):
        with pytest.raises(InvalidNameError) as refused:
            named()
        assert (refused.value.name, refused.value.next_step) == ("lake.s", "Write 's'.")


def test_a_stream_that_is_not_there_names_those_that_are(streams: LakeStreams) -> None:
    streams.create("flights", schema=SCHEMA, partitions=1)
    with pytest.raises(StreamNotFoundError, match=r"no stream 'flihgts' .* Streams: flights"):
        streams.info("flihgts")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("next", [5], "its segments end at offsets [1], but its next offsets are [5]"),
        ("marked_until", [0, 0], "marked_until has 2 partitions, expected 1"),
        ("oldest", [], "oldest has 0 partitions, expected 1"),
    ],
)
def test_a_malformed_index_is_named_and_earlier_commits_stay_readable(
    streams: LakeStreams,
    records: Callable[..., pa.Table],
    field: str,
    value: list[int],
    problem: str,
) -> None:
    streams.create("s", schema=SCHEMA, partitions=1)
    streams.append("s", records(("a", 1)), producer="p", sequence=0)
    log = streams.log("s")
    commit = log.current()
    assert commit is not None
    body = {**commit.body, field: value}
    log.commit(commit, body, by="a careless tool")
    with pytest.raises(MalformedDocumentError) as caught:
        streams.upcoming([SystemStreamPartition("lake", "s", 0)])
    assert "manifests/000000000003-" in str(caught.value.document)
    assert problem in caught.value.problem
    assert log.read(commit.manifest_key).body == commit.body
