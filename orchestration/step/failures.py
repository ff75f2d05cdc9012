"""Turns Spark's error for a job that failed in user code into an error with operator, line and a
sample record.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import CodeType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.batch import SparkRecords
from dagster_adjunct.orchestration.operators.columns import (
    DataFrameFunction,
    first_duplicate,
    function_label,
    list_hidden_columns,
)
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.code_lines import CodeLine
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.spark.tasks import find_adjunct_error, first_message_line
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION
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


T = TypeVar("T")
# How Spark quotes the expression that failed: its text, cut at both ends, then a line of carets
# under the part.
_QUOTED = re.compile(
    r"^== SQL[^\n]*==\n(?P<text>.*?(?P<line>[^\n]*))\n(?P<before> *)(?P<part>\^+)[ ^]*$",
    re.MULTILINE | re.DOTALL,
)
# The name of Spark's error condition, "[DIVIDE_BY_ZERO]".
_CONDITION = re.compile(r"\[(?P<condition>[A-Z][A-Z0-9_.]+)\]")
# The conditions of values that Spark could not read.
_DATA = re.compile(
    r"\[(?:MALFORMED_RECORD_IN_PARSING|MALFORMED_CSV_RECORD|MALFORMED_PROTOBUF_MESSAGE)[A-Z_.]*\]"
)
# The last line of a traceback: "ValueError: MESSAGE".
_RAISED = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*): ?(?P<said>.*)$")


# Classes of Spark's errors that may be failures of expressions or anything else.
_GENERAL_CLASSES = ("SparkException", "Py4JJavaError", "AnalysisException")


@dataclass(frozen=True, slots=True)
class Failure:
    """What Spark reported of an expression or function that failed on a record.

    `kind` is the class of a Python error or the name of Spark's condition, `message` its text.
    `quoted` is the expression as Spark quotes it, and `part` the part of it that failed; None if it
    quotes none. `place` is the line of a Python function; None for an expression.
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
        """Return the failure as a sentence about `what`, an operator and maybe its function; with
        the error's own text only if `show_text`.
        """
        shown = self.message if show_text else self.kind
        if self.part is not None:
            return f"{what}: {truncate_text(self.part)}: {shown}"
        if f"[{self.kind}]" in self.message:  # Spark's own text, which ends with what to do
            return f"{what}: {shown}"
        if show_text and self.message:
            return f"{what} raised {self.kind}: {truncate_text(self.message)}"
        return f"{what} raised {self.kind}"


def parse_failure(error: Exception) -> Failure | None:
    """Return the failure of user code that a Spark error reports; None for any other error."""
    text = str(error)
    kind = type(error).__name__
    if kind == "PythonException" or "An exception was thrown from the Python worker" in text:
        return _parse_python_failure(text)
    condition = _CONDITION.search(text)
    if condition is None:
        return None
    quoted = _QUOTED.search(text)
    # A class of its own, such as ArithmeticException, is that of a failed expression. Any other
    # class may be, if the error quotes an expression or says that Spark could not read a value.
    has_own_class = "Exception" in kind and kind not in _GENERAL_CLASSES
    is_of_data = quoted is not None or _DATA.search(text) is not None
    if not has_own_class and not is_of_data:
        return None
    message = _shorten_message(first_message_line(error))
    if quoted is None:
        return Failure(condition["condition"], message)
    begin = len(quoted["before"])
    part = quoted["line"][begin : begin + len(quoted["part"])]
    return Failure(condition["condition"], message, quoted["text"].strip().strip("."), part)


def _shorten_message(message: str) -> str:
    """Return Spark's message without its class, its SQLSTATE and settings that hide the failure."""
    shortened, _, _ = message.partition(" SQLSTATE")
    shortened, _, _ = shortened.partition(' If necessary set "spark.sql')
    return shortened.removeprefix("org.apache.spark.SparkException: ")


def _parse_python_failure(text: str) -> Failure:
    """Return the failure whose traceback is in the text: its last line like "KIND: MESSAGE" has the
    error.
    """
    place = failing_line_in_text(text)
    for line in reversed(text.strip().splitlines()):
        raised = _RAISED.match(line)
        if raised:
            return Failure(raised["kind"].rpartition(".")[2], raised["said"], place=place)
    return Failure("an error", "", place=place)


