"""Commands that change stored state by hand say who did it and why, in the same words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import click

from dagster_adjunct import Application
from dagster_adjunct.orchestration.application.table_registry import register_tables
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.tables import RemoteTable, SqliteTable
from tests.orchestration.cli.commands import document, invoke

# By command: its options besides --reason, --by, --json and --wide that ask, force or only look.
BY_HAND = {
    "app rename": {"--dry-run", "--yes"},
    "checkpoint abandon": {"--yes"},
    "dataset abandon": {"--yes"},
    "dataset accept": set(),
    "dataset delete": {"--dry-run", "--force", "--yes"},
    "dataset erase": {"--yes"},
    "dataset pin": set(),
    "dataset rebuild": set(),
    "dataset remove-version": {"--yes"},
    "dataset repartition": {"--dry-run"},
    "dataset revoke": {"--yes"},
    "dataset rollback": set(),
    "dataset unpin": set(),
    "startpoint clear": set(),
    "startpoint set": {"--dry-run", "--force"},
    "stream delete": {"--dry-run", "--force", "--yes"},
    "stream move": {"--dry-run", "--force"},
    "stream repartition": {"--dry-run", "--force"},
    "stream set-aside": {"--yes"},
    "table allow-recreate": set(),
}
# They do what a schedule does, too: nobody needs a reason.
UPKEEP = {"dataset advance", "dataset compact", "dataset expire"}


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield path + name, command


def options_of(command: click.Command) -> dict[str, bool]:
    """Return whether each option is required, by its name."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    return {name: option.required for option in options for name in option.opts}


def test_changes_by_hand_are_recorded_with_a_reason() -> None:
    found = {name: options_of(command) for name, command in commands(root)}
    named = {name for name, options in found.items() if "--by" in options}
    assert named == set(BY_HAND) | UPKEEP
    for name, others in BY_HAND.items():
        assert found[name]["--reason"], name
        assert {"--json", "--wide"} <= set(found[name]), name
        given = {"--dry-run", "--force", "--yes"} & set(found[name])
        assert given == others, name


def test_what_can_not_be_undone_asks_before_and_answers_in_json() -> None:
    found = {name: options_of(command) for name, command in commands(root)}
    asking = {name for name, options in found.items() if "--yes" in options}
    assert "stream remove-reader" in asking
    assert [name for name in sorted(asking) if "--json" not in found[name]] == []


def test_who_lets_a_table_be_recreated_and_why_is_in_the_lake(tmp_path: Path) -> None:
    world = SimpleNamespace(lake=open_lake(tmp_path / "lake"))
    app = Application("counts")
    function = SqliteTable(
        tmp_path / "counts.sqlite", "counts", "k", columns={"k": "string", "n": "int"}, create=True
    )
    app.table(RemoteTable("counts", key="k", read_function=function, write_function=function))
    with register_tables(world.lake, app, by="test"):
        pass
    log = world.lake.commit_log("tables/counts", "table")
    before = log.current()
    command = ("table", "allow-recreate", "counts", "--by", "ada")
    unexplained = invoke(world, *command)
    assert unexplained.exit_code == click.UsageError.exit_code
    assert log.current() == before
    given = document(world, *command, "--reason", "the disk was lost")
    assert given == {
        "table": "counts",
        "forgotten": True,
        "by": "ada",
        "reason": "the disk was lost",
    }
    assert (
        log.current().body["reset"].items() >= {"by": "ada", "reason": "the disk was lost"}.items()
    )
