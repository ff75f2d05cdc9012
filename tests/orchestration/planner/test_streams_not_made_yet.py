"""What a plan counts on of an output that is not there yet is what its system says, whatever the
system is called.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError, SchemaMismatchError
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings
from dagster_adjunct.resources.streams.kafka.streams import DeclaredTopics, KafkaStreams
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import NewStreams, StreamSystem
from tests.orchestration.offsets.fake_streams import WritableStreams

SCHEMA = Schema.of(k="string", v="int")


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


@pytest.fixture
def streams(lake: Lake) -> LakeStreams:
    streams = LakeStreams(lake)
    streams.create("s", schema=SCHEMA, key=["k"], partitions=2)
    return streams


def saying(new_streams: NewStreams | None) -> WritableStreams:
    fake = WritableStreams()
    if new_streams is not None:
        fake.capabilities = replace(fake.capabilities, new_streams=new_streams)
    return fake


def planned(streams: LakeStreams, fake: WritableStreams, app: Application) -> ExecutionPlan:
    systems: dict[str, StreamSystem] = {"lake": streams, "fake": fake}
    return plan_application(app, systems=systems)


def test_several_partitions_without_a_key_are_refused_where_the_system_says_so(
    streams: LakeStreams,
) -> None:
    app = Application("app")
    app.input_stream("lake.s").send_to(app.output_stream("fake.out", partitions=4))
    planned(streams, saying(None), app)
    with pytest.raises(PlanningError) as failure:
        planned(streams, saying(NewStreams(needs_key=True)), app)
    assert failure.value.operator == "send-to-2"
    assert failure.value.stream == "fake.out"


def test_columns_are_refused_where_the_system_says_which_there_are(streams: LakeStreams) -> None:
    app = Application("app")
    app.input_stream("lake.s").map("k", "to_timestamp_ntz(v) as vs").send_to(
        app.output_stream("fake.out", partitions=1)
    )
    planned(streams, saying(None), app)
    with pytest.raises(PlanningError) as failure:
        planned(streams, saying(NewStreams(typed=True)), app)
    assert failure.value.operator == "send-to-3"
    assert failure.value.column == "vs"


def test_records_lie_right_in_a_stream_whose_system_says_how_it_will_spread_them(
    streams: LakeStreams,
) -> None:
    app = Application("app")
    app.input_stream("lake.s").send_to(app.output_stream("fake.out", partitions=2, key="k"))
    (edge,) = [
        edge for edge in planned(streams, saying(None), app).streams if edge.name == "fake.out"
    ]
    assert edge.partitioner == "unknown"
    reported = planned(streams, saying(NewStreams("spark-murmur3")), app)
    (edge,) = [edge for edge in reported.streams if edge.name == "fake.out"]
    assert (edge.partitioner, reported.exchanges) == ("spark-murmur3", ())


def test_the_lake_is_what_it_says(streams: LakeStreams) -> None:
    assert streams.info("s").partitioner == streams.capabilities.new_streams.partitioner
    with pytest.raises(ConfigurationError) as failure:
        streams.check_create("t", schema=SCHEMA, partitions=4)
    assert failure.value.stream == "lake.t"


def test_kafka_is_what_it_says(lake: Lake) -> None:
    settings = KafkaSettings("main", "localhost:1")
    assert KafkaStreams.capabilities.new_streams == NewStreams(needs_key=True, typed=True)
    with pytest.raises(ConfigurationError) as failure:
        DeclaredTopics(lake, settings).check("t", SCHEMA, [], 4)
    assert failure.value.stream == "main.t"
    with pytest.raises(SchemaMismatchError):
        DeclaredTopics(lake, settings).check("t", Schema.of(vs="array<int>"), ["vs"], 1)


def test_a_stream_system_that_is_not_given_is_named_with_those_that_are() -> None:
    app = Application("app")
    app.input_stream("fake.s")
    for systems, there in (({}, "none"), ({"lake": LakeStreams(lake_in(InMemoryStore()))}, "lake")):
        with pytest.raises(
            ConfigurationError, match=f"no stream system 'fake': it has {there}"
        ) as caught:
            plan_application(app, systems=systems)
        assert caught.value.application == "app"
