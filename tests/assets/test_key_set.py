"""Keys looked for in rows, ranges and words."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.retention.key_search import CLEARED, KeySet, redact
from dagster_adjunct.resources.reports import to_json_value
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.schemas.types import arrow_type

NOON = dt.datetime(2026, 1, 2, 12, 30, tzinfo=dt.UTC)


def keys_of(kind: str, *values: Any) -> KeySet:
    return KeySet.of("d", [Field("k", kind)], values)


@pytest.mark.parametrize(
    ("kind", "value", "other"),
    [
        ("string", 'O\'Brien "x" ü\\', "O'Brien"),
        ("int", -1234, 1234),
        ("bigint", 2**40, 2**41),
        ("date", dt.date(2026, 1, 2), dt.date(2026, 1, 20)),
        ("timestamp", NOON, NOON + dt.timedelta(seconds=1)),
        ("decimal(12,2)", Decimal("1234.50"), Decimal("1234.51")),
        ("binary", b"\x00\xffab", b"\x00\xffabc"),
    ],
)
def test_keys_of_every_type_are_found_in_rows_documents_and_words(
    kind: str, value: Any, other: Any
) -> None:
    keys = keys_of(kind, value)
    table = pa.table({"k": pa.array([other, value, None, other, value], arrow_type(kind))})
    assert keys.rows_in(table) == [1, 4]
    assert keys.has_encoded(json.loads(json.dumps(to_json_value([value]))))
    assert not keys.has_encoded(json.loads(json.dumps(to_json_value([other]))))
    for text in (
        str(value),
        repr(value),
        json.dumps(to_json_value([value])),
        f"{value!r} is missing",
        [[value]],
    ):
        assert keys.is_named_in(text), text
    assert not keys.is_named_in(str(other))
    assert not keys.is_named_in("", None, {})


def test_a_key_of_several_columns_is_named_where_all_of_its_parts_are() -> None:
    keys = KeySet.of(
        "d", [Field("origin", "string"), Field("hour", "int")], [("JFK", 7), ("LGA", 9)]
    )
    assert keys.is_named_in({"sample": [["JFK", 7]]})
    assert keys.is_named_in("('LGA', 9)")
    assert not keys.is_named_in("JFK at 70, LGA at 8 o'clock")
    assert keys.is_named_in("JFK and LGA at 7 o'clock"), (
        "rather too much is cleared than too little"
    )


def test_numbers_are_not_looked_for_in_the_reasons_of_erasures_and_texts_are() -> None:
    forgot = {"action": "erase", "version": None, "reason": "4711 asked"}
    for number in (keys_of("bigint", 4711), keys_of("decimal(9,0)", Decimal(4711))):
        assert redact(forgot, number) == forgot
        assert redact(forgot | {"action": "rollback"}, number)["reason"] == CLEARED
        verdict = {"name": "v", "passed": True, "message": "", "facts": {"sample": [4711]}}
        assert redact(verdict, number)["facts"] == {}
    assert redact(forgot, keys_of("string", "4711"))["reason"] == CLEARED
    mixed = KeySet.of("d", [Field("who", "string"), Field("n", "int")], [("ada", 4711)])
    assert redact(forgot | {"reason": "ada, 4711"}, mixed)["reason"] == CLEARED
    counted = {"action": "expire", "version": None, "reason": "1 versions, 4711 leftovers"}
    assert redact(counted, keys_of("string", "4711")) == counted


def test_only_whole_words_name_a_key_and_marks_around_it_do_not_hide_it() -> None:
    keys = keys_of("string", "N1", "*")
    for text in ("N1", "N1,", "'N1'", "(N1)", "N1 and N2", "x=N1", "a*b"):
        assert keys.is_named_in(text), text
    for text in ("N10", "XN1", "N1_", "n1"):
        assert not keys.is_named_in(text), text


def test_documents_keep_what_does_not_name_a_key() -> None:
    keys = keys_of("string", "ada")
    file = {
        "bucket": 0,
        "name": "f",
        "rows": 2,
        "sha256": "…",
        "size": 9,
        "min_key": ["ada"],
        "max_key": ["bob"],
    }
    other = file | {"min_key": ["bob"], "max_key": ["cy"]}
    verdict = {
        "name": "v",
        "passed": False,
        "severity": "warn",
        "message": "ada is missing",
        "facts": {"sample": ["ada"]},
    }
    fine = verdict | {"message": "adam is missing", "facts": {"n": 1}}
    document = {
        "files": [file, other],
        "verdicts": [verdict, fine],
        "reason": "ada asked",
        "by": "ada",
        "n": 5,
    }
    cleared = {
        "files": [file | {"min_key": None, "max_key": None}, other],
        "verdicts": [verdict | {"message": CLEARED, "facts": {}}, fine],
        "reason": CLEARED,
        "by": "ada",
        "n": 5,
    }
    assert redact(document, keys) == cleared
    assert redact(cleared, keys) == cleared
    past = redact(document, keys, all_ranges=True)
    assert [cleaned["min_key"] for cleaned in past["files"]] == [None, None]
    unreadable = other | {"footer": "!!"}
    assert "footer" not in redact({"files": [unreadable]}, keys)["files"][0], (
        "it can't be shown to be without the key"
    )
