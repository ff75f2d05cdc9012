"""Traces columns and partitioning through an application, and checks names and types of columns
before anything runs.

Types are known for columns that are passed on, come from a dataset, or are computed by most
expressions (`resources/sql/types.py`), but not after a function. Spark checks unknown ones in a dry
run before a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from dagster_adjunct.assets.declaration.change_values import is_known_path, suggest_path
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    BoundedDataset,
    UnboundedDataset,
)
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.declaration.extractors import Projection, is_assignable
from dagster_adjunct.assets.sources.entries import (
    check_changes_ordered,
    derive_row_schema,
    derive_stored_schema,
)
from dagster_adjunct.assets.unbounded.dead_letters import check_letter_columns
from dagster_adjunct.assets.validation.validators import (
    check_validator_columns,
    is_left_to_spark,
    iterate_sql_rules,
)
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.joins import source_schema
from dagster_adjunct.orchestration.operators.operator import (
    ComparedColumn,
    Flow,
    Operator,
    PlanContext,
    Spec,
)
from dagster_adjunct.orchestration.operators.stream_facts import (
    SPARK,
    Catalog,
    Columns,
    DeclaredApplication,
    StreamFacts,
    declared_changes,
    new_stream_defaults,
    require_facts,
)
from dagster_adjunct.resources.code_lines import CodeLine
from dagster_adjunct.resources.errors import AdjunctError, PlanningError, SchemaMismatchError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.column_changes import (
    ColumnChanges,
    Evolution,
    FixedColumns,
    describe_part,
    evolve,
)
from dagster_adjunct.resources.schemas.schema import AS_NAMED, Schema, check_key_types
from dagster_adjunct.resources.sql.checking import (
    check_condition,
    check_expression,
    check_single_record,
    nondeterministic_parts,
)
from dagster_adjunct.resources.sql.expression import (
    multi_record_functions,
    nearest_names,
    parse_expression,
    unknown_functions,
    window_clauses,
)
from dagster_adjunct.resources.sql.parsed import SPARK_FUNCTIONS, WindowClause
from dagster_adjunct.resources.table_backends.columns import (
    Digits,
    declared_digits,
    number_bounds,
    parse_column,
)

_MAX_LISTED = 10
"""How many items `abbreviate` and notes list."""
_MAX_TEXT = 60
"""How many characters of an expression notes show."""
Arriving = tuple[Flow, ...]
"""The partitioning of an operator's arriving records, for each input."""
Repartition = Callable[[Operator, Arriving], Arriving]


def format_place(place: CodeLine | None) -> str | None:
    """Return a line of code as "visits.py:12"; None without a line.

    The path is relative if the file is below the working directory.
    """
    if place is None:
        return None
    file = Path(place.file)
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return f"{file}:{place.line}"


def add_location(error: PlanningError, operator: Operator) -> PlanningError:
    """Return an operator's error with the user's line that added the operator as `declared_at`; the
    error itself if it has a line, or if the operator's line is unknown.
    """
    line = format_place(operator.declared_at)
    if line is None or error.declared_at is not None:
        return error
    located = error.reworded(error.problem, error.next_step, operator=operator.id, declared_at=line)
    located.__cause__ = error.__cause__
    return located


def explain_former_column(
    error: PlanningError, catalog: Catalog, datasets: Iterable[AdjunctDataset]
) -> PlanningError:
    """Return the error for a column with what became of the column, if a stream or dataset had one
    of this name before; else the error itself.
    """
    for owner, became in _iter_former(error.column or "", catalog, datasets):
        if became == "dropped":
            step = "Leave it out."
        else:
            step = f"Write {became.removeprefix('renamed to ')}."
        explained = error.reworded(
            f"{error.problem} In {owner}, {error.column} was {became}.", f"{step} {error.next_step}"
        )
        explained.__cause__ = error.__cause__
        return explained
    return error


def _iter_former(
    column: str, catalog: Catalog, datasets: Iterable[AdjunctDataset]
) -> Iterator[tuple[str, str]]:
    """Yield the streams and datasets that had a column of this name or path, and what became of
    it: "dropped", or "renamed to NAME".
    """
    for dataset in datasets:
        changes = dataset.evolution
        if column in changes.renamed:
            yield f"dataset {dataset.name!r}", f"renamed to {changes.follow(column)}"
        elif column in changes.drop:
            yield f"dataset {dataset.name!r}", "dropped"
    for facts in catalog.values():
        became = facts.former.get(column)
        has_it_again = facts.schema is not None and column in facts.schema
        if became is not None and not has_it_again:
            yield f"stream {facts.name}", became


