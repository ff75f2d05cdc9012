"""`adjunct stream …`: list, show, export, maintain, repartition and delete streams of the lake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dagster_adjunct.orchestration.cli.options import deletion_command, repartition_command
from dagster_adjunct.orchestration.cli.output import (
    lake_url,
    output_options,
    show_facts,
    show_items,
    show_json,
    show_line,
    show_table,
)
from dagster_adjunct.resources.common import unqualify_stream_name
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.streams.lake.streams import LakeStreams, StreamDescription
from dagster_adjunct.resources.streams.system import Epochs

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.cli.options import Deletion
    from dagster_adjunct.orchestration.maintenance.repartition import RepartitionReport


@click.group()
def stream() -> None:
    """Manage streams of the lake."""


@stream.command("list")
@lake_url
@output_options
def list_streams(lake_url: str | None, json_output: bool) -> None:
    """List the streams with their partitions and records."""
    streams = _streams(lake_url)
    descriptions = [_facts(streams.describe(name)) for name in streams.list_streams()]
    if json_output:
        show_json(descriptions)
        return
    columns = ["name", "partitions", "key", "records", "bytes", "segments"]
    show_items("streams", columns, descriptions)


@stream.command("show")
@click.argument("name")
@lake_url
@output_options
def show_stream(name: str, lake_url: str | None, json_output: bool) -> None:
    """Show a stream's schema, partitions, offsets, markers, policies and named readers."""
    from dagster_adjunct.resources.streams.lake.readers import list_readers

    streams = _streams(lake_url)
    facts = _facts(streams.describe(_lake_stream(name)))
    readers = [asdict(reader) for reader in list_readers(streams.lake, _lake_stream(name))]
    if json_output:
        show_json({**facts, "readers": readers})
        return
    schema = facts.pop("schema")
    show_facts(f"stream {name}", facts)
    show_table("schema", ["column", "type"], [[field["name"], field["type"]] for field in schema])
    if readers:
        columns = ["name", "behind", "lost", "committed_at", "problem"]
        show_items("readers", columns, readers)


@stream.command()
@click.argument("name")
@click.option(
    "--to", "target", required=True, type=click.Path(path_type=Path), help="A new .parquet file, or a new folder."
)
@click.option("--records-per-file", type=int, metavar="N", help="Write a folder of files with at most N records each.")
@click.option(
    "--epochs",
    type=click.Choice(["all", "latest"]),
    default="all",
    show_default=True,
    help="All records, or only the latest results of each source record.",
)
@click.option("--positions", is_flag=True, help="Add the source position of each record.")
@click.option("--keep-without-position", is_flag=True, help="Treat records without a source position as latest.")
@lake_url
def export(
    name: str,
    target: Path,
    records_per_file: int | None,
    epochs: Epochs,
    positions: bool,
    keep_without_position: bool,
    lake_url: str | None,
) -> None:
    """Write a stream's records to a new Parquet file, or a folder of them.

    Each record has its partition, offset, timestamp and epoch. Memory use does not grow with the stream. The file or
    folder appears only once it is complete.
    """
    from dagster_adjunct.resources.streams.lake.export import check_export_target, export_records

    check_export_target(target, records_per_file)
    streams = _streams(lake_url)
    parts = streams.read_parts(
        streams.whole(_lake_stream(name)),
        epochs=epochs,
        positions=positions,
        without_position="keep" if keep_without_position else "refuse",
    )
    records, files = export_records(parts, target, records_per_file=records_per_file)
    inside = "" if records_per_file is None else f" in {files} files"
    show_line(f"{records:,} records of {name} written to {target}{inside}.")