def _find_suspects(before: Sequence[Operator], failure: Failure) -> list[Operator]:
    """Return the operators among `before` that most likely failed; [] if any of them may have.

    If operators quote the failed expression, these are the suspects. For a function, they are the
    operators with the failed line or, without any, all that call functions.
    """
    for text in (failure.quoted, failure.part):
        quoting = [candidate for candidate in before if _quotes(candidate.spec, text)]
        if quoting:
            return quoting
    if failure.of_expression:
        return []
    calling = [candidate for candidate in before if _functions(candidate.spec)]
    at_line = []
    for candidate in calling:  # several, if they have the same function
        if any(_has_line(function, failure.place) for function in _functions(candidate.spec)):
            at_line.append(candidate)
    return at_line or calling


def iter_upstream(app: Application, operator: str) -> Iterator[Operator]:
    """Yield this operator and the operators before it, back to the inputs, and to the outputs that
    its records are read back from.
    """
    waiting = [operator]
    seen = set()
    while waiting:
        here = app.operator(waiting.pop())
        if here.id in seen:
            continue
        seen.add(here.id)
        yield here
        is_read_from = here.id != operator and here.spec.role == "output"
        if not is_read_from:
            waiting.extend(here.inputs)


def _quotes(spec: Any, text: str | None) -> bool:
    """Return whether an expression of an operator has this text; False without a text."""
    if text is None:
        return False
    return any(isinstance(part, str) and text in part for part in _iter_parts(spec))


def _functions(spec: Any) -> list[Callable[..., Any]]:
    """Return the functions that an operator was given."""
    functions = []
    for part in _iter_parts(spec):
        if callable(part) and not isinstance(part, type):
            functions.append(part)
    return functions


def _iter_parts(value: Any) -> Iterator[Any]:
    """Yield the values in a dataclass or sequence, at any depth; a value that is neither,
    itself.
    """
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _iter_parts(getattr(value, field.name))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for element in value:
            yield from _iter_parts(element)
    else:
        yield value


def _iter_codes(function: object) -> Iterator[CodeType]:
    """Yield the code of a function and of what it wraps: by decorators, as a `partial`, or as an
    object with `__call__`. What is not written in Python has no code.
    """
    seen: list[object] = []
    waiting = [function]
    while waiting:
        here = waiting.pop()
        if any(here is each for each in seen):
            continue
        seen.append(here)
        code = getattr(here, "__code__", None)
        if isinstance(code, CodeType):
            yield code
        if isinstance(here, partial):
            waiting.append(here.func)
        if callable(here) and isinstance(type(here).__call__, FunctionType):
            waiting.append(type(here).__call__)
        waiting.append(getattr(here, "__wrapped__", None))


def _has_line(function: Callable[..., Any], place: CodeLine | None) -> bool:
    """Whether this line is in a function, in one that it wraps, or in one that is defined inside
    of these; False without a line.
    """
    if place is None:
        return False
    waiting: list[object] = list(_iter_codes(function))
    while waiting:
        here = waiting.pop()
        if not isinstance(here, CodeType):  # another constant
            continue
        lines = {line for _, _, line in here.co_lines()}
        if here.co_filename == place.file and place.line in lines:
            return True
        waiting.extend(here.co_consts)
    return False


