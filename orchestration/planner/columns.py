"""Refuses records whose columns their stream, or a key that they are compared with, can't take, as far as names and
types are known before anything runs.

The type of a column is known while it is passed on or brought by a dataset, and that of most that are computed
(`resources/sql/types.py`); after a function nothing is. What is not known here is asked of Spark before a
batch is begun (`step/spark_proof/rehearsal.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.extractors import Projection, is_assignable
from dagster_adjunct.assets.sources.changes import derive_row_schema, derive_stored_schema
from dagster_adjunct.assets.sources.opened_stream import check_changes_ordered
from dagster_adjunct.assets.validation.validators import check_validator_columns, is_left_to_spark, iterate_sql_rules
from dagster_adjunct.orchestration.operators.columns import Types
from dagster_adjunct.orchestration.operators.operator import ComparedColumn, Flow, Operator, PlanContext
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, new_stream_defaults
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import AdjunctError, PlanningError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Field, Schema, evolve_schema, incompatible_changes
from dagster_adjunct.resources.schemas.schema import check_key_types as check_key_columns
from dagster_adjunct.resources.sql.checking import (
    check_condition,
    check_expression,
    check_single_record,
    nondeterministic_parts,
)
from dagster_adjunct.resources.sql.parser import (
    multi_record_functions,
    parse_expression,
    unknown_functions,
    window_clauses,
)
from dagster_adjunct.resources.sql.spark_functions import SPARK_FUNCTIONS
from dagster_adjunct.resources.sql.syntax_checks import nearest_names
from dagster_adjunct.resources.sql.types import types_differ

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.operator import Spec
    from dagster_adjunct.orchestration.operators.stream_facts import Catalog, StreamFacts
    from dagster_adjunct.resources.common import CodeLine
    from dagster_adjunct.resources.sql.expression import WindowClause


class OperatorErrors:
    """Errors of operators, collected in their order."""

    def __init__(self) -> None:
        self._errors: list[PlanningError] = []
        self._refused: set[str] = set()

    def stop(self, operator: Operator) -> bool:
        """Whether nothing can be said of an operator, because one before it was refused."""
        if self._refused.isdisjoint(operator.inputs):
            return False
        self._refused.add(operator.id)
        return True

    @contextmanager
    def of(self, operator: Operator) -> Iterator[None]:
        """Keep the PlanningError that is raised within, as one of this operator."""
        try:
            yield
        except PlanningError as error:
            self._errors.append(add_location(error, operator))
            self._refused.add(operator.id)

    def tell(self) -> None:
        """Raise what was collected: the error itself, or one PlanningError that lists them."""
        if not self._errors:
            return
        first = self._errors[0]
        if len(self._errors) == 1:
            raise first
        raise PlanningError(
            f"{len(self._errors)} operators can't work:\n" + "\n".join(f"- {error}" for error in self._errors),
            "Correct each.",
            operator=first.operator,
            column=first.column,
        )


def add_location(error: PlanningError, operator: Operator) -> PlanningError:
    """Return an error of an operator with the line that made it before its text."""
    if operator.declared_at is None or error.declared_at is not None:
        return error
    line = format_place(operator.declared_at)
    told = error.reworded(error.problem, error.next_step, operator=operator.id, declared_at=line)
    told.__cause__ = error.__cause__
    return told


def format_place(place: CodeLine) -> str:
    """Return a line as the user knows it: "visits.py:12", from the working directory where it is below that."""
    file = Path(place.file)
    below = file.is_relative_to(Path.cwd())
    return f"{file.relative_to(Path.cwd()) if below else file}:{place.line}"


def check_datasets(app: Application, catalog: Catalog) -> None:
    """Raise PlanningError for a dataset that could never be made of its input, joined or not: one whose key, columns,
    order, projection or validators name columns that will not be there, or are of another type."""
    for dataset in app.datasets:
        facts = catalog.get(dataset.input) if isinstance(dataset.input, str) else None
        records = source_schema(dataset, catalog)
        try:
            if records is not None:
                _check_columns(dataset, records)
            if facts is not None and dataset.follows_changes:
                check_changes_ordered(dataset, facts.key, facts.partitions, facts.partitioner)
        except AdjunctError as error:
            facts_known = {name: value for name, value in error.facts.items() if name != "operator"}
            place = None if dataset.declared_at is None else format_place(dataset.declared_at)
            told = {**facts_known, "dataset": dataset.name, "declared_at": place}
            raise PlanningError(error.problem, error.next_step, **told) from None


def source_schema(dataset: AdjunctDataset, catalog: Catalog) -> Schema | None:
    """Return the columns of what a dataset is made of, None where its stream declares none."""
    if not isinstance(dataset.input, str):
        return dataset.input.schema
    facts = catalog.get(dataset.input)
    return None if facts is None else facts.schema


def extractor_schema(dataset: AdjunctDataset, records: Schema) -> Schema:
    """Return the columns that a dataset's extractor gets, of records with these."""
    return (
        derive_row_schema(dataset, records) if dataset.follows_changes and isinstance(dataset.input, str) else records
    )


