"""JSON read a batch at once: wherever it answers, the answer is that of reading message by
message.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.schemas.parsed_columns import Unfit
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.kafka.formats import (
    Json,
    fast_json_reader,
    json_converters,
    row_reader,
)

SCHEMA = Schema.of(a="bigint", t="tinyint", s="string", d="double", b="boolean")
NAMES = {"b": "is"}
NUMBERS = [
    "0",
    "-0",
    "01",
    "1.0",
    "1e3",
    "1E400",
    "1.7976931348623159e308",
    "-1e-400",
    "0.1",
    "127",
    "128",
    "1" * 30,
    "NaN",
    "-Infinity",
    "Inf",
]
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-300, 300),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.just([]),
    st.just({"a": 1}),
    st.sampled_from(["NaN,", "a: Info", "}{"]),
).map(lambda value: json.dumps(value, ensure_ascii=False))
texts = st.one_of(
    values,
    st.sampled_from(NUMBERS),
    st.sampled_from(['"\\ud800"', '"\x01"', '"a\nb"', "tru", "[[]"]),
)
pairs = st.lists(
    st.tuples(st.sampled_from(["a", "t", "s", "d", "is", "b", "more", "\\u0061"]), texts),
    max_size=4,
)
objects = pairs.map(
    lambda members: ("{" + ",".join(f'"{key}": {text}' for key, text in members) + "}").encode()
)
odd = st.sampled_from(
    [
        b"",
        b" ",
        b"{",
        b"}",
        b"{}{}",
        b"[]",
        b"null",
        b"{} ",
        b'{"s":"',
        b'"}',
        b'{"more":{"a":1}',
        b"\xff",
        b'{"s":"\xff"}',
    ]
)


def one_by_one(data: list[bytes | None]) -> tuple[list[Any], dict[int, str]]:
    """Return what Python's own parser makes of the messages, and the problems."""
    problems: dict[int, str] = {}
    reader = Json(SCHEMA, names=NAMES).reader()
    converts = {field.name: json_converters(field, None) for field in SCHEMA.fields}

    def parse(message: bytes) -> dict[str, Any]:
        try:
            parsed = json.loads(message.decode(), parse_constant=_refused)
        except (ValueError, RecursionError) as error:
            raise Unfit(str(error)) from error
        if type(parsed) is not dict:
            raise Unfit("no object")
        return parsed | {column: parsed.get(name) for column, name in NAMES.items()}

    made = [column.to_pylist() for column in row_reader(parse, SCHEMA, converts)(data, problems)]
    own_problems: dict[int, str] = {}
    assert [column.to_pylist() for column in reader(data, own_problems)] == made
    assert set(own_problems) == set(problems)
    return made, problems


def _refused(text: str) -> Any:
    raise ValueError(text)


@pytest.mark.lengthy
@settings(max_examples=200)
@given(st.lists(st.one_of(st.none(), objects, objects, odd), min_size=1, max_size=3))
def test_what_is_read_at_once_is_what_is_read_one_by_one(data: list[bytes | None]) -> None:
    columns = fast_json_reader(SCHEMA, NAMES)(data)
    made, problems = one_by_one(data)
    if columns is not None:
        assert not problems
        assert [column.to_pylist() for column in columns] == made
        assert [column.type for column in columns] == SCHEMA.to_arrow().types


def test_plain_messages_are_read_at_once() -> None:
    rows = [
        {"a": i, "t": i % 100, "s": f"tëxt NaN {i}", "d": i / 7, "is": i % 2 == 0, "more": [1]}
        for i in range(1000)
    ]
    data: list[bytes | None] = [json.dumps(row).encode() for row in rows]
    data[5] = None
    columns = fast_json_reader(SCHEMA, NAMES)(data)
    assert columns is not None
    expected = [
        dict.fromkeys(SCHEMA.names) if i == 5 else {**row, "b": row["is"]}
        for i, row in enumerate(rows)
    ]
    assert [column.to_pylist() for column in columns] == [
        [row[name] for row in expected] for name in SCHEMA.names
    ]


def test_it_gives_up_after_three_batches_in_vain() -> None:
    read = fast_json_reader(SCHEMA, {})
    good: list[bytes | None] = [b'{"a": 1}']
    bad: list[bytes | None] = [b'{"a": 1.5}']
    for data in (bad, bad, good, bad, bad):
        assert (read(data) is None) == (data is bad)
    assert read(bad) is None
    assert read(good) is None


@pytest.mark.parametrize("kind", ["timestamp", "date", "decimal(5,2)", "binary", "float"])
def test_types_that_need_more_are_left_to_the_exact_reader(kind: str) -> None:
    assert fast_json_reader(Schema.of(a="bigint", x=kind), {})([b"{}"]) is None


@pytest.mark.parametrize(
    "message",
    [b"null", b"", b"[]", b"{}null{}", b'{"a":1}{"a":2}', b'{"more":NaN}', b'{"s":"\xff"}'],
)
def test_what_is_no_single_object_is_left_to_the_exact_reader(message: bytes) -> None:
    assert fast_json_reader(SCHEMA, {})([message]) is None


def test_a_message_of_many_levels_does_no_harm() -> None:
    deep = b'{"more":' + b"[" * 200_000 + b"]" * 200_000 + b',"a":7}'
    columns = fast_json_reader(SCHEMA, {})([deep])
    assert columns is None or columns[0].to_pylist() == [7]


def test_columns_are_whole_arrays() -> None:
    columns = fast_json_reader(SCHEMA, {})([b"{}", b"{}"])
    assert columns is not None
    assert all(isinstance(column, pa.Array) for column in columns)
