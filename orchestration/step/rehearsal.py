"""Asks Spark which columns the outputs of a batch will have, over no records at all, before the batch is begun."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.step.compile import Batch, BatchInputs, Counters, sent_schema
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.names import split_stream_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.assets.unbounded.transient import TransientVersion
    from dagster_adjunct.orchestration.application.graph import Operator, SendToStream, SendToTable
    from dagster_adjunct.orchestration.step.context import StepContext
    from dagster_adjunct.resources.schemas.schema import Schema

_log = logging.getLogger("adjunct.step")


def check_outputs(context: StepContext, views: Mapping[str, VersionReader | TransientVersion | None]) -> None:
    """Raise what creating an output stream would raise for the columns that these dataset versions give it.

    Functions of the application are called with a frame of no records. One that fails over that tells nothing: its
    output is checked when it is written.
    """
    Rehearsal(context, BatchInputs(0, {}, views), lambda name: None).run()


class _UntriedError(Exception):
    """A function of the application can't be tried without records."""


class Rehearsal(Batch):
    """A batch without records, which writes nothing and runs no Spark job."""

    def run(self) -> Counters:
        for operator in self._context.app.operators:
            if operator.id not in self._written or not all(each in self._frames for each in operator.inputs):
                continue
            try:
                self._frames[operator.id] = self._analysed(operator)
            except _UntriedError as error:
                _log.info("%s: its function can't be tried without records: %s", operator.id, error)
        return {}

    def _apply(self, operator: Operator, frame: DataFrame, how: str | Callable[[DataFrame], DataFrame]) -> DataFrame:
        return super()._apply(operator, frame, how if isinstance(how, str) else _tried(how))

    def _entries(self, view: VersionReader | TransientVersion | None, schema: Schema) -> DataFrame:
        return super()._entries(None, schema)

    def _check_plan(self, joined: DataFrame, operator: str, dataset: str) -> None:
        return

    def _counted(self, joined: DataFrame, operator: str) -> DataFrame:
        return joined

    def _append(self, operator: Operator, frame: DataFrame, spec: SendToStream) -> DataFrame:
        output = self._context.app.outputs[spec.stream]
        self._check(spec.stream, frame, output.key, output.partitions)
        return frame

    def _feed(self, operator: Operator, frame: DataFrame, spec: SendToTable) -> None:
        dataset = self._context.app.dataset(spec.table)
        assert dataset.stream is not None  # MessageStream.send_to refuses others
        self._check(dataset.stream, frame, dataset.partition_by or dataset.key, dataset.partitions or 1)

    def _write(self, operator: Operator, frame: DataFrame, spec: SendToTable) -> None:
        return

    def _check(self, qualified: str, frame: DataFrame, key: Sequence[str], partitions: int) -> None:
        system, stream = split_stream_name(qualified)
        self._context.systems[system].check_create(stream, schema=sent_schema(frame), key=key, partitions=partitions)


def _tried(function: Callable[[DataFrame], DataFrame]) -> Callable[[DataFrame], DataFrame]:
    from pyspark.errors import AnalysisException

    def call(frame: DataFrame) -> DataFrame:
        try:
            return function(frame)
        except (AdjunctError, AnalysisException):  # columns are the same, with records or without
            raise
        except Exception as error:  # whatever somebody's code raises where it finds no record
            raise _UntriedError(f"{type(error).__name__}: {error}") from error

    return call
