"""What a field of a text file may hold: the table in docs/sources.md, against a model of it in
plain Python.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import random
import struct
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.files.formats import DeclaredFiles, FileFormat
from dagster_adjunct.resources.files.tree import open_tree
from dagster_adjunct.resources.schemas.schema import Schema
from tests.rounds import rounds

DIGITS = frozenset("0123456789")
BOUNDS = {"tinyint": 7, "smallint": 15, "int": 31, "bigint": 63}
DECIMALS = {
    "decimal(5,2)": (5, 2),
    "decimal(38,18)": (38, 18),
    "decimal(38,38)": (38, 38),
    "decimal(3,0)": (3, 0),
}
KINDS = (*BOUNDS, "float", "double", *DECIMALS, "boolean", "date", "timestamp", "string", "binary")


class Rejected(Exception):
    """The model says that the text is no value."""


def digits(text: str) -> str:
    if not text or not set(text) <= DIGITS:
        raise Rejected
    return text


def unsigned(text: str) -> tuple[int, str]:
    return (-1 if text[:1] == "-" else 1, text[1:] if text[:1] in ("+", "-") else text)


def number(text: str, longest_exponent: int) -> Fraction:
    """Digits with at most one point, and perhaps an exponent."""
    sign, text = unsigned(text)
    mantissa, marked, exponent = text.replace("E", "e").partition("e")
    whole, _, part = mantissa.partition(".")
    value = Fraction(int(digits(whole + part)), 10 ** len(part))
    if marked:
        direction, exponent = unsigned(exponent)
        if len(digits(exponent)) > longest_exponent:
            raise Rejected
        value *= Fraction(10) ** (direction * int(exponent))
    return sign * value


def whole_number(text: str, kind: str) -> int:
    sign, text = unsigned(text)
    value = sign * int(digits(text))
    if not -(2 ** BOUNDS[kind]) <= value < 2 ** BOUNDS[kind]:
        raise Rejected
    return value


def exact_decimal(text: str, kind: str) -> Decimal:
    precision, scale = DECIMALS[kind]
    shifted = number(text, 2) * 10**scale
    if shifted.denominator != 1 or abs(shifted) >= 10**precision:
        raise Rejected
    sign, text = int(shifted < 0), str(abs(shifted.numerator))
    return Decimal((sign, tuple(map(int, text)), -scale))


def near_float(text: str, kind: str) -> float:
    sign, word = unsigned(text)
    if word.lower() in ("inf", "infinity"):
        return sign * math.inf
    if word.lower() == "nan":
        return math.nan
    number(text, 300)
    value = float(text)
    if kind == "float":
        try:
            (value,) = struct.unpack("f", struct.pack("f", value))
        except OverflowError as error:
            raise Rejected from error
    if math.isinf(value):
        raise Rejected
    return value


def day(text: str) -> dt.date:
    year, month, number = (text[:4], text[5:7], text[8:])
    if (text[4:5], text[7:8], len(text)) != ("-", "-", 10):
        raise Rejected
    try:
        return dt.date(int(digits(year)), int(digits(month)), int(digits(number)))
    except ValueError as error:
        raise Rejected from error


def clock(text: str) -> list[int]:
    """hh, hh:mm, hh:mm:ss or hh:mm:ss.f, with at most six decimals."""
    parts = text.split(":")
    seconds, point, decimals = parts[-1].partition(".")
    if len(parts) > 3 or (point and (len(parts) < 3 or len(digits(decimals)) > 6)):
        raise Rejected
    numbers = [digits(part) for part in (*parts[:-1], seconds)]
    if any(len(part) != 2 for part in numbers):
        raise Rejected
    return [*map(int, numbers), *[0] * (3 - len(numbers)), int(decimals.ljust(6, "0"))]


def moment(text: str) -> dt.datetime:
    date, blank, rest = (text[:10], text[10:11], text[11:])
    if blank not in ("T", " ") or not blank:
        raise Rejected
    at = next((place for place, letter in enumerate(rest) if letter in "Z+-"), None)
    if at is None:
        raise Rejected
    zone = rest[at:]
    offset = dt.timedelta()
    if zone != "Z":
        ends = digits(
            zone[1:].replace(":", "", 1) if zone[3:4] == ":" and len(zone) == 6 else zone[1:]
        )
        if len(ends) not in (2, 4) or int(ends[:2]) > 23 or int(ends[2:] or 0) > 59:
            raise Rejected
        offset = dt.timedelta(hours=int(ends[:2]), minutes=int(ends[2:] or 0)) * (
            -1 if zone[0] == "-" else 1
        )
    try:
        local = dt.datetime.combine(day(date), dt.time(*clock(rest[:at])), dt.UTC)
        return local - offset
    except (ValueError, OverflowError) as error:
        raise Rejected from error


def model(text: str, kind: str) -> Any:
    """What a text means in a column of this type."""
    if kind in BOUNDS:
        return whole_number(text, kind)
    if kind in DECIMALS:
        return exact_decimal(text, kind)
    if kind in ("float", "double"):
        return near_float(text, kind)
    if kind == "boolean":
        if text.lower() not in ("true", "false") or text not in (
            text.lower(),
            text.upper(),
            text.title(),
        ):
            raise Rejected
        return text.lower() == "true"
    return day(text) if kind == "date" else moment(text)


def csv_model(text: str, kind: str) -> Any:
    if kind in ("string", "binary"):
        return text if kind == "string" else text.encode()
    return model(text.strip(" \t"), kind)


def json_model(text: str, kind: str) -> Any:
    """What the JSON value `text` means in a column of this type."""

    def constant(name: str) -> None:
        raise Rejected

    def pairs(members: list[tuple[str, Any]]) -> dict[str, Any]:
        raise Rejected

    try:
        value = json.loads(
            text,
            parse_float=lambda t: [t],
            parse_int=lambda t: [t],
            parse_constant=constant,
            object_pairs_hook=pairs,
        )
        written = (
            value[0]
            if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str)
            else None
        )
    except ValueError as error:
        raise Rejected from error
    if text.strip().startswith("["):
        raise Rejected
    if value is None:
        return None
    if written is not None:
        if kind not in (*BOUNDS, *DECIMALS, "float", "double"):
            raise Rejected
        return model(written, kind)
    if isinstance(value, bool):
        if kind != "boolean":
            raise Rejected
        return value
    if kind == "string":
        return value
    if kind == "binary":
        try:
            decoded = base64.b64decode(value, validate=True)
        except ValueError as error:
            raise Rejected from error
        if len(value) % 4:
            raise Rejected
        return decoded
    if kind in (*DECIMALS, "date", "timestamp"):
        return model(value, kind)
    raise Rejected


SAMPLES = {
    "whole": [
        "0x1F",
        "0xFFFF",
        "0b1",
        "+5",
        " 5 ",
        "\t5",
        "007",
        "-0",
        "1_000",
        "٣",
        "5",
        "1.0",
        "1e2",
        "-",
        "",
        " ",
        "127",
        "128",
        "-128",
        "-129",
        "32768",
        "2147483648",
        "-9223372036854775808",
        "9223372036854775808",
        "0" * 40 + "7",
        "9" * 40,
        "--1",
        "1-",
        "5\u00a0",
        "\u00b2",
        "1,",
        "NaN",
    ],
    "real": [
        "nan",
        "NaN",
        "-NAN",
        "inf",
        "Inf",
        "-INF",
        "Infinity",
        "infinit",
        "nan(1)",
        "+1",
        "1.",
        ".5",
        ".",
        "+.",
        "1e400",
        "1e-400",
        "1d",
        "0x1p3",
        "1_0",
        "1E5",
        "1e+5",
        "1e",
        "1.5.2",
        "3.5e38",
        "1e39",
        "1e999999",
    ],
    "decimal": [
        "1.505",
        "1.500",
        "1234.5",
        "999.99",
        "-1000",
        "1e2",
        "1E-1",
        "1e5",
        "1e99",
        "1e100",
        "0e99",
        "0e100",
        "9" * 38,
        "9" * 20,
        "1" + "0" * 37,
        "0" * 60 + "1.5",
        "1.5" + "0" * 60,
        "0.99" + "9" * 36,
        "1.7e38",
    ],
    "boolean": ["true", "True", "TRUE", "tRUE", "false", "1", "0", "t", "yes", " true ", "truе"],
    "time": [
        "2026-01-31",
        " 2026-01-31 ",
        "2026-1-3",
        "20260131",
        "2026-02-30",
        "0000-01-01",
        "+2026-01-01",
        "12026-01-01",
        "2026-01-31T00:00:00",
        "2026-01-31T10:00:00Z",
        "2026-01-31 10:00Z",
        "2026-01-31T10Z",
        "2026-01-31Z",
        "2026-01-31T10:00:00+01:00",
        "2026-01-31T10:00:00+0100",
        "2026-01-31T10:00:00+01",
        "2026-01-31T10:00:00.123456Z",
        "2026-01-31T10:00:00.1234567Z",
        "2026-01-31T10:00:00.Z",
        "2026-01-31T10:00:00,5Z",
        "2026-01-31T10:00:00 Z",
        "2026-01-31T24:00:00Z",
        "2026-01-31T23:59:60Z",
        "2026-01-31t10:00:00z",
        "20260131T100000Z",
        "2026-01-31T1000Z",
        "2026-01-31T10:00:00+24:00",
        "2026-01-31T10:00:00+01:70",
        "2026-01-31T10:00:00-23:59",
        "2026-01-31T10:00:00+1",
        "2026-W05-6",
        "9999-12-31T23:59:59.999999+00:01",
        "9999-12-31T23:59:59-00:01",
        "0001-01-01T00:00:00+00:01",
        "2026-01-31T10:00:00+01:00:00",
        "2026-01-31T10:00:00[UTC]",
        "now",
        "today",
    ],
    "text": [
        "a",
        " a ",
        "é",
        "YQ==",
        "YQ=",
        "YQ",
        "Y!==",
        "YWI=",
        "YWJj",
        "YQ==YQ==",
        "=",
        "NULL",
        "null",
    ],
}
JSON_ONLY = [
    "NaN",
    "Infinity",
    "-Infinity",
    "-NaN",
    "Inf",
    "1.",
    ".5",
    "01",
    "-",
    "[1]",
    "[]",
    "{}",
    '{"a": 1}',
    "1 2",
    "true",
    "false",
    "null",
    "TRUE",
    "'a'",
    '"\\u0041"',
    '"\\ud83d"',
    '"\\x"',
    "1e400",
    "-0",
    "1.0",
    "1E2",
    "0.1",
    "123456789",
    "9007199254740993",
    "12.345",
    "nulll",
    "1 /* */",
]
LETTERS = "0123456789" * 3 + "+-.eExX_ \t:TZtrufalsinNaI٣"


def drawn_texts(draw: random.Random, count: int) -> list[str]:
    """All samples, and texts with some letters of a sample removed, replaced or added."""
    samples = [text for group in SAMPLES.values() for text in group]
    drawn = list(samples)
    for _ in range(count):
        letters = list(draw.choice(samples))
        for _ in range(draw.randint(1, 2)):
            at = draw.randint(0, len(letters))
            letters[at : at + draw.randint(0, 1)] = draw.choice(["", draw.choice(LETTERS)])
        drawn.append("".join(letters))
    return drawn


def read(folder: Path, format: FileFormat, content: str, kind: str) -> list[Any]:
    (folder / "a").write_text(content, newline="")
    tree = open_tree(str(folder))
    schema = Schema.of(id="int", value=kind)
    tables = DeclaredFiles(tree, format, schema, "dataset 'd'").tables(tree.list()[0])
    return [value for _, table in tables for value in table.column("value").to_pylist()]


def outcome(read_value: Any, *errors: type[Exception]) -> str:
    """A value as text, with its type; or "rejected"."""
    try:
        value = read_value()
    except errors:
        return "rejected"
    return repr(value + 0.0 if isinstance(value, float) else value)


def in_utc(value: Any) -> Any:
    return value.astimezone(dt.UTC) if isinstance(value, dt.datetime) else value


@pytest.mark.rounds
@pytest.mark.lengthy
@pytest.mark.parametrize("kind", KINDS)
def test_a_csv_field_means_what_the_page_says_or_is_rejected(tmp_path: Path, kind: str) -> None:
    found = Counter[str]()
    for text in drawn_texts(random.Random(f"csv {kind}"), rounds(100, 5_000)):
        field = text if text and not set(text) & set(',"\r\n') else f'"{text}"'
        content = f"id,value\n1,{field}\n"
        result = outcome(
            lambda content=content: in_utc(read(tmp_path, "csv", content, kind)[0]),
            SchemaMismatchError,
        )
        assert result == outcome(lambda text=text: csv_model(text, kind), Rejected), repr(text)
        found["rejected" if result == "rejected" else "value"] += 1
    assert found["value"] > 2
    assert kind in ("string", "binary") or found["rejected"] > 20


@pytest.mark.rounds
@pytest.mark.lengthy
@pytest.mark.parametrize("kind", KINDS)
def test_a_json_member_means_what_the_page_says_or_is_rejected(tmp_path: Path, kind: str) -> None:
    found = Counter[str]()
    texts = drawn_texts(random.Random(f"json {kind}"), rounds(60, 3_000))
    for text in (*JSON_ONLY, *texts, *map(json.dumps, texts)):
        content = f'{{"id": 1}}\n{{"id": 2, "value": {text}}}\n'
        result = outcome(
            lambda content=content: in_utc(read(tmp_path, "jsonl", content, kind)[1]),
            SchemaMismatchError,
        )
        expected = outcome(lambda text=text: json_model(text, kind), Rejected)
        if "\\ud83d" in text:  # half of a surrogate pair is no text
            expected = "rejected"
        assert result == expected, repr(text)
        found["rejected" if result == "rejected" else "value"] += 1
    assert min(found.values()) >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_many_values_are_read_like_each_of_them_alone(tmp_path: Path, kind: str) -> None:
    texts = []
    for text in drawn_texts(random.Random(f"many {kind}"), 200):
        if (
            text
            and not set(text) & set(',"\r\n')
            and outcome(lambda t=text: csv_model(t, kind), Rejected) != "rejected"
        ):
            texts.append(text)
    expected = [repr(in_utc(csv_model(text, kind))) for text in texts]
    content = "".join(f"{number},{text}\n" for number, text in enumerate(texts))
    assert [
        repr(in_utc(value)) for value in read(tmp_path, "csv", "id,value\n" + content, kind)
    ] == expected


def test_the_first_field_that_is_no_value_is_named_by_line_and_column(tmp_path: Path) -> None:
    for field, kind in (
        ("0x1F", "int"),
        ("1.505", "decimal(5,2)"),
        ("2026-01-31T10:00:00", "timestamp"),
    ):
        good = {"int": "1", "decimal(5,2)": "1", "timestamp": "2026-01-31T10:00:00Z"}[kind]
        for format, content in (
            ("csv", f"id,value\n1,{good}\n2,{field}\n3,{field}\n"),
            (
                "jsonl",
                (
                    f'{{"id": 1}}\n{{"id": 2, "value": {json.dumps(field)}}}\n{{"id": 3, "value":'
                    ' "x"}\n'
                ),
            ),
        ):
            with pytest.raises(SchemaMismatchError) as caught:
                read(tmp_path, format, content, kind)  # type: ignore[arg-type]
            assert (caught.value.column, caught.value.line) == (
                "value",
                3 if format == "csv" else 2,
            )


def test_two_objects_in_a_line_are_rejected_and_empty_lines_are_none(tmp_path: Path) -> None:
    assert read(
        tmp_path, "jsonl", '\n{"id": 1, "value": 1}\n \t\r\n{"id": 2, "value": 2}\n\n', "int"
    ) == [1, 2]
    for line in (
        '{"id": 1} {"id": 2}',
        '{"id": 1}{"id": 2}',
        '{"id": 1},{"id": 2}',
        '{"id": 1}\x0b',
    ):
        with pytest.raises(SchemaMismatchError) as caught:
            read(tmp_path, "jsonl", f'{{"id": 0}}\n{line}\n', "int")
        assert caught.value.line == 2


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_an_empty_line_is_a_null_in_a_file_of_one_column(tmp_path: Path, ending: str) -> None:
    def values(*lines: str) -> list[Any]:
        (tmp_path / "one").write_text(ending.join((*lines, "")), newline="")
        tree = open_tree(str(tmp_path))
        file = next(file for file in tree.list() if file.path == "one")
        tables = DeclaredFiles(tree, "csv", Schema.of(value="string"), "dataset 'd'").tables(file)
        return [value for _, table in tables for value in table.column("value").to_pylist()]

    assert values("value", "a", "", "b", '""', "") == ["a", None, "b", "", None]
    assert values("value") == []
    with pytest.raises(SchemaMismatchError):
        values("", "value", "a")
