"""Debezium's envelopes as its connector for PostgreSQL writes them; and everything that is none.

What the samples must become was written down by hand, from Debezium's documentation of the
connector.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.change_values import SNAPSHOT_ROWS
from dagster_adjunct.assets.declaration.envelope_values import decimal_from_unscaled
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.changes.changing import (
    Change,
    applied,
    as_record,
    changes_of,
    dataset,
    decoded,
    envelopes,
    problems,
    send,
    stream,
)
from tests.assets.conftest import World

CUSTOMERS = DebeziumEnvelope("id BIGINT, first_name STRING, email STRING")


def source(lsn: int, **more: Any) -> dict[str, Any]:
    """The source block of Debezium 2.7 for PostgreSQL."""
    return {
        "version": "2.7.0.Final",
        "connector": "postgresql",
        "name": "shop",
        "ts_ms": 1559033904863,
        "snapshot": "false",
        "db": "postgres",
        "sequence": f'["{lsn - 1}","{lsn}"]',
        "ts_us": 1559033904863123,
        "ts_ns": 1559033904863123000,
        "schema": "public",
        "table": "customers",
        "txId": 555,
        "lsn": lsn,
        "xmin": None,
        **more,
    }


def envelope(op: str, before: Any, after: Any, lsn: int = 24023128, **more: Any) -> dict[str, Any]:
    return {
        "before": before,
        "after": after,
        "source": source(lsn, **more),
        "transaction": None,
        "op": op,
        "ts_ms": 1559033904961,
        "ts_us": 1559033904961654,
        "ts_ns": 1559033904961654000,
    }


ANNE = {"id": 1, "first_name": "Anne", "last_name": "Kretchmar", "email": "annek@noanswer.org"}
ANNA = {**ANNE, "first_name": "Anna"}
BARE_KEY = {"id": 1, "first_name": None, "last_name": None, "email": None}


def wrapped(payload: dict[str, Any]) -> dict[str, Any]:
    """What JsonConverter writes with schemas.enable=true."""
    row = {
        "type": "struct",
        "fields": [
            {"type": "int32", "optional": False, "field": "id"},
            {"type": "string", "optional": False, "field": "first_name"},
        ],
        "optional": True,
        "name": "PostgreSQL_server.inventory.customers.Value",
    }
    fields = [
        {**row, "field": "before"},
        {**row, "field": "after"},
        {"type": "string", "field": "op"},
    ]
    return {"schema": {"type": "struct", "fields": fields, "name": "Envelope"}, "payload": payload}


def test_a_row_is_snapshot_inserted_updated_and_deleted_with_a_tombstone_after_it(
    sparkling: World,
) -> None:
    envelopes(
        sparkling,
        envelope("r", None, ANNE, snapshot="first"),
        envelope("c", None, {**ANNE, "id": 2}),
        envelope("u", None, ANNA),
        envelope("u", ANNE, ANNA),
        envelope("d", BARE_KEY, None),
        None,
        envelope("d", {**ANNE, "id": 2}, None),
    )
    anne, anna = (1, "Anne", "annek@noanswer.org"), (1, "Anna", "annek@noanswer.org")
    changes = decoded(sparkling, dataset(changes=CUSTOMERS))
    assert changes == [
        Change(0, anne, False, SNAPSHOT_ROWS, None),
        Change(1, (2, *anne[1:]), False, 1, None),
        Change(2, anna, False, 2, None),
        Change(3, anna, False, 3, None),
        Change(4, (1, None, None), True, 4, None),
        Change(6, (2, None, None), True, 6, None),
    ]
    assert applied(changes[:4]) == {1: anna, 2: (2, *anne[1:])}
    assert applied(changes) == {}


def test_the_envelope_may_stand_next_to_its_schema(sparkling: World) -> None:
    envelopes(
        sparkling, wrapped(envelope("c", None, ANNE)), wrapped(envelope("d", BARE_KEY, None)), None
    )
    assert decoded(sparkling, dataset(changes=CUSTOMERS)) == [
        Change(0, (1, "Anne", "annek@noanswer.org"), False, 0, None),
        Change(1, (1, None, None), True, 1, None),
    ]


def test_an_update_that_changes_the_key_deletes_the_old_row_and_writes_the_new_one(
    sparkling: World,
) -> None:
    moved = envelope("u", ANNE, {**ANNA, "id": 1004}, 77)
    envelopes(sparkling, envelope("c", None, ANNE, 70), moved, wrapped(moved))
    changes = decoded(sparkling, dataset(changes=CUSTOMERS, order_by="source.lsn"))
    assert changes[1:3] == [
        Change(1, (1, None, None), True, 77, None),
        Change(1, (1004, "Anna", "annek@noanswer.org"), False, 77, None),
    ]
    assert [change[1:] for change in changes[3:]] == [change[1:] for change in changes[1:3]]
    assert applied(changes) == {1004: (1004, "Anna", "annek@noanswer.org")}


def test_only_a_change_of_the_datasets_own_key_moves_a_row(sparkling: World) -> None:
    envelopes(sparkling, envelope("u", ANNE, {**ANNA, "id": 7}))
    changes = decoded(sparkling, dataset(changes=CUSTOMERS, key="email"))
    assert changes == [Change(0, (7, "Anna", "annek@noanswer.org"), False, 0, None)]


@pytest.mark.parametrize(
    ("path", "position"),
    [
        ("source.lsn", 24023128),
        pytest.param("source.ts_ns", 1559033904863123000, marks=pytest.mark.long),
        pytest.param("source.ts_us", 1559033904863123, marks=pytest.mark.long),
        pytest.param("ts_ms", 1559033904961, marks=pytest.mark.long),
        ("id", 1),
    ],
)
def test_changes_are_ordered_by_a_path_or_a_column(
    sparkling: World, path: str, position: int
) -> None:
    envelopes(
        sparkling,
        envelope("c", None, ANNE),
        envelope("d", BARE_KEY, None),
        wrapped(envelope("u", ANNE, ANNA)),
    )
    changes = decoded(sparkling, dataset(changes=CUSTOMERS, order_by=path))
    assert [change.position for change in changes] == [position] * 3


def test_a_path_that_holds_no_number_is_a_problem(sparkling: World) -> None:
    envelopes(sparkling, envelope("c", None, ANNE), {"op": "c", "after": ANNE})
    assert problems(sparkling, dataset(changes=CUSTOMERS, order_by="source.lsn")) == {
        1: "no value to order by: it has no 'source.lsn', but nothing"
    }


def test_what_is_no_change_of_a_row_is_left_out_or_a_problem(sparkling: World) -> None:
    message = {
        "op": "m",
        "ts_ms": 1,
        "source": source(1),
        "message": {"prefix": "foo", "content": "Ymfy"},
    }
    truncate = {"op": "t", "ts_ms": 1559033904961, "source": source(2)}
    envelopes(
        sparkling,
        message,
        truncate,
        envelope("x", None, ANNE),
        envelope("c", None, None),
        envelope("d", None, None),
        {"after": ANNE},
        {"schema": None, "payload": None},
        "nonsense",
        '{"op":"c","after":{"id":1',
        "5",
        "[]",
        "",
        json.dumps({"op": "c", "after": 5}),
    )
    send(sparkling, [(None, False)])
    problem_at = problems(sparkling, dataset(changes=CUSTOMERS))
    assert 0 not in problem_at
    assert problem_at[1].startswith("a truncate deletes all rows")
    assert problem_at[2] == "unknown operation 'x'"
    assert problem_at[3] == "operation 'c' without the row after it"
    assert "a delete without the row before it" in problem_at[4]
    assert problem_at[5].startswith(
        'not a Debezium envelope: it has no \'op\': \'{"after": {"id": 1'
    )
    assert problem_at[6].startswith("not a Debezium envelope: it has no 'op'")
    assert problem_at[7] == "not JSON: 'nonsense'"
    assert problem_at[8] == 'not JSON: \'{"op":"c","after":{"id":1\''
    assert problem_at[9] == "not a Debezium envelope: '5'"
    assert problem_at[10] == "not a Debezium envelope: '[]'"
    assert problem_at[11] == "not JSON: ''"
    assert problem_at[12] == 'not a Debezium envelope: \'{"op": "c", "after": 5}\''
    assert problem_at[13] == "not a Debezium envelope: the value is null"
    assert len(decoded(sparkling, dataset(changes=CUSTOMERS))) == 13


TYPED = Schema.of(
    id="bigint",
    small="tinyint",
    ok="boolean",
    ratio="double",
    day="date",
    at="timestamp",
    price="decimal(10,2)",
    data="binary",
    note="string",
)
COLUMNS = ", ".join(f"{field.name} {field.type}" for field in TYPED.fields)
GOOD = {
    "id": 1,
    "small": -128,
    "ok": True,
    "ratio": 1,
    "day": 18262,
    "at": "2020-01-01T12:30:00.123456Z",
    "price": "12.50",
    "data": "AQID",
    "note": "x",
}
ROW = (
    1,
    -128,
    True,
    1.0,
    dt.date(2020, 1, 1),
    dt.datetime(2020, 1, 1, 12, 30, 0, 123456),
    Decimal("12.50"),
    bytearray(b"\x01\x02\x03"),
    "x",
)


def in_utc(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Spark gives times in this machine's zone, without saying so."""
    return tuple(
        value.astimezone(dt.UTC).replace(tzinfo=None) if isinstance(value, dt.datetime) else value
        for value in row
    )


