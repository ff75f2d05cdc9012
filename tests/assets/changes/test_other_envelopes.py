"""Envelopes that are not of rows as Debezium has them: MongoDB's documents, and what Maxwell
writes.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope, MaxwellEnvelope
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.changes.changing import (
    Change,
    as_record,
    dataset,
    decoded,
    envelopes,
    problems,
    stream,
)
from tests.assets.conftest import World

# -- MongoDB, as Debezium's documentation of its connector has it

DOCUMENTS = DebeziumEnvelope(
    "_id STRING, n BIGINT, small INT, ratio DOUBLE, price DECIMAL(10,2), at TIMESTAMP, raw BINARY,"
    " note STRING, ok BOOLEAN",
    documents=True,
)
OID = "596e275826f08b2730779e1f"


def document(**more: Any) -> str:
    values = {
        "_id": {"$oid": OID},
        "n": {"$numberLong": "1004"},
        "small": 7,
        "ratio": 1.5,
        "price": {"$numberDecimal": "12.50"},
        "at": {"$date": 1577881800123},
        "raw": {"$binary": base64.b64encode(b"\x00\xff").decode(), "$type": "00"},
        "note": 'it says {"$oid": "no"} and "quotes"',
        "ok": True,
        "address": {"city": "Oslo"},
        **more,
    }
    return json.dumps(values)


def mongo(
    op: str, after: str | None, *, ts: int = 1, ord: int = 1, before: str | None = None
) -> dict[str, Any]:
    source = {
        "connector": "mongodb",
        "name": "shop",
        "ts_ms": ts,
        "ord": ord,
        "db": "shop",
        "collection": "items",
    }
    return {
        "op": op,
        "before": before,
        "after": after,
        "updateDescription": None,
        "source": source,
        "ts_ms": 5,
    }


def test_documents_are_rows_with_the_types_that_are_declared(sparkling: World) -> None:
    relaxed = {
        "n": 1004,
        "at": {"$date": {"$numberLong": "1577881800123"}},
        "price": {"$numberDecimal": "12.5"},
        "raw": {"$binary": {"base64": "AP8=", "subType": "00"}},
        "ratio": {"$numberDouble": "1.5"},
        "small": {"$numberInt": "7"},
    }
    iso = {"at": {"$date": "2020-01-01T12:30:00.123Z"}}
    envelopes(
        sparkling,
        mongo("r", document()),
        {"schema": {}, "payload": mongo("c", document(**relaxed))},
        mongo("u", document(**iso)),
        mongo("u", None),
        mongo("c", "no document"),
        mongo("c", document(n={"$numberLong": "many"})),
    )
    changes = decoded(sparkling, dataset(key="_id", changes=DOCUMENTS))
    at = dt.datetime(2020, 1, 1, 12, 30, 0, 123000, tzinfo=dt.UTC).astimezone().replace(tzinfo=None)
    note = 'it says {"$oid": "no"} and "quotes"'
    row = (OID, 1004, 7, 1.5, Decimal("12.50"), at, bytearray(b"\x00\xff"), note, True)
    assert [change.row for change in changes[:3]] == [row] * 3
    assert [change.problem is None for change in changes] == [True] * 3 + [False] * 3
    assert "without the row after it" in str(changes[3].problem)
    assert "column 'n' is" in str(changes[5].problem)


def test_a_document_without_an_image_before_is_deleted_by_its_records_key(sparkling: World) -> None:
    keys = [json.dumps({"$oid": OID}), json.dumps("plain"), "1004"]
    rows = [(key, *as_record(mongo("d", None, ts=2))) for key in keys]
    rows += [(None, *as_record(mongo("d", None))), (keys[0], *as_record(mongo("c", document())))]
    rows += [(json.dumps({"$oid": "0" * 24}), *as_record(mongo("c", document())))]
    stream(sparkling, Schema.of(_id="string", value="string"), rows, key=["_id"])
    form = DebeziumEnvelope("_id STRING, n BIGINT", documents=True)
    spec = dataset(key="_id", changes=form, order_by=["source.ts_ms", "source.ord"])
    changes = decoded(sparkling, spec)
    assert [change[1:3] for change in changes[:3]] == [
        ((id, None), True) for id in (OID, "plain", "1004")
    ]
    reported = problems(sparkling, spec)
    assert sorted(reported) == [3, 5]
    assert "a delete without the row before it" in reported[3]
    assert "the record's own key is" in reported[5]
    assert changes[4].row == (OID, 1004)


def test_any_delete_without_the_row_before_it_takes_the_records_own_key(sparkling: World) -> None:
    stream(
        sparkling,
        Schema.of(id="bigint", value="string"),
        [
            (7, *as_record({"op": "d", "before": None, "source": {}})),
            (8, *as_record({"op": "d", "source": {}})),
        ],
        key=["id"],
    )
    changes = decoded(sparkling, dataset(changes=DebeziumEnvelope("id BIGINT, v STRING")))
    assert changes == [Change(0, (7, None), True, 0, None), Change(1, (8, None), True, 1, None)]


# -- Maxwell

MAXWELL = MaxwellEnvelope("id BIGINT, name STRING, price DECIMAL(10,2), ok BOOLEAN")
ANN = {"id": 1, "name": "Ann", "price": 12.5, "ok": 1, "other": [1]}


def maxwell(
    kind: str, data: Any, position: str = "master.000006:800911", **more: Any
) -> dict[str, Any]:
    return {
        "database": "shop",
        "table": "people",
        "type": kind,
        "ts": 1477053217,
        "xid": 23396,
        "commit": True,
        "position": position,
        "data": data,
        **more,
    }


def test_maxwells_rows_are_inserted_updated_moved_and_deleted(sparkling: World) -> None:
    envelopes(
        sparkling,
        maxwell("bootstrap-start", {}),
        maxwell("bootstrap-insert", ANN),
        maxwell("bootstrap-complete", {}),
        maxwell("insert", ANN | {"id": 2, "name": 'a "b" {c}', "ok": False}),
        maxwell("update", ANN | {"name": "Anna"}, old={"name": "Ann"}),
        maxwell("update", ANN | {"id": 9}, old={"id": 1, "name": "Anna"}),
        maxwell("delete", ANN | {"id": 2}),
        maxwell("table-drop", {}),
        "nonsense",
        maxwell("insert", {"id": "one"}),
    )
    changes = decoded(sparkling, dataset(changes=MAXWELL))
    ann = ("Ann", Decimal("12.50"), True)
    assert [(change.offset, change.row, change.deleted) for change in changes[:6]] == [
        (1, (1, *ann), False),
        (3, (2, 'a "b" {c}', Decimal("12.50"), False), False),
        (4, (1, "Anna", *ann[1:]), False),
        (5, (1, None, None, None), True),
        (5, (9, *ann), False),
        (6, (2, None, None, None), True),
    ]
    assert problems(sparkling, dataset(changes=MAXWELL)) == {
        7: "unknown operation 'table-drop'",
        8: "not JSON: 'nonsense'",
        9: "column 'id' is 'one', declared bigint",
    }


def test_maxwells_positions_order_over_binary_logs(sparkling: World) -> None:
    envelopes(
        sparkling,
        maxwell("update", ANN | {"name": "new"}, "master.000010:120", old={}),
        maxwell("update", ANN | {"name": "old"}, "master.000009:900", old={}),
    )
    spec = dataset(changes=MAXWELL, order_by="source.position")
    sparkling.advance(spec)
    assert StoredVersions(sparkling.lake, "table").require_current().get(1)["name"] == "new"


def test_rows_of_a_bootstrap_never_replace_what_maxwell_streamed(sparkling: World) -> None:
    envelopes(sparkling, maxwell("insert", ANN | {"name": "new"}), maxwell("bootstrap-insert", ANN))
    sparkling.advance(dataset(changes=MAXWELL))
    assert StoredVersions(sparkling.lake, "table").require_current().get(1)["name"] == "new"


def test_one_table_of_many_on_a_stream_is_reported_by_its_name(sparkling: World) -> None:
    envelopes(
        sparkling,
        maxwell("insert", {"sku": "x"}, table="stock"),
        maxwell("insert", ANN),
        maxwell("table-drop", {}, table="stock"),
    )
    form = MaxwellEnvelope(MAXWELL.columns, table="shop.people")
    assert [change.offset for change in decoded(sparkling, dataset(changes=form))] == [1]
    assert problems(sparkling, dataset(changes=form)) == {}


@pytest.mark.parametrize("path", ["source.xid", "source.lsn", "position", "xid"])
def test_what_does_not_order_maxwells_changes_is_refused(world: World, path: str) -> None:
    envelopes(world)
    with pytest.raises(SchemaMismatchError) as caught:
        world.advance(dataset(changes=MAXWELL, order_by=path))
    assert caught.value.column == path


@pytest.mark.parametrize(
    ("argument", "given"), [("table", "people"), ("table", 7), ("timestamps", "seconds")]
)
def test_an_envelope_of_maxwells_that_makes_no_sense_is_refused(argument: str, given: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        MaxwellEnvelope("id BIGINT", **{argument: given})
    assert caught.value.argument == argument