def note_unless_strict(
    app: Application, operator: Operator, problem: str, next_step: str, *, column: str | None = None
) -> str:
    """Return the problem, to be a note of the plan; raises it as a PlanningError if the
    application is strict.
    """
    if not app.strict:
        return problem
    error = PlanningError(
        f"{problem} The application is strict.", next_step, operator=operator.id, column=column
    )
    raise add_location(error, operator)


def visit_operators(app: Application, catalog: Catalog, visit: Callable[[Operator], None]) -> None:
    """Call `visit` with each operator, except the operators after one for which it has raised a
    PlanningError.

    After all calls, that error is raised; several errors are raised as one PlanningError that lists
    them. An error for a column that a stream or dataset once had says what became of the column.
    """
    errors: list[PlanningError] = []
    skipped: set[str] = set()
    for operator in app.operators:
        if not skipped.isdisjoint(operator.inputs):
            skipped.add(operator.id)
            continue
        try:
            visit(operator)
        except PlanningError as error:
            skipped.add(operator.id)
            explained = explain_former_column(error, catalog, app.datasets)
            errors.append(add_location(explained, operator))
    if not errors:
        return
    first, *others = errors
    if not others:
        raise first
    lines = [f"{len(errors)} operators can't work:", *(f"- {error}" for error in errors)]
    raise PlanningError(
        "\n".join(lines),
        "Fix each of them.",
        operator=first.operator,
        column=first.column,
        places=tuple(error.declared_at or "" for error in errors),
    )


@dataclass(frozen=True, slots=True)
class Flows:
    """The flow of records by operator: of each input (`arriving`), and of the records that leave
    it (`after`).
    """

    arriving: dict[str, Arriving]
    after: dict[str, Flow]

    def merges_streams(self, operator: Operator) -> bool:
        """Whether the operator merges several streams, whose records then form a stream named by
        the operator's id.
        """
        return operator.spec.role is None and self.after[operator.id].stream == operator.id


def trace_flows(
    app: Application,
    catalog: Catalog,
    columns: Mapping[str, Columns],
    repartition: Repartition | None = None,
    counts: Mapping[str, int] | None = None,
    *,
    earlier: Flows | None = None,
) -> Flows:
    """Return the flows of all operators; `columns` are those after each, and `counts` the
    partition counts of streams, None before they are decided.

    `repartition` returns the flows that arrive at an operator after the exchanges that it inserts.
    `earlier` flows of the same application and counts are reused for an operator whose arriving
    flows are the same. Raises PlanningError for a SQL window whose records do not arrive in one
    partition, and for flows that an operator can't take.
    """
    flows = Flows({}, {})

    def trace(operator: Operator) -> None:
        """Add the flows of an operator; those before it are known."""
        arriving = tuple(flows.after[source] for source in operator.inputs)
        moved = arriving if repartition is None else repartition(operator, arriving)
        flows.arriving[operator.id] = moved
        # With an exchange, the flow after a side output also depends on `arriving`, which `earlier`
        # does not have.
        has_exchange = moved != arriving
        if earlier is not None and not has_exchange and moved == earlier.arriving[operator.id]:
            flows.after[operator.id] = earlier.after[operator.id]
            return
        # A side output passes on the records that arrive before its exchange.
        onward = arriving if operator.spec.is_side_output else moved
        before = arriving_columns(operator, columns)
        context = PlanContext(operator.id, app, catalog, counts, columns=before)
        flows.after[operator.id] = derive_flow(context, operator.spec, onward, columns[operator.id])
        _check_sql_windows(operator, onward)

    visit_operators(app, catalog, trace)
    return flows


def arriving_columns(operator: Operator, after: Mapping[str, Columns]) -> list[Columns]:
    """Return the columns of each input of an operator; `after` are those after each operator."""
    return [after[source] for source in operator.inputs]


def derive_flow(context: PlanContext, spec: Spec, arriving: Sequence[Flow], after: Columns) -> Flow:
    """Return the flow after an operator; `after` are the columns of the records that leave it."""
    flow = spec.flow(context, arriving)
    is_input = not context.columns
    if is_input:
        return flow
    return flow.keep_paths(context.operator, context.columns[0], after)


