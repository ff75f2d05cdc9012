"""Datasets whose entries change in every way that there is, and applications that follow them;
plain dictionaries say what has to come of it.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.policies import DeltaCompaction, DiscardPolicy
from dagster_adjunct.assets.reading.change_streams import ChangeImageStreams, ChangeStreams
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.maintenance.expire import erase_keys, expire_versions
from dagster_adjunct.orchestration.maintenance.repartition import repartition_dataset
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.system import StreamSystem
from tests.faulty_store import Crash
from tests.orchestration.step_world import StepWorld, crash_at

Content = dict[str, tuple[int | None, int | None]]
"""By key: v and w."""
Rows = Mapping[str, tuple[int | None, int | None]]
KEYS = "abcdefghijkl"
KEEP_LITTLE = DiscardPolicy(keep=1, grace=timedelta(0))
WHY = {"reason": "test", "by": "test"}


class ChangingWorld(StepWorld):
    """A lake in memory, whose changes of datasets can be read."""

    @property
    def systems(self) -> dict[str, StreamSystem]:
        return {
            "lake": self.streams,
            "changes": ChangeStreams(self.lake),
            "change-images": ChangeImageStreams(self.lake),
        }


def new_world(folder: Path) -> ChangingWorld:
    return ChangingWorld(lake_in(InMemoryStore()), folder, IN_PROCESS)


def mirror_of(dataset: AdjunctDataset, world: StepWorld, **options: Any) -> Application:
    """Return an application that keeps a table, a second dataset's stream and a stream of images
    equal to the dataset.
    """
    app = Application("mirror", engine="auto", **options)
    copied = app.output_stream("lake.copied", partitions=2, key="k")
    app.input_changes(dataset).send_to(copied).send_to(app.table(world.table()))
    app.input_changes(dataset, images=True).send_to(
        app.output_stream("lake.images", partitions=2, key="k")
    )
    return app


COPY = unbounded_dataset("copy", input="lake.copied", key="k", partitions=2)


@dataclass
class Changing:
    """A dataset `planes`, and what it serves."""

    world: ChangingWorld
    draw: random.Random
    partitions: int | None = 2
    served: Content = field(default_factory=dict)

    def declare(self) -> AdjunctDataset:
        raise NotImplementedError

    @property
    def layout(self) -> dict[str, Any]:
        if self.partitions is None:
            return {"broadcast": True}
        return {"partitions": self.partitions}

    @property
    def versions(self) -> StoredVersions:
        return StoredVersions(self.world.lake, "planes")

    def begin(self) -> None:
        self.world.stream("planes", "k", 1, k="string", v="int", w="int")

    def send(self, rows: Rows, gone: Sequence[str] = (), **options: Any) -> None:
        """Change these entries, and delete those of the keys that are gone."""
        raise NotImplementedError

    def advance(self, declared: AdjunctDataset | None = None) -> None:
        advance_dataset(
            declared or self.declare(),
            lake=self.world.lake,
            systems={"lake": self.world.streams},
            spark=IN_PROCESS,
            by="test",
        )

    def draw_row(self) -> tuple[int | None, int | None]:
        return self.draw.choice([0, 1, None]), self.draw.choice([0, 1])

    def draw_keys(self) -> list[str]:
        return self.draw.sample(KEYS, self.draw.randrange(1, 6))

    def discard(self) -> None:
        expire_versions(self.world.lake, "planes", KEEP_LITTLE, by="test")

    def repartition(self) -> None:
        """Rewrite it into another number of partitions; who follows it has to be level with it."""
        if self.partitions is None:
            return
        wanted = 5 - self.partitions
        repartition_dataset(self.world.lake, "planes", wanted, **WHY)
        self.partitions = wanted


class Following(Changing):
    """It follows a change stream."""

    def declare(self) -> AdjunctDataset:
        return unbounded_dataset(
            "planes",
            input="lake.planes",
            key="k",
            compaction=DeltaCompaction(inside_commit=False),
            **self.layout,
        )

    def change(self) -> None:
        sent = {key: self.draw_row() for key in self.draw_keys()}
        gone = self.draw.sample(KEYS, 2)
        self.send(sent, [key for key in gone if key not in sent])

    def send(self, rows: Rows, gone: Sequence[str] = (), **options: Any) -> None:
        self.world.send(
            "planes",
            *[(key, *row) for key, row in rows.items()],
            deleted=[(key, None, None) for key in gone],
        )
        self.advance(**options)
        self.served |= rows
        for key in gone:
            self.served.pop(key, None)

    def compact(self) -> None:
        level = self.draw.choice(["minor", "major"])
        compact_dataset(self.world.lake, "planes", spark=IN_PROCESS, by="test", level=level)

    def erase(self) -> None:
        key = self.draw.choice(KEYS)
        self.send({}, [key])
        erase_keys(self.world.lake, "planes", [key], **WHY)

    def erase_what_is_served(self) -> None:
        """Erase a key without a tombstone before; one follows later, so that a rebuild keeps it
        away.
        """
        key = self.draw.choice(KEYS)
        erase_keys(self.world.lake, "planes", [key], **WHY)
        self.served.pop(key, None)
        self.world.send("planes", deleted=[(key, None, None)])

    def rebuild(self) -> None:
        rebuild_dataset(
            self.declare(),
            lake=self.world.lake,
            systems={"lake": self.world.streams},
            spark=IN_PROCESS,
            **WHY,
        )

    @property
    def actions(self) -> list[Callable[[], None]]:
        changes = [self.change] * 4
        rare = [self.compact, self.compact, self.erase, self.erase_what_is_served, self.rebuild]
        return [*changes, *rare, self.discard, self.discard]


class Delivered(Changing):
    """It arrives in versions."""

    number = 0

    def declare(self) -> AdjunctDataset:
        return bounded_dataset("planes", input="lake.planes", key="k", **self.layout)

    def change(self) -> None:
        sent = {key: self.draw_row() for key in self.draw_keys()}
        others = sorted(self.served.keys() - sent.keys())
        self.send(sent, self.draw.sample(others, min(2, len(others))))

    def send(self, rows: Rows, gone: Sequence[str] = (), **options: Any) -> None:
        self.number += 1
        content = {**self.served, **rows}
        for key in gone:
            del content[key]
        self._deliver(content, **options)

    def _deliver(self, content: Content, **options: Any) -> None:
        rows = [(key, *row) for key, row in content.items()]
        self.world.send("planes", *rows, version=f"v{self.number}")
        self.advance(**options)
        self.look()

    def look(self) -> None:
        """Note what is served, as a whole read says."""
        self.served = entries_of(self.world, "planes")

    def rollback(self) -> None:
        self._if_possible(lambda: self.versions.rollback(**WHY))

    def pin(self) -> None:
        refs = [ref for ref in self.versions.versions() if ref.state == "sealed"]
        if refs:
            self._if_possible(lambda: self.versions.pin(self.draw.choice(refs).id, **WHY))

    def unpin(self) -> None:
        self._if_possible(lambda: self.versions.unpin(**WHY))

    def revoke(self) -> None:
        served = self.versions.manifest()
        if served is not None and served.served_id is not None:
            self._if_possible(lambda: self.versions.revoke(str(served.served_id), **WHY))

    def erase(self) -> None:
        erase_keys(self.world.lake, "planes", [self.draw.choice(KEYS)], **WHY)
        self.look()

    def _if_possible(self, act: Callable[[], object]) -> None:
        try:
            act()
        except DatasetError:
            return
        self.look()

    @property
    def actions(self) -> list[Callable[[], None]]:
        switches = [self.rollback, self.pin, self.unpin, self.unpin, self.revoke]
        return [self.change, self.change, self.change, *switches, self.erase, self.discard]


def entries_of(world: StepWorld, dataset: str) -> Content:
    """Return what a dataset serves, read as a whole."""
    view = StoredVersions(world.lake, dataset).current()
    if view is None:
        return {}
    return {key: (entry["v"], entry["w"]) for key, entry in view.items()}


def follow(world: StepWorld, app: Application, **options: Any) -> None:
    run_step(world.context(app, **options))


def follow_and_die(world: StepWorld, app: Application, what: str) -> None:
    """Run the application, whose process ends at its first event of this name, if there is one."""
    with suppress(Crash):
        run_step(world.context(app, on_event=crash_at(what)))


def abandon(world: StepWorld) -> bool:
    """Abandon the open batch of the mirror; return whether there was one."""
    log = BatchLog(world.lake, "mirror")
    if log.read().state.open is None:
        return False
    log.abandon(skip=False, **WHY)
    return True


def check_followed(world: StepWorld, served: Content, *, repeated: bool = False) -> None:
    """Check that all that the mirror keeps is equal to what is served; images only if no batch was
    abandoned, whose records come again.
    """
    kept: Content = {}
    with suppress(sqlite3.OperationalError):  # nothing has ever been sent to it
        kept = world.records()
    assert kept == served
    if "copied" not in world.streams.list_streams():
        return
    world.advance(COPY)
    assert entries_of(world, "copy") == served
    assert repeated or apply_images(world) == served


def apply_images(world: StepWorld) -> Content:
    """Return what the images come to, and check that each begins with what the ones before it
    left.
    """
    held: Content = {}
    for image in world.rows("images"):
        key = image["k"]
        before, after = image["before"], image["after"]
        known = held.get(key)
        expected = "insert" if known is None else "delete" if after is None else "update"
        assert image["kind"] == expected
        if before is not None:
            assert (before["v"], before["w"]) == known
        if after is None:
            held.pop(key)
        else:
            held[key] = (after["v"], after["w"])
    return held
