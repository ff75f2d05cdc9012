"""Debezium's placeholder for what it does not know, in each form that the connector for
PostgreSQL writes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.change_formats import DebeziumUnwrapped
from dagster_adjunct.assets.declaration.change_values import PLACEHOLDER
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope, MaxwellEnvelope
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.changes.changing import changes_of, dataset, envelopes, problems, rows_of, stream
from tests.assets.conftest import World

DATA = PLACEHOLDER.encode()
NAMED = str(uuid.UUID(bytes=hashlib.md5(DATA).digest(), version=3))
BASE64 = base64.b64encode(DATA).decode()
WHOLE: dict[str, Any] = {
    "text": PLACEHOLDER,
    "bytes in base64": BASE64,
    "bytes in hex": DATA.hex(),
    "array of texts": [PLACEHOLDER],
    "array of bytes": [BASE64],
    "array of UUIDs": [NAMED],
    "array of ints": list(DATA),
    "array of doubles": [float(code) for code in DATA],
    "array of decimals": [base64.b64encode(bytes([code])).decode() for code in DATA],
    "hstore as a map": {PLACEHOLDER: PLACEHOLDER},
    "hstore as JSON": json.dumps({PLACEHOLDER: PLACEHOLDER}),
    "numeric of any scale": {"scale": 0, "value": BASE64},
}
WITHIN: dict[str, Any] = {
    "in a struct": {"title": "new", "body": PLACEHOLDER},
    "in a map": {"a": 1, "b": BASE64},
    "deep in a struct": {"a": [{"tags": [PLACEHOLDER]}]},
    "codes in a struct": {"title": "new", "tags": list(DATA)},
    "beside others": ["x", PLACEHOLDER],
}
KNOWN: dict[str, Any] = {
    "a text": f"not {PLACEHOLDER}",
    "a text around it": f'say "{PLACEHOLDER}"',
    "codes of another text": list(DATA[:-1]),
    "codes of a longer text": [*DATA, 1],
    "an empty array": [],
    "null": None,
}
FORM = DebeziumEnvelope("id BIGINT, v STRING")
UNWRAPPED = Schema.of(id="bigint", v="string", raw="binary", deleted="string", op="string")


def update(value: Any, op: str = "u") -> dict[str, Any]:
    return {"op": op, "before": None, "after": {"id": 1, "v": value}}


def kept(world: World, spec: Any) -> list[list[str]]:
    """Return by offset the columns that keep what the dataset has, of the changes that can be
    applied.
    """
    rows = [row for row in rows_of(changes_of(world, spec)) if row["__problem"] is None]
    return [sorted(row["__kept"] or ()) for row in sorted(rows, key=lambda row: row["__offset"])]


def test_no_form_of_the_placeholder_is_taken_for_a_value(sparkling: World) -> None:
    values = [*WHOLE.values(), *WITHIN.values(), *KNOWN.values()]
    envelopes(sparkling, *map(update, values))
    bad = len(WHOLE) + len(WITHIN)
    assert list(problems(sparkling, dataset(changes=FORM))) == list(range(bad))
    keeping = dataset(changes=replace(FORM, on_unavailable="keep"))
    assert list(problems(sparkling, keeping)) == list(range(len(WHOLE), bad)), (
        "a part of a value is not kept"
    )
    assert kept(sparkling, keeping) == [["v"]] * len(WHOLE) + [[]] * len(KNOWN)


def test_a_snapshot_has_no_placeholders_and_a_key_may_not_be_one(sparkling: World) -> None:
    envelopes(
        sparkling,
        *(update(value, "r") for value in (*WHOLE.values(), *WITHIN.values())),
        update(PLACEHOLDER),
    )
    keeping = replace(FORM, on_unavailable="keep")
    assert problems(sparkling, dataset(changes=keeping)) == {}
    last = len(WHOLE) + len(WITHIN)
    assert list(problems(sparkling, dataset(changes=keeping, key="v"))) == [last]


@pytest.mark.parametrize(
    "placeholder",
    [
        "a.b* [c]",
        "hex:00ff7f",
        *(pytest.param(text, marks=pytest.mark.long) for text in ("?", "größer")),
    ],
)
def test_the_placeholder_may_be_any_that_the_connector_is_given(
    sparkling: World, placeholder: str
) -> None:
    data = (
        bytes.fromhex(placeholder[4:]) if placeholder.startswith("hex:") else placeholder.encode()
    )
    codes = [code - 256 if code > 127 else code for code in data]  # Java's bytes have signs
    text = data.decode(errors="replace")
    forms = [text, [text], codes, base64.b64encode(data).decode(), {text: text}]
    envelopes(sparkling, *map(update, [*forms, PLACEHOLDER]))
    keeping = dataset(changes=replace(FORM, unavailable=placeholder, on_unavailable="keep"))
    assert kept(sparkling, keeping) == [["v"]] * len(forms) + [[]]


def test_columns_of_bytes_and_decimals_are_kept_as_well(sparkling: World) -> None:
    form = DebeziumEnvelope(
        "id BIGINT, p DECIMAL(9,2), d BINARY", decimals="precise", on_unavailable="keep"
    )
    rows = [
        {"id": 1, "p": BASE64, "d": BASE64},
        {"id": 1, "p": PLACEHOLDER, "d": DATA.hex()},
        {"id": 1, "p": "BNI=", "d": "AAE="},
        {"id": 1, "p": "BNI=", "d": "?"},
    ]
    envelopes(sparkling, *({"op": "u", "after": row} for row in rows))
    assert kept(sparkling, dataset(changes=form)) == [["d", "p"], ["d", "p"], []]
    assert list(problems(sparkling, dataset(changes=form))) == [3]


def test_unwrapped_rows_have_the_placeholder_in_the_same_forms(either: World) -> None:
    def text(value: Any) -> str | None:
        return value if value is None or isinstance(value, str) else json.dumps(value)

    values = [*WHOLE.values(), *WITHIN.values(), *KNOWN.values()]
    rows = [(1, text(value), b"x", "false", "u") for value in values]
    rows += [
        (1, "x", DATA, "false", "u"),
        (1, PLACEHOLDER, DATA, "false", "r"),
        (1, PLACEHOLDER, DATA, "true", "d"),
    ]
    stream(either, UNWRAPPED, rows)
    bad, binary = len(WHOLE) + len(WITHIN), len(values)
    form = DebeziumUnwrapped("deleted", "op")
    assert list(problems(either, dataset(changes=form))) == [*range(bad), binary]
    keeping = dataset(changes=replace(form, on_unavailable="keep"))
    assert list(problems(either, keeping)) == list(range(len(WHOLE), bad))
    assert kept(either, keeping) == [*[["v"]] * len(WHOLE), *[[]] * len(KNOWN), ["raw"], [], []]
    assert problems(either, dataset(changes=replace(form, unavailable=None))) == {}


def test_an_insert_keeps_no_unknown_value_of_a_row_with_its_key(either: World) -> None:
    stream(either, UNWRAPPED, [(1, PLACEHOLDER, DATA, "false", "c"), (1, "x", DATA, "false", "C")])
    form = DebeziumUnwrapped("deleted", "op", on_unavailable="keep")
    assert list(problems(either, dataset(changes=form))) == [0, 1]


def test_a_value_that_is_not_known_matters_only_where_it_is_stored(either: World) -> None:
    stream(
        either,
        UNWRAPPED,
        [(1, PLACEHOLDER, b"x", "false", "u"), (2, PLACEHOLDER, DATA, "false", "c")],
    )
    form = DebeziumUnwrapped("deleted", "op")
    assert problems(either, dataset(changes=form, columns=["id"])) == {}
    assert list(problems(either, dataset(changes=form, columns=["id", "raw"]))) == [1]
    keeping = replace(form, on_unavailable="keep")
    assert problems(either, dataset(changes=keeping, columns=["id"])) == {}


def test_an_inserted_envelope_keeps_no_unknown_value(sparkling: World) -> None:
    envelopes(sparkling, update([PLACEHOLDER], "c"), update([PLACEHOLDER]), update("x", "c"))
    assert list(problems(sparkling, dataset(changes=replace(FORM, on_unavailable="keep")))) == [0]


def test_unwrapped_rows_may_have_tombstones_alone_for_deletions(either: World) -> None:
    stream(
        either, Schema.of(id="bigint", v="string"), [(1, PLACEHOLDER), (1, "x"), (1, None, True)]
    )
    form = DebeziumUnwrapped(deleted=None, on_unavailable="keep")
    assert kept(either, dataset(changes=form)) == [["v"], [], []]
    rows = sorted(
        rows_of(changes_of(either, dataset(changes=form))), key=lambda row: row["__offset"]
    )
    assert [row["__tombstone"] for row in rows] == [False, False, True]


def test_columns_that_an_update_does_not_name_are_reported_from_nulls(sparkling: World) -> None:
    form = DebeziumEnvelope("id BIGINT, a STRING, b INT", on_missing="keep")
    afters = [
        {"id": 1, "a": None},
        {"id": 1, "b": None, "other": 1},
        {"id": 1, "a": "x", "b": 2},
        {"b": 1},
    ]
    sent = [{"op": "u", "before": None, "after": after} for after in afters]
    envelopes(
        sparkling,
        *sent,
        {"payload": sent[0], "schema": {"after": {"b": 1}}},
        {"op": "c", "after": afters[0]},
    )
    assert kept(sparkling, dataset(changes=form)) == [["b"], ["a"], [], ["b"], []]
    assert problems(sparkling, dataset(changes=form)) == {3: "null key column 'id'"}
    null = dataset(changes=replace(form, on_missing="null"))
    assert "__kept" not in rows_of(changes_of(sparkling, null))[0]


def test_maxwells_updates_may_leave_out_columns(sparkling: World) -> None:
    form = MaxwellEnvelope("id BIGINT, a STRING, b INT", on_missing="keep")
    datas = [{"id": 1, "a": "x"}, {"id": 1, "a": None}, {"id": 1, "a": "y", "b": 2}]
    kinds = ["insert", "update", "update"]
    envelopes(
        sparkling, *({"type": kind, "data": data} for kind, data in zip(kinds, datas, strict=True))
    )
    assert kept(sparkling, dataset(changes=form)) == [[], ["b"], []]


def test_a_row_that_gets_another_key_must_tell_all_columns(sparkling: World) -> None:
    form = DebeziumEnvelope("id BIGINT, v STRING", on_unavailable="keep", on_missing="keep")
    before, after = {"id": 1, "v": None}, {"id": 2, "v": "x"}
    envelopes(
        sparkling,
        {"op": "u", "before": before, "after": after},
        {"op": "u", "before": before, "after": {"id": 2}},
        {"op": "u", "before": before, "after": {**after, "v": [PLACEHOLDER]}},
    )
    assert list(problems(sparkling, dataset(changes=form))) == [1, 2]


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"on_unavailable": "ignore"}, "on_unavailable"),
        ({"on_unavailable": "keep", "unavailable": None}, "on_unavailable"),
        ({"unavailable": ""}, "unavailable"),
        ({"unavailable": "hex:xy"}, "unavailable"),
    ],
)
@pytest.mark.parametrize(
    "form", [DebeziumUnwrapped, lambda **more: DebeziumEnvelope("id BIGINT", **more)]
)
def test_rules_for_unknown_values_are_checked(
    form: Any, given: dict[str, Any], argument: str
) -> None:
    with pytest.raises(ConfigurationError) as reported:
        form(**given)
    assert reported.value.argument == argument


@pytest.mark.parametrize("whole", [{"documents": True}, {"format": "avro", "avro_schema": "{}"}])
def test_columns_are_not_kept_where_rows_always_come_as_a_whole(whole: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as reported:
        DebeziumEnvelope("id BIGINT, a STRING", on_missing="keep", **whole)
    assert reported.value.argument == "on_missing"


def test_the_arrow_type_of_kept_names_is_a_list_also_without_any(world: World) -> None:
    rows = pa.table({"id": [1], "__tombstone": [False]})
    made = DebeziumUnwrapped(deleted=None, on_unavailable="keep").decode_arrow(
        rows, Schema.of(id="bigint")
    )
    assert made.column("__kept").to_pylist() == [[]]