def _check_sql_windows(operator: Operator, arriving: Sequence[Flow]) -> None:
    """Raise PlanningError for a SQL window (`over`) unless all records that the window takes
    together arrive in one partition.

    Otherwise Spark would repartition the records, into other partitions than planned.
    """
    if not arriving:  # then SQL is an event time, which has no windows
        return
    for text in operator.spec.sql:
        for window in window_clauses(text):
            (flow,) = arriving
            together = {name.lower() for name in window.columns}
            by = {name.lower() for name in flow.partitioned_by}
            is_in_one_partition = bool(by) and by <= together and flow.partitioner == SPARK
            if not is_in_one_partition:
                raise _window_error(operator.id, text, window, flow)


def _window_error(operator: str, text: str, window: WindowClause, flow: Flow) -> PlanningError:
    """Return the error for a SQL window whose records do not arrive in one partition."""
    needed = "all records"
    if window.partition_by:
        needed = f"the records of one ({window.partition_by})"
    if flow.partitioned_by:
        found = f"are partitioned by ({', '.join(flow.partitioned_by)}) with {flow.partitioner}"
    elif flow.lost_at:
        found = f"have no known partitioning after {flow.lost_at}"
    else:
        found = "are partitioned by no key"
    if window.columns:
        quoted = ", ".join(f'"{name}"' for name in window.columns)
        step = f"Write .partition_by({quoted}) before it."
    else:
        step = (
            "Partition the window by columns, over (partition by a, b), and write .partition_by(…)"
            " with these before it."
        )
    problem = (
        f"{operator}: {text!r} needs {needed} in one partition, but they {found}: Spark would add"
        " an exchange that is not in the plan."
    )
    return PlanningError(problem, step, operator=operator)


def check_datasets(app: Application, catalog: Catalog) -> None:
    """Raise PlanningError for a declared dataset that can't be built from its source.

    Its key, columns, order, projection and validators must name columns that the source has, with
    types that fit. The error has the fields of the original one that a PlanningError has, too.
    """
    for dataset in app.datasets:
        records = source_schema(dataset, catalog)
        try:
            _check_dataset(dataset, records, catalog)
        except AdjunctError as error:
            about = {}
            for field in fields(PlanningError):
                is_shared = field.name in error.facts
                if is_shared and field.name not in ("problem", "next_step", "operator"):
                    about[field.name] = error.facts[field.name]
            about |= {"dataset": dataset.name, "declared_at": format_place(dataset.declared_at)}
            planning = PlanningError(error.problem, error.next_step, **about)
            raise explain_former_column(planning, catalog, app.datasets) from None


def _check_dataset(dataset: AdjunctDataset, records: Schema | None, catalog: Catalog) -> None:
    """Raise an error for a dataset that can't be built from its source, which has `records` with
    this schema; None if their columns are unknown, so that they are not checked.
    """
    if records is not None:
        if isinstance(dataset.extractor, Projection):
            _check_projection(dataset, dataset.extractor, records)
        stored = derive_stored_schema(dataset, records)
        if isinstance(dataset, BoundedDataset | UnboundedDataset):
            check_validator_columns(dataset, stored)
    if not isinstance(dataset, UnboundedDataset):
        return
    facts = None
    if dataset.stream is not None:
        facts = catalog.get(dataset.stream)
    if facts is not None:
        check_changes_ordered(dataset, facts.key, facts.partitions, facts.partitioner)
        if facts.schema is not None:
            check_order_paths(dataset, facts.schema)
    _check_further_streams(dataset, catalog)


def _check_further_streams(dataset: UnboundedDataset, catalog: Catalog) -> None:
    """Raise PlanningError if the dataset's stream of transactions is missing, or if its stream of
    dead letters exists with other columns than dead letters have.
    """
    transactions = dataset.transactions
    if transactions is not None and transactions in catalog.missing:
        require_facts(catalog, transactions, f"dataset {dataset.name!r}, by transactions=,")
    if dataset.dead_letters is None:
        return
    letters = catalog.get(dataset.dead_letters)
    if letters is not None:
        check_letter_columns(dataset, letters.schema)


