"""What dry runs of deletions and renames say is what then happens, in drawn states of a lake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct import Application
from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import DiscardReport
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.switches import VersionActions
from dagster_adjunct.orchestration.maintenance.delete import (
    DeletionReport,
    delete_dataset,
    delete_stream,
)
from dagster_adjunct.orchestration.maintenance.expire import expire_versions
from dagster_adjunct.orchestration.maintenance.rename import rename_application
from dagster_adjunct.orchestration.maintenance.repartition import (
    repartition_dataset,
    repartition_stream,
)
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources.errors import AdjunctError, StillReadError
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.startpoints import StartpointOldest, Startpoints
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.rounds import rounds

pytestmark = [pytest.mark.lengthy, pytest.mark.rounds]
KEYS = [f"k{number}" for number in range(6)]
SCHEMA = Schema.of(k="string", n="bigint")
WHO: dict[str, Any] = {"by": "test", "reason": "to see"}


@dataclass
class Drawn:
    """A lake in memory with a bounded and an unbounded dataset and an application that joins both,
    in a state that `dice` draw.
    """

    dice: Random
    open: ExitStack
    store: InMemoryStore = field(default_factory=InMemoryStore)
    sent: int = 0

    def __post_init__(self) -> None:
        self.lake = lake_in(self.store)
        self.streams = LakeStreams(self.lake)
        for stream in ("deliveries", "changes", "orders"):
            self.streams.create(stream, schema=SCHEMA, key=["k"], partitions=2)
        steps = [
            self.send,
            self.advance,
            self.run,
            self.crash_in_run,
            self.crash_in_advance,
            self.lease,
            self.switch,
            self.compact,
            self.expire,
            self.request,
        ]
        self.send()
        self.advance()
        for _ in range(self.dice.randrange(2, 14)):
            with suppress(AdjunctError):
                self.dice.choice(steps)()

    @property
    def app(self) -> Application:
        app = Application("sums", engine="auto", max_batch_records=4)
        deliveries = bounded_dataset("goods", input="lake.deliveries", key="k", partitions=2)
        changes = unbounded_dataset("facts", input="lake.changes", key="k", partitions=2)
        goods, facts = app.table(deliveries), app.table(changes)
        orders = app.input_stream("lake.orders", default_offset="oldest")
        joined = orders.join(goods, on="k", how="left", select=["n as good"])
        joined = joined.join(facts, on="k", how="left", select=["n as fact"])
        joined.send_to(app.output_stream("lake.out", partitions=1, key="k"))
        seen = app.local_table("seen", key="k", schema=SCHEMA, partitions=1)
        orders.select("k", "n").send_to(seen)
        return app

    def send(self) -> None:
        self.sent += 1
        for stream in ("deliveries", "changes", "orders"):
            keys = self.dice.sample(KEYS, self.dice.randrange(1, len(KEYS)))
            rows = [{"k": key, "n": 100 * self.sent + number} for number, key in enumerate(keys)]
            version = f"v{self.sent}" if stream == "deliveries" else None
            table = pa.Table.from_pylist(rows, SCHEMA.to_arrow())
            self.streams.append(
                stream, table, producer="t", sequence=self.sent, end_of_dataset=version
            )

    def advance(self, lake: Lake | None = None) -> None:
        lake = lake or self.lake
        systems = {"lake": LakeStreams(lake)}
        for dataset in self.app.datasets:
            advance_dataset(dataset, lake=lake, systems=systems, spark=IN_PROCESS, by="test")

    def run(self, lake: Lake | None = None) -> None:
        lake = lake or self.lake
        run_application(self.app, lake=lake, spark=IN_PROCESS, wait=0, take_over=True)

    def crash_in(self, work: Callable[[Lake], None]) -> None:
        fault = Fault("*", self.dice.randrange(5, 120), "crash-before")
        with suppress(Crash):
            work(Lake(FaultyStore(self.store, [fault]), self.lake.id, run_ttl=timedelta(seconds=1)))

    def crash_in_run(self) -> None:
        self.crash_in(self.run)

    def crash_in_advance(self) -> None:
        self.crash_in(self.advance)

    def lease(self) -> None:
        name = self.dice.choice(["goods", "facts"])
        current = StoredVersions(self.lake, name).require_current()
        self.open.enter_context(
            Lease.acquire(self.lake, name, [current.version], holder=f"reader {self.sent}")
        )

    def switch(self) -> None:
        log = StoredVersions(self.lake, "goods").log
        refs = log.read()[1].versions
        actions = VersionActions(log)
        version = self.dice.choice(refs).id
        act = self.dice.choice([actions.pin, actions.rollback, actions.revoke])
        act(version, **WHO)

    def compact(self) -> None:
        compact_dataset(self.lake, "facts", spark=IN_PROCESS, by="test", level="major")

    def expire(self) -> None:
        expire_versions(self.lake, "facts", self.policy(), by="test")

    def request(self) -> None:
        Startpoints(self.app, lake=self.lake).request("lake.orders", StartpointOldest(), **WHO)

    def policy(self) -> DiscardPolicy:
        keep = self.dice.choice([None, 1, 2])
        return DiscardPolicy(keep=keep, grace=self.dice.choice([timedelta(0), timedelta(days=1)]))

    def objects(self) -> dict[str, int]:
        """Return the sizes of all objects; clocks are no content."""
        return {
            item.key: item.size
            for item in self.store.list("")
            if not item.key.endswith(("/clock", "run.json"))
        }


@pytest.fixture
def drawn(seed: int) -> Any:
    with ExitStack() as stack:
        yield Drawn(Random(seed), stack)


@pytest.mark.parametrize("seed", range(rounds(6, 300)))
def test_what_a_dry_run_of_expire_lists_is_what_goes(drawn: Drawn) -> None:
    for name in drawn.dice.sample(["goods", "facts", "seen"], 3):
        policy = drawn.policy()
        before = drawn.objects()
        try:
            planned = expire_versions(drawn.lake, name, policy, by="test", dry_run=True)
        except AdjunctError as error:
            with pytest.raises(type(error)):
                expire_versions(drawn.lake, name, policy, by="test")
            continue
        assert drawn.objects() == before
        done = expire_versions(drawn.lake, name, policy, by="test")
        after = drawn.objects()
        assert decisions(planned) == decisions(done), name
        gone = {key: size for key, size in before.items() if key not in after}
        for decision in (*planned.discarded, *planned.garbage):
            where = decision.what
            attempt = where.partition("-")[2] if decision.name else where
            assert any(attempt in key for key in gone) or decision in planned.spared, decision
        kept = [decision.what for decision in (*planned.kept, *planned.spared)]
        for key in gone:
            assert not any(where in key for where in kept), key
        assert done.objects <= len(gone)


def decisions(report: DiscardReport) -> dict[str, Any]:
    return {
        "discarded": report.discarded,
        "kept": report.kept,
        "garbage": report.garbage,
        "spared": report.spared,
        "unpinned": report.unpinned,
        "retained_from": report.retained_from,
    }


@pytest.mark.parametrize("seed", range(rounds(6, 300)))
def test_what_a_dry_run_of_delete_says_is_what_happens(drawn: Drawn) -> None:
    targets: list[tuple[Callable[..., DeletionReport], str, str]] = [
        (delete_dataset, "goods", "datasets/goods/"),
        (delete_dataset, "facts", "datasets/facts/"),
        (delete_dataset, "seen", "datasets/seen/"),
        (delete_stream, "changes", "streams/changes/"),
        (delete_stream, "deliveries", "streams/deliveries/"),
        (delete_stream, "orders", "streams/orders/"),
        (delete_stream, "out", "streams/out/"),
    ]
    for delete, name, folder in drawn.dice.sample(targets, 5):
        before = drawn.objects()
        try:
            planned = delete(drawn.lake, name, dry_run=True, **WHO)
        except AdjunctError as error:
            with pytest.raises(type(error)):
                delete(drawn.lake, name, **WHO)
            continue
        assert drawn.objects() == before
        refused = (*planned.blocking, *planned.affected)
        if refused:
            with pytest.raises(StillReadError) as still_read:
                delete(drawn.lake, name, **WHO)
            assert still_read.value.readers == refused
            assert drawn.objects() == before
        if planned.blocking:
            with pytest.raises(StillReadError) as blocked:
                delete(drawn.lake, name, force=True, **WHO)
            assert blocked.value.readers == refused
            assert drawn.objects() == before
            continue
        done = delete(drawn.lake, name, force=bool(refused), **WHO)
        after = drawn.objects()
        gone = {key: size for key, size in before.items() if key not in after}
        assert (done.objects, done.size) == (planned.objects, planned.size)
        assert (len(gone), sum(gone.values())) == (planned.objects, planned.size)
        assert all(key.startswith(folder) for key in gone)
        left = delete(drawn.lake, name, dry_run=True, **WHO)
        again = delete(drawn.lake, name, **WHO)
        assert (left.objects, left.size) == (again.objects, again.size)
        assert left.repeated
        assert again.repeated


@pytest.mark.parametrize("seed", range(rounds(6, 300)))
def test_what_a_dry_run_of_rename_says_is_what_happens(drawn: Drawn) -> None:
    new = drawn.dice.choice(["totals", "sums", "goods"])
    before = drawn.objects()
    try:
        planned = rename_application(drawn.lake, "sums", new, dry_run=True, **WHO)
    except AdjunctError as error:
        with pytest.raises(type(error)):
            rename_application(drawn.lake, "sums", new, **WHO)
        return
    assert drawn.objects() == before
    done = rename_application(drawn.lake, "sums", new, **WHO)
    assert (done.batches, done.local_tables) == (planned.batches, planned.local_tables)
    assert planned.summary().replace("would be", "is").replace("would continue", "continues") == (
        done.summary()
    )


@pytest.mark.parametrize("seed", range(rounds(6, 300)))
def test_what_a_dry_run_of_repartition_says_of_a_stream_is_what_happens(drawn: Drawn) -> None:
    for name in drawn.dice.sample(["changes", "deliveries", "orders", "out"], 2):
        before = drawn.objects()
        partitions = drawn.dice.randrange(1, 5)
        try:
            planned = repartition_stream(drawn.lake, name, partitions, dry_run=True, **WHO)
        except AdjunctError as error:
            with pytest.raises(type(error)):
                repartition_stream(drawn.lake, name, partitions, **WHO)
            continue
        assert drawn.objects() == before
        refused = (*planned.blocking, *planned.affected)
        if refused:
            with pytest.raises(StillReadError) as still_read:
                repartition_stream(drawn.lake, name, partitions, **WHO)
            assert still_read.value.readers == refused
        if planned.blocking:
            continue
        done = repartition_stream(drawn.lake, name, partitions, force=bool(refused), **WHO)
        assert done == replace(planned, dry_run=False)
        assert drawn.streams.info(name).partitions == partitions


def readers_in(pending: Sequence[str]) -> set[str]:
    """Return who reads what is pending: "leased by …"."""
    return {text.partition(": ")[2] for text in pending}


@pytest.mark.parametrize("seed", range(rounds(6, 300)))
def test_what_a_dry_run_of_repartition_says_of_a_dataset_is_what_happens(drawn: Drawn) -> None:
    for name in drawn.dice.sample(["goods", "facts", "seen"], 2):
        before = drawn.objects()
        partitions = drawn.dice.randrange(1, 5)
        try:
            planned = repartition_dataset(drawn.lake, name, partitions, dry_run=True, **WHO)
        except AdjunctError as error:
            with pytest.raises(type(error)):
                repartition_dataset(drawn.lake, name, partitions, **WHO)
            continue
        assert drawn.objects() == before
        content = served(drawn.lake, name)
        if planned.holding:
            with pytest.raises(StillReadError):
                repartition_dataset(drawn.lake, name, partitions, **WHO)
            continue
        done = repartition_dataset(drawn.lake, name, partitions, **WHO)
        # Ids are new. The dry run names the copies that are read, the other one their objects.
        foreseen = replace(done, versions=dict.fromkeys(done.versions, ""), pending=planned.pending)
        assert replace(foreseen, dry_run=True) == planned
        assert readers_in(planned.pending) == readers_in(done.pending)
        assert served(drawn.lake, name) == content


def served(lake: Lake, name: str) -> dict[str, Any] | None:
    current = StoredVersions(lake, name).current()
    return None if current is None else dict(current.items())
