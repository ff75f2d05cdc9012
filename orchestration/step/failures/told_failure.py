"""Turns what Spark says of a job that failed in user code into an error with operator, line and a sample record."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from dagster_adjunct.orchestration.step.failures.failed_operator import (
    Failure,
    failure_in,
    operators_before,
    runs_code,
    to_blame,
    what_of,
)
from dagster_adjunct.orchestration.step.failures.sample_record import SECONDS, fails_over, sample_record
from dagster_adjunct.resources.errors import AdjunctError, ManifestMismatchError, OperatorFailedError
from dagster_adjunct.resources.spark.spark_errors import adjunct_error
from dagster_adjunct.resources.user_code import failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator


class FailedBatch(Protocol):
    """A batch, as far as its operators are compiled: what is asked of it to find a record that failed."""

    @property
    def app(self) -> Application: ...

    def sensitive(self, operator: str) -> frozenset[str]: ...

    def arriving(self, operator: Operator) -> list[DataFrame]: ...

    def stream_of(self, operator: str) -> str | None: ...


def told_failure(batch: FailedBatch, operator: str, error: Exception) -> OperatorFailedError | None:
    """Return the error that tells what failed in a job that this operator ran; None where no user code did.

    Looking for the operator and the record runs small jobs, for a minute at most each. Where columns are sensitive,
    neither their values are told nor what the failing code says in its own words, nor the error that it is made of.
    """
    ours = adjunct_error(error)
    if isinstance(ours, ManifestMismatchError) and ours.partition_by is not None:
        return _broken_promise(batch, operator, ours)
    if ours is not None or type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    failure = failure_in(error)
    if failure is None:
        return None
    before = list(operators_before(batch.app, operator))
    blamed = to_blame(before, failure)
    one = blamed[0] if len(blamed) == 1 else _tried(batch, blamed or before, failure) if failure.of_expression else None
    # Where Spark names nobody, what it says may be about a column of any of them.
    about_all = blamed if len(blamed) == 1 else before
    hidden = frozenset[str]().union(*(batch.sensitive(suspect.id) for suspect in about_all))
    if one is not None:
        told = _with_sample(batch, one, failure, hidden)
    else:
        names = " or ".join(suspect.id for suspect in blamed) or operator
        about: dict[str, Any] = {"operator": blamed[0].id if blamed else operator}
        told = failed(failure.problem(names, told=not hidden), failure.place, None, hidden, **about)
    told.__cause__ = None if hidden else error
    return told


def _broken_promise(batch: FailedBatch, operator: str, error: AdjunctError) -> OperatorFailedError | None:
    """Return the error that names the functions that promise to leave records where they are; None without one."""
    promising = [one for one in operators_before(batch.app, operator) if one.spec.promises_partitioning]
    if not promising:
        return None
    names, place = " or ".join(sorted(one.id for one in promising)), promising[0].declared_at
    line = "" if place is None else f" ({place.words()})"
    told = OperatorFailedError(
        f"{names}{line} does not keep the promise keeps_partitioning=True: {error.problem}",
        "Nothing of it was committed. Take keeps_partitioning=True back, and use partition_by(…) behind the function.",
        operator=promising[0].id,
        file=None if place is None else place.file,
        line=None if place is None else place.line,
    )
    told.__cause__ = error
    return told


def _tried(batch: FailedBatch, likely: list[Operator], failure: Failure) -> Operator | None:
    """Return the first of these operators that fails alike when it is tried by itself over its records.

    Spark says which expression failed only of those that it has as they were written.
    """
    ends = time.monotonic() + SECONDS
    wanted = {suspect.id for suspect in likely}
    for candidate in batch.app.operators:  # in this order, an operator's records are made without failing
        if candidate.id in wanted and len(candidate.inputs) == 1 and runs_code(candidate):
            (arriving,) = batch.arriving(candidate)
            left = ends - time.monotonic()
            if left <= 0:
                return None
            if fails_over(
                arriving, _compiled(batch, candidate), lambda other: _is_alike(failure_in(other), failure), left
            ):
                return candidate
    return None


def _compiled(batch: FailedBatch, operator: Operator) -> Callable[[DataFrame], DataFrame]:
    """Return what an operator makes of some of its records."""

    def made(frame: DataFrame) -> DataFrame:
        probe: Any = _Probe(batch)
        leaving = operator.spec.compile(operator.id, [frame], probe)
        return leaving if probe.sent is None else probe.sent

    return made


def _is_alike(other: Failure | None, failure: Failure) -> bool:
    if other is None or other.kind != failure.kind:
        return False
    return None in (other.part, failure.part) or other.part == failure.part


def _with_sample(batch: FailedBatch, blamed: Operator, failure: Failure, hidden: frozenset[str]) -> OperatorFailedError:
    problem = failure.problem(what_of(blamed, failure), told=not hidden)
    place, about = failure.place or blamed.declared_at, dict[str, Any](operator=blamed.id)
    arriving = batch.arriving(blamed)
    if len(arriving) != 1:
        return failed(problem, place, None, hidden, **about)

    seen = [failure]

    def same(other: Exception) -> bool:
        again = failure_in(other)
        if again is None or not _is_alike(again, failure):
            return False
        seen.append(again)  # its words may quote a value: those of the record that is told
        return True

    sample = sample_record(arriving[0], _compiled(batch, blamed), same)
    if sample is None:
        return failed(problem, place, None, hidden, **about)
    (source,) = blamed.inputs
    return failed(
        seen[-1].problem(what_of(blamed, failure), told=not hidden),
        place,
        sample.record,
        hidden,
        stream=batch.stream_of(source),
        partition=sample.partition,
        offset=sample.offset,
        **about,
    )


# What changes nothing, and asks nobody outside.
_HARMLESS = frozenset(
    {"app", "call", "entries", "lying_by", "partitions_at", "sensitive", "stream_of", "system_of", "tasks", "together"}
)


class _Probe:
    """Stands for a batch while an operator is compiled anew over some of its records: nothing is written or kept.

    What it does not know of a batch it refuses: functions are not handed records again, and nobody is asked again.
    The failure is told without a sample then.
    """

    def __init__(self, batch: FailedBatch) -> None:
        self._batch = batch
        self.sent: DataFrame | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in _HARMLESS:
            raise AttributeError(f"no {name} while a record is looked for")
        return getattr(self._batch, name)

    def goes_on(self, operator: str) -> bool:
        return False

    def matched(self, operator: str, dataset: str, frame: DataFrame) -> DataFrame:
        return frame

    def computed_once(self, operator: str, frame: DataFrame) -> DataFrame:
        return frame

    def send(self, operator: str, frame: DataFrame, *given: object, **more: object) -> None:
        self.sent = frame

    write = keep = send_letters = send
