"""Remote tables that applications write, as assets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dagster import AssetKey

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.nodes.asset_subject import AssetSubject
from dagster_adjunct.orchestration.code_location.nodes.node_kind import NodeKind, Outputs
from dagster_adjunct.orchestration.code_location.shared.asset_metadata import storage_of, table_metadata
from dagster_adjunct.orchestration.code_location.shared.shown_column_lineage import descriptions_of

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.column_lineage import Made


class RemoteTableNode(NodeKind):
    """A remote table, by the name that the application declares it under."""

    kind = "table"

    def asset_key(self, subject: AssetSubject) -> AssetKey:
        return AssetKey(["tables", dagster_name(subject.name)])

    def dagster_kinds(self, subject: AssetSubject) -> set[str]:
        return {subject.storage or "table"}

    def subject(self, app: Application, name: str) -> AssetSubject:
        return AssetSubject(self.kind, name, app.name, owners=app.owners, storage=storage_of(app.tables[name]))

    def declared_metadata(self, app: Application, name: str) -> dict[str, Any]:
        return table_metadata(app.tables[name])

    def output_metadata(self, outputs: Outputs, name: str, columns: Made) -> dict[str, Any]:
        sends = [table for table in outputs.tables if table.table == name]
        planned = {
            "adjunct/order": "; ".join(dict.fromkeys(f"{send.order}: {send.why}" for send in sends)),
            "adjunct/after_replay": "; ".join(dict.fromkeys(send.replay for send in sends)),
        }
        return table_metadata(outputs.app.tables[name], descriptions_of(outputs.app, columns)) | planned
