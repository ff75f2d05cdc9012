"""Where reading starts: startpoints, requested by people and handed to tasks."""

from orchestration.offsets.fan_out import FanOut
from orchestration.offsets.request import StartpointRequest
from orchestration.offsets.startpoints import StartpointManager

__all__ = ["FanOut", "StartpointManager", "StartpointRequest"]
