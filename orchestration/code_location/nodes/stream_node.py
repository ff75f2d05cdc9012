"""Streams as assets: those that are read, and those that applications write."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster import AssetKey

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.nodes.asset_subject import AssetSubject
from dagster_adjunct.orchestration.code_location.nodes.node_kind import NodeKind, Outputs
from dagster_adjunct.orchestration.code_location.shared.asset_metadata import output_stream_metadata, stream_metadata
from dagster_adjunct.orchestration.code_location.shared.row_preview import stream_preview
from dagster_adjunct.orchestration.code_location.shared.shown_column_lineage import descriptions_of, hidden_columns
from dagster_adjunct.resources.names import split_stream_name

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.column_lineage import Made


class StreamNode(NodeKind):
    """A stream, "lake.flights"."""

    kind = "stream"

    def asset_key(self, subject: AssetSubject) -> AssetKey:
        return AssetKey([dagster_name(part) for part in split_stream_name(subject.name)])

    def dagster_kinds(self, subject: AssetSubject) -> set[str]:
        system = split_stream_name(subject.name)[0]
        return {"stream", "parquet" if system == "lake" else system}

    def subject(self, app: Application, name: str) -> AssetSubject:
        subject = super().subject(app, name)
        return replace(subject, description=app.outputs[name].description) if name in app.outputs else subject

    def declared_metadata(self, app: Application, name: str) -> dict[str, Any]:
        return output_stream_metadata(app.outputs[name]) if name in app.outputs else {}

    def output_metadata(self, outputs: Outputs, name: str, columns: Made) -> dict[str, Any]:
        held = stream_metadata(outputs.lake, outputs.systems, name, descriptions_of(outputs.app, columns))
        if held is None:
            return {}
        masked = partial(hidden_columns, outputs.app, columns)
        return held | stream_preview(outputs.systems, name, outputs.preview_rows, masked)