def _check_columns(dataset: AdjunctDataset, records: Schema) -> None:
    if isinstance(dataset.extractor, Projection):
        _check_projection(dataset, dataset.extractor, extractor_schema(dataset, records))
    check_validator_columns(dataset, derive_stored_schema(dataset, records))


def _check_projection(dataset: AdjunctDataset, projection: Projection, rows: Schema) -> None:
    what = f"dataset {dataset.name!r}"
    types: dict[str, str | None] = {field.name: field.type for field in rows.fields}
    declared = {field.name: field.type for field in Schema.from_ddl(projection.columns, what).fields}
    for name, text in dict(projection.select).items():
        kind = _check_expression(what, text, types, f"Correct the projection's column {name!r}.")
        if kind is not None and not is_assignable(kind, declared[name]):
            raise PlanningError(
                f"{what}: the projection declares {name} as {declared[name]}, and {text!r} gives {kind}.",
                f"Declare it as {kind}, or cast it in the expression, where everybody sees it.",
                column=name,
            )
    where = projection.where
    if where is not None and not _names_hidden(where):
        _check_expression(what, where, types, "Correct the projection's where=.")
        check_condition(f"{what}: where=", where, tuple(types), types)


def _check_expression(what: str, text: str, types: dict[str, str | None], next_step: str) -> str | None:
    if _names_hidden(text):
        return None
    check_single_record(what, text)
    return check_expression(what, text, tuple(types), types, side="the record", next_step=next_step)


def _names_hidden(text: str) -> bool:
    """Whether an expression names a column of the record's position, which Spark has there, too."""
    return any(name.name.startswith("__") for name in parse_expression(text).columns)


# Refuses records whose columns the datasets on their stream could not take any more, though the stream itself can.
#
# A stream takes columns that are wider than they were. The key of a dataset never changes its type, nor does what its
# changes are ordered by become anything that has no order of its own, and its extractor declares what it reads: a batch
# that widened one of these would be committed, and the dataset could never advance again.


def check_fed_datasets(app: Application, operator: str, stream: str, stored: Schema, sent: Schema) -> None:
    """Raise PlanningError where a dataset on `stream`, whose columns are `stored`, can't take those that are sent."""
    for dataset in app.datasets:
        if dataset.stream != stream:
            continue
        refused = _dataset_problems(dataset, stored, evolve_schema(stored, sent))
        if refused:
            raise PlanningError(
                f"{operator}: dataset {dataset.name!r} can't take what would be sent to its stream {stream}: "
                f"{'; '.join(refused)}.",
                "Send these columns as they were, as by .with_columns(NAME=\"cast(NAME as TYPE)\"); or feed a dataset "
                "of another name on a stream of its own.",
                operator=operator,
                dataset=dataset.name,
                stream=stream,
            )  # fmt: skip


def _dataset_problems(dataset: AdjunctDataset, before: Schema, after: Schema) -> list[str]:
    try:
        entries = derive_stored_schema(dataset, before)
    except AdjunctError:  # which is wrong already, and told of the dataset itself
        return []
    try:
        return incompatible_changes(entries, derive_stored_schema(dataset, after), dataset.key)
    except AdjunctError as error:
        return [error.problem.rstrip(".")]


