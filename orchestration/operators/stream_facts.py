"""What planning is told about the streams of the world. Plain data, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeAlias

from dagster_adjunct.orchestration.operators.arguments import validate_partition_count
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.sql.expression import NILADIC
from dagster_adjunct.resources.sql.parser import parse_expression
from dagster_adjunct.resources.streams.lake.streams import NEW_STREAMS
from dagster_adjunct.resources.streams.system import LAKE, NewStreams

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.columns import Columns
    from dagster_adjunct.orchestration.operators.operator import Declarations, Operator, Spec
    from dagster_adjunct.resources.sql.expression import Expression

Kind = Literal["stream", "files", "dataset", "table", "sink"]


@dataclass(frozen=True, slots=True, order=True)
class LineageNode:
    """One asset to be: a stream ("lake.flights"), files (their URL), a dataset ("planes"), a remote table, or what
    an application hands records to ("alerts/notify")."""

    kind: Kind
    name: str


Sources = tuple[tuple[LineageNode, str], ...]
"""The columns, each of an asset, that one column is made of."""
ColumnSources = dict[str, Sources]
"""Columns by name, each with what it is made of; one that nothing is known of is left out."""


@dataclass(frozen=True, slots=True)
class LineageContext:
    """Where the columns of one operator are traced: its application, and the columns that are planned before (one for
    each input) and after it."""

    app: Declarations
    before: tuple[Columns, ...]
    after: Columns


def identity_sources(node: LineageNode, columns: Iterable[str]) -> ColumnSources:
    """Return columns that are those of `node`, each made of itself."""
    return {name: ((node, name),) for name in columns}


def add_sources(made: ColumnSources, name: str, sources: Sources) -> None:
    """Say in `made` that a column is made of these, too."""
    made[name] = tuple(dict.fromkeys((*made.get(name, ()), *sources)))


def sources_from_sql(expression: str, columns: Mapping[str, Sources]) -> Sources:
    """Return what an expression is made of; () where it is not known of every column that it names."""
    return sources_from_expression(parse_expression(expression), columns)


def sources_from_expression(
    read: Expression, columns: Mapping[str, Sources], aliases: Mapping[str, Sources] | None = None
) -> Sources:
    """Return what an expression is made of that has been read; see `sources_of`.

    `aliases` are the names that stand before it in one list: they count where no column has them.
    """
    known = {name.lower(): sources for name, sources in (*(aliases or {}).items(), *columns.items())}
    column_sources: list[Sources] = []
    for name in read.columns:
        sources = known.get(str(name).lower()) or known.get(name.name.lower()) or _of_fields(name.name, known)
        if not sources and name.name.lower() not in NILADIC:
            return ()
        column_sources.append(sources or ())
    return tuple(dict.fromkeys(source for sources in column_sources for source in sources))


def _of_fields(name: str, known: Mapping[str, Sources]) -> Sources:
    """Return what a struct is made of, where that is known of its fields."""
    within = f"{name.lower()}."
    return tuple(source for field, sources in known.items() if field.startswith(within) for source in sources)


Partitioner = Literal["spark-murmur3", "kafka-murmur2", "task number", "unknown"]
SPARK: Partitioner = "spark-murmur3"
TASK_NUMBER: Partitioner = "task number"
UNKNOWN: Partitioner = "unknown"


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A stream as it exists: `name` is "system.stream"; `key` are the columns that choose the partition.

    `schema` holds the record's columns, None where they are not known; `evolves` says that columns may be added and
    widened by who writes to it, `numbered` that offsets are numbers. `size` is how many bytes it holds, None where
    that is not known.
    """

    name: str
    partitions: int
    key: tuple[str, ...] = ()
    partitioner: Partitioner = UNKNOWN
    schema: Schema | None = None
    evolves: bool = False
    numbered: bool = True
    size: int | None = None

    def __post_init__(self) -> None:
        if validate_partition_count(f"partitions of stream {self.name!r}", self.partitions) is None:
            raise ConfigurationError(f"stream {self.name!r} has no partition count.", "Give it one.", stream=self.name)

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The names of the record's columns."""
        return None if self.schema is None else self.schema.names


Catalog: TypeAlias = Mapping[str, StreamFacts]