def _check_projection(dataset: AdjunctDataset, projection: Projection, records: Schema) -> None:
    """Raise an error for a projection whose expressions do not fit the records, or do not have the
    types of the columns that it declares.
    """
    if isinstance(dataset, UnboundedDataset):
        rows = derive_row_schema(dataset, records)
    else:
        rows = records
    what = f"dataset {dataset.name!r}"
    types = _types_of(rows)
    declared = Schema.from_ddl(projection.columns, what)
    for name, text in dict(projection.select).items():
        step = f"Correct the projection's column {name!r}."
        kind = _check_projected(what, text, types, step)
        wanted = declared.field(name).type
        if kind is not None and not is_assignable(kind, wanted):
            problem = (
                f"{what}: the projection declares {name} as {wanted}, but {text!r} has the type"
                f" {kind}."
            )
            step = f"Declare it as {kind}, or cast it in the expression."
            raise PlanningError(problem, step, column=name)
    if projection.where is not None and not _reads_hidden_columns(projection.where):
        _check_projected(what, projection.where, types, "Correct the projection's where=.")
        check_condition(f"{what}: where=", projection.where, tuple(types), types)


def _types_of(schema: Schema) -> dict[str, str | None]:
    """Return the types of a schema's columns, by name."""
    return {field.name: field.type for field in schema.fields}


def _check_projected(
    what: str, text: str, types: Mapping[str, str | None], next_step: str
) -> str | None:
    """Return the type of a projection's expression; None if it is unknown. Raises an error for an
    expression that does not fit the columns of these `types`, in which `what` names the dataset. An
    expression that reads hidden columns is not checked.
    """
    if _reads_hidden_columns(text):
        return None
    check_single_record(what, text)
    return check_expression(what, text, tuple(types), types, side="the record", next_step=next_step)


def _reads_hidden_columns(text: str) -> bool:
    """Whether an expression reads columns that exist in Spark, but not in the schema."""
    return any(column.name.startswith("__") for column in parse_expression(text).columns)


def check_fed_datasets(
    app: DeclaredApplication, operator: str, stream: str, stored: Schema, changed: Evolution
) -> None:
    """Raise PlanningError if a dataset on `stream` would not accept the columns sent to the stream.

    `stored` are the stream's columns now, and `changed` its columns after the send. A dataset
    accepts wider types, and renames and removals that it declares, except for its key, its order
    and what its extractor reads. If records that it does not accept were committed, the dataset
    could never advance again.
    """
    for dataset in app.datasets:
        if dataset.stream != stream:
            continue
        try:
            entries = derive_stored_schema(dataset, stored)
        except AdjunctError:  # it can't be built now either, which check_datasets reports
            continue
        try:
            after = derive_stored_schema(dataset, changed.schema)
            fixed = FixedColumns(dataset.key)
            problems = evolve(entries, AS_NAMED, after, dataset.evolution, fixed).problems
        except AdjunctError as error:
            problems = (error.problem.rstrip("."), *changed.changes)
        if problems:
            raise PlanningError(
                f"{operator}: dataset {dataset.name!r} would not accept the records sent to its"
                f" stream {stream}: {'; '.join(problems)}.",
                'Keep the type of these columns, with .with_columns(NAME="cast(NAME as TYPE)");'
                " declare renames and removals for the dataset, too; or feed another dataset on a"
                " stream of its own.",
                operator=operator,
                dataset=dataset.name,
                stream=stream,
            )


@dataclass(frozen=True, slots=True)
class DerivedColumns:
    """The columns after each operator, by its id; and notes on changes of columns, and on types
    that are not known yet.
    """

    after: dict[str, Columns]
    notes: tuple[str, ...]


def derive_columns(app: Application, catalog: Catalog) -> DerivedColumns:
    """Return the columns after each operator, and notes on them.

    Raises PlanningError for a missing stream, for columns that are missing, duplicate or of types
    that certainly do not fit, and for outputs whose columns their streams can't accept; in a strict
    application also for types that are needed and not known yet.
    """
    after: dict[str, Columns] = {}
    notes: list[str] = []

    def derive(operator: Operator) -> None:
        """Add the columns after an operator, and the notes on them; those before it are known."""
        arriving = arriving_columns(operator, after)
        context = PlanContext(operator.id, app, catalog, columns=arriving)
        for text in operator.spec.sql:
            check_single_record(operator.id, text)
        after[operator.id] = operator.spec.derive_columns(context, arriving)
        target = operator.spec.target(app)
        if target is not None:
            (columns,) = arriving
            written = operator.spec.written(columns).types
            notes.extend(_check_written(operator, context, target.name, written))
        columns_known = all(columns.types is not None for columns in arriving)
        notes.extend(
            _note_declared_types(app, operator, context.declared, columns_known=columns_known)
        )
        notes.extend(_note_compared_types(app, operator, context.compared))
        if operator.spec.send is not None:
            notes.extend(_note_narrow_columns(operator, context.declared))

    visit_operators(app, catalog, derive)
    return DerivedColumns(after, tuple(notes))


