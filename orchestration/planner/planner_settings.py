"""Settings of the planner. Plain data, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_adjunct.orchestration.operators.arguments import partition_count
from dagster_adjunct.resources.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Settings of a deployment, which an application's own settings come before.

    `intermediate_partitions` is for intermediate streams that neither a join nor the application
    decides. Without it they get the most partitions of any input or output, at most `partition_cap`.
    """

    intermediate_partitions: int | None = None
    partition_cap: int = 256

    def __post_init__(self) -> None:
        partition_count("intermediate_partitions of the planner", self.intermediate_partitions)
        if partition_count("partition_cap of the planner", self.partition_cap) is None:
            raise ConfigurationError(
                "the planner has no partition_cap.", "Leave it out for 256.", argument="partition_cap"
            )
