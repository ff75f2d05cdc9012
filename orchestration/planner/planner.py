"""Plans an application: proves that joins need no shuffle, infers partition counts, and assigns
partitions to tasks.

    requirements -> flows (columns and partitioning) -> join groups -> counts -> proof -> plan

`build_plan` is pure: an application and the facts of its streams in, a plan or an error out. After
SAMZA-1889. `plan_application` reads these facts, the only I/O of planning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    BoundedDataset,
    FileSource,
    QuerySource,
    UnboundedDataset,
)
from dagster_adjunct.assets.declaration.snapshots import QuerySnapshot
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.sources.entries import (
    list_extractor_spark_needs,
    list_stream_spark_needs,
    open_changes,
)
from dagster_adjunct.assets.sources.query_source import list_query_spark_needs
from dagster_adjunct.assets.unbounded.changes import list_format_spark_needs
from dagster_adjunct.assets.unbounded.recovery import must_evolve
from dagster_adjunct.assets.validation.validators import list_spark_validators
from dagster_adjunct.assets.versions.manifest import UnboundedManifest
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.declared_lines import with_line
from dagster_adjunct.orchestration.application.graph import describe_partitions
from dagster_adjunct.orchestration.operators.operator import Exchange, PlanContext, PlannedStream
from dagster_adjunct.orchestration.operators.stream_facts import Catalog, Columns, StreamFacts
from dagster_adjunct.orchestration.operators.windows.zone_rules import check_zones_in_jvm
from dagster_adjunct.orchestration.planner import notes, partition_counts
from dagster_adjunct.orchestration.planner.co_partitioning import (
    apply_insertions,
    check_co_partitioning,
    plan_repartitioning,
)
from dagster_adjunct.orchestration.planner.columns import (
    DatasetSql,
    check_datasets,
    derive_columns,
    format_place,
    iterate_dataset_sql,
    list_unknown_paths,
    note_batch_windows,
    note_nondeterministic_results,
    note_unproven_columns,
    note_unproven_datasets,
    trace_flows,
)
from dagster_adjunct.orchestration.planner.output_tables import (
    compare_output_table,
    find_upstream_writers,
    plan_output_tables,
)
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planned import (
    FedDataset,
    JoinGroup,
    PlannedAdvance,
    PlannedEngine,
    PlannedLateData,
    PlannedOperator,
    PlannedOutputTable,
    SparkNeed,
)
from dagster_adjunct.orchestration.planner.restatement_costs import with_costs
from dagster_adjunct.orchestration.planner.restatements import (
    check_restated_sums,
    plan_restatements,
)
from dagster_adjunct.resources.code_lines import CodeLine
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    DatasetError,
    PermanentError,
    PlanningError,
    SchemaMismatchError,
    StreamNotFoundError,
    TableNotFoundError,
)
from dagster_adjunct.resources.files.tree import open_tree
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.sql.arrow_expressions import is_valid_for_spark
from dagster_adjunct.resources.streams.lake.streams import LakeStreams, open_systems
from dagster_adjunct.resources.streams.system import (
    LAKE,
    NumberedOffsets,
    StreamSystem,
    StreamWriter,
)
from dagster_adjunct.resources.tables.shared_rate import check_budgets, list_budgets
from dagster_adjunct.resources.threads import map_in_threads
from dagster_adjunct.resources.validation import validated

P = ParamSpec("P")
R = TypeVar("R")


def _in_words_of_source(
    function: Callable[Concatenate[Application, P], R],
) -> Callable[Concatenate[Application, P], R]:
    """Return the function with errors that have the line of a declaration in Python; for an
    application that is not declared in Python, in the words of the file that declares it.
    """

    @wraps(function)
    def call(app: Application, /, *args: P.args, **options: P.kwargs) -> R:
        try:
            return function(app, *args, **options)
        except PermanentError as error:
            if app.error_of_source is not None:
                raise app.error_of_source(error) from None
            line = _find_line(app, error)
            if line is None:
                raise
            raise with_line(error, line) from error.__cause__

    return call


def _find_line(app: Application, error: PermanentError) -> CodeLine | None:
    """Return the line that declares what a planning error is about: an operator, a dataset, or the
    application. None for another error, and for one that has its line.
    """
    if not isinstance(error, PlanningError) or error.declared_at is not None or error.places:
        return None
    for operator in app.operators:
        if operator.id == error.operator:
            return operator.declared_at
    for dataset in app.datasets:
        if dataset.name == error.dataset:
            return dataset.declared_at
    return app.declared_at


@validated
def systems_for(app: Application, *, lake: Lake | None = None) -> dict[str, StreamSystem]:
    """Return the stream systems of an application's streams by their names; `lake` defaults to
    `open_lake()`.
    """
    return open_systems(open_lake() if lake is None else lake, _stream_names(app))


def open_dataset_systems(datasets: Iterable[AdjunctDataset], lake: Lake) -> dict[str, StreamSystem]:
    """Return the stream systems of the datasets' streams by their names."""
    return open_systems(lake, _dataset_streams(datasets))