@pytest.mark.parametrize(
    ("given", "cases"),
    [
        (
            {},
            [
                ({}, {}),
                ({"day": "2020-01-01", "at": "2020-01-01 13:30:00.1234560+01"}, {}),
                ({"price": 12.5}, {}),
                ({"price": "12.5000"}, {}),
                (dict.fromkeys(TYPED.names[1:]), dict.fromkeys(range(1, 9))),
                ({"note": {"a": [1]}}, {8: '{"a":[1]}'}),
            ],
        ),
        ({"timestamps": "micros"}, [({"at": 1577881800123456}, {})]),
        pytest.param(
            {"timestamps": "millis"},
            [({"at": 1577881800123}, {5: dt.datetime(2020, 1, 1, 12, 30, 0, 123000)})],
            marks=pytest.mark.long,
        ),
        (
            {"decimals": "precise"},
            [({"price": "BOI="}, {}), ({"price": "/zo="}, {6: Decimal("-1.98")})],
        ),
    ],
    ids=["as declared", "micros", "millis", "precise"],
)
def test_values_have_their_declared_types(
    sparkling: World, given: dict[str, Any], cases: list[tuple[dict[str, Any], dict[int, Any]]]
) -> None:
    form = DebeziumEnvelope(COLUMNS, **{"decimals": "string", **given})
    good = GOOD | ({"price": "BOI="} if form.decimals == "precise" else {})
    envelopes(sparkling, *({"op": "c", "after": {**good, **values}} for values, _ in cases))
    changes = decoded(sparkling, dataset(changes=form))
    assert [change.problem for change in changes] == [None] * len(cases)
    wanted = [
        tuple(expected.get(index, value) for index, value in enumerate(ROW))
        for _, expected in cases
    ]
    assert [in_utc(change.row) for change in changes] == wanted


