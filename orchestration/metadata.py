"""What stands in Dagster about a dataset, a stream or a table after a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dagster import MetadataValue, TableColumn, TableSchema

if TYPE_CHECKING:
    from assets import AdvanceReport
    from orchestration.step import StepReport
    from resources.schema import Schema


def column_schema(schema: Schema) -> MetadataValue:
    """Return a schema as Dagster shows it, with Spark's type names."""
    return MetadataValue.table_schema(TableSchema([TableColumn(f.name, f.type) for f in schema.fields]))


def dataset_metadata(report: AdvanceReport, uri: str) -> dict[str, Any]:
    """Return the metadata of a dataset's materialisation: version, rows, schema, offsets, what was done."""
    metadata: dict[str, Any] = {
        "adjunct/action": report.action,
        "adjunct/version": report.version or "none",
        "adjunct/offsets": MetadataValue.json({str(p): offset for p, offset in report.offsets.items()}),
        "adjunct/counters": MetadataValue.json(dict(report.counters)),
        "adjunct/seconds": MetadataValue.json({stage: round(s, 3) for stage, s in report.seconds.items()}),
        "dagster/row_count": report.rows,
        "dagster/uri": uri,
        "dagster/storage_kind": "parquet",
    }
    if report.schema is not None:
        metadata["dagster/column_schema"] = column_schema(report.schema)
    return metadata


def step_metadata(report: StepReport) -> dict[str, Any]:
    """Return the metadata that all outputs of a step share: batches, versions, checkpoint, joins."""
    joins = {name: counts for name, counts in report.counters.items() if "unmatched" in counts}
    return {
        "adjunct/batches": report.batches,
        "adjunct/last_batch": report.state.batch,
        "adjunct/caught_up": report.caught_up,
        "adjunct/versions": MetadataValue.json(report.versions),
        "adjunct/checkpoint": MetadataValue.json(report.state.checkpoint),
        "adjunct/joins": MetadataValue.json(joins),
        "adjunct/seconds": MetadataValue.json({stage: round(s, 3) for stage, s in report.seconds.items()}),
    }


def counters_metadata(counters: Mapping[str, int]) -> dict[str, Any]:
    """Return one output's counters of this run, each under a name of its own."""
    return {f"adjunct/{name}": value for name, value in counters.items()}
