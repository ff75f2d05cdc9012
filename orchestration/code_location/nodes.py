"""Datasets as assets: what their declarations say of them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from dagster import AssetKey, FreshnessPolicy

from dagster_adjunct.assets.declaration.sources import FileSource
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
from dagster_adjunct.orchestration.operators.stream_facts import Kind
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.stream_facts import ColumnSources
    from dagster_adjunct.orchestration.planner.plan import PlannedTable
    from dagster_adjunct.resources.common import CodeLine
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.system import StreamSystem


@dataclass(frozen=True, slots=True)
class AssetSubject:
    """One asset to be: a stream ("lake.flights"), files (their URL), a dataset ("planes"), a remote table, or what
    an application hands records to ("alerts/notify")."""

    kind: Kind
    name: str
    application: str
    description: str = ""
    owners: tuple[str, ...] = ()
    group: str | None = None
    storage: str = ""
    external: bool = False
    """Read here, and written by no application here: it is nobody's own, so that several may read it."""


@dataclass(frozen=True, slots=True)
class RunOutputs:
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

    def declared_at(self, app: Application, name: str) -> CodeLine | None:
        """Return the line of the user's code that declares it."""
        return app.declared_at

    def freshness(self, app: Application, name: str) -> FreshnessPolicy | None:
        """Return what Dagster warns by when nothing happens to it."""
        return None

    # -- what a run has written

    def output_metadata(self, outputs: RunOutputs, name: str, columns: ColumnSources) -> dict[str, Any]:
        """Return what it holds after a run that has written it; `columns` are what its columns are made of."""
        return {}


VERSION_KEY = "adjunct/data_version"
"""Where the metadata of an output names the data version of its own; it is taken out before it is shown."""
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
        """Return what a local table holds, with the version that its materialisation has under VERSION."""
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
        """Return what Dagster warns by: the asset fails to be fresh when nobody has looked for changes so long."""
        window = app.dataset(name).following.freshness
        if window is None:
            return None
        if window < _SHORTEST_WINDOW:
            raise ConfigurationError(
                f"dataset {name!r} declares freshness={window}, and Dagster's shortest window is {_SHORTEST_WINDOW}.",
                "Declare a longer one; max_staleness= of app.table(…) takes any.",
                argument="freshness",
                dataset=name,
            )
        return FreshnessPolicy.time_window(fail_window=window)


class FilesNode(NodeKind):
    """Files that nobody here writes, by their URL."""

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
    """A remote table, by the name that the application declares it under."""

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
    """A function, by the names of its application and of itself: "alerts/notify"."""

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
    """Override a method to give assets the keys, groups and owners that your platform has.

    Applications that share a stream or dataset meet in one asset, because the default keys do not depend on
    the application: `lake/flights`, `datasets/planes_dataset`, `tables/aircraft_state`, `files/bucket/prefix`. The
    graph shows the last part alone: a dataset's tells it from the stream that it is made of. What is only read is in
    the group "inputs" and has no owners, whichever application reads it.
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
        # Dagster's tags hold short plain texts; a URL and a very long name are none.
        return tags | ({"adjunct/name": subject.name} if _TAG.fullmatch(subject.name) else {})
