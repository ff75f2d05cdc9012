"""What a kind of node is to Dagster. A further kind is one more file here, and its name in `nodes_by_kind.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dagster_adjunct.orchestration.code_location.nodes.asset_subject import AssetSubject

if TYPE_CHECKING:
    from dagster import AssetKey, FreshnessPolicy

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.column_lineage import Kind, Made
    from dagster_adjunct.orchestration.planner.plans.plan_parts import PlannedTable
    from dagster_adjunct.resources.declared_place import Place
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where the outputs of an application's run can be looked at; so many rows of each are shown.

    `tables` is what the run's plan says of the remote tables.
    """

    lake: Lake
    systems: Mapping[str, StreamSystem]
    app: Application
    preview_rows: int
    tables: tuple[PlannedTable, ...] = ()


class NodeKind(ABC):
    """One kind of node. Two methods have to be written; the others say what most kinds say.

    `app` is an application that has a node of this kind, and `name` the node's.
    """

    kind: ClassVar[Kind]

    # -- how assets are named where the translator is not overridden

    @abstractmethod
    def asset_key(self, subject: AssetSubject) -> AssetKey:
        """Return the key; the same for all applications that share the node."""

    @abstractmethod
    def dagster_kinds(self, subject: AssetSubject) -> set[str]:
        """Return what Dagster's graph shows as icons: technologies."""

    # -- what the application declares of it

    def subject(self, app: Application, name: str) -> AssetSubject:
        """Return what the translator is asked with."""
        return AssetSubject(self.kind, name, app.name, owners=app.owners)

    def declared_metadata(self, app: Application, name: str) -> dict[str, Any]:
        """Return what stands in Dagster before the first run."""
        return {}

    def declared_at(self, app: Application, name: str) -> Place | None:
        """Return the line of the user's code that declares it."""
        return app.declared_at

    def freshness(self, app: Application, name: str) -> FreshnessPolicy | None:
        """Return what Dagster warns by when nothing happens to it."""
        return None

    # -- what a run has written

    def output_metadata(self, outputs: Outputs, name: str, columns: Made) -> dict[str, Any]:
        """Return what it holds after a run that has written it; `columns` are what its columns are made of."""
        return {}
