from __future__ import annotations

import pytest

from dagster_adjunct.resources.errors import ConfigurationError, InvalidNameError
from dagster_adjunct.resources.table_backends.columns import (
    Kind,
    describe_function,
    function_from_description,
    parse_column,
    register_backend,
)
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable


def test_a_description_holds_a_registered_name_and_plain_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = SqliteTable("t.sqlite", "t", ["a", "b"], columns={"a": "int", "b": "date"}, create=True)
    description = describe_function(store)
    assert description == {
        "backend": "sqlite",
        "path": str(tmp_path / "t.sqlite"),
        "table": "t",
        "key": ["a", "b"],
        "columns": {"a": "int", "b": "date"},
        "create": True,
        "busy_timeout": 10.0,
        "forget_after": None,
    }
    assert describe_function(function_from_description(description)) == description
    assert describe_function(MemoryTable("x")) == {"backend": "memory", "name": "x"}


def test_unknown_backends_are_named_with_those_that_are_known():
    with pytest.raises(
        ConfigurationError,
        match=(
            r"'nosuch', which is not registered; registered are .*memory, postgres, redis, sqlite"
        ),
    ):
        function_from_description({"backend": "nosuch"})
    with pytest.raises(ConfigurationError) as caught:
        describe_function({})
    assert caught.value.backend == "dict"
    with pytest.raises(ConfigurationError) as caught:
        function_from_description({"backend": "memory", "name": "x", "nosuch": 1})
    assert (caught.value.argument, caught.value.backend) == ("backend", "memory")


def test_a_name_is_registered_once():
    register_backend("sqlite", SqliteTable)
    with pytest.raises(ConfigurationError) as caught:
        register_backend("sqlite", MemoryTable)
    assert caught.value.backend == "sqlite"
    with pytest.raises(InvalidNameError):
        register_backend("a.b", MemoryTable)


@pytest.mark.parametrize(
    ("declared", "kind", "size"),
    [
        ("string", Kind.STRING, ""),
        ("VARCHAR( 10 )", Kind.STRING, "(10)"),
        ("character varying(10)", Kind.STRING, "(10)"),
        ("Int", Kind.INTEGER, ""),
        ("double  precision", Kind.FLOAT, ""),
        ("timestamp(3) with time zone", Kind.TIMESTAMP, "(3)"),
        ("decimal(10, 2)", Kind.DECIMAL, "(10,2)"),
        ("TEXT DECIMAL(10,2)", Kind.DECIMAL, "(10,2)"),
        ("bytea", Kind.BINARY, ""),
        ("text[]", Kind.LIST, ""),
        ("array<decimal(10,2)>", Kind.LIST, ""),
        ("TEXT ARRAY INTEGER", Kind.LIST, ""),
        ("array<binary>", Kind.LIST, ""),
        ("array<json>", Kind.OTHER, ""),
        ("Struct<a: int, `b.c`: array<string>>", Kind.NESTED, ""),
        ("map<string, decimal(10,2)>", Kind.NESTED, ""),
        ("array<array<int>>", Kind.NESTED, ""),
        ("map<int, string>", Kind.OTHER, ""),
        ("jsonb", Kind.JSON, ""),
        ("int); drop table x", Kind.OTHER, ""),
    ],
)
def test_types_are_known_by_sparks_and_by_sqls_names(declared, kind, size):
    column = parse_column("c", declared)
    assert (column.kind, column.size) == (kind, size)
