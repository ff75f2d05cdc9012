"""What serializers write, read and refuse."""

from __future__ import annotations

import io
import json
import math
import pickle
from datetime import UTC, datetime
from typing import Any, Self

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, PrivateAttr, computed_field, model_validator

from dagster_adjunct.errors import ConfigurationError, SerializationError
from dagster_adjunct.key_value import (
    AvroSerializer,
    BytesSerializer,
    FunctionSerializer,
    IntegerSerializer,
    JsonSerializer,
    ModelSerializer,
    TextSerializer,
)

SCHEMA = json.dumps(
    {
        "type": "record",
        "name": "R",
        "fields": [{"name": "a", "type": "long"}, {"name": "b", "type": ["null", "string"]}],
    }
)


class Order(BaseModel):
    id: int
    note: str | None = Field(None, alias="remark")


class Area(BaseModel, extra="forbid"):
    side: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def area(self) -> int:
        return self.side**2


class Weighed(BaseModel):
    weight: float | None = None
    parts: list[dict[str, tuple[float, ...]]] = []


class Other(BaseModel):
    id: int


class Bigger(Order):
    size: int = 0


class Account(BaseModel):
    owner: str
    token: str = Field("", exclude=True)
    _seen: int = PrivateAttr(0)


class Renamed(BaseModel):
    id: int = Field(validation_alias="read", serialization_alias="written")


class Port(BaseModel):
    id: int = Field(0, ge=0)
    thing: Any = None
    order: Order | None = None


class Range(BaseModel):
    low: int
    high: int

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


class Measured(BaseModel, ser_json_inf_nan="strings"):
    weight: float
    parts: list[float] = []


def seen(account: Account) -> Account:
    account._seen = 5
    return account


MILLIS = '{"type": "long", "logicalType": "timestamp-millis"}'
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
TWO = json.dumps(
    ["null"]
    + [
        {"type": "record", "name": name, "fields": [{"name": "k", "type": "long"}]}
        for name in ("First", "Second")
    ]
)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=5,
)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_whole_numbers_have_eight_bytes_in_their_order(number: int, other: int) -> None:
    serializer = IntegerSerializer()
    assert serializer.from_bytes(serializer.to_bytes(number)) == number
    assert (serializer.to_bytes(number) < serializer.to_bytes(other)) == (number < other)
    assert len(serializer.to_bytes(number)) == 8


@given(_JSON)
def test_json_is_read_as_it_was_written(value: Any) -> None:
    serializer = JsonSerializer()
    read = serializer.from_bytes(serializer.to_bytes(value))
    assert read == value
    assert repr(read) == repr(json.loads(json.dumps(value, sort_keys=True)))


def test_equal_dictionaries_have_equal_bytes() -> None:
    serializer = JsonSerializer()
    assert (
        serializer.to_bytes({"b": 1, "a": "é"})
        == serializer.to_bytes({"a": "é", "b": 1})
        == b'{"a":"\xc3\xa9","b":1}'
    )


@pytest.mark.parametrize(
    ("serializer", "value", "stored"),
    [
        (TextSerializer(), "é\x00", b"\xc3\xa9\x00"),
        (TextSerializer(), "", b""),
        (BytesSerializer(), b"\x00\xff", b"\x00\xff"),
        (IntegerSerializer(), 0, b"\x80" + bytes(7)),
        (IntegerSerializer(), -1, b"\x7f" + b"\xff" * 7),
        (ModelSerializer(Order), Order(id=1, remark="x"), b'{"id":1,"remark":"x"}'),
        (ModelSerializer(Area), Area(side=2), b'{"side":2}'),
        (ModelSerializer(Account), Account(owner="x"), b'{"owner":"x"}'),
        (AvroSerializer(SCHEMA), {"a": -1, "b": "x"}, b"\x01\x02\x02x"),
        (FunctionSerializer(str.encode, bytes.decode), "x", b"x"),
    ],
)
def test_a_value_has_these_bytes_and_is_read_from_them(
    serializer: Any, value: Any, stored: bytes
) -> None:
    assert serializer.to_bytes(value) == stored
    assert pickle.loads(pickle.dumps(serializer)).from_bytes(stored) == value


@pytest.mark.parametrize(
    ("serializer", "value", "read"),
    [
        (ModelSerializer(Account), seen(Account(owner="x")), Account(owner="x")),
        (AvroSerializer(TWO), ("Second", {"k": 1}), {"k": 1}),
        (AvroSerializer('"float"'), 0.1, 0.10000000149011612),
        (AvroSerializer(MILLIS), NOON, NOON),
        (AvroSerializer('{"type": "array", "items": "double"}'), [0.1, 1.0], [0.1, 1.0]),
    ],
)
def test_only_this_is_read_as_something_else(serializer: Any, value: Any, read: Any) -> None:
    assert serializer.from_bytes(serializer.to_bytes(value)) == read


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_a_class_writes_as_texts_are_read_as_numbers(number: float) -> None:
    serializer = ModelSerializer(Measured)
    read = serializer.from_bytes(serializer.to_bytes(Measured(weight=number, parts=[number])))
    assert repr(read) == repr(Measured(weight=number, parts=[number]))


