"""Where an application continues to read: requested startpoints, and the checkpoints that its
batches commit.
"""

from dagster_adjunct.orchestration.batch_log.checkpoints import Checkpoint as Checkpoint
from dagster_adjunct.orchestration.batch_log.checkpoints import CheckpointChange as CheckpointChange
from dagster_adjunct.orchestration.batch_log.checkpoints import (
    CheckpointManager as CheckpointManager,
)
from dagster_adjunct.orchestration.startpoints.request import StartpointRequest as StartpointRequest
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints as Startpoints
from dagster_adjunct.orchestration.startpoints.store import StartpointManager as StartpointManager
from dagster_adjunct.resources.metadata import MetadataStore as MetadataStore
from dagster_adjunct.resources.streams.startpoint import Startpoint as Startpoint
from dagster_adjunct.resources.streams.startpoint import StartpointOldest as StartpointOldest
from dagster_adjunct.resources.streams.startpoint import StartpointSpecific as StartpointSpecific
from dagster_adjunct.resources.streams.startpoint import StartpointTimestamp as StartpointTimestamp
from dagster_adjunct.resources.streams.startpoint import StartpointUpcoming as StartpointUpcoming
from dagster_adjunct.resources.streams.startpoint import (
    resolve_startpoint_to_offset as resolve_startpoint_to_offset,
)
