"""`adjunct schema infer`: the schema of files or of a topic, to be copied into a declaration."""

from __future__ import annotations

import sys
from typing import Any

import click

from dagster_adjunct.assets.exchange.samples import infer_from_files
from dagster_adjunct.orchestration.cli.options import flag, option, output_options
from dagster_adjunct.orchestration.cli.output import show_json, show_line
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.declarations import to_declaration, write_python
from dagster_adjunct.resources.schemas.inference import InferredSchema
from dagster_adjunct.resources.schemas.schema import Schema

schema = click.Group("schema")


@schema.command()
@click.argument("sources", nargs=-1, required=True, metavar="FILES|TOPIC...")
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "jsonl", "parquet"]),
    help="Of all files. Default: what their names end in.",
)
@click.option(
    "--rows",
    type=click.IntRange(1, sys.maxsize),
    default=10_000,
    show_default=True,
    help="How many records to read, the same number of each file or partition.",
)
@flag("--times", "Make texts of JSON that all are dates or times with a zone `date`, `timestamp`.")
@flag("--yaml", "Print YAML instead of Python.")
@option("--kafka", "HOST:PORT", "The bootstrap servers of the cluster that has TOPIC.")
@option("--registry", "URL", "The schema registry that has the schema of TOPIC's values.")
@output_options
def infer(
    sources: tuple[str, ...],
    form: Any,
    rows: int,
    times: bool,
    yaml: bool,
    kafka: str | None,
    registry: str | None,
) -> None:
    """Print the schema of files or of a Kafka topic, inferred from a sample of their records.

    FILES are JSON lines, CSV with a header line or Parquet, or folders of them, here or in S3
    (s3://…). TOPIC has JSON objects, and needs --kafka; or it has a registered Avro schema, and
    needs only --registry. Comments say where the sample leaves the schema unsure.
    """
    if kafka is None and registry is None:
        inferred = infer_from_files(sources, rows=rows, format=form, times=times)
    else:
        inferred = _of_topic(sources, kafka, registry, rows, times)
    show_json(
        {
            "schema": inferred.schema.to_json(),
            "declaration": to_declaration(inferred.schema),
            "doubts": inferred.doubts,
            "records": inferred.records,
        }
    )
    for line in describe_sample(inferred):
        show_line(f"# {line}")
    show_line(write_yaml(inferred.schema) if yaml else f"SCHEMA = {write_python(inferred.schema)}")


def describe_sample(inferred: InferredSchema) -> list[str]:
    """Return the lines that say how large the sample was, and where it leaves the schema unsure."""
    lines = []
    if inferred.records:
        lines.append(f"From {inferred.records:,} records.")
    if inferred.doubts:
        lines.append("Unsure:")
    for doubt in inferred.doubts:
        lines.append(f"  {_printable(str(doubt))}")
    return lines


def write_yaml(schema: Schema) -> str:
    """Return the columns as YAML, under the key `schema`."""
    import yaml

    document = {"schema": to_declaration(schema)}
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    return text.rstrip("\n")


def _printable(text: str) -> str:
    """Return a text in one line: with escapes for line breaks and other control characters."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _of_topic(
    topics: tuple[str, ...], kafka: str | None, registry: str | None, rows: int, times: bool
) -> InferredSchema:
    """Return the schema of a topic: the registered one if there is a registry, else what its newest
    records have.
    """
    from dagster_adjunct.resources.streams.kafka.client import KafkaSettings
    from dagster_adjunct.resources.streams.kafka.samples import infer_from_topic, registered_schema
    from dagster_adjunct.resources.streams.kafka.schema_registry import SchemaRegistry

    if len(topics) > 1:
        problem = f"{len(topics)} topics are named, and each has a schema of its own."
        raise ConfigurationError(problem, "Name one topic.", argument="TOPIC")
    if registry is not None:
        return registered_schema(SchemaRegistry(registry), topics[0])
    return infer_from_topic(KafkaSettings("kafka", str(kafka)), topics[0], rows=rows, times=times)