@validated
def plan_application(
    app: Application,
    *,
    lake: Lake | None = None,
    systems: Mapping[str, StreamSystem] | None = None,
    writes_as: str | None = None,
) -> ExecutionPlan:
    """Return the application's plan over the current streams, with costs and with notes on stored
    datasets; raises PlanningError if it can't be planned.

    `systems` defaults to those of the application in `lake`, and `lake` to `open_lake()`.
    `writes_as` is the former name of a renamed application, by which tables know its marks.
    """
    if systems is None:
        systems = systems_for(app, lake=lake)
    catalog = read_catalog(app, systems)
    catalog.stored_notes = note_stored_datasets(app, systems)
    plan = build_plan(app, catalog, writes_as=writes_as)
    restatements = with_costs(app, plan.late_data.restatements, systems)
    return replace(
        plan,
        late_data=replace(plan.late_data, restatements=restatements),
        output_tables=find_upstream_writers(plan.output_tables, systems),
    )


@_in_words_of_source
def compare_output_tables(
    app: Application, plan: ExecutionPlan, lake: Lake, *, writes_as: str | None = None
) -> ExecutionPlan:
    """Return the plan with what the next commits would change in the application's output tables.

    Opens their catalogues and stores. `writes_as` is the former name of a renamed application.
    Raises PlanningError for a table that can't take the records, and for one that the application
    has written and that is gone, or is another one.
    """
    producer = writes_as or app.name

    def compare(planned: PlannedOutputTable) -> PlannedOutputTable:
        columns = plan.columns[planned.operator]
        return compare_output_table(app, planned, columns, lake, producer)

    compared = map_in_threads(compare, plan.output_tables)
    return replace(plan, output_tables=tuple(compared))


@_in_words_of_source
def read_catalog(app: Application, systems: Mapping[str, StreamSystem]) -> Catalog:
    """Return the facts of the application's streams as they are now, why others are missing, and
    which folders of datasets' files are empty.

    Raises ConfigurationError if `systems` lacks the system of a stream.
    """

    def read_facts(name: str) -> StreamFacts | str:
        """Return the facts of a stream, or the reason why it is missing."""
        system_name, stream = split_stream_name(name)
        if system_name not in systems:
            problem = (
                f"application {app.name!r} reads {name}, but systems= has no stream system"
                f" {system_name!r}: it has {', '.join(sorted(systems)) or 'none'}."
            )
            step = "Pass systems=systems_for(app)."
            raise ConfigurationError(problem, step, application=app.name)
        system = systems[system_name]
        try:
            info = system.info(stream)
        except StreamNotFoundError as error:
            return error.problem
        can = system.capabilities
        numbered = isinstance(system, NumberedOffsets)
        return StreamFacts(
            name,
            info.partitions,
            info.key,
            info.partitioner,
            info.schema,
            evolves=can.evolves,
            numbered=numbered,
            in_arrow=can.reads_arrow,
            by_time=can.finds_times,
            identity=info.identity,
            former=info.former,
            find_by=info.find_by,
        )

    def size_of(stream: str) -> int | None:
        """Return the stored bytes of a stream; None if its system can't say."""
        system, name = split_stream_name(stream)
        return systems[system].stored_bytes(name)

    new_streams = {}
    for system_name, system in systems.items():
        if isinstance(system, StreamWriter):
            new_streams[system_name] = system.capabilities.new_streams
    names = sorted(_read_streams(app))
    facts = {}
    missing = {}
    for name, facts_or_reason in zip(names, map_in_threads(read_facts, names), strict=True):
        if isinstance(facts_or_reason, str):
            missing[name] = facts_or_reason
        else:
            facts[name] = facts_or_reason
    folders = find_empty_folders(app)
    return Catalog(
        facts, missing=missing, size_of=size_of, new_streams=new_streams, empty_folders=folders
    )


