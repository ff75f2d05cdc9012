"""Functions that applications hand records to, as assets: what they make of the world is theirs."""

from __future__ import annotations

import re

from dagster import AssetKey

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.nodes.asset_subject import AssetSubject
from dagster_adjunct.orchestration.code_location.nodes.node_kind import NodeKind

_NO_WORD = re.compile(r"\W")


class SinkNode(NodeKind):
    """A function, by the names of its application and of itself: "alerts/notify"."""

    kind = "sink"

    def asset_key(self, subject: AssetSubject) -> AssetKey:
        application, _, function = subject.name.partition("/")
        return AssetKey(["sinks", dagster_name(application), _NO_WORD.sub("_", function)])

    def dagster_kinds(self, subject: AssetSubject) -> set[str]:
        return {"python"}