MISFITS = [
    ("id", "abc", "abc"),
    ("id", "12", "12"),
    ("id", 1.5, "1.5"),
    ("id", 2**63, "9223372036854775808"),
    ("id", True, "true"),
    ("small", 128, "128"),
    ("ok", "true", "true"),
    ("ratio", "1.5", "1.5"),
    ("day", "2020-13-01", "2020-13-01"),
    ("day", "2020-01-01T00:00:00Z", "2020-01-01T00:00:00Z"),
    ("day", 1.5, "1.5"),
    ("at", "2020-01-01T12:30:00", "2020-01-01T12:30:00"),
    ("at", "2020-01-01T12:30:00.1234567Z", "2020-01-01T12:30:00.1234567Z"),
    ("at", "2020-02-30T12:30:00Z", "2020-02-30T12:30:00Z"),
    ("at", 1577881800123456, "1577881800123456"),
    ("price", "12.505", "12.505"),
    ("price", "123456789.00", "123456789.00"),
    ("price", "NaN", "NaN"),
    ("data", "A?", "A?"),
]


def test_a_value_that_does_not_fit_its_column_is_a_problem_and_never_null(sparkling: World) -> None:
    envelopes(
        sparkling, *({"op": "c", "after": {**GOOD, column: value}} for column, value, _ in MISFITS)
    )
    problem_at = problems(sparkling, dataset(changes=DebeziumEnvelope(COLUMNS, decimals="string")))
    expected = [
        f"column {column!r} is '{displayed}', declared {TYPED.field(column).type}"
        for column, _, displayed in MISFITS
    ]
    hinted = expected.index("column 'at' is '1577881800123456', declared timestamp")
    expected[hinted] += "; timestamps= says what it counts"
    assert [problem_at.get(offset) for offset in range(len(MISFITS))] == expected


