"""The kinds of nodes by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.code_location.nodes.dataset_node import DatasetNode
from dagster_adjunct.orchestration.code_location.nodes.files_node import FilesNode
from dagster_adjunct.orchestration.code_location.nodes.remote_table_node import RemoteTableNode
from dagster_adjunct.orchestration.code_location.nodes.sink_node import SinkNode
from dagster_adjunct.orchestration.code_location.nodes.stream_node import StreamNode

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.code_location.nodes.node_kind import NodeKind
    from dagster_adjunct.orchestration.operators.spec.column_lineage import Kind

_KINDS: tuple[NodeKind, ...] = (StreamNode(), FilesNode(), DatasetNode(), RemoteTableNode(), SinkNode())
_BY_NAME = {kind.kind: kind for kind in _KINDS}


def kind_of(name: Kind) -> NodeKind:
    """Return the kind of this name."""
    return _BY_NAME[name]
