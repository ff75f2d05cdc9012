"""Maps what an application is made of to Dagster's asset keys, groups, owners, kinds and tags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dagster import AssetKey

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.resources.names import split_stream_name

_TAG = re.compile(r"[A-Za-z0-9_.-]{1,63}")


@dataclass(frozen=True, slots=True)
class AssetSubject:
    """One asset to be: a stream ("lake.flights"), files (their URL), a dataset ("planes") or a remote table."""

    kind: Literal["stream", "files", "dataset", "table"]
    name: str
    application: str
    description: str = ""
    owners: tuple[str, ...] = ()
    group: str | None = None
    storage: str = ""
    external: bool = False
    """Read here, and written by no application here: it is nobody's own, so that several may read it."""


class AdjunctTranslator:
    """Override a method to give assets the keys, groups and owners that your platform has.

    Applications that share a stream or dataset meet in one asset, because the default keys do not depend on
    the application: `lake/flights`, `datasets/planes_dataset`, `tables/aircraft_state`, `files/bucket/prefix`. The
    graph shows the last part alone: a dataset's tells it from the stream that it is made of. What is only read is in
    the group "inputs" and has no owners, whichever application reads it.
    """

    def get_asset_key(self, subject: AssetSubject) -> AssetKey:
        if subject.kind == "files":
            path = subject.name.partition("://")[2] or subject.name
            return AssetKey(["files", *(re.sub(r"\W", "_", part) for part in path.split("/") if part not in ("", "."))])
        if subject.kind == "stream":
            return AssetKey([dagster_name(part) for part in split_stream_name(subject.name)])
        name = dagster_name(subject.name)
        return AssetKey(["datasets", f"{name}_dataset"] if subject.kind == "dataset" else ["tables", name])

    def get_group_name(self, subject: AssetSubject) -> str:
        return subject.group or ("inputs" if subject.external else dagster_name(subject.application))

    def get_owners(self, subject: AssetSubject) -> Sequence[str]:
        return subject.owners

    def get_description(self, subject: AssetSubject) -> str | None:
        return subject.description or None

    def get_kinds(self, subject: AssetSubject) -> set[str]:
        if subject.kind == "table":
            return {subject.storage or "table"}
        if subject.kind == "dataset":
            return {"spark", "parquet"}
        if subject.kind == "files":
            return {subject.storage}
        system = split_stream_name(subject.name)[0]
        return {"stream", "parquet" if system == "lake" else system}

    def get_tags(self, subject: AssetSubject) -> Mapping[str, str]:
        tags = {"adjunct/kind": subject.kind}
        # Dagster's tags hold short plain texts; a URL and a very long name are none.
        return tags | ({"adjunct/name": subject.name} if _TAG.fullmatch(subject.name) else {})
