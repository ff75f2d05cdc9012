"""Turns Spark's error for a job that failed in user code into an error with operator, line and a sample record."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.assets.declaration.sources import OwnedBy
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.columns import function_label
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.operators.stream_facts import ColumnSources, LineageContext, LineageNode
from dagster_adjunct.orchestration.step.context import StepContext
from dagster_adjunct.resources.common import CodeLine, split_stream_name
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ManifestMismatchError,
    OperatorFailedError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.errors import find_adjunct_error, first_message_line
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION
from dagster_adjunct.resources.user_code import failing_line_in_text, operator_failed_error, truncate_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.step.batch_outputs import BatchOutputs


# How Spark quotes the expression that failed: its text, cut at both ends, then a line of carets under the part.
_QUOTED = re.compile(
    r"^== SQL[^\n]*==\n(?P<text>.*?(?P<line>[^\n]*))\n(?P<before> *)(?P<part>\^+)[ ^]*$", re.MULTILINE | re.DOTALL
)
_CONDITION = re.compile(r"\[(?P<condition>[A-Z][A-Z0-9_.]+)\]")
_DATA = re.compile(r"\[(?:MALFORMED_RECORD_IN_PARSING|MALFORMED_CSV_RECORD|MALFORMED_PROTOBUF_MESSAGE)[A-Z_.]*\]")
_RAISED = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*): ?(?P<said>.*)$")


@dataclass(frozen=True, slots=True)
class Failure:
    """What Spark reported of an expression or function that failed on a record.

    `kind` is the class of a Python error or the name of Spark's condition, `message` its text. `quoted` is the
    expression as Spark quotes it, `part` the part that failed, and `place` the line of a Python function.
    """

    kind: str
    message: str
    quoted: str | None = None
    part: str | None = None
    place: CodeLine | None = None

    @property
    def of_expression(self) -> bool:
        """Whether an expression failed in Spark itself: the names of its conditions are in capitals."""
        return self.kind.isupper()

    def problem(self, what: str, *, told: bool) -> str:
        """Return the failure as a sentence; the error's own text is included only if it may be `told`."""
        if self.part is not None:
            return f"{what}: {truncate_text(self.part)}: {self.message if told else self.kind}"
        if f"[{self.kind}]" in self.message:  # Spark's own text, which ends with what to do
            return f"{what}: {self.message if told else self.kind}"
        return f"{what} raised {self.kind}{f': {truncate_text(self.message)}' if told and self.message else ''}"


def parse_failure(error: Exception) -> Failure | None:
    """Return the failure of user code that a Spark error reports; None for any other error."""
    text = str(error)
    if type(error).__name__ == "PythonException" or "An exception was thrown from the Python worker" in text:
        last = [line for line in text.strip().splitlines() if _RAISED.match(line)]
        raised = _RAISED.match(last[-1]) if last else None
        kind = raised["kind"].rpartition(".")[2] if raised else "an error"
        return Failure(kind, raised["said"] if raised else "", place=failing_line_in_text(text))
    quoted, condition = _QUOTED.search(text), _CONDITION.search(text)
    if condition is None or (quoted is None and "Exception" not in type(error).__name__ and not _is_data_error(text)):
        return None
    bare = type(error).__name__ in ("SparkException", "Py4JJavaError", "AnalysisException")
    if quoted is None and bare and not _is_data_error(text):
        return None
    message = first_message_line(error).partition(" SQLSTATE")[0].partition(' If necessary set "spark.sql')[0]
    message = message.removeprefix("org.apache.spark.SparkException: ")
    if quoted is None:
        return Failure(condition["condition"], message)
    begin = len(quoted["before"])
    part = quoted["line"][begin : begin + len(quoted["part"])]
    return Failure(condition["condition"], message, quoted["text"].strip().strip("."), part)


def _is_data_error(text: str) -> bool:
    """Return whether a condition is about the data; Spark reports these without the class of the exception."""
    return _DATA.search(text) is not None


def find_suspects(before: Sequence[Operator], failure: Failure) -> list[Operator]:
    """Return the operators that may have failed, the likeliest of those `before`; [] if it may be any."""
    if failure.quoted is not None:
        for wanted in (failure.quoted, failure.part or ""):
            saying = [candidate for candidate in before if any(wanted in text for text in _texts(candidate.spec))]
            if saying:
                return saying
        return []
    if failure.of_expression:
        return []
    calling = [candidate for candidate in before if any(True for _ in _functions(candidate.spec))]
    place = failure.place
    if place is not None:
        there = [
            candidate
            for candidate in calling
            if any(place.line in _lines(f, place.file) for f in _functions(candidate.spec))
        ]
        if there:
            return there
    return calling