@stream.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@lake_url
def maintain(names: tuple[str, ...], lake_url: str | None) -> None:
    """Apply the retention and compaction that streams declare, and delete unreferenced objects.

    Without NAME, maintain all streams. For cron; safe while readers and writers work.
    """
    from dagster_adjunct.resources.streams.lake.readers import list_readers

    streams = _streams(lake_url)
    for name in [_lake_stream(name) for name in names] or streams.list_streams():
        done = streams.maintain(name)
        show_line(
            f"{name}: {done.dropped_rows:,} records in {done.dropped_segments} segments dropped by retention, "
            f"{done.merged_segments} segments merged into {done.merged_into}, {done.deleted_objects} objects deleted."
        )
        for reader in list_readers(streams.lake, name) if done.dropped_segments else ():
            if reader.lost:
                show_line(f"{name}: reader {reader.name} missed {reader.lost:,} offsets that retention has dropped.")


@stream.command("remove-reader")
@click.argument("name")
@click.argument("reader")
@lake_url
def remove_reader(name: str, reader: str, lake_url: str | None) -> None:
    """Remove a named reader; if it reads again, it starts as a new reader."""
    from dagster_adjunct.resources.streams.lake.readers import list_readers, remove_reader

    lake = _streams(lake_url).lake
    there = [known.name for known in list_readers(lake, _lake_stream(name))]
    if not remove_reader(lake, _lake_stream(name), reader):
        raise ConfigurationError(
            f"stream {name!r} has no reader {reader!r}; its readers: {', '.join(there) or 'none'}.",
            "Check the name.",
            stream=f"lake.{name}",
        )
    show_line(f"Reader {reader} of {name} is removed.")


def _streams(lake_url: str | None) -> LakeStreams:
    from dagster_adjunct.resources.objects.lake import open_lake
    from dagster_adjunct.resources.streams.lake.streams import LakeStreams

    return LakeStreams(open_lake(lake_url, create=False))


def _facts(described: StreamDescription) -> dict[str, Any]:
    """Convert a description to the fields that the commands show; offsets are ordered by partition."""
    info = described.info
    return {
        "name": info.name,
        "partitions": info.partitions,
        "key": list(info.key),
        "partitioner": info.partitioner,
        "timestamp": described.timestamp,
        "records": described.rows,
        "bytes": described.size,
        "segments": described.segments,
        "markers": described.markers,
        "oldest": list(described.oldest),
        "upcoming": list(described.upcoming),
        "commits": described.commits,
        "changed_at": described.changed_at,
        "retention": described.retention.model_dump(mode="json") if described.retention else None,
        "compaction": described.compaction.model_dump(mode="json") if described.compaction else None,
        "schema": info.schema.to_json() if info.schema else [],
    }


def _lake_stream(name: str) -> str:
    """Return the stream name without the prefix "lake.", if it has one."""
    return unqualify_stream_name("lake", name)


def _load_delete() -> Deletion:
    from dagster_adjunct.orchestration.maintenance.delete import delete_stream

    return delete_stream


def _load_repartition() -> Callable[..., RepartitionReport]:
    from dagster_adjunct.orchestration.maintenance.repartition import repartition_stream

    return repartition_stream


def _repartition_details(report: RepartitionReport) -> list[str]:
    continues, verdict = ("would continue", "prevented") if report.dry_run else ("continues", "forced")
    return [
        *(f"application {application} {continues} at its position" for application in report.carried),
        *(f"dataset {dataset} {continues} at its position" for dataset in report.datasets),
        *(f"{verdict}: {reader}" for reader in (*report.holding, *report.told)),
    ]


stream.add_command(
    repartition_command(
        "Rewrite a stream into another number of partitions, once all its readers have read all of it.",
        _load_repartition,
        _repartition_details,
        name_of=_lake_stream,
        options=[
            click.Option(
                ["--force"], is_flag=True, help="Rewrite even if readers have not read all of it: their next run fails."
            )
        ],
    )
)
stream.add_command(
    deletion_command(
        "Delete a stream permanently. Rejected while it is read; repeat it if interrupted.",
        _load_delete,
        name_of=_lake_stream,
    )
)
