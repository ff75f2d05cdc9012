"""Folders of files that datasets are made from, as assets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dagster import AssetKey

from dagster_adjunct.assets.declaration.inputs_besides_streams import FileSource
from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.nodes.asset_subject import AssetSubject
from dagster_adjunct.orchestration.code_location.nodes.node_kind import NodeKind

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application


class FilesNode(NodeKind):
    """Files that nobody here writes, by their URL."""

    kind = "files"

    def asset_key(self, subject: AssetSubject) -> AssetKey:
        path = subject.name.partition("://")[2] or subject.name
        return AssetKey(["files", *(dagster_name(part) for part in path.split("/") if part not in ("", "."))])

    def dagster_kinds(self, subject: AssetSubject) -> set[str]:
        return {subject.storage}

    def subject(self, app: Application, name: str) -> AssetSubject:
        inputs = [dataset.input for dataset in app.datasets]
        formats = (source.format for source in inputs if isinstance(source, FileSource) and source.url == name)
        return AssetSubject(self.kind, name, app.name, owners=app.owners, storage=next(formats))

    def declared_metadata(self, app: Application, name: str) -> dict[str, Any]:
        return {"dagster/uri": name}