def describe_operator(operator: Operator, failure: Failure) -> str:
    """Return what failed in an operator, as plans display it."""
    functions = list(_functions(operator.spec))
    return (
        operator.id if failure.part is not None or not functions else f"{operator.id}: {function_label(functions[0])}"
    )


def has_user_code(operator: Operator) -> bool:
    """Return whether an operator has expressions or functions of the user."""
    return bool(operator.spec.sql) or any(True for _ in _functions(operator.spec))


def iter_upstream(app: Application, operator: str) -> Iterator[Operator]:
    waiting, seen = [operator], set()
    while waiting:
        here = app.operator(waiting.pop())
        if here.id in seen:
            continue
        seen.add(here.id)
        yield here
        if here.id == operator or here.spec.role != "output":
            waiting.extend(here.inputs)


def _texts(value: Any) -> Iterator[str]:
    for part in _parts(value):
        if isinstance(part, str):
            yield part


def _functions(value: Any) -> Iterator[Callable[..., Any]]:
    for part in _parts(value):
        if callable(part) and not isinstance(part, type):
            yield part


def _parts(value: Any) -> Iterator[Any]:
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _parts(getattr(value, field.name))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for element in value:
            yield from _parts(element)
    else:
        yield value


def _lines(function: Callable[..., Any], file: str) -> set[int]:
    """Return the lines of a function in this file, including functions defined inside it."""
    inner = getattr(function, "__wrapped__", getattr(function, "func", function))
    code = getattr(inner, "__code__", None) or getattr(type(inner).__dict__.get("__call__"), "__code__", None)
    lines: set[int] = set()
    waiting = [code] if isinstance(code, CodeType) else []
    while waiting:
        here = waiting.pop()
        if here.co_filename == file:
            lines |= {line for _, _, line in here.co_lines() if line is not None}
        waiting.extend(constant for constant in here.co_consts if isinstance(constant, CodeType))
    return lines


T = TypeVar("T")