def _check_written(
    operator: Operator, context: PlanContext, target: str, written: dict[str, str | None] | None
) -> list[str]:
    """Raise PlanningError if a target can't store the `written` columns, which are None if unknown;
    return notes on declared changes of its columns, and on types that are not known yet.

    The types that an existing stream stores are added to the context. For a new stream that will
    have types, the check is whether it can be created. Other targets are checked elsewhere.
    """
    # None for a new stream, and for an asset that is no stream, whose name has no dot.
    facts = context.catalog.get(target)
    if facts is not None:
        context.declared.extend(_compare_stored_types(facts, written))
        if written is not None:
            return _check_existing_stream(context.app, operator.id, facts, written)
        return []
    if written is None or operator.spec.role != "output":
        return []
    if not new_stream_defaults(context.catalog, target).typed:
        return []
    with _as_column_error(operator.id, target):  # an unknown type counts as string
        schema = Schema.of({name: kind or "string" for name, kind in written.items()})
        check_key_types(schema, context.app.outputs[target].key, "there")
    unknown = [repr(name) for name, kind in written.items() if kind is None]
    if not unknown:
        return []
    return [
        f"{operator.id}: whether stream {target} can hold {abbreviate(unknown)} is unproven: the"
        " type is not known yet."
    ]


def _note_compared_types(
    app: Application, operator: Operator, compared: Sequence[ComparedColumn]
) -> list[str]:
    """Return a note for each pair of columns that need equal types, if a type is unknown."""
    step = (
        "Make the type known: declare the columns of the streams, and cast columns with map() after"
        " a function. Or leave strict out."
    )
    unproven = []
    for pair in compared:
        what = _describe_unknown_type(pair)
        if what:
            problem = f"{operator.id}: {what} not known before it runs, and unproven."
            unproven.append(note_unless_strict(app, operator, problem, step))
    return unproven


def _describe_unknown_type(pair: ComparedColumn) -> str:
    """Return which type of two columns is unknown, as the subject of a sentence; "" for none."""
    if pair.type is None and pair.other_type is None:
        return f"the types of the stream's {pair.column!r} and of {pair.other} are"
    if pair.type is None:
        return (
            f"the type of the stream's {pair.column!r}, to be {pair.other_type} as {pair.other}"
            " is, is"
        )
    if pair.other_type is None:
        return f"the type of {pair.other}, to be {pair.type} as the stream's {pair.column!r} is, is"
    return ""


def _note_declared_types(
    app: Application, operator: Operator, declared: Sequence[ComparedColumn], *, columns_known: bool
) -> list[str]:
    """Return a note on the columns of unknown type for which a table, stream or key declares a
    type; [] if there are none.

    If not all columns are known, note_unproven_columns says so. Then only a strict application gets
    this note, as an error.
    """
    unknown = [pair for pair in declared if pair.type is None]
    is_noted = app.strict or columns_known
    if not unknown or not is_noted:
        return []
    first = unknown[0]
    shown = abbreviate([f"{pair.column!r} (to be {pair.other_type})" for pair in unknown])
    if len(unknown) == 1:
        what = f"the type of {shown}, as {first.other} declares, is"
    else:
        what = f"the types of {shown}, as {first.other} declares, are"
    step = (
        f'Make the type known: .with_columns({first.column}="cast({first.column} as'
        f' {first.other_type})"), or a function with schema=. Or leave strict out.'
    )
    problem = f"{operator.id}: {what} not known before it runs, and unproven."
    return [note_unless_strict(app, operator, problem, step, column=first.column)]


def _note_narrow_columns(operator: Operator, declared: Sequence[ComparedColumn]) -> list[str]:
    """Return a note on the columns of a remote table that can't hold all numbers of the type that
    is sent to them; [] if there are none.
    """
    narrow = []
    for pair in declared:
        is_known = pair.type is not None and pair.other_type is not None
        if is_known and _is_narrower(pair):
            narrow.append(f"{pair.column!r} ({pair.type} as {pair.other_type})")
    if not narrow:
        return []
    return [
        f"{operator.id}: {declared[0].other} holds not all values of {abbreviate(narrow)}: records"
        " with larger numbers, or with more digits after the point, are rejected; nothing is"
        " rounded."
    ]


