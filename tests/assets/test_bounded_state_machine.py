"""Any history of deliveries, advances, crashes, operators, readers and discards, against a plain
model.

At every point a new reader gets exactly one whole version, the one of the model; what a reader
holds stays whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dagster_adjunct.assets.bounded.advance import abandon_version
from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.retention import discard as discard_module
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.versions.leases import Lease, list_leases
from dagster_adjunct.assets.versions.version import Verdict
from dagster_adjunct.resources.bucketing.hashing import bucket_of_key
from dagster_adjunct.resources.errors import DatasetError, ManifestMismatchError
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.assets.cycle import (
    WHY,
    content,
    data_and_documents,
    faulty,
    objects,
    pin_that_has_ended,
    planes_in,
    reached,
)
from tests.assets.versions_model import KEYS, MOST_ROWS, Entries, Model, Partition, Refused
from tests.faulty_store import Crash, Fault
from tests.rounds import rounds

PARTITIONS, IN_FLIGHT, KEEP = 2, 3, 2
POLICY = DiscardPolicy(keep=KEEP, grace=timedelta(0))
ROWS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.sampled_from([1, 1, 2, None])), min_size=1, max_size=4
)
CRASHES = st.one_of(
    st.none(), st.tuples(st.integers(1, 40), st.sampled_from(["crash-before", "crash-after"]))
)
BACK, NOT_THERE = st.integers(0, 5), 5
ALL = ("sealed", "rejected", "revoked")


class NotTooMany:
    """Refuses versions of many rows."""

    name = "not_too_many"
    severity = "error"

    def __call__(self, candidate) -> Verdict:
        rows = len(content(candidate.view))
        return Verdict(name=self.name, passed=rows <= MOST_ROWS, message=f"{rows} rows")


SPEC = bounded_dataset(
    "planes", input="lake.planes", key="k", partitions=PARTITIONS, validators=[NotTooMany()]
)


class Reader:
    """Holds one view, by a lease or only by luck."""

    def __init__(self, view: VersionReader, entries: Entries, lease: Lease | None) -> None:
        self.view, self.entries, self.lease = view, entries, lease

    def check(self) -> None:
        try:
            assert content(self.view) == self.entries
        except ManifestMismatchError:
            assert self.lease is None, "what is leased was deleted"
        if self.lease is not None:
            self.lease.check()


class BoundedMachine(RuleBasedStateMachine):
    """The real cycle in a lake in memory, and the model."""

    @initialize()
    def begin(self) -> None:
        self.world = planes_in(lake_in(InMemoryStore()))
        self.model = Model([Partition() for _ in range(PARTITIONS)])
        self.readers: list[Reader] = []
        self.newest = 0

    def teardown(self) -> None:
        for reader in getattr(self, "readers", []):
            if reader.lease is not None:
                reader.lease.release()

    # -- what producers do

    @rule(rows=ROWS)
    def deliver(self, rows: list[tuple[str, int | None]]) -> None:
        self.world.send("planes", rows)
        for key, value in rows:
            self.model.partitions[bucket_of_key([key], ["string"], PARTITIONS)].rows.append(
                (key, value)
            )

    @rule(rows=ROWS, crash=CRASHES, advance=st.booleans())
    def deliver_whole(
        self, rows: list[tuple[str, int | None]], crash: tuple[int, str] | None, advance: bool
    ) -> None:
        """End a version in every partition: the newest that any of them has begun, or the one
        after it.
        """
        self.deliver(rows)
        newest = max(len(marked.closed) for marked in self.model.partitions) + advance
        for partition, stream in enumerate(self.model.partitions):
            while len(stream.closed) < newest:
                self._mark(partition, f"d{len(stream.closed) + 1}", False)
        if advance:
            self.advance(crash)

    @rule(
        partition=st.integers(0, PARTITIONS - 1),
        promised_more=st.sampled_from([False] * 5 + [True]),
    )
    def mark(self, partition: int, promised_more: bool) -> None:
        """End the next version in one partition; others may be several versions behind."""
        number = 1 + len(self.model.partitions[partition].closed)
        slowest = min(len(marked.closed) for marked in self.model.partitions)
        if number <= slowest + IN_FLIGHT:
            self._mark(partition, f"d{number}", promised_more)

    @rule(partition=st.integers(0, PARTITIONS - 1), back=BACK)
    def mark_again(self, partition: int, back: int) -> None:
        """Deliver again what was delivered before, whether that has been published yet or not."""
        closed = len(self.model.partitions[partition].closed)
        if back < closed and f"d{closed - back}" not in self.model.freed:
            self._mark(partition, f"d{closed - back}", False)

    @precondition(lambda self: self.model.freed and not self.model.in_flight())
    @rule(rows=ROWS)
    def deliver_a_freed_version_again(self, rows: list[tuple[str, int | None]]) -> None:
        """Deliver under a name that was freed, whole, when no other version is on its way."""
        name = min(self.model.freed)
        self.deliver(rows)
        self.model.freed.remove(name)
        for partition, stream in enumerate(self.model.partitions):
            stream.closed.pop(name, None)
            self._mark(partition, name, False)

    def _mark(self, partition: int, version: str, promised_more: bool) -> None:
        rows = (
            {partition: len(self.model.partitions[partition].rows) + 1} if promised_more else None
        )
        self.world.mark("planes", version, [partition], rows)
        self.model.partitions[partition].mark(version, promised_more=promised_more)

    # -- the cycle, which may die at any request

    @rule(crash=CRASHES)
    def advance(self, crash: tuple[int, str] | None) -> None:
        before = self.model.served
        outcomes = [deepcopy(self.model)]
        self.model.expire()
        outcomes.append(deepcopy(self.model))
        while (name := self.model.next_name()) is not None:
            self.model.settle(name)
            outcomes.append(deepcopy(self.model))
        self._run(lambda lake: self.world.advance(SPEC, lake=lake), crash, outcomes)
        if self.model.pin is None and not outcomes[0].pin_ends:
            assert before is None or (self.model.served or 0) >= before, (
                "versions don't go backwards by themselves"
            )

    @rule(crash=CRASHES)
    def discard(self, crash: tuple[int, str] | None) -> None:
        outcomes = [deepcopy(self.model)]
        self.model.expire()
        outcomes.append(deepcopy(self.model))
        self.model.discard(
            KEEP, {reader.view.sealed.number for reader in self.readers if reader.lease is not None}
        )
        outcomes.append(deepcopy(self.model))
        if self._made():
            self._run(lambda lake: discard(lake, "planes", POLICY, by="test"), crash, outcomes)

    def _run(
        self, act: Callable[[Lake], object], crash: tuple[int, str] | None, outcomes: list[Model]
    ) -> None:
        """Act, and die where it is asked for: the model then is what the lake says, if that is
        one of the outcomes.
        """
        try:
            act(faulty(self.world, Fault("*", crash[0], crash[1])) if crash else self.world.lake)  # type: ignore[arg-type]
        except Crash:
            for lease in list_leases(self.world.lake, "planes"):
                # of an advance that died while it judged: it runs out
                if lease.holder != "a reader":
                    self.world.lake.store.delete(lease.key)
            seen = self._seen()
            self.model = next(
                (outcome for outcome in reversed(outcomes) if outcome.seen() == seen), outcomes[-1]
            )

    # -- what operators do

    @precondition(lambda self: self.model.delivered)
    @rule(back=BACK, ends=st.booleans(), crash=CRASHES)
    def pin(self, back: int, ends: bool, crash: tuple[int, str] | None) -> None:
        def act(store: StoredVersions, name: str) -> None:
            if ends:
                pin_that_has_ended(store, name)
            else:
                store.pin(name, **WHY)

        self._operate(back, crash, act, lambda m, n: m.pin_to(n, ends=ends))

    @precondition(lambda self: self.model.delivered)
    @rule(crash=CRASHES)
    def unpin(self, crash: tuple[int, str] | None) -> None:
        self._operate(0, crash, lambda store, _: store.unpin(**WHY), lambda m, _: m.unpin())

    @precondition(lambda self: self.model.delivered)
    @rule(back=st.one_of(st.none(), BACK), crash=CRASHES)
    def rollback(self, back: int | None, crash: tuple[int, str] | None) -> None:
        def act(store: StoredVersions, name: str) -> object:
            return store.rollback(None if back is None else name, **WHY)

        self._operate(back or 0, crash, act, lambda m, n: m.rollback(None if back is None else n))

    @precondition(lambda self: self.model.delivered)
    @rule(back=BACK, crash=CRASHES)
    def revoke(self, back: int, crash: tuple[int, str] | None) -> None:
        self.advance(None)  # what came again before and was not read yet would be the new version
        self._operate(back, crash, lambda store, name: store.revoke(name, **WHY), Model.revoke, ALL)

    @precondition(lambda self: self.model.delivered)
    @rule(back=BACK, crash=CRASHES, now=st.booleans())
    def force(self, back: int, crash: tuple[int, str] | None, now: bool) -> None:
        def act(store: StoredVersions, name: str) -> object:
            return store.accept(name, **WHY, make_current=now)

        self._operate(back, crash, act, lambda m, n: m.force(n, make_current=now), ("rejected",))

    @precondition(lambda self: self.model.delivered)
    @rule(back=BACK, crash=CRASHES)
    def drop(self, back: int, crash: tuple[int, str] | None) -> None:
        # what came again before the drop and was not read yet would be the new version
        self.advance(None)
        self._operate(
            back,
            crash,
            lambda store, name: store.remove_version(name, **WHY),
            Model.drop,
            ("rejected", "revoked"),
        )

    @rule(ahead=st.integers(0, 1))
    def abandon(self, ahead: int) -> None:
        """End a version that is not complete yet, or that nobody has marked."""
        ended = {*self.model.names, *self.model.abandoned, *self.model.freed}
        number = 1
        while f"d{number}" in ended:
            number += 1
        name = f"d{number + ahead}"
        if self._made() and not all(
            name in partition.closed for partition in self.model.partitions
        ):
            abandon_version(self.world.lake, "planes", name, **WHY)
            self.model.abandon(name)

    def _operate(
        self,
        back: int,
        crash: tuple[int, str] | None,
        act: Callable[[StoredVersions, str], object],
        model: Callable[[Model, str], object],
        wanted: tuple[str, ...] = ("sealed",),
    ) -> None:
        names = {name: number for name, number, _ in self.model.delivered}
        states = {
            name: version.state
            for name, n in names.items()
            if (version := self.model.versions.get(n))
        }
        fitting = [name for name in names if states.get(name) in wanted] or list(names)
        name = "nothing" if back == NOT_THERE else fitting[-1 - back % len(fitting)]
        outcomes = [deepcopy(self.model)]
        try:
            model(self.model, name)
        except Refused:
            with pytest.raises(DatasetError):
                act(StoredVersions(self.world.lake, "planes"), name)
            return
        outcomes.append(deepcopy(self.model))
        self._run(lambda lake: act(StoredVersions(lake, "planes"), name), crash, outcomes)

    # -- what readers do

    @precondition(lambda self: len(self.readers) < 4)
    @rule(leased=st.booleans())
    def read(self, leased: bool) -> None:
        view = StoredVersions(self.world.lake, SPEC).current()
        if view is not None:
            lease = (
                Lease.acquire(self.world.lake, "planes", [view.version], holder="a reader")
                if leased
                else None
            )
            self.readers.append(Reader(view, self.model.readable()[view.sealed.number], lease))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 3))
    def let_go(self, which: int) -> None:
        reader = self.readers.pop(which % len(self.readers))
        reader.check()
        if reader.lease is not None:
            reader.lease.release()

    # -- what holds at every point

    @invariant()
    def a_new_reader_gets_the_one_version_that_is_served(self) -> None:
        assert self._seen() == self.model.seen()
        view = StoredVersions(self.world.lake, SPEC).current()
        served = self.model.served
        assert (None if view is None else view.sealed.number) == served
        if view is not None and served is not None:
            assert self.model.versions[served].state == "sealed"
            assert content(view) == self.model.versions[served].entries

    @invariant()
    def what_is_held_stays_whole(self) -> None:
        for reader in self.readers:
            reader.check()

    @invariant()
    def what_is_retained_can_be_read_and_what_is_revoked_can_not(self) -> None:
        if not self._made():
            return
        store, readable = StoredVersions(self.world.lake, "planes"), self.model.readable()
        assert reached(self.world.lake) <= data_and_documents(self.world.lake)
        for ref in store.versions():
            if ref.number in readable:
                assert content(store.version(ref.id)) == readable[ref.number]
            else:
                with pytest.raises(DatasetError):
                    store.version(ref.id)

    def _made(self) -> bool:
        return StoredVersions(self.world.lake, "planes").manifest() is not None

    def _seen(self) -> tuple[object, ...]:
        manifest = StoredVersions(self.world.lake, "planes").manifest()
        if manifest is None:
            return (), None, None, False, (), ()
        numbers = {ref.id: ref.number for ref in manifest.versions}
        return (
            tuple((ref.number, ref.state) for ref in manifest.versions),
            numbers[manifest.head] if manifest.head else None,
            numbers[manifest.pin.version] if manifest.pin else None,
            manifest.pin is not None and manifest.pin.expires_at is not None,
            tuple(done.name for done in manifest.delivered if not done.freed),
            tuple(sorted(ended.name for ended in manifest.abandoned)),
        )


class ToTheEnd(BoundedMachine):
    """Ends each history in peace: everybody lets go, all is advanced, and what is left is what
    is reachable.
    """

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "model"):
            return
        self.readers = []
        self.advance(None)
        self.a_new_reader_gets_the_one_version_that_is_served()
        self.discard(None)
        self.what_is_retained_can_be_read_and_what_is_revoked_can_not()
        assert data_and_documents(self.world.lake) == reached(self.world.lake)
        left = objects(self.world.lake, "datasets/planes/")
        assert {key.split("/")[2] for key in left} <= {
            "CURRENT",
            "manifests",
            "clock",
            "data",
            "versions",
        }


@pytest.fixture(autouse=True, scope="module")
def without_spark():
    with pytest.MonkeyPatch.context() as patch:
        # In one thread no build is going on while anything is discarded, however short ago it died.
        patch.setattr(discard_module, "RUNNING_WITHIN", timedelta(0), raising=False)
        yield


@pytest.mark.lengthy
@pytest.mark.rounds
def test_any_history_serves_one_whole_version(without_spark) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        ToTheEnd,
        settings=settings(
            max_examples=int(os.environ.get("ADJUNCT_HISTORIES", rounds(5, 20))),
            stateful_step_count=int(os.environ.get("ADJUNCT_STEPS", "50")),
            derandomize="ADJUNCT_HISTORIES" not in os.environ,
        ),
    )


@pytest.mark.lengthy
def test_revocations_after_rollbacks_and_forced_versions_are_as_in_the_model(without_spark) -> None:
    """What a short random history seldom comes to, step by step."""
    machine = ToTheEnd()
    machine.begin()

    def publish(number: int, keys: int) -> None:
        machine.deliver_whole([(key, number) for key in KEYS[:keys]], None, True)

    def serves(number: int) -> None:
        machine.a_new_reader_gets_the_one_version_that_is_served()
        assert machine.model.served == number

    for number in (1, 2, 3):
        publish(number, 2)
    machine.rollback(2, None)
    serves(1)
    publish(4, 2)
    serves(4)
    machine.revoke(0, None)
    serves(1)
    publish(5, MOST_ROWS + 1)
    publish(6, 2)
    machine.force(0, None, False)
    serves(6)
    publish(7, MOST_ROWS + 1)
    publish(6, 2)  # as it is: the sixth version stands for this delivery, too
    machine.force(0, None, False)
    serves(6)
    publish(9, MOST_ROWS + 1)
    machine.force(0, None, False)
    serves(8)
    publish(10, MOST_ROWS + 1)
    publish(11, 2)
    machine.force(0, None, True)
    serves(9)
    machine.revoke(1, None)
    serves(10)
    machine.teardown()
