"""Which changes of columns are possible, and what they make of names and stored names."""

from __future__ import annotations

import pytest

from dagster_adjunct.resources.errors import MalformedDocumentError
from dagster_adjunct.resources.schemas.column_changes import (
    ColumnChanges,
    Evolution,
    FixedColumns,
    evolve,
)
from dagster_adjunct.resources.schemas.schema import AS_NAMED, Schema, StoredNames

_CUSTOMER = "struct<id:bigint,mail:string>"
_STORED = Schema.of(id="bigint", note="string", customer=_CUSTOMER)


def _changed(
    schema: Schema,
    declared: Schema | None = None,
    *,
    names: StoredNames = AS_NAMED,
    renamed: dict[str, str] | None = None,
    drop: tuple[str, ...] = (),
    ordered: bool = False,
) -> Evolution:
    changes = ColumnChanges(renamed or {}, drop)
    return evolve(schema, names, declared, changes, FixedColumns(["id"]), ordered=ordered)


def test_a_renamed_column_keeps_its_stored_name() -> None:
    after = _changed(_STORED, renamed={"note": "remark", "customer.mail": "email"})
    assert after.schema == Schema.of(
        id="bigint", remark="string", customer="struct<id:bigint,email:string>"
    )
    assert after.names.store(after.schema) == _STORED
    again = _changed(after.schema, names=after.names, renamed={"note": "remark"})
    assert (again.changes, again.names) == ((), after.names)


def test_a_member_stays_renamed_when_its_column_is_renamed() -> None:
    first = _changed(_STORED, renamed={"customer.mail": "email"})
    after = _changed(first.schema, names=first.names, renamed={"customer": "buyer"})
    assert after.schema.types["buyer"] == "struct<id:bigint,email:string>"
    assert after.names.store(after.schema) == _STORED


def test_a_dropped_name_that_comes_again_is_stored_under_another() -> None:
    dropped = _changed(_STORED, drop=("note", "customer.mail"))
    assert dropped.names.retired == {("note",), ("customer", "mail")}
    declared = Schema.of(id="bigint", note="int", customer="struct<mail:int,id:bigint>")
    after = _changed(dropped.schema, declared, names=dropped.names)
    assert after.schema == Schema.of(id="bigint", customer="struct<id:bigint,mail:int>", note="int")
    stored = after.names.store(after.schema)
    assert stored.types == {
        "id": "bigint",
        "customer": "struct<id:bigint,`mail#2`:int>",
        "note#2": "int",
    }
    third = _changed(after.schema, names=after.names, drop=("note",))
    back = _changed(third.schema, Schema.of(**third.schema.types, NOTE="date"), names=third.names)
    assert back.names.store(back.schema).names[-1] == "NOTE#3"


def test_a_new_column_does_not_take_the_stored_name_of_a_renamed_one() -> None:
    renamed = _changed(_STORED, renamed={"note": "remark"})
    wider = Schema.of(**renamed.schema.types, note="string")
    after = _changed(renamed.schema, wider, names=renamed.names)
    assert after.names.store(after.schema).names == ("id", "note", "customer", "note#2")


def test_members_within_arrays_and_maps_are_renamed_and_dropped() -> None:
    stored = Schema.of(
        id="bigint", lines="array<struct<sku:string,n:int>>", tags="map<string,struct<a:int,b:int>>"
    )
    after = _changed(stored, renamed={"lines[].sku": "item"}, drop=("tags[*].a",))
    assert after.schema.types == {
        "id": "bigint",
        "lines": "array<struct<item:string,n:int>>",
        "tags": "map<string,struct<b:int>>",
    }
    assert after.names.names == ((("lines", "item"), "sku"),)
    assert after.names.retired == {("tags", "a")}


def test_members_are_added_anywhere_and_keep_their_order_unless_asked() -> None:
    declared = Schema.of(
        id="bigint", customer="struct<name:string,mail:string,id:bigint>", note="string"
    )
    after = _changed(_STORED, declared)
    assert after.schema.types["customer"] == "struct<id:bigint,mail:string,name:string>"
    assert after.schema.names == _STORED.names
    ordered = _changed(_STORED, declared, ordered=True)
    assert ordered.schema.types == declared.types
    assert ordered.schema.names == declared.names


@pytest.mark.parametrize(
    ("renamed", "drop", "columns"),
    [
        ({"note": "customer"}, (), None),
        ({"note": "CUSTOMER"}, (), None),
        ({"note": "customer", "customer": "note"}, (), None),
        ({"note": "x", "customer": "x"}, (), None),
        ({"note": "x"}, ("note",), None),
        ({"note": "id"}, (), None),
        ({"id": "number"}, (), None),
        ({"note": "__x"}, (), None),
        ({"customer.mail": "id"}, (), None),
        ({}, ("id",), None),
        ({}, ("customer.id", "customer.mail"), None),
        ({"note": "x"}, (), {"id": "bigint", "note": "string", "customer": _CUSTOMER}),
        ({}, ("note",), {"id": "bigint", "note": "string", "customer": _CUSTOMER}),
        ({"note": "x"}, (), {"id": "bigint", "customer": _CUSTOMER}),
        ({}, (), {"id": "bigint", "customer": _CUSTOMER}),
        ({}, (), {"id": "bigint", "note": "int", "customer": _CUSTOMER}),
        ({}, (), {"id": "int", "note": "string", "customer": _CUSTOMER}),
        ({}, (), {"id": "bigint", "note": "string", "customer": "struct<id:bigint>"}),
        ({}, (), {"id": "bigint", "note": "string", "customer": "string"}),
    ],
)
def test_changes_that_would_lose_or_mix_up_values_are_refused(
    renamed: dict[str, str], drop: tuple[str, ...], columns: dict[str, str] | None
) -> None:
    declared = Schema.of(columns) if columns else None
    after = _changed(_STORED, declared, renamed=renamed, drop=drop)
    assert after.problems
    assert (after.schema, after.names) == (_STORED, AS_NAMED)


def test_what_is_removed_is_told_with_what_to_declare() -> None:
    after = _changed(_STORED, Schema.of(id="bigint", customer=_CUSTOMER))
    assert after.problems == (
        'note (string) is removed: declare drop=["note"], or renamed={"note": "…"}',
    )


def test_stored_names_come_back_from_json() -> None:
    assert StoredNames.from_json(AS_NAMED.to_json()) == AS_NAMED
    after = _changed(_STORED, renamed={"customer.mail": "email"}, drop=("note",))
    assert StoredNames.from_json(after.names.to_json()) == after.names


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        "names",
        {"names": []},
        {"names": [], "retired": [], "more": 1},
        {"names": [{"path": [], "stored": "a"}], "retired": []},
        {"names": [{"path": ["a"], "stored": ""}], "retired": []},
        {"names": [{"path": ["a"], "stored": 1}], "retired": []},
        {"names": [{"path": "a", "stored": "b"}], "retired": []},
        {"names": [{"path": ["a"], "stored": "b"}] * 2, "retired": []},
        {"names": [{"path": ["a"], "stored": "b"}], "retired": [["b"]]},
        {"names": [], "retired": [[1]]},
    ],
)
def test_malformed_stored_names_are_refused(document: object) -> None:
    with pytest.raises(MalformedDocumentError):
        StoredNames.from_json(document)
