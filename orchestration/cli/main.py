"""The root command `adjunct`. It imports the module of a command only to call it, so that
`adjunct --help` is fast.
"""

from __future__ import annotations

import importlib
import io
import sys

import click

from dagster_adjunct.orchestration.cli import output

# By command: the module of `cli` in which it has the same name, and its help.
_COMMANDS = {
    "app": ("applications", "Manage applications."),
    "checkpoint": ("startpoints", "Show where applications continue in their input streams."),
    "dataset": ("datasets", "Manage datasets of the lake."),
    "demo": (
        "applications",
        "Run the main job on real data, of flights joined with reference data.",
    ),
    "doctor": (
        "doctor",
        "Check what runs need: packages, Java, Spark, the lake, Dagster; and how to mend it.",
    ),
    "kv": (
        "tables",
        "Manage key-value tables: entries with versions, conditional and atomic writes.",
    ),
    "new": (
        "new",
        "Make a small project: datasets, an application, sample data, tests, Dagster's settings.",
    ),
    "plan": ("applications", "Validate an application's partition counts and show its plan."),
    "run": (
        "applications",
        "Bring datasets up to date and run an application until it has caught up.",
    ),
    "schema": ("schema", "Infer the schema of files or of a topic from a sample."),
    "sql": ("sql", "Query datasets, their versions and streams with SQL, by DuckDB; read-only."),
    "startpoint": (
        "startpoints",
        "Request that partitions are read from another position than their checkpoint.",
    ),
    "stream": ("streams", "Manage streams of the lake."),
    "table": ("tables", "Inspect remote tables that this lake's applications write."),
    "ui": ("applications", "Serve the Dagster UI and its daemon."),
}


class LazyCommands(output.Commands):
    """The group of all commands in _COMMANDS, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, help_text = _COMMANDS[cmd_name]
        command: click.Command = getattr(
            importlib.import_module(f"{__package__}.{module}"), cmd_name
        )
        command.help = command.help or help_text
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in _COMMANDS.items()])


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
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise click.UsageError(f"{argument!r} is not UTF-8.") from None
    return root(standalone_mode=False)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
