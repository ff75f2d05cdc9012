"""What every operator says of itself, and the node that it is in an application's graph.

An operator is one file: an immutable `Spec` with all that planner, Spark step, lineage and drawing ask of it. They ask
nothing else, so that they know no kind of operator. Spark is imported inside functions: specs are made wherever an
application is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Literal

from dagster_adjunct.orchestration.operators.spec.held_schemas import schemas_of_fields

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.columns.known_columns import Types
    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageContext, LineageNode, Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.spec.planning_values import (
        Call,
        ComparedColumn,
        Exchange,
        Flow,
        PlanContext,
        Requirement,
        Role,
        StreamEdge,
    )
    from dagster_adjunct.orchestration.operators.spec.table_sends import ChangedColumns, TableSend
    from dagster_adjunct.resources.declared_place import Place
    from dagster_adjunct.resources.schemas.schema import Schema


BeforeHistory = Literal["null", "oldest", "error"]
OnNullTime = Literal["null", "fail"]


@dataclass(frozen=True, slots=True)
class AsOf:
    """That records meet the entry that was valid at the time in this `column` of theirs.

    A record from before the history of its key meets nothing ("null"), the oldest entry, or fails the batch; one
    without a time meets nothing or fails it.
    """

    column: str
    before_history: BeforeHistory
    on_null_time: OnNullTime


@dataclass(frozen=True, slots=True)
class Match:
    """That each record is looked up in a dataset, or else in a remote table, and the fraction that has to meet an entry
    (None: none has to). `as_of` says at which time; None: as it is when the batch runs."""

    dataset: str | None
    min_rate: float | None = None
    table: str | None = None
    as_of: AsOf | None = None

    @property
    def node(self) -> LineageNode:
        """What the records are looked up in."""
        from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageNode

        return LineageNode("table", self.table or "") if self.dataset is None else LineageNode("dataset", self.dataset)


class Spec(ABC):
    """What one operator does. Four methods have to be written; the others say what most operators say.

    Where an operator has several inputs, what is said of them stands in their order.
    """

    __slots__ = ()
    kind: ClassVar[str]
    """The beginning of the operator's id, and what plans call it."""

    # -- what has to be written

    @abstractmethod
    def summary(self) -> str:
        """Return what it does in a few words, for plans."""

    @abstractmethod
    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        """Return the columns of the records that leave it, and where they lie.

        Raises PlanningError for a column that is known to be missing or double.
        """

    @abstractmethod
    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        """Return the records that leave the operator of this id, made of those that arrive.

        They keep their hidden columns (`hidden_columns.carried`). What Spark refuses to analyse is told with the id.
        """

    # -- what is said only where it is so

    @property
    def role(self) -> Role | None:
        """What the stream is that begins here; None where records stay in the partitions that they were in."""
        return None

    @property
    def sql(self) -> Sequence[str]:
        """The expressions of Spark SQL that users gave it."""
        return ()

    @property
    def reads(self) -> str | None:
        """The stream whose records enter here; None where records come from other operators only."""
        return None

    @property
    def says_time(self) -> bool:
        """Whether the records that enter here say when they happened."""
        return False

    @property
    def declared_schemas(self) -> Sequence[Schema]:
        """The schemas that it was given, as of what a function returns: no failure tells values of columns that one of
        them calls sensitive. Left out, all those in the fields of the dataclass."""
        return tuple(schemas_of_fields(self))

    @property
    def writes(self) -> str | None:
        """The output stream or table, as it is declared, that the records are sent to."""
        return None

    @property
    def sends(self) -> TableSend | None:
        """How the records are sent to a remote table; None where they are not."""
        return None

    @property
    def adds(self) -> bool:
        """Whether what it writes to a table adds to what is there, so that it is not the same when it is sent again."""
        return False

    @property
    def feeds(self) -> str | None:
        """The dataset that its records end up in; None where they end up in none of the application's."""
        return None

    @property
    def match(self) -> Match | None:
        """What the records are looked up in."""
        return None

    @property
    def states(self) -> Sequence[str]:
        """The names of the state tables that it keeps from batch to batch, without the application's."""
        return ()

    @property
    def promises_partitioning(self) -> bool:
        """Whether a function of the user's is trusted to leave records in the partitions where they are."""
        return False

    @property
    def leaves_out(self) -> bool:
        """Whether it hands over what it leaves out (`late_records.py`)."""
        return False

    @property
    def takes_left_out(self) -> bool:
        """Whether it takes what the operator before leaves out (`Batch.left_out`), which is kept only for who does."""
        return False

    @property
    def makes_records(self) -> bool:
        """Whether records that leave have positions of their own, and not those of an input (`made_records.py`)."""
        return False

    @property
    def moves(self) -> int:
        """How often, at most, it moves rows of its own in a batch, which are none of the records that a plan lists."""
        return 0

    @property
    def takes_partition_by(self) -> bool:
        """Whether users can give it `partition_by`: some of its columns, that records have to lie by instead of all."""
        return False

    @property
    def over_time(self) -> str | None:
        """The name that its state and its watermarks are kept under; None where it keeps none from batch to batch."""
        return None

    @property
    def gives_updates(self) -> bool:
        """Whether a result comes again when it has changed, until the one that is final."""
        return False

    @property
    def asks_final(self) -> bool:
        """Whether it asks of results that may be updated whether they are final, and lets others go."""
        return False

    @property
    def holds_back(self) -> timedelta:
        """How far the times of what leaves it may lie below the watermark of what arrives."""
        return timedelta(0)

    @property
    def reaches(self) -> timedelta:
        """How much later than a record that arrives what is made of it may be."""
        return timedelta(0)

    @property
    def keeps_for(self) -> timedelta:
        """For how long after its time a record may be needed: no time may lie beyond the year 9999."""
        return timedelta(0)

    @property
    def writes_aside(self) -> bool:
        """Whether records are written, and those that arrived go on, from where they lay."""
        return self.writes is not None and self.role is None

    def call(self, app: Declarations) -> Call | None:
        """Return what is asked of somebody outside of the batch; None where nothing is."""
        return None

    def target(self, app: Declarations) -> LineageNode | None:
        """Return the asset that the records are sent to."""
        return None

    def requirements(self, app: Declarations) -> Sequence[Requirement | None]:
        """Return what is asked of the records of each input, None where nothing is; () where no input is asked."""
        return ()

    def changed(self, app: Declarations, arriving: Types) -> ChangedColumns | None:
        """Return the columns of a table's record that it changes, by records with columns of these types; None where it
        writes all, or nobody knows which."""
        return None

    def declared_partitions(self, context: PlanContext) -> int | None:
        """Return the declared count of the stream that begins here, None where it is open."""
        return None

    def edge(self, context: PlanContext, flow: Flow, partitions: int) -> StreamEdge | None:
        """Return the stream that begins here; `flow` is of the records after the operator."""
        return None

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        """Return how records have to move before they are written; None where they lie right, in `partitions`."""
        return None

    def compared(self, context: PlanContext, arriving: Sequence[Types]) -> Sequence[ComparedColumn]:
        """Return the columns of the records whose values are compared with others, which takes equal types."""
        return ()

    def declared_types(self, context: PlanContext, arriving: Sequence[Types]) -> Sequence[ComparedColumn]:
        """Return the columns of the records that others declare a type of, where they are written or looked up.

        What certainly does not fit is refused by `types`.
        """
        return ()

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        """Return the types of the columns that leave; None where they are not known."""
        return None

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
        """Return what the columns that leave are made of; one that is not known is left out."""
        return {}

    def written_types(self, arriving: Types) -> Types:
        """Return the types of the columns that are written to the target, of records with these."""
        return arriving

    def written_columns(self, arriving: Made) -> Made:
        """Return what the columns of the target are made of, written by records with these columns."""
        return arriving


class PassesRecords(Spec):
    """What operators say of columns whose records leave with those that they arrived with."""

    __slots__ = ()

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        return types

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
        (made,) = arriving
        return made


@dataclass(frozen=True, slots=True)
class Operator:
    """One node: `id` ("join-2-weather"), the ids of its inputs, what it does, and the line of the user's file.

    Operators stand in the order in which they were defined, so an operator's inputs always come before it. A record
    stays in the partition of the stream that it is in until the next operator that begins one.
    """

    id: str
    inputs: tuple[str, ...]
    spec: Spec
    declared_at: Place | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        return self.spec.kind

    @property
    def begins_stream(self) -> bool:
        """Whether the records that leave are in the partitions of a stream of this operator's own."""
        return self.spec.role is not None
