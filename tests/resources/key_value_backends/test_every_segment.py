"""One suite on every backend of key-value tables: what `segment.py` promises, sentence by
sentence.
"""

from __future__ import annotations

import asyncio
import pickle
import random

import pytest

from dagster_adjunct.resources.errors import KeyValueTableNotFoundError, KeyValueTableSealedError
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    MAX_KEY_BYTES,
    ConditionsFailed,
    KeyRange,
    SegmentChange,
    backend_from,
    describe_backend,
    family_prefix,
    family_range,
    partition_of,
)
from tests.resources.key_value_backends.segment_handle import (
    NOWHERE,
    Handle,
    Request,
    guard,
    insert,
    of,
    put,
    remove,
    replace,
)
from tests.resources.key_value_backends.segment_stores import (
    SEGMENT_STORES,
    WITHOUT_LOOP,
    SegmentStore,
    new_table_id,
)

APPLE, PEAR, PLUM, QUINCE = map(of, (b"apple", b"pear", b"plum", b"quince"))
LARGE = 1 << 20  # bytes: how far a value, or a request, without a limit is tried


@pytest.fixture(scope="module", params=[*SEGMENT_STORES, *WITHOUT_LOOP])
def segment_store(request, tmp_path_factory) -> SegmentStore:
    return request.param(request, tmp_path_factory.mktemp("segments"))


# Changes


def test_what_was_put_is_read_with_its_version(handle):
    [version] = handle.write(put(APPLE, b"red"))
    assert handle.get(APPLE) == [(APPLE, version, b"red")]


def test_a_put_replaces_whatever_is_there(handle):
    handle.write(put(APPLE, b"red"))
    [version] = handle.write(put(APPLE, b"green"))
    assert handle.stored() == {APPLE: (version, b"green")}


def test_an_insert_finds_the_version_of_what_is_there(handle):
    [version] = handle.write(insert(APPLE, b"red"))
    assert handle.refused(insert(APPLE, b"green")) == {0: version}
    assert handle.stored() == {APPLE: (version, b"red")}


def test_a_replace_needs_the_version_that_is_there(handle):
    [first] = handle.write(put(APPLE, b"red"))
    [second] = handle.write(replace(APPLE, first, b"green"))
    assert handle.refused(replace(APPLE, first, b"blue")) == {0: second}
    assert handle.refused(replace(PEAR, first, b"blue")) == {0: None}
    assert handle.stored() == {APPLE: (second, b"green")}


def test_a_version_does_not_come_back_when_the_same_value_is_written(handle):
    [first] = handle.write(put(APPLE, b"red"))
    [second] = handle.write(put(APPLE, b"red"))
    assert handle.refused(replace(APPLE, first)) == {0: second}
    handle.write(remove(APPLE))
    assert handle.refused(replace(APPLE, second)) == {0: None}
    [third] = handle.write(insert(APPLE, b"red"))
    assert handle.refused(replace(APPLE, second)) == {0: third}


def test_a_removal_is_plain_or_needs_a_version(handle):
    [apple, pear] = handle.write(put(APPLE, b"red"), put(PEAR, b"green"))
    assert handle.refused(remove(APPLE, pear)) == {0: apple}
    handle.write(remove(APPLE, apple))
    assert handle.refused(remove(APPLE, apple)) == {0: None}
    handle.write(remove(PEAR))
    assert handle.stored() == {}


def test_what_is_not_there_may_be_removed(handle):
    handle.write(remove(APPLE))
    [version] = handle.write(put(PEAR), remove(APPLE))[:1]
    assert handle.stored() == {PEAR: (version, b"")}


def test_a_removal_may_be_of_what_must_be_absent(handle):
    absent = SegmentChange(APPLE, None, b"", ABSENT)
    [pear] = handle.write(put(PEAR), absent)[:1]
    [apple] = handle.write(put(APPLE, b"red"))
    assert handle.refused(put(PEAR), absent) == {1: apple}
    assert handle.stored() == {APPLE: (apple, b"red"), PEAR: (pear, b"")}


def test_guards_let_a_request_pass_and_write_nothing(handle):
    [apple] = handle.write(put(APPLE, b"red"))
    handle.write(guard(APPLE, apple), guard(PEAR))
    [plum] = handle.write(put(PLUM, b"blue"), guard(APPLE, apple), guard(PEAR))[:1]
    handle.write(remove(PLUM, plum), guard(APPLE, apple), guard(PEAR), guard(QUINCE))
    assert handle.refused(guard(APPLE)) == {0: apple}
    assert handle.refused(guard(PEAR, apple)) == {0: None}
    assert handle.refused(
        put(PLUM, b"x"), guard(APPLE, plum), guard(PEAR, plum), guard(APPLE + b"s")
    ) == {1: apple, 2: None}
    assert handle.stored() == {APPLE: (apple, b"red")}
    handle.write(put(APPLE + b"s", b"many"), guard(APPLE, apple))
    assert handle.get(APPLE, values=True) == [(APPLE, apple, b"red")]