_MAX_LISTED = 10


def check_compared_types(operator: str, compared: Iterable[ComparedColumn], *, strict: bool) -> list[str]:
    """Raise PlanningError for the first column that is compared with one of another type; return what is unproven.

    A strict application is refused for that, too.
    """
    unproven = []
    for pair in compared:
        if pair.type is None or pair.other_type is None:
            unproven.append(_describe_unproven(operator, pair))
        elif types_differ(pair.type, pair.other_type):
            raise PlanningError(
                f"{operator}: the stream's {pair.column!r} is {pair.type} and {pair.other} is {pair.other_type}; equal "
                "values of different types lie in different buckets.",
                f'Cast it first: .map("*", "cast({pair.column} as {pair.other_type}) as {pair.column}_key").',
                operator=operator,
                column=pair.column,
            )
    if unproven and strict:
        raise PlanningError(
            f"{unproven[0]} The application is strict.",
            "Have the type known: give the streams columns with types, and cast columns with map() after a function. "
            "Or leave strict out.",
            operator=operator,
        )
    return unproven


def check_declared_types(
    operator: str, declared: Sequence[ComparedColumn], *, columns_known: bool, strict: bool
) -> list[str]:
    """Return what is unproven of columns whose types others declare, in words; a strict application is refused for it.

    Where not even the columns are known, that is noted already, where it begins.
    """
    unknown = [pair for pair in declared if pair.type is None]
    if not unknown or not (strict or columns_known):
        return []
    shown = abbreviate([f"{pair.column!r} (to be {pair.other_type})" for pair in unknown])
    what = "the type of {} is" if len(unknown) == 1 else "the types of {} are"
    problem = (
        f"{operator}: {what.format(f'{shown}, as {unknown[0].other} declares,')} not known before it runs, and "
        "unproven."
    )
    if not strict:
        return [problem]
    column = unknown[0].column
    raise PlanningError(
        f"{problem} The application is strict.",
        f'Have the type known: .with_columns({column}="cast({column} as {unknown[0].other_type})"), or a function with '
        "schema=. Or leave strict out.",
        operator=operator,
        column=column,
    )


