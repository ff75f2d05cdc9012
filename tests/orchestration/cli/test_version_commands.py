"""`adjunct dataset …` on versions: what the commands do, what they print, and what they refuse."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_adjunct.assets.bounded.advance import advance_version_set
from dagster_adjunct.assets.declaration.dataset import bounded_dataset, version_set
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.validation.validators import min_rows
from dagster_adjunct.orchestration.cli import options
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.cli.options import parse_expiry
from dagster_adjunct.orchestration.cli.output import NOT_FOUND, run_command
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.commit_log import seal_json, unseal_json
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.orchestration.cli import commands

SCHEMA = Schema.of(tailnum="string", seats="int")
PLANES = bounded_dataset(
    "planes", input="lake.planes", key="tailnum", partitions=2, validators=[min_rows(2)]
)
WHY = ["--reason", "ticket 7", "--by", "ada"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Three versions, of which the last was rejected: v1, v2 (served), v3."""
    world = World(open_lake(tmp_path / "lake"), IN_PROCESS)
    world.stream("planes", SCHEMA, ["tailnum"], 2)
    for version, rows in (
        ("v1", [("N1", 1), ("N2", 2)]),
        ("v2", [("N1", 1), ("N2", 20), ("N3", 3)]),
        ("v3", [("N1", 1)]),
    ):
        world.send("planes", rows, version=version)
        world.advance(PLANES)
    return world


def printed(world: World, *arguments: str, code: int = 0) -> str:
    return commands.printed(world, "dataset", *arguments, code=code)


def document(world: World, *arguments: str, code: int = 0) -> Any:
    return commands.document(world, "dataset", *arguments, code=code)


def refused(world: World, *arguments: str) -> str:
    return commands.refused(world, "dataset", *arguments)


def served(world: World) -> str | None:
    return StoredVersions(world.lake, PLANES).require_current().sealed.name


def ids(world: World) -> dict[str, str]:
    return {str(ref.name): ref.id for ref in StoredVersions(world.lake, PLANES).versions()}


def test_versions_lists_what_is_served_and_what_was_rejected_and_why(world: World) -> None:
    facts = document(world, "versions", "planes")
    assert [(v["name"], v["rows"], v["state"], v["marks"]) for v in facts] == [
        ("v1", 2, "sealed", []),
        ("v2", 3, "sealed", ["served"]),
        ("v3", 1, "rejected", []),
    ]
    assert "min_rows" in facts[2]["reason"]
    table = printed(world, "versions", "planes")
    assert "sealed, served" in table
    assert "rejected" in table


def test_show_with_a_version_reports_what_the_validators_reported_of_it(world: World) -> None:
    displayed = document(world, "show", "planes", "v3")
    (verdict,) = displayed["verdicts"]
    assert (verdict["name"], verdict["passed"], verdict["facts"]) == (
        "min_rows",
        False,
        {"rows": 1},
    )
    assert displayed["counters"]["read"] == 1
    assert "failed" in printed(world, "show", "planes", "v3")
    assert document(world, "show", "planes")["version"]["name"] == "v2"
    assert "versions of planes" in printed(world, "show", "planes")


def test_pin_rollback_and_unpin_are_in_the_history_with_who_and_why(world: World) -> None:
    pinned = document(world, "pin", "planes", "v1", "--expires", "2h", *WHY)
    assert (pinned["changed"], pinned["version"], pinned["served"]) == (
        True,
        ids(world)["v1"],
        ids(world)["v1"],
    )
    left = datetime.fromisoformat(pinned["pin"]["expires_at"]) - datetime.now(UTC)
    assert timedelta(minutes=119) < left < timedelta(minutes=121)
    assert served(world) == "v1"
    marks = [
        (version["name"], version["marks"]) for version in document(world, "versions", "planes")
    ]
    assert marks == [("v1", ["served", "pinned"]), ("v2", ["next when unpinned"]), ("v3", [])]
    assert "Unpin it first" in refused(world, "rollback", "planes", *WHY)
    assert "unpin" in printed(world, "unpin", "planes", *WHY)
    assert document(world, "unpin", "planes", *WHY)["changed"] is False
    assert "nothing to do" in printed(world, "unpin", "planes", *WHY)
    assert "(v1) is served now" in printed(world, "rollback", "planes", *WHY)
    done = document(world, "history", "planes", "--limit", "3")
    assert [(entry["action"], entry["by"], entry["reason"]) for entry in done] == [
        ("rollback", "ada", "ticket 7"),
        ("unpin", "ada", "ticket 7"),
        ("pin", "ada", "ticket 7"),
    ]
    assert done[0]["served"] == ids(world)["v1"]
    assert "ticket 7" in printed(world, "history", "planes")


