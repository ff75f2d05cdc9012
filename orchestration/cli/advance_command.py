"""`adjunct dataset advance`: bring datasets up to date with their input, without running an application."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dagster_adjunct.assets.versions.advance_report import ignore
from dagster_adjunct.orchestration.application.load_application import load_application
from dagster_adjunct.orchestration.cli.common_options import who
from dagster_adjunct.orchestration.cli.output import as_json, fail_if_rejected, lake_url, show_json, show_line
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.spark.given_session import starter_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport, OnStage
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.resources.objects import Lake


@click.command()
@click.argument("name")
@click.argument("reference", metavar="MODULE:APP")
@click.option("--partition", metavar="VERSION", help="Build the version of this name, where versions are partitions.")
@click.option("--make-current", is_flag=True, help="With --partition: serve it, also where a later one is served.")
@click.option("--master", help="Spark master, such as local[4] or spark://host:7077. Default: all cores here.")
@click.option("--by", help="Who does it. Default: the user of this machine.")
@lake_url
@as_json
def advance(
    name: str,
    reference: str,
    partition: str | None,
    make_current: bool,
    master: str | None,
    by: str | None,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Bring the dataset NAME that an application declares up to date, and with it all of its version set.

    Startpoints that the application has for the dataset's stream are applied first. The exit code is 3 where a version
    was refused.
    """
    from dagster_adjunct.assets.advancing.advance_dataset import advance_dataset
    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.orchestration.planner.lake_catalog import systems_for, systems_of
    from dagster_adjunct.orchestration.step.advancing import advance_together
    from dagster_adjunct.orchestration.step.run_application import apply_startpoints
    from dagster_adjunct.orchestration.step.session_scope import session_scope
    from dagster_adjunct.resources.objects.lake import open_lake

    if make_current and partition is None:
        raise ConfigurationError(
            "--make-current is given without --partition.",
            "Give the partition's name, or roll back to its version.",
            setting="--make-current",
        )
    app = load_application(reference)
    unit = unit_of(app, name)
    lake = open_lake(lake_url)
    person = who(by)
    systems = systems_of(unit, lake)
    with session_scope(master=master, lake_url=lake.url, on_start=lines_shown(json_output)) as spark:
        if partition is None:
            shown = stages_shown(json_output)
            runtime = Runtime(lake, systems_for(app, lake), starter_of(spark), by=person)
            applied = apply_startpoints(runtime, app, only={member.name for member in unit})
            applied.raise_failed()
            reports = list(applied.reports)
            reports += advance_together(replace(runtime, systems=systems), unit, on_stage=shown)
        else:
            _check_partitions(unit)
            reports = [
                advance_dataset(
                    lake, systems, unit[0], spark, by=person, partition=partition, make_current=make_current
                )
            ]
    if json_output:
        show_json([report.to_json() for report in reports])
    else:
        for report in reports:
            show_line(report.summary())
    fail_if_rejected(reports)


def has_datasets_only(app: Application) -> bool:
    """Whether an application declares datasets and nothing that a batch would read or write."""
    return bool(app.datasets) and not (app.inputs or app.outputs or app.tables)


def advance_all(
    lake: Lake,
    app: Application,
    spark: Callable[[], SparkSession],
    *,
    by: str,
    on_report: Callable[[AdvanceReport], None],
    on_stage: OnStage = ignore,
) -> tuple[list[AdvanceReport], list[str]]:
    """Bring the datasets of an application up to date; their reports, and the names of those made by partitions."""
    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.orchestration.application.advance_units import made_by_partition
    from dagster_adjunct.orchestration.planner.lake_catalog import systems_for
    from dagster_adjunct.orchestration.step.run_application import advance_datasets

    systems = systems_for(app, lake)
    advanced = advance_datasets(
        Runtime(lake, systems, starter_of(spark), by), app, on_report=on_report, on_stage=on_stage
    )
    return list(advanced.reports), [dataset.name for dataset in app.datasets if made_by_partition(dataset)]


def stages_shown(json_output: bool) -> OnStage:
    """Return what prints a line for each stage of a dataset that takes a while, and nothing with --json."""
    return ignore if json_output else lambda event: show_line(event.summary()) if event.is_notable else None


def lines_shown(json_output: bool) -> Callable[[str], None]:
    """Return what prints a line, and nothing with --json."""
    return (lambda text: None) if json_output else show_line


def unit_of(app: Application, name: str) -> tuple[AdjunctDataset, ...]:
    """Return what advances together with the dataset of this name."""
    from dagster_adjunct.orchestration.application.advance_units import units_of

    datasets = {dataset.name: dataset for dataset in app.datasets}
    if name not in datasets:
        raise ConfigurationError(
            f"application {app.name!r} declares no dataset {name!r}; it declares: {', '.join(datasets) or 'none'}.",
            "Correct the name, or declare the dataset with app.table(…).",
            application=app.name,
            dataset=name,
        )
    wanted = datasets[name]
    in_set = [member for member in app.datasets if wanted.version_set and member.version_set == wanted.version_set]
    return units_of(in_set or [wanted], f"application {app.name!r}")[0]


def _check_partitions(unit: Sequence[AdjunctDataset]) -> None:
    """Refuse a partition of what has none; of a bounded dataset alone that is checked where it advances."""
    dataset = unit[0]
    if len(unit) > 1 or dataset.follows_changes:
        what = f"a member of the version set {dataset.version_set!r}" if len(unit) > 1 else f"{dataset.kind}"
        raise ConfigurationError(
            f"dataset {dataset.name!r} is {what} and has no version partitions, and --partition is given.",
            "Leave --partition out: what has been delivered is published.",
            setting="--partition",
            dataset=dataset.name,
        )
