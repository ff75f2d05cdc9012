"""`adjunct kv …`: tables and their entries, as they are in SQLite beside the lake."""

from __future__ import annotations

import base64
import json
import os
import re
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.cli.output import NOT_FOUND, run_command
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager
from dagster_adjunct.resources.key_value.segment import KeyValueTableConfiguration
from dagster_adjunct.resources.objects.lake import open_lake
from tests.orchestration.cli.commands import World, document, invoke, printed, refused
from tests.servers.postgres import GUARDED_PASSWORD, GUARDED_USER, PostgresServer

TABLE = "plant/machines"


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A lake with a table of three partitions."""
    world = SimpleNamespace(lake=open_lake(tmp_path / "lake"))
    printed(world, "kv", "create", TABLE, "--partitions", "3", "--create-scope")
    return world


def test_scopes_are_made_listed_and_deleted(world: World) -> None:
    assert document(world, "kv", "scope", "create", "a") == {"scope": "a", "created": True}
    assert "Scope a exists already." in printed(world, "kv", "scope", "create", "a")
    assert document(world, "kv", "scope", "list") == ["a", "plant"]
    assert document(world, "kv", "scope", "list", "--after", "a", "--limit", "1") == ["plant"]
    assert "plant" in printed(world, "kv", "scope", "list")
    assert "holds tables: machines" in refused(world, "kv", "scope", "delete", "plant")
    assert document(world, "kv", "scope", "delete", "a")["deleted"] is True
    assert "does not exist" in printed(world, "kv", "scope", "delete", "a")
    assert "scope name '_x' is not allowed" in refused(world, "kv", "scope", "create", "_x")


def test_a_table_is_created_once_updated_displayed_and_listed(world: World) -> None:
    again = ["kv", "create", TABLE, "--partitions", "3"]
    assert document(world, *again)["created"] is False
    assert "exists already" in printed(world, *again)
    assert "partitions 3 (wanted: 4)" in refused(world, "kv", "create", TABLE, "--partitions", "4")
    assert "no scope 'none'" in refused(world, "kv", "create", "none/t", "--partitions", "1")
    updated = document(world, "kv", "update", TABLE, "--longest-value", "9")
    assert (updated["updated"], updated["longest_value"], updated["partitions"]) == (True, 9, 3)
    displayed = document(world, "kv", "show", TABLE)
    assert (displayed["state"], displayed["backend"], displayed["longest_value"]) == (
        "active",
        "sqlite",
        9,
    )
    assert [one["partition"] for one in displayed["segments"]] == [0, 1, 2]
    path = world.lake.url + ".key-values.sqlite"
    assert all(path in one["location"] for one in displayed["segments"])
    assert path in printed(world, "kv", "show", TABLE)
    document(world, "kv", "create", "plant/b", "--partitions", "1")
    assert [one["name"] for one in document(world, "kv", "list", "plant")] == ["b", "machines"]
    assert [one["name"] for one in document(world, "kv", "list", "plant", "--after", "b")] == [
        "machines"
    ]
    assert "machines" in printed(world, "kv", "list", "plant")
    manager = KeyValueTableManager(world.lake)
    assert manager.get_configuration("plant", "machines") == KeyValueTableConfiguration(3, None, 9)


def test_a_table_is_stored_where_an_option_says(world: World, tmp_path: Path) -> None:
    path = str(tmp_path / "elsewhere.sqlite")
    assert document(world, "kv", "create", "plant/other", "--partitions", "1", "--sqlite", path)[
        "created"
    ]
    printed(world, "kv", "put", "plant/other", "k", "v")
    with sqlite3.connect(path) as bare:
        assert [
            name
            for (name,) in bare.execute("SELECT name FROM sqlite_master WHERE name LIKE 'kvt_%'")
        ] != []
    assert "elsewhere.sqlite" in refused(world, "kv", "create", "plant/other", "--partitions", "1")
    many = refused(
        world, "kv", "create", "plant/x", "--partitions", "1", "--sqlite", path, "--dynamodb"
    )
    assert "--sqlite and --dynamodb name more than one backend" in many
    for empty in ("--sqlite", "--postgres"):  # of a variable that is not set
        refused(world, "kv", "create", "plant/x", "--partitions", "1", empty, "")
    lone = refused(world, "kv", "create", "plant/x", "--partitions", "1", "--schema", "s")
    assert "--schema needs --postgres" in lone


def test_a_table_is_stored_in_objects_of_the_lake_and_is_found_there(world: World) -> None:
    made = document(world, "kv", "create", "plant/in-objects", "--partitions", "2", "--objects")
    assert made["backend"] == "objects"
    put = document(world, "kv", "put", "plant/in-objects", "k", "v", "--family", "f")
    (entry,) = document(world, "kv", "iterate", "plant/in-objects")["entries"]
    assert (entry["value"], entry["version"]) == ("v", put["version"])
    assert any("key-values" in item.key for item in world.lake.store.list("key-values"))
    assert document(world, "kv", "delete", "plant/in-objects", "--yes")["deleted"] is True


def test_a_table_is_stored_in_postgres_and_the_lake_holds_no_password(
    world: World, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [
        "kv",
        "create",
        "plant/pg",
        "--partitions",
        "2",
        "--postgres",
        "PLANT_DSN",
        "--schema",
        "kvt_cli",
    ]
    assert "PLANT_DSN" in refused(world, *made)
    monkeypatch.setenv("PLANT_DSN", postgres_server.dsn(GUARDED_USER, GUARDED_PASSWORD))
    postgres_server.execute("DROP SCHEMA IF EXISTS kvt_cli CASCADE")
    postgres_server.execute(f"CREATE SCHEMA kvt_cli AUTHORIZATION {GUARDED_USER}")
    # The first attempt was decided before it failed: this one goes on from there.
    document(world, *made)
    printed(world, "kv", "put", "plant/pg", "k", "v")
    tables = (
        "SELECT count(*) FROM pg_tables WHERE schemaname = 'kvt_cli' AND tablename LIKE 'kvt_%'"
    )
    assert postgres_server.execute(tables) != [(0,)]
    assert document(world, "kv", "get", "plant/pg", "k")["entries"][0]["value"] == "v"
    assert GUARDED_PASSWORD not in printed(world, "kv", "show", "plant/pg", "--json")
    kept = b"".join(path.read_bytes() for path in Path(world.lake.url).rglob("*") if path.is_file())
    assert b"PLANT_DSN" in kept
    assert GUARDED_PASSWORD.encode() not in kept
    assert document(world, "kv", "delete", "plant/pg", "--yes")["deleted"] is True


def test_a_table_in_a_place_that_cannot_be_reached_is_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ["kv", "create", "plant/far", "--partitions", "1", "--postgres", "FAR_DSN"]
    assert "FAR_DSN, which holds its DSN, is not set" in refused(world, *made)
    assert [one["name"] for one in document(world, "kv", "list", "plant")] == ["machines"]
    monkeypatch.setattr("dagster_adjunct.resources.key_value.manager._PATIENCE", 0.0)
    monkeypatch.setenv("FAR_DSN", "postgresql://nobody@127.0.0.1:1/none")
    error = invoke(world, *made).exception
    monkeypatch.delenv("FAR_DSN")
    assert "stays in the state 'creating'" in " ".join(getattr(error, "__notes__", ()))
    assert "--unregister" in " ".join(getattr(error, "__notes__", ()))
    assert document(world, "kv", "list", "plant")[0]["state"] == "creating"
    assert "FAR_DSN" in refused(world, "kv", "delete", "plant/far", "--yes")
    assert (
        document(world, "kv", "delete", "plant/far", "--unregister", "--yes")["forgotten"] is True
    )
    assert (
        document(world, "kv", "delete", "plant/far", "--unregister", "--yes")["forgotten"] is False
    )
    assert document(world, "kv", "create", "plant/far", "--partitions", "2")["created"] is True


def test_entries_are_written_read_and_removed_on_conditions(world: World) -> None:
    first = document(world, "kv", "put", TABLE, "m1", "20.5", "--if-absent")["version"]
    assert f"'m1': expected no such key, found version {first}" in refused(
        world, "kv", "put", TABLE, "m1", "21", "--if-absent"
    )
    second = document(world, "kv", "put", TABLE, "m1", "21", "--version", first)["version"]
    assert second != first
    assert f"found version {second}" in refused(
        world, "kv", "remove", TABLE, "m1", "--version", first
    )
    entries = document(world, "kv", "get", TABLE, "m1", "m2", code=NOT_FOUND)["entries"]
    assert entries == [{"family": None, "key": "m1", "value": "21", "version": second}, None]
    reported = printed(world, "kv", "get", TABLE, "m1", "m2", code=NOT_FOUND)
    assert second in reported
    assert re.search(r"m2 +no entry", re.sub(r"[│┃|]", " ", reported)), (
        "it stands where a version does, not a value"
    )
    assert "m1 is removed" in printed(world, "kv", "remove", TABLE, "m1", "--version", second)
    assert document(world, "kv", "get", TABLE, "m1", code=NOT_FOUND)["entries"] == [None]
    assert "can't both hold" in refused(
        world, "kv", "put", TABLE, "m1", "1", "--if-absent", "--version", first
    )
    for version in ("x", "abcd"):  # no hexadecimal digits, and too few
        result = invoke(world, "kv", "put", TABLE, "m1", "1", "--version", version)
        assert isinstance(result.exception, ConfigurationError)
        assert result.exception.setting == "--version"
        assert "32 hexadecimal digits" in result.exception.problem


def test_keys_of_a_family_are_removed_together(world: World) -> None:
    for key in ("a", "b", "c"):
        printed(world, "kv", "put", TABLE, key, key, "--family", "site")
    assert "2 keys with no --family" in refused(world, "kv", "remove", TABLE, "a", "b")
    assert "are removed" in printed(world, "kv", "remove", TABLE, "a", "b", "--family", "site")
    left = document(world, "kv", "iterate", TABLE, "--family", "site")["entries"]
    assert [(entry["family"], entry["key"], entry["value"]) for entry in left] == [
        ("site", "c", "c")
    ]


def test_keys_and_values_are_of_the_types_that_are_asked_for(world: World) -> None:
    blob = base64.b64encode(b"\0\xff").decode()
    types = ["--key-type", "int", "--value-type", "json"]
    negative = [
        "kv",
        "put",
        TABLE,
        *types,
        "--lake",
        world.lake.url,
        "--",
        "-7",
        '{"ü": [1, null]}',
    ]
    assert CliRunner().invoke(root, negative, catch_exceptions=False).exit_code == 0
    (entry,) = document(world, "kv", "iterate", TABLE, *types)["entries"]
    assert (entry["key"], entry["value"]) == (-7, {"ü": [1, None]})
    printed(world, "kv", "put", TABLE, blob, blob, "--key-type", "bytes", "--value-type", "bytes")
    (entry,) = document(
        world, "kv", "get", TABLE, blob, "--key-type", "bytes", "--value-type", "bytes"
    )["entries"]
    assert (entry["key"], entry["value"]) == (blob, blob)
    assert "key 'x' is not a whole number" in refused(
        world, "kv", "put", TABLE, "x", "1", "--key-type", "int"
    )
    assert "value '{' is not JSON" in refused(
        world, "kv", "put", TABLE, "x", "{", "--value-type", "json"
    )
    assert "value '#' is not base64" in refused(
        world, "kv", "put", TABLE, "x", "#", "--value-type", "bytes"
    )
    assert "serializer that wrote" in refused(
        world, "kv", "get", TABLE, blob, "--key-type", "bytes"
    )


def test_keys_are_printed_by_their_type_by_every_command(world: World) -> None:
    types = ["--key-type", "int", "--family", "f"]
    assert document(world, "kv", "put", TABLE, "05", "v", *types)["key"] == 5
    assert document(world, "kv", "get", TABLE, "5", *types)["entries"][0]["key"] == 5
    assert document(world, "kv", "remove", TABLE, "05", "6", *types)["removed"] == [5, 6]
    assert document(world, "kv", "put", TABLE, '{"a":1}', "v", "--key-type", "json")["key"] == {
        "a": 1
    }


def ended(world: World, capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return how the program ends with --json: its exit code, and what it has printed on both
    streams.
    """
    given = ["kv", *arguments, "--json", "--lake", world.lake.url]
    capfd.readouterr()
    code = run_command(lambda: root.main(given, prog_name="adjunct", standalone_mode=False))
    printed = capfd.readouterr()
    return code, printed.out, printed.err