def _is_narrower(pair: ComparedColumn) -> bool:
    """Whether a column of a table can't hold some numbers of the type that is sent; False if one of
    the two is no type of numbers.
    """
    sent = parse_column(pair.column, pair.type or "")
    held = parse_column(pair.column, pair.other_type or "")
    sent_bounds = number_bounds(sent)
    held_bounds = number_bounds(held)
    if sent_bounds is None or held_bounds is None:
        return False
    sent_digits = declared_digits(sent) or Digits(0, 0)
    held_digits = declared_digits(held) or Digits(0, 0)
    has_larger_numbers = sent_bounds.greatest > held_bounds.greatest
    has_more_digits = sent_digits.scale > held_digits.scale
    return has_larger_numbers or has_more_digits


def _compare_stored_types(
    facts: StreamFacts, types: Mapping[str, str | None] | None
) -> list[ComparedColumn]:
    """Return the columns that an existing stream has and that are sent to it, each with the sent
    type and the stored type; [] for a stream that does not check types.

    `types` are those of the sent columns; None if these are unknown.
    """
    if facts.schema is None or not facts.evolves:
        return []
    stored = _types_of(facts.schema)
    sent = types
    if sent is None:  # then all stored columns may be sent, of unknown type
        sent = dict.fromkeys(stored)
    compared = []
    for name, kind in sent.items():
        if name in stored:
            compared.append(ComparedColumn(name, kind, f"stream {facts.name}", stored[name]))
    return compared


def _check_existing_stream(
    app: DeclaredApplication, operator: str, facts: StreamFacts, types: dict[str, str | None]
) -> list[str]:
    """Raise PlanningError if an existing stream, or a dataset on it, can't store columns of these
    `types`.

    Returns notes on what the next run changes in the stream, and on declared changes of columns
    that the stream never had. Types are not checked if the stream's columns are unknown, or if it
    keeps none (`evolves`).
    """
    changes = declared_changes(app, facts.name)
    if changes and not facts.evolves and facts.name in app.outputs:
        raise PlanningError(
            f"{operator}: columns of stream {facts.name} can't be renamed or dropped: only streams"
            " of the lake keep names for them.",
            "Leave renamed= and drop= out, or send to a stream of the lake.",
            stream=facts.name,
            operator=operator,
        )
    if facts.schema is None or not facts.evolves:
        return []
    with _as_column_error(operator, facts.name):
        declared = _declare_sent(types, facts.schema, changes)
    changed = evolve(facts.schema, AS_NAMED, declared, changes, FixedColumns(facts.key))
    if changed.problems:
        raise PlanningError(
            f"{operator}: the records do not fit the columns of stream {facts.name}:"
            f" {'; '.join(changed.problems)}.",
            "Keep these columns, or give output_stream() renamed= and drop= for them. Types can"
            " only be widened: for others send to another stream, or delete this one (adjunct"
            f" stream delete {split_stream_name(facts.name)[1]} --reason …), and the next run"
            " creates it with the new columns.",
            stream=facts.name,
            operator=operator,
        )
    check_fed_datasets(app, operator, facts.name, facts.schema, changed)
    found = []
    for path in changes.unknown(facts.schema, AS_NAMED):
        if path not in facts.former:
            found.append(
                f"{operator}: renamed or drop of {facts.name} names {path}, which it does not have,"
                f" nor has had: {describe_part(facts.schema, path)}."
            )
    if changes and changed.changes:
        found.append(
            f"{operator}: the next run changes {facts.name}: {'; '.join(changed.changes)}."
        )
    return found


def _declare_sent(
    types: Mapping[str, str | None], stored: Schema, changes: ColumnChanges
) -> Schema:
    """Return the sent columns; those of unknown type, or with nulls only, have the stored type of
    their name, also of a column that is renamed to it, else string.
    """
    stored_types = _types_of(stored)
    for old in changes.renamed:
        if old in stored_types:
            stored_types[changes.follow(old, stored_types)] = stored_types[old]
    declared = {}
    for name, kind in types.items():
        if kind in (None, "void"):  # void: a column of nulls, which fits every column
            declared[name] = stored_types.get(name) or "string"
        else:
            declared[name] = str(kind)
    return Schema.of(declared)