def test_a_request_mixes_changes_over_any_keys_of_a_segment(handle):
    alone, elsewhere = of(b"apple", None), of(b"apple", "cake")
    [apple, pear, _] = handle.write(put(APPLE, b"1"), put(PEAR, b"2"), put(alone, b"3"))
    versions = handle.write(
        replace(APPLE, apple, b"4"),
        remove(PEAR, pear),
        insert(PLUM, b"5"),
        put(elsewhere, b"6"),
        remove(alone),
    )
    assert handle.stored() == {
        APPLE: (versions[0], b"4"),
        PLUM: (versions[2], b"5"),
        elsewhere: (versions[3], b"6"),
    }


def test_a_request_is_applied_whole_or_names_every_condition_that_does_not_hold(handle):
    [apple, pear] = handle.write(put(APPLE, b"1"), put(PEAR, b"2"))
    before = handle.stored()
    failing = handle.refused(
        put(of(b"new"), b"x"),
        replace(APPLE, apple, b"x"),
        replace(PEAR, apple, b"x"),
        insert(of(b"apple pie"), b"x"),
        remove(PLUM, pear),
        insert(of(b"another"), b"x"),
        replace(QUINCE, NOWHERE, b"x"),
    )
    assert failing == {2: pear, 4: None, 6: None}
    assert handle.stored() == before
    assert handle.get(of(b"apple pie")) == [None]
    assert handle.refused(put(APPLE, b"x"), insert(PEAR, b"x"), remove(of(b"apple pie"))) == {
        1: pear
    }
    assert handle.stored() == before


def test_two_segments_have_nothing_in_common(backend, run):
    table = new_table_id()
    backend.create(table, 2)
    keys = [of(b"%d" % number, None) for number in range(20)]
    handles = [Handle(backend.open(table, partition), run) for partition in range(2)]
    for key in keys:
        handles[partition_of(key, 2)].write(put(key, key))
    stored = [set(handle.stored()) for handle in handles]
    assert stored == [
        {key for key in keys if partition_of(key, 2) == partition} for partition in range(2)
    ]
    assert all(stored)
    backend.delete(table, 2)


def test_what_one_handle_has_written_another_one_reads_at_once(segment_store, handle, table, run):
    other = Handle(segment_store.backend().open(table, 0), run)
    for number in range(5):
        one, two = (handle, other) if number % 2 else (other, handle)
        [version] = one.write(put(APPLE, b"%d" % number))
        assert two.get(APPLE) == [(APPLE, version, b"%d" % number)]
        assert two.entries() == [(APPLE, version, b"%d" % number)]
        two.write(replace(APPLE, version, b"and on"))
    run(other.segment.close())


# Bytes and limits


@pytest.mark.parametrize("family", ["fruit", "f", "\0", "ключ\0ÿ", None])
def test_keys_and_values_are_any_bytes(handle, family):
    keys = [
        b"\0",
        b"\0\0",
        b"\xff",
        b"\xff\xff",
        b"\0\xff",
        b"a",
        b"a\0",
        b"a\xff",
        b"'; --",
        bytes(range(256)),
    ]
    written = {of(key, family): bytes(reversed(key)) * 2 for key in keys} | {
        of(b"", family): b"of the empty key"
    }
    versions = handle.write(*(insert(key, value) for key, value in written.items()))
    expected = [
        (key, version, value)
        for (key, value), version in zip(written.items(), versions, strict=True)
    ]
    assert handle.get(*written) == expected
    assert handle.entries(limit=3) == sorted(expected)


def test_a_value_may_be_empty_and_is_not_taken_for_a_removal(handle):
    [version] = handle.write(put(APPLE, b""))
    assert handle.get(APPLE) == [(APPLE, version, b"")]
    assert handle.entries() == [(APPLE, version, b"")]
    assert handle.refused(insert(APPLE)) == {0: version}


