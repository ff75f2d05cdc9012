"""Kinds of asset nodes (streams, files, datasets, tables, sinks), and `AdjunctTranslator`, which
names them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_adjunct.assets.declaration.dataset import FileSource
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import to_dagster_name
from dagster_adjunct.orchestration.code_location import metadata
from dagster_adjunct.orchestration.operators.stream_facts import ColumnSources, Kind, LineageNode
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import StreamSystem

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.planner.planned import PlannedTable


@dataclass(frozen=True, slots=True)
class AssetSubject:
    """What an asset stands for: a stream ("lake.flights"), files (their URL), a dataset ("planes"),
    a remote table, or a function that records are sent to ("alerts/notify")."""

    kind: Kind
    name: str
    application: str
    description: str = ""
    owners: tuple[str, ...] = ()
    group: str | None = None
    storage: str = ""
    external: bool = False
    """Whether it is only read here: it belongs to no application, so that several may share it."""
    automation_condition: dg.AutomationCondition[Any] | None = None


@dataclass(frozen=True, slots=True)
class RunOutputs:
    """Access to the outputs of an application's run.

    `preview_rows` is the number of rows to show of each; `tables` are the remote tables of the
    run's plan.
    """

    lake: Lake
    systems: Mapping[str, StreamSystem]
    app: Application
    preview_rows: int
    tables: tuple[PlannedTable, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A kind of node: how to find the default asset key, icons, subject and metadata of one node by
    its name.

    The asset key is the same for all applications that share the node. `subject` returns fields of
    the node's AssetSubject, `declared` metadata that is known before the first run, and `written`
    metadata of what a run wrote, given the sources of each column.
    """

    key: Callable[[AssetSubject], dg.AssetKey]
    icons: Callable[[AssetSubject], set[str]]
    subject: Callable[[Application, str], Mapping[str, Any]] = lambda app, name: {}
    declared: Callable[[Application, str], dict[str, Any]] = lambda app, name: {}
    written: Callable[[RunOutputs, str, ColumnSources], dict[str, Any]] = (
        lambda outputs, name, columns: {}
    )


VERSION_KEY = "adjunct/data_version"
"""Metadata key of an output's own data version; it is removed before the metadata is shown."""
_NON_WORD = re.compile(r"\W", re.ASCII)


def asset_subject(app: Application, node: LineageNode) -> AssetSubject:
    """Return what the translator gets to know of a node."""
    facts = {
        "owners": app.owners,
        "automation_condition": app.automation_condition,
        **NODE_KINDS[node.kind].subject(app, node.name),
    }
    return AssetSubject(node.kind, node.name, app.name, **facts)


def _dataset_subject(app: Application, name: str) -> dict[str, Any]:
    """Return the description, owners, group and automation condition that a dataset declares, or
    has from the application.
    """
    dataset = app.dataset(name)
    shown = dataset.presentation
    condition = shown.automation_condition
    if condition is None and dataset.is_owned_by(app.name):
        # A local table is an output of the application.
        condition = app.automation_condition
    return {
        "description": shown.description,
        "owners": shown.owners or app.owners,
        "group": shown.group,
        "automation_condition": condition,
    }


def _written_local_table(outputs: RunOutputs, name: str, columns: ColumnSources) -> dict[str, Any]:
    """Return the metadata of a local table, with its data version under VERSION_KEY."""
    dataset = outputs.app.dataset(name)
    manifest = StoredVersions(outputs.lake, dataset).manifest()
    if manifest is None or manifest.version is None:
        return {}
    shown = metadata.served_metadata(
        manifest, f"{outputs.lake.url}/{outputs.lake.dataset_prefix(name)}"
    )
    shown["dagster/column_schema"] = metadata.column_schema(
        manifest.version.columns, dict(dataset.presentation.column_descriptions)
    )
    shown["adjunct/stored_rows"] = manifest.version.stored_rows
    shown |= metadata.dataset_preview(
        outputs.lake, dataset, manifest.version.id, outputs.preview_rows
    )
    return shown | {VERSION_KEY: manifest.version.id}


def _files_key(subject: AssetSubject) -> dg.AssetKey:
    """Return the asset key of files: the parts of their URL without its scheme, below "files"."""
    _, _, without_scheme = subject.name.partition("://")
    path = without_scheme or subject.name
    key = ["files"]
    for part in path.split("/"):
        if part not in ("", "."):
            key.append(to_dagster_name(part))
    return dg.AssetKey(key)


def _files_subject(app: Application, name: str) -> dict[str, Any]:
    """Return the format of files at this URL."""
    for dataset in app.datasets:
        if isinstance(dataset.input, FileSource) and dataset.input.url == name:
            return {"storage": dataset.input.format}
    raise AssertionError("a node of files is the input of a dataset")


def _written_table(outputs: RunOutputs, name: str, columns: ColumnSources) -> dict[str, Any]:
    """Return the metadata of a remote table: its declaration, and in which order the run's sends
    write.
    """
    sends = []
    for table in outputs.tables:
        if table.table == name:
            sends.append(table)
    return metadata.table_metadata(
        outputs.app.tables[name], metadata.inherited_descriptions(outputs.app, columns)
    ) | {
        "adjunct/order": "; ".join(dict.fromkeys(f"{send.order}: {send.why}" for send in sends)),
        "adjunct/after_replay": "; ".join(dict.fromkeys(send.replay for send in sends)),
    }