WIDE = [
    ('"small": 1e39', "column 'small' is a number too large for float"),
    ('"large": -1e400', "column 'large' is a number too large for double"),
    ('"large": 1e308, "small": 3e38', None),
    ('"large": "NaN"', "column 'large' is 'NaN', declared double"),
    ('"small": "Infinity"', "column 'small' is 'Infinity', declared float"),
    ('"large": NaN', "not JSON: "),
    ('"day": "2026"', "column 'day' is '2026', declared date"),
    ('"day": 2026, "at": 1700000000000, "note": "2026"', None),
    ('"at": "1700000000000"', "column 'at' is '1700000000000', declared timestamp"),
    ('"day": 2026.0', "column 'day' is '2026', declared date"),
    ('"day": null, "at": null', None),
    (r'"note": "a\ud83d"', "column 'note' has half of a character: text is UTF-8"),
    (r'"note": "\ude00\ud83d"', "column 'note' has half of a character: text is UTF-8"),
    (r'"note": "a? \\\ud83d"', "column 'note' has half of a character: text is UTF-8"),
    (r'"note": "a? \ud83d\uDE00 \\ud83d"', None),
    ('"day": {"a": 1, "a": 2}', "not JSON: "),
    ('"day": {"a": 1}', "column 'day' is '{\"a\":1}', declared date"),
    ('"day": -719163', "column 'day' is '-719163', declared date: years are 1 to 9999"),
    ('"day": 2932896, "at": 253402300799999', None),
    ('"day": "0000-12-31"', "column 'day' is '0000-12-31', declared date: years are 1 to 9999"),
    (
        '"at": -62135596800001',
        "column 'at' is '-62135596800001', declared timestamp: years are 1 to 9999",
    ),
    ('"at": 9223372036854775807', "column 'at' is '9223372036854775807', declared timestamp"),
    (
        '"at": "9999-12-31T23:00:00-05:00"',
        "column 'at' is '9999-12-31T23:00:00-05:00', declared timestamp: years are 1 to 9999",
    ),
]


def test_numbers_are_finite_and_dates_are_numbers_or_texts_of_years_that_python_has(
    sparkling: World,
) -> None:
    envelopes(sparkling, *(f'{{"op":"c","after":{{"id":1,{text}}}}}' for text, _ in WIDE))
    form = DebeziumEnvelope(
        "id BIGINT, small FLOAT, large DOUBLE, day DATE, at TIMESTAMP, note STRING",
        timestamps="millis",
        on_missing="null",
    )
    changes = changes_of(sparkling, dataset(changes=form)).select("__offset", "__problem", "id")
    problem_at = {row["__offset"]: row["__problem"] for row in changes.collect()}
    assert [
        reported[:10] if reported and reported.startswith("not JSON: ") else reported
        for _, reported in sorted(problem_at.items())
    ] == [reported for _, reported in WIDE]


def test_an_update_of_the_key_with_a_date_that_python_has_not_deletes_nothing(
    sparkling: World,
) -> None:
    envelopes(sparkling, {"op": "u", "before": {"id": 1}, "after": {"id": 2, "day": 9_999_999}})
    (change,) = decoded(sparkling, dataset(changes=DebeziumEnvelope("id BIGINT, day DATE")))
    assert "years are 1 to 9999" in str(change.problem)


def test_a_decimal_that_json_has_made_inexact_is_a_problem(sparkling: World) -> None:
    digits = "12345678901234567.91"
    envelopes(
        sparkling,
        f'{{"op":"c","after":{{"id":1,"p":"{digits}"}}}}',
        f'{{"op":"c","after":{{"id":1,"p":{digits}}}}}',
    )
    changes = decoded(
        sparkling,
        dataset(changes=DebeziumEnvelope("id BIGINT, p DECIMAL(38,2)", decimals="string")),
    )
    assert changes[0].row == (1, Decimal(digits))
    assert "declared decimal(38,2)" in str(changes[1].problem)


