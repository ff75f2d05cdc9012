"""The private interfaces of Dagster that this package uses, all in one place.

They may change in any release: `pyproject.toml` allows only the minor version they are written for,
and `tests/test_private_interfaces.py` fails for another one, and where one is used elsewhere.
"""

from __future__ import annotations

from typing import Any

import dagster as dg
from dagster._core.definitions.sensor_definition import SensorExecutionData
from dagster._core.definitions.source_asset import SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
from dagster._core.definitions.utils import DISALLOWED_NAMES
from dagster._core.errors import DagsterPipesExecutionError, DagsterUserCodeProcessError
from dagster._core.instance.config import PoolGranularity
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES
from dagster._utils.error import _should_redact_user_code_error
from dagster.components.core.component_tree import ComponentTreeException
from dagster.components.resolved.errors import ResolutionException
from dagster_shared.error import SerializableErrorInfo
from dagster_shared.yaml_utils.source_position import SourcePositionTree

__all__ = [
    "DISALLOWED_NAMES",
    "NOT_FINISHED_STATUSES",
    "SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION",
    "WRITTEN_FOR",
    "BriefLoadError",
    "DagsterPipesExecutionError",
    "PoolGranularity",
    "ResolutionException",
    "SensorExecutionData",
    "SourcePositionTree",
    "UnresolvedAssetJobDefinition",
    "allow_missing_events",
    "hides_messages",
]

WRITTEN_FOR = ("1.13",)


def allow_missing_events(context: dg.OpExecutionContext | dg.AssetExecutionContext) -> None:
    """Let an op whose work was done through Pipes yield events itself, and only for the outputs
    that it makes.
    """
    step: Any = context.get_step_execution_context()
    step._requires_typed_event_stream = False


class BriefLoadError(ComponentTreeException, DagsterUserCodeProcessError):
    """Base of errors of components of which Dagster shows the message alone.

    Dagster passes an error of its component tree on as it is, without the state of the tree, and
    shows of an error of another process only what that process has reported.
    """

    def __init__(self, message: str) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            message, user_code_process_error_infos=[]
        )

    def report(self, message: str) -> None:
        """Let Dagster show this message, without a stack."""
        self.user_code_process_error_infos = [SerializableErrorInfo(message, [], None)]


def hides_messages() -> bool:
    """Whether Dagster is told to hide the messages of errors in users' code."""
    return _should_redact_user_code_error()