def _stream_names(app: Application) -> set[str]:
    """Return the streams of an application, with the changes of datasets by which results are
    restated.
    """
    return {*_read_streams(app), *app.restated}


def _read_streams(app: Application) -> set[str]:
    """Return the streams that an application or its datasets read or write."""
    return {*app.inputs, *app.outputs, *_dataset_streams(app.datasets)}


def _dataset_streams(datasets: Iterable[AdjunctDataset]) -> set[str]:
    """Return the streams that advancing these datasets reads and writes."""
    names: list[str | None] = []
    for dataset in datasets:
        names.append(dataset.stream)
        if isinstance(dataset, UnboundedDataset):
            names += (dataset.dead_letters, dataset.transactions)
    return set(filter(None, names))


@_in_words_of_source
def build_plan(
    app: Application, facts: Mapping[str, StreamFacts], *, writes_as: str | None = None
) -> ExecutionPlan:
    """Return the plan of an application; `facts` are those of the existing streams, by name.

    `writes_as` is the name by which remote tables know the application, if it is another one.
    Inputs and source streams of datasets must exist; outputs may. Raises
    PartitionCountMismatchError if partition counts can't agree, and PlanningError for anything else
    that can't work: a missing stream, a missing or duplicate column, a join that is not
    co-partitioned.
    """
    if not app.inputs:
        problem = f"application {app.name!r} has no input stream."
        raise PlanningError(problem, 'Declare one: app.input_stream("…").', application=app.name)
    catalog = facts if isinstance(facts, Catalog) else Catalog(facts)
    check_restated_sums(app)
    derived = derive_columns(app, catalog)
    columns = derived.after
    restatements = plan_restatements(app, catalog, columns)
    draft = _draft_plan(app, catalog, columns)
    streams = tuple(draft.streams.values())
    tables = notes.plan_tables(app, catalog, columns, writer=writes_as or app.name)
    calls = [operator.spec.call(operator.id, app) for operator in app.operators]
    needs_spark: Iterable[SparkNeed] = ()
    if app.engine == "auto":
        needs_spark = _iter_spark_needs(app, catalog, columns)
    return ExecutionPlan(
        application=app.name,
        operators=tuple(_iter_operators(draft, columns)),
        streams=streams,
        join_groups=tuple(_iter_join_groups(draft)),
        exchanges=tuple(_iter_exchanges(draft)),
        tasks=partition_counts.assign_tasks(streams, app.tasks),
        notes=(
            *_iter_notes(draft),
            *notes.note_table_order(tables),
            *notes.note_marks(app),
            *notes.note_storage(app),
            *notes.note_merged_records(app),
            *note_nondeterministic_results(app, columns),
            *note_batch_windows(app),
            *note_unproven_columns(app, columns),
            *note_unproven_datasets(app, catalog),
            *derived.notes,
            *notes.note_state(app),
            *note_sources(app, catalog),
        ),
        tables=tables,
        fed=_plan_fed_datasets(draft),
        calls=tuple(call for call in calls if call is not None),
        state=notes.plan_state(app),
        fed_joins=notes.plan_fed_joins(app),
        by_time=notes.plan_joins_by_time(app),
        late_data=PlannedLateData(notes.plan_waits(app), restatements),
        output_tables=plan_output_tables(app),
        columns=columns,
        engine=PlannedEngine(app.engine, tuple(needs_spark), plan_advances(app, catalog)),
        stored_notes=tuple(catalog.stored_notes),
    )


def _check_declarations(app: Application, catalog: Catalog) -> None:
    """Raise an error for rate budgets, datasets, state names, output tables and expectations that
    can't work, whatever the partition counts are.
    """
    if app.tables:
        check_budgets(list_budgets(app.tables.values()))
    check_datasets(app, catalog)
    notes.check_state_names(app)
    notes.check_replaced_rows(app)
    notes.check_expectations(app)


