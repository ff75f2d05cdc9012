"""Key-value tables in objects alone: lost replies, crashes at every request, merges, damage;
against a dictionary.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    KeyValueTableNotFoundError,
    KeyValueTableSealedError,
    MalformedDocumentError,
    TableUnavailableError,
)
from dagster_adjunct.resources.key_value.segment import (
    ConditionsFailed,
    KeyRange,
    ReplyLostError,
    SegmentChange,
    TableId,
)
from dagster_adjunct.resources.key_value_backends.objects import segment_view as segment_upkeep
from dagster_adjunct.resources.key_value_backends.objects.pointer import (
    PointerObject,
    SegmentState,
    read_pointer,
)
from dagster_adjunct.resources.key_value_backends.objects.segment import (
    ObjectSegment,
    ObjectSegments,
)
from dagster_adjunct.resources.key_value_backends.objects.segment_view import SegmentCore
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.local_store import LocalStore
from dagster_adjunct.resources.objects.store import InMemoryStore, ObjectStore
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.resources.key_value_backends.segment_handle import (
    Handle,
    Request,
    Run,
    insert,
    of,
    put,
    remove,
    replace,
    surely,
)
from tests.resources.key_value_backends.segment_stores import new_table_id
from tests.rounds import rounds

LARGE = b"x" * 20_000  # four of these fill the log, and eight full logs are merged
APPLE, PEAR = of(b"apple"), of(b"pear")


@pytest.fixture
def run() -> Run:
    """A loop for each call: some are made by a fault, in a thread of the store's."""
    return asyncio.run


@pytest.fixture
def inner() -> InMemoryStore:
    return InMemoryStore()


@pytest.fixture
def table(inner) -> TableId:
    table = new_table_id()
    over(inner).create(table, 1)
    return table


@pytest.fixture
def rival(inner, table, run) -> Iterator[Handle]:
    """Another process's handle, which meets no faults."""
    handle = Handle(over(inner).open(table, 0), run)
    yield handle
    run(handle.segment.close())


def over(store: ObjectStore) -> ObjectSegments:
    return ObjectSegments(Lake(store, "lake"))


def runs_of(store: ObjectStore) -> list[str]:
    return [item.key for item in store.list("key-values/") if "/runs/" in item.key]


def pointer_of(store: ObjectStore) -> str:
    [key] = [item.key for item in store.list("key-values/") if item.key.endswith("/CURRENT")]
    return key


def flushed(handle: Handle, rounds: int = 1, prefix: bytes = b"filler") -> None:
    """Write until the log has become a run so many times."""
    for number in range(4 * rounds):
        handle.write(put(of(b"%s-%d" % (prefix, number)), LARGE))
    handle.run(handle.segment.close())


# Lost replies


def test_a_write_whose_reply_is_lost_is_no_conflict_though_another_wrote_since(
    inner, table, rival, run
):
    def overwrite() -> None:
        rival.write(put(APPLE, b"theirs"))

    plan = [Fault("put_if_match", 1, "lost-after"), Fault("get", 2, "meanwhile", overwrite)]
    handle = Handle(over(FaultyStore(inner, plan)).open(table, 0), run)
    handle.write(insert(APPLE, b"ours"))
    assert rival.value(APPLE) == b"theirs"


@pytest.mark.parametrize("rounds", [1, 9])
def test_a_lost_write_is_found_after_its_log_was_flushed_or_merged(
    inner, table, rival, run, rounds
):
    def overwrite() -> None:
        rival.write(remove(APPLE))
        flushed(Handle(over(inner).open(table, 0), asyncio.run), rounds)

    plan = [Fault("put_if_match", 1, "lost-after"), Fault("get", 2, "meanwhile", overwrite)]
    handle = Handle(over(FaultyStore(inner, plan)).open(table, 0), run)
    handle.write(insert(APPLE, b"ours"))
    assert rival.value(APPLE) is None
    assert runs_of(inner)


