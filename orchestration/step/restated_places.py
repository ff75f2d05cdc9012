"""The places of the records whose results a batch restates, as they are stored.

They are stored before the batch begins, so a repeated batch reads the same records, whatever the
streams and datasets have become.
"""

from __future__ import annotations

from uuid import uuid4

from dagster_adjunct.orchestration.batch_log.intent import Ranges, Restating
from dagster_adjunct.orchestration.startpoints.restatement import Places
from dagster_adjunct.orchestration.step.context import StepContext
from dagster_adjunct.orchestration.step.recorded_answers import answers_prefix
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.files.opened import translate_read_errors
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.arrow_files import read_sealed_table, write_sealed_table
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    OffsetRange,
    SystemStreamPartition,
)

STREAM = "stream"


def store_places(context: StepContext, batch: int, places: Places) -> str:
    """Store the places of a batch that is about to begin; return the name of the object."""
    tables = []
    for stream, table in places.items():
        names = pa.repeat(pa.scalar(stream), table.num_rows)
        tables.append(table.append_column(STREAM, names))
    table = pa.concat_tables(tables)
    name = f"{batch}/restated-{uuid4().hex}.arrow"
    key = f"{answers_prefix(context.lake, context.app.name)}{name}"
    context.lake.store.put_if_absent(key, write_sealed_table(table))
    return name


def read_places(context: StepContext, restating: Restating) -> Places:
    """Return the places of a batch that has begun. Raises MalformedDocumentError."""
    key = f"{answers_prefix(context.lake, context.app.name)}{restating.places}"
    try:
        data = context.lake.store.get(key).data
        with translate_read_errors(key, KeyError):
            table = read_sealed_table(data)
            streams = pc.unique(table.column(STREAM)).to_pylist()
    except (errors.ObjectNotFoundError, errors.SchemaMismatchError) as error:
        raise errors.MalformedDocumentError(
            f"the places of the records that the open batch of application {context.app.name!r}"
            f" restates can't be read. {error.problem}",
            "Restore that object from a backup, or abandon the batch: adjunct checkpoint abandon"
            f" {context.app.name} --reason ….",
            document=key,
        ) from error
    places = {}
    for stream in streams:
        here = table.filter(pc.equal(table.column(STREAM), stream))
        places[stream] = here.select([PARTITION, OFFSET])
    return places


def ranges_of_places(places: Places) -> Ranges:
    """Return the offsets from the first to the last place of each partition."""
    ranges = {}
    for stream, table in places.items():
        system, name = split_stream_name(stream)
        edges = table.group_by(PARTITION).aggregate([(OFFSET, "min"), (OFFSET, "max")])
        for row in edges.to_pylist():
            ssp = SystemStreamPartition(system, name, row[PARTITION])
            ranges[ssp] = OffsetRange(str(row[f"{OFFSET}_min"]), str(row[f"{OFFSET}_max"] + 1))
    return ranges