def _draft_plan(
    app: Application, catalog: Catalog, columns: Mapping[str, Columns]
) -> partition_counts.Draft:
    """Return the streams of an application with their partition counts, proven to agree.

    Raises PlanningError for counts that do not agree, and for declarations that can't work.
    """
    needs = partition_counts.collect_requirements(app)
    inserted = plan_repartitioning(app, catalog, columns, needs)
    flows = trace_flows(app, catalog, columns, apply_insertions(inserted))
    _check_declarations(app, catalog)
    groups = partition_counts.find_join_groups(app, needs, flows)
    default = partition_counts.default_count(app, catalog)
    declared = partition_counts.declared_counts(app, catalog)
    declared |= {item.node: item.partitions for item in inserted.values()}
    counts = partition_counts.assign_counts(declared, groups, default.count)
    counts = partition_counts.add_broadcast_counts(app, counts)
    counts = partition_counts.add_merged_counts(app, flows, counts)
    draft = partition_counts.Draft(
        app,
        catalog,
        columns,
        needs=needs,
        inserted=inserted,
        flows=flows,
        groups=groups,
        counts=counts,
    )
    draft = replace(draft, streams=partition_counts.build_planned_streams(draft, default.origin))
    check_co_partitioning(draft)
    if any(flows.merges_streams(operator) for operator in app.operators):
        # Only now is it known whether the inputs of merged streams have equal counts.
        flows = trace_flows(app, catalog, columns, apply_insertions(inserted), counts.partitions)
        return replace(draft, flows=flows)
    return draft


def _iter_spark_needs(
    app: Application, catalog: Catalog, columns: Mapping[str, Columns]
) -> Iterator[SparkNeed]:
    """Yield the operators that need Spark, with the reason."""
    for operator in app.operators:
        arriving = [columns[source] for source in operator.inputs]
        what = operator.spec.spark_need(PlanContext(operator.id, app, catalog), arriving)
        if what:
            yield SparkNeed(operator.id, what)


def _iter_exchanges(draft: partition_counts.Draft) -> Iterator[Exchange]:
    """Yield the exchanges of a plan, in order of definition.

    At each operator these are, if there are any: the inserted ones before its inputs, its own
    (partition_by or broadcast), and the one before what it writes.
    """
    app = draft.app
    streams = draft.streams
    counts = draft.counts.partitions
    for operator in app.operators:
        for number in range(len(operator.inputs)):
            item = draft.inserted.get((operator.id, number))
            if item is not None:
                yield Exchange(
                    operator.id,
                    reason="auto_repartition",
                    partitioned_by=item.columns,
                    partitions=counts[item.node],
                    why=f"the stream: {item.why}",
                    input=number,
                )
        if operator.spec.role == "intermediate":
            stream = streams[operator.id]
            yield Exchange(
                operator.id,
                reason="partition_by",
                partitioned_by=stream.partitioned_by,
                partitions=counts[operator.id],
                why=f"count: {stream.count_from}",
            )
        if operator.spec.role == "broadcast":
            yield Exchange(
                operator.id,
                reason="broadcast",
                partitioned_by=streams[operator.id].partitioned_by,
                partitions=counts[operator.id],
                why="every task gets all records",
            )
        if operator.spec.writes is not None:
            (flow,) = draft.flows.arriving[operator.id]
            context = PlanContext(operator.id, app, draft.catalog)
            before = operator.spec.exchange_before(context, flow, counts[flow.stream])
            if before is not None:
                yield before


def _iter_operators(
    draft: partition_counts.Draft, columns: Mapping[str, Columns]
) -> Iterator[PlannedOperator]:
    """Yield the operators as the plan has them."""
    counts = draft.counts.partitions
    for operator in draft.app.operators:
        flow = draft.flows.after[operator.id]
        spec = operator.spec
        summary = spec.summary()
        output = draft.app.outputs.get(spec.writes or "")
        if output is not None and output.description:
            summary = f"{summary}: {output.description}"
        looks_up = None
        if spec.match is not None:
            looks_up = spec.match.node.name
        yield PlannedOperator(
            operator.id,
            operator.kind,
            operator.inputs,
            summary,
            partitions=counts[flow.stream],
            partitioned_by=flow.partitioned_by,
            columns=columns[operator.id].names,
            reads=spec.reads,
            looks_up=looks_up,
            writes=spec.writes,
        )