SEARCH_SECONDS = 60.0
_MAX_POSITIONS = 2_000_000


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A record that an operator failed on, with its position."""

    partition: int
    offset: str
    record: dict[str, Any]


def find_sample_record(
    arriving: DataFrame, made: Callable[[DataFrame], DataFrame], same: Callable[[Exception], bool]
) -> SampleRecord | None:
    """Return a record on which `made` fails with the `same` error; None if none is found.

    Bisects the records, computing each half anew: a batch of 100,000 records takes some twenty small jobs, for at most
    a minute.
    """
    return _run_with_timeout(arriving, lambda ends: _bisect_records(arriving, made, same, ends))


def fails_alike(
    arriving: DataFrame, made: Callable[[DataFrame], DataFrame], same: Callable[[Exception], bool], seconds: float
) -> bool:
    """Return whether `made` of these records fails with the `same` error within so many seconds."""
    return bool(_run_with_timeout(arriving, lambda ends: _fails(made(arriving), same), seconds))


def _run_with_timeout(arriving: DataFrame, look: Callable[[float], T], seconds: float = SEARCH_SECONDS) -> T | None:
    """Return the result of `look`; None if it fails or takes too long."""
    session = arriving.sparkSession
    tag = f"adjunct-sample-{uuid.uuid4().hex}"
    ends = time.monotonic() + seconds
    timer = threading.Timer(seconds, session.interruptTag, [tag])
    session.addTag(tag)
    timer.start()
    try:
        return look(ends)
    except Exception:  # noqa: BLE001 - what failed is told without a sample then
        return None
    finally:
        timer.cancel()
        session.removeTag(tag)


def _bisect_records(
    arriving: DataFrame, made: Callable[[DataFrame], DataFrame], same: Callable[[Exception], bool], ends: float
) -> SampleRecord | None:
    places = [
        (row[0], row[1]) for row in arriving.select(PARTITION, OFFSET).distinct().limit(_MAX_POSITIONS + 1).collect()
    ]
    if len(places) > _MAX_POSITIONS:
        return None
    places.sort()
    while len(places) > 1:
        if time.monotonic() > ends:
            return None
        half = places[: len(places) // 2]
        places = half if _fails(made(_filter_range(arriving, half)), same) else places[len(half) :]
    if not places or not _fails(made(_filter_range(arriving, places)), same):
        return None
    row = _filter_range(arriving, places).first()
    return None if row is None else SampleRecord(places[0][0], str(places[0][1]), row.asDict())


def _filter_range(frame: DataFrame, places: Sequence[tuple[int, int]]) -> DataFrame:
    from pyspark.sql import functions as F

    (first, low), (last, high) = places[0], places[-1]
    partition, offset = F.col(PARTITION), F.col(OFFSET)
    return frame.where(
        ((partition > first) | ((partition == first) & (offset >= low)))
        & ((partition < last) | ((partition == last) & (offset <= high)))
    )


def _fails(frame: DataFrame, same: Callable[[Exception], bool]) -> bool:
    try:
        frame.write.format("noop").mode("overwrite").save()
    except Exception as error:
        if same(error):
            return True
        raise
    return False


def sensitive_columns(context: StepContext, operator: str, columns: Iterable[str]) -> frozenset[str]:
    """Return which columns of an operator's records hold values that a schema or a dataset marks as sensitive.

    If anything is sensitive, a column of unknown origin counts as sensitive too.
    """
    sensitive = _sensitive_columns_of_run(context)
    if not sensitive:
        return frozenset()
    names = {name for _, name in sensitive}
    made = _trace_columns(context, operator)
    return frozenset(
        name
        for name in columns
        if name.lower() in names
        or not made.get(name)
        or any((node, column.lower()) in sensitive for node, column in made[name])
    )


def sensitive_entries(context: StepContext, name: str) -> frozenset[str]:
    """Return the columns of a dataset that it, or the schema of its stream, marks as sensitive."""
    dataset = context.app.dataset(name)
    own = frozenset(column.lower() for column in dataset.sensitive)
    if isinstance(dataset.input, OwnedBy):
        return own | _sensitive_names(dataset.input.schema)
    return own | (_sensitive_columns_of_stream(context, dataset.stream) if dataset.stream else frozenset())


def _sensitive_columns_of_run(context: StepContext) -> set[tuple[LineageNode, str]]:
    """Return the columns marked as sensitive; looked up once a run, because every operator of a batch asks."""
    if not context.declared_sensitive:
        context.declared_sensitive.append(_find_sensitive_columns(context))
    return context.declared_sensitive[0]


def _find_sensitive_columns(context: StepContext) -> set[tuple[LineageNode, str]]:
    app = context.app
    flagged = {
        (LineageNode("dataset", dataset.name), name)
        for dataset in app.datasets
        for name in sensitive_entries(context, dataset.name)
    }
    for stream in app.inputs:
        flagged |= {(LineageNode("stream", stream), name) for name in _sensitive_columns_of_stream(context, stream)}
    for operator in app.operators:  # results of functions: matched by column name
        schemas = operator.spec.declared_schemas
        flagged |= {
            (LineageNode("stream", operator.id), name) for schema in schemas for name in _sensitive_names(schema)
        }
    return flagged


def _sensitive_columns_of_stream(context: StepContext, stream: str) -> frozenset[str]:
    known = context.sensitive_of_streams
    if stream not in known:
        system, name = split_stream_name(stream)
        try:
            known[stream] = _sensitive_names(context.systems[system].info(name).schema)
        except (StreamNotFoundError, KeyError):  # a dataset of a deleted stream
            known[stream] = frozenset()
    return known[stream]


def _sensitive_names(schema: Schema | None) -> frozenset[str]:
    return frozenset(field.name.lower() for field in (schema.fields if schema else ()) if field.sensitive)


def _trace_columns(context: StepContext, wanted: str) -> ColumnSources:
    planned = {operator.id: operator.columns for operator in context.plan.operators}
    made: dict[str, ColumnSources] = {}
    for operator in context.app.operators:
        before = tuple(planned[source] for source in operator.inputs)
        lineage = LineageContext(context.app, before, planned[operator.id])
        made[operator.id] = operator.spec.column_sources(lineage, [made[source] for source in operator.inputs])
        if operator.id == wanted:
            return made[wanted]
    return {}


def explain_failure(batch: BatchOutputs, operator: str, error: Exception) -> OperatorFailedError | None:
    """Return the error that says what failed in a job of this operator; None if no user code failed.

    Finding the operator and the record runs small jobs, for at most a minute each. If columns are sensitive, their
    values, the text of the failing code's error and the error itself are left out.
    """
    ours = find_adjunct_error(error)
    if isinstance(ours, ManifestMismatchError) and ours.partition_by is not None:
        return _explain_broken_promise(batch, operator, ours)
    if ours is not None or type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    failure = parse_failure(error)
    if failure is None:
        return None
    before = list(iter_upstream(batch.app, operator))
    blamed = find_suspects(before, failure)
    one = (
        blamed[0]
        if len(blamed) == 1
        else _find_failing_operator(batch, blamed or before, failure)
        if failure.of_expression
        else None
    )
    # Unless one operator is known, Spark's text may quote a column of any of them.
    about_all = blamed if len(blamed) == 1 else before
    hidden = frozenset[str]().union(*(batch.sensitive(suspect.id) for suspect in about_all))
    if one is not None:
        told = _explain_with_sample(batch, one, failure, hidden)
    else:
        names = " or ".join(suspect.id for suspect in blamed) or operator
        about: dict[str, Any] = {"operator": blamed[0].id if blamed else operator}
        told = operator_failed_error(failure.problem(names, told=not hidden), failure.place, None, hidden, **about)
    told.__cause__ = None if hidden else error
    return told


def _explain_broken_promise(batch: BatchOutputs, operator: str, error: AdjunctError) -> OperatorFailedError | None:
    """Return the error that names the functions with keeps_partitioning=True; None if there is none."""
    promising = [one for one in iter_upstream(batch.app, operator) if one.spec.keeps_partitioning]
    if not promising:
        return None
    names, place = " or ".join(sorted(one.id for one in promising)), promising[0].declared_at
    line = "" if place is None else f" ({place.describe()})"
    told = OperatorFailedError(
        f"{names}{line} breaks its promise keeps_partitioning=True: {error.problem}",
        "Nothing of it was committed. Remove keeps_partitioning=True, and use partition_by(…) after the function.",
        operator=promising[0].id,
        file=None if place is None else place.file,
        line=None if place is None else place.line,
    )
    told.__cause__ = error
    return told


def _find_failing_operator(batch: BatchOutputs, likely: list[Operator], failure: Failure) -> Operator | None:
    """Return the first of these operators that fails alike when run alone over its records.

    Spark quotes the failed expression only if it was not rewritten.
    """
    ends = time.monotonic() + SEARCH_SECONDS
    wanted = {suspect.id for suspect in likely}
    for candidate in batch.app.operators:  # in this order the inputs of an operator do not fail
        if candidate.id in wanted and len(candidate.inputs) == 1 and has_user_code(candidate):
            (arriving,) = batch.arrived[candidate.id]
            left = ends - time.monotonic()
            if left <= 0:
                return None
            if fails_alike(
                arriving,
                _probe_operator(batch, candidate),
                lambda other: _is_alike(parse_failure(other), failure),
                left,
            ):
                return candidate
    return None


def _probe_operator(batch: BatchOutputs, operator: Operator) -> Callable[[DataFrame], DataFrame]:
    """Return a function that applies an operator to some of its records."""

    def made(frame: DataFrame) -> DataFrame:
        probe: Any = _Probe(batch)
        leaving = operator.spec.compile(operator.id, [frame], probe)
        return leaving if probe.sent is None else probe.sent

    return made


def _is_alike(other: Failure | None, failure: Failure) -> bool:
    if other is None or other.kind != failure.kind:
        return False
    return None in (other.part, failure.part) or other.part == failure.part


def _explain_with_sample(
    batch: BatchOutputs, blamed: Operator, failure: Failure, hidden: frozenset[str]
) -> OperatorFailedError:
    problem = failure.problem(describe_operator(blamed, failure), told=not hidden)
    place, about = failure.place or blamed.declared_at, dict[str, Any](operator=blamed.id)
    arriving = batch.arrived[blamed.id]
    if len(arriving) != 1:
        return operator_failed_error(problem, place, None, hidden, **about)

    seen = [failure]

    def same(other: Exception) -> bool:
        again = parse_failure(other)
        if again is None or not _is_alike(again, failure):
            return False
        seen.append(again)  # the text may quote a value: keep the one of the sample
        return True

    sample = find_sample_record(arriving[0], _probe_operator(batch, blamed), same)
    if sample is None:
        return operator_failed_error(problem, place, None, hidden, **about)
    (source,) = blamed.inputs
    return operator_failed_error(
        seen[-1].problem(describe_operator(blamed, failure), told=not hidden),
        place,
        sample.record,
        hidden,
        stream=batch.stream_of(source),
        partition=sample.partition,
        offset=sample.offset,
        **about,
    )


# Methods of a batch without side effects.
_PROBE_ALLOWED = frozenset(
    {
        "app",
        "call",
        "entries",
        "required_partitioning",
        "partitions_at",
        "sensitive",
        "stream_of",
        "system_of",
        "tasks",
        "gather_small",
    }
)


class _Probe:
    """A batch context that compiles an operator again over some of its records: nothing is written or stored.

    Whatever else an operator asks of it fails, so that no function gets records twice and no table is queried again.
    The failure is then reported without a sample.
    """

    def __init__(self, batch: BatchOutputs) -> None:
        self._batch = batch
        self.sent: DataFrame | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in _PROBE_ALLOWED:
            raise AttributeError(f"{name} is not available while searching for a failed record")
        return getattr(self._batch, name)

    def has_consumers(self, operator: str) -> bool:
        return False

    def count_matches(self, operator: str, dataset: str, frame: DataFrame) -> DataFrame:
        return frame

    def materialize(self, operator: str, frame: DataFrame) -> DataFrame:
        return frame

    def send(self, operator: str, frame: DataFrame, *given: object, **more: object) -> None:
        self.sent = frame

    write = write_local = send_dead_letters = send
