from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dagster_adjunct.resources.errors import MalformedDocumentError, SchemaMismatchError
from dagster_adjunct.resources.schemas.records import fit_to_schema
from dagster_adjunct.resources.schemas.schema import Field, Schema, check_key_types
from dagster_adjunct.resources.schemas.types import SIMPLE_TYPES

ALL = Schema.of({f"c_{kind}": kind for kind in SIMPLE_TYPES}, price="decimal(10, 2)")


def test_types_have_one_spelling() -> None:
    assert Schema.of(a="LONG", b="Integer", c="decimal(10, 2)") == Schema.of(
        a="bigint", b="int", c="decimal(10,2)"
    )


def test_a_schema_comes_back_from_json_and_arrow() -> None:
    assert Schema.from_json(ALL.to_json()) == ALL
    assert Schema.from_arrow(ALL.to_arrow()) == ALL
    assert ALL.to_arrow().field("c_timestamp").type == pa.timestamp("us", tz="UTC")


def test_a_type_that_can_not_be_stored_is_refused_with_the_choice() -> None:
    for kind in (
        "array<void>",
        "map<int,int>",
        "struct<>",
        "decimal(39,2)",
        "decimal(0,0)",
        "decimal(5,6)",
    ):
        with pytest.raises(SchemaMismatchError) as failure:
            Schema.of(a=kind)
        assert failure.value.facts == {"column": "a"}
    assert Schema.of(a="decimal(38,38)").to_arrow().field("a").type == pa.decimal128(38, 38)
    with pytest.raises(SchemaMismatchError) as failure:
        Schema.from_arrow(pa.schema([("at", pa.timestamp("us"))]))
    assert failure.value.facts == {"column": "at"}


@pytest.mark.parametrize("name", ["", "__offset"])
def test_names_kept_for_the_record_itself_are_refused(name: str) -> None:
    with pytest.raises(SchemaMismatchError) as failure:
        Field(name, "int")
    assert failure.value.column == name


def test_names_that_differ_only_in_case_are_refused() -> None:
    with pytest.raises(SchemaMismatchError) as failure:
        Schema.of(year="int", Year="int")
    assert failure.value.facts == {"column": "year"}


def test_an_unknown_column_names_those_there_are() -> None:
    with pytest.raises(SchemaMismatchError) as failure:
        Schema.of(year="int", month="int").select(["yaer"], "stream 'flights'")
    assert failure.value.facts == {"column": "yaer"}


def test_a_malformed_stored_schema_is_named() -> None:
    with pytest.raises(MalformedDocumentError) as failure:
        Schema.from_json([{"name": "a"}])
    assert failure.value.document == "a schema"


def test_differences_are_reported_in_words() -> None:
    left = Schema.of(a="int", b="string", c="date")
    assert left.difference(left) == ""
    reported = left.difference(Schema.of(a="bigint", b="string", d="date"))
    assert reported == "c is missing; d (date) is not expected; a is bigint, expected int"
    assert "the order is b, a" in Schema.of(a="int", b="int").difference(
        Schema.of(b="int", a="int")
    )


def test_quoted_names_survive_in_ddl() -> None:
    assert Schema.of({"a`b c": "int"}).ddl() == "`a``b c` INT"


@pytest.mark.parametrize("kind", ["double", "float", "boolean"])
def test_keys_that_can_not_be_compared_exactly_are_refused(kind: str) -> None:
    with pytest.raises(SchemaMismatchError) as failure:
        check_key_types(Schema.of(k=kind), ["k"], "dataset 'planes'")
    assert failure.value.facts == {"column": "k"}