def test_repeating_an_applied_request_keeps_what_others_wrote_since(inner, table, rival, run):
    plan = [Fault("put_if_match", 1, "lost-after"), Fault("get", 2, "lost-before")]
    handle = Handle(over(FaultyStore(inner, plan)).open(table, 0), run)
    request = Request.of([insert(APPLE, b"ours")])
    with pytest.raises(ReplyLostError):
        handle.send(request)
    rival.write(remove(APPLE))
    flushed(rival, 12)
    handle.send(request, repeated=True)
    assert rival.value(APPLE) is None


def test_after_a_refused_repeat_the_first_attempt_can_not_apply_any_more(inner, table, rival, run):
    """The first attempt is on its way for long: it arrives when its repetition was refused."""
    store = FaultyStore(
        inner, [Fault("put_if_match", 1, "lost-before"), Fault("get", 2, "lost-before")]
    )
    handle = Handle(over(store).open(table, 0), run)
    before = inner.get(pointer_of(inner)).etag
    request = Request.of([insert(APPLE, b"ours")])
    with pytest.raises(ReplyLostError):
        handle.send(request)
    other = Request.of([replace(PEAR, b"no version there")])
    with pytest.raises(ConditionsFailed):
        handle.send(other, repeated=True)
    assert inner.get(pointer_of(inner)).etag != before


@pytest.mark.lengthy
def test_under_any_faults_every_write_is_applied_once(inner, table, run):
    for seed in range(12):
        chosen = random.Random(seed)
        kinds = ["lost-after", "lost-before", "409", "412", "throttle"]
        requests = ["put_if_match", "get", "put_if_absent", "get_range", "delete_many", "list"]
        plan = [
            Fault(chosen.choice(requests), chosen.randrange(1, 40), chosen.choice(kinds))
            for _ in range(40)
        ]
        store = FaultyStore(
            inner, [fault for fault in plan if fault.kind != "412" or "put" in fault.request]
        )
        handle = Handle(over(store).open(table, 0), run)
        count = of(b"count-%d" % seed)
        surely(handle, Request.of([insert(count, b"0")]))
        for number in range(12):
            [entry] = reading(handle, count)
            assert int(entry.value) == number
            surely(
                handle,
                Request.of(
                    [replace(count, entry.version, b"%d" % (number + 1)), put(of(b"f"), LARGE)]
                ),
            )
        handle.run(handle.segment.close())


def reading(handle: Handle, *keys: bytes) -> list:
    from dagster_adjunct.resources.errors import TableUnavailableError

    for _ in range(20):
        with suppress(TableUnavailableError):
            return handle.get(*keys)
    raise AssertionError("it was never available")


# Merges


@pytest.mark.lengthy
def test_what_was_flushed_and_merged_many_times_is_what_a_dictionary_has(inner, table, rival):
    chosen = random.Random(5)
    expected: dict[bytes, bytes] = {}
    for _ in range(250):
        keys = chosen.sample(range(400), 5)
        changes: list[SegmentChange] = []
        for number in keys:
            key = of(b"%03d" % number, chosen.choice(["a", "b"]))
            if chosen.random() < 0.3:
                changes.append(remove(key))
                expected.pop(key, None)
            else:
                value = chosen.randbytes(chosen.randrange(8_000))
                changes.append(put(key, value))
                expected[key] = value
        distinct = {change.key: change for change in changes}
        expected |= {
            key: change.value for key, change in distinct.items() if change.value is not None
        }
        for key, change in distinct.items():
            if change.value is None:
                expected.pop(key, None)
        rival.write(*distinct.values())
    rival.run(rival.segment.close())
    assert len(runs_of(inner)) > 8
    stored = {key: value for key, (_, value) in rival.stored().items()}
    assert stored == expected
    other = Handle(over(inner).open(table, 0), rival.run)
    keys = [of(b"%03d" % number, family) for number in range(400) for family in "ab"]
    assert [entry and entry.value for entry in other.get(*keys)] == [
        expected.get(key) for key in keys
    ]
    some = KeyRange(of(b"100", "a"), of(b"300", "a"))
    assert [entry.key for entry in other.entries(some, 3)] == sorted(
        k for k in expected if some.start <= k < some.end
    )


