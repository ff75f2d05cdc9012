"""The operator graph that an application describes: immutable nodes, and one way to walk them.

    Input -> Filter / Map / Join / PartitionBy -> SendToStream / SendToTable -> ...

Operators stand in the order in which they were defined, so an operator's inputs always come before
it. Three kinds begin a stream, which has a partition count: `Input`, `PartitionBy` (an intermediate
stream) and `SendToStream` (what follows continues with the output stream). A record stays in the
partition of such a stream until the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.resources.tables.update import UpdateContract

DataFrameFunction: TypeAlias = "Callable[[DataFrame], DataFrame]"
DefaultOffset = Literal["oldest", "upcoming"]
OnLost = Literal["fail", "oldest"]
How = Literal["inner", "left"]
OnNullKey = Literal["fail", "skip"]
V = TypeVar("V", bound=Hashable)


class KeyedTable(Protocol):
    """What planning needs of a remote table: its name and the columns of its key."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Input:
    """Records of an input stream, as they are stored, and where reading begins where no checkpoint says so.

    With `broadcast`, every task reads all of them; it names the column with the number of the task.
    """

    kind: ClassVar[str] = "input"
    stream: str
    default_offset: DefaultOffset | None = None
    reset_offset: bool = False
    on_lost: OnLost = "fail"
    broadcast: str | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    """The records that meet a Spark SQL condition, or that a DataFrame function lets pass."""

    kind: ClassVar[str] = "filter"
    condition: str | DataFrameFunction


@dataclass(frozen=True, slots=True)
class Map:
    """Records with other columns: either Spark SQL `expressions`, or one DataFrame `function`."""

    kind: ClassVar[str] = "map"
    expressions: tuple[str, ...] = ()
    function: DataFrameFunction | None = None
    keeps_partitioning: bool = False


@dataclass(frozen=True, slots=True)
class PartitionBy:
    """An intermediate stream: the records spread anew by `columns`. `partitions` None: inferred."""

    kind: ClassVar[str] = "partition-by"
    stream: str
    columns: tuple[str, ...]
    partitions: int | None = None


@dataclass(frozen=True, slots=True)
class Selected:
    """A dataset's `column`, and the `name` that it has in the joined record."""

    column: str
    name: str


@dataclass(frozen=True, slots=True)
class Join:
    """Records with the columns of their dataset entry.

    `on` pairs (stream column, dataset column), in the order of the dataset's key. `select` None means
    all columns of the dataset besides its key, each with `prefix` before its name. `min_match_rate` is the fraction of
    records that have to meet an entry, None where none is demanded.
    """

    kind: ClassVar[str] = "join"
    dataset: str
    on: tuple[tuple[str, str], ...]
    how: How
    select: tuple[Selected, ...] | None
    prefix: str = ""
    min_match_rate: float | None = None

    def stream_column(self, dataset_column: str) -> str:
        """Return the stream's column that is compared with this column of the dataset's key."""
        return next(stream for stream, dataset in self.on if dataset == dataset_column)

    def selection(self, dataset_columns: Iterable[str]) -> tuple[Selected, ...]:
        """Return what the join adds, for a dataset that has these columns."""
        if self.select is not None:
            return self.select
        keys = {dataset for _, dataset in self.on}
        return tuple(Selected(name, self.prefix + name) for name in dataset_columns if name not in keys)


@dataclass(frozen=True, slots=True)
class SendToStream:
    """Records appended to an output stream."""

    kind: ClassVar[str] = "send-to"
    stream: str


@dataclass(frozen=True, slots=True)
class SendToTable:
    """Records written to a table: a remote one, or (`dataset`) the stream that feeds a dataset."""

    kind: ClassVar[str] = "send-to-table"
    table: str
    dataset: bool = False
    contract: UpdateContract | None = None
    on_null_key: OnNullKey = "fail"


Spec: TypeAlias = Input | Filter | Map | PartitionBy | Join | SendToStream | SendToTable


@dataclass(frozen=True, slots=True)
class Operator:
    """One node: `id` ("join-2-weather"), the ids of its inputs, and what it does."""

    id: str
    inputs: tuple[str, ...]
    spec: Spec

    @property
    def kind(self) -> str:
        return self.spec.kind

    @property
    def begins_stream(self) -> bool:
        """Whether the records that leave are in the partitions of a stream of this operator's own."""
        return isinstance(self.spec, Input | PartitionBy | SendToStream)


def traverse(roots: Iterable[V], next_vertices: Callable[[V], Iterable[V]], visit: Callable[[V], object]) -> None:
    """Visit every vertex that can be reached from `roots`, once each, parents first.

    It is depth first and in the order given by `next_vertices`, which may add connections that the
    graph itself lacks. Cycles end where they meet themselves; depth is not limited by Python's stack.
    """
    seen: set[V] = set()
    for root in roots:
        stack = [root]
        while stack:
            vertex = stack.pop()
            if vertex in seen:
                continue
            seen.add(vertex)
            visit(vertex)
            stack.extend(reversed(list(next_vertices(vertex))))
