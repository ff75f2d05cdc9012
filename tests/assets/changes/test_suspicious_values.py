"""What the first changes say against the declared encodings of decimals and times: refused where
the messages' schema says so, a warning where the values look like it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from dagster_adjunct import Schema
from dagster_adjunct.assets.unbounded.suspicious_values import (
    describe_suspicions,
    find_contradiction,
)
from dagster_adjunct.changes import DebeziumEnvelope, MaxwellEnvelope
from dagster_adjunct.errors import DatasetError
from tests.assets.changes.changing import dataset, envelopes
from tests.assets.conftest import World

COLUMNS = "id BIGINT, price DECIMAL(12,2), at TIMESTAMP, day DATE"
SCHEMA = Schema.from_ddl(COLUMNS, "a test")
DECIMAL = "org.apache.kafka.connect.data.Decimal"
MILLIS, MICROS = 1_764_000_000_000, 1_764_000_000_000_000


def envelope(**fields: Any) -> dict[str, Any]:
    """Return a message of the JSON converter with its schema."""
    row = [{"field": name, **kind} for name, kind in fields.items()]
    after = {"type": "struct", "field": "after", "fields": row}
    return {"schema": {"type": "struct", "fields": [after]}, "payload": {"op": "c", "after": {}}}


CONTRADICTIONS = {
    "another scale": ({"price": {"name": DECIMAL, "parameters": {"scale": "4"}}}, "4 digits"),
    "another unit": ({"at": {"name": "io.debezium.time.Timestamp"}}, "counts millis"),
    "nanoseconds": ({"at": {"name": "io.debezium.time.NanoTimestamp"}}, "counts nanos"),
    "years": ({"day": {"name": "io.debezium.time.Year"}}, "is a year"),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_schema_in_the_messages_that_contradicts_the_declaration_is_found(kind: str) -> None:
    fields, said_messages = CONTRADICTIONS[kind]
    form = DebeziumEnvelope(COLUMNS, decimals="precise", timestamps="micros")
    found = find_contradiction(form, SCHEMA, [envelope(), envelope(**fields)])
    assert found is not None
    assert said_messages in found


def test_a_schema_that_fits_the_declaration_and_a_message_without_one_are_accepted() -> None:
    form = DebeziumEnvelope(COLUMNS, decimals="precise", timestamps="micros")
    fitting = envelope(
        price={"name": DECIMAL, "parameters": {"scale": "2"}},
        at={"name": "io.debezium.time.MicroTimestamp"},
        day={"name": "io.debezium.time.Date"},
    )
    odd = [{"schema": None}, {"schema": {"fields": [None, {"field": "after", "fields": None}]}}]
    assert find_contradiction(form, SCHEMA, [fitting, {"op": "c"}, *odd]) is None
    text = DebeziumEnvelope(COLUMNS, decimals="string", timestamps="micros")
    other = envelope(price={"name": DECIMAL, "parameters": {"scale": "4"}})
    assert find_contradiction(text, SCHEMA, [other]) is None


@pytest.mark.parametrize("form", [DebeziumEnvelope, MaxwellEnvelope])
def test_times_near_1970_are_reported_also_if_one_in_ten_stands_for_none(form: Any) -> None:
    declared = form("id BIGINT, at TIMESTAMP", timestamps="micros")
    schema = Schema.of(id="bigint", at="timestamp")
    rows = [{"id": number, "at": MILLIS} for number in range(9)]
    rows.append({"id": 9, "at": 253_402_214_400_000_000})  # the year 9999
    (reported,) = describe_suspicions(declared, schema, rows)
    assert "within a month of 1970" in reported
    right = [{"id": number, "at": MICROS} for number in range(9)]
    assert list(describe_suspicions(declared, schema, [*right, rows[0]])) == []


@pytest.mark.spark
def test_a_table_of_another_scale_is_not_built_by_a_wrong_factor(sparkling: World) -> None:
    message = envelope(price={"name": DECIMAL, "parameters": {"scale": "4"}})
    message["payload"]["after"] = {"id": 1, "price": "AZKo"}  # 10.3080
    envelopes(sparkling, message)
    form = DebeziumEnvelope("id BIGINT, price DECIMAL(12,2)", decimals="precise")
    with pytest.raises(DatasetError, match="4 digits after the point"):
        sparkling.advance(dataset(changes=form))


@pytest.mark.spark
def test_times_that_count_a_smaller_unit_than_declared_are_bad_changes(sparkling: World) -> None:
    envelopes(sparkling, {"op": "c", "after": {"id": 1, "at": MICROS}})
    form = DebeziumEnvelope("id BIGINT, at TIMESTAMP", timestamps="millis")
    with pytest.raises(DatasetError) as reported:
        sparkling.advance(dataset(changes=form))
    assert json.dumps(MICROS) in str(reported.value)
