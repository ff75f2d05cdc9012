"""What a plan says of how datasets are advanced: what needs Spark, wrong paths, folders without
files.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.change_formats import (
    DebeziumUnwrapped,
    OperationColumn,
    Upserts,
)
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    FileSource,
    QuerySource,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope, MaxwellEnvelope
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.declaration.snapshots import ParquetSnapshot
from dagster_adjunct.assets.sources.entries import open_changes
from dagster_adjunct.assets.unbounded.changes import list_change_spark_needs
from dagster_adjunct.assets.validation.validators import min_rows, sql_check
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.stream_facts import StreamFacts
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import build_plan, plan_application
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams

ROWS = Schema.of(id="bigint", op="string", gone="string", at="timestamp")
ENVELOPES = Schema.of(id="bigint", value="string")
COLUMNS = "id BIGINT, n BIGINT"
FACTS = {
    facts.name: facts
    for facts in (
        StreamFacts("lake.in", 1, schema=Schema.of(id="bigint")),
        StreamFacts("lake.rows", 2, ("id",), "spark-murmur3", ROWS),
        StreamFacts("lake.sums", 2, ("id",), "spark-murmur3", Schema.of(id="bigint", x="double")),
        StreamFacts("lake.envelopes", 2, ("id",), "spark-murmur3", ENVELOPES),
        StreamFacts("kafka.rows", 2, ("id",), "kafka-murmur2", ROWS, in_arrow=False),
    )
}
FILES = FileSource("/nowhere", "csv", Schema.of(id="bigint"))
DEAD = DeadLetters("lake.dead")


def plan_of(*datasets: AdjunctDataset, **more: Any) -> ExecutionPlan:
    app = Application("app", **{"engine": "auto", **more})
    stream = app.input_stream("lake.in")
    for dataset in datasets:
        app.table(dataset)
    stream.send_to(app.output_stream("lake.out", partitions=1))
    return build_plan(app, FACTS)


def needs_of(dataset: AdjunctDataset) -> str:
    (advance,) = plan_of(dataset).engine.advances
    return "; ".join(advance.needs_spark)


def follow(stream: str = "lake.rows", **declared: Any) -> AdjunctDataset:
    return unbounded_dataset("d", input=stream, key="id", partitions=2, **declared)


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        (follow(), ""),
        (follow(changes=OperationColumn("op")), ""),
        (follow(changes=DebeziumUnwrapped("gone", "op"), on_bad_change=DEAD), ""),
        (follow("lake.sums", on_bad_change=DEAD), "dead letters of records with fractions"),
        (
            follow("lake.envelopes", changes=DebeziumEnvelope(COLUMNS)),
            "the form of its changes (Debezium envelopes",
        ),
        (
            follow("lake.envelopes", changes=MaxwellEnvelope(COLUMNS)),
            "the form of its changes (Maxwell envelopes",
        ),
        (follow("kafka.rows", changes=Upserts()), "stream system 'kafka'"),
        (follow(initial=ParquetSnapshot("export")), "its bulk snapshot"),
        (follow(persistent=False), "persistent=False"),
        (
            follow(extractor=Projection("id BIGINT, n INT", select={"n": "length(op)"})),
            "the extractor",
        ),
        (bounded_dataset("d", input="lake.rows", key="id", partitions=2), ""),
        (bounded_dataset("d", input="kafka.rows", key="id", partitions=2), "stream system 'kafka'"),
        (bounded_dataset("d", input=FILES, key="id", partitions=2), ""),
        (
            bounded_dataset(
                "d",
                input=FILES,
                key="id",
                partitions=2,
                validators=[min_rows(1), sql_check("n", "id > 0")],
            ),
            "its validators n",
        ),
        (
            bounded_dataset(
                "d", input=QuerySource("SELECT 1L AS id", FILES.schema), key="id", partitions=2
            ),
            "which is SQL",
        ),
        (bounded_dataset("d", input=QuerySource(print, FILES.schema), key="id", partitions=2), ""),
    ],
)
def test_the_plan_says_what_each_kind_of_dataset_needs_to_advance(
    dataset: AdjunctDataset, named: str
) -> None:
    plan = plan_of(dataset)
    assert [advance.dataset for advance in plan.engine.advances] == ["d"]
    needed = needs_of(dataset)
    assert (named in needed) if named else (needed == "")
    said_messages = (
        f"Dataset d is advanced with Spark, because of {needed}."
        if named
        else "few records are advanced without"
    )
    assert said_messages in plan.render()
    assert "Dataset d is advanced" not in plan_of(dataset, engine="spark").render()
    assert ExecutionPlan.from_json(plan.to_json()) == plan


def test_a_history_is_advanced_with_spark_only_if_there_is_a_session() -> None:
    plan = plan_of(follow(history=dt.timedelta(days=1)))
    (advance,) = plan.engine.advances
    assert (advance.needs_spark, len(advance.uses_spark)) == ((), 1)
    assert "Dataset d is advanced with Spark unless the master is none" in plan.render()
    assert ExecutionPlan.from_json(plan.to_json()) == plan
    (other,) = plan_of(
        follow("kafka.rows", changes=Upserts(), history=dt.timedelta(days=1))
    ).engine.advances
    assert (len(other.needs_spark), len(other.uses_spark)) == (1, 1)


def test_local_tables_are_written_and_not_advanced() -> None:
    app = Application("app", engine="auto")
    table = app.local_table("d", schema=Schema.of(id="bigint"), key="id", partitions=1)
    app.input_stream("lake.in").send_to(table)
    assert build_plan(app, FACTS).engine.advances == ()


def test_what_the_plan_says_is_what_the_advance_needs(tmp_path: Path) -> None:
    streams = LakeStreams(open_lake(tmp_path / "lake"))
    streams.create("envelopes", schema=ENVELOPES, key=["id"], partitions=2)
    dataset = follow("lake.envelopes", changes=DebeziumEnvelope(COLUMNS), on_bad_change=DEAD)
    opened = open_changes({"lake": streams}, dataset)
    assert needs_of(dataset) == "; ".join(list_change_spark_needs(opened))


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("source.lns", "source.lsn"), ("source.lsm", "source.lsn"), ("source.LSN", "source.lsn"),
        ("source.comit_lsn", "source.commit_lsn"), ("source.scm", "source.scn"), ("source.ts_m", "source.ts_ms"),
        ("source.gtids", "source.gtid"),
    ],
)  # fmt: skip
def test_a_misspelt_path_is_an_error_of_the_plan_that_names_the_right_one(
    path: str, meant: str
) -> None:
    with pytest.raises(PlanningError) as refused:
        plan_of(follow("lake.envelopes", changes=DebeziumEnvelope(COLUMNS), order_by=path))
    assert (refused.value.dataset, refused.value.column) == ("d", path)
    assert f"Did you mean {meant!r}?" in refused.value.next_step


@pytest.mark.parametrize(
    "order",
    [
        "source.lsn",
        ["source.file", "source.pos"],
        ["source.commit_lsn", "source.change_lsn"],
        ["source.ts_ms", "source.ord"],
        "source.scn",
        "ts_ms",
        "source.commit_ts",
    ],
)
def test_paths_that_connectors_send_are_not_noted(order: Any) -> None:
    plan = plan_of(follow("lake.envelopes", changes=DebeziumEnvelope(COLUMNS), order_by=order))
    assert not [note for note in plan.notes if "ordered by" in note]


def test_a_path_that_no_connector_is_known_to_send_is_noted() -> None:
    plan = plan_of(
        follow(
            "lake.envelopes", changes=DebeziumEnvelope(COLUMNS), order_by="source.our_own_number"
        )
    )
    assert [note for note in plan.notes if "ordered by source.our_own_number" in note]


def test_a_folder_without_files_is_noted_and_one_with_files_is_not(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake")
    LakeStreams(lake).create("in", schema=Schema.of(id="bigint"), partitions=1)

    def notes_of(folder: Path) -> list[str]:
        app = Application("app")
        app.input_stream("lake.in").send_to(app.output_stream("lake.out", partitions=1))
        source = FileSource(str(folder), "csv", Schema.of(id="bigint"))
        app.table(bounded_dataset("d", input=source, key="id", partitions=2))
        return [
            note for note in plan_application(app, lake=lake).notes if "waits for files" in note
        ]

    (note,) = notes_of(tmp_path / "missing")
    assert str(tmp_path / "missing") in note
    (tmp_path / "there" / "v1").mkdir(parents=True)
    assert notes_of(tmp_path / "there")
    (tmp_path / "there" / "v1" / "part.csv").write_text("id\n1\n")
    assert notes_of(tmp_path / "there") == []
