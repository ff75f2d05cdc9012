"""Stories of drawn applications: records are sent, datasets change, runs die; and what has to be
there at the end.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState
from dagster_adjunct.orchestration.batch_log.intent import Intent
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step.context import BatchInputs, BatchMetrics, StepContext
from dagster_adjunct.orchestration.step.engines import BatchEngine, SmallBatchesInProcess
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.streams.startpoint import StartpointSpecific
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.faulty_store import Crash
from tests.orchestration.asked_table import AskedTable
from tests.orchestration.drawn_batches import DATASETS, LOOKED_UP, REFUSED, described, draw
from tests.orchestration.drawn_columns import COLUMNS, value_of
from tests.orchestration.step_world import StepWorld

_BEGINS = datetime(2026, 1, 1, tzinfo=UTC)
_COUNTED = {"g": "string", "total": "bigint", "times": "bigint"}
_SQLITE = {"string": "TEXT", "int": "INTEGER", "bigint": "INTEGER", "boolean": "INTEGER"}
Entries = dict[tuple[Any, ...], dict[str, Any]]


class Known(AskedTable):
    """A table of a lookup, which keeps what it held when a batch first asked it."""

    batch = 0

    def __init__(self, key: Sequence[str]) -> None:
        super().__init__({}, {name: COLUMNS[name] for name in key} | {"x": "bigint"})
        self.key_columns = tuple(key)
        self.held: dict[int, dict[Any, Any]] = {}

    async def get_all(self, keys: Sequence[Any], *args: object) -> dict[Any, Any]:
        self.held.setdefault(self.batch, dict(self.records))
        return await super().get_all(keys, *args)


@dataclass
class Watched(BatchEngine):
    """An engine whose batches the story hears of."""

    engine: BatchEngine
    hear: Callable[[Intent], None]

    def analyze(self, context: StepContext, *given: Any) -> Any:
        return self.engine.analyze(context, *given)

    def run(
        self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]
    ) -> BatchMetrics:
        self.hear(inputs.intent)
        return self.engine.run(context, inputs, before_output)


@dataclass
class Story:
    """A drawn application on a lake: what was sent and stored, and the batches that took it. The
    same for a seed.
    """

    world: StepWorld
    seed: int
    engine: Callable[[int], BatchEngine]
    attempts: int = 0
    now: dict[str, Entries] = field(default_factory=dict)
    versions: dict[tuple[str, str | None], Entries] = field(default_factory=dict)
    batches: dict[int, Intent] = field(default_factory=dict)
    positions: dict[SystemStreamPartition, int] = field(default_factory=dict)
    asked: dict[SystemStreamPartition, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.drawn = draw(self.random)
        self.inputs = self.drawn.of_kind("input")
        self.lookups = {
            node.name: Known(LOOKED_UP[node.target]) for node in self.drawn.of_kind("lookup")
        }
        self.datasets = sorted({node.target for node in self.drawn.of_kind("join")})

    # -- what happens

    def begin(self) -> None:
        for node in self.inputs:
            key = "k" if node.ordered else "g"
            self.world.stream(node.name, key, node.number, **COLUMNS)
        for name in self.datasets:
            self.now[name] = {}
            columns = {each: COLUMNS[each] for each in DATASETS[name].key} | {"x": "bigint"}
            self.world.stream(name, DATASETS[name].key, self.random.randrange(1, 4), **columns)
            self.change(name)
        self.send()

    def go_on(self) -> None:
        for _ in range(self.random.choice((1, 1, 2, 2, 3))):
            self.run(dies=self.random.random() < 0.4)
            if self.random.random() < 0.6:
                self.send()
            for name in [*self.datasets, *self.lookups]:
                if self.random.random() < 0.4:
                    self.change(name)
            if any(self.positions.values()) and self.random.random() < 0.2:
                self.go_back()
        self.run(dies=False)

    def send(self) -> None:
        """Append records to some inputs, also none of them."""
        for node in self.inputs:
            rows = [self._row() for _ in range(self.random.choice((0, 1, 4, 9)))]
            dead = [
                self._row()
                for _ in range(self.random.choice((0, 0, 1, 3)) if node.tombstones else 0)
            ]
            sent_at = _BEGINS + timedelta(minutes=self.world.sequences.get(node.name, 0))
            self.world.send(node.name, *rows, deleted=dead, sent_at=sent_at)

    def _row(self) -> tuple[Any, ...]:
        return tuple(value_of(kind, self.random) for kind in COLUMNS.values())

    def change(self, name: str) -> None:
        """Replace or change the entries of a dataset, which then advances, or the records of a
        lookup.
        """
        names = self.lookups[name].key_columns if name in self.lookups else DATASETS[name].key
        drawn: Entries = {}
        for _ in range(self.random.choice((0, 3, 8, 20))):
            values = tuple(value_of(COLUMNS[each], self.random) for each in names)
            if None not in values:
                drawn[values] = {"x": value_of("bigint", self.random)}
        if name in self.lookups:
            records = {
                values if len(values) > 1 else values[0]: entry for values, entry in drawn.items()
            }
            self.lookups[name].records = records
            return
        rows = [(*values, entry["x"]) for values, entry in drawn.items()]
        if DATASETS[name].follows_changes:
            old = self.now[name]
            gone = [values for values in old if values not in drawn and self.random.random() < 0.3]
            self.world.send(name, *rows, deleted=[(*values, None) for values in gone])
            drawn = {values: entry for values, entry in (old | drawn).items() if values not in gone}
        else:
            self.world.send(name, *rows, version=f"v{self.world.sequences.get(name, 0)}")
        self.now[name] = drawn
        report = advance_dataset(
            DATASETS[name],
            lake=self.world.lake,
            systems=self.world.systems,
            spark=self.world.spark,
            by="test",
        )
        self.versions[name, report.version] = drawn

    def go_back(self) -> None:
        """Have an input be read from another offset, mostly again."""
        ssp = self.random.choice(sorted((ssp for ssp in self.positions if self.end(ssp)), key=str))
        self.asked[ssp] = self.random.randrange(self.end(ssp))
        startpoints = Startpoints(self._app(), lake=self.world.lake)
        startpoints.request(
            str(ssp),
            StartpointSpecific(str(self.asked[ssp])),
            by="test",
            reason="again",
            replace=True,
        )

    def end(self, ssp: SystemStreamPartition) -> int:
        return int(self.world.streams.all_ranges(ssp.stream)[ssp].end)

    def run(self, *, dies: bool) -> None:
        """Run to the end, or up to the beginning of an output or the end of a batch."""
        ends = self.random.randrange(1, 12) if dies else -1

        def die(event: StepEvent) -> None:
            nonlocal ends
            ends -= event.what in ("output", "outputs")
            if not ends:
                raise Crash

        self.attempts += 1
        engine = Watched(self.engine(self.attempts), self.hear)
        with suppress(Crash):
            context = self.world.context(self._app(), on_event=die)
            assert context.plan.engine.needs_spark == ()
            report = run_step(context, engine)
            assert report.caught_up
            if isinstance(engine.engine, SmallBatchesInProcess):
                assert report.in_process_batches == report.batches

    def hear(self, intent: Intent) -> None:
        """Check that a batch goes on where the one before ended, or where it was asked to, or
        that it is repeated.
        """
        for table in self.lookups.values():
            table.batch = intent.batch
        before = self.batches.setdefault(intent.batch, intent)
        assert (before.ranges, before.versions) == (intent.ranges, intent.versions)
        if before is not intent:
            return
        for ssp, span in intent.ranges.items():
            begin = self.asked.pop(ssp) if ssp in intent.startpoints else self.positions.get(ssp, 0)
            assert int(span.start) == begin
            self.positions[ssp] = int(span.end)

    def _app(self) -> Application:
        return described(self.drawn, self._tables())

    def _tables(self) -> dict[str, RemoteTable[Any, Any, Any]]:
        tables: dict[str, RemoteTable[Any, Any, Any]] = {}
        for node in self.drawn.of_kind("table"):
            columns = (
                COLUMNS
                if node.how == "put"
                else {name: COLUMNS[name] for name in node.on} | _COUNTED
            )
            if node.refuses:
                self._create_refusing(node.name, node.on)
            store = SqliteTable(self.file, node.name, node.on, columns=columns, create=True)
            on_replay: Any = "skip" if node.skips else "apply"
            tables[node.name] = RemoteTable(
                node.name, key=node.on, write_function=store, idempotent=True, on_replay=on_replay
            )
        for name, known in self.lookups.items():
            tables[name] = RemoteTable(name, key=known.key_columns, read_function=known)
        return tables

    def _create_refusing(self, name: str, key: Sequence[str]) -> None:
        """Create a table that refuses what `REFUSED` says."""
        columns = ", ".join(f"{each} {_SQLITE[kind]}" for each, kind in COLUMNS.items())
        declared = f"{columns}, PRIMARY KEY ({', '.join(key)}), CHECK (v IS NULL OR v <= {REFUSED})"
        with closing(sqlite3.connect(self.file)) as connection:
            connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({declared})")

    @property
    def file(self) -> Path:
        """The SQLite file of the tables."""
        return self.world.folder / f"tables-{self.seed}.sqlite"

    @property
    def state(self) -> ApplicationState:
        return self.world.state(self._app())

    def on_a_copy(self, world: StepWorld, engine: Callable[[int], BatchEngine]) -> Story:
        """Return the same story on a copy of its lake, where it goes on alike."""
        story = Story(world, self.seed, engine, now=dict(self.now), versions=dict(self.versions))
        story.random.setstate(self.random.getstate())
        return story
