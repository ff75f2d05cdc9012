"""Turns Spark's error for a job that failed in user code into an error with operator, line and a
sample record.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dagster_adjunct.assets.declaration.dataset import OwnedBy
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.columns import (
    DataFrameFunction,
    first_duplicate,
    function_label,
    list_hidden_columns,
)
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode, Sources
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.code_lines import CodeLine
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.tasks import find_adjunct_error, first_message_line
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, StreamSystem
from dagster_adjunct.resources.user_code import (
    failing_line,
    failing_line_in_text,
    function_failed_error,
    operator_failed_error,
    truncate_text,
)

if TYPE_CHECKING:
    from pyspark.errors import AnalysisException
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.step.batch import BatchContext
    from dagster_adjunct.orchestration.step.context import StepContext


T = TypeVar("T")
# How Spark quotes the expression that failed: its text, cut at both ends, then a line of carets
# under the part.
_QUOTED = re.compile(
    r"^== SQL[^\n]*==\n(?P<text>.*?(?P<line>[^\n]*))\n(?P<before> *)(?P<part>\^+)[ ^]*$",
    re.MULTILINE | re.DOTALL,
)
_CONDITION = re.compile(r"\[(?P<condition>[A-Z][A-Z0-9_.]+)\]")
_DATA = re.compile(
    r"\[(?:MALFORMED_RECORD_IN_PARSING|MALFORMED_CSV_RECORD|MALFORMED_PROTOBUF_MESSAGE)[A-Z_.]*\]"
)
_RAISED = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*): ?(?P<said>.*)$")


@dataclass(frozen=True, slots=True)
class Failure:
    """What Spark reported of an expression or function that failed on a record.

    `kind` is the class of a Python error or the name of Spark's condition, `message` its text.
    `quoted` is the expression as Spark quotes it, `part` the part that failed, and `place` the line
    of a Python function.
    """

    kind: str
    message: str
    quoted: str | None = None
    part: str | None = None
    place: CodeLine | None = None

    @property
    def of_expression(self) -> bool:
        """Whether an expression failed in Spark itself: the names of its conditions are in
        capitals.
        """
        return self.kind.isupper()

    def problem(self, what: str, *, show_text: bool) -> str:
        """Return the failure as a sentence; with the error's own text only if `show_text`."""
        if self.part is not None:
            return f"{what}: {truncate_text(self.part)}: {self.message if show_text else self.kind}"
        if f"[{self.kind}]" in self.message:  # Spark's own text, which ends with what to do
            return f"{what}: {self.message if show_text else self.kind}"
        if show_text and self.message:
            return f"{what} raised {self.kind}: {truncate_text(self.message)}"
        return f"{what} raised {self.kind}"


def parse_failure(error: Exception) -> Failure | None:
    """Return the failure of user code that a Spark error reports; None for any other error."""
    text = str(error)
    if (
        type(error).__name__ == "PythonException"
        or "An exception was thrown from the Python worker" in text
    ):
        last = [line for line in text.strip().splitlines() if _RAISED.match(line)]
        raised = _RAISED.match(last[-1]) if last else None
        kind = raised["kind"].rpartition(".")[2] if raised else "an error"
        return Failure(kind, raised["said"] if raised else "", place=failing_line_in_text(text))
    quoted, condition = _QUOTED.search(text), _CONDITION.search(text)
    if condition is None:
        return None
    if quoted is None and not _DATA.search(
        text
    ):  # Spark reports conditions of the data without the exception's class
        name = type(error).__name__
        if "Exception" not in name or name in (
            "SparkException",
            "Py4JJavaError",
            "AnalysisException",
        ):
            return None
    message = (
        first_message_line(error)
        .partition(" SQLSTATE")[0]
        .partition(' If necessary set "spark.sql')[0]
    )
    message = message.removeprefix("org.apache.spark.SparkException: ")
    if quoted is None:
        return Failure(condition["condition"], message)
    begin = len(quoted["before"])
    part = quoted["line"][begin : begin + len(quoted["part"])]
    return Failure(condition["condition"], message, quoted["text"].strip().strip("."), part)


def _find_suspects(before: Sequence[Operator], failure: Failure) -> list[Operator]:
    """Return those of the operators `before` that most likely failed; [] if it may be any of
    them.
    """
    if failure.quoted is not None:
        for wanted in (failure.quoted, failure.part or ""):
            quoting = [
                candidate
                for candidate in before
                if any(
                    wanted in part for part in _iter_parts(candidate.spec) if isinstance(part, str)
                )
            ]
            if quoting:
                return quoting
    if failure.of_expression:
        return []
    calling = [candidate for candidate in before if _functions(candidate.spec)]
    at_line = []
    if (place := failure.place) is not None:
        at_line = [
            one
            for one in calling
            if any(place.line in _lines(f, place.file) for f in _functions(one.spec))
        ]
    return at_line or calling