def _iter_join_groups(draft: partition_counts.Draft) -> Iterator[JoinGroup]:
    """Yield a group for each operator that needs its streams and datasets to be co-partitioned,
    except sends to datasets (`_plan_fed_datasets`).
    """
    for join, requirements in draft.needs.items():
        joined = {number: needed for number, needed in requirements.items() if not needed.feeds}
        if not joined:
            continue
        nodes = [draft.flows.arriving[join][number].stream for number in joined]
        count = draft.counts.partitions[nodes[0]]
        for needed in joined.values():
            if needed.dataset is not None:
                nodes.append(partition_counts.dataset_node(needed.dataset))
        names = tuple(_stream_label(node, draft.streams) for node in dict.fromkeys(nodes))
        first = next(iter(joined.values()))
        yield JoinGroup(join, first.dataset, names, count, first.columns or ())


def _plan_fed_datasets(draft: partition_counts.Draft) -> tuple[FedDataset, ...]:
    """Return the joined datasets that the application itself sends records to, in order of
    declaration.
    """
    # {dataset: {operator that sends to it: label of the stream that is sent}}
    sends: dict[str | None, dict[str, str]] = defaultdict(dict)
    for operator, requirements in draft.needs.items():
        for number, needed in requirements.items():
            if needed.feeds:
                flow = draft.flows.arriving[operator][number]
                sends[needed.dataset][operator] = _stream_label(flow.stream, draft.streams)
    fed = []
    for dataset in draft.app.datasets:
        sent = sends[dataset.name]
        if sent:
            names = tuple(dict.fromkeys(sent.values()))
            fed.append(FedDataset(dataset.name, names, tuple(sent), dataset.partitions or 0))
    return tuple(fed)


def _stream_label(node: str, streams: Mapping[str, PlannedStream]) -> str:
    """Return the name of the stream with this node id; of merged streams, the id of the operator
    that merges them.
    """
    return streams[node].name if node in streams else node


def _iter_notes(draft: partition_counts.Draft) -> Iterator[str]:
    """Yield notes on inserted exchanges, and on what is declared and not used."""
    app = draft.app
    streams = draft.streams
    for item in draft.inserted.values():
        yield (
            f"auto_repartition: {_stream_label(item.stream, streams)} moves before"
            f" {item.operator} into {streams[item.node].partitions} partitions by"
            f" ({', '.join(item.columns)}), because {item.why}."
        )
    written = {operator.spec.writes for operator in app.operators} - {None}
    if not written:
        yield "Nothing is written: no stream ends in send_to()."
    yield from _iter_unused(app, written)
    for dataset in app.datasets:
        described = describe_partitions(dataset)
        if described:
            yield described


def _iter_unused(app: Application, written: AbstractSet[str | None]) -> Iterator[str]:
    """Yield a note for each output, dataset and table that is declared and not used."""
    used = set(written)
    for operator in app.operators:
        if operator.spec.match is not None:
            used.add(operator.spec.match.node.name)
    for name in app.outputs:
        if name not in written:
            yield f"Output stream {name} is declared and nothing is sent to it."
    for dataset in app.datasets:
        if dataset.name not in used:
            yield f"Dataset {dataset.name} is declared and not used."
    for name in app.tables:
        if name not in used:
            yield f"Table {name} is declared and not used."


@_in_words_of_source
def check_syntax(app: Application) -> None:
    """Raise PlanningError for the first SQL of an application that Spark can't parse.

    Spark's parser runs in a JVM without a session. It is started only for a query, or for an
    expression that is not certain to be valid. Without Java, that SQL is not checked.
    """
    to_parse = []
    for each in _iter_sql(app):
        if each.is_query or not is_valid_for_spark(each.text):
            to_parse.append(each)
    if not to_parse:
        return
    from dagster_adjunct.resources.spark.session import syntax_errors

    mistakes: list[str] = []
    with suppress(ConfigurationError):  # there is no Java
        mistakes = syntax_errors([(each.text, each.is_query) for each in to_parse])
    for mistake, each in zip(mistakes, to_parse, strict=False):  # without Java there are none
        if mistake:
            kind = "query" if each.is_query else "expression"
            problem = f"{each.owner}: {each.text!r} is not a valid Spark SQL {kind}: {mistake}."
            step = "Correct the SQL; Spark's parser reports the position."
            raise PlanningError(problem, step, application=app.name, **each.facts)


