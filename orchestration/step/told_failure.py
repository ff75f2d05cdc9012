"""Turns what Spark says of a job that failed in user code into an error with operator, line and a sample record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dagster_adjunct.orchestration.step.failed_operator import Failure, failure_in, to_blame, what_of
from dagster_adjunct.orchestration.step.sample_record import sample_record
from dagster_adjunct.resources.spark.spark_errors import adjunct_error
from dagster_adjunct.resources.user_code import failed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.operator_spec import Operator
    from dagster_adjunct.resources.errors import OperatorFailedError


class CompiledBatch(Protocol):
    """A batch, as far as its operators are compiled: what is asked of it to find a record that failed."""

    @property
    def app(self) -> Application: ...

    def sensitive(self, operator: str) -> frozenset[str]: ...

    def arriving(self, operator: Operator) -> list[DataFrame]: ...

    def stream_of(self, operator: str) -> str | None: ...


def told_failure(batch: CompiledBatch, operator: str, error: Exception) -> OperatorFailedError | None:
    """Return the error that tells what failed in a job that this operator ran; None where no user code did.

    Looking for the record runs small jobs, for 20 s at most. Where columns are sensitive, neither their values are told
    nor what the failing code says in its own words: raise it then without the error that it is made of.
    """
    if adjunct_error(error) is not None or type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    failure = failure_in(error)
    if failure is None:
        return None
    blamed = to_blame(batch.app, operator, failure)
    if len(blamed) != 1:
        names = " or ".join(each.id for each in blamed) or operator
        hidden = frozenset[str]().union(*(batch.sensitive(each.id) for each in blamed))
        about: dict[str, Any] = {"operator": blamed[0].id if blamed else operator}
        return failed(failure.problem(names, told=not hidden), failure.place, None, hidden, **about)
    return _with_sample(batch, blamed[0], failure)


def _with_sample(batch: CompiledBatch, blamed: Operator, failure: Failure) -> OperatorFailedError:
    hidden = batch.sensitive(blamed.id)
    problem = failure.problem(what_of(blamed, failure), told=not hidden)
    place, about = failure.place or blamed.declared_at, dict[str, Any](operator=blamed.id)
    arriving = batch.arriving(blamed)
    if len(arriving) != 1:
        return failed(problem, place, None, hidden, **about)

    def made(frame: DataFrame) -> DataFrame:
        probe: Any = _Probe(batch)
        leaving = blamed.spec.compile(blamed.id, [frame], probe)
        return leaving if probe.sent is None else probe.sent

    seen = [failure]

    def same(other: Exception) -> bool:
        again = failure_in(other)
        if again is None or (again.kind, again.part) != (failure.kind, failure.part):
            return False
        seen.append(again)  # its words may quote a value: those of the record that is told
        return True

    sample = sample_record(arriving[0], made, same)
    if sample is None:
        return failed(problem, place, None, hidden, **about)
    stream = batch.stream_of(blamed.inputs[0])
    return failed(
        seen[-1].problem(what_of(blamed, failure), told=not hidden),
        place,
        sample.record,
        hidden,
        stream=stream,
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

    def __init__(self, batch: CompiledBatch) -> None:
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
