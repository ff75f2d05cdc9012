"""Says which operator a Spark job failed in, at which line of the user's file, and over which record."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.operators.arguments import called
from dagster_adjunct.resources.spark.spark_errors import first_line
from dagster_adjunct.resources.user_code import cut, line_in

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.resources.declared_place import Place

# How Spark quotes the expression that failed: its text, cut at both ends, then a line that points at the part.
_QUOTED = re.compile(
    r"^== SQL[^\n]*==\n(?P<text>.*?(?P<line>[^\n]*))\n(?P<before> *)(?P<part>\^+)[ ^]*$", re.MULTILINE | re.DOTALL
)
_CONDITION = re.compile(r"\[(?P<condition>[A-Z][A-Z0-9_.]+)\]")
_DATA = re.compile(r"\[(?:MALFORMED_RECORD_IN_PARSING|MALFORMED_CSV_RECORD|MALFORMED_PROTOBUF_MESSAGE)[A-Z_.]*\]")
_RAISED = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*): ?(?P<said>.*)$")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a Spark job said of an expression or function that failed over a record.

    `kind` is the class of a Python error or Spark's name of the condition, `said` its words; `quoted` is the
    expression as Spark quotes it, `part` what of it failed, and `place` the line of a Python function.
    """

    kind: str
    message: str
    quoted: str | None = None
    part: str | None = None
    place: Place | None = None

    @property
    def of_expression(self) -> bool:
        """Whether Spark itself failed, over an expression: its conditions are in capitals."""
        return self.kind.isupper()

    def problem(self, what: str, *, told: bool) -> str:
        """Return it in words, those of the error itself only where it may be `told`."""
        if self.part is not None:
            return f"{what}: {cut(self.part)}: {self.message if told else self.kind}"
        if f"[{self.kind}]" in self.message:  # Spark's own words, whose end says what to do
            return f"{what}: {self.message if told else self.kind}"
        return f"{what} raised {self.kind}{f': {cut(self.message)}' if told and self.message else ''}"


def failure_in(error: Exception) -> Failure | None:
    """Return what an error of Spark's says of user code that failed over a record; None for any other error."""
    text = str(error)
    if type(error).__name__ == "PythonException" or "An exception was thrown from the Python worker" in text:
        last = [line for line in text.strip().splitlines() if _RAISED.match(line)]
        raised = _RAISED.match(last[-1]) if last else None
        kind = raised["kind"].rpartition(".")[2] if raised else "an error"
        return Failure(kind, raised["said"] if raised else "", place=line_in(text))
    quoted, condition = _QUOTED.search(text), _CONDITION.search(text)
    if condition is None or (quoted is None and "Exception" not in type(error).__name__ and not _of_data(text)):
        return None
    bare = type(error).__name__ in ("SparkException", "Py4JJavaError", "AnalysisException")
    if quoted is None and bare and not _of_data(text):
        return None
    message = first_line(error).partition(" SQLSTATE")[0].partition(' If necessary set "spark.sql')[0]
    message = message.removeprefix("org.apache.spark.SparkException: ")
    if quoted is None:
        return Failure(condition["condition"], message)
    begin = len(quoted["before"])
    part = quoted["line"][begin : begin + len(quoted["part"])]
    return Failure(condition["condition"], message, quoted["text"].strip().strip("."), part)


def _of_data(text: str) -> bool:
    """Whether a condition is about the data, which Spark tells without saying which of its exceptions it is."""
    return _DATA.search(text) is not None


def to_blame(before: Sequence[Operator], failure: Failure) -> list[Operator]:
    """Return the operators that it may have failed in: the likeliest of those `before` it, [] where any may be."""
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


def what_of(operator: Operator, failure: Failure) -> str:
    """Return what failed in an operator, as plans show it."""
    functions = list(_functions(operator.spec))
    return operator.id if failure.part is not None or not functions else f"{operator.id}: {called(functions[0])}"


def runs_code(operator: Operator) -> bool:
    """Whether expressions or functions of the user's are in an operator."""
    return bool(operator.spec.sql) or any(True for _ in _functions(operator.spec))


def operators_before(app: Application, operator: str) -> Iterator[Operator]:
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
    """Return the lines of a function, and of what is defined within it, in this file."""
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
