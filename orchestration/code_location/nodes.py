"""Kinds of asset nodes (streams, files, datasets, tables, sinks), and `AdjunctTranslator`, which names them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from dagster import AssetKey, FreshnessPolicy

from dagster_adjunct.assets.declaration.sources import FileSource
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import to_dagster_name
from dagster_adjunct.orchestration.code_location.metadata import (
    backend_name,
    column_schema,
    dataset_preview,
    declared_metadata,
    inherited_descriptions,
    masked_columns,
    output_stream_metadata,
    served_metadata,
    stream_metadata,
    stream_preview,
    table_metadata,
)
from dagster_adjunct.orchestration.operators.stream_facts import ColumnSources, Kind
from dagster_adjunct.orchestration.planner.plan import PlannedTable
from dagster_adjunct.resources.common import CodeLine, split_stream_name
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import StreamSystem


@dataclass(frozen=True, slots=True)
class AssetSubject:
    """What an asset stands for: a stream ("lake.flights"), files (their URL), a dataset ("planes"), a remote table, or
    a function that records are sent to ("alerts/notify")."""

    kind: Kind
    name: str
    application: str
    description: str = ""
    owners: tuple[str, ...] = ()
    group: str | None = None
    storage: str = ""
    external: bool = False
    """Whether it is only read here: it belongs to no application, so that several may share it."""


@dataclass(frozen=True, slots=True)
class RunOutputs:
    """Access to the outputs of an application's run.

    `preview_rows` is the number of rows to show of each; `tables` are the remote tables of the run's plan.
    """

    lake: Lake
    systems: Mapping[str, StreamSystem]
    app: Application
    preview_rows: int
    tables: tuple[PlannedTable, ...] = ()


class NodeKind(ABC):
    """A kind of node. Subclasses must implement two methods; the others have defaults.

    `app` is an application that has a node of this kind, and `name` the node's.
    """

    kind: ClassVar[Kind]

    # -- how AdjunctTranslator names assets

    @abstractmethod
    def asset_key(self, subject: AssetSubject) -> AssetKey:
        """Return the asset key, which is the same for all applications that share the node."""

    @abstractmethod
    def dagster_kinds(self, subject: AssetSubject) -> set[str]:
        """Return the technologies that Dagster's graph shows as icons."""

    # -- what the application declares

    def subject(self, app: Application, name: str) -> AssetSubject:
        """Return the subject that is passed to the translator."""
        return AssetSubject(self.kind, name, app.name, owners=app.owners)

    def declared_metadata(self, app: Application, name: str) -> dict[str, Any]:
        """Return the metadata that is known before the first run."""
        return {}

    def declared_at(self, app: Application, name: str) -> CodeLine | None:
        """Return the line of the user's code that declares the node."""
        return app.declared_at

    def freshness(self, app: Application, name: str) -> FreshnessPolicy | None:
        """Return the policy by which Dagster warns about a stale asset."""
        return None

    # -- what a run has written

    def output_metadata(self, outputs: RunOutputs, name: str, columns: ColumnSources) -> dict[str, Any]:
        """Return the metadata after a run that wrote it; `columns` maps its columns to their sources."""
        return {}


VERSION_KEY = "adjunct/data_version"
"""Metadata key of an output's own data version; it is removed before the metadata is shown."""
_SHORTEST_WINDOW = timedelta(minutes=1)


class DatasetNode(NodeKind):
    """A dataset that an application declares."""

    kind = "dataset"

    def asset_key(self, subject: AssetSubject) -> AssetKey:
        return AssetKey(["datasets", f"{to_dagster_name(subject.name)}_dataset"])

    def dagster_kinds(self, subject: AssetSubject) -> set[str]:
        return {"spark", "parquet"}

    def subject(self, app: Application, name: str) -> AssetSubject:
        dataset = app.dataset(name)
        owners = dataset.owners or app.owners
        return AssetSubject(self.kind, name, app.name, dataset.description, owners, dataset.group)

    def declared_metadata(self, app: Application, name: str) -> dict[str, Any]:
        return declared_metadata(app.dataset(name))

    def declared_at(self, app: Application, name: str) -> CodeLine | None:
        return app.dataset(name).declared_at

    def output_metadata(self, outputs: RunOutputs, name: str, columns: ColumnSources) -> dict[str, Any]:
        """Return the metadata of a local table, with its data version under VERSION_KEY."""
        from dagster_adjunct.assets.reading.dataset import open_dataset
        from dagster_adjunct.assets.reading.stored_versions import StoredVersions

        dataset = outputs.app.dataset(name)
        manifest = StoredVersions(outputs.lake, dataset).manifest()
        if manifest is None or manifest.version is None:
            return {}
        shown = served_metadata(manifest, f"{outputs.lake.url}/{outputs.lake.dataset_prefix(name)}")
        descriptions = dict(dataset.column_descriptions)
        shown["dagster/column_schema"] = column_schema(manifest.version.columns, descriptions)
        shown["adjunct/stored_rows"] = manifest.version.stored_rows
        if outputs.preview_rows:
            with open_dataset(outputs.lake, name, version=manifest.version.id, lease=False) as version:
                shown |= dataset_preview(version, outputs.preview_rows, dataset.sensitive)
        return shown | {VERSION_KEY: manifest.version.id}

    def freshness(self, app: Application, name: str) -> FreshnessPolicy | None:
        """Return a policy that fails if the dataset was not checked for changes within its declared window."""
        window = app.dataset(name).following.freshness
        if window is None:
            return None
        if window < _SHORTEST_WINDOW:
            raise ConfigurationError(
                f"dataset {name!r} declares freshness={window}, but Dagster's shortest window is {_SHORTEST_WINDOW}.",
                "Declare a longer window, or use max_staleness= of app.table(…), which takes any.",
                argument="freshness",
                dataset=name,
            )
        return FreshnessPolicy.time_window(fail_window=window)