def list_zones(app: Application) -> list[str]:
    """Return the time zones whose clocks the application's operators follow."""
    zones: set[str] = set()
    for operator in app.operators:
        zones.update(operator.spec.zones)
    return sorted(zones)


def check_zones(app: Application) -> None:
    """Raise ZoneRulesError if Java's and Python's rules differ for a time zone of the application.

    A JVM without a session starts if there is a zone. Without Java, nothing is checked.
    """
    zones = list_zones(app)
    if not zones:
        return
    from dagster_adjunct.resources.spark.session import check_java

    try:
        check_java()
    except ConfigurationError:
        return
    check_zones_in_jvm(zones)


class _Sql(NamedTuple):
    """SQL of an application: an expression or a whole query, its owner, and fields of an error."""

    text: str
    is_query: bool
    owner: str
    facts: Mapping[str, Any]


def _iter_sql(app: Application) -> Iterator[_Sql]:
    """Yield the SQL of an application's operators and datasets."""
    for operator in app.operators:
        facts = {"operator": operator.id, "declared_at": format_place(operator.declared_at)}
        for text in operator.spec.sql:
            yield _Sql(text, False, operator.id, facts)
    for dataset in app.datasets:
        facts = {"dataset": dataset.name, "declared_at": format_place(dataset.declared_at)}
        for sql in (*iterate_dataset_sql(dataset), *_iter_queries(dataset)):
            yield _Sql(sql.text, sql.is_query, f"{sql.owner} of dataset {dataset.name!r}", facts)


def _iter_queries(dataset: AdjunctDataset) -> Iterator[DatasetSql]:
    """Yield the queries that a dataset is made of, with a text for each parameter."""
    if isinstance(dataset.input, QuerySource) and isinstance(dataset.input.query, str):
        query = dataset.input.query.replace("{version}", "''").replace("{partition}", "''")
        yield DatasetSql("the query", query, is_query=True)
    if isinstance(dataset, UnboundedDataset):
        initial = dataset.following.initial
        if isinstance(initial, QuerySnapshot) and initial.sql is not None:
            yield DatasetSql("the snapshot's query", initial.sql, is_query=True)


def plan_advances(app: Application, catalog: Catalog) -> tuple[PlannedAdvance, ...]:
    """Return, for each dataset except local tables, what needs or uses Spark to advance it, however
    few records there are.
    """
    advances = []
    for dataset in app.datasets:
        if not dataset.is_local:
            needs = tuple(_list_spark_needs(dataset, catalog))
            advances.append(PlannedAdvance(dataset.name, needs, _list_spark_uses(dataset)))
    return tuple(advances)


def _list_spark_uses(dataset: AdjunctDataset) -> tuple[str, ...]:
    """Return what is advanced with Spark if there is a session, as noun phrases."""
    if isinstance(dataset, UnboundedDataset) and dataset.following.history is not None:
        return ("its history, for which stored rows are read",)
    return ()


def _list_spark_needs(dataset: AdjunctDataset, catalog: Catalog) -> Iterator[str]:
    """Yield what needs Spark to advance a dataset, as noun phrases."""
    if isinstance(dataset, BoundedDataset):
        validators = list_spark_validators(dataset)
        if validators:
            yield f"its validators {', '.join(validators)}"
        if isinstance(dataset.input, QuerySource):
            yield from list_query_spark_needs(dataset, dataset.input)
            return
        is_stream = isinstance(dataset.input, str)
        if not is_stream:
            yield from list_extractor_spark_needs(dataset)
            return
    facts = catalog.get(str(dataset.input))
    yield from list_stream_spark_needs(dataset, in_arrow=facts is None or facts.in_arrow)
    if isinstance(dataset, UnboundedDataset):
        yield from _list_table_spark_needs(dataset, facts)


