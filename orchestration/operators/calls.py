"""How users' functions are called: with one record (`RecordCall`), or with many by a sink."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.schemas.schema import Schema

Record: TypeAlias = "dict[str, Any]"


RecordFunction: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RecordCall:
    """How an operator calls a user's function: with a record, and with its entry if `entry` names a
    column of entries.

    The function returns a dictionary with the columns of `schema`, or None; with `several`, any
    number of dictionaries. Errors contain the position of the record in its `stream`, but no values
    of `sensitive` columns.
    """

    operator: str
    function: RecordFunction
    schema: Schema
    several: bool = False
    entry: str | None = None
    stream: str | None = None
    sensitive: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The origin of the records of one call of a sink: the application's batch, and their
    partition.

    `call` is the number of the call within the partition, `attempt` that of the Spark task's
    attempt, both from 0. A repeated batch makes the same calls, so (application, batch, partition,
    call) identifies a call made before.
    """

    application: str
    batch: int
    partition: int
    call: int
    attempt: int
    fence: Fence | None = field(default=None, repr=False, compare=False)

    def check_lease(self) -> None:
        """Raise RunLeaseLostError if another run may have taken the application.

        A function that sends several requests calls it directly before each: the process may have
        been paused since the one before. It costs no request while the lease surely holds.
        """
        if self.fence is not None:
            self.fence.check()


SinkFunction: TypeAlias = Callable[[Any, SinkContext], Any]
