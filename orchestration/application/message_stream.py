"""`MessageStream`: the operators of an application, and the handles that they take.

Every method adds one operator and returns a new stream; the stream that it is called on stays as it
was and may be used again, which branches the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from dagster_adjunct.orchestration.application import graph
from dagster_adjunct.orchestration.application.arguments import (
    column_names,
    join_columns,
    partition_count,
    selected_columns,
)
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.names import check_name

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.application.graph import DataFrameFunction, How, KeyedTable, OnNullKey
    from dagster_adjunct.resources.tables.update import UpdateContract

On: TypeAlias = str | Sequence[str] | Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class DatasetTable:
    """An adjunct dataset as a table of one application, which may demand that it is not staler than so much."""

    application: Application = field(repr=False)
    dataset: AdjunctDataset
    max_staleness: timedelta | None = None

    @property
    def name(self) -> str:
        return self.dataset.name


@dataclass(frozen=True, slots=True, eq=False)
class RemoteTableHandle:
    """A remote table of one application: `table` is what reaches it, `key` its key columns."""

    application: Application = field(repr=False)
    table: KeyedTable
    key: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.table.name


@dataclass(frozen=True, slots=True, eq=False)
class OutputStream:
    """A stream that one application writes."""

    application: Application = field(repr=False)
    name: str
    partitions: int
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MessageStream:
    """The records that leave one operator."""

    application: Application = field(repr=False)
    operator: str

    def filter(self, condition: str | DataFrameFunction) -> MessageStream:
        """Return the records that meet a Spark SQL condition.

        A DataFrame function may be given instead; it must keep the columns, and where records lie.
        """
        if isinstance(condition, str):
            if not condition.strip():
                raise ConfigurationError(f"filter after {self.operator} is empty.", "Write a condition.")
        elif not callable(condition):
            raise ConfigurationError(
                f"filter after {self.operator} got {condition!r}.", "Pass a Spark SQL condition or a function."
            )
        return self._then(graph.Filter(condition))

    def map(self, *expressions: str | DataFrameFunction, keeps_partitioning: bool = False) -> MessageStream:
        """Return records whose columns are these Spark SQL expressions: "tailnum", "upper(x) as y", "*".

        One DataFrame function may be given instead. Where records lie stays known through plain names,
        "name as other" and "*"; nothing is known after a function, unless `keeps_partitioning=True`
        promises that it neither changes nor moves the columns by which its records are partitioned.
        """
        functions = [item for item in expressions if callable(item)]
        texts = tuple(item for item in expressions if isinstance(item, str))
        if functions:
            if len(expressions) > 1:
                raise ConfigurationError(
                    f"map after {self.operator} mixes a function with other arguments.", "Pass the function alone."
                )
            return self._then(graph.Map((), functions[0], keeps_partitioning))
        if not texts or len(texts) < len(expressions) or not all(text.strip() for text in texts):
            raise ConfigurationError(
                f"map after {self.operator} got {expressions!r}: expected Spark SQL expressions or one function.",
                'Write for example map("tailnum", "upper(model) as model").',
            )
        if keeps_partitioning:
            raise ConfigurationError(
                f"map after {self.operator} has keeps_partitioning=True with expressions.",
                "Leave it out: for expressions the planner sees itself what is kept.",
            )
        return self._then(graph.Map(texts))

    def partition_by(self, *columns: str, partitions: int | None = None) -> MessageStream:
        """Return the records spread anew by `columns`: an intermediate stream.

        The planner finds the count where `partitions` does not give it.
        """
        what = f"partition_by after {self.operator}"
        names = column_names(what, columns)
        if not names:
            raise ConfigurationError(f"{what} names no column.", "Name the columns to partition by.")
        count = partition_count(f"{what}: partitions", partitions)
        stream = f"{self.application.name}-{self.application._next_id(graph.PartitionBy.kind)}"
        return self._then(graph.PartitionBy(stream, names, count))

    def join(
        self,
        table: DatasetTable,
        *,
        on: On,
        how: How = "inner",
        select: Sequence[str] | None = None,
        prefix: str = "",
        name: str | None = None,
        min_match_rate: float | None = None,
    ) -> MessageStream:
        """Return the records with the columns of the dataset's entry for their key.

        `on` names every column of the dataset's key: "tailnum", ["origin", "time_hour"], or {stream
        column: dataset column}. `how` is "inner", or "left" to keep records without an entry. `select`
        lists the dataset's columns to add, "seats" or "year as plane_year"; without it all but the key
        are added. `prefix` goes before names that `select` does not change. `name` ends the operator's
        id, in place of the dataset's name. `min_match_rate` (0 to 1) is how many of a run's records have to meet an
        entry: below it the join's asset check fails, and the outputs are written all the same.
        """
        if isinstance(table, RemoteTableHandle):
            raise PlanningError(
                f"join after {self.operator}: {table.name!r} is a remote table; a join needs an adjunct dataset.",
                "Declare a bounded_dataset or unbounded_dataset with the same records and join that.",
            )
        if not isinstance(table, DatasetTable):
            raise self._not_declared(table, "join", "dataset")
        self._check_ours(table, table.name)
        operator = self.application._next_id(graph.Join.kind, name or table.name)
        if name is not None:
            check_name("join", name)
            taken = [other for other, _ in self.application._named_joins() if other.split("-", 2)[2] == name]
            if taken:
                raise PlanningError(
                    f"two joins are called {name!r}: {taken[0]} and {operator}.", "Give one another name=."
                )
        if how not in ("inner", "left"):
            raise PlanningError(f"{operator} has how={how!r}: expected inner or left.", "Choose one of them.")
        _check_rate(operator, min_match_rate)
        pairs = join_columns(operator, table.dataset, on)
        selected = selected_columns(operator, select, prefix)
        return self._then(graph.Join(table.name, pairs, how, selected, prefix, min_match_rate), name or table.name)

    def send_to(
        self,
        target: OutputStream | RemoteTableHandle | DatasetTable,
        contract: UpdateContract | None = None,
        *,
        on_null_key: OnNullKey = "fail",
    ) -> MessageStream:
        """Write the records and return the stream to go on with.

        After an output stream, that is the output stream, with its key and partitions. After a table it
        is this stream. `contract` and `on_null_key` are for remote tables: whether updates may put
        their default first, and whether a record with a null key fails the batch or is counted and
        skipped. Sending to an unbounded dataset writes the changes to the stream that feeds it.
        """
        if on_null_key not in ("fail", "skip"):
            raise ConfigurationError(f"send_to has on_null_key={on_null_key!r}.", "Write fail or skip.")
        if isinstance(target, RemoteTableHandle):
            self._check_ours(target, target.name)
            spec = graph.SendToTable(target.name, False, contract, on_null_key)
            return self._then(spec, target.name)
        if contract is not None or on_null_key != "fail":
            raise ConfigurationError(
                f"send_to after {self.operator}: contract and on_null_key are for remote tables only.",
                "Leave them out.",
            )
        if isinstance(target, DatasetTable):
            return self._send_to_dataset(target)
        if not isinstance(target, OutputStream):
            raise self._not_declared(target, "send_to", "output stream or table")
        self._check_ours(target, target.name)
        writer = self.application._writes_to(target.name)
        if writer is not None:
            raise PlanningError(
                f"output stream {target.name!r} is used twice: by {writer} and after {self.operator}.",
                "Go on with what the first send_to() returned, or declare another output stream.",
            )
        return self._then(graph.SendToStream(target.name))

    def _send_to_dataset(self, target: DatasetTable) -> MessageStream:
        self._check_ours(target, target.name)
        if target.dataset.stream is None:
            raise PlanningError(
                f"send_to after {self.operator}: dataset {target.name!r} is made from {target.dataset.input}, and not "
                "from a stream that an application could send to.",
                "Declare it with unbounded_dataset on a stream, or send to an output stream.",
            )
        if target.dataset.kind == "bounded":
            raise PlanningError(
                f"send_to after {self.operator}: dataset {target.name!r} is bounded, and its versions end with "
                "markers, which an application does not send.",
                "Declare it with unbounded_dataset, or send to an output stream.",
            )
        return self._then(graph.SendToTable(target.name, dataset=True), target.name)

    def _then(self, spec: graph.Spec, name: str = "") -> MessageStream:
        return self.application._add(spec, (self.operator,), name)

    def _check_ours(self, target: DatasetTable | RemoteTableHandle | OutputStream, name: str) -> None:
        if target.application is not self.application:
            raise PlanningError(
                f"{name!r} was declared by application {target.application.name!r}, and is used by "
                f"{self.application.name!r}.",
                "Declare it with this application's table() or output_stream().",
            )

    def _not_declared(self, found: object, method: str, expected: str) -> PlanningError:
        name = getattr(found, "name", None)
        problem = f"{method} after {self.operator} got {name or found!r}, which application "
        return PlanningError(
            f"{problem}{self.application.name!r} has not declared: expected a declared {expected}.",
            "Pass what app.table(…) or app.output_stream(…) returned.",
        )


def _check_rate(operator: str, rate: float | None) -> None:
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ConfigurationError(
            f"{operator} has min_match_rate={rate!r}: expected 0 to 1.", "It is a fraction: 0.95 is 95 %."
        )
