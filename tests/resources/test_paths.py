"""Paths to values inside columns of structs."""

from __future__ import annotations

import pytest

from dagster_adjunct.resources.schemas.paths import find_path, split_path

TYPES = {
    "id": "bigint",
    "customer": "struct<id:bigint,address:struct<city:string,`post.code`:string>>",
    "customer.name": "string",
    "a.b": "struct<c:int>",
    "lines": "array<struct<sku:string>>",
    "unknown": None,
}


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("id", ("id",)),
        ("customer.id", ("customer", "id")),
        ("`a.b`.c", ("a.b", "c")),
        ("a.`b``c`", ("a", "b`c")),
        ("größe.x", ("größe", "x")),
        ("a.", ()),
        (".a", ()),
        ("", ()),
        ("a..b", ()),
        ("`a`b.c", ()),
        ("sent to.city", ("sent to", "city")),
    ],
)
def test_a_path_is_split_at_dots_outside_backticks(text: str, steps: tuple[str, ...]) -> None:
    assert split_path(text) == steps


@pytest.mark.parametrize(
    ("name", "expression", "kind", "last"),
    [
        ("customer.id", "`customer`.`id`", "bigint", "id"),
        ("customer.address.city", "`customer`.`address`.`city`", "string", "city"),
        ("customer.address.`post.code`", "`customer`.`address`.`post.code`", "string", "post.code"),
        ("`a.b`.c", "`a.b`.`c`", "int", "c"),
    ],
)
def test_a_path_is_found_with_its_type(name: str, expression: str, kind: str, last: str) -> None:
    path = find_path(name, TYPES)
    assert path is not None
    assert (path.expression, path.type, path.name, str(path)) == (expression, kind, last, name)


@pytest.mark.parametrize(
    "name",
    ["id", "customer.name", "customer.none", "id.x", "lines.sku", "unknown.x", "none.x", "a.b.c"],
)
def test_columns_and_what_is_not_there_are_no_paths(name: str) -> None:
    assert find_path(name, TYPES) is None