def abbreviate(names: Sequence[str]) -> str:
    """Return names in a row, the first of many."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"{', '.join(names[:_MAX_LISTED])}{more}"


def _describe_unproven(operator: str, pair: ComparedColumn) -> str:
    if pair.type is None and pair.other_type is None:
        what = f"the types of the stream's {pair.column!r} and of {pair.other} are"
    elif pair.type is None:
        what = f"the type of the stream's {pair.column!r}, to be {pair.other_type} as {pair.other} is, is"
    else:
        what = f"the type of {pair.other}, to be {pair.type} as the stream's {pair.column!r} is, is"
    return f"{operator}: {what} not known before it runs, and unproven."


# Windows in expressions, `over (partition by …)`: records have to lie together for them, and they see one batch only.
#
# Spark would move records that lie otherwise, by itself and into other partitions: the plan would not list it, and what
# follows would not find them where they are planned to be.


def check_sql_windows(operator: Operator, arriving: Sequence[Flow]) -> None:
    """Raise PlanningError for a window over records that do not lie together where they arrive."""
    if not arriving:  # an input, whose event time takes no other records at all
        return
    for text in operator.spec.sql:
        for window in window_clauses(text):
            (flow,) = arriving
            shared, lie_by = ({name.lower() for name in names} for names in (window.columns, flow.partitioned_by))
            if not lie_by or not lie_by <= shared or flow.partitioner != SPARK:
                raise _window_error(operator.id, text, window, flow)


def _window_error(operator: str, text: str, window: WindowClause, flow: Flow) -> PlanningError:
    taken = f"the records of one ({window.partition_by})" if window.partition_by else "all records"
    lie = f"lie by ({', '.join(flow.partitioned_by)}) with {flow.partitioner}"
    if not flow.partitioned_by:
        lie = f"lie as {flow.lost_at} leaves them" if flow.lost_at else "lie by no key"
    step = "Partition the window by columns, over (partition by a, b), and write .partition_by(…) with these before it."
    if window.columns:
        quoted = ", ".join(f'"{name}"' for name in window.columns)
        step = f"Write .partition_by({quoted}) before it."
    return PlanningError(
        f"{operator}: {text!r} takes {taken} together, and they {lie}: Spark would move them, which no plan lists.",
        step,
        operator=operator,
    )


def note_batch_windows(app: Application) -> tuple[str, ...]:
    """Return a note for each operator with a window, which is over the records of one batch.

    PlanningError instead, where the application is strict.
    """
    notes = []
    for operator in app.operators:
        texts = [text for text in operator.spec.sql if window_clauses(text)]
        if not texts:
            continue
        called = ", ".join(
            dict.fromkeys(f"{name}()" for text in texts for name, over in multi_record_functions(text) if over)
        )
        problem = (
            f"{operator.id}: {called} over (…) is over the records of one batch: how the input is cut into batches "
            "decides what it gives."
        )
        if app.strict:
            error = PlanningError(
                f"{problem} The application is strict.",
                "Use a window over time, stream.window(…), or a local table, which go on from batch to batch. Or leave "
                "strict out.",
                operator=operator.id,
            )
            raise add_location(error, operator)
        notes.append(problem)
    return tuple(notes)


Arriving = tuple[Flow, ...]
"""The records of each input of an operator."""
Repartition = Callable[[Operator, Arriving], Arriving]


@dataclass(frozen=True, slots=True)
class Flows:
    """For every operator the records that it works on (`arriving`, one for each input) and those `after` it."""

    arriving: dict[str, Arriving]
    after: dict[str, Flow]

    def before(self, operator: str) -> Flow:
        """Return the records that an operator of one input works on."""
        (flow,) = self.arriving[operator]
        return flow

    def merges_streams(self, operator: Operator) -> bool:
        """Whether the operator brings streams together that have partitions of their own."""
        return operator.spec.role is None and self.after[operator.id].stream == operator.id


def trace_flows(
    app: Application,
    catalog: Catalog,
    repartition: Repartition | None = None,
    counts: Mapping[str, int] | None = None,
    *,
    earlier: Flows | None = None,
) -> Flows:
    """Return the flows of all operators; `repartition` may put exchanges before one, `counts` are those decided.

    `earlier` are the flows of the same application and counts: where the same arrives as there, nothing is worked out
    again.
    Raises PlanningError for a stream that is not there, and for columns that are known to be missing or double.
    """
    flows, refusals = Flows({}, {}), OperatorErrors()
    for operator in app.operators:
        if refusals.stop(operator):
            continue
        with refusals.of(operator):
            arriving = tuple(flows.after[source] for source in operator.inputs)
            moved = arriving if repartition is None else repartition(operator, arriving)
            flows.arriving[operator.id] = moved
            if earlier is not None and moved == arriving and moved == earlier.arriving[operator.id]:
                flows.after[operator.id] = earlier.after[operator.id]
                continue
            for text in operator.spec.sql:
                check_single_record(operator.id, text)
            onward = arriving if operator.spec.is_side_output else moved
            flows.after[operator.id] = operator.spec.flow(PlanContext(operator.id, app, catalog, counts), onward)
            check_sql_windows(operator, onward)
    refusals.tell()
    return flows


def check_types(app: Application, catalog: Catalog) -> tuple[tuple[str, ...], dict[str, Types]]:
    """Raise PlanningError for outputs that would not be the columns that their streams have, or more, or wider, and for
    joins of keys of different types; return what of types is unproven, in words, and the types after each operator."""
    after: dict[str, Types] = {}
    unproven: list[str] = []
    refusals = OperatorErrors()
    for operator in app.operators:
        if refusals.stop(operator):
            continue
        with refusals.of(operator):
            arriving = [after[source] for source in operator.inputs]
            target = operator.spec.target(app)
            facts = None if target is None else catalog.get(target.name)  # of a stream: no other name holds a dot
            for types in map(operator.spec.written_types, arriving):
                if types is None or target is None:
                    continue
                if facts is not None:
                    _check_existing_stream(app, operator.id, facts, types)
                elif operator.spec.role == "output" and new_stream_defaults(catalog, target.name).typed:
                    _check_new_stream(operator.id, target.name, app.outputs[target.name].key, types)
                    unproven += _note_unknown_types(operator.id, target.name, types)
            context = PlanContext(operator.id, app, catalog)
            declared = [
                *operator.spec.declared_types(context, arriving),
                *_compare_stored_types(facts, operator.spec, arriving),
            ]
            known = None not in arriving
            unproven += check_declared_types(operator.id, declared, columns_known=known, strict=app.strict)
            after[operator.id] = operator.spec.types(context, arriving)
            unproven += check_compared_types(
                operator.id, operator.spec.compared_columns(context, arriving), strict=app.strict
            )
    refusals.tell()
    return tuple(unproven), after


def _compare_stored_types(facts: StreamFacts | None, spec: Spec, arriving: Sequence[Types]) -> list[ComparedColumn]:
    """Return the columns that are written to a stream that exists, with the types that it has."""
    if facts is None or facts.schema is None or not facts.evolves:
        return []
    (types,) = map(spec.written_types, arriving)
    stored = {field.name: field.type for field in facts.schema.fields}
    return [
        ComparedColumn(name, None if types is None else types[name], f"stream {facts.name}", stored[name])
        for name in (stored if types is None else types)
        if name in stored
    ]


def _check_new_stream(operator: str, stream: str, key: Sequence[str], types: dict[str, str | None]) -> None:
    """Refuse columns that a stream can't be made with; one of an unknown type may be any."""
    try:
        schema = Schema(tuple(Field(name, kind or "string") for name, kind in types.items()))
        check_key_columns(schema, key, "there")
    except SchemaMismatchError as error:
        raise _column_error(operator, stream, error) from error


