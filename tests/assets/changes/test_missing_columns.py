"""A declared column that a change does not have is never null in silence, nor is one whose name
has another case.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope, MaxwellEnvelope
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.resources.errors import BadChangeError, ConfigurationError
from tests.assets.changes.changing import (
    VALUES,
    changes_of,
    dataset,
    envelopes,
    problems,
    rows_of,
    send,
)
from tests.assets.conftest import World

pytestmark = pytest.mark.spark
DEBEZIUM = DebeziumEnvelope("id BIGINT, n INT, price DECIMAL(9,2)", decimals="string")
WHOLE = {"id": 1, "n": 5, "price": "20.00"}
GENERATED = {"id": 1, "n": 6}


def change(
    op: str, after: dict[str, Any] | None, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"op": op, "before": before, "after": after, "source": {"lsn": 1}}


def test_a_column_that_a_change_lacks_is_a_bad_change_by_its_name(sparkling: World) -> None:
    envelopes(
        sparkling,
        *(change(op, GENERATED) for op in ("c", "r", "u")),
        {"payload": change("u", GENERATED), "schema": {}},
        change("u", WHOLE | {"price": None}),
        change("d", None, {"id": 1}),
        None,
        change("u", {"n": 6, "price": "1.00"}),
    )
    found = problems(sparkling, dataset(changes=DEBEZIUM))
    assert sorted(found) == [0, 1, 2, 3, 7]
    for offset in range(4):
        assert found[offset].startswith("the row after it has no column 'price': ")
        assert "on_missing='null'" in found[offset]
    assert found[7] == "null key column 'id'", "on_missing is no remedy for a key"
    assert sorted(problems(sparkling, dataset(changes=replace(DEBEZIUM, on_missing="null")))) == [7]


def test_the_change_is_a_letter_the_others_are_applied_and_without_letters_it_fails(
    sparkling: World,
) -> None:
    lines = [
        (json.dumps(one), False)
        for one in (change("r", WHOLE), change("u", GENERATED), change("c", {**WHOLE, "id": 2}))
    ]
    sparkling.streams.create("changes", schema=VALUES, partitions=1)
    for line in lines:
        send(sparkling, [line])
    with pytest.raises(BadChangeError, match="'price'"):
        sparkling.advance(dataset(changes=DEBEZIUM))
    spec = dataset(changes=DEBEZIUM, on_bad_change=DeadLetters("lake.dead"))
    assert sparkling.advance(spec).counters["quarantined"] == 1
    assert {key: entry["n"] for key, entry in sparkling.view(spec).items()} == {1: 5, 2: 5}


def test_a_column_that_was_added_later_is_declared_alone(sparkling: World) -> None:
    form = replace(DEBEZIUM, on_missing={"price": "null"})
    assert form == pickle.loads(pickle.dumps(form))
    assert hash(form) == hash(replace(DEBEZIUM, on_missing={"price": "null"}))
    envelopes(sparkling, change("u", GENERATED), change("u", {"id": 1, "price": "1.00"}))
    assert sorted(problems(sparkling, dataset(changes=form))) == [1], "n is refused"
    kept = replace(DEBEZIUM, on_missing={"price": "keep"})
    assert (form.completes, kept.completes) == (False, True)
    rows = {
        row["__offset"]: row["__kept"]
        for row in rows_of(changes_of(sparkling, dataset(changes=kept)))
    }
    assert rows[0] == ["price"]
    with pytest.raises(ConfigurationError) as refused:
        replace(DEBEZIUM, on_missing={"prize": "null"})
    assert (refused.value.argument, refused.value.column) == ("on_missing", "prize")


@pytest.mark.parametrize("rule", ["refuse", "null", "keep"])
def test_a_name_in_another_case_is_named_whatever_is_declared(sparkling: World, rule: Any) -> None:
    renamed = {"id": 1, "N": 6, "price": "1.00"}
    envelopes(
        sparkling, change("c", renamed), change("u", renamed), change("u", renamed | {"n": None})
    )
    found = problems(sparkling, dataset(changes=replace(DEBEZIUM, on_missing=rule)))
    assert found == dict.fromkeys(
        (0, 1), "the row after it has no column 'n', but 'N' in another case"
    )


def test_maxwells_rows_are_held_against_the_declared_columns_too(sparkling: World) -> None:
    form = MaxwellEnvelope("id BIGINT, n INT")
    sent: list[Any] = [
        {"type": kind, "data": {"id": 1}}
        for kind in ("insert", "update", "bootstrap-insert", "delete")
    ]
    sent += [
        {"type": "update", "data": {"id": 1, "n": None}},
        {"type": "update", "data": {"id": 1, "N": 2}},
    ]
    envelopes(sparkling, *sent)
    found = problems(sparkling, dataset(changes=form))
    assert sorted(found) == [0, 1, 2, 5]
    assert "on_missing" in found[0]
    assert sorted(problems(sparkling, dataset(changes=replace(form, on_missing="null")))) == [5]


def test_a_field_that_a_document_lacks_is_null_unless_declared_otherwise(sparkling: World) -> None:
    form = DebeziumEnvelope("id BIGINT, name STRING", documents=True)
    after = [
        json.dumps(one) for one in ({"id": 1}, {"id": 1, "Name": "Ann"}, {"id": 1, "name": "Ann"})
    ]
    envelopes(sparkling, *(change("c", None) | {"after": text} for text in after))
    assert sorted(problems(sparkling, dataset(changes=form))) == [1]
    assert sorted(problems(sparkling, dataset(changes=replace(form, on_missing="refuse")))) == [
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("name", "reported"), [("total", "which have id, n"), ("N", "but 'n' in another case")]
)
def test_a_column_that_no_avro_schema_has_is_refused_when_declared(
    name: str, reported: str
) -> None:
    fields = [{"name": "id", "type": "long"}, {"name": "n", "type": "int"}]
    row = {"type": "record", "name": "Value", "fields": fields}
    sides = [
        {"name": "before", "type": ["null", row]},
        {"name": "after", "type": ["null", "Value"]},
    ]
    schema = json.dumps({"type": "record", "name": "Envelope", "fields": sides})
    assert (
        DebeziumEnvelope("id BIGINT, n INT", format="avro", avro_schema=schema).on_missing == "null"
    )
    with pytest.raises(ConfigurationError) as refused:
        DebeziumEnvelope(f"id BIGINT, {name} INT", format="avro", avro_schema=schema)
    assert (refused.value.argument, refused.value.column) == ("columns", name)
    assert reported in refused.value.problem
