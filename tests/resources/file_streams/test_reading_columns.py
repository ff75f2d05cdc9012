"""Files whose columns are not the declared ones, and declarations that change after files were
admitted.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    SchemaMismatchError,
    StreamExistsError,
)
from dagster_adjunct.resources.file_streams import reading
from dagster_adjunct.resources.file_streams import streams as file_streams
from dagster_adjunct.resources.file_streams.folder import FolderStreams, file_stream
from dagster_adjunct.resources.files.columns import ColumnRules, DeclaredColumns
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from tests.resources.file_streams.written_files import (
    FORMATS,
    WRITERS,
    Rows,
    put,
    ranges,
    records,
    stream_of,
)

NESTED = ("parquet", "jsonl", "avro")
OLD = Schema.of(k="bigint", mail="string", note="string")
NOW = Schema.of(k="bigint", email="string")


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


@pytest.fixture(autouse=True)
def _nothing_counted() -> None:
    reading._counted.clear()


def values(streams: FolderStreams, names: Any = None) -> Rows:
    """Return the records as they are read from the files, and as they were counted."""
    found = streams.read_arrow(ranges(streams))
    reading._counted.clear()
    again = streams.read_arrow(ranges(streams))
    assert records(found) == records(again)
    declared = streams.declaration(streams.tested).columns.names  # type: ignore[attr-defined]
    rows: Rows = found.select(names or declared).to_pylist(maps_as_pydicts="strict")
    return rows


def refused(lake: Lake, folder: Path, schema: Schema, format: str, **options: Any) -> Any:
    with pytest.raises(SchemaMismatchError) as caught:
        stream_of(lake, folder, schema, format, **options)
    assert "a.file" in caught.value.problem
    assert caught.value.file == f"{folder}/a.file"
    return caught.value


@pytest.mark.parametrize("format", FORMATS)
def test_by_default_other_columns_are_errors_that_name_the_rules(
    lake: Lake, tmp_path: Path, format: str
) -> None:
    put(tmp_path, "a.file", WRITERS[format](OLD, [{"k": 1, "mail": "x", "note": "n"}]))
    error = refused(lake, tmp_path, NOW, format)
    assert error.column in ("email", "mail")
    if format != "jsonl":
        assert 'renamed={"mail": "email"}' in error.next_step
        assert "drop=" in error.next_step


@pytest.mark.parametrize("format", ["parquet", "csv", "avro"])
def test_a_missing_column_is_null_only_if_declared_so(
    lake: Lake, tmp_path: Path, format: str
) -> None:
    put(tmp_path, "a.file", WRITERS[format](Schema.of(k="bigint"), [{"k": 1}, {"k": 2}]))
    wanted = Schema.of(k="bigint", tags="string", at="timestamp")
    error = refused(lake, tmp_path, wanted, format)
    assert error.column == "tags"
    assert 'missing="null"' in error.next_step
    rules = ColumnRules(missing="null")
    streams = stream_of(lake, tmp_path, wanted, format, column_rules=rules)
    null = {"tags": None, "at": None}
    assert values(streams) == [{"k": 1, **null}, {"k": 2, **null}]
    assert values(streams, ["tags"]) == [{"tags": None}] * 2
    error = refused(lake, tmp_path, wanted, format, column_rules=rules, key=["tags"])
    assert error.column == "tags"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "rules", [ColumnRules(undeclared="ignore"), ColumnRules(drop=("note", "mail"))]
)
def test_undeclared_columns_are_left_out_if_declared_so(
    lake: Lake, tmp_path: Path, format: str, rules: ColumnRules
) -> None:
    put(tmp_path, "a.file", WRITERS[format](OLD, [{"k": 1, "mail": "x", "note": "n"}]))
    put(tmp_path, "b.file", WRITERS[format](Schema.of(k="bigint"), [{"k": 2}]))
    streams = stream_of(lake, tmp_path, Schema.of(k="bigint"), format, column_rules=rules)
    assert values(streams) == [{"k": 1}, {"k": 2}]


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_dropped_does_not_hide_what_else_is_not_declared(
    lake: Lake, tmp_path: Path, format: str
) -> None:
    put(tmp_path, "a.file", WRITERS[format](OLD, [{"k": 1, "mail": "x", "note": "n"}]))
    rules = ColumnRules(drop=("mail",))
    error = refused(lake, tmp_path, Schema.of(k="bigint"), format, column_rules=rules)
    assert error.column == "note"


@pytest.mark.parametrize("format", FORMATS)
def test_a_renamed_column_is_read_under_both_names_also_through_several_renames(
    lake: Lake, tmp_path: Path, format: str
) -> None:
    for number, name in enumerate(["mail", "e_mail", "email"]):
        rows = [{"k": number, name: f"{number}@x"}]
        put(
            tmp_path, f"{number}", WRITERS[format](Schema.of({"k": "bigint", name: "string"}), rows)
        )
    rules = ColumnRules(renamed={"mail": "e_mail", "e_mail": "email"})
    streams = stream_of(lake, tmp_path, NOW, format, column_rules=rules)
    assert values(streams) == [{"k": n, "email": f"{n}@x"} for n in range(3)]


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_with_both_names_of_a_column_is_an_error(
    lake: Lake, tmp_path: Path, format: str
) -> None:
    both = Schema.of(k="bigint", mail="string", email="string")
    put(tmp_path, "a.file", WRITERS[format](both, [{"k": 1, "mail": "x", "email": "y"}]))
    rules = ColumnRules(renamed={"mail": "email"})
    error = refused(lake, tmp_path, NOW, format, column_rules=rules)
    assert error.column == "email"


def test_lines_of_json_may_have_names_of_both_times(lake: Lake, tmp_path: Path) -> None:
    put(
        tmp_path,
        "a",
        b'{"k":1,"mail":"x"}\n{"k":2,"email":"y"}\n{"k":3,"mail":null,"email":"z"}\n{"k":4}\n',
    )
    rules = ColumnRules(renamed={"mail": "email"})
    streams = stream_of(lake, tmp_path, NOW, "jsonl", column_rules=rules)
    assert [row["email"] for row in values(streams)] == ["x", "y", "z", None]
    put(tmp_path, "b.file", b'{"k":5}\n{"k":6,"mail":"x","email":"y"}\n')
    with pytest.raises(SchemaMismatchError) as caught:
        streams.admit(streams.tested)  # type: ignore[attr-defined]
    assert caught.value.line == 2


OLD_STRUCTS = Schema.of(
    k="bigint",
    customer={"id": "int", "mail": "string", "secret": "string"},
    lines=[{"sku": "string", "n": "int", "old": {"x": "int"}}],
)
NEW_STRUCTS = Schema.of(
    k="bigint",
    client={"id": "bigint", "email": "string", "since": "date"},
    lines=[{"item": "string", "n": "bigint"}],
)
OLD_ROWS = [
    {"k": 1, "customer": {"id": 7, "mail": "m", "secret": "s"},
     "lines": [{"sku": "a", "n": 1, "old": {"x": 1}}, None, {"sku": None, "n": None, "old": None}]},
    {"k": 2, "customer": None, "lines": []},
    {"k": 3, "customer": {"id": None, "mail": None, "secret": None}, "lines": None},
]  # fmt: skip
NEW_ROWS = [
    {"k": 1, "client": {"id": 7, "email": "m", "since": None},
     "lines": [{"item": "a", "n": 1}, None, {"item": None, "n": None}]},
    {"k": 2, "client": None, "lines": []},
    {"k": 3, "client": {"id": None, "email": None, "since": None}, "lines": None},
]  # fmt: skip
STRUCT_RULES = ColumnRules(
    renamed={"customer": "client", "customer.mail": "email", "lines[].sku": "item"},
    drop=("customer.secret", "lines[].old"),
)


@pytest.mark.parametrize("format", NESTED)
@pytest.mark.parametrize("slow", [False, True])
def test_members_of_structs_are_renamed_widened_added_and_dropped(
    lake: Lake, tmp_path: Path, format: str, slow: bool
) -> None:
    # A text that looks like an invalid number makes the fast parser of JSON give up.
    note = {"note": ":NaN," if slow else "x"}
    old = Schema.of({**OLD_STRUCTS.types, "note": "string"})
    new = Schema.of({**NEW_STRUCTS.types, "note": "string"})
    put(tmp_path, "a.file", WRITERS[format](old, [{**row, **note} for row in OLD_ROWS]))
    put(tmp_path, "b.file", WRITERS[format](new, [{**row, **note} for row in NEW_ROWS]))
    streams = stream_of(lake, tmp_path, new, format, column_rules=STRUCT_RULES)
    assert values(streams) == [{**row, **note} for row in NEW_ROWS * 2]
    without = STRUCT_RULES.model_copy(update={"drop": ("customer.secret",)})
    error = refused(lake, tmp_path, new, format, column_rules=without)
    assert "old" in error.problem
    assert error.column == "lines"
    ignoring = without.model_copy(update={"undeclared": "ignore"})
    streams = stream_of(lake, tmp_path, new, format, column_rules=ignoring)
    assert values(streams) == [{**row, **note} for row in NEW_ROWS * 2]


def test_fields_left_out_are_never_keys_of_maps(lake: Lake, tmp_path: Path) -> None:
    put(
        tmp_path,
        "a",
        b'{"m":{"x":1,"y":{"z":1}},"other":{"deep":[1]}}\n'.replace(b'"y":{"z":1}', b'"y":2'),
    )
    schema = Schema.of(m="map<string,int>")
    rules = ColumnRules(undeclared="ignore")
    streams = stream_of(lake, tmp_path, schema, "jsonl", column_rules=rules)
    assert values(streams) == [{"m": {"x": 1, "y": 2}}]


@pytest.mark.parametrize("format", FORMATS)
def test_wider_types_are_read_and_narrower_ones_refused(
    lake: Lake, tmp_path: Path, format: str
) -> None:
    narrow = Schema.of(k="int", share="float", price="decimal(10,2)", n="int")
    wide = Schema.of(k="bigint", share="double", price="decimal(20,4)", n="decimal(12,0)")
    put(tmp_path, "a.file", WRITERS[format](narrow, [
        {"k": 1, "share": 0.5, "price": Decimal("1.25"), "n": -3},
        {"k": None, "share": None, "price": None, "n": None},
    ]))  # fmt: skip
    streams = stream_of(lake, tmp_path, wide, format)
    assert values(streams) == [
        {"k": 1, "share": 0.5, "price": Decimal("1.2500"), "n": Decimal(-3)},
        {"k": None, "share": None, "price": None, "n": None},
    ]
    if format in ("parquet", "avro"):
        put(tmp_path, "a.file", WRITERS[format](wide, []))
        error = refused(lake, tmp_path, narrow, format)
        assert error.column == "k"


@pytest.mark.parametrize(
    "rules",
    [
        ColumnRules(renamed={"k": "email"}),
        ColumnRules(drop=("email",)),
        ColumnRules(drop=("client.id",)),
        ColumnRules(renamed={"mail": "emial"}),
    ],
)
def test_rules_that_contradict_the_schema_are_refused(tmp_path: Path, rules: ColumnRules) -> None:
    schema = Schema.of(k="bigint", email="string", client={"id": "int"})
    with pytest.raises((SchemaMismatchError, ConfigurationError)):
        file_stream("wrong", str(tmp_path), format="jsonl", schema=schema, column_rules=rules)


def test_names_with_dots_and_backticks_are_renamed(lake: Lake, tmp_path: Path) -> None:
    old = Schema.of({"a.b": "int", "s": {"c.d": "int", "e`f": "int"}})
    put(tmp_path, "a", WRITERS["parquet"](old, [{"a.b": 1, "s": {"c.d": 2, "e`f": 3}}]))
    rules = ColumnRules(renamed={"a.b": "ab", "s.`c.d`": "cd", "s.`e``f`": "`e.f`"})
    schema = Schema.of({"ab": "int", "s": {"cd": "int", "e.f": "int"}})
    streams = stream_of(lake, tmp_path, schema, "parquet", column_rules=rules)
    assert values(streams) == [{"ab": 1, "s": {"cd": 2, "e.f": 3}}]


# -- the declaration changes


def declare_again(
    streams: FolderStreams, folder: Path, schema: Schema, format: str, **more: Any
) -> None:
    """Declare the stream as a later process does."""
    name = streams.tested  # type: ignore[attr-defined]
    file_streams._declared["files"].pop(name)
    file_stream(name, str(folder), schema=schema, format=format, **more)  # type: ignore[arg-type]
    streams.admit(name)


@pytest.mark.parametrize("format", FORMATS)
def test_a_declaration_evolves_and_older_files_stay_readable(
    lake: Lake, tmp_path: Path, format: str
) -> None:
    first = Schema.of(k="int", mail="string", note="string")
    put(tmp_path, "1", WRITERS[format](first, [{"k": 1, "mail": "a", "note": "n"}]))
    streams = stream_of(lake, tmp_path, first, format)
    assert values(streams) == [{"k": 1, "mail": "a", "note": "n"}]

    second = Schema.of(k="bigint", mail="string", note="string", at="date")
    put(
        tmp_path,
        "2",
        WRITERS[format](
            second, [{"k": 2**40, "mail": "b", "note": "n", "at": dt.date(2026, 1, 2)}]
        ),
    )
    declare_again(streams, tmp_path, second, format, column_rules=ColumnRules(missing="null"))
    assert [row["k"] for row in values(streams)] == [1, 2**40]
    assert [row["at"] for row in values(streams)] == [None, dt.date(2026, 1, 2)]

    third = Schema.of(k="bigint", email="string", at="date")
    put(tmp_path, "3", WRITERS[format](third, [{"k": 3, "email": "c", "at": None}]))
    rules = ColumnRules(missing="null", renamed={"mail": "email"}, drop=("note",))
    declare_again(streams, tmp_path, third, format, column_rules=rules)
    assert values(streams) == [
        {"k": 1, "email": "a", "at": None},
        {"k": 2**40, "email": "b", "at": dt.date(2026, 1, 2)},
        {"k": 3, "email": "c", "at": None},
    ]


@pytest.mark.parametrize(
    ("schema", "rules", "part"),
    [
        (Schema.of(k="bigint"), ColumnRules(), "note"),
        (Schema.of(k="int", note="string"), ColumnRules(), "was bigint"),
        (Schema.of(k="bigint", text="string"), ColumnRules(), "note"),
    ],
)
def test_a_declaration_that_does_not_continue_the_stored_one_is_refused(
    lake: Lake, tmp_path: Path, schema: Schema, rules: ColumnRules, part: str
) -> None:
    streams = stream_of(lake, tmp_path, Schema.of(k="bigint", note="string"), "jsonl")
    with pytest.raises(StreamExistsError, match=part):
        declare_again(streams, tmp_path, schema, "jsonl", column_rules=rules)


def test_columns_from_the_path_can_be_added_later(lake: Lake, tmp_path: Path) -> None:
    put(tmp_path, "day=2026-01-02/1", b'{"k":1}\n')
    streams = stream_of(lake, tmp_path, Schema.of(k="bigint"), "jsonl")
    schema = Schema.of(k="bigint", day="date", p="string")
    declare_again(streams, tmp_path, schema, "jsonl", path_columns=("day",), path_column="p")
    assert values(streams) == [{"k": 1, "day": dt.date(2026, 1, 2), "p": "day=2026-01-02/1"}]


def test_matching_is_as_a_plain_model_says() -> None:
    """Names of flat files against a model: each declared column is found under its first name that
    is there.
    """
    random_ = Random(5)
    for _ in range(2_000):
        declared = random_.sample("abcd", random_.randint(1, 3))
        older = {old: random_.choice(declared) for old in random_.sample("wxyz", 3)}
        drop = tuple(random_.sample("uv", 1))
        rules = ColumnRules(
            missing=random_.choice(["fail", "null"]),
            undeclared=random_.choice(["fail", "ignore"]),
            renamed=older,
            drop=drop,
        )
        given = random_.sample("abcdwxyzuvt", random_.randint(1, 6))
        columns = DeclaredColumns(Schema.of(dict.fromkeys(declared, "int")), rules)
        found: dict[str, list[str]] = {}
        unknown = []
        for name in given:
            now = name if name in declared else older.get(name)
            if now is not None:
                found.setdefault(now, []).append(name)
            elif name not in drop:
                unknown.append(name)
        fails = any(len(names) > 1 for names in found.values())
        fails |= bool(unknown) and rules.undeclared == "fail"
        fails |= len(found) < len(declared) and rules.missing == "fail"
        try:
            sources = columns.match(given, "file f")
        except SchemaMismatchError:
            assert fails
        else:
            assert not fails
            assert sources == {name: names[0] for name, names in found.items()}