@contextmanager
def _as_column_error(operator: str, stream: str) -> Iterator[None]:
    """Turn a SchemaMismatchError of the block into the PlanningError that the stream can't store
    the sent columns.
    """
    try:
        yield
    except SchemaMismatchError as error:
        problem = f"{operator}: stream {stream} can't store the records sent to it: {error.problem}"
        raise PlanningError(
            problem, error.next_step, stream=stream, operator=operator, column=error.column
        ) from error


def note_batch_windows(app: Application) -> Iterator[str]:
    """Yield a note for each operator with a SQL window (`over`): the window sees the records of
    one batch only.
    """
    for operator in app.operators:
        called: dict[str, None] = {}
        has_windows = any(window_clauses(text) for text in operator.spec.sql)
        for text in operator.spec.sql:
            for name, is_windowed in multi_record_functions(text):
                if is_windowed:
                    called[f"{name}()"] = None
        if has_windows:
            yield note_unless_strict(
                app,
                operator,
                f"{operator.id}: {', '.join(called)} over (…) sees the records of one batch only:"
                " its result depends on how the input is cut into batches.",
                "Use a window over time, stream.window(…), or a local table, which keep state"
                " between batches. Or leave strict out.",
            )


def note_nondeterministic_results(
    app: Application, columns: Mapping[str, Columns]
) -> Iterator[str]:
    """Yield a note for each operator whose SQL may give other results in a repeated batch, such as
    `rand()`.

    `columns` are those after each operator, by its id. Users' functions are not checked.
    """
    for operator in app.operators:
        if operator.inputs:
            read_from = operator.inputs[0]
        else:
            read_from = operator.id  # an input, whose SQL is its event time
        arriving = columns[read_from].types or {}
        changing: dict[str, None] = {}
        for text in operator.spec.sql:
            changing |= dict.fromkeys(nondeterministic_parts(text, arriving))
        if changing:
            yield note_unless_strict(
                app,
                operator,
                f"{operator.id} gives other records when a batch is repeated after a crash, because"
                f" of {', '.join(changing)}: an output stream that has the first ones rejects the"
                " others (ProducerConflictError), and a remote table gets both, unless it is"
                " idempotent.",
                "Take the value from the record, such as the time that its producer gave it.",
            )


def note_unproven_columns(app: Application, columns: Mapping[str, Columns]) -> tuple[str, ...]:
    """Return a note on the expressions that are not checked, and the operators after which columns
    are unknown, before a dry run; () if there are none.

    `columns` are those after each operator. An operator whose input columns are unknown already is
    not listed.
    """
    unproven: list[str] = []
    for operator in app.operators:
        unproven += _describe_unread(operator.id, operator.spec.sql)
        known_before = all(columns[source].complete for source in operator.inputs)
        if known_before and not columns[operator.id].complete:
            unproven.append(f"the columns after {operator.id} ({_explain_unknown(operator)})")
    return _join_note("Unproven; Spark checks it in a dry run before a batch", unproven)


def _explain_unknown(operator: Operator) -> str:
    """Return why the columns after an operator are unknown, though those before it are known."""
    for text in operator.spec.sql:
        parsed = parse_expression(text)
        if parsed.name is None and not parsed.star:
            return f"{_shorten(text)} has no name"
    return operator.spec.summary()


class DatasetSql(NamedTuple):
    """SQL of a dataset: a whole query, a SELECT, or an expression; `owner` is what has it."""

    owner: str
    text: str
    is_query: bool


def iterate_dataset_sql(dataset: AdjunctDataset) -> Iterator[DatasetSql]:
    """Yield the SQL in a dataset's validators and projection."""
    for name, text, is_select in iterate_sql_rules(dataset):
        yield DatasetSql(f"validator {name!r}", text, is_select)
    if isinstance(dataset.extractor, Projection):
        for expression in (*dict(dataset.extractor.select).values(), dataset.extractor.where):
            if expression:
                yield DatasetSql("the projection", expression, is_query=False)