@pytest.mark.lengthy
def test_a_change_says_which_members_of_the_version_set_moved_with_it(world: World) -> None:
    seats, crews = version_set(
        "fleet",
        bounded_dataset("seats", input="lake.seats", key="tailnum", partitions=2),
        bounded_dataset("crews", input="lake.crews", key="tailnum", partitions=2),
    )
    for name in ("seats", "crews"):
        world.stream(name, SCHEMA, ["tailnum"], 2)
        for number in (1, 2):
            world.send(name, [("N1", number)], version=f"v{number}")
    advance_version_set(
        [seats, crews], lake=world.lake, systems=world.systems, spark=IN_PROCESS, by="test"
    )
    assert "crews changed with it" in printed(world, "rollback", "seats", *WHY)
    assert "crews changed with it" in printed(world, "abandon", "seats", "v9", "--yes", *WHY)
    assert document(world, "show", "crews")["version"]["name"] == "v1"
    assert document(world, "pin", "crews", "v2", *WHY)["others"] == ["seats"]
    assert document(world, "show", "seats")["version"]["name"] == "v2"


@pytest.mark.parametrize("action", ["revoke", "remove-version", "abandon"])
def test_what_cannot_be_undone_asks_at_a_terminal(
    world: World, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "is_at_terminal", lambda: True)
    before = ids(world)
    arguments = ["dataset", action, "planes", "v2", *WHY]
    asked = commands.invoke(world, *arguments, input="n\n")
    assert (asked.exit_code, "can't be undone" in asked.output) == (1, True)
    assert ids(world) == before
    answered = commands.invoke(world, *arguments, input="y\n")
    silent = commands.invoke(world, *arguments, "--yes")
    assert "can't be undone" in answered.output
    assert "can't be undone" not in silent.output


def test_each_command_says_in_a_sentence_what_it_has_done(world: World) -> None:
    v1, v2, v3 = (ids(world)[name] for name in ("v1", "v2", "v3"))
    for arguments, sentence in {
        ("pin", "planes", "v1"): f"planes: pinned {v1}; {v1} (v1) is served now, pinned.",
        ("unpin", "planes"): f"planes: unpinned {v1}; {v2} (v2) is served now.",
        ("rollback", "planes"): f"planes: rolled back to {v1}; {v1} (v1) is served now.",
        ("accept", "planes", "v3"): f"planes: accepted {v3}; {v3} (v3) is served now.",
        ("revoke", "planes", "v3"): f"planes: revoked {v3}; {v1} (v1) is served now.",
        ("remove-version", "planes", "v3"): f"planes: removed {v3}; {v1} (v1) is served now.",
        ("abandon", "planes", "v9"): f"planes: abandoned v9; {v1} (v1) is served now.",
    }.items():
        assert printed(world, *arguments, *WHY).splitlines() == [sentence]
    idle = printed(world, "unpin", "planes", *WHY)
    assert idle.splitlines() == [f"planes: nothing to do for unpin; {v1} (v1) is served now."]


def test_revoke_force_and_drop(world: World) -> None:
    assert document(world, "revoke", "planes", "v2", *WHY)["served"] == ids(world)["v1"]
    assert "revoked" in refused(world, "rollback", "planes", "v2", *WHY)
    assert document(world, "accept", "planes", "v3", *WHY)["served"] == ids(world)["v3"]
    assert served(world) == "v3"
    document(world, "remove-version", "planes", "v2", *WHY)
    assert set(ids(world)) == {"v1", "v3"}
    assert "sealed" in refused(world, "remove-version", "planes", "v1", *WHY)


