"""The root command `adjunct`. It imports the module of a command only to call it, so that
`adjunct --help` is fast.
"""

from __future__ import annotations

import importlib
import io
import sys
from typing import NamedTuple

import click

from dagster_adjunct.orchestration.cli import output


class _Command(NamedTuple):
    """The module of `cli` in which a command has its name, and the command's help."""

    module: str
    help: str


_COMMANDS = {
    "app": _Command("applications", "Manage applications."),
    "checkpoint": _Command(
        "startpoints", "Show where applications continue in their input streams."
    ),
    "dataset": _Command("datasets", "Manage datasets of the lake."),
    "demo": _Command(
        "applications", "Run the main job on real data, of flights joined with reference data."
    ),
    "doctor": _Command(
        "doctor",
        "Check what runs need: packages, Java, Spark, the lake, Dagster; and how to mend it.",
    ),
    "kv": _Command(
        "tables", "Manage key-value tables: entries with versions, conditional and atomic writes."
    ),
    "new": _Command(
        "new",
        "Make a small project: datasets, an application, sample data, tests, Dagster's settings.",
    ),
    "plan": _Command(
        "applications", "Validate an application's partition counts and show its plan."
    ),
    "run": _Command(
        "applications", "Bring datasets up to date and run an application until it has caught up."
    ),
    "schema": _Command("schema", "Infer the schema of files or of a topic from a sample."),
    "sql": _Command(
        "sql", "Query datasets, their versions and streams with SQL, by DuckDB; read-only."
    ),
    "startpoint": _Command(
        "startpoints",
        "Request that partitions are read from another position than their checkpoint.",
    ),
    "stream": _Command("streams", "Manage streams of the lake."),
    "table": _Command("tables", "Inspect remote tables that this lake's applications write."),
    "ui": _Command("applications", "Serve the Dagster UI and its daemon."),
}


class LazyCommands(output.Commands):
    """The group of all commands in _COMMANDS, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, whose module is imported only now; None if there is none of this
        name.
        """
        if cmd_name not in _COMMANDS:
            return None
        listed = _COMMANDS[cmd_name]
        module = importlib.import_module(f"{__package__}.{listed.module}")
        command: click.Command = getattr(module, cmd_name)
        command.help = command.help or listed.help
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in _COMMANDS.items()])


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dagster-adjunct", prog_name="adjunct")
def root() -> None:
    """Streams joined with versioned reference data and written as partial updates, on Dagster
    and Spark.
    """


def main() -> None:
    """Run the command line and exit with its code."""
    if sys.stdin is None:  # it was closed; questions get no answer
        sys.stdin = io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that are not UTF-8
    sys.exit(output.run_command(_run_root))


def _run_root() -> int:
    """Run the root command, whose exit code it returns; UsageError for arguments that are no
    text.
    """
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise click.UsageError(f"{argument!r} is not UTF-8.") from None
    return root(standalone_mode=False)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
