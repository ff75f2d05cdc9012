"""`adjunct stream …`: what streams the lake has, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestration.cli.output import as_json, lake_url, show_facts, show_json, show_line, show_table
from resources.errors import ConfigurationError
from resources.names import split_stream_name

if TYPE_CHECKING:
    from resources.streams import LakeStreams, StreamDescription


@click.group()
def stream() -> None:
    """Streams of the lake."""


@stream.command("list")
@lake_url
@as_json
def list_streams(lake_url: str | None, json_output: bool) -> None:
    """List the streams with their partitions and records."""
    streams = _streams(lake_url)
    found = [_facts(streams.describe(name)) for name in streams.list_streams()]
    if json_output:
        show_json(found)
        return
    columns = ["name", "partitions", "key", "records", "bytes", "segments"]
    show_table("streams", columns, [[item[column] for column in columns] for item in found])


@stream.command()
@click.argument("name")
@lake_url
@as_json
def describe(name: str, lake_url: str | None, json_output: bool) -> None:
    """Show a stream's schema, partitions, offsets, markers and policies."""
    facts = _facts(_streams(lake_url).describe(_lake_stream(name)))
    if json_output:
        show_json(facts)
        return
    schema = facts.pop("schema")
    show_facts(f"stream {name}", facts)
    show_table("schema", ["column", "type"], [[field["name"], field["type"]] for field in schema])


@stream.command()
@click.argument("name")
@click.option("--to", "target", required=True, type=click.Path(path_type=Path), help="A new .parquet file.")
@lake_url
def export(name: str, target: Path, lake_url: str | None) -> None:
    """Write a stream's records to one Parquet file, with partition, offset and timestamp of each."""
    import pyarrow.parquet as pq

    if target.suffix != ".parquet":
        raise ConfigurationError(f"--to {target} is no .parquet file.", "Choose a name that ends in .parquet.")
    if target.exists():
        raise ConfigurationError(f"{target} exists already.", "Remove it, or choose another name.")
    if not target.absolute().parent.is_dir():
        raise ConfigurationError(f"--to {target}: there is no folder {target.parent}.", "Create it first.")
    streams = _streams(lake_url)
    records = streams.read_arrow(streams.whole(_lake_stream(name)))
    pq.write_table(records, target, compression="zstd")
    show_line(f"{records.num_rows:,} records of {name} written to {target}.")


@stream.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@lake_url
def maintain(names: tuple[str, ...], lake_url: str | None) -> None:
    """Apply the retention and compaction that streams declare, and delete what nothing reaches any more.

    Without a NAME, all streams. For cron, or a schedule of your platform; safe beside readers and writers.
    """
    streams = _streams(lake_url)
    for name in [_lake_stream(name) for name in names] or streams.list_streams():
        done = streams.maintain(name)
        show_line(
            f"{name}: {done.dropped_rows:,} records in {done.dropped_segments} segments dropped by retention, "
            f"{done.merged_segments} segments merged into {done.merged_into}, {done.deleted_objects} objects deleted."
        )


def _streams(lake_url: str | None) -> LakeStreams:
    from resources.objects import open_lake
    from resources.streams import LakeStreams

    return LakeStreams(open_lake(lake_url))


def _facts(described: StreamDescription) -> dict[str, Any]:
    """Return a description under the names that the commands show; offsets stand in order of the partitions."""
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
    """Take "flights" as well as "lake.flights"."""
    if "." not in name:
        return name
    system, stream = split_stream_name(name)
    if system != "lake":
        raise ConfigurationError(f"{name!r} is a stream of {system}; this command knows those of the lake.")
    return stream