@pytest.mark.parametrize(
    ("text", "scale", "expected"),
    [
        ("BOI=", 2, "12.50"),
        ("AA==", 2, "0.00"),
        ("/w==", 3, "-0.001"),
        ("fw==", 0, "127"),
        ("?", 2, None),
        ("", 2, None),
        (base64.b64encode(b"\x01" * 2_000).decode(), 2, None),  # of 4,814 digits
    ],
)
def test_unscaled_numbers_are_read_as_big_endian_twos_complement(
    text: str, scale: int, expected: str | None
) -> None:
    assert decimal_from_unscaled(text, scale) == expected


def test_a_precise_decimal_of_38_digits_is_exact(sparkling: World) -> None:
    number = -(10**38 - 7)
    text = base64.b64encode(number.to_bytes(17, "big", signed=True)).decode()
    envelopes(
        sparkling,
        {"op": "c", "after": {"id": 1, "p": text}},
        {"op": "c", "after": {"id": 1, "p": "!"}},
    )
    form = DebeziumEnvelope("id BIGINT, p DECIMAL(38,2)", decimals="precise")
    good, bad = decoded(sparkling, dataset(changes=form))
    assert good.row == (1, Decimal(number).scaleb(0) / 100) or str(good.row[1]) == f"-{'9' * 36}.93"
    assert bad.problem == "column 'p' is '!', declared decimal(38,2)"


def test_a_number_is_never_read_as_base64(sparkling: World) -> None:
    values: list[Any] = ["1000", "12AB", 1000, 10000000, 1e4]
    envelopes(
        sparkling,
        *({"op": "c", "after": {"id": 1, "p": value, "note": "1000"}} for value in values),
        *({"op": "c", "after": {"id": 1, "b": value, "note": "1000"}} for value in values),
    )
    form = DebeziumEnvelope(
        "id BIGINT, p DECIMAL(38,2), b BINARY, note STRING", decimals="precise", on_missing="null"
    )
    changes = decoded(sparkling, dataset(changes=form))
    good = [0, 1, 5, 6]
    assert [changes[at].problem for at in good] == [None] * 4
    assert [changes[at].row[1] for at in good[:2]] == [Decimal("-26672.12"), Decimal("-26623.99")]
    assert [changes[at].row[2] for at in good[2:]] == [b"\xd7\x4d\x34", b"\xd7\x60\x01"]
    for at in (2, 3, 4, 7, 8, 9):
        assert "declared" in str(changes[at].problem), at


def any_scale(text: str) -> dict[str, Any]:
    """What Debezium sends for a `numeric` without digits."""
    sign, digits, exponent = Decimal(text).as_tuple()
    number = int("".join(map(str, digits))) * (-1 if sign else 1)
    raw = number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)
    return {"scale": -int(exponent), "value": base64.b64encode(raw).decode()}


def test_a_decimal_with_a_scale_of_its_own_is_exact_or_a_problem(sparkling: World) -> None:
    texts = ["12.5", "-0.001", "0", "1E+3", "7", "1.2500", "9" * 35 + ".999", "1.0001", "9" * 36]
    values = [any_scale(text) for text in texts] + [
        {"scale": 2},
        {"scale": "2", "value": "AA=="},
        {"value": "AA=="},
    ]
    envelopes(sparkling, *[{"op": "c", "after": {"id": 1, "p": value}} for value in values])
    changes = decoded(
        sparkling,
        dataset(changes=DebeziumEnvelope("id BIGINT, p DECIMAL(38,3)", decimals="precise")),
    )
    assert [change.row[1] for change in changes[:7]] == [Decimal(text) for text in texts[:7]]
    assert all("declared decimal(38,3)" in str(change.problem) for change in changes[7:])


def test_mysqls_numbers_are_booleans_where_they_are_0_and_1(sparkling: World) -> None:
    sent = [True, False, 1, 0, None, 2, -1, "1", "true", 1.0]
    envelopes(sparkling, *[{"op": "c", "after": {"id": 1, "ok": value}} for value in sent])
    changes = decoded(sparkling, dataset(changes=DebeziumEnvelope("id BIGINT, ok BOOLEAN")))
    assert [change.row[1] for change in changes[:5]] == [True, False, True, False, None]
    assert [change.problem for change in changes[5:9]] == [
        f"column 'ok' is '{value}', declared boolean" for value in sent[5:9]
    ]


def test_of_the_row_before_only_the_key_is_used(sparkling: World) -> None:
    before = {**GOOD, "at": "", "price": "0", "data": "?", "note": "__debezium_unavailable_value"}
    envelopes(
        sparkling, {"op": "d", "before": before}, {"op": "u", "before": before, "after": GOOD}
    )
    changes = decoded(sparkling, dataset(changes=DebeziumEnvelope(COLUMNS, decimals="string")))
    assert [change.problem for change in changes] == [None, None]
    assert changes[0].row == (1, *[None] * 8)


