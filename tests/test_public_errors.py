"""What callers react to is in fields: the errors of promises that a user meets, each with what
it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    Schema,
    SystemStreamPartition,
    bounded_dataset,
    open_dataset,
    open_lake,
    plan_application,
    systems_for,
    unbounded_dataset,
)
from dagster_adjunct.errors import (
    AdjunctError,
    ConfigurationError,
    DatasetNotFoundError,
    InvalidNameError,
    LakeNotFoundError,
    OffsetOutOfRangeError,
    PartitionCountMismatchError,
    ProducerConflictError,
    SchemaMismatchError,
    StreamExistsError,
    StreamNotFoundError,
)
from dagster_adjunct.kafka import KafkaSettings
from dagster_adjunct.maintenance import delete_dataset, delete_stream
from dagster_adjunct.repartitioning import repartition_stream
from dagster_adjunct.startpoints import StartpointSpecific, resolve_startpoint_to_offset
from dagster_adjunct.streams import Retention, open_system

SCHEMA = Schema.of(k="string", n="int")
S0 = SystemStreamPartition("lake", "s", 0)


@pytest.fixture(scope="module")
def lake() -> Lake:
    lake = open_lake("memory://public-errors")
    streams = LakeStreams(lake)
    streams.create("s", schema=SCHEMA, key=["k"], partitions=4)
    streams.create("d", schema=SCHEMA, key=["k"], partitions=2)
    streams.append("s", _rows(1), producer="p", sequence=1)
    return lake


def _rows(n: int) -> pa.Table:
    return pa.table({"k": ["a"], "n": pa.array([n], pa.int32())})


def _joined(lake: Lake) -> object:
    app = Application("shop")
    dataset = bounded_dataset("items", input="lake.d", key="k", partitions=2)
    app.input_stream("lake.s").join(
        app.table(dataset), on="k", how="inner", select=["n as m"]
    ).send_to(app.output_stream("lake.out", partitions=4, key="k"))
    return plan_application(app, systems=systems_for(app, lake=lake))


@pytest.mark.parametrize(
    ("call", "kind", "facts"),
    [
        (
            lambda lake: open_lake("memory://empty", create=False),
            LakeNotFoundError,
            {"url": "memory://empty"},
        ),
        (lambda lake: open_dataset(lake, "planes"), DatasetNotFoundError, {"dataset": "planes"}),
        (
            lambda lake: delete_dataset(lake, "planes", reason="r", by="b"),
            DatasetNotFoundError,
            {"dataset": "planes"},
        ),
        (lambda lake: LakeStreams(lake).info("t"), StreamNotFoundError, {"stream": "lake.t"}),
        (
            lambda lake: delete_stream(lake, "t", reason="r", by="b"),
            StreamNotFoundError,
            {"stream": "lake.t"},
        ),
        (
            lambda lake: LakeStreams(lake).create("s", schema=SCHEMA, key=["k"], partitions=8),
            StreamExistsError,
            {"stream": "lake.s"},
        ),
        (
            lambda lake: LakeStreams(lake).append("s", _rows(2), producer="p", sequence=1),
            ProducerConflictError,
            {"stream": "lake.s", "producer": "p", "sequence": 1},
        ),
        (
            lambda lake: resolve_startpoint_to_offset(
                LakeStreams(lake), S0, StartpointSpecific("99")
            ),
            OffsetOutOfRangeError,
            {"stream": "lake.s", "partition": 0, "offset": "99", "oldest": "0"},
        ),
        (
            _joined,
            PartitionCountMismatchError,
            {"application": "shop", "counts": (("lake.s", 4), ("lake.d", 2))},
        ),
        (lambda lake: open_lake(5), ConfigurationError, {"argument": "url"}),
        (
            lambda lake: bounded_dataset("d", input="lake.d", kex="k"),
            ConfigurationError,
            {"argument": "kex"},
        ),
        (
            lambda lake: bounded_dataset("d", input="lake.d"),
            ConfigurationError,
            {"argument": "key"},
        ),
        (lambda lake: Retention(max_bytes=0), ConfigurationError, {"argument": "max_bytes"}),
        (
            lambda lake: bounded_dataset("d", input="lake.d", key="k", partitions=0),
            ConfigurationError,
            {"argument": "partitions", "dataset": "d"},
        ),
        (
            lambda lake: unbounded_dataset(
                "d", input="lake.d", key="k", partitions=1, max_age=timedelta(0)
            ),
            ConfigurationError,
            {"argument": "max_age", "dataset": "d"},
        ),
        (
            lambda lake: Application("shop").input_stream("lake.s", on_lost="skip"),
            ConfigurationError,
            {"argument": "on_lost"},
        ),
        (
            lambda lake: repartition_stream(lake, "s", 4, reason="r", by="b"),
            ConfigurationError,
            {"argument": "partitions", "stream": "lake.s"},
        ),
        (
            lambda lake: KafkaSettings("events", "localhost:9", {"sasl.password": "secret"}),
            ConfigurationError,
            {"setting": "sasl.password"},
        ),
        (lambda lake: open_system(lake, "moon"), ConfigurationError, {"system": "moon"}),
        (lambda lake: SystemStreamPartition.parse("lake.s"), InvalidNameError, {"name": "lake.s"}),
        (
            lambda lake: LakeStreams(lake).create("a.b", schema=SCHEMA, key=["k"], partitions=1),
            InvalidNameError,
            {"name": "a.b"},
        ),
        (
            lambda lake: LakeStreams(lake).append(
                "s", _rows(1).drop_columns("n"), producer="p", sequence=2
            ),
            SchemaMismatchError,
            {"column": "n"},
        ),
    ],
)
def test_what_an_error_is_about_is_in_its_fields(
    lake: Lake, call: Callable[[Lake], object], kind: type[AdjunctError], facts: Mapping[str, Any]
) -> None:
    with pytest.raises(kind) as caught:
        call(lake)
    assert type(caught.value) is kind
    assert caught.value.facts | facts == caught.value.facts
    for name, value in facts.items():
        assert getattr(caught.value, name) == value
