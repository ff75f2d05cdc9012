"""Where an application reads on: startpoints that are asked for, and the checkpoints that its batches commit."""

from __future__ import annotations

from dagster_adjunct.orchestration.batch_log.checkpoints import Checkpoint, CheckpointChange, CheckpointManager
from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.startpoints.store import StartpointManager
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
    resolve_startpoint_to_offset,
)

__all__ = [
    "Checkpoint",
    "CheckpointChange",
    "CheckpointManager",
    "MetadataStore",
    "Startpoint",
    "StartpointManager",
    "StartpointOldest",
    "StartpointRequest",
    "StartpointSpecific",
    "StartpointTimestamp",
    "StartpointUpcoming",
    "Startpoints",
    "resolve_startpoint_to_offset",
]