def test_a_large_value_that_is_not_known_is_never_stored_as_its_placeholder(
    sparkling: World,
) -> None:
    unknown = "__debezium_unavailable_value"
    envelopes(
        sparkling,
        envelope("u", None, {**ANNE, "email": unknown}),
        envelope("u", None, {**ANNE, "last_name": unknown}),
    )
    problem_at = problems(sparkling, dataset(changes=CUSTOMERS))
    assert list(problem_at) == [0], "columns that are not stored do not matter"
    assert problem_at[0].startswith(
        "column 'email' is '__debezium_unavailable_value', which stands for a large unchanged value"
    )
    assert "unavailable=None" in problem_at[0], "where that is its text, it says what helps"


def test_a_text_that_is_the_placeholder_is_taken_where_nothing_is_unknown(sparkling: World) -> None:
    text = "__debezium_unavailable_value"
    envelopes(
        sparkling,
        envelope("r", None, {**ANNE, "email": text}),
        # An update that changes the key comes as a "d" and a "c": what was not logged is as unknown
        # there.
        envelope("c", None, {**ANNE, "email": text}),
        envelope("u", None, {**ANNE, "email": text}),
        envelope("u", None, {**ANNE, "email": "?"}),
    )
    assert list(problems(sparkling, dataset(changes=CUSTOMERS))) == [1, 2]
    assert list(problems(sparkling, dataset(changes=replace(CUSTOMERS, unavailable=None)))) == []
    assert list(problems(sparkling, dataset(changes=replace(CUSTOMERS, unavailable="?")))) == [3]


def test_column_names_may_have_any_characters(sparkling: World) -> None:
    form = DebeziumEnvelope("`i d` BIGINT, `a.b` STRING, `payload` STRING")
    row = {"i d": 1, "a.b": "x", "payload": "y"}
    envelopes(
        sparkling,
        {"op": "c", "after": row},
        {"op": "d", "before": row},
        {"op": "c", "after": {"i d": "z"}},
    )
    changes = decoded(sparkling, dataset(changes=form, key="i d"))
    assert [change.row for change in changes[:2]] == [(1, "x", "y"), (1, None, None)]
    assert changes[2].problem == "column 'i d' is 'z', declared bigint"


def test_a_key_that_an_extractor_computes_can_be_written_and_not_deleted(sparkling: World) -> None:
    envelopes(sparkling, envelope("u", ANNE, ANNA), envelope("d", BARE_KEY, None))
    projection = Projection("who STRING, email STRING", {"who": "upper(first_name)"})
    written, deleted = decoded(
        sparkling, dataset(key="who", changes=CUSTOMERS, extractor=projection)
    )
    assert (written.row, written.problem) == (("ANNA", "annek@noanswer.org"), None)
    assert str(deleted.problem).startswith("a deletion of an unknown entry")


KEYED = Schema.of(id="bigint", value="string")


def keyed(world: World, *records: tuple[int | None, Any]) -> None:
    """Make the stream of envelopes in four partitions, keyed as Debezium keys its records."""
    rows = [(key, *as_record(value)) for key, value in records]
    stream(world, KEYED, rows, key=["id"], partitions=4)


def test_a_row_must_have_the_key_of_its_record(sparkling: World) -> None:
    keyed(
        sparkling,
        (1, envelope("c", None, ANNE)),
        (1, envelope("d", BARE_KEY, None)),
        (1, None),
        (2, envelope("c", None, ANNE)),
        (3, envelope("d", BARE_KEY, None)),
    )
    reasons = [
        change.problem
        for change in decoded(sparkling, dataset(changes=CUSTOMERS))
        if change.problem
    ]
    assert sorted(reasons) == [
        'the record\'s own key is {"id":2}, and the row in it has another one',
        'the record\'s own key is {"id":3}, and the row in it has another one',
    ]


