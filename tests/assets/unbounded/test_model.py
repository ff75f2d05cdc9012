"""Any history of changes, advances, compactions, rebuilds, discards, crashes and competitors,
against a dictionary.

What a version holds is what the facts sent up to its offsets come to: at every point, by key and in
order, for who reads anew, who holds a version, and who goes back to one. A few histories are read
by Spark as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import DeadLetters, DeltaCompaction, DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.validation.validators import sql_check
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    ManifestMismatchError,
    StoreUnavailableError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.unbounded.facts import (
    BY_HAND,
    DEAD,
    KEYS,
    NAME,
    Content,
    Fact,
    Log,
    by_spark,
    content,
    ends_of,
    facts_in,
    faulty,
    letters,
    send,
    spans_of,
    table_of,
)
from tests.faulty_store import Crash, Fault
from tests.rounds import rounds

POLICY = DiscardPolicy(keep=2, grace=timedelta(0))
KEPT = 6
FACTS = st.lists(
    st.tuples(
        st.sampled_from([*KEYS, *KEYS, None]), st.integers(0, 20), st.none() | st.integers(0, 99)
    ),
    min_size=1,
    max_size=6,
)
CRASHES = st.none() | st.tuples(
    st.integers(1, 45), st.sampled_from(["crash-before", "crash-after", "lost-after"])
)
LEVELS = st.sampled_from(["minor", "major", None])
OPTIONS = st.fixed_dictionaries(
    {
        "broadcast": st.booleans(),
        "order": st.sampled_from(["offset", "at", "at, forgetting"]),
        "chunk": st.sampled_from([2, 5, 1000]),
        "dead": st.booleans(),
        "bootstrap": st.sampled_from([True, True, False]),
        "inside": st.booleans(),
        "limit": st.sampled_from([None, 70]),  # with dead letters
    }
)


def declared(options: dict[str, Any]) -> AdjunctDataset:
    by_position = options["order"] != "offset"
    rules = []
    if options["dead"] and options["limit"] is not None:
        rules = [sql_check("small", f"n < {options['limit']}")]
    return table_of(
        validators=rules,
        broadcast=options["broadcast"],
        order_by="at" if by_position else None,
        keep_tombstones=KEPT if options["order"] == "at, forgetting" else None,
        chunk=options["chunk"],
        on_bad_change=DeadLetters(f"lake.{DEAD}") if options["dead"] else "fail",
        bootstrap=options["bootstrap"],
        compaction=DeltaCompaction(deltas=3, fraction=0.5) if options["inside"] else BY_HAND,
    )


class Reader:
    """Holds one view, by a lease or only by luck."""

    def __init__(self, view: VersionReader, entries: Content, lease: Lease | None) -> None:
        self.view, self.entries, self.lease = view, entries, lease

    def check(self) -> None:
        try:
            assert content(VersionReader(self.view.store, NAME, self.view.sealed)) == self.entries
        except ManifestMismatchError:
            assert self.lease is None, "what is leased was deleted"


class FactsMachine(RuleBasedStateMachine):
    """The cycle in a lake of its own, and the log of what was sent."""

    make: Callable[[], World]

    @initialize(options=OPTIONS, facts=FACTS)
    def begin(self, options: dict[str, Any], facts: list[Fact]) -> None:
        self.world = type(self).make()
        self.spec = declared(options)
        self.dead = options["dead"]
        limit = options["limit"] if self.dead else None
        self.log = Log(by_position=options["order"] != "offset", limit=limit)
        self.readers: list[Reader] = []
        self.held: dict[
            str, tuple[int, Content]
        ] = {}  # version -> number of its commit, what it holds
        self.commit = 0
        self.builds = 1
        self.bad_sent: set[tuple[int, int]] = set()
        self.served = dict.fromkeys(self.log.ends, 0)
        self.horizon: int | None = None
        self.begun: Any = None
        self.send([(key, 9, 9) for key in KEYS])
        self.advance(None)
        self.send(facts)

    def teardown(self) -> None:
        for reader in getattr(self, "readers", []):
            if reader.lease is not None:
                reader.lease.release()

    # -- what producers do

    @rule(facts=FACTS)
    def send(self, facts: list[Fact]) -> None:
        good = facts if self.dead else [fact for fact in facts if fact[0] is not None]
        if good:
            send(self.world, good)
            self.log.add(good)

    @rule(partition=st.integers(0, 1), start=st.integers(0, 30), count=st.integers(1, 4))
    def send_again(self, partition: int, start: int, count: int) -> None:
        """Send records that were sent before, as a producer does that does not know whether they
        arrived.
        """
        facts = self.log.facts[partition][start % max(1, len(self.log.facts[partition])) :][:count]
        if facts:
            self.send(facts)

    # -- the cycle, which may die at any request

    @rule(crash=CRASHES)
    def advance(self, crash: tuple[int, str] | None) -> None:
        report = self._run(lambda lake: self.world.advance(self.spec, lake=lake), crash)
        if report is not None:
            self._check_report(report)

    @rule(facts=FACTS)
    def send_and_advance(self, facts: list[Fact]) -> None:
        self.send(facts)
        self.advance(None)

    @rule(level=LEVELS, crash=CRASHES)
    def compact(self, level: Any, crash: tuple[int, str] | None) -> None:
        if self._made():
            self._run(lambda lake: self._compact(lake, level), crash)

    @rule(first=FACTS, second=FACTS, level=LEVELS, late=FACTS)
    def compact_deltas(
        self, first: list[Fact], second: list[Fact], level: Any, late: list[Fact]
    ) -> None:
        for facts in (first, second):
            self.send_and_advance(facts)
        self.compact(level, None)
        self.a_new_reader_gets_what_the_log_says()
        self.send_and_advance(late)

    @rule(crash=CRASHES)
    def discard(self, crash: tuple[int, str] | None) -> None:
        if self._made():
            self._run(self._discard, crash)

    @rule(crash=CRASHES)
    def rebuild(self, crash: tuple[int, str] | None) -> None:
        if self._made():
            self._run(self._rebuild, crash)

    @rule(
        nth=st.integers(1, 40),
        mine=st.sampled_from(["advance", "minor", "major", "discard", "rebuild"]),
        other=st.sampled_from(["advance", "minor", "major", "discard", "rebuild"]),
        facts=FACTS,
    )
    def race(self, nth: int, mine: str, other: str, facts: list[Fact]) -> None:
        """Somebody else does something whole just before the nth request of ours."""
        if not self._made():
            return

        def meanwhile() -> None:
            self.send(facts)
            self._act(other, self.world.lake)
            self.follow()

        with suppress(CommitConflictError):
            self._act(mine, faulty(self.world, Fault("*", nth, "meanwhile", meanwhile)))
        self.follow()

    def _act(self, what: str, lake: Lake) -> object:
        if what == "advance":
            return self.world.advance(self.spec, lake=lake)
        if what in ("minor", "major"):
            return self._compact(lake, what)
        return self._discard(lake) if what == "discard" else self._rebuild(lake)

    def _compact(self, lake: Lake, level: Any) -> object:
        return compact_dataset(lake, NAME, spark=self.world.spark, by="test", level=level)

    def _discard(self, lake: Lake) -> object:
        return discard(lake, NAME, POLICY, by="test")

    def _rebuild(self, lake: Lake) -> object:
        systems = self.world.systems
        return rebuild_dataset(
            self.spec,
            lake=lake,
            systems=systems,
            spark=self.world.spark,
            reason="asked for",
            by="test",
        )

    def _run(self, act: Callable[[Lake], Any], crash: tuple[int, str] | None) -> Any:
        report = None
        lake = faulty(self.world, Fault("*", crash[0], crash[1])) if crash else self.world.lake  # type: ignore[arg-type]
        try:
            report = act(lake)
        except Crash:
            pass
        except (StoreUnavailableError, CommitStateUnknownError, CommitConflictError):
            assert crash is not None
            assert crash[1] == "lost-after"
        self.follow()
        return report

    def _check_report(self, report: Any) -> None:
        assert set(report.lag.values()) <= {0} or report.action == "bootstrapped"
        if report.action != "bootstrapped":
            assert ends_of(report.offsets) == self.log.ends
        view = StoredVersions(self.world.lake, self.spec).current()
        assert (report.version is None) == (view is None)
        if view is not None:
            assert report.version == view.version
            assert report.rows in (None, len(content(view)))

    # -- what readers do

    @precondition(lambda self: len(self.readers) < 4)
    @rule(leased=st.booleans(), back=st.integers(0, 3))
    def read(self, leased: bool, back: int) -> None:
        """Take the version that is served, or an earlier one that can be read."""
        if not self.held:
            return
        store = StoredVersions(self.world.lake, NAME)
        version = list(self.held)[-1 - min(back, len(self.held) - 1)]
        try:
            view = store.version(version)
            lease = (
                Lease.acquire(self.world.lake, NAME, [version], holder="a reader")
                if leased
                else None
            )
        except VersionDiscardedError:
            return
        self.readers.append(Reader(view, self.held[version][1], lease))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 3))
    def let_go(self, which: int) -> None:
        reader = self.readers.pop(which % len(self.readers))
        reader.check()
        if reader.lease is not None:
            reader.lease.release()

    # -- what holds at every point

    def follow(self) -> None:
        """Look at each commit since the last look: what it serves, and which deletions it has
        forgotten.
        """
        store = StoredVersions(self.world.lake, NAME)
        new = [pair for pair in store.log.history() if pair[0].number > self.commit]
        for commit, manifest in reversed(new):
            assert commit.number == self.commit + 1, "a commit is missing between two"
            self.commit = commit.number
            bootstrap = manifest.bootstrap
            assert bootstrap is not None
            if self.begun not in (None, bootstrap.started_at) and bootstrap.state == "running":
                self.builds += 1
            self.begun = bootstrap.started_at
            view = store.reader_of(manifest)
            if view is None:
                assert not self.held, "nothing is served any more"
                continue
            starts, ends = spans_of(view)
            if manifest.horizon is None:
                self.log.late = []
            elif manifest.horizon != self.horizon:
                reached = [at for at, _ in self.log.newest(ends, starts).values()]
                assert manifest.horizon <= max(reached) - KEPT
                assert self.horizon is None or manifest.horizon > self.horizon, (
                    "a horizon goes back"
                )
                read = ends if bootstrap.state == "running" else ends_of(manifest.offsets)
                self.log.late.append((read, manifest.horizon))
            self.horizon = manifest.horizon
            if view.version not in self.held:
                assert view.sealed.number == commit.number
                assert all(ends[partition] >= self.served[partition] for partition in ends), (
                    "an older state is served"
                )
                self.served = dict(ends)
                self.held[view.version] = (commit.number, self.log.table(ends, starts))
            if self.dead:
                self.bad_sent |= self.log.bad(ends_of(manifest.offsets))

    def _made(self) -> bool:
        return StoredVersions(self.world.lake, NAME).manifest() is not None

    @invariant()
    def a_new_reader_gets_what_the_log_says(self) -> None:
        view = StoredVersions(self.world.lake, self.spec).current()
        if view is not None:
            assert content(view) == self.held[view.version][1]

    def read_by_spark(self) -> None:
        view = StoredVersions(self.world.lake, self.spec).require_current()
        if self.world.spark is not IN_PROCESS:
            assert by_spark(self.world, view) == self.held[view.version][1]

    @invariant()
    def what_is_held_stays_whole(self) -> None:
        for reader in self.readers:
            reader.check()

    @invariant()
    def earlier_states_are_read_as_they_were_or_refused(self) -> None:
        if not self._made():
            return
        store = StoredVersions(self.world.lake, NAME)
        readable = {entry.served for entry in store.history(None) if entry.readable}
        for version, (number, entries) in self.held.items():
            try:
                assert content(store.version(version)) == entries
                assert content(store.version(as_of=number)) == entries
            except VersionDiscardedError:
                assert version not in readable
            else:
                assert version in readable

    @invariant()
    def dead_letters_are_there_once(self) -> None:
        if not self.dead:
            return
        dead = letters(self.world)
        places = set(dead)
        assert self.bad_sent <= places
        assert all(dead.count(place) <= self.builds for place in places), "a dead letter twice"


class ToTheEnd(FactsMachine):
    """Ends each history in peace: all is read, all is compacted, and what nobody needs is gone."""

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "log"):
            return
        self.readers = []
        self.advance(None)
        self.advance(None)
        self.read_by_spark()
        store = StoredVersions(self.world.lake, NAME)
        manifest = store.require_manifest()
        assert ends_of(manifest.offsets) == self.log.ends
        assert content(store.require_current()) == self.log.table(
            self.log.ends, spans_of(store.require_current())[0]
        )
        self.compact("major", None)
        self.compact("major", None)
        self.discard(None)
        view = store.require_current()
        assert len(view.sealed.generations) == 1
        self.a_new_reader_gets_what_the_log_says()
        self.read_by_spark()
        self.dead_letters_are_there_once()
        if self.dead and self.builds == 1:
            assert sorted(letters(self.world)) == sorted(self.bad_sent)


def histories(default: int, steps: int) -> settings:
    """Few and always the same in `make test`; ADJUNCT_HISTORIES and ADJUNCT_STEPS ask for more,
    at random.
    """
    return settings(
        max_examples=int(os.environ.get("ADJUNCT_HISTORIES", str(default))),
        stateful_step_count=int(os.environ.get("ADJUNCT_STEPS", str(steps))),
        derandomize="ADJUNCT_HISTORIES" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.lengthy
@pytest.mark.rounds
def test_any_history_is_what_a_dictionary_says() -> None:
    class Plain(ToTheEnd):
        make = staticmethod(lambda: facts_in(lake_in(InMemoryStore()), IN_PROCESS))

    run_state_machine_as_test(Plain, settings=histories(rounds(2, 8), 20))


@pytest.mark.long  # test_engines.py and test_history_engines.py compare both
@pytest.mark.rounds
@pytest.mark.spark
def test_histories_are_read_by_spark_alike(
    spark: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    class Sparkling(ToTheEnd):
        make = staticmethod(
            lambda: facts_in(open_lake(tmp_path_factory.mktemp("lake")), lambda: spark)
        )

    run_state_machine_as_test(Sparkling, settings=histories(rounds(1, 2), 4))