def test_equal_maps_are_equal_bytes_in_avro() -> None:
    serializer = AvroSerializer('{"type": "map", "values": {"type": "map", "values": "long"}}')
    one = serializer.to_bytes({"a": {"x": 1, "y": 2}, "b": {}})
    assert one == serializer.to_bytes({"b": {}, "a": {"y": 2, "x": 1}})


def test_avro_is_what_others_write() -> None:
    written = io.BytesIO()
    fastavro.schemaless_writer(
        written, fastavro.parse_schema(json.loads(SCHEMA)), {"a": 5, "b": None}
    )
    assert AvroSerializer(SCHEMA).to_bytes({"a": 5, "b": None}) == written.getvalue()


@pytest.mark.parametrize(
    ("serializer", "value"),
    [
        (TextSerializer(), b"x"),
        (TextSerializer(), 5),
        (TextSerializer(), "\ud800"),
        (BytesSerializer(), "x"),
        (BytesSerializer(), 5),
        (BytesSerializer(), None),
        (IntegerSerializer(), 2**63),
        (IntegerSerializer(), -(2**63) - 1),
        (IntegerSerializer(), True),
        (IntegerSerializer(), 1.0),
        (JsonSerializer(), (1, 2)),
        (JsonSerializer(), {"a": (1,)}),
        (JsonSerializer(), {1: 2}),
        (JsonSerializer(), [{None: 2}]),
        (JsonSerializer(), float("nan")),
        (JsonSerializer(), [float("inf")]),
        (JsonSerializer(), {"a"}),
        (JsonSerializer(), "\ud800"),
        (JsonSerializer(), {"\udfff": 1}),
        (ModelSerializer(Order), Other(id=1)),
        (ModelSerializer(Order), {"id": 1}),
        (ModelSerializer(Weighed), Weighed(weight=float("nan"))),
        (ModelSerializer(Weighed), Weighed(parts=[{"a": (1.0, float("inf"))}])),
        (ModelSerializer(Order), Bigger(id=1, size=5)),
        (ModelSerializer(Port), Port(order=Bigger(id=1, size=5))),
        (ModelSerializer(Account), Account(owner="x", token="y")),
        (ModelSerializer(Renamed), Renamed(read=1)),  # type: ignore[call-arg]
        (ModelSerializer(Port), Port.model_construct(id=-1)),
        (ModelSerializer(Port), Port(thing=(1, 2))),
        (ModelSerializer(Port), Port(thing=NOON)),
        (AvroSerializer(MILLIS), NOON.replace(microsecond=1231)),
        (AvroSerializer(MILLIS), NOON.replace(tzinfo=None)),
        (AvroSerializer('{"type": "int", "logicalType": "date"}'), NOON),
        (AvroSerializer('"int"'), 2**31),
        (AvroSerializer('"float"'), 1e300),
        (AvroSerializer('"long"'), True),
        (AvroSerializer('{"type": "array", "items": "long"}'), (1, 2)),
        (AvroSerializer(SCHEMA), {"a": "x", "b": None}),
        (AvroSerializer(SCHEMA), {"a": 1}),
        (AvroSerializer(SCHEMA), {"a": 1, "b": None, "c": 1}),
        (AvroSerializer(SCHEMA), 5),
    ],
)
def test_what_would_not_be_read_as_it_was_is_refused(serializer: Any, value: Any) -> None:
    with pytest.raises(SerializationError):
        serializer.to_bytes(value)


@pytest.mark.parametrize(
    ("serializer", "stored"),
    [
        (TextSerializer(), b"\xff"),
        (IntegerSerializer(), b"1234567"),
        (IntegerSerializer(), b""),
        (JsonSerializer(), b"{"),
        (JsonSerializer(), b"\xff"),
        (JsonSerializer(), b"NaN"),
        (JsonSerializer(), '"text"'.encode("utf-16")),
        (ModelSerializer(Order), b'{"id":"x"}'),
        (ModelSerializer(Order), b"5"),
        (AvroSerializer(SCHEMA), b""),
        (AvroSerializer(SCHEMA), b"\x01\x02\x02x!"),
        (AvroSerializer(SCHEMA), b"\x01\x06"),
    ],
)
def test_bytes_of_something_else_are_refused(serializer: Any, stored: bytes) -> None:
    with pytest.raises(SerializationError):
        serializer.from_bytes(stored)


def test_what_a_model_refuses_is_reported_by_its_fields_or_of_the_whole() -> None:
    with pytest.raises(SerializationError, match=r"the whole document: low is above high(\W|$)"):
        ModelSerializer(Range).from_bytes(b'{"low":2,"high":1}')
    with pytest.raises(
        SerializationError, match=r"as it was written: the whole document: low is above high\."
    ):
        ModelSerializer(Range).to_bytes(Range.model_construct(low=2, high=1))
    with pytest.raises(
        SerializationError, match=r"low: Field required; high: Input should be a valid integer"
    ):
        ModelSerializer(Range).from_bytes(b'{"high":"x"}')


@pytest.mark.parametrize("schema", ["", "{}", "5", '{"type": "nothing"}'])
def test_what_is_no_avro_schema_is_refused_at_once(schema: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        AvroSerializer(schema)
    assert caught.value.argument == "schema"


@pytest.mark.parametrize("wrong", [dict, "Plane", None])
def test_what_is_no_pydantic_class_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(ConfigurationError) as failure:
        ModelSerializer(wrong)
    assert failure.value.argument == "model"
