"""Maps what an application is made of to Dagster's asset keys, groups, owners, kinds and tags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dagster import AssetKey

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.nodes.asset_subject import AssetSubject
from dagster_adjunct.orchestration.code_location.nodes.nodes_by_kind import kind_of

_TAG = re.compile(r"[A-Za-z0-9_.-]{1,63}")


class AdjunctTranslator:
    """Override a method to give assets the keys, groups and owners that your platform has.

    Applications that share a stream or dataset meet in one asset, because the default keys do not depend on
    the application: `lake/flights`, `datasets/planes_dataset`, `tables/aircraft_state`, `files/bucket/prefix`. The
    graph shows the last part alone: a dataset's tells it from the stream that it is made of. What is only read is in
    the group "inputs" and has no owners, whichever application reads it.
    """

    def get_asset_key(self, subject: AssetSubject) -> AssetKey:
        return kind_of(subject.kind).asset_key(subject)

    def get_group_name(self, subject: AssetSubject) -> str:
        return subject.group or ("inputs" if subject.external else dagster_name(subject.application))

    def get_owners(self, subject: AssetSubject) -> Sequence[str]:
        return subject.owners

    def get_description(self, subject: AssetSubject) -> str | None:
        return subject.description or None

    def get_kinds(self, subject: AssetSubject) -> set[str]:
        return kind_of(subject.kind).dagster_kinds(subject)

    def get_tags(self, subject: AssetSubject) -> Mapping[str, str]:
        tags = {"adjunct/kind": subject.kind}
        # Dagster's tags hold short plain texts; a URL and a very long name are none.
        return tags | ({"adjunct/name": subject.name} if _TAG.fullmatch(subject.name) else {})
