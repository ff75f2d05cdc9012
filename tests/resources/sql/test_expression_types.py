"""Types of expressions, where they are certain. That they are Spark's own: test_spark_agrees.py."""

from __future__ import annotations

import pytest

from dagster_adjunct.resources.sql.expression import parse_expression
from dagster_adjunct.resources.sql.types import expression_type

TYPES = {
    "a": "tinyint",
    "c": "int",
    "d": "bigint",
    "f": "float",
    "g": "double",
    "s": "string",
    "v": "timestamp",
    "xs": None,
}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("C", "int"), ("c + 1", "int"), ("c + 1L", "bigint"), ("a * c", "int"), ("c / 2", "double"),
        ("d div 2", "bigint"),
        ("c + g", "double"), ("1.50", "decimal(3,2)"), ("3000000000", "bigint"), ("upper(s)", "string"),
        ("s is null and not c > 1", "boolean"), ("cast(s as decimal(10, 2))", "decimal(10,2)"), ("s::date", "date"),
        ("coalesce(c, d, null)", "bigint"), ("case when c > 1 then a else g end", "double"),
        ("v - interval 1 day", "timestamp"),
        ("to_date(s)", "date"), ("year(v)", "int"), ("nullif(s, 'x')", "string"), ("concat(s, 'x')", "string"),
        ("c + f", None), ("concat(c, d)", None), ("coalesce(c, s)", None), ("xs[0]", None), ("ours(c)", None),
        ("unknown + 1", None), ("ours(max_by(c, d))", None), ("case when c > 1 then xs end", None), ("null", "void"),
        ("array(c, d)", "array<bigint>"), ("array(xs)", "array<…>"), ("array(null, 1)", "array<int>"),
        ("split(s, ',')", "array<string>"), ("map(s, c)", "map<string,int>"), ("struct(c)", "struct<c:int>"),
        ("struct(ours(c))", "struct<…>"),
        ("interval 1 day", "interval…"), ("coalesce(null, c)", "int"),
        ("max_by(c, d)", "int"), ("max_by(c, d, 2)", "array<…>"),
        ("ceil(cast(c as decimal(5,1)))", "decimal(5,0)"), ("floor(cast(c as decimal(5,0)))", "decimal(5,0)"),
        ("1.5 + (0)", "decimal(3,1)"), ("1.5 + (-10)", "decimal(4,1)"), ("1.5 + -(10)", "decimal(12,1)"),
        ("cast(c as decimal)", "decimal(10,0)"), ("cast(c as decimal(5))", "decimal(5,0)"), ("round(s)", "double"),
        ("floor(s)", "bigint"), ("left(c, 2)", "string"), ("substring(v, 1, 2)", "string"), ("left(xs, 2)", None),
        ("-(interval 1 day)", "interval…"), ("substring(X'1F', 1)", None),
        ("+s", "double"), ("-s", "double"), ("abs(s)", "double"), ("d >> 1", "bigint"), ("a << 1", "int"),
        ("extract(hour from interval 1 day)", None), ("dateadd(HOUR, 1, v)", None), ("date_add(v, 1)", "date"),
        ("-2147483648", "int"), ("-(2147483648)", "bigint"),
        ("-9223372036854775808", "bigint"), ("1 - 2147483648", "bigint"),
    ],
)  # fmt: skip
def test_the_type_of_an_expression(text: str, kind: str | None) -> None:
    assert expression_type(parse_expression(text), TYPES) == kind