def test_an_older_version_that_is_forced_is_not_served_and_says_how_to_serve_it(
    world: World,
) -> None:
    world.send("planes", [("N1", 1), ("N2", 4)], version="v4")
    world.advance(PLANES)
    text = printed(world, "accept", "planes", "v3", *WHY)
    assert "(v4) is served now" in text
    assert "'v3' is sealed but not served: 'v4' comes after it and stays current" in text
    assert f"adjunct dataset rollback planes {ids(world)['v3']} --reason …" in text
    assert (
        "sealed but not served" in document(world, "history", "planes", "--limit", "1")[0]["reason"]
    )
    world.send("planes", [("N2", 1)], version="v5")
    world.advance(PLANES)
    world.send("planes", [("N1", 1), ("N2", 6)], version="v6")
    world.advance(PLANES)
    done = document(world, "accept", "planes", "v5", "--make-current", *WHY)
    assert (done["served"], done["note"]) == (ids(world)["v5"], "")


def test_an_unreadable_dataset_is_listed_with_the_reason_and_stops_no_other(world: World) -> None:
    world.stream("crews", SCHEMA, ["tailnum"], 2)
    world.send("crews", [("N1", 1)], version="v1")
    world.advance(bounded_dataset("crews", input="lake.crews", key="tailnum", partitions=2))
    key = StoredVersions(world.lake, "crews").read()[0].manifest_key  # type: ignore[union-attr]
    content = unseal_json(world.lake.store.get(key).data)
    assert content is not None
    world.lake.store.put(key, seal_json(content.replace(b'"offsets"', b'"offset"')))
    listed = {item["name"]: item for item in json.loads(printed(world, "list", "--json"))}
    assert listed["planes"]["version"]["name"] == "v2"
    assert key in listed["crews"]["unreadable"]
    text = printed(world, "list")
    assert f"crews is unreadable: dataset 'crews': the manifest {key} can't be read" in text
    result = commands.invoke(world, "dataset", "expire", "--keep", "1", "--grace", "0m")
    assert "the manifest" in str(result.exception)
    assert set(ids(world)) == {"v2"}, "it is discarded in the others all the same"


def test_abandon_ends_a_version_whose_marker_never_comes(world: World) -> None:
    world.send("planes", [("N1", 7)])
    world.mark("planes", "v4", [0])
    assert world.advance(PLANES).waiting == ("lake.planes.1",)
    assert document(world, "abandon", "planes", "v4", *WHY)["changed"] is True
    assert world.advance(PLANES).waiting == ()
    assert document(world, "abandon", "planes", "v4", *WHY)["changed"] is False


def test_diff_counts_and_samples_what_changed(world: World) -> None:
    difference = document(world, "diff", "planes", "v1", "v2")
    assert {what: difference[what] for what in ("added", "removed", "changed", "unchanged")} == {
        "added": 1,
        "removed": 0,
        "changed": 1,
        "unchanged": 1,
    }
    assert difference["sample"]["added"] == [{"tailnum": "N3"}]
    text = printed(world, "diff", "planes", "v1", "v2")
    assert "2 -> 20" in text
    assert document(world, "diff", "planes", "v2", "v3", "--sample", "1")["sample"]["removed"] == [
        {"tailnum": "N2"}
    ]


def test_changes_lists_each_entry_that_differs(world: World) -> None:
    found = document(world, "changes", "planes", "--since", "v1", "--until", "v2")["changes"]
    assert found == [
        {
            "kind": "update",
            "key": {"tailnum": "N2"},
            "before": {"tailnum": "N2", "seats": 2},
            "after": {"tailnum": "N2", "seats": 20},
        },
        {
            "kind": "insert",
            "key": {"tailnum": "N3"},
            "before": None,
            "after": {"tailnum": "N3", "seats": found[1]["after"]["seats"]},
        },
    ]
    text = printed(world, "changes", "planes", "--since", "v2", "--until", "v1")
    assert "delete" in text
    assert "insert" not in text
    assert "2000-01-01" in refused(world, "changes", "planes", "--since", "2000-01-01 00:00")
    until = refused(world, "changes", "planes", "--since", "v1", "--until", "2000-01-01 00:00")
    assert "--until" in until
    assert "--since" not in until