SEARCH_SECONDS = 60.0  # for the failed operator, and again for a sample record
_MAX_POSITIONS = 2_000_000  # of records that are searched, in the driver's memory
Probe = Callable[["DataFrame"], "DataFrame"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A record that an operator failed on, and its position."""

    partition: int
    offset: int
    record: dict[str, Any]


def _run_with_timeout(
    arriving: DataFrame, search: Callable[[float], T], seconds: float = SEARCH_SECONDS
) -> T | None:
    """Return the result of `search`, which gets the monotonic time at which it must end; None if it
    fails or takes longer than `seconds`.

    Spark jobs of the session of `arriving` that still run then are interrupted.
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
    """Return a record on which `probe` fails with the `same` error; None if none is found by the
    monotonic time `ends`, or if there are more than `_MAX_POSITIONS` positions.

    Each half is computed again: a batch of 100,000 records takes some twenty small jobs.
    """
    rows = arriving.select(PARTITION, OFFSET).distinct().limit(_MAX_POSITIONS + 1).collect()
    if len(rows) > _MAX_POSITIONS:
        return None
    places = sorted((row[PARTITION], row[OFFSET]) for row in rows)
    while len(places) > 1:
        if time.monotonic() > ends:
            return None
        middle = len(places) // 2
        if _fails(probe(_filter_range(arriving, places[:middle])), same):
            places = places[:middle]
        else:
            places = places[middle:]
    if not places:
        return None
    found = _filter_range(arriving, places)
    if not _fails(probe(found), same):  # only several records together fail, or none any more
        return None
    row = found.first()
    if row is None:
        return None
    partition, offset = places[0]
    return Sample(partition, offset, row.asDict(recursive=True))


def _filter_range(frame: DataFrame, places: Sequence[tuple[int, int]]) -> DataFrame:
    """Return the records from the first to the last of these places, which are sorted."""
    first_partition, first_offset = places[0]
    last_partition, last_offset = places[-1]
    partition = F.col(PARTITION)
    offset = F.col(OFFSET)
    is_of_first = (partition == first_partition) & (offset >= first_offset)
    is_of_last = (partition == last_partition) & (offset <= last_offset)
    is_from_first = (partition > first_partition) | is_of_first
    is_up_to_last = (partition < last_partition) | is_of_last
    return frame.where(is_from_first & is_up_to_last)


def _fails(frame: DataFrame, same: Callable[[Exception], bool]) -> bool:
    """Whether computing the records raises an error for which `same` is true; raises any other
    one.
    """
    try:
        frame.write.format("noop").mode("overwrite").save()
    except Exception as error:
        if same(error):
            return True
        raise
    return False


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """The batch whose job failed; `arrived` has the records of each input of the operators that are
    compiled already.
    """

    planned: PlannedBatch
    records: SparkRecords
    arrived: Mapping[str, Sequence[DataFrame]]

    def sensitive(self, operator: str) -> frozenset[str]:
        """Return the columns of an operator's input whose values must not appear in errors."""
        arriving = [frame.columns for frame in self.arrived[operator]]
        return self.planned.sensitive(operator, *arriving)


def explain_failure(
    batch: FailedBatch, operator: str, error: Exception
) -> errors.OperatorFailedError | None:
    """Return the error that says what failed in a job of this operator; None if no user code
    failed.

    Finding the operator and the record runs small jobs, for at most a minute each. If columns are
    sensitive, the result leaves out their values, the text of the failing code's error, and that
    error as its cause.
    """
    ours = find_adjunct_error(error)
    if isinstance(ours, errors.ManifestMismatchError) and ours.partition_by is not None:
        return _explain_broken_promise(batch, operator, ours)
    is_of_spark = type(error).__module__.partition(".")[0] in ("pyspark", "py4j")
    if ours is not None or not is_of_spark:
        return None
    failure = parse_failure(error)
    if failure is None:
        return None
    upstream = list(iter_upstream(batch.planned.app, operator))
    suspects = _find_suspects(upstream, failure)
    # Unless there is one suspect, Spark's text may quote a column of any operator.
    maybe_quoted = suspects if len(suspects) == 1 else upstream
    if len(suspects) == 1:
        failed: Operator | None = suspects[0]
    elif failure.of_expression:
        failed = _find_failing_operator(batch, suspects or upstream, failure)
    else:
        failed = None
    hidden = frozenset[str]()
    for each in maybe_quoted:
        hidden |= batch.sensitive(each.id)
    if failed is None:
        explained = _explain_any(suspects, operator, failure, hidden)
    else:
        explained = _explain_with_sample(batch, failed, failure, hidden)
    explained.__cause__ = None if hidden else error
    return explained


def _explain_any(
    suspects: Sequence[Operator], operator: str, failure: Failure, hidden: frozenset[str]
) -> errors.OperatorFailedError:
    """Return the error of a job in which any of the suspects may have failed; without suspects, it
    names `operator`, whose job it is.
    """
    names = [suspect.id for suspect in suspects] or [operator]
    problem = failure.problem(" or ".join(names), show_text=not hidden)
    return operator_failed_error(problem, failure.place, None, hidden, operator=names[0])


def _explain_broken_promise(
    batch: FailedBatch, operator: str, error: errors.AdjunctError
) -> errors.OperatorFailedError | None:
    """Return the error that blames the functions with keeps_partitioning=True before the operator;
    None if there are none. `error` says that records are in wrong buckets.
    """
    upstream = iter_upstream(batch.planned.app, operator)
    promising = [each for each in upstream if each.spec.keeps_partitioning]
    if not promising:
        return None
    names = " or ".join(sorted(each.id for each in promising))
    about: dict[str, Any] = {"operator": promising[0].id}
    place = promising[0].declared_at
    if place is not None:
        names += f" ({place.describe()})"
        about |= {"file": place.file, "line": place.line}
    explained = errors.OperatorFailedError(
        f"{names} breaks its promise keeps_partitioning=True: {error.problem}",
        "Nothing of it was committed. Remove keeps_partitioning=True, and use partition_by(…) after"
        " the function.",
        **about,
    )
    explained.__cause__ = error
    return explained


def _find_failing_operator(
    batch: FailedBatch, likely: list[Operator], failure: Failure
) -> Operator | None:
    """Return the first of the likely operators that fails in the same way when it is computed
    alone; None if none is found within SEARCH_SECONDS.

    This is for errors that do not tell the operator: Spark quotes a failed expression only if it
    has not rewritten it. Operators with several inputs are not tried.
    """
    deadline = time.monotonic() + SEARCH_SECONDS
    likely_ids = {operator.id for operator in likely}
    # In the order of definition: if an operator fails, all before it succeed.
    for candidate in batch.planned.app.operators:
        has_user_code = bool(candidate.spec.sql or _functions(candidate.spec))
        is_likely = candidate.id in likely_ids and has_user_code
        if not is_likely or len(candidate.inputs) != 1:
            continue
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return None
        if _fails_alone(batch, candidate, failure, seconds):
            return candidate
    return None


def _fails_alone(batch: FailedBatch, operator: Operator, failure: Failure, seconds: float) -> bool:
    """Whether the operator, which has one input, fails in the same way when it is computed over the
    records that arrive; False if that takes longer than `seconds`.
    """
    (arriving,) = batch.arrived[operator.id]

    def is_same(error: Exception) -> bool:
        return _is_alike(parse_failure(error), failure)

    def compute(ends: float) -> bool:
        return _fails(probe_operator(batch, operator, arriving), is_same)

    return bool(_run_with_timeout(arriving, compute, seconds))


def _is_alike(other: Failure | None, failure: Failure) -> bool:
    """Whether another failure is of the same kind, and of the same part of an expression if both
    name it.
    """
    if other is None or other.kind != failure.kind:
        return False
    if other.part is None or failure.part is None:
        return True
    return other.part == failure.part


def _explain_with_sample(
    batch: FailedBatch, failed: Operator, failure: Failure, hidden: frozenset[str]
) -> errors.OperatorFailedError:
    """Return the error of an operator, with a record that it fails on if one is found within a
    minute.
    """
    functions = _functions(failed.spec)
    if failure.part is None and functions:
        what = f"{failed.id}: {function_label(functions[0])}"
    else:
        what = failed.id
    failures = [failure]

    def same(other: Exception) -> bool:
        repeated = parse_failure(other)
        if repeated is None or not _is_alike(repeated, failure):
            return False
        failures.append(repeated)  # the last one is of the sample, whose value the text may quote
        return True

    sample = None
    if len(batch.arrived[failed.id]) == 1:
        (arriving,) = batch.arrived[failed.id]
        probe = partial(probe_operator, batch, failed)
        sample = _run_with_timeout(arriving, partial(_bisect_records, arriving, probe, same))
    about: dict[str, Any] = {"operator": failed.id}
    record = None
    if sample is not None:
        record = sample.record
        failure = failures[-1]
        about["stream"] = batch.planned.stream_of(failed.inputs[0])
        about |= {"partition": sample.partition, "offset": str(sample.offset)}
    problem = failure.problem(what, show_text=not hidden)
    place = failure.place or failed.declared_at
    return operator_failed_error(problem, place, record, hidden, **about)


_WITHOUT_EFFECT = frozenset(
    [
        "call_frame",
        "columns",
        "explode",
        "filter",
        "names",
        "repartition",
        "select",
        "select_update",
        "with_columns",
    ]
)
"""The methods of `Records` that an operator may call while it is probed: they make other records of
these, and have no other effect.
"""


class _Probed:
    """A part of a batch of which an operator that is probed may call only some methods: those in
    `own`, which replace methods of the part, and those in `_WITHOUT_EFFECT`.

    Others raise AttributeError, so that no function gets records twice and no table is queried
    again. The failure is then reported without a sample.
    """

    def __init__(self, part: object = None, **own: Callable[..., Any]) -> None:
        self._part = part
        self._own = own

    def __getattr__(self, name: str) -> Any:
        """Return what replaces a method of the part, or the method itself if it has no effect."""
        if name in self._own:
            return self._own[name]
        if self._part is None or name not in _WITHOUT_EFFECT:
            raise AttributeError(f"{name} is not available while searching for a failed record")
        return getattr(self._part, name)


def probe_operator(batch: FailedBatch, operator: Operator, frame: DataFrame) -> DataFrame:
    """Return the records that an operator would send last; those that leave it if it sends none.
    Nothing is written or stored.

    Raises AttributeError for an operator that calls anything else with an effect.
    """
    sent: list[DataFrame] = []

    def send(operator: str, frame: DataFrame, *given: object, **more: object) -> None:
        sent.append(frame)

    probe = SimpleNamespace(
        planned=replace(batch.planned, consumers={}, diverted_from=frozenset()),
        records=_Probed(
            batch.records,
            materialize=lambda operator, frame: frame,
            count_failed=lambda operator, frame, checked: frame,
            first=lambda frame, flags: None,
        ),
        datasets=_Probed(),
        tables=_Probed(),
        outputs=_Probed(send=send, write=send, send_dead_letters=send),
        local_tables=_Probed(write=send),
        sinks=_Probed(),
        state=_Probed(),
    )
    leaving: DataFrame = operator.spec.compile(operator.id, [frame], probe)
    if sent:
        return sent[-1]
    return leaving


def call_frame_function(operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
    """Return the DataFrame that a user's function returns for the records.

    Raises OperatorFailedError for what the function raises, and PlanningError for a result that is
    no DataFrame, lacks the records' hidden columns, or has two columns with one name. Errors of
    Adjunct and of Spark's analyzer pass unchanged.
    """
    from pyspark.errors import AnalysisException
    from pyspark.sql import DataFrame

    label = function_label(function)
    try:
        result: object = function(frame)
    except (errors.AdjunctError, AnalysisException):
        raise
    except Exception as error:
        raise function_failed_error(operator, label, function, error) from error
    if not isinstance(result, DataFrame):
        returned = "None" if result is None else type(result).__name__
        raise errors.PlanningError(
            f"{operator}: {label} returned {returned}: expected a DataFrame.",
            "Return a DataFrame made from the given records, with other columns or fewer rows.",
            operator=operator,
        )
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
        raise errors.PlanningError(
            f"{operator}: {label} returned two columns called {double!r}.",
            "Rename or drop one of them; Spark's names ignore case.",
            column=double,
            operator=operator,
        )
    return result


def analysis_error(operator: Operator, error: AnalysisException) -> errors.PlanningError:
    """Return the error for an expression or function that Spark's analyzer rejects, without Spark's
    plan.
    """
    problem = str(error).strip().partition("SQLSTATE")[0].strip().splitlines()[0].rstrip(" .")
    place = failing_line(error) or operator.declared_at
    if place is not None:
        problem += f" ({place.describe()})"
    if _names_what_is_missing(operator, error):
        step = "Correct the expression or function"
    else:
        step = (
            "No expression of this operator has that name, so this is probably a fault of Adjunct:"
            " report it with this message. The batch loses no record meanwhile"
        )
    return errors.PlanningError(
        f"{operator.id}: {problem}.",
        f"{step}; adjunct plan MODULE:APP lists the operators by these names.",
        operator=operator.id,
    )


def _names_what_is_missing(operator: Operator, error: AnalysisException) -> bool:
    """Whether the name that Spark can't find may come from the user: an expression of the operator
    has it, or the operator calls a function. True for an error that is not about a name.
    """
    parameters = error.getMessageParameters() or {}
    missing = parameters.get("objectName")
    if missing is None or _functions(operator.spec):
        return True
    name = _unquote(missing).lower()
    for part in _iter_parts(operator.spec):
        if isinstance(part, str) and name in _unquote(part).lower():
            return True
    return False


def _unquote(text: str) -> str:
    """Return a name or expression without backticks and spaces, which Spark ignores or adds."""
    return text.replace("`", "").replace(" ", "")