def _list_table_spark_needs(dataset: UnboundedDataset, facts: StreamFacts | None) -> Iterator[str]:
    """Yield what needs Spark to advance a table that follows changes. `facts` are those of their
    stream, None if it does not exist.
    """
    following = dataset.following
    if facts is not None and facts.schema is not None:
        yield from list_format_spark_needs(dataset, facts.schema)
    if not following.persistent:
        yield "persistent=False, for a table in Spark's cache"
    if following.initial is not None:
        yield f"its bulk snapshot ({following.initial.describe()}), when the table is built"


def note_sources(app: Application, catalog: Catalog) -> Iterator[str]:
    """Yield a note for each source that may not give what its dataset is declared to be made of."""
    for dataset in app.datasets:
        if isinstance(dataset.input, FileSource) and dataset.input.url in catalog.empty_folders:
            yield (
                f"Dataset {dataset.name} waits for files in"
                f" {catalog.empty_folders[dataset.input.url]}, which does not exist or has no"
                " files. If nothing will be delivered there, correct the url of its FileSource."
            )
        if not isinstance(dataset, UnboundedDataset):
            continue
        facts = catalog.get(dataset.input)
        if facts is None or facts.schema is None:
            continue
        for path in list_unknown_paths(dataset, facts.schema):
            yield (
                f"Dataset {dataset.name} is ordered by {path}, which is not known to be sent by any"
                " connector: if no change has it, the first advance fails."
            )


def note_stored_datasets(app: Application, systems: Mapping[str, StreamSystem]) -> tuple[str, ...]:
    """Return a note for each dataset whose next advance fails, because it was built under another
    declaration or from other columns, and for each dataset without a version whose stream has no
    end-of-dataset marker.

    () without the lake, in which datasets are stored.
    """
    streams = systems.get(LAKE)
    if not isinstance(streams, LakeStreams):
        return ()
    lake = streams.lake
    datasets = [dataset for dataset in app.datasets if not dataset.is_local]
    found = map_in_threads(lambda dataset: _note_stored(lake, dataset, systems), datasets)
    return tuple(note for note in found if note is not None)


def _note_stored(
    lake: Lake, dataset: AdjunctDataset, systems: Mapping[str, StreamSystem]
) -> str | None:
    """Return a note if the next advance of a dataset fails, or if it has no version, and its stream
    in the lake no marker that would end one; else None.
    """
    try:
        manifest = StoredVersions(lake, dataset).manifest()
        if isinstance(dataset, UnboundedDataset) and isinstance(manifest, UnboundedManifest):
            _check_stored_columns(dataset, manifest, systems)
    except DatasetError as error:
        return f"Its next advance fails: {error.problem} {error.next_step}"
    if not isinstance(dataset, BoundedDataset) or dataset.stream is None:
        return None
    if manifest is not None and manifest.version is not None:
        return None
    system, stream = split_stream_name(dataset.stream)
    if system != LAKE:
        return None
    try:
        if systems[LAKE].markers(stream):
            return None
    except StreamNotFoundError:  # the plan itself says so
        return None
    return (
        f"Dataset {dataset.name} has no version yet, and {dataset.stream} has no end-of-dataset"
        " marker: a run that joins it ends with NoSealedVersionError until there is one."
    )


def _check_stored_columns(
    dataset: UnboundedDataset, manifest: UnboundedManifest, systems: Mapping[str, StreamSystem]
) -> None:
    """Raise DatasetError for a table that can't get the columns that its stream has now; do nothing
    for a stream that can't be read, which the plan reports.
    """
    try:
        source = open_changes(systems, dataset)
    except (
        SchemaMismatchError,
        StreamNotFoundError,
        TableNotFoundError,
        ConfigurationError,
        DatasetError,
    ):
        return
    must_evolve(dataset, manifest, source)  # raises if it can't


def find_empty_folders(app: Application) -> Mapping[str, str]:
    """Return the folders of the datasets' files that do not exist or have no files: their places,
    by url.

    A folder that can't be listed now is left out.
    """
    urls = {dataset.input.url for dataset in app.datasets if isinstance(dataset.input, FileSource)}
    found = {}
    for url in sorted(urls):
        try:
            tree = open_tree(url)
            if not tree.has_files():
                found[url] = tree.url
        except AdjunctError:
            continue
    return found