def _note_unknown_types(operator: str, stream: str, types: dict[str, str | None]) -> list[str]:
    unknown = [repr(name) for name, kind in types.items() if kind is None]
    if not unknown:
        return []
    return [
        f"{operator}: whether stream {stream} can hold {abbreviate(unknown)} is unproven: no type is known of it yet."
    ]


def _check_existing_stream(app: Application, operator: str, facts: StreamFacts, types: dict[str, str | None]) -> None:
    if facts.schema is None or not facts.evolves:
        return
    stored = {field.name: field.type for field in facts.schema.fields}
    try:
        declared = Schema(
            tuple(Field(name, _none_if_void(kind) or stored.get(name, "string")) for name, kind in types.items())
        )
    except SchemaMismatchError as error:
        raise _column_error(operator, facts.name, error) from error
    refused = incompatible_changes(facts.schema, declared, facts.key)
    if refused:
        raise PlanningError(
            f"{operator}: stream {facts.name} has other columns than would be sent to it: {'; '.join(refused)}. "
            "Columns can only be added, or widened.",
            "Send these columns as they were (one that is not needed any more can be null: cast(null as …) as …), or "
            "send to a stream of another name, or begin it anew: "
            f"adjunct stream delete {split_stream_name(facts.name)[1]} --reason ….",
            stream=facts.name,
            operator=operator,
        )
    check_fed_datasets(app, operator, facts.name, facts.schema, declared)


def _none_if_void(kind: str | None) -> str | None:
    """Return a type, None as well for that of null, which every column of a stream can hold."""
    return None if kind == "void" else kind


def _column_error(operator: str, stream: str, error: SchemaMismatchError) -> PlanningError:
    return PlanningError(
        f"{operator}: stream {stream} can't take what would be sent to it: {error.problem}",
        error.next_step,
        stream=stream,
        operator=operator,
        column=error.column,
    )


_MAX_TEXT = 60