def test_a_key_that_changes_needs_an_order_that_holds_across_partitions(sparkling: World) -> None:
    keyed(
        sparkling,
        (7, envelope("u", ANNE, {**ANNA, "id": 7})),
        (1, envelope("u", ANNE, {**ANNA, "id": 7})),
    )
    reasons = [change.problem for change in decoded(sparkling, dataset(changes=CUSTOMERS))]
    assert len(reasons) == 2
    assert all(
        str(reason).startswith("an update changes the key, and offsets of several partitions")
        for reason in reasons
    )
    ordered = decoded(sparkling, dataset(changes=CUSTOMERS, order_by="source.lsn"))
    found_rows = sorted((change.row[0], change.deleted, change.position) for change in ordered)
    assert found_rows == [(1, True, 24023128)] * 2 + [(7, False, 24023128)] * 2


def test_an_extractor_gets_the_row_after_and_deletions_go_around_it(sparkling: World) -> None:
    envelopes(
        sparkling,
        envelope("c", None, ANNE),
        envelope("u", ANNE, {**ANNA, "id": 9}),
        envelope("d", BARE_KEY, None),
    )
    projection = Projection("id BIGINT, name STRING", {"name": "upper(first_name)"})
    changes = decoded(sparkling, dataset(changes=CUSTOMERS, extractor=projection))
    assert [(change.row, change.deleted) for change in changes] == [
        ((1, "ANNE"), False),
        ((1, None), True),
        ((9, "ANNA"), False),
        ((1, None), True),
    ]


def test_a_wrong_text_that_names_a_column_twice_does_not_fail_the_job(sparkling: World) -> None:
    envelopes(
        sparkling,
        '{"op":"c","payload":{"op":"u","before":{"id":"x","id":"y"},"after":{"id":3,"email":null}}}',
    )
    assert problems(sparkling, dataset(changes=CUSTOMERS))[0].startswith("not JSON: ")


def test_envelopes_are_parsed_once(sparkling: World) -> None:
    envelopes(sparkling, envelope("c", None, ANNE))
    counts = []
    for width in (2, 12):
        form = DebeziumEnvelope(
            "id BIGINT, " + ", ".join(f"c{index} STRING" for index in range(width))
        )
        frame = changes_of(sparkling, dataset(changes=form, order_by="source.lsn")).where(
            "__problem is null"
        )
        plan = frame._jdf.queryExecution().executedPlan().toString()
        assert plan.count("AS __parsed") == 1
        counts.append(plan.count("from_json("))
    assert counts[0] == counts[1], (
        "what it costs to find a bad value must not grow with the table's width"
    )


def test_values_that_look_like_another_encoding_are_reported_by_the_first_advance(
    sparkling: World,
) -> None:
    form = DebeziumEnvelope(
        "id BIGINT, price DECIMAL(12,2), fine DECIMAL(12,2), at TIMESTAMP, ok TIMESTAMP",
        decimals="precise",
        timestamps="micros",
    )
    rows = [
        {
            "id": number,
            "price": f"{number}000",
            "fine": "E4g=",
            "at": 1_764_000_000_000,
            "ok": 1_764_000_000_000_000,
        }
        for number in (1, 2)
    ]
    envelopes(sparkling, *[{"op": "c", "after": row} for row in rows])
    spec = dataset(changes=form)
    note = sparkling.advance(spec).note
    assert "each value of 'price' is a plain number" in note
    assert "the times in 'at' are within a month of 1970" in note
    assert "'fine'" not in note
    assert "'ok'" not in note
    send(sparkling, [as_record({"op": "c", "after": rows[0]})])
    assert "warning" not in sparkling.advance(spec).note


def test_empty_rows_and_keys_in_another_case_are_letters_by_name(sparkling: World) -> None:
    envelopes(
        sparkling,
        {"op": "c", "after": {}},
        {"op": "u", "before": {}, "after": {"id": 1}},
        {"op": "d", "before": {}},
        {"payload": {"op": "c", "after": {}}},
        {"op": "c", "after": {"ID": 4, "N": 5}},
        {"op": "u", "before": {"id": None}, "after": {"id": 1}},
    )
    found = problems(sparkling, dataset(changes=DebeziumEnvelope("id BIGINT")))
    assert found[0] == "operation 'c' with an empty row after it: 'after' is {}"
    assert found[1] == "operation 'u' with an empty row before it: 'before' is {}"
    assert found[2] == "operation 'd' with an empty row before it: 'before' is {}"
    assert found[3] == found[0]
    assert found[4] == "the row after it has no column 'id', but 'ID' in another case"
    assert found[5] == "null key column 'id' before it"