def iter_upstream(app: Application, operator: str) -> Iterator[Operator]:
    """Yield this operator and those before it, back to the inputs and outputs that its records
    are read from.
    """
    waiting, seen = [operator], set()
    while waiting:
        here = app.operator(waiting.pop())
        if here.id in seen:
            continue
        seen.add(here.id)
        yield here
        if here.id == operator or here.spec.role != "output":
            waiting.extend(here.inputs)


def _functions(spec: Any) -> list[Callable[..., Any]]:
    return [part for part in _iter_parts(spec) if callable(part) and not isinstance(part, type)]


def _iter_parts(value: Any) -> Iterator[Any]:
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _iter_parts(getattr(value, field.name))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for element in value:
            yield from _iter_parts(element)
    else:
        yield value


def _lines(function: Callable[..., Any], file: str) -> set[int]:
    """Return the lines of a function in this file, including functions defined inside it."""
    inner = getattr(function, "__wrapped__", getattr(function, "func", function))
    code = getattr(inner, "__code__", None) or getattr(
        type(inner).__dict__.get("__call__"), "__code__", None
    )
    lines: set[int] = set()
    waiting = [code] if isinstance(code, CodeType) else []
    while waiting:
        here = waiting.pop()
        if here.co_filename == file:
            lines |= {line for _, _, line in here.co_lines() if line is not None}
        waiting.extend(constant for constant in here.co_consts if isinstance(constant, CodeType))
    return lines


SEARCH_SECONDS = 60.0
_MAX_POSITIONS = 2_000_000
Probe = Callable[["DataFrame"], "DataFrame"]
Sample = tuple[int, int, dict[str, Any]]
"""A record that an operator failed on, after its partition and offset."""


def _run_with_timeout(
    arriving: DataFrame, search: Callable[[float], T], seconds: float = SEARCH_SECONDS
) -> T | None:
    """Return the result of `search`, called with the monotonic time of its end; None if it fails
    or takes longer.
    """
    session = arriving.sparkSession
    tag = f"adjunct-sample-{uuid.uuid4().hex}"
    ends = time.monotonic() + seconds
    timer = threading.Timer(seconds, session.interruptTag, [tag])
    session.addTag(tag)
    timer.start()
    try:
        return search(ends)
    except Exception:  # noqa: BLE001 - what failed is reported without a sample then
        return None
    finally:
        timer.cancel()
        session.removeTag(tag)