class FilesNode(NodeKind):
    """Files that are only read, by their URL."""

    kind = "files"

    def asset_key(self, subject: AssetSubject) -> AssetKey:
        path = subject.name.partition("://")[2] or subject.name
        return AssetKey(["files", *(to_dagster_name(part) for part in path.split("/") if part not in ("", "."))])

    def dagster_kinds(self, subject: AssetSubject) -> set[str]:
        return {subject.storage}

    def subject(self, app: Application, name: str) -> AssetSubject:
        inputs = [dataset.input for dataset in app.datasets]
        formats = (source.format for source in inputs if isinstance(source, FileSource) and source.url == name)
        return AssetSubject(self.kind, name, app.name, owners=app.owners, storage=next(formats))

    def declared_metadata(self, app: Application, name: str) -> dict[str, Any]:
        return {"dagster/uri": name}


class RemoteTableNode(NodeKind):
    """A remote table, by its declared name."""

    kind = "table"

    def asset_key(self, subject: AssetSubject) -> AssetKey:
        return AssetKey(["tables", to_dagster_name(subject.name)])

    def dagster_kinds(self, subject: AssetSubject) -> set[str]:
        return {subject.storage or "table"}

    def subject(self, app: Application, name: str) -> AssetSubject:
        return AssetSubject(self.kind, name, app.name, owners=app.owners, storage=backend_name(app.tables[name]))

    def declared_metadata(self, app: Application, name: str) -> dict[str, Any]:
        return table_metadata(app.tables[name])

    def output_metadata(self, outputs: RunOutputs, name: str, columns: ColumnSources) -> dict[str, Any]:
        sends = [table for table in outputs.tables if table.table == name]
        planned = {
            "adjunct/order": "; ".join(dict.fromkeys(f"{send.order}: {send.why}" for send in sends)),
            "adjunct/after_replay": "; ".join(dict.fromkeys(send.replay for send in sends)),
        }
        return table_metadata(outputs.app.tables[name], inherited_descriptions(outputs.app, columns)) | planned


_NON_WORD = re.compile(r"\W")


class SinkNode(NodeKind):
    """A function that records are sent to, by application and function name: "alerts/notify"."""

    kind = "sink"

    def asset_key(self, subject: AssetSubject) -> AssetKey:
        application, _, function = subject.name.partition("/")
        return AssetKey(["sinks", to_dagster_name(application), _NON_WORD.sub("_", function)])

    def dagster_kinds(self, subject: AssetSubject) -> set[str]:
        return {"python"}


class StreamNode(NodeKind):
    """A stream, "lake.flights"."""

    kind = "stream"

    def asset_key(self, subject: AssetSubject) -> AssetKey:
        return AssetKey([to_dagster_name(part) for part in split_stream_name(subject.name)])

    def dagster_kinds(self, subject: AssetSubject) -> set[str]:
        system = split_stream_name(subject.name)[0]
        return {"stream", "parquet" if system == "lake" else system}

    def subject(self, app: Application, name: str) -> AssetSubject:
        subject = super().subject(app, name)
        return replace(subject, description=app.outputs[name].description) if name in app.outputs else subject

    def declared_metadata(self, app: Application, name: str) -> dict[str, Any]:
        return output_stream_metadata(app.outputs[name]) if name in app.outputs else {}

    def output_metadata(self, outputs: RunOutputs, name: str, columns: ColumnSources) -> dict[str, Any]:
        held = stream_metadata(outputs.lake, outputs.systems, name, inherited_descriptions(outputs.app, columns))
        if held is None:
            return {}
        masked = partial(masked_columns, outputs.app, columns)
        return held | stream_preview(outputs.systems, name, outputs.preview_rows, masked)


_KINDS: tuple[NodeKind, ...] = (StreamNode(), FilesNode(), DatasetNode(), RemoteTableNode(), SinkNode())
_BY_NAME = {kind.kind: kind for kind in _KINDS}


def node_kind(name: Kind) -> NodeKind:
    """Return the kind of this name."""
    return _BY_NAME[name]


_TAG = re.compile(r"[A-Za-z0-9_.-]{1,63}")


class AdjunctTranslator:
    """Chooses the keys, groups and owners of assets; override a method to follow your platform's conventions.

    Applications that share a stream or dataset share one asset, because the default keys do not depend on
    the application: `lake/flights`, `datasets/planes_dataset`, `tables/aircraft_state`, `files/bucket/prefix`. The
    graph shows only the last part, so that of a dataset differs from its stream's. Assets that are only read are in
    the group "inputs" and have no owners.
    """

    def get_asset_key(self, subject: AssetSubject) -> AssetKey:
        return node_kind(subject.kind).asset_key(subject)

    def get_group_name(self, subject: AssetSubject) -> str:
        return subject.group or ("inputs" if subject.external else to_dagster_name(subject.application))

    def get_owners(self, subject: AssetSubject) -> Sequence[str]:
        return subject.owners

    def get_description(self, subject: AssetSubject) -> str | None:
        return subject.description or None

    def get_kinds(self, subject: AssetSubject) -> set[str]:
        return node_kind(subject.kind).dagster_kinds(subject)

    def get_tags(self, subject: AssetSubject) -> Mapping[str, str]:
        tags = {"adjunct/kind": subject.kind}
        # Dagster's tags can't hold URLs and very long names.
        return tags | ({"adjunct/name": subject.name} if _TAG.fullmatch(subject.name) else {})