def note_unproven_columns(app: Application, flows: Flows) -> tuple[str, ...]:
    """Return the note, () where everything is proven. What only follows from what it names is not in it."""
    unproven: list[str] = []
    for operator in app.operators:
        unproven += _describe_unread(operator.id, operator.spec.sql)
        known_before = all(flows.after[source].columns is not None for source in operator.inputs)
        if flows.after[operator.id].columns is None and known_before:
            nameless = [text for text in operator.spec.sql if _gives_unknown(text)]
            why = f"{_short(nameless[0])} has no name that can be read off" if nameless else operator.spec.summary()
            unproven.append(f"the columns after {operator.id} ({why})")
    return _join_note("Unproven, asked of Spark over no records before a batch begins", unproven)


def note_unproven_datasets(app: Application, catalog: Catalog) -> tuple[str, ...]:
    """Return the note on what datasets say in SQL that is not read here, () where everything is."""
    unproven: list[str] = []
    for dataset in app.datasets:
        records = source_schema(dataset, catalog)
        rules = list(iterate_sql_rules(dataset))
        for name, text, is_select in rules:
            where = f"validator {name!r} of dataset {dataset.name!r}"
            if is_select and (records is None or is_left_to_spark(text)):
                unproven.append(f"{where}: {_short(text)} (a SELECT is left to Spark)")
            else:
                unproven += _describe_unread(where, [text], is_select=is_select)
        projection = dataset.extractor
        if isinstance(projection, Projection):
            texts = [*dict(projection.select).values(), projection.where or ""]
            unproven += _describe_unread(f"the projection of dataset {dataset.name!r}", list(filter(None, texts)))
        if records is None and (rules or isinstance(projection, Projection)):
            unproven.append(f"the columns of dataset {dataset.name!r} ({dataset.input} declares none)")
    return _join_note("Unproven, asked of Spark when the dataset is advanced", unproven)


def _describe_unread(where: str, texts: Sequence[str], *, is_select: bool = False) -> list[str]:
    """Return what can't be read of these expressions, and which functions in them are none of Spark's."""
    unread = [
        f"{where}: {_short(text)} ({parse_expression(text).unread})"
        for text in texts
        if parse_expression(text).unread and not is_select
    ]
    for name in dict.fromkeys(name for text in texts for name in unknown_functions(text)):
        like = nearest_names(name, SPARK_FUNCTIONS, 1)
        unread.append(f"{where}: {name}() is none of Spark's functions" + (f" ({like[0]}?)" if like else ""))
    return unread


def _join_note(what: str, unproven: Sequence[str]) -> tuple[str, ...]:
    """Return a note of what is unproven, () of nothing; of many things the first are named, and the others counted."""
    more = f"; and {len(unproven) - _MAX_LISTED} more" if len(unproven) > _MAX_LISTED else ""
    return (f"{what}: {'; '.join(unproven[:_MAX_LISTED])}{more}.",) if unproven else ()


def _gives_unknown(text: str) -> bool:
    read = parse_expression(text)
    return not read.star and read.name is None


def _short(text: str) -> str:
    one_line = " ".join(text.split())
    return repr(one_line if len(one_line) <= _MAX_TEXT else f"{one_line[:_MAX_TEXT]}…")


def note_nondeterministic_results(app: Application, types: Mapping[str, Types]) -> tuple[str, ...]:
    """Return a note for each operator whose expressions are not the same in a repeated batch; `types` are those after
    each operator.

    PlanningError instead, where the application is strict. What functions of the user's do can't be seen.
    """
    notes = []
    for operator in app.operators:
        arriving = types.get((operator.inputs or (operator.id,))[0]) or {}
        changing = list(
            dict.fromkeys(name for text in operator.spec.sql for name in nondeterministic_parts(text, arriving))
        )
        if not changing:
            continue
        problem = (
            f"{operator.id} gives other records when a batch is repeated after a crash, because of "
            f"{', '.join(changing)}: an output stream that has the first ones refuses the others "
            "(ProducerConflictError), and a remote table gets both."
        )
        if app.strict:
            error = PlanningError(
                f"{problem} The application is strict.",
                "Take the value from the record, such as the time that its producer gave it.",
                operator=operator.id,
            )
            raise add_location(error, operator)
        notes.append(problem)
    return tuple(notes)