def test_a_merge_that_has_the_oldest_run_forgets_removed_keys_and_old_runs_go(
    inner, table, rival, monkeypatch
):
    monkeypatch.setattr(
        "dagster_adjunct.resources.key_value_backends.objects.segment_view._GRACE", -1
    )
    for round_ in range(24):
        flushed(rival)
        rival.write(*(remove(of(b"filler-%d" % number)) for number in range(4)))
        assert len(runs_of(inner)) <= 18, round_
    assert rival.stored() == {}


def test_a_reader_whose_run_was_merged_away_reads_what_stands_now(
    inner, table, rival, run, monkeypatch
):
    monkeypatch.setattr(
        "dagster_adjunct.resources.key_value_backends.objects.segment_view._GRACE", -1
    )
    rival.write(put(APPLE, b"red"))
    flushed(rival, 7)

    def merge() -> None:
        mine = Handle(over(inner).open(table, 0), asyncio.run)
        while set(before) & set(runs_of(inner)):
            flushed(mine, 4, b"more")

    before = runs_of(inner)
    store = FaultyStore(inner, [Fault("get_range", 1, "meanwhile", merge)])
    handle = Handle(over(store).open(table, 0), run)
    assert handle.value(APPLE) == b"red"
    assert not set(before) & set(runs_of(inner))


# Crashes


@pytest.mark.lengthy
@pytest.mark.rounds
# the crash, in another thread
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_at_any_request_leaves_whole_requests_and_a_table_that_goes_on(run):
    for nth in range(1, 200, rounds(14, 7)):
        for kind in ("crash-before", "crash-after"):
            inner = InMemoryStore()
            table = new_table_id()
            over(inner).create(table, 1)
            handle = Handle(over(FaultyStore(inner, [Fault("*", nth, kind)])).open(table, 0), run)
            done = -1
            with suppress(Crash, ReplyLostError):
                for number in range(40):
                    handle.write(
                        put(APPLE, b"%d" % number), put(PEAR, b"%d" % number), put(of(b"f"), LARGE)
                    )
                    done = number
            after = Handle(over(inner).open(table, 0), run)
            entries = after.get(APPLE, PEAR)
            values = {None if entry is None else int(entry.value) for entry in entries}
            assert values <= {done, done + 1} or (done == -1 and values <= {None, 0})
            assert len(values) == 1
            flushed(after, 3)
            assert after.value(of(b"filler-0")) == LARGE


def test_what_a_crash_left_is_collected_and_nothing_else(inner, table, rival):
    prefix = pointer_of(inner).removesuffix("CURRENT")
    inner.put(f"{prefix}runs/left-by-a-crash", b"half")
    rival.write(put(APPLE, b"red"))
    flushed(rival, 20)
    assert f"{prefix}runs/left-by-a-crash" not in runs_of(inner)
    assert rival.value(APPLE) == b"red"
    assert len(rival.stored()) == 1 + 80


# Deletion


def test_nothing_is_left_of_a_deleted_table_but_what_says_so(inner, table, rival):
    flushed(rival, 3)
    over(inner).delete(table, 1)
    assert [item.key for item in inner.list("key-values/")] == [pointer_of(inner)]
    with pytest.raises(KeyValueTableNotFoundError):
        rival.write(put(APPLE))


@pytest.mark.parametrize(
    ("writes", "keys"), [(4, 1), (1, 16)], ids=["after a commit", "in a commit"]
)
def test_a_run_that_is_written_while_its_table_is_deleted_goes_too(inner, table, run, writes, keys):
    deleted = Fault("put_if_absent", 1, "meanwhile", lambda: over(inner).delete(table, 1))
    handle = Handle(over(FaultyStore(inner, [deleted])).open(table, 0), run)
    with suppress(KeyValueTableNotFoundError):
        for write in range(writes):
            handle.write(*(put(of(b"%d-%d" % (write, key)), LARGE) for key in range(keys)))
    run(handle.segment.close())
    assert runs_of(inner) == []


# Damage


def damaged(store: ObjectStore, key: str, at: int) -> None:
    data = bytearray(store.get(key).data)
    data[at] ^= 1
    store.put(key, bytes(data))


@pytest.mark.parametrize("at", [3, 9, 13, 30, -1])
def test_a_damaged_pointer_is_reported(inner, table, rival, run, at):
    rival.write(put(APPLE, b"red"))
    damaged(inner, pointer_of(inner), at)
    with pytest.raises(MalformedDocumentError):
        Handle(over(inner).open(table, 0), run).get(APPLE)


