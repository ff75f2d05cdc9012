"""A lake with a few records, and short ways to run tiny applications on it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, BatchLog
from dagster_adjunct.orchestration.batch_log.intent import Intent
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.coordinator import fan_out_for_run
from dagster_adjunct.orchestration.step.batch import run_batch
from dagster_adjunct.orchestration.step.context import (
    BatchInputs,
    BatchMetrics,
    RunHooks,
    StepContext,
)
from dagster_adjunct.orchestration.step.engines import BatchEngine
from dagster_adjunct.orchestration.step.progress import StepEvent, StepReport
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    RECORD_META,
    OffsetRange,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.faulty_store import Crash, Fault, FaultyStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = tuple[Any, ...]


def ignore(event: StepEvent) -> None:
    """Receive events, and do nothing."""


def crash_at(what: str) -> Callable[[Any], None]:
    """Return a receiver of events at whose first event of this name the process dies."""

    def receive(event: Any) -> None:
        if getattr(event, "what", None) == what:
            raise Crash(what)

    return receive


def batch_inputs(
    batch: int,
    ranges: Mapping[SystemStreamPartition, OffsetRange],
    views: Mapping[str, Any],
    epochs: Mapping[SystemStreamPartition, int] | None = None,
) -> BatchInputs:
    """Return the inputs of a batch that reads these ranges again, as a bounded replay does."""
    replays = dict.fromkeys(ranges, "replay")
    intent = Intent(
        batch=batch,
        run="run",
        clock=datetime(1970, 1, 1, tzinfo=UTC),
        ranges=dict(ranges),
        epochs=dict(epochs or {}),
        replays=replays,
    )
    return BatchInputs(intent, views)


class ByTasks(BatchEngine):
    """Spark, with a task for each partition, however few the records are."""

    def run(
        self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]
    ) -> BatchMetrics:
        return run_batch(context, replace(inputs, few=False, interpreted=False), before_output)


@dataclass
class StepWorld:
    """One lake, in the folder `lake` of `folder`; `spark` is the shared session. `run_by_all` is from all_engines.py,
    None in `make test`.
    """

    lake: Lake
    folder: Path
    spark: Callable[[], SparkSession]
    sequences: dict[str, int] = field(default_factory=dict)
    run_by_all: Callable[[StepWorld, Application, dict[str, Any]], StepReport] | None = None

    @property
    def streams(self) -> LakeStreams:
        return LakeStreams(self.lake)

    @property
    def systems(self) -> dict[str, StreamSystem]:
        return {"lake": self.streams}

    def stream(
        self, name: str, key: str | Sequence[str], partitions: int, /, **columns: str
    ) -> None:
        keys = [key] if isinstance(key, str) else list(key)
        self.streams.create(name, schema=Schema.of(**columns), key=keys, partitions=partitions)

    def send(
        self,
        stream: str,
        *rows: Row,
        deleted: Sequence[Row] = (),
        version: str | None = None,
        sent_at: datetime | None = None,
    ) -> None:
        """Append rows in the stream's columns, then tombstones, then a version's marker where
        one is named.
        """
        schema = self.streams.info(stream).schema
        assert schema is not None
        everything = [*rows, *deleted]
        columns = {
            name: pa.array([row[index] for row in everything], schema.to_arrow().field(name).type)
            for index, name in enumerate(schema.names)
        }
        columns["__tombstone"] = pa.array([False] * len(rows) + [True] * len(deleted), pa.bool_())
        if sent_at is not None:
            columns["__timestamp"] = pa.array(
                [sent_at] * (len(rows) + len(deleted)), pa.timestamp("us", "UTC")
            )
        number = self.sequences[stream] = self.sequences.get(stream, 0) + 1
        table = pa.table(columns)
        self.streams.append(stream, table, producer="test", sequence=number, end_of_dataset=version)

    def advance(self, *datasets: AdjunctDataset) -> None:
        """Bring datasets up to date in process, which builds what Spark builds in a tenth of its
        time, where it can.
        """
        for dataset in datasets:
            try:
                advance_dataset(
                    dataset, lake=self.lake, systems=self.systems, spark=IN_PROCESS, by="test"
                )
            except ConfigurationError:
                advance_dataset(
                    dataset, lake=self.lake, systems=self.systems, spark=self.spark, by="test"
                )

    def context(
        self,
        app: Application,
        *,
        run: str = "run-1",
        on_event: Callable[[StepEvent], None] = ignore,
        max_batches: int | None = None,
    ) -> StepContext:
        planned = plan_application(app, systems=self.systems)
        runtime = Runtime(self.lake, self.systems, self.spark, by=run)
        return StepContext(
            runtime,
            app,
            planned,
            fan_out_for_run(runtime, app, planned),
            RunHooks(on_event),
            max_batches,
        )

    def run(self, app: Application, **options: Any) -> StepReport:
        """Bring the application's datasets up to date and run its step."""
        self.advance(*app.datasets)
        if self.run_by_all is not None:
            return self.run_by_all(self, app, options)
        return run_step(self.context(app, **options))

    def killed_at(self, app: Application, fault: Fault) -> None:
        """Run the application, whose process ends at the request to the store that the fault
        names.
        """
        over = replace(self, lake=Lake(FaultyStore(self.lake.store, [fault]), self.lake.id))
        with pytest.raises(Crash):
            over.run(app)

    def killed_when(self, app: Application, what: str) -> None:
        """Run the application, whose process ends when it tells this event."""

        def die(event: StepEvent) -> None:
            if event.what == what:
                raise Crash(what)

        with pytest.raises(Crash, match=what):
            self.run(app, on_event=die)

    def again(self, app: Application) -> None:
        """Do the last batch's work once more, as a run does that finds it begun."""
        state = self.state(app)
        assert state.last is not None
        intent = state.last.intent
        context = self.context(app)
        views = {
            name: context.versions.view(name, version, state)
            for name, version in intent.versions.items()
        }
        inputs = BatchInputs(intent, views, state.offsets.streams)
        run_batch(context, inputs, lambda output, look=lambda: None: look())

    def rows(self, stream: str) -> list[dict[str, Any]]:
        """Return the records of a stream, by partition and offset, without their position."""
        table = self.streams.read_arrow(self.streams.all_ranges(stream))
        rows: list[dict[str, Any]] = table.drop_columns(
            [name for name in RECORD_META if name in table.column_names]
        ).to_pylist()
        return rows

    def state(self, app: Application) -> ApplicationState:
        return BatchLog(self.lake, app.name).read()[1]

    # -- a remote table of (k, v, w)

    def table(self, name: str = "things") -> RemoteTable[Any, Any, Any]:
        store = SqliteTable(
            self.folder / f"{name}.sqlite",
            name,
            "k",
            columns={"k": "string", "v": "int", "w": "int"},
            create=True,
        )
        return RemoteTable(name, key="k", read_function=store, write_function=store)

    def records(self, name: str = "things") -> dict[str, tuple[Any, ...]]:
        with sqlite3.connect(self.folder / f"{name}.sqlite") as connection:
            rows = connection.execute(f"SELECT k, v, w FROM {name}").fetchall()
        return {row[0]: row[1:] for row in rows}


def twin_of(world: StepWorld, name: str = "twin") -> StepWorld:
    """Return a copy of the lake, with its tables."""
    copied = world.folder.parent / f"{world.folder.name}-{name}"
    shutil.copytree(world.folder, copied)
    return replace(
        world, lake=open_lake(copied / "lake"), folder=copied, sequences=dict(world.sequences)
    )
