"""What is stored of startpoints and can't be read: a newer release of Adjunct wrote it, or somebody by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dagster_adjunct.resources.errors import InvalidNameError
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class Unreadable:
    """One thing that this release of Adjunct can't read, as `error` says; others are not affected by it.

    It is `value`, under `key`: a "request" that waits, or of a "fan-out" what was handed to the task `at`, a whole
    entry or one of its requests. `partition` and `task` say what it is for, as far as that can be told.
    """

    kind: Literal["request", "fan-out"]
    key: str
    value: object
    error: str
    partition: str | None = None
    task: str | None = None
    at: str | None = None

    @property
    def ssp(self) -> SystemStreamPartition | None:
        """The partition that it is for, if there can be one of that name."""
        return partition_of(self.partition)

    def summary(self) -> str:
        """Return it in one line."""
        where = "waiting" if self.at is None else f"handed to {self.at}"
        return f"{self.partition or self.key}: {where}, and can't be read: {self.error}"


def partition_of(text: str | None) -> SystemStreamPartition | None:
    """Return the partition of this name; None where it is no name of one."""
    try:
        return None if text is None else SystemStreamPartition.parse(text)
    except InvalidNameError:
        return None