@pytest.mark.parametrize("at", [0, 100, 70_000, -1, -40])
def test_a_damaged_run_is_reported(inner, table, rival, run, at):
    rival.write(put(APPLE, b"red"))
    flushed(rival)
    [key] = runs_of(inner)
    damaged(inner, key, at)
    with pytest.raises(MalformedDocumentError):
        Handle(over(inner).open(table, 0), run).entries()


def test_a_run_that_is_cut_or_missing_is_reported(inner, table, rival, run):
    flushed(rival)
    [key] = runs_of(inner)
    inner.put(key, inner.get(key).data[:-10])
    with pytest.raises(MalformedDocumentError):
        Handle(over(inner).open(table, 0), run).entries()
    inner.delete(key)
    with pytest.raises(MalformedDocumentError):
        Handle(over(inner).open(table, 0), run).get(APPLE)


# Requests


def test_requests_that_wait_are_committed_together(inner, table, run):
    store = FaultyStore(inner)
    segment = over(store).open(table, 0)
    requests = [Request.of([insert(of(b"%d" % number), b"v")]) for number in range(200)]

    async def all_at_once(some: Sequence[Request]) -> None:
        await asyncio.gather(*(segment.apply(request.changes, request.token) for request in some))

    run(all_at_once(requests))
    assert [request for request, _ in store.requests].count("put_if_match") < 20
    assert len(Handle(segment, run).stored()) == 200


@pytest.mark.lengthy
def test_inserts_of_new_keys_read_no_blocks(tmp_path, run):
    plain = LocalStore(tmp_path)
    table = new_table_id()
    over(plain).create(table, 1)
    writer = Handle(over(plain).open(table, 0), run)
    for start in range(0, 40_000, 10_000):
        writer.write(
            *(put(of(b"%d" % number), b"v" * 50) for number in range(start, start + 10_000))
        )
    writer.run(writer.segment.close())
    store = FaultyStore(plain)
    handle = Handle(over(store).open(table, 0), run)
    handle.write(insert(of(b"new"), b"v"))
    read = len([request for request, _ in store.requests if request == "get_range"])
    for number in range(50):
        handle.write(insert(of(b"new-%d" % number), b"v"))
    assert len([request for request, _ in store.requests if request == "get_range"]) - read < 20


@pytest.mark.lengthy
def test_a_page_reads_no_more_of_large_values_than_a_part_of_a_run(
    inner, table, rival, run, monkeypatch
):
    keys = [of(b"%02d" % number) for number in range(32)]
    rival.write(*(put(key, LARGE) for key in keys))  # too long for the log: one run
    read, get_range = [0], inner.get_range

    def counted(key: str, start: int, length: int) -> bytes:
        read[0] += length
        return get_range(key, start, length)

    monkeypatch.setattr(inner, "get_range", counted)
    monkeypatch.setattr(segment_upkeep, "_PART", 100_000)
    reader = over(inner).open(table, 0)
    page = run(reader.page(KeyRange(), 1, values=True))
    assert (list(page.keys), page.is_last) == (keys[:1], False)
    assert 0 < read[0] < 200_000  # of 640,000
    whole = run(reader.page(KeyRange(), 100, values=False))
    assert (whole.keys, whole.is_last) == (keys, True)


@pytest.mark.lengthy
def test_merges_come_in_while_others_are_always_first(inner, table, rival, run):
    """Each swap of this process meets another one's, once, as under many writers."""
    plan = [
        Fault("put_if_match", number, "meanwhile", lambda: rival.write(put(PEAR, b"theirs")))
        for number in range(1, 400, 2)
    ]
    handle = Handle(over(FaultyStore(inner, plan)).open(table, 0), run)
    for _ in range(12):
        flushed(handle)
    pointer = read_pointer(inner.get(pointer_of(inner)).data, "it")
    assert pointer.levels.claims == ()
    assert len(pointer.levels.runs) < 8
    assert len(rival.stored()) == 5