def note_unproven_datasets(app: Application, catalog: Catalog) -> tuple[str, ...]:
    """Return a note on the SQL of datasets that is only checked when they advance; () if there
    is none.
    """
    unproven: list[str] = []
    for dataset in app.datasets:
        records = source_schema(dataset, catalog)
        by_owner: dict[str, list[DatasetSql]] = {}
        for sql in iterate_dataset_sql(dataset):
            by_owner.setdefault(sql.owner, []).append(sql)
        for owner, owned in by_owner.items():
            where = f"{owner} of dataset {dataset.name!r}"
            unproven += _describe_unproven_sql(where, owned, columns_known=records is not None)
        if records is None and by_owner:
            unproven.append(
                f"the columns of dataset {dataset.name!r} ({dataset.input} declares none)"
            )
    return _join_note("Unproven; Spark checks it when the dataset advances", unproven)


def _describe_unproven_sql(
    where: str, owned: Sequence[DatasetSql], *, columns_known: bool
) -> list[str]:
    """Return an item for each SQL of one owner that is not proven; `where` names the owner.

    An owner has either expressions or one SELECT.
    """
    texts = [sql.text for sql in owned]
    if not owned[0].is_query:
        return _describe_unread(where, texts)
    (select,) = texts
    if not columns_known or is_left_to_spark(select):
        return [f"{where}: {_shorten(select)} (a SELECT is left to Spark)"]
    return _describe_unknown_functions(where, texts)


def _describe_unread(where: str, texts: Sequence[str]) -> list[str]:
    """Return an item for each expression that our parser can't read, and for each function that
    Spark does not have.

    `where` names their owner.
    """
    unread = []
    for text in texts:
        problem = parse_expression(text).unread
        if problem:
            unread.append(f"{where}: {_shorten(text)} ({problem})")
    return unread + _describe_unknown_functions(where, texts)


def _describe_unknown_functions(where: str, texts: Sequence[str]) -> list[str]:
    """Return an item for each function that Spark does not have, with a similar one that it has."""
    unknown: dict[str, None] = {}
    for text in texts:
        unknown |= dict.fromkeys(unknown_functions(text))
    described = []
    for name in unknown:
        like = nearest_names(name, SPARK_FUNCTIONS, 1)
        suggestion = f" ({like[0]}?)" if like else ""
        described.append(f"{where}: {name}() is not a Spark function{suggestion}")
    return described


def _join_note(what: str, unproven: Sequence[str]) -> tuple[str, ...]:
    """Return one note, which begins with `what`, lists the first items and counts the others; ()
    for no items.
    """
    if not unproven:
        return ()
    listed = list(unproven[:_MAX_LISTED])
    if len(unproven) > _MAX_LISTED:
        listed.append(f"and {len(unproven) - _MAX_LISTED} more")
    return (f"{what}: {'; '.join(listed)}.",)


def abbreviate(names: Sequence[str]) -> str:
    """Return the first names as text, and how many more there are: "a, b and 5 more"."""
    listed = ", ".join(names[:_MAX_LISTED])
    if len(names) > _MAX_LISTED:
        return f"{listed} and {len(names) - _MAX_LISTED:,} more"
    return listed


def _shorten(text: str) -> str:
    """Return the text in quotes, in one line and at most some 60 characters."""
    one_line = " ".join(text.split())
    if len(one_line) > _MAX_TEXT:
        one_line = f"{one_line[:_MAX_TEXT]}…"
    return repr(one_line)


def check_order_paths(dataset: UnboundedDataset, records: Schema) -> None:
    """Raise SchemaMismatchError for a path in `order_by` that is a misspelling of one that
    connectors send.
    """
    for path in list_unknown_paths(dataset, records):
        meant = suggest_path(path)
        if meant is not None:
            raise SchemaMismatchError(
                f"dataset {dataset.name!r} (input {dataset.input}): order_by is {path!r}, which no"
                " connector sends.",
                f"Did you mean {meant!r}?",
                dataset=dataset.name,
                column=path,
                argument="order_by",
            )


def list_unknown_paths(dataset: UnboundedDataset, records: Schema) -> list[str]:
    """Return the paths in `order_by` of a table of Debezium's changes that neither its records nor
    any connector is known to have; [] for other datasets.
    """
    following = dataset.following
    if not isinstance(following.changes, DebeziumEnvelope) or not following.order_by:
        return []
    rows = derive_row_schema(dataset, records)
    unknown = []
    for path in following.order_by:
        if path not in rows.names and not is_known_path(path):
            unknown.append(path)
    return unknown