def test_conform_widens_and_decodes_without_loss() -> None:
    table = pa.table(
        {
            "i": pa.array([1, None], pa.int8()),
            "s": pa.array(["x", "x"]).dictionary_encode(),
            "t": pa.array(
                [dt.datetime(2026, 1, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=2)))] * 2
            ),
            "d": pa.array([Decimal("1.5"), None], pa.decimal128(5, 1)),
            "f": pa.array([1, 2], pa.int32()),
            "n": pa.nulls(2),
        }
    )
    schema = Schema.of(
        n="date", i="bigint", s="string", t="timestamp", d="decimal(10,2)", f="double"
    )
    made = fit_to_schema(table, schema, "records")
    assert made.schema == schema.to_arrow()
    assert made.to_pylist()[0] == {
        "n": None,
        "i": 1,
        "s": "x",
        "t": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        "d": Decimal("1.50"),
        "f": 1.0,
    }


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([300]), "tinyint"),
        (pa.array([1.5]), "int"),
        (pa.array(["12"]), "int"),
        (pa.array([12]), "string"),
        (pa.array([dt.datetime(2026, 1, 1)]), "timestamp"),
        (pa.array([Decimal("1.234")]), "decimal(10,2)"),
        (pa.array([b"\xff"]), "string"),
        (pa.array([1]), "boolean"),
        (pa.array([-1e39]), "float"),
    ],
)
def test_conform_refuses_what_would_lose_or_invent_a_value(values: pa.Array, kind: str) -> None:
    with pytest.raises(SchemaMismatchError) as failure:
        fit_to_schema(pa.table({"a": values}), Schema.of(a=kind), "stream 's'")
    assert failure.value.column == "a"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([0, None, 10**13, 0], pa.timestamp("s", "UTC")), "timestamp"),
        (pa.array([0, None, -(10**17), 0], pa.timestamp("ms", "UTC")), "timestamp"),
        (pa.array([0, None, 1, 2], pa.timestamp("ns", "UTC")), "timestamp"),
        (pa.array([1, None, 300, 301]), "tinyint"),
        (pa.array([Decimal("1.00"), None, Decimal("1.23"), Decimal("1.24")]), "decimal(10,1)"),
        (pa.array([0, None, 1, 86_400_000], pa.date64()), "date"),
        (pa.array([math.inf, None, 1e39, 2e39]), "float"),
    ],
)
def test_a_value_that_does_not_fit_is_reported_by_its_row(values: pa.Array, kind: str) -> None:
    """However the column is cut; and a sensitive one is not told at all."""
    cut = pa.chunked_array([values.slice(0, 1), values.slice(1)])
    for schema in (Schema.of(k="int", a=kind), Schema.of(k="int", a=kind).with_sensitive("a")):
        with pytest.raises(SchemaMismatchError) as refused:
            fit_to_schema(pa.table({"k": pa.array([1] * 4), "a": cut}), schema, "stream 's'")
        assert refused.value.facts == {"column": "a", "row": 2}
        assert (refused.value.column, refused.value.row) == ("a", 2)
    displayed = f"{refused.value.problem}{refused.value.__cause__}"
    assert not any(text in displayed for text in ("1000", "-1000", "300", "1.23")), displayed


def test_conform_wants_exactly_the_columns() -> None:
    with pytest.raises(SchemaMismatchError) as failure:
        fit_to_schema(pa.table({"a": [1], "c": [1]}), Schema.of(a="bigint", b="int"), "stream 's'")
    assert failure.value.facts == {"column": "b"}
    with pytest.raises(SchemaMismatchError) as failure:
        fit_to_schema(pa.table([[1], [2]], names=["a", "a"]), Schema.of(a="bigint"), "stream 's'")
    assert failure.value.column == "a"


def test_times_that_do_not_fit_say_what_to_write() -> None:
    ns = pa.array([1_700_000_000_123_456_789], pa.timestamp("ns", "UTC"))
    schema = Schema.of(at="timestamp")
    with pytest.raises(SchemaMismatchError) as failure:
        fit_to_schema(pa.table({"at": ns}), schema, "stream 's'")
    assert failure.value.facts == {"column": "at", "row": 0}
    rounded = pc.floor_temporal(ns, unit="microsecond")
    assert (
        fit_to_schema(pa.table({"at": rounded}), schema, "s").column("at")[0].value
        == 1_700_000_000_123_456
    )
    naive = ns.cast(pa.timestamp("ns"))
    with pytest.raises(SchemaMismatchError) as failure:
        fit_to_schema(pa.table({"at": naive}), schema, "stream 's'")
    assert failure.value.facts == {"column": "at"}
    reported = pc.floor_temporal(pc.assume_timezone(naive, "UTC"), unit="microsecond")
    assert fit_to_schema(pa.table({"at": reported}), schema, "s").num_rows == 1
