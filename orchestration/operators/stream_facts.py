"""What the planner and operators know of streams, columns and the application that declares them:
facts, the lineage of columns, and delays of watermarks.

Plain data, without I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.orchestration.operators.columns import (
    Names,
    Types,
    check_new_names,
    find_taken,
    is_own,
)
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import PlanningError, SchemaMismatchError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.column_changes import NO_CHANGES, ColumnChanges
from dagster_adjunct.resources.schemas.paths import (
    container_of,
    find_path,
    flat_name,
    require_value,
    simple_value_advice,
    split_path,
    write_path,
)
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import is_nested, is_storable, types_from_spark
from dagster_adjunct.resources.sql.expression import NILADIC, did_you_mean, parse_expression
from dagster_adjunct.resources.sql.parsed import Expression
from dagster_adjunct.resources.streams.lake.streams import NEW_STREAMS
from dagster_adjunct.resources.streams.system import CHANGE_IMAGES, CHANGES, LAKE, NewStreams
from dagster_adjunct.resources.tables.table import AnyTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.resources.output_tables.opening import AnyOutputTable


Kind = Literal["stream", "files", "dataset", "table", "sink", "output-table"]


@dataclass(frozen=True, slots=True, order=True)
class LineageNode:
    """An asset: a stream ("lake.flights"), files (their URL), a dataset ("planes"), a remote table,
    a sink ("alerts/notify"), or an output table ("iceberg:analytics.enriched")."""

    kind: Kind
    name: str


Sources = tuple[tuple[LineageNode, str], ...]
"""The source columns of one column, each with its asset."""
ColumnSources = dict[str, Sources]
"""The source columns of each column, by its name: () or no entry where they are unknown."""


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """A column of records: its type, None where unknown, and its source columns, () where unknown.

    `fields` are those of a struct of updates for a table (`update.seats`), else empty.
    """

    type: str | None = None
    sources: Sources = ()
    fields: Mapping[str, ColumnFacts] = field(default_factory=dict)


@dataclass(frozen=True)
class Columns:
    """The columns of records in order, as far as they are known. If `complete`, there are no
    others.

    If also `typed`, their types are known, except for columns whose type is None.
    """

    known: Mapping[str, ColumnFacts] = field(default_factory=dict)
    complete: bool = True
    typed: bool = True

    @classmethod
    def of_schema(cls, schema: Schema | None, source: LineageNode | None = None) -> Columns:
        """Return the columns of a schema; the source of each is the column of the same name in
        `source`, if given.

        With `schema` None, the columns are unknown.
        """
        if schema is None:
            return cls(complete=False)
        known = {}
        for column in schema.fields:
            sources = ((source, column.name),) if source else ()
            known[column.name] = ColumnFacts(column.type, sources)
        return cls(known)

    @classmethod
    def of_frame(cls, frame: DataFrame) -> Columns:
        """Return the columns of a DataFrame without the hidden ones; their sources are unknown."""
        types = types_from_spark(frame.schema)
        return cls({name: ColumnFacts(types[name]) for name in filter(is_own, types)})

    @property
    def names(self) -> Names:
        """The names of the columns; None if there may be others."""
        if not self.complete:
            return None
        return tuple(self.known)

    @cached_property
    def types(self) -> Types:
        """The types of columns by name, also those of `fields` ("update.seats"); None if the
        columns are unknown.
        """
        if not (self.complete and self.typed):
            return None
        return {name: column.type for name, column in self._flat.items()}

    @cached_property
    def sources(self) -> ColumnSources:
        """The sources of columns by name, also those of `fields` ("update.seats")."""
        return {name: column.sources for name, column in self._flat.items()}

    def find(self, name: str) -> ColumnFacts | None:
        """Return the column of this name, or else the value that has this path; None if there is
        neither. The sources of a value are those of its column.
        """
        if name in self.known:
            return self.known[name]
        steps = split_path(name)
        if len(steps) < 2:
            return None
        column_name, *_ = steps
        column = self.known.get(column_name)
        if column is None:
            return None
        if column.type is None or not is_storable(column.type):  # only Spark can look inside
            return ColumnFacts(None, column.sources)
        path = find_path(name, {column_name: column.type})
        if path is None:
            return None
        return ColumnFacts(path.type, column.sources)

    def type_of(self, name: str) -> str | None:
        """Return the type of a column, or of the value that a path names; None if it is
        unknown.
        """
        if self.types is None:
            return None
        if name in self.types:
            return self.types[name]
        found = self.find(name)
        if found is None:
            return None
        return found.type

    def require(
        self, operator: str, needed: Iterable[str], next_step: str, *, side: str = "the stream"
    ) -> None:
        """Raise PlanningError if one of `needed` is neither one of these columns nor the path of a
        value in one; do nothing if there may be other columns.

        `side` says in the error whose columns they are.
        """
        if not self.complete:
            return
        for name in needed:
            if self.find(name) is not None:
                continue
            problem = (
                f"{operator}: {side} has no column {name!r}; its columns there are"
                f" {', '.join(self.known)}."
            )
            step = did_you_mean(name, tuple(self.known)) + next_step
            steps = split_path(name)
            column = container_of(steps[0]) if steps else ""
            if column in self.known:
                kind = self.known[column].type or ""
                try:
                    require_value(name, {column: kind}, f"{operator}: {side}")
                except SchemaMismatchError as error:
                    problem = error.problem
                    step = error.next_step
            raise PlanningError(problem, step, operator=operator, column=name)

    def require_columns(
        self, operator: str, needed: Iterable[str], next_step: str, *, side: str = "the stream"
    ) -> None:
        """Raise PlanningError if one of `needed` is not one of these columns; do nothing if there
        may be other columns.

        Unlike `require`, this rejects the path of a value. `side` says in the error whose columns
        they are.
        """
        self.require(operator, needed, next_step, side=side)
        if not self.complete:
            return
        for name in needed:
            if name not in self.known:
                problem = (
                    f"{operator}: {name!r} is a value within a column of {side}: expected a column."
                )
                column = flat_name(name)
                step = f'Make it a column, .with_columns({column}="{name}"), and name {column!r}.'
                raise PlanningError(problem, f"{step} {next_step}", operator=operator, column=name)

    def require_simple(self, operator: str, names: Iterable[str], use: str) -> None:
        """Raise PlanningError if one of these names means an array, a map or a struct. Values of
        unknown type pass.

        `use` says in the error for what a simple value is expected: "to partition by".
        """
        for name in names:
            kind = self.type_of(name)
            if kind is not None and is_nested(kind):
                if name in self.known:
                    path = write_path((name,))
                else:
                    path = name
                problem = f"{operator}: {name!r} is {kind}: expected a simple value {use}."
                step = simple_value_advice(path, kind)
                raise PlanningError(problem, step, operator=operator, column=name)

    def check_added(
        self, operator: str, added: Iterable[str], other: str, prefix: str, **about: Any
    ) -> None:
        """Raise PlanningError if one of the names that a join adds from `other` to these columns
        of the stream is reserved, or used twice.

        The error suggests `prefix` for the names; `about` are further fields of it.
        """
        names = list(added)
        step = f'Rename the added one: select=["… as {prefix}_{{}}"], or prefix="{prefix}_".'
        self.check_not_taken(operator, names, other, step, **about)
        check_new_names(operator, names, "Rename one with 'column as name'.")

    def check_not_taken(
        self, operator: str, added: Iterable[str], other: str, next_step: str, **about: Any
    ) -> None:
        """Raise PlanningError if the stream, which has these columns, has one of the names that
        are added from `other`.

        `next_step` may have a place {} for the name; `about` are further fields of the error.
        """
        taken = find_taken(added, self.names or ())
        if taken is not None:
            problem = (
                f"{operator}: the stream and {other} both have a column {taken!r}; the stream's"
                f" columns there are {', '.join(self.known)}."
            )
            step = next_step.format(taken)
            raise PlanningError(problem, step, operator=operator, **{"column": taken, **about})

    def add(self, more: Mapping[str, ColumnFacts], *, typed: bool = True) -> Columns:
        """Return these columns and `more`, which replace columns of the same names; `typed` is
        that of `more`.
        """
        return replace(self, known={**self.known, **more}, typed=self.typed and typed)

    @cached_property
    def _flat(self) -> Mapping[str, ColumnFacts]:
        """The columns by name, each with its `fields` after it ("update.seats")."""
        flat: dict[str, ColumnFacts] = {}
        for name, column in self.known.items():
            flat[name] = column
            for field_name, facts in column.fields.items():
                flat[f"{name}.{field_name}"] = facts
        return flat


def identity_sources(node: LineageNode, columns: Iterable[str]) -> ColumnSources:
    """Return the sources of the columns of an asset: each column is its own source."""
    return {name: ((node, name),) for name in columns}


def add_sources(by_column: ColumnSources, name: str, sources: Sources) -> None:
    """Add `sources` to those of the column `name` in `by_column`, which is changed."""
    by_column[name] = tuple(dict.fromkeys((*by_column.get(name, ()), *sources)))


def merge_sources(columns: Iterable[ColumnFacts]) -> Sources:
    """Return the sources of a column that is made of these columns; () if one of them has unknown
    sources.
    """
    merged: dict[tuple[LineageNode, str], None] = {}  # as a set that keeps the order
    for column in columns:
        if not column.sources:
            return ()
        merged |= dict.fromkeys(column.sources)
    return tuple(merged)


def sources_from_sql(expression: str, columns: Mapping[str, Sources]) -> Sources:
    """Return the sources of a column with this expression over `columns`; () if a column in it has
    unknown sources.
    """
    return sources_from_expression(parse_expression(expression), columns)


def sources_from_expression(
    parsed: Expression, columns: Mapping[str, Sources], aliases: Mapping[str, Sources] | None = None
) -> Sources:
    """Return the sources of a column with this parsed expression over `columns`; () if a column in
    it has unknown sources.

    `aliases` has the sources of the names given before it in its select list, which it may use like
    columns.
    """
    known: ColumnSources = {}
    for name, sources in (*(aliases or {}).items(), *columns.items()):
        known[name.lower()] = sources
    result: dict[tuple[LineageNode, str], None] = {}  # as a set that keeps the order
    for reference in parsed.columns:
        column = reference.name.lower()
        sources = _sources_of_reference(str(reference).lower(), column, known)
        if not sources and column not in NILADIC:  # functions without arguments, which have none
            return ()
        result |= dict.fromkeys(sources)
    return tuple(result)


def _sources_of_reference(path: str, column: str, known: ColumnSources) -> Sources:
    """Return the sources of a value in an expression: those of its path, else of its column, else
    of all `fields` of that; () if they are unknown. All names are in lower case.
    """
    for name in (path, column):
        if known.get(name):
            return known[name]
    of_fields: list[tuple[LineageNode, str]] = []
    for name, sources in known.items():
        if name.startswith(f"{column}."):
            of_fields += sources
    return tuple(of_fields)


Partitioner = Literal["spark-murmur3", "kafka-murmur2", "task number", "unknown"]
SPARK: Partitioner = "spark-murmur3"
TASK_NUMBER: Partitioner = "task number"
UNKNOWN: Partitioner = "unknown"


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """What the planner knows of an existing stream: `name` is "system.stream", `key` are its
    partitioning columns.

    `schema` is None where the columns are unknown. `evolves` says that writers may add and widen
    columns, `numbered` that offsets are numbers, `in_arrow` that its records can be read without
    Spark, and `by_time` that they can be found by time. `identity`, `former` and `find_by` are
    those of `StreamInfo`.
    """

    name: str
    partitions: int
    key: tuple[str, ...] = ()
    partitioner: Partitioner = UNKNOWN
    schema: Schema | None = None
    evolves: bool = False
    numbered: bool = True
    in_arrow: bool = True
    by_time: bool = True
    identity: str | None = None
    former: Mapping[str, str] = field(default_factory=dict)
    find_by: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        validate_partition_count(f"partitions of stream {self.name!r}", self.partitions or 0)


class Catalog(dict[str, StreamFacts]):
    """The facts of existing streams, by name.

    `missing` has the reasons why other streams could not be read, by name. `size_of` returns the
    stored bytes of a stream, None if unknown; it is called only for errors. `new_streams` has, by
    stream system, the properties that a stream gets when it is created. `empty_folders` are the
    folders without files of datasets that are made of files, by url. `stored_notes` say why
    datasets can't be advanced or served, as they are stored; only plans for users have them.
    """

    def __init__(
        self,
        facts: Mapping[str, StreamFacts] = MappingProxyType({}),
        *,
        missing: Mapping[str, str] = MappingProxyType({}),
        size_of: Callable[[str], int | None] = lambda stream: None,
        new_streams: Mapping[str, NewStreams] = MappingProxyType({LAKE: NEW_STREAMS}),
        empty_folders: Mapping[str, str] = MappingProxyType({}),
        stored_notes: Sequence[str] = (),
    ) -> None:
        super().__init__(facts)
        self.missing = missing
        self.size_of = size_of
        self.new_streams = new_streams
        self.empty_folders = empty_folders
        self.stored_notes = stored_notes


def require_facts(catalog: Catalog, stream: str, what: str) -> StreamFacts:
    """Return the facts of a stream; raises PlanningError if it does not exist. `what` names who
    reads it.
    """
    facts = catalog.get(stream)
    if facts is not None:
        return facts
    streams = ", ".join(sorted(catalog)) or "none"
    reason = catalog.missing.get(stream, f"streams there: {streams}.")
    system, name = split_stream_name(stream)
    if system == LAKE:
        step = (
            "Correct the name, run first what writes the stream, or create it and append to it:"
            f" LakeStreams(open_lake()).create({name!r}, schema=Schema.of(…), key=[…],"
            " partitions=…)."
        )
    elif system in (CHANGES, CHANGE_IMAGES):
        step = (
            f"Advance dataset {name!r} first, by an application that joins it: adjunct dataset"
            f" advance {name} MODULE:APP; or correct the name."
        )
    else:
        step = "Correct the name, or create the stream first."
    problem = f"{what} reads stream {stream!r}, which does not exist: {reason}"
    raise PlanningError(problem, step, stream=stream)


def output_partitioner(catalog: Catalog, stream: str) -> Partitioner:
    """Return the partitioner of an output stream, which need not exist yet."""
    if stream in catalog:
        return catalog[stream].partitioner
    return new_stream_defaults(catalog, stream).partitioner


def new_stream_defaults(catalog: Catalog, stream: str) -> NewStreams:
    """Return the properties that this stream would get if it were created."""
    system, _ = split_stream_name(stream)
    return catalog.new_streams.get(system, NewStreams())


# as-of: as-of joins use the entry that was valid at the record's time, other joins the served
# version. current: all joins use the served version; as-of joins use its current entries, whatever
# the record's time. recorded: all joins use the version that the first batch with the record used;
# as-of joins the entry at the record's time.
JoinVersions: TypeAlias = Literal["as-of", "current", "recorded"]
AS_OF: JoinVersions = "as-of"
CURRENT: JoinVersions = "current"
RECORDED: JoinVersions = "recorded"
JOIN_VERSIONS: tuple[JoinVersions, ...] = (AS_OF, CURRENT, RECORDED)


_PARTITIONS = 100_000


def validate_partition_count(what: str, value: int | None) -> int | None:
    """Return the partition count, or None where none is given; raises ConfigurationError for an
    invalid one.
    """
    if value is not None and not 1 <= value <= _PARTITIONS:
        expected = f"a whole number from 1 to {_PARTITIONS:,}"
        raise argument_error(f"{what} is {value!r}", expected, argument="partitions")
    return value


class DeclaredOutput(Protocol):
    """A declared output stream: its name, partition count, partitioning columns, and which of its
    columns were renamed or dropped.
    """

    @property
    def name(self) -> str: ...
    @property
    def partitions(self) -> int: ...
    @property
    def key(self) -> tuple[str, ...]: ...
    @property
    def changes(self) -> ColumnChanges: ...


TableReplay = Literal["append", "replace"]
"""What becomes of the rows that earlier batches made of records which are read again."""
Tombstones = Literal["fail", "drop", "keep"]
"""What becomes of tombstones, which are deletions of keys: an output table has no keys."""


class DeclaredTable(Protocol):
    """A declared output table, and what becomes of earlier rows when records are read again."""

    @property
    def table(self) -> AnyOutputTable: ...
    @property
    def on_replay(self) -> TableReplay: ...


class DeclaredApplication(Protocol):
    """An application: its name, and the outputs, datasets and remote tables that it declares."""

    @property
    def name(self) -> str: ...
    @property
    def outputs(self) -> Mapping[str, DeclaredOutput]: ...
    @property
    def output_tables(self) -> Mapping[str, DeclaredTable]: ...
    @property
    def tables(self) -> Mapping[str, AnyTable]: ...
    @property
    def datasets(self) -> Iterable[AdjunctDataset]: ...
    def dataset(self, name: str) -> AdjunctDataset:
        """Return the declared dataset of this name."""

    def table_key(self, name: str) -> tuple[str, ...]:
        """Return the key columns of a declared remote table."""


def declared_changes(app: DeclaredApplication, stream: str) -> ColumnChanges:
    """Return the renames and removals that are declared for a stream which the application writes:
    by its output, or else by a dataset whose rows are the stream's records. Without any,
    NO_CHANGES.
    """
    if stream in app.outputs:
        return app.outputs[stream].changes
    for dataset in app.datasets:
        has_its_columns = dataset.stream == stream and dataset.extractor is None
        if has_its_columns and dataset.evolution:
            return dataset.evolution
    return NO_CHANGES