def test_conditions_that_do_not_hold_are_reported_to_programs_too(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    types = ["--key-type", "int", "--family", "f"]
    version = document(world, "kv", "put", TABLE, "5", "v", *types)["version"]
    code, out, err = ended(world, capfd, "put", TABLE, "05", "w", "--if-absent", *types)
    assert code == 5
    reported = json.loads(out)
    assert reported["failures"] == [{"family": "f", "key": 5, "expected": None, "found": version}]
    assert reported["error"]["type"] == "ConditionsNotMetError"
    assert "nothing was written" in reported["error"]["problem"]
    assert "nothing was written" in err.replace("\n", " ")
    other = "00" * 16
    code, out, _ = ended(world, capfd, "remove", TABLE, "6", "--version", other, *types)
    assert (code, json.loads(out)["failures"]) == (
        5,
        [{"family": "f", "key": 6, "expected": other, "found": None}],
    )
    blob = base64.b64encode(b"\0\xff").decode()
    _, out, _ = ended(
        world, capfd, "put", TABLE, blob, "w", "--version", other, "--key-type", "bytes"
    )
    assert json.loads(out)["failures"][0]["key"] == blob


def test_other_errors_are_a_document_with_json_and_a_sentence_without(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = ended(world, capfd, "get", "plant/none", "m1")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (1, "KeyValueTableNotFoundError")
    assert "plant/none" in error["problem"]
    assert error["next_step"]
    given = ["kv", "get", "plant/none", "m1", "--lake", world.lake.url]
    assert run_command(lambda: root.main(given, prog_name="adjunct", standalone_mode=False)) == 1
    assert capfd.readouterr().out == ""


def test_pages_go_on_from_the_state_that_was_printed(world: World) -> None:
    written = {}
    for number in range(5):
        written[f"k{number}"] = document(
            world, "kv", "put", TABLE, f"k{number}", f"v{number}", "--family", "f"
        )
    pages, state = [], None
    while True:
        command = ["kv", "iterate", TABLE, "--family", "f", "--page-size", "2"]
        page = document(world, *command, *([] if state is None else ["--state", state]))
        if page["state"] is None:
            break
        pages.append([entry["key"] for entry in page["entries"]])
        state = page["state"]
    assert pages == [["k0", "k1"], ["k2", "k3"], ["k4"]]
    assert "No more entries" in printed(
        world, "kv", "iterate", TABLE, "--family", "f", "--state", str(state)
    )
    assert "Continue with --state " in printed(world, "kv", "iterate", TABLE, "--page-size", "2")
    whole = document(world, "kv", "iterate", TABLE, "--page-size", "2", "--all")["entries"]
    assert [(e["key"], e["value"], e["version"]) for e in whole] == [
        (key, f"v{key[1:]}", written[key]["version"]) for key in sorted(written)
    ]
    assert "of another family or range" in refused(
        world, "kv", "iterate", TABLE, "--state", str(state)
    )
    for wrong in ("!", "abcd", str(state)[:-8]):  # no base64, too short, and cut off
        result = invoke(world, "kv", "iterate", TABLE, "--state", wrong)
        assert isinstance(result.exception, ConfigurationError)
        assert result.exception.setting == "--state"


def test_a_page_is_full_though_the_partitions_of_the_table_hold_next_to_nothing(
    world: World,
) -> None:
    keys = {f"k{number}" for number in range(9)}  # without a family, over three partitions
    for key in sorted(keys):
        document(world, "kv", "put", TABLE, key, "v")
    page = document(world, "kv", "iterate", TABLE, "--page-size", "7", "--keys-only")
    rest = document(
        world, "kv", "iterate", TABLE, "--page-size", "7", "--keys-only", "--state", page["state"]
    )
    assert (len(page["entries"]), len(rest["entries"])) == (7, 2)
    assert {entry["key"] for entry in page["entries"] + rest["entries"]} == keys
    assert "End of entries." in printed(world, "kv", "iterate", TABLE)


def test_a_range_of_a_family_is_iterated(world: World) -> None:
    for key in ("a1", "a2", "b1", "b2"):
        printed(world, "kv", "put", TABLE, key, "v", "--family", "f")

    def keys(*options: str) -> list[str]:
        entries = document(world, "kv", "iterate", TABLE, "--family", "f", "--keys-only", *options)[
            "entries"
        ]
        assert all("value" not in entry for entry in entries)
        return [entry["key"] for entry in entries]

    assert keys("--prefix", "a") == ["a1", "a2"]
    assert keys("--start", "a2", "--end", "b2") == ["a2", "b1"]
    assert "No entries" in printed(world, "kv", "iterate", TABLE, "--family", "g")
    assert "--prefix needs --family" in refused(world, "kv", "iterate", TABLE, "--prefix", "a")


def test_a_sealed_table_is_read_and_a_deleted_one_is_gone(world: World) -> None:
    printed(world, "kv", "put", TABLE, "m1", "1")
    assert document(world, "kv", "seal", TABLE)["sealed"] is True
    assert "sealed already" in printed(world, "kv", "seal", TABLE)
    assert "is sealed" in refused(world, "kv", "put", TABLE, "m1", "2")
    assert document(world, "kv", "get", TABLE, "m1")["entries"][0]["value"] == "1"
    assert "Aborted" in str(invoke(world, "kv", "delete", TABLE, input="n\n").output)
    assert document(world, "kv", "delete", TABLE, "--yes")["deleted"] is True
    assert "does not exist" in printed(world, "kv", "delete", TABLE, "--yes")
    assert "no key-value table 'plant/machines'" in refused(world, "kv", "get", TABLE, "m1")


def test_what_is_typed_wrongly_is_reported_in_a_sentence(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    lake = ["--lake", world.lake.url]
    for arguments, reported in [
        (["get", "machines", "m1"], "has no scope"),
        (["create", "plant/ü", "--partitions", "1"], "is not allowed"),
        (["show", "plant/none"], "KeyValueTableNotFoundError"),
    ]:
        code = run_command(
            lambda a=arguments: root.main(
                ["kv", *a, *lake], prog_name="adjunct", standalone_mode=False
            )
        )
        assert code == 1
        assert reported in capfd.readouterr().err.replace("\n", " ")
    assert CliRunner().invoke(root, ["kv", "create", "plant/t"]).exit_code == 2


def test_what_changes_of_tables_leave_in_the_lake_is_deleted_by_expire(world: World) -> None:
    manager = KeyValueTableManager(world.lake)
    for limit in range(1, 5):
        manager.update("plant", "machines", KeyValueTableConfiguration(3, limit))

    def pages() -> list[str]:
        return [item.key for item in world.lake.store.list("metadata/") if "/pages/" in item.key]

    before = pages()
    for key in before:  # as if an hour had passed
        os.utime(Path(world.lake.url) / key, (0, 0))
    printed(world, "dataset", "expire", "--dry-run")
    assert pages() == before
    printed(world, "dataset", "expire")
    assert (len(before) > 4, len(pages())) == (True, 1)
    assert manager.get_configuration("plant", "machines").longest_key == 4
