"""Schemas that are inferred from samples: they fit the sample, are printed as they are declared,
and say where they are unsure.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.declarations import to_declaration, write_python
from dagster_adjunct.resources.schemas.inference import Inference, infer_schema
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema

NOON = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
NAMES = st.sampled_from(["a", "b c", "Id", "on", "class", "x`y", "é", "'q\"", "__z"])
SIMPLE = st.sampled_from(
    [
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.booleans(),
        st.text("ab1-é ", max_size=5),
        st.binary(max_size=3),
        st.dates(dt.date(1900, 1, 1)),
        st.datetimes(dt.datetime(1900, 1, 1), timezones=st.just(dt.UTC)),
        st.decimals(-1000, 1000, places=2),
    ]
)


# A drawn kind of values is a strategy for its values: null, and values of one type.
KINDS = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        inner.map(lambda each: st.lists(st.none() | each, max_size=3)),
        st.dictionaries(NAMES, inner, min_size=1, max_size=3).map(
            lambda members: st.fixed_dictionaries(
                {}, optional={name: st.none() | each for name, each in members.items()}
            )
        ),
    ),
    max_leaves=6,
)
COLUMNS = st.dictionaries(NAMES.filter(lambda name: name != "__z"), KINDS, min_size=1, max_size=4)


@st.composite
def samples(draw):
    columns = draw(COLUMNS)
    record = st.fixed_dictionaries({name: st.none() | kind for name, kind in columns.items()})
    return draw(st.lists(record, min_size=1, max_size=6))


@pytest.mark.lengthy
@settings(max_examples=40, deadline=None, derandomize=True)
@given(samples())
def test_a_sample_fits_the_schema_that_is_inferred_from_it(records):
    schema = infer_schema(records).schema
    table = fit_to_schema(to_arrow_table(records, "sample", schema), schema, "sample")
    assert table.num_rows == len(records)
    assert eval(write_python(schema), {"Schema": Schema}) == schema
    assert (
        Schema.of(yaml.safe_load(yaml.safe_dump(to_declaration(schema), sort_keys=False))) == schema
    )


def doubts_of(records, **options):
    inferred = infer_schema(records, **options)
    return inferred.schema, {doubt.path: str(doubt) for doubt in inferred.doubts}


def test_nested_json_has_its_types():
    records = [
        {"id": 1, "customer": {"id": 7, "address": {"city": "Ulm"}}, "lines": [{"sku": "a"}]},
        {"id": 2, "customer": None, "lines": [{"sku": "b", "price": 1.5}, {"price": 2.25}]},
    ]
    schema, doubts = doubts_of(records)
    assert schema == Schema.of(
        id="bigint",
        customer={"id": "bigint", "address": {"city": "string"}},
        lines=[{"sku": "string", "price": "double"}],
    )
    assert doubts == {}


@pytest.mark.parametrize(
    ("values", "kind", "path", "counts"),
    [
        ([1, 2, "n/a"], "bigint", "a", ("2 whole", "1 text")),
        ([1, "x", "y"], "string", "a", ("1 whole", "2 text")),
        ([1, 2, 2.5], "double", "a", ("2 whole", "1 fraction")),
        ([{"x": 1}, {"x": "1"}, {"x": 3}], "struct<x:bigint>", "a.x", ("2 whole", "1 text")),
        ([{"x": 1}, {"x": 2}, [1]], "struct<x:bigint>", "a", ("2 object", "1 array")),
        (["2026-01-31", "2026-02-01"], "string", "a", ("all 2", "dates")),
        (["2026-01-31T10:00Z"], "string", "a", ("all 1", "times with a zone")),
        (["2026-01-31T10:00:00"], "string", "a", ("all 1", "times without a zone")),
        (["12", "7"], "string", "a", ("all 2", "numbers")),
        ([[], []], "array<string>", "a", ("all 2", "empty")),
        ([[None], []], "array<string>", "a[]", ("all of 1",)),
        ([None, None], "string", "a", ("all of 2",)),
        ([{}, {}], "map<string,string>", "a", ("all 2", "empty")),
        ([{"x": None}], "struct<x:string>", "a.x", ("all of 1",)),
        ([{"x": 1, "X": 2}], "map<string,bigint>", "a", ("1 object",)),
        ([2**70], "decimal(38,0)", "a", ("22 digits",)),
        ([{"x": 1, "y": 1}, {"x": 1}], "struct<x:bigint,y:bigint>", "a.y", ("1 of 2",)),
    ],
)
def test_it_says_where_it_is_unsure(values, kind, path, counts):
    schema, doubts = doubts_of([{"a": value} for value in values])
    assert schema.field("a").type == kind
    assert list(doubts) == [path]
    assert all(count in doubts[path] for count in counts)


def test_a_column_of_few_records_is_a_doubt():
    schema, doubts = doubts_of([{"a": 1}, {"a": 2, "b": 1}, {"a": 3}, {"a": 4, "b": None}])
    assert schema == Schema.of(a="bigint", b="bigint")
    assert "2 of 4" in doubts["b"]


SPARSE = [{f"attribute{n}": f"v{n}", f"other{n // 2}": "v"} for n in range(12)]
EVENTS = [{f"event{n}": {f"field{n}": n}} for n in range(12)]


@pytest.mark.parametrize(
    ("values", "kind", "doubt"),
    [
        (SPARSE, "map<string,string>", "18 different names in 12 objects, none in more than 2"),
        ([{each: {"n": 1}} for each in "abcdefgh"], "map<string,struct<n:bigint>>", "8 different"),
        ([{each: [1.5]} for each in "abcdefgh"], "map<string,array<double>>", "8 different"),
        ([{"2026-01-31": 1, "2026-02-01": 2}], "map<string,bigint>", "2 different"),
        ([{"17": "x"}, {"18": "y", "17": None}], "map<string,string>", "2 different"),
        (
            [{"a": 1}, {"b": 2.5}, {"c": 3}],
            "struct<a:bigint,b:double,c:bigint>",
            "map<string,double>",
        ),
        # no maps: values of several types or structs, one name in most objects, two names
        ([*SPARSE, {"x": 1}], "struct<attribute0:", None),
        (EVENTS, "struct<event0:struct<field0:bigint>", None),
        ([{**each, "all": "v"} for each in SPARSE], "struct<attribute0:", None),
        ([{"home": "x"}, {"work": "y"}], "struct<home:string,work:string>", None),
    ],
)
def test_objects_whose_names_vary_and_have_one_type_are_maps(values, kind, doubt):
    schema, doubts = doubts_of([{"a": value} for value in values])
    assert schema.field("a").type.startswith(kind)
    if doubt is None:
        assert "a" not in doubts
    else:
        assert list(doubts) == ["a"]
        assert doubt in doubts["a"]


def test_objects_with_very_many_names_are_maps():
    records = [{"id": n, "views": {f"page-{n}": {"n": n}, "all": {"n": 1}}} for n in range(5_000)]
    schema, doubts = doubts_of(records)
    assert schema == Schema.of(id="bigint", views="map<string,struct<n:bigint>>")
    assert "64" in doubts["views"]
    wide = [{"a": {f"m{n}": n for n in range(100)}} for _ in range(3)]
    assert doubts_of(wide)[0].field("a").type.startswith("struct<m0:bigint,")


def test_texts_are_dates_and_times_if_that_is_asked_for():
    records = [{"day": "2026-01-31", "at": "2026-01-31T10:00:00.5+01:00", "l": ["2026-01-31"]}]
    schema, doubts = doubts_of(records, times=True)
    assert schema == Schema.of(day="date", at="timestamp", l="array<date>")
    assert doubts == {}


def test_columns_of_texts_get_what_all_of_them_can_be_read_as():
    rows = [
        ("1", "1.5", "true", "2026-01-31", "007", "2026-01-31 10:00:00Z", "x", "1"),
        ("-2", "3", "false", "2026-02-01", "12", "2026-01-31T10:00Z", None, "y"),
    ]
    inference = Inference("file", texts=True)
    for row in rows:
        inference.add(dict(zip("abcdefgh", row, strict=True)))
    inferred = inference.result()
    assert list(inferred.schema.types.values()) == [
        *("bigint", "double", "boolean", "date", "string", "timestamp", "string", "string")
    ]
    assert [doubt.path for doubt in inferred.doubts] == ["b", "e", "h"]


def test_columns_that_might_be_a_key_are_unique_and_simple():
    records = [{"id": n, "kind": n % 2, "code": f"c{n}", "x": {"y": n}, "f": n / 2} for n in (1, 2)]
    assert infer_schema(records).unique == ("id", "kind", "code", "x.y")
    records.append({"id": 3, "kind": 1, "code": None, "x": None, "f": 0.1})
    assert infer_schema(records).unique == ("id",)


@pytest.mark.parametrize(
    ("records", "column"),
    [
        ([], None),
        ([{"a": 1, "A": 2}], "a"),
        ([{"a": dt.datetime(2026, 1, 31)}], "a"),
        ([{"a": [object()]}], "a[]"),
        ([{"__a": 1}], "__a"),
    ],
)
def test_what_no_schema_can_hold_is_rejected_by_name(records, column):
    with pytest.raises(SchemaMismatchError) as failure:
        infer_schema(records)
    assert failure.value.column == column


def test_decimals_get_the_digits_that_they_need():
    records = [{"a": Decimal("1.50")}, {"a": Decimal("-12345.1")}, {"a": 7}]
    assert infer_schema(records).schema == Schema.of(a="decimal(7,2)")