class StreamCatalog(dict[str, StreamFacts]):
    """A catalog that also holds why the systems don't have some streams: where they looked.

    `size_of` says how many bytes a stream holds; it is asked only where an application is refused. `new_streams` is
    what each system says of streams that it has not made yet, by its name.
    """

    def __init__(
        self,
        facts: Mapping[str, StreamFacts],
        missing: Mapping[str, str],
        size_of: Callable[[str], int | None],
        new_streams: Mapping[str, NewStreams],
    ) -> None:
        super().__init__(facts)
        self.missing = dict(missing)
        self.size_of = size_of
        self.new_streams = dict(new_streams)


def require_facts(catalog: Catalog, stream: str, what: str) -> StreamFacts:
    """Return the facts of a stream that has to exist; `what` says in the error who needs it."""
    facts = catalog.get(stream)
    if facts is None:
        missing = catalog.missing.get(stream) if isinstance(catalog, StreamCatalog) else None
        there = ", ".join(sorted(catalog)) or "none"
        raise PlanningError(
            f"{what} reads stream {stream!r}, which does not exist: " + (missing or f"streams there: {there}."),
            _how_to_create(stream),
            stream=stream,
        )
    return facts


def _how_to_create(stream: str) -> str:
    system, name = split_stream_name(stream)
    if system != LAKE:
        return "Correct the name, or create the stream first."
    create = f"LakeStreams(open_lake()).create({name!r}, schema=Schema.of(…), key=[…], partitions=…)"
    return f"Correct the name, run first what writes the stream, or create it and append to it: {create}."


def stream_size(catalog: Catalog, stream: str) -> int | None:
    """Return how many bytes a stream holds, as far as its system tells."""
    facts = catalog.get(stream)
    if facts is None or facts.size is not None or not isinstance(catalog, StreamCatalog):
        return None if facts is None else facts.size
    return catalog.size_of(stream)


def output_partitioner(catalog: Catalog, stream: str) -> Partitioner:
    """Return how records of an output stream are (or will be) spread."""
    facts = catalog.get(stream)
    if facts is not None:
        return facts.partitioner
    return new_stream_defaults(catalog, stream).partitioner


def new_stream_defaults(catalog: Catalog, stream: str) -> NewStreams:
    """Return what the system of a stream says of those that it has not made yet.

    Facts alone, of which no system was asked, are of a world with the lake: nothing is known of other systems there.
    """
    by_system = catalog.new_streams if isinstance(catalog, StreamCatalog) else {LAKE: NEW_STREAMS}
    return by_system.get(split_stream_name(stream)[0], NewStreams())


# as-of: joins by time meet the entry that was valid at each record's own time, others what is served now.
# current: every join meets what is served now; one by time the entry that is current, whatever the record's time.
# recorded: every join meets the version that the batch met which read the record first; one by time as of its time.
JoinVersions: TypeAlias = Literal["as-of", "current", "recorded"]
AS_OF: JoinVersions = "as-of"
CURRENT: JoinVersions = "current"
RECORDED: JoinVersions = "recorded"
JOIN_VERSIONS: tuple[JoinVersions, ...] = (AS_OF, CURRENT, RECORDED)


_ZERO = timedelta(0)


def watermark_inputs(operators: Iterable[Operator]) -> dict[str, dict[str, timedelta]]:
    """Return, by stateful operator, the input streams above it, and how far what is on the way holds each back."""
    arriving = _sum_on_the_way(operators, lambda spec: spec.watermark_delay)
    return {operator.spec.over_time: spans for operator, spans in arriving if operator.spec.over_time is not None}


def required_retention(operators: Iterable[Operator]) -> dict[str, timedelta]:
    """Return, by input stream, for how long after its time a record may be needed below it."""
    needed: dict[str, timedelta] = {}
    for operator, spans in _sum_on_the_way(operators, lambda spec: spec.max_result_delay):
        for stream, span in spans.items():
            needed[stream] = max(needed.get(stream, _ZERO), span + operator.spec.record_retention)
    return needed


def _sum_on_the_way(
    operators: Iterable[Operator], own: Callable[[Spec], timedelta]
) -> list[tuple[Operator, dict[str, timedelta]]]:
    """Return each operator with the input streams above it, and the most that those on the way have as their own."""
    leaving: dict[str, dict[str, timedelta]] = {}
    found = []
    for operator in operators:
        arriving: dict[str, timedelta] = {} if operator.spec.reads is None else {operator.spec.reads: _ZERO}
        for source in operator.inputs:
            for stream, span in leaving[source].items():
                arriving[stream] = max(span, arriving.get(stream, _ZERO))
        found.append((operator, arriving))
        leaving[operator.id] = {stream: span + own(operator.spec) for stream, span in arriving.items()}
    return found