def _sink_key(subject: AssetSubject) -> dg.AssetKey:
    """Return the asset key of a function that records are sent to: its application and name, below
    "sinks".
    """
    application, _, function = subject.name.partition("/")
    return dg.AssetKey(["sinks", to_dagster_name(application), _NON_WORD.sub("_", function)])


def _output_table_key(subject: AssetSubject) -> dg.AssetKey:
    """Return the asset key of an Iceberg table, ["iceberg", …, namespace, name], or of a Delta
    table, ["delta", … the parts of its URL].
    """
    kind, _, name = subject.name.partition(":")
    _, _, without_scheme = name.partition("://")
    parts = (
        re.split(r"[/:]", without_scheme or name) if kind == "delta" else re.split(r"[.:]", name)
    )
    key = [to_dagster_name(part) for part in parts if part not in ("", ".")]
    return dg.AssetKey([kind, *key])


def _stream_subject(app: Application, name: str) -> dict[str, Any]:
    """Return the description of an output stream; nothing for other streams."""
    if name not in app.outputs:
        return {}
    return {"description": app.outputs[name].description}


def _stream_icons(subject: AssetSubject) -> set[str]:
    """Return the icons of a stream: "stream", and one for its system."""
    system, _ = split_stream_name(subject.name)
    return {"stream", "parquet" if system == "lake" else system}


def _written_stream(outputs: RunOutputs, name: str, columns: ColumnSources) -> dict[str, Any]:
    """Return the metadata of an output stream, with a preview; empty if it does not exist."""
    facts = metadata.stream_metadata(
        outputs.lake, outputs.systems, name, metadata.inherited_descriptions(outputs.app, columns)
    )
    if facts is None:
        return {}
    masked = partial(metadata.masked_columns, outputs.app, columns)
    return facts | metadata.stream_preview(outputs.systems, name, outputs.preview_rows, masked)


NODE_KINDS: dict[Kind, NodeKind] = {
    "stream": NodeKind(
        key=lambda subject: dg.AssetKey(
            [to_dagster_name(part) for part in split_stream_name(subject.name)]
        ),
        icons=_stream_icons,
        subject=_stream_subject,
        declared=lambda app, name: metadata.declared_stream_metadata(name, app.outputs.get(name)),
        written=_written_stream,
    ),
    "files": NodeKind(
        key=_files_key,
        icons=lambda subject: {subject.storage},
        subject=_files_subject,
        declared=lambda app, name: {"dagster/uri": name},
    ),
    "dataset": NodeKind(
        key=lambda subject: dg.AssetKey(["datasets", f"{to_dagster_name(subject.name)}_dataset"]),
        icons=lambda subject: {"spark", "parquet"},
        subject=_dataset_subject,
        declared=lambda app, name: metadata.declared_metadata(app.dataset(name)),
        written=_written_local_table,
    ),
    "table": NodeKind(
        key=lambda subject: dg.AssetKey(["tables", to_dagster_name(subject.name)]),
        icons=lambda subject: {subject.storage or "table"},
        subject=lambda app, name: {"storage": metadata.backend_name(app.tables[name])},
        declared=lambda app, name: metadata.table_metadata(app.tables[name]),
        written=_written_table,
    ),
    "sink": NodeKind(key=_sink_key, icons=lambda subject: {"python"}),
    "output-table": NodeKind(
        key=_output_table_key,
        icons=lambda subject: {subject.name.partition(":")[0]},
        subject=lambda app, name: {"description": app.output_tables[name].description},
        declared=lambda app, name: {"dagster/table_name": name.partition(":")[2]},
    ),
}


_TAG = re.compile(r"[A-Za-z0-9_.-]{1,63}")


class AdjunctTranslator:
    """Chooses the keys, groups, owners and automation of assets; override a method to follow your
    conventions.

    Applications that share a stream or dataset share one asset, because the default keys do not
    depend on the application: `lake/flights`, `datasets/planes_dataset`, `tables/aircraft_state`,
    `files/bucket/prefix`. The graph shows only the last part, so that of a dataset differs from its
    stream's. Assets that are only read are in the group "inputs" and have no owners.
    """

    def get_asset_key(self, subject: AssetSubject) -> dg.AssetKey:
        """Return the key of the asset."""
        return NODE_KINDS[subject.kind].key(subject)

    def get_group_name(self, subject: AssetSubject) -> str:
        """Return the group: the declared one, else "inputs" for what is only read, else the
        application.
        """
        if subject.group:
            return subject.group
        return "inputs" if subject.external else to_dagster_name(subject.application)

    def get_owners(self, subject: AssetSubject) -> Sequence[str]:
        """Return the owners, as email addresses and teams ("team:data")."""
        return subject.owners

    def get_description(self, subject: AssetSubject) -> str | None:
        """Return the description that Dagster shows; None for none."""
        return subject.description or None

    def get_kinds(self, subject: AssetSubject) -> set[str]:
        """Return the icons that Dagster shows on the asset."""
        return NODE_KINDS[subject.kind].icons(subject)

    def get_tags(self, subject: AssetSubject) -> Mapping[str, str]:
        """Return the tags by which assets can be searched."""
        tags: dict[str, str] = {"adjunct/kind": subject.kind}
        if _TAG.fullmatch(subject.name):  # Dagster's tags can't hold URLs and very long names
            tags["adjunct/name"] = subject.name
        return tags

    def get_automation_condition(self, subject: AssetSubject) -> dg.AutomationCondition[Any] | None:
        """Return the condition under which Dagster materializes the asset; not called for assets
        that are only read.
        """
        return subject.automation_condition