def _bisect_records(
    arriving: DataFrame, probe: Probe, same: Callable[[Exception], bool], ends: float
) -> Sample | None:
    """Return a record on which `probe` fails with the `same` error; None if none is found.

    Each half is computed again: a batch of 100,000 records takes some twenty small jobs.
    """
    places = [
        (row[0], row[1])
        for row in arriving.select(PARTITION, OFFSET).distinct().limit(_MAX_POSITIONS + 1).collect()
    ]
    if len(places) > _MAX_POSITIONS:
        return None
    places.sort()
    while len(places) > 1:
        if time.monotonic() > ends:
            return None
        half = places[: len(places) // 2]
        places = half if _fails(probe(_filter_range(arriving, half)), same) else places[len(half) :]
    if not places or not _fails(probe(_filter_range(arriving, places)), same):
        return None
    row = _filter_range(arriving, places).first()
    return None if row is None else (*places[0], row.asDict())


def _filter_range(frame: DataFrame, places: Sequence[tuple[int, int]]) -> DataFrame:
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


def sensitive_columns(
    context: StepContext, operator: str, columns: Iterable[str]
) -> frozenset[str]:
    """Return which columns of an operator's records hold values that a schema or a dataset marks as
    sensitive.

    If anything is sensitive, a column of unknown origin counts as sensitive too.
    """
    sensitive = context.sensitive
    if not sensitive:
        return frozenset()
    names = {name for _, name in sensitive}
    sources = context.plan.columns[operator].sources
    return frozenset(
        name
        for name in columns
        if name.lower() in names or _may_be_sensitive(context, sensitive, sources.get(name, ()))
    )


def _may_be_sensitive(
    context: StepContext, sensitive: Collection[tuple[LineageNode, str]], sources: Sources
) -> bool:
    """Whether a column made of these sources may hold sensitive values; an output's column holds
    what is sent to it.
    """
    app, plan = context.app, context.plan
    sent = [
        operator.spec.written(plan.columns[operator.inputs[0]]).sources.get(column, ())
        for node, column in sources
        for operator in app.operators
        if operator.spec.role == "output" and operator.spec.target(app) == node
    ]
    known = not sources or any((node, column.lower()) in sensitive for node, column in sources)
    return known or any(_may_be_sensitive(context, sensitive, those) for those in sent)


def list_sensitive_columns(
    app: Application, systems: Mapping[str, StreamSystem]
) -> frozenset[tuple[LineageNode, str]]:
    """Return the columns that datasets and schemas, also those in operators, mark as sensitive,
    in lower case.
    """

    @cache
    def of_stream(stream: str) -> frozenset[str]:
        system, name = split_stream_name(stream)
        try:
            return _sensitive_names(systems[system].info(name).schema)
        except (errors.StreamNotFoundError, KeyError):  # a dataset of a deleted stream
            return frozenset()

    found = {LineageNode("stream", stream): of_stream(stream) for stream in app.inputs}
    for dataset in app.datasets:
        own = frozenset(column.lower() for column in dataset.sensitive)
        if isinstance(dataset.input, OwnedBy):
            own |= _sensitive_names(dataset.input.schema)
        elif dataset.stream:
            own |= of_stream(dataset.stream)
        found[LineageNode("dataset", dataset.name)] = own
    for operator in app.operators:  # results of functions: matched by column name
        names = frozenset[str]().union(*map(_sensitive_names, operator.spec.declared_schemas))
        found[LineageNode("stream", operator.id)] = names
    return frozenset((node, name) for node, names in found.items() for name in names)


def _sensitive_names(schema: Schema | None) -> frozenset[str]:
    return frozenset(
        field.name.lower() for field in (schema.fields if schema else ()) if field.sensitive
    )


def explain_failure(
    batch: BatchContext, operator: str, error: Exception
) -> errors.OperatorFailedError | None:
    """Return the error that says what failed in a job of this operator; None if no user code
    failed.

    Finding the operator and the record runs small jobs, for at most a minute each. If columns are
    sensitive, their values, the text of the failing code's error and the error itself are left out.
    """
    ours = find_adjunct_error(error)
    if isinstance(ours, errors.ManifestMismatchError) and ours.partition_by is not None:
        return _explain_broken_promise(batch, operator, ours)
    if ours is not None or type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    failure = parse_failure(error)
    if failure is None:
        return None
    before = list(iter_upstream(batch.app, operator))
    suspects = _find_suspects(before, failure)
    failed = suspects[0] if len(suspects) == 1 else None
    # Unless one operator is known, Spark's text may quote a column of any of them.
    about_all = before if failed is None else suspects
    if failed is None and failure.of_expression:
        failed = _find_failing_operator(batch, suspects or before, failure)
    hidden = frozenset[str]().union(*(batch.sensitive(suspect.id) for suspect in about_all))
    if failed is not None:
        explained = _explain_with_sample(batch, failed, failure, hidden)
    else:
        names = " or ".join(suspect.id for suspect in suspects) or operator
        about: dict[str, Any] = {"operator": suspects[0].id if suspects else operator}
        explained = operator_failed_error(
            failure.problem(names, show_text=not hidden), failure.place, None, hidden, **about
        )
    explained.__cause__ = None if hidden else error
    return explained


def _explain_broken_promise(
    batch: BatchContext, operator: str, error: errors.AdjunctError
) -> errors.OperatorFailedError | None:
    """Return the error that blames the functions with keeps_partitioning=True; None if there is
    none.
    """
    promising = [one for one in iter_upstream(batch.app, operator) if one.spec.keeps_partitioning]
    if not promising:
        return None
    names, place = " or ".join(sorted(one.id for one in promising)), promising[0].declared_at
    line = "" if place is None else f" ({place.describe()})"
    explained = errors.OperatorFailedError(
        f"{names}{line} breaks its promise keeps_partitioning=True: {error.problem}",
        "Nothing of it was committed. Remove keeps_partitioning=True, and use partition_by(…) after"
        " the function.",
        operator=promising[0].id,
        file=None if place is None else place.file,
        line=None if place is None else place.line,
    )
    explained.__cause__ = error
    return explained


def _find_failing_operator(
    batch: BatchContext, likely: list[Operator], failure: Failure
) -> Operator | None:
    """Return the first of these operators that fails in the same way when it runs alone over its
    records.

    Spark's error quotes the failed expression only if Spark has not rewritten it.
    """
    ends = time.monotonic() + SEARCH_SECONDS
    wanted = {suspect.id for suspect in likely}

    def same(error: Exception) -> bool:
        return _is_alike(parse_failure(error), failure)

    for candidate in batch.app.operators:  # if one fails, those before it did not
        spec = candidate.spec
        if candidate.id in wanted and len(candidate.inputs) == 1 and (spec.sql or _functions(spec)):
            (arriving,), probe = (
                batch.arrived[candidate.id],
                partial(_Probe(batch).apply, candidate),
            )
            left = ends - time.monotonic()
            if left <= 0:
                return None
            if _run_with_timeout(arriving, lambda _: _fails(probe(arriving), same), left):  # noqa: B023 - called now
                return candidate
    return None


def _is_alike(other: Failure | None, failure: Failure) -> bool:
    if other is None or other.kind != failure.kind:
        return False
    return None in (other.part, failure.part) or other.part == failure.part


def _explain_with_sample(
    batch: BatchContext, failed: Operator, failure: Failure, hidden: frozenset[str]
) -> errors.OperatorFailedError:
    """Return the error of an operator, with a record that it fails on if one is found within a
    minute.
    """
    functions = _functions(failed.spec)
    what = failed.id
    if failure.part is None and functions:
        what = f"{failed.id}: {function_label(functions[0])}"
    seen, sample = [failure], None

    def same(other: Exception) -> bool:
        again = parse_failure(other)
        if again is None or not _is_alike(again, failure):
            return False
        seen.append(again)  # the last one is of the sample, whose value the text may quote
        return True

    arriving = batch.arrived[failed.id]
    if len(arriving) == 1:
        probe = partial(_Probe(batch).apply, failed)
        sample = _run_with_timeout(
            arriving[0], lambda ends: _bisect_records(arriving[0], probe, same, ends)
        )
    about: dict[str, Any] = {"operator": failed.id}
    if sample is None:
        problem, record = failure.problem(what, show_text=not hidden), None
    else:
        partition, offset, record = sample
        problem = seen[-1].problem(what, show_text=not hidden)
        about |= {
            "stream": batch.stream_of(failed.inputs[0]),
            "partition": partition,
            "offset": str(offset),
        }
    return operator_failed_error(
        problem, failure.place or failed.declared_at, record, hidden, **about
    )


# Methods of a batch without side effects.
_PROBE_ALLOWED = {
    *(
        "app",
        "call",
        "entries",
        "required_partitioning",
        "partitions_at",
        "sensitive",
        "stream_of",
        "system_of",
    ),
    *(
        "tasks",
        "gather_small",
        "names",
        "filter",
        "select",
        "select_update",
        "with_columns",
        "repartition",
    ),
}


class _Probe:
    """A batch context that compiles an operator again over some of its records: nothing is written
    or stored.

    Other methods of a batch raise AttributeError, so that no function gets records twice and no
    table is queried again. The failure is then reported without a sample.
    """

    def __init__(self, batch: BatchContext) -> None:
        self._batch = batch
        self._sent: DataFrame | None = None

    def apply(self, operator: Operator, frame: DataFrame) -> DataFrame:
        """Return the records that an operator makes of these, or that it sends."""
        self._sent = None
        leaving = operator.spec.compile(operator.id, [frame], cast("BatchContext", self))
        return leaving if self._sent is None else self._sent

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
        self._sent = frame

    write = write_local = send_dead_letters = send


def call_frame_function(operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
    """Return the DataFrame that a user's function returns for the records.

    Raises OperatorFailedError for what the function raises, and PlanningError for a result that is
    no DataFrame, lacks the records' hidden columns, or has two columns with one name. Errors of
    Adjunct and of Spark's analyzer pass unchanged.
    """
    from pyspark.errors import AnalysisException
    from pyspark.sql import DataFrame

    try:
        result: object = function(frame)
    except (errors.AdjunctError, AnalysisException):
        raise
    except Exception as error:
        raise function_failed_error(operator, function_label(function), function, error) from error
    if not isinstance(result, DataFrame):
        returned = "None" if result is None else type(result).__name__
        problem = (
            f"{operator}: {function_label(function)} returned {returned}: expected a DataFrame."
        )
        step = "Return a DataFrame made from the given records, with other columns or fewer rows."
        raise errors.PlanningError(problem, step, operator=operator)
    lost = [name for name in list_hidden_columns(frame.columns) if name not in result.columns]
    if lost:
        raise errors.PlanningError(
            f"{operator}: its function returned records without {', '.join(lost)}, which hold each"
            " record's position and epoch.",
            'Keep them: add columns with withColumn or select("*", …), and drop only your own; or'
            " give expressions instead of a function.",
            operator=operator,
        )
    double = first_duplicate(result.columns)
    if double is not None:
        problem = f"{operator}: {function_label(function)} returned two columns called {double!r}."
        step = "Rename or drop one of them; Spark's names ignore case."
        raise errors.PlanningError(problem, step, column=double, operator=operator)
    return result


def analysis_error(operator: Operator, error: AnalysisException) -> errors.PlanningError:
    problem = str(error).strip().partition("SQLSTATE")[0].strip().splitlines()[0].rstrip(" .")
    place = failing_line(error) or operator.declared_at
    return errors.PlanningError(
        f"{operator.id}: {problem}{f' ({place.describe()})' if place else ''}.",
        "Correct the expression or function; adjunct plan MODULE:APP lists the operators by these"
        " names.",
        operator=operator.id,
    )
