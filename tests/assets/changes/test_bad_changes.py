"""Changes that can't be applied: the job fails at one, or they go to the dead letters, once
each.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.change_formats import OperationColumn
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.unbounded.changes import select_applicable
from dagster_adjunct.assets.unbounded.dead_letters import (
    DEAD_LETTERS,
    build_dead_letters,
    send_dead_letters,
)
from dagster_adjunct.resources.errors import BadChangeError, DatasetError, ProducerConflictError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from tests.assets.changes.changing import VALUES, changes_of, dataset, rows_of, send, stream
from tests.assets.conftest import World

RECORDS = Schema.of(id="bigint", op="string", data="binary")
DEAD = dataset(changes=OperationColumn(), on_bad_change=DeadLetters("lake.dead"))


def split(world: World, spec: AdjunctDataset) -> tuple[Any, Any]:
    """Return the changes of the stream that can be applied, and the dead letters of the others."""
    changes = changes_of(world, spec)
    return select_applicable(changes, "table", set_aside=True), build_dead_letters(
        changes, spec, ()
    )


def test_a_bad_change_fails_the_job_and_is_named(either: World) -> None:
    stream(either, RECORDS, [(1, "c", b"\x01"), (2, "x", b"\x02"), (3, "y", None)])
    changes = changes_of(either, dataset(changes=OperationColumn()))
    with pytest.raises(BadChangeError) as caught, translate_spark_errors():
        rows_of(select_applicable(changes, "table", set_aside=False))
    assert (
        caught.value.problem
        == "dataset 'table': the change at offset 1 of partition 0 can't be applied: unknown"
        " operation 'x'."
    )
    assert "on_bad_change=DeadLetters(STREAM)" in caught.value.next_step
    assert caught.value.facts == {"dataset": "table"}


def test_an_advance_that_meets_a_bad_change_commits_nothing(sparkling: World) -> None:
    stream(sparkling, VALUES, [('{"op":"c","after":{"id":1}}',)])
    spec = dataset(changes=DebeziumEnvelope("id BIGINT"))
    sparkling.advance(spec)
    send(sparkling, [('{"op":"c","after":{"id":2}}',), ('{"op":"c","after":{"id":"x"}}',)])
    with pytest.raises(
        BadChangeError, match="offset 2 of partition 0 can't be applied: column 'id' is 'x'"
    ):
        sparkling.advance(spec)
    assert sparkling.view(spec).get(2) is None


def test_no_reason_reports_a_value_where_a_column_is_sensitive(sparkling: World) -> None:
    texts = [
        '{"op":"c","after":{"id":"ada@x.org"}}',
        "ada@x.org",
        '{"op":"ada@x.org","after":{"id":1}}',
    ]
    stream(sparkling, VALUES, [(text,) for text in texts])
    hidden = dataset(
        changes=DebeziumEnvelope("id BIGINT"),
        on_bad_change=DeadLetters("lake.dead"),
        sensitive=["id"],
    )
    reasons = [row["reason"] for row in split(sparkling, hidden)[1].orderBy("offset").collect()]
    assert reasons == [
        "column 'id' is a hidden value, declared bigint",
        "not JSON: a hidden value",
        "unknown operation a hidden value",
    ]


def test_dead_letters_have_the_place_the_reason_and_the_record(either: World) -> None:
    stream(either, RECORDS, [(1, "c", b"\x01"), (2, "x", b"\x02"), (None, "c", None)])
    good, bad = split(either, DEAD)
    assert [row["id"] for row in rows_of(good)] == [1]
    sent = send_dead_letters(either.systems, DEAD, bad, producer="dead-table", sequence=3)
    assert sent == 2
    assert either.streams.info("dead").schema == DEAD_LETTERS
    letters = either.streams.read_arrow(
        either.streams.all_ranges("dead"), DEAD_LETTERS.names
    ).to_pylist()
    reported = [
        {name: letter[name] for name in DEAD_LETTERS.names if name not in ("value", "at")}
        for letter in letters
    ]
    assert reported == [
        {
            "dataset": "table",
            "stream": "lake.changes",
            "partition": 0,
            "offset": 1,
            "reason": "unknown operation 'x'",
        },
        {
            "dataset": "table",
            "stream": "lake.changes",
            "partition": 0,
            "offset": 2,
            "reason": "null key column 'id'",
        },
    ]
    assert [json.loads(letter["value"]) for letter in letters] == [
        {"id": 2, "op": "x", "data": "Ag=="},
        {"id": None, "op": "c", "data": None},
    ]
    assert all(
        dt.datetime.now(dt.UTC) - letter["at"] < dt.timedelta(minutes=5) for letter in letters
    )


def test_dead_letters_are_sent_once_however_often_they_are_sent(either: World) -> None:
    stream(either, RECORDS, [(1, "x", None)])
    for _ in range(2):
        _, bad = split(either, DEAD)
        assert send_dead_letters(either.systems, DEAD, bad, producer="dead-table", sequence=3) == 1
    assert either.streams.read_arrow(either.streams.all_ranges("dead")).num_rows == 1
    send(either, [(2, "x", None)])
    with pytest.raises(ProducerConflictError):
        send_dead_letters(
            either.systems, DEAD, split(either, DEAD)[1], producer="dead-table", sequence=3
        )


def test_a_record_is_one_dead_letter_whatever_number_of_its_changes_is_bad(
    sparkling: World,
) -> None:
    moved = {"op": "u", "before": {"id": None, "n": 1}, "after": {"id": None, "n": 2}}
    stream(sparkling, VALUES, [(json.dumps(moved),)])
    form = DebeziumEnvelope("id BIGINT, n BIGINT")
    spec = dataset(key=["id", "n"], changes=form, on_bad_change=DeadLetters("lake.dead"))
    assert changes_of(sparkling, spec).count() == 2
    assert [row["reason"] for row in rows_of(split(sparkling, spec)[1])] == ["null key column 'id'"]


def test_a_stream_that_is_something_else_takes_no_dead_letters(either: World) -> None:
    stream(either, RECORDS, [(1, "x", None)])
    either.streams.create("dead", schema=VALUES, partitions=1)
    _, bad = split(either, DEAD)
    with pytest.raises(
        DatasetError, match=r"lake\.dead, which is not a stream of dead letters: dataset is missing"
    ):
        send_dead_letters(either.systems, DEAD, bad, producer="dead-table", sequence=3)
    elsewhere = dataset(changes=OperationColumn(), on_bad_change=DeadLetters("other.dead"))
    with pytest.raises(DatasetError, match="no stream system 'other'"):
        send_dead_letters(either.systems, elsewhere, bad, producer="dead-table", sequence=3)


def test_an_advance_sets_bad_changes_aside_and_counts_them(either: World) -> None:
    stream(either, RECORDS, [(1, "c", b"\x01"), (2, "x", b"\x02")])
    report = either.advance(DEAD)
    assert report.counters["quarantined"] == 1
    assert either.view(DEAD).get(1) == {"id": 1, "data": b"\x01"}
    send(either, [(2, "c", b"\x03"), (None, "c", None)])
    assert either.advance(DEAD).counters["quarantined"] == 1
    assert either.view(DEAD).get(2) == {"id": 2, "data": b"\x03"}
    assert either.streams.read_arrow(either.streams.all_ranges("dead")).num_rows == 2