@pytest.mark.lengthy
def test_items_and_get_read_any_version(world: World) -> None:
    entries = document(world, "items", "planes")["entries"]
    assert [entry["tailnum"] for entry in entries] == ["N1", "N2", "N3"]
    assert [
        e["tailnum"]
        for e in document(world, "items", "planes", "--from", "N2", "--limit", "1")["entries"]
    ] == ["N2"]
    assert [e["tailnum"] for e in document(world, "items", "planes", "--to", "N2")["entries"]] == [
        "N1"
    ]
    assert len(document(world, "items", "planes", "--prefix", "N")["entries"]) == 3
    assert "N3" in printed(world, "items", "planes")
    assert [
        e["seats"] for e in document(world, "items", "planes", "--version", "v3")["entries"]
    ] == [1]
    assert document(world, "get", "planes", "N2", "--version", "v1")[0]["entry"] == {
        "tailnum": "N2",
        "seats": 2,
    }
    assert "--prefix and a range" in refused(
        world, "items", "planes", "--prefix", "N", "--to", "N2"
    )


def test_discard_goes_by_what_is_declared_or_reported_and_lists_before_it_acts(
    world: World,
) -> None:
    (plan,) = document(world, "expire", "planes", "--dry-run")
    assert plan["discarded"] == [], (
        "the declared policy keeps three, and nothing younger than a day goes"
    )
    (plan,) = document(world, "expire", "planes", "--keep", "1", "--grace", "0m", "--dry-run")
    assert plan["dry_run"] is True
    assert sorted(version["name"] for version in plan["discarded"]) == ["v1", "v3"]
    assert set(ids(world)) == {"v1", "v2", "v3"}
    assert "not among the newest 1" in printed(
        world, "expire", "--keep", "1", "--grace", "0m", "--dry-run"
    )
    document(world, "expire", "planes", "--keep", "1", "--grace", "0m", "--by", "ada")
    assert set(ids(world)) == {"v2"}
    assert "no dataset 'other'" in refused(world, "expire", "other", "--keep", "1")
    assert "'none'" in refused(world, "expire", "--keep", "none")
    assert "'soon'" in refused(world, "expire", "--keep", "1", "--grace", "soon")


def test_verify_ends_with_an_exit_code_when_an_object_is_damaged(world: World) -> None:
    assert [report["ok"] for report in document(world, "verify", "planes", "--deep")] == [
        True,
        True,
    ]
    view = StoredVersions(world.lake, PLANES).require_current()
    file = view.sealed.generations[0].files[0]
    key = f"{view.sealed.generations[0].folder}/{file.name}"
    world.lake.store.delete(key)
    result = commands.invoke(world, "dataset", "verify", "planes", "v2")
    assert result.exit_code == 1
    assert f"{key}: it is missing" in result.output.replace("\n", "")
    command = ["dataset", "verify", "planes", "--lake", world.lake.url]
    assert run_command(lambda: root(command, standalone_mode=False)) == 1, (
        "also as the installed command calls it"
    )


def test_verify_says_so_where_nothing_is_sealed_that_it_could_check(tmp_path: Path) -> None:
    world = World(open_lake(tmp_path / "lake"), IN_PROCESS)
    world.stream("planes", SCHEMA, ["tailnum"], 2)
    world.send("planes", [("N1", 1)], version="v1")
    world.advance(PLANES)
    assert [version["state"] for version in document(world, "versions", "planes")] == ["rejected"]
    assert "dataset 'planes' has no version to read yet" in refused(world, "verify", "planes")


