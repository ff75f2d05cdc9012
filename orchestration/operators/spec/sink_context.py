"""What a function of the user's is told of the records that it is handed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Where the records of one call come from: the application's batch, and their partition in it.

    `call` counts the calls of a partition, from 0, and `attempt` those of its task. A batch that is run again by the
    same application makes the same calls, so that (application, batch, partition, call) tells one that was made before.
    """

    application: str
    batch: int
    partition: int
    call: int
    attempt: int


SinkFunction: TypeAlias = "Callable[[Any, SinkContext], Any]"
