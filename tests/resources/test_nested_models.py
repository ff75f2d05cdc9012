"""Schemas of Pydantic models and dataclasses, whose instances are records of them."""

import datetime as dt
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema

Price = Annotated[Decimal, Field(max_digits=10, decimal_places=2)]


class Kind(Enum):
    NEW = "new"
    OLD = "old"


class Level(Enum):
    ONE = 1


class Line(BaseModel):
    sku: str
    price: Price
    cost: Decimal | None = Field(None, max_digits=8, decimal_places=3)
    tags: list[str] = []


@dataclass
class Address:
    city: str | None
    since: dt.date | None = None


class Order(BaseModel):
    id: int
    at: dt.datetime
    lines: list[Line]
    to: Optional[Address] = None  # noqa: UP045
    ratio: float = 0.0
    is_paid: bool = False
    state: Literal["open", "closed"] = "open"
    kind: Kind | None = None
    attributes: dict[str, tuple[int, ...]] = {}
    raw: bytes = b""


@dataclass
class Visit:
    page: str
    order: Order | None
    prices: list[Price] = field(default_factory=list)


SCHEMA = Schema.of(
    id="bigint",
    at="timestamp",
    lines=[{"sku": "string", "price": "decimal(10,2)", "cost": "decimal(8,3)", "tags": ["string"]}],
    to={"city": "string", "since": "date"},
    ratio="double",
    is_paid="boolean",
    state="string",
    kind="string",
    attributes="map<string,array<bigint>>",
    raw="binary",
)


def test_models_and_dataclasses_declare_columns():
    assert Schema.from_model(Order) == SCHEMA
    visit = Schema.of(page="string", order=SCHEMA, prices=["decimal(10,2)"])
    assert Schema.from_model(Visit) == visit


def test_the_values_of_a_model_fit_its_schema():
    noon = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
    order = Order(id=1, at=noon, lines=[Line(sku="a", price="1.50")], to=Address("Ulm"))
    order.kind = Kind.OLD
    rows = [{"page": "p", "order": order, "prices": [Decimal("2.5")]}]
    schema = Schema.from_model(Visit)
    table = fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")
    found = table.to_pylist(maps_as_pydicts="strict")[0]
    assert found["order"]["lines"] == [
        {"sku": "a", "price": Decimal("1.50"), "cost": None, "tags": []}
    ]
    assert found["order"]["kind"] == "old"
    assert found["order"]["to"] == {"city": "Ulm", "since": None}


class Empty(BaseModel):
    pass


class Tree(BaseModel):
    children: list["Tree"]


@pytest.mark.parametrize(
    "hint",
    [
        Decimal,
        Annotated[Decimal, Field(max_digits=40, decimal_places=2)],
        int | str,
        Any,
        set[int],
        dict[int, str],
        tuple[int, str],
        Level,
        Literal[1, 2],
        list,
        object,
        dt.time,
        Empty,
        Tree,
    ],
)
def test_a_type_that_no_column_can_have_is_rejected_by_its_path(hint):
    @dataclass
    class Inner:
        x: list[hint]

    @dataclass
    class Outer:
        a: Inner | None

    with pytest.raises(SchemaMismatchError) as failure:
        Schema.from_model(Outer)
    assert failure.value.column.startswith("a.x[]")


def test_a_class_without_fields_is_no_schema():
    with pytest.raises(SchemaMismatchError):
        Schema.from_model(int)