def longest_keys(limits) -> list[bytes]:
    """Return table keys that are as long as a backend takes: with a long family, with a long
    key, and without one.
    """
    prefix = min(limits.family_prefix or MAX_KEY_BYTES + 2, MAX_KEY_BYTES + 2)
    key = min(limits.key if limits.key is not None else MAX_KEY_BYTES, MAX_KEY_BYTES)
    long_family = "f" * (min(prefix, limits.table_key) - 2)
    with_family = of(b"k" * min(key, limits.table_key - 2 - len(long_family)), long_family)
    with_key = of(b"k" * min(key, limits.table_key - 3), "f")
    return [with_family, with_key, of(b"k" * min(key, limits.table_key - 2), None)]


def test_the_longest_keys_hold_the_longest_values(handle, backend):
    limits = backend.limits
    value = bytes(range(256)) * (min(limits.value or LARGE, LARGE) // 256 + 1)
    value = value[: min(limits.value or LARGE, LARGE)]
    for key in longest_keys(limits):
        assert len(key) <= limits.table_key
        [version] = handle.write(insert(key, value))
        assert handle.get(key) == [(key, version, value)]
    assert [entry.key for entry in handle.entries(limit=2)] == sorted(longest_keys(limits))
    assert [entry.value for entry in handle.entries(limit=2, values=False)] == [None] * 3


def test_a_request_of_as_many_changes_as_the_backend_takes_is_one(handle, backend):
    keys = [of(b"%06d" % number) for number in range(backend.limits.changes or 1000)]
    versions = handle.write(*(insert(key, key) for key in keys))
    assert handle.entries(limit=1000) == [
        (key, ver, key) for key, ver in zip(keys, versions, strict=True)
    ]
    again = [insert(key, b"x") for key in keys]
    assert handle.refused(*again) == dict(enumerate(versions))


def test_a_request_of_as_many_bytes_as_the_backend_takes_is_one(handle, backend):
    limits = backend.limits
    left, changes = limits.request or 4 * LARGE, []
    largest = min(limits.value or LARGE, LARGE)
    while left > len(key := of(b"%06d" % len(changes))):
        changes.append(insert(key, b"v" * min(largest, left - len(key))))
        left -= len(key) + len(changes[-1].value)
    handle.write(*changes)
    assert [(entry.key, entry.value) for entry in handle.entries()] == [
        (key, value) for key, value, *_ in changes
    ]


# Reads


def test_entries_come_in_the_order_in_which_they_were_asked_for_also_repeatedly(handle):
    [apple, pear] = handle.write(put(APPLE, b"1"), put(PEAR, b"2"))
    first, second = (APPLE, apple, b"1"), (PEAR, pear, b"2")
    assert handle.get(PEAR, PLUM, APPLE, PEAR, PLUM) == [second, None, first, second, None]
    assert handle.get(PLUM, QUINCE) == [None, None]
    assert handle.get() == []


def test_versions_are_read_without_values(handle):
    [apple, pear] = handle.write(put(APPLE, b"1"), put(PEAR, b"2"))
    assert handle.get(PEAR, PLUM, APPLE, values=False) == [
        (PEAR, pear, None),
        None,
        (APPLE, apple, None),
    ]
    assert handle.get(PEAR, values=False) == [(PEAR, pear, None)]
    assert handle.entries(values=False) == [(APPLE, apple, None), (PEAR, pear, None)]


def test_any_number_of_keys_is_read_in_one_call(handle, backend):
    keys = [of(b"%06d" % number) for number in range(1300)]
    at_once = min(backend.limits.changes or 100, 100)
    versions = {}
    for start in range(0, len(keys), 2 * at_once):  # every second hundred or so
        part = keys[start : start + at_once]
        versions |= dict(zip(part, handle.write(*(put(key, key) for key in part)), strict=True))
    expected = [(key, versions[key], key) if key in versions else None for key in reversed(keys)]
    assert handle.get(*reversed(keys)) == expected
    assert handle.get(*keys[:100], *keys) == [*expected[:-101:-1], *reversed(expected)]


def test_pages_follow_the_order_of_table_keys_over_families_and_keys_without_one(handle):
    keys = [
        of(key, family)
        for family in ("fruit", "a", "zz", "é", "a" * 300, "fruit\0", None)
        for key in (b"", b"\0", b"a", b"ab", b"b", b"\xff", b"\xff\xff")
    ]
    for start in range(0, len(keys), 7):
        handle.write(*(put(key, b"v") for key in keys[start : start + 7]))
    for limit in (1, 2, 10, 1000):
        pages = handle.pages(limit=limit, values=limit != 2)
        assert [entry.key for page in pages for entry in page] == sorted(keys)
        assert max(map(len, pages)) <= limit
    assert handle.pages(limit=1000)[0] == handle.entries(limit=1000)


def test_a_page_says_that_it_is_the_last_where_nothing_is_behind_it(handle):
    keys = [of(b"%d" % number, "one") for number in range(5)]
    handle.write(*(put(key, b"v") for key in keys), put(of(b"behind", "two")))
    within = family_range(family_prefix("one"))

    def page(start: int, limit: int, *, values: bool = True):
        return handle.run(
            handle.segment.page(KeyRange(keys[start], within.end), limit, values=values)
        )

    for values in (True, False):
        assert [len(page(0, 6, values=values)), page(0, 6, values=values).is_last] == [5, True]
        assert [len(page(0, 4, values=values)), page(0, 4, values=values).is_last] == [4, False]
        assert [len(page(4, 4, values=values)), page(4, 4, values=values).is_last] == [1, True]
    assert not handle.run(handle.segment.page(KeyRange(), 5, values=True)).is_last


def test_a_range_has_its_start_and_not_its_end(handle, backend):
    keys = [of(key) for key in (b"a", b"b", b"b\0", b"ba", b"c")]
    keys += [of(b"b", "after"), of(b"b", "a family"), of(b"b", None)]
    handle.write(*map(put, keys))
    ends = [
        b"",
        *keys,
        of(b"aa"),
        of(b"b\0\0"),
        of(b"", "fruit"),
        of(b"d"),
        of(b"", None),
        b"\xff\xff\xff",
    ]
    ranges = [KeyRange(start, end) for start in ends for end in (*ends, None)]
    for within in random.Random(1).sample(ranges, 40) if backend.waits else ranges:
        within_range = [entry.key for entry in handle.entries(within, 3, values=False)]
        assert within_range == sorted(
            key for key in keys if within.start <= key and (within.end is None or key < within.end)
        )


def test_a_page_may_be_asked_for_of_any_size(handle):
    handle.write(put(APPLE), put(of(b"pear")))
    for limit in (2**31, 2**63, 10**30):
        page = handle.run(handle.segment.page(KeyRange(), limit, values=True))
        assert [*page.keys] == [APPLE, of(b"pear")]


def test_a_family_is_a_range_whatever_its_neighbours_are_called(handle):
    for family in ("b", "a", "c", "ba", "b\0", "bb"):
        handle.write(*(put(of(key, family), family.encode()) for key in (b"", b"1", b"\xff")))
    entries = handle.entries(family_range(family_prefix("b")), 2)
    assert [(entry.key, entry.value) for entry in entries] == [
        (of(key, "b"), b"b") for key in (b"", b"1", b"\xff")
    ]


def test_an_empty_page_is_the_end(handle):
    assert handle.pages() == []
    handle.write(put(APPLE))
    assert handle.run(handle.segment.page(KeyRange().after(APPLE), 5, values=True)).entries() == []
    handle.write(remove(APPLE))
    assert handle.pages() == []


# Repeated requests


def test_a_request_that_was_applied_is_known_again_also_after_another_writer(handle):
    requests = [
        Request.of([insert(APPLE, b"1"), put(PEAR, b"1")]),
        Request.of([put(APPLE, b"2")]),
        Request.of([remove(PEAR), insert(PLUM, b"2")]),
    ]
    for request in requests:
        handle.send(request)
        handle.send(request, repeated=True)
    handle.write(put(PEAR, b"another's"), remove(PLUM), remove(APPLE))
    stored = handle.stored()
    for request in requests:
        handle.send(request, repeated=True)
        handle.send(request, repeated=True)
    assert handle.stored() == stored


def test_a_removal_that_was_applied_is_known_again(handle):
    [version] = handle.write(put(APPLE))
    request = Request.of([remove(APPLE, version)])
    handle.send(request)
    handle.send(request, repeated=True)
    [fresh] = handle.write(put(APPLE, b"another's"))
    handle.send(request, repeated=True)
    assert handle.stored() == {APPLE: (fresh, b"another's")}


def test_a_request_that_was_not_applied_is_when_it_is_repeated(handle):
    request = Request.of([insert(APPLE, b"1"), remove(PEAR)])
    handle.write(put(PEAR))
    handle.send(request, repeated=True)
    assert handle.stored() == {APPLE: (request.versions[0], b"1")}
    handle.write(put(APPLE, b"another's"))
    stored = handle.stored()
    handle.send(request, repeated=True)
    assert handle.stored() == stored


def test_a_request_that_was_not_applied_meets_its_conditions_when_it_is_repeated(handle):
    [apple] = handle.write(put(APPLE, b"1"))
    stored = handle.stored()
    request = Request.of([put(PLUM, b"2"), insert(APPLE, b"2"), replace(PEAR, apple, b"2")])
    for _ in range(2):
        with pytest.raises(ConditionsFailed) as raised:
            handle.send(request, repeated=True)
        assert raised.value.found == {1: apple, 2: None}
        assert handle.stored() == stored


def test_a_request_that_was_applied_before_the_seal_is_known_after_it(handle, backend, table):
    request, late = Request.of([insert(APPLE, b"1")]), Request.of([insert(PEAR, b"1")])
    handle.send(request)
    backend.seal(table, 1)
    handle.send(request, repeated=True)
    with pytest.raises(KeyValueTableSealedError):
        handle.send(late, repeated=True)
    assert handle.stored() == {APPLE: (request.versions[0], b"1")}


# Seal, delete, create


def test_a_sealed_table_is_read_and_refuses_every_write(handle, backend, table):
    [version] = handle.write(put(APPLE, b"red"))
    stored = handle.stored()
    backend.seal(table, 1)
    backend.seal(table, 1)
    for change in (
        put(APPLE, b"x"),
        put(PEAR, b"x"),
        insert(PEAR, b"x"),
        insert(APPLE, b"x"),
        replace(APPLE, version, b"x"),
        replace(PEAR, version, b"x"),
        remove(APPLE, version),
        remove(APPLE),
        remove(PEAR),
    ):
        with pytest.raises(KeyValueTableSealedError) as raised:
            handle.write(change)
        assert (raised.value.scope, raised.value.table) == (table.scope, table.name)
    with pytest.raises(KeyValueTableSealedError):
        handle.write(remove(APPLE), insert(PEAR, b"x"))
    assert handle.stored() == stored
    assert handle.value(APPLE) == b"red"
    backend.create(table, 1)  # what is there already stays, sealed
    with pytest.raises(KeyValueTableSealedError):
        handle.write(put(APPLE, b"x"))


def test_creating_what_is_there_leaves_its_entries(handle, backend, table):
    handle.write(put(APPLE, b"red"))
    stored = handle.stored()
    backend.create(table, 1)
    assert handle.stored() == stored


def test_handles_of_a_deleted_table_meet_an_error_also_when_it_is_recreated(
    handle, backend, table, run
):
    handle.write(put(APPLE, b"red"))
    backend.delete(table, 1)
    renewed = new_table_id()
    renewed = type(renewed)(table.scope, table.name, renewed.incarnation)
    backend.create(renewed, 1)
    for request in (
        lambda: handle.write(put(APPLE, b"x")),
        lambda: handle.write(insert(PEAR, b"x"), remove(APPLE)),
        lambda: handle.send(Request.of([put(APPLE, b"x")]), repeated=True),
        lambda: handle.get(APPLE),
        lambda: handle.get(APPLE, PEAR, values=False),
        lambda: handle.entries(),
    ):
        with pytest.raises(KeyValueTableNotFoundError) as raised:
            request()
        assert (raised.value.scope, raised.value.table) == (table.scope, table.name)
    assert Handle(backend.open(renewed, 0), run).stored() == {}
    backend.delete(renewed, 1)


def test_deleting_may_be_repeated_and_meet_nothing(backend):
    table = new_table_id()
    backend.delete(table, 3)
    backend.create(table, 3)
    backend.seal(table, 3)
    backend.delete(table, 3)
    backend.delete(table, 3)


# Where it lives, and whoever asks


# the others are classes of the tests
@pytest.mark.parametrize("segment_store", SEGMENT_STORES, indirect=True)
def test_a_backend_is_recreated_from_its_description_and_its_pickle(
    segment_store, backend, table, handle, run
):
    handle.write(put(APPLE, b"red"))
    for again in (backend_from(describe_backend(backend)), pickle.loads(pickle.dumps(backend))):
        assert again.to_dict() == backend.to_dict()
        assert (again.waits, again.limits) == (backend.waits, backend.limits)
        other = Handle(again.open(table, 0), run)
        assert other.value(APPLE) == b"red"
        run(other.segment.close())
    assert backend.horizon > 0
    assert backend.location(table, 0)


def test_a_segment_is_used_from_several_event_loops_and_after_it_was_closed(handle):
    def in_a_loop_of_its_own() -> bytes | None:
        with asyncio.Runner() as runner:
            mine = Handle(handle.segment, runner.run)
            mine.write(put(PEAR, b"green"))
            value = mine.value(APPLE)
            runner.run(mine.segment.close())
            return value

    handle.write(put(APPLE, b"red"))
    assert in_a_loop_of_its_own() == b"red"
    assert handle.value(PEAR) == b"green"
    assert in_a_loop_of_its_own() == b"red"
    handle.run(handle.segment.close())
    assert handle.value(PEAR) == b"green"