@pytest.mark.lengthy
def test_forget_erases_keys_from_every_version_after_asking(world: World, tmp_path: Path) -> None:
    asked = CliRunner().invoke(
        root,
        ["dataset", "erase", "planes", "N2", *WHY, "--lake", world.lake.url],
        input="n\n",
        env={"COLUMNS": "220"},
    )
    assert "Erase 1 key(s) from 3 version(s) of planes permanently?" in asked.output
    assert isinstance(asked.exception, SystemExit)
    assert document(world, "get", "planes", "N2")[0]["entry"] is not None
    report = document(world, "erase", "planes", "N2", "--yes", *WHY)
    assert report["complete"] is True
    assert sorted(version["name"] for version in report["rewritten"]) == ["v1", "v2"]
    assert document(world, "get", "planes", "N2", code=NOT_FOUND)[0]["entry"] is None
    assert (
        document(world, "get", "planes", "N2", "--version", "v1", code=NOT_FOUND)[0]["entry"]
        is None
    )

    file = tmp_path / "keys.csv"
    file.write_text("N1\n\nN3\n", encoding="utf-8")
    assert "none of the keys is left" in printed(
        world, "erase", "planes", "--keys-from", str(file), "--yes", *WHY
    )
    assert document(world, "items", "planes")["entries"] == []
    file.write_text("N1,7\n", encoding="utf-8")
    assert "key 1 has 2 fields" in refused(
        world, "erase", "planes", "--keys-from", str(file), "--yes", *WHY
    )
    assert "are missing" in refused(world, "erase", "planes", "--yes", *WHY)


def test_a_change_needs_a_reason_and_somebody_who_makes_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--reason" in commands.invoke(world, "dataset", "rollback", "planes").output
    assert "by is empty" in refused(world, "rollback", "planes", "--reason", "x", "--by", " ")
    assert "no dataset 'plane'" in refused(world, "rollback", "plane", "--reason", "x")
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    document(world, "rollback", "planes", "--reason", "x")
    assert document(world, "history", "planes")[0]["by"] == "root"

    def nobody() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert "--by NAME" in refused(world, "pin", "planes", "v2", "--reason", "x")


NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def test_an_expiry_is_a_duration_or_a_time_with_its_zone() -> None:
    assert parse_expiry("90m", NOW) == NOW + timedelta(minutes=90)
    assert parse_expiry("2h", NOW) == NOW + timedelta(hours=2)
    assert parse_expiry("7 d", NOW) == NOW + timedelta(days=7)
    assert parse_expiry("1w", NOW) == NOW + timedelta(weeks=1)
    assert parse_expiry("2026-01-31T18:00+01:00", NOW) == NOW + timedelta(hours=5)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "soon",
            "2x",
            "-2h",
            "2026-01-31T18:00",
            "2026-01-30T18:00Z",
            "",
            "9999999999999h",
            "9" * 5000 + "d",
        ),
        *("500000w", "9999-12-31T23:00-02:00", "0001-01-01T01:00+02:00"),
    ],
)
def test_an_expiry_that_is_neither_or_has_passed_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_expiry(text, NOW)
    assert caught.value.setting == "--expires"


def test_what_was_served_at_a_time_or_after_a_commit_is_read_by_as_of(world: World) -> None:
    entries = {
        entry["version"]: entry
        for entry in document(world, "history", "planes")
        if entry["action"] == "seal"
    }
    first, second = (entries[version] for version in sorted(entries)[:2])
    assert [entry["readable"] for entry in document(world, "history", "planes")] == [
        True,
        True,
        True,
    ]
    for as_of in (first["at"], str(first["number"])):
        answers = document(world, "get", "planes", "N2", "--as-of", as_of)
        assert (answers[0]["version"], answers[0]["entry"]["seats"]) == (first["served"], 2)
    assert (
        document(world, "items", "planes", "--as-of", second["at"])["version"] == second["served"]
    )
    assert document(world, "show", "planes", "--as-of", first["at"])["id"] == first["served"]
    assert "served at 2000-01-01" in refused(
        world, "get", "planes", "N2", "--as-of", "2000-01-01T00:00Z"
    )
    assert "has no time zone" in refused(world, "get", "planes", "N2", "--as-of", "2026-01-01")
    assert "a version and --as-of are both" in refused(
        world, "get", "planes", "N2", "--version", "v1", "--as-of", "1"
    )
