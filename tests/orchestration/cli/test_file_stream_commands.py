"""`adjunct stream …` of streams of files, and startpoints on them."""

from __future__ import annotations

import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from dagster_adjunct import Lake, open_lake
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.resources.file_streams import streams as declared
from tests.orchestration.cli.commands import document, invoke, printed, refused

MODULE = """
    from pathlib import Path
    from dagster_adjunct import Application, FileRules, file_stream

    clicks = file_stream(
        "clicks",
        str(Path(__file__).with_name("landing")),
        format="jsonl",
        schema="n int",
        marker="*.done",
        rules=FileRules(damaged="set-aside"),
    )
    app = Application("copy", engine="auto")
    app.input_stream(clicks).send_to(app.output_stream("lake.copy", partitions=1))
"""


@dataclass
class World:
    """A lake, and the folder in which files land."""

    lake: Lake
    landing: Path

    def write(self, name: str, *numbers: int, text: str = "", done: bool = True) -> None:
        """Write a file, as modified at a time by its number."""
        lines = [f'{{"n": {number}}}\n' for number in numbers]
        (self.landing / name).write_text("".join(lines) + text)
        at = 1_700_000_000 + int(name.partition(".")[0])
        os.utime(self.landing / name, (at, at))
        if done:
            (self.landing / f"{name}.done").touch()

    def copied(self) -> list[int]:
        """Return the values in the output stream, in order."""
        target = self.landing.with_name("copied.parquet")
        target.unlink(missing_ok=True)
        printed(self, "stream", "export", "copy", "--to", str(target))
        return [row["n"] for row in pq.read_table(target).to_pylist()]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    (tmp_path / "shop.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "landing").mkdir()
    monkeypatch.setattr(declared, "_declared", {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    return World(open_lake(tmp_path / "lake"), tmp_path / "landing")


def forget_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do as another process does, which has imported no application."""
    monkeypatch.setattr(declared, "_declared", {})
    monkeypatch.delitem(sys.modules, "shop", raising=False)


def test_files_are_listed_in_80_columns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "region=eu-central-1/year=2026/month=11/day=28"
    (world.landing / folder).mkdir(parents=True)
    names = [f"{number}.events-of-the-shop-part-0000{number}.json" for number in (1, 2, 3)]
    for number, name in enumerate(names, 1):
        world.write(name, *range(number * 400))
        for end in ("", ".done"):
            (world.landing / f"{name}{end}").rename(world.landing / folder / f"{name}{end}")
    broken = world.landing / folder / names[2]
    broken.write_text('{"n": 1}\n{"n')
    os.utime(broken, (1_700_000_003, 1_700_000_003))
    printed(world, "stream", "admit", "files.clicks", "shop:app")
    command = ["stream", "files", "files.clicks", "--lake", world.lake.url]
    lines = CliRunner().invoke(root, command, env={"COLUMNS": "80"}).output.splitlines()
    rows = [line for line in lines if line.startswith("│")]
    assert max(map(len, rows)) <= 80
    cells = [row.strip("│").split("│") for row in rows]
    for number, (file, _, _, records, *_) in enumerate(cells[:2], 1):
        begin, _, end = file.strip().partition("…")
        assert f"{folder}/{names[number - 1]}".startswith(begin)
        assert f"{folder}/{names[number - 1]}".endswith(end)
        assert records.strip() == f"{number * 400}"
    counts = [row[3] for row in cells]
    assert all(count.endswith(" ") and not count.endswith("  ") for count in counts)
    why = next(line for line in lines if "why:" in line)
    assert f"{folder}/{names[2]}" in why  # as set-aside takes it


def test_the_declaration_is_stored_with_the_first_admission(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write("1.json", 1, 2)
    assert "adjunct stream admit files.clicks MODULE:APP" in refused(
        world, "stream", "admit", "files.clicks"
    )
    admitted = document(world, "stream", "admit", "files.clicks", "shop:app")
    assert (admitted["files"], admitted["records"], admitted["next"]) == (1, 2, "2")
    forget_declarations(monkeypatch)
    world.write("2.json", 3)
    assert document(world, "stream", "admit", "files.clicks")["files"] == 1
    (listed,) = document(world, "stream", "list")
    assert (listed["name"], listed["records"], listed["files"]) == ("files.clicks", 3, 2)


def test_a_first_file_that_is_refused_is_shown_with_its_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare = textwrap.dedent(MODULE).replace('FileRules(damaged="set-aside")', "FileRules()")
    Path("shop.py").write_text(declare)
    world.write("1.json", text='{"n": "one"}')
    refused(world, "stream", "admit", "files.clicks", "shop:app")
    forget_declarations(monkeypatch)
    for command in ("show", "files"):
        shown = document(world, "stream", command, "files.clicks")
        assert "1.json" in shown["problem"]
    assert shown["files"] == []
    (listed,) = document(world, "stream", "list")
    assert (listed["name"], listed["files"]) == ("files.clicks", 0)
    # While nothing was admitted, the declaration may be corrected.
    Path("shop.py").write_text(declare.replace("n int", "n string"))
    assert document(world, "stream", "admit", "files.clicks", "shop:app")["files"] == 1
    forget_declarations(monkeypatch)
    shown = document(world, "stream", "show", "files.clicks")
    assert shown["problem"] == ""
    assert shown["schema"][0]["type"] == "string"


def test_files_are_listed_with_their_offsets_and_problems(world: World) -> None:
    world.write("1.json", 1, 2)
    world.write("2.json", text="{")
    world.write("3.json", 3)
    world.write("4.json", 4, done=False)
    admitted = document(world, "stream", "admit", "files.clicks", "shop:app")
    assert admitted["set_aside"] == {"damaged": 1}
    assert admitted["waiting"] == {"4.json": "4.json.done is missing"}
    files = document(world, "stream", "files", "files.clicks")["files"]
    assert [(file["file"], file["offset"], file["records"]) for file in files] == [
        ("1.json", 0, 2),
        ("2.json", 2, 0),
        ("3.json", 2, 1),
    ]
    assert files[0]["modified"].startswith("2023-11-14T22:13:21")
    (problem,) = document(world, "stream", "files", "files.clicks", "--problems")["files"]
    assert problem["file"] == "2.json"
    assert problem["problem"].startswith("damaged: ")
    newest = document(world, "stream", "files", "files.clicks", "--limit", "1")
    assert ([file["file"] for file in newest["files"]], newest["left_out"]) == (["3.json"], 2)
    shown = document(world, "stream", "show", "files.clicks")
    assert (shown["files"], shown["oldest"], shown["upcoming"]) == (3, "0", "3")
    assert shown["set_aside"] == {"damaged": 1}
    assert shown["declared"]["url"] == str(world.landing)
    assert shown["declared"]["file_format"] == "jsonl"
    assert shown["schema"] == [{"name": "n", "type": "int"}]
    assert shown["waiting"] == {"4.json": "4.json.done is missing"}
    text = printed(world, "stream", "show", "files.clicks")
    assert "4.json.done is missing" in text


def list_states(world: World, *options: str) -> list[tuple[str, str]]:
    """Return the files of the stream, each with its state."""
    files = document(world, "stream", "files", "files.clicks", *options)["files"]
    return [(file["file"], file["state"]) for file in files]


def test_files_are_listed_with_their_states(world: World) -> None:
    world.write("1.json", 1)
    world.write("2.json", 2)
    world.write("3.json", text="{")
    printed(world, "stream", "admit", "files.clicks", "shop:app")
    (world.landing / "1.json").unlink()
    world.write("3.json", 3)
    printed(world, "stream", "admit", "files.clicks")
    world.write("2.json", 2, 2)
    world.write("4.json", text="{")
    assert list_states(world) == [
        ("1.json", "gone"),
        ("2.json", "overwritten"),
        ("3.json", "redelivered"),
        ("3.json", "admitted"),
    ]
    assert list_states(world, "--problems") == []
    reason = ("--reason", "x")
    printed(world, "stream", "set-aside", "files.clicks", "1.json", *reason)
    printed(world, "stream", "set-aside", "files.clicks", "2.json", *reason)
    printed(world, "stream", "admit", "files.clicks")
    assert list_states(world, "--problems") == [
        ("1.json", "set aside"),
        ("2.json", "set aside"),
        ("4.json", "set aside"),
    ]


def test_a_file_because_of_which_none_is_admitted_is_shown(world: World) -> None:
    world.write("1.json", 1)
    printed(world, "stream", "admit", "files.clicks", "shop:app")
    world.write("1.json", 1, 2)
    for command in (("show",), ("files", "--problems")):
        name, *options = command
        given = ("stream", name, "files.clicks", *options)
        assert f"{world.landing}/1.json" in document(world, *given)["problem"]
        assert "adjunct stream set-aside files.clicks 1.json" in printed(world, *given)


def test_records_that_retention_has_dropped_are_listed_as_such(world: World) -> None:
    module = Path("shop.py").read_text()
    limited = module.replace("rules=", "retention=FileRetention(max_files=1), rules=")
    Path("shop.py").write_text(limited.replace("FileRules,", "FileRetention, FileRules,"))
    world.write("1.json", 1)
    world.write("2.json", 2)
    printed(world, "stream", "admit", "files.clicks", "shop:app")
    printed(world, "stream", "maintain", "files.clicks")
    assert list_states(world) == [("1.json", "dropped"), ("2.json", "admitted")]


def test_a_file_that_is_gone_is_set_aside_and_readers_go_on(world: World) -> None:
    world.write("1.json", 1)
    world.write("2.json", 2)
    printed(world, "stream", "admit", "files.clicks", "shop:app")
    (world.landing / "1.json").unlink()
    assert "adjunct stream set-aside" in refused(world, "run", "shop:app", "--master", "none")
    done = document(
        world, "stream", "set-aside", "files.clicks", "1.json", "--reason", "deleted too early"
    )
    assert done["records"] == 1
    printed(world, "run", "shop:app", "--master", "none")
    assert world.copied() == [2]
    again = printed(world, "stream", "set-aside", "files.clicks", "1.json", "--reason", "again")
    assert "was set aside before: set aside: deleted too early" in again
    assert "no file '9.json'" in refused(
        world, "stream", "set-aside", "files.clicks", "9.json", "--reason", "x"
    )


@pytest.mark.parametrize(
    ("options", "read_again"),
    [
        (("--oldest",), [1, 2, 3]),
        (("--offset", "1"), [2, 3]),
        (("--timestamp", "2023-11-14T22:13:22Z"), [3]),
        (("--upcoming",), []),
        (("--oldest", "--until-offset", "2"), [1, 2]),
        (("--offset", "2", "--until-upcoming"), [3]),
    ],
)
def test_startpoints_of_all_kinds_read_the_same_records_again(
    world: World, options: tuple[str, ...], read_again: list[int]
) -> None:
    world.write("1.json", 1, 2)
    world.write("2.json", 3)
    printed(world, "run", "shop:app", "--master", "none")
    assert world.copied() == [1, 2, 3]
    printed(world, "startpoint", "set", "shop:app", "files.clicks", *options, "--reason", "again")
    printed(world, "run", "shop:app", "--master", "none")
    assert world.copied() == [1, 2, 3, *read_again]
    shown = document(world, "checkpoint", "show", "shop:app")
    assert shown["behind"] == {"files.clicks.0": 0}


def test_the_records_of_files_are_exported_maintained_and_forgotten(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write("1.json", 1, 2)
    printed(world, "run", "shop:app", "--master", "none")
    forget_declarations(monkeypatch)
    printed(world, "stream", "export", "files.clicks", "--to", str(tmp_path / "all.parquet"))
    exported = pq.read_table(tmp_path / "all.parquet").to_pylist()
    assert [(row["n"], row["__offset"]) for row in exported] == [(1, 0), (2, 1)]
    for options in (("--epochs", "latest"), ("--positions",)):
        assert options[0] in refused(
            world, "stream", "export", "files.clicks", "--to", "x.parquet", *options
        )
    assert "files.clicks: 0 records in 0 files dropped" in printed(world, "stream", "maintain")
    delete = ("stream", "delete", "files.clicks", "--reason", "moved", "--yes")
    assert "application copy has a checkpoint on it" in refused(world, *delete)
    printed(world, *delete, "--force")
    assert [item["name"] for item in document(world, "stream", "list")] == ["copy"]
    assert (world.landing / "1.json").exists()
    assert "files.clicks" in refused(world, "run", "shop:app", "--master", "none")


@pytest.mark.parametrize(
    "arguments",
    [
        ("append", "files.clicks", "shop.py"),
        ("change-columns", "files.clicks", "--drop", "n"),
        ("repartition", "files.clicks", "--partitions", "2", "--reason", "x"),
        ("remove-reader", "files.clicks", "reader"),
    ],
)
def test_what_is_only_for_streams_of_the_lake_says_so(
    world: World, arguments: tuple[str, ...]
) -> None:
    printed(world, "stream", "admit", "files.clicks", "shop:app")
    assert "files.clicks is a stream of files" in refused(world, "stream", *arguments)


def test_commands_for_files_refuse_other_streams_by_name(world: World) -> None:
    printed(world, "stream", "admit", "files.clicks", "shop:app")
    for command in (("files",), ("admit",), ("set-aside", "--reason", "x")):
        name, *options = command
        given = ["lake.copy"] if name != "set-aside" else ["lake.copy", "1.json"]
        assert "lake.copy is no stream of files" in refused(world, "stream", name, *given, *options)


def test_setting_aside_asks_at_a_terminal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.write("1.json", 1)
    printed(world, "stream", "admit", "files.clicks", "shop:app")
    monkeypatch.setattr("dagster_adjunct.orchestration.cli.options.is_at_terminal", lambda: True)
    command = ("stream", "set-aside", "files.clicks", "1.json", "--reason", "x")
    assert invoke(world, *command, input="n\n").exit_code == 1
    assert not document(world, "stream", "files", "files.clicks", "--problems")["files"]
    assert invoke(world, *command, input="y\n").exit_code == 0
    assert document(world, "stream", "files", "files.clicks", "--problems")["files"]


def test_a_folder_that_was_moved_is_moved_as_the_error_says(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write("1.json", 1, 2)
    printed(world, "run", "shop:app", "--master", "none")
    world.landing = world.landing.rename(world.landing.with_name("moved"))
    Path("shop.py").write_text(textwrap.dedent(MODULE).replace('"landing"', '"moved"'))
    forget_declarations(monkeypatch)
    world.write("2.json", 3)
    text = refused(world, "run", "shop:app", "--master", "none")
    assert "adjunct stream move files.clicks" in " ".join(text.split())
    command = ["stream", "move", "files.clicks", str(world.landing), "--reason", "a new disk"]
    planned = document(world, *command, "--dry-run")
    done = document(world, *command)
    assert planned == {**done, "dry_run": True}
    assert (done["files"], done["missing"], done["changed"]) == (1, [], [])
    (shown,) = document(world, "stream", "show", "files.clicks")["moved"]
    assert (shown["after"], shown["reason"]) == (str(world.landing), "a new disk")
    forget_declarations(monkeypatch)
    printed(world, "run", "shop:app", "--master", "none")
    assert world.copied() == [1, 2, 3]


def test_a_folder_without_the_files_is_refused(world: World) -> None:
    world.write("1.json", 1, 2)
    printed(world, "stream", "admit", "files.clicks", "shop:app")
    other = world.landing.with_name("other")
    other.mkdir()
    command = ["stream", "move", "files.clicks", str(other), "--reason", "a new disk"]
    assert "1.json" in refused(world, *command)
    assert document(world, *command, "--dry-run")["missing"] == ["1.json"]
    assert document(world, *command, "--force")["missing"] == ["1.json"]