@pytest.mark.lengthy
def test_a_table_is_sealed_though_others_were_first_and_not_if_they_always_are(inner, table, rival):
    """What they wrote is kept: the state is made anew of what they put there."""

    def others_first(times: int) -> ObjectSegments:
        faults = [
            Fault("put_if_match", number, "meanwhile", lambda: rival.write(put(PEAR, b"theirs")))
            for number in range(1, times + 1)
        ]
        return over(FaultyStore(inner, faults))

    with pytest.raises(TableUnavailableError):
        others_first(1000).seal(table, 1)
    rival.write(insert(APPLE, b"mine"))
    others_first(3).seal(table, 1)
    assert (rival.value(APPLE), rival.value(PEAR)) == (b"mine", b"theirs")
    with pytest.raises(KeyValueTableSealedError):
        rival.write(put(PEAR, b"late"))


class WithoutRoom(FaultyStore):
    """A store on a machine whose disk takes no temporary files."""

    def staging_dir(self) -> Path:
        return Path("/nowhere")


class WithoutMemory(FaultyStore):
    """A store on a machine that has no more memory for temporary files."""

    def staging_dir(self) -> Path:
        raise MemoryError("no memory")


@pytest.mark.parametrize(
    ("store", "reported"), [(WithoutRoom, "/nowhere"), (WithoutMemory, "MemoryError: no memory")]
)
def test_a_write_is_done_whatever_the_upkeep_after_it_raises(
    inner, table, run, monkeypatch, caplog, store, reported
):
    monkeypatch.setattr(segment_upkeep, "_IN_MEMORY", 0)
    monkeypatch.setattr(segment_upkeep, "_MANY_RUNS", 8)
    handle = Handle(over(store(inner)).open(table, 0), run)
    for number in range(12):
        flushed(handle, prefix=b"%d" % number)
    assert reported in caplog.text
    assert handle.value(of(b"11-3")) == LARGE


def test_a_write_is_done_though_no_thread_can_start_for_the_upkeep_after_it(
    inner, table, run, monkeypatch, caplog
):
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "adjunct-key-values":
            raise RuntimeError("can't start new thread")
        start(thread)

    handle = Handle(over(inner).open(table, 0), run)
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuse)
        flushed(handle)  # and closing it waits for no thread
    assert (runs_of(inner), "can't start new thread" in caplog.text) == ([], True)
    flushed(handle, prefix=b"later")
    assert runs_of(inner)


def test_an_option_that_s3_does_not_have_is_refused():
    with pytest.raises(ConfigurationError) as caught:
        ObjectSegments("s3://bucket/lake", s3={"bogus": 1})
    assert caught.value.argument == "s3"


@pytest.mark.parametrize("url", [None, Lake(InMemoryStore(), "lake")], ids=["none", "lake"])
def test_options_of_s3_without_a_url_are_refused(url):
    with pytest.raises(ConfigurationError) as caught:
        ObjectSegments(url, s3={"region": "eu-central-1"})
    assert caught.value.argument == "s3"


def test_threads_that_use_a_segment_first_at_once_commit_together(inner, table):
    cores = []
    commits = []

    def make_core() -> SegmentCore:
        """Return a core, after another thread has got its own in the meantime."""
        core = over(inner)._core(table, 0)
        cores.append(core)
        if len(cores) == 1:
            other = threading.Thread(target=lambda: commits.append(segment._commits()))
            other.start()
            other.join()
        return core

    segment = ObjectSegment(make_core)
    commits.append(segment._commits())
    assert len(cores) == 2
    assert commits[0] is commits[1]


class Overtaken(PointerObject):
    """A pointer of which another thread stores an older state whenever this one stores its own."""

    older: SegmentState | None = None

    @property
    def last(self) -> SegmentState | None:
        return self.older

    @last.setter
    def last(self, state: SegmentState | None) -> None:
        pass


def test_a_state_that_was_read_or_swapped_in_is_not_that_of_another_thread(inner, table, rival):
    pointer = Overtaken(inner, pointer_of(inner))
    pointer.older = pointer.read()
    rival.write(put(APPLE))
    state = pointer.read_fresh()
    assert state.number == pointer.older.number + 1
    swapped = pointer.swap(state, state.following(0), is_in=lambda later: False)
    assert (swapped.is_done, swapped.state.number) == (True, state.number + 1)
