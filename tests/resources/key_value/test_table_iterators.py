"""Iterators over families and tables, and the states from which another process goes on."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_adjunct.errors import ConfigurationError, IteratorStateError, SerializationError
from dagster_adjunct.key_value import (
    BlockingKeyValueTable,
    IntegerSerializer,
    IteratorState,
    JsonSerializer,
    KeyValueTable,
    KeyValueTableConfiguration,
    TextSerializer,
)
from dagster_adjunct.resources.key_value.segment import (
    StoredEntry,
    TableId,
    family_prefix,
    partition_of,
    table_key,
)
from tests.resources.key_value.scripted_segments import ID, ScriptedSegments

Table = BlockingKeyValueTable[str, str]
_KEYS = st.text(st.sampled_from("ab\x00é😀"), max_size=3)


def filled(keys: Any, backend: ScriptedSegments | None = None) -> Table:
    table = BlockingKeyValueTable((backend or ScriptedSegments()).table())
    for family, key in keys:
        table.put(key, f"{family} {key}", family=family)
    return table


def resumed(pages: Callable[[IteratorState | None], Any], size: int) -> list[Any]:
    """Return the items of all pages, each asked for anew with the state of the one before,
    stored as bytes.
    """
    state, items = None, []
    while (page := next(pages(state), None)) is not None:
        assert 1 <= len(page.items) <= size
        items += page.items
        state = IteratorState.from_bytes(page.state.to_bytes())
    return items


@given(
    st.sets(st.tuples(st.sampled_from([None, "f", "g"]), _KEYS)),
    st.integers(1, 4),
    st.integers(1, 3),
    st.text(st.sampled_from("abé"), max_size=1),
    st.none() | _KEYS,
    st.none() | _KEYS,
)
def test_a_family_is_matched_in_the_order_of_its_keys_bytes(
    keys: set[tuple[str | None, str]],
    size: int,
    longest: int,
    prefix: str,
    start: str | None,
    end: str | None,
) -> None:
    backend = ScriptedSegments()
    table = filled(keys, backend)
    backend.longest_page = longest
    expected = sorted(
        (
            key
            for family, key in keys
            if family == "f" and key.startswith(prefix)
            if (start is None or key.encode() >= start.encode())
            and (end is None or key.encode() < end.encode())
        ),
        key=str.encode,
    )
    some: dict[str, Any] = {"prefix": prefix, "start": start, "end": end, "page_size": size}
    at_once = [key.key for page in table.keys("f", **some) for key in page.items]
    assert at_once == expected
    entries = resumed(lambda state: table.entries("f", **some, state=state), size)
    assert [(entry.key.key, entry.value) for entry in entries] == [
        (key, f"f {key}") for key in expected
    ]


@given(st.sets(st.tuples(st.sampled_from([None, "f", "gg"]), _KEYS)), st.integers(1, 4))
def test_a_whole_table_is_matched_by_partition_then_by_table_key(
    keys: set[tuple[str | None, str]], size: int
) -> None:
    table = filled(keys)

    def stored(address: tuple[str | None, str]) -> tuple[int, bytes]:
        family, key = address
        prefix = b"" if family is None else family_prefix(family)
        made = table_key(prefix, key.encode())
        return partition_of(prefix or made, 4), made

    expected = sorted(keys, key=stored)
    entries = resumed(lambda state: table.all_entries(page_size=size, state=state), size)
    assert [(entry.key.family, entry.key.key, entry.value) for entry in entries] == [
        (f, k, f"{f} {k}") for f, k in expected
    ]
    assert resumed(lambda state: table.all_keys(page_size=size, state=state), size) == [
        entry.key for entry in entries
    ]
    some = resumed(
        lambda state: table.all_keys(partitions=[3, 1], page_size=size, state=state), size
    )
    assert [(key.family, key.key) for key in some] == [
        address for partition in (3, 1) for address in expected if stored(address)[0] == partition
    ]


def test_a_prefix_may_end_in_the_middle_of_a_character() -> None:
    table = filled([("f", "é"), ("f", "ê"), ("f", "e")])
    assert [key.key for page in table.keys("f", prefix=b"\xc3") for key in page.items] == ["é", "ê"]


def test_while_others_write_each_key_is_matched_once_and_those_that_stay_are_matched() -> None:
    table = filled([("f", f"{n:03}") for n in range(0, 100, 2)])
    matched: list[str] = []
    for turn, page in enumerate(table.keys("f", page_size=7)):
        matched += [key.key for key in page.items]
        table.put(matched[-1], "again", family="f")
        table.put("000", "again", family="f")
        table.put(f"{2 * turn + 1:03}", "new", family="f")
        table.remove("098", family="f")
    assert matched == sorted(set(matched))
    assert {f"{n:03}" for n in range(0, 98, 2)} <= set(matched)
    assert "098" not in matched


def test_behind_the_last_page_its_state_gives_what_came_since() -> None:
    table = filled([("f", "a"), ("f", "b")])
    (page,) = table.keys("f")
    assert list(table.keys("f", state=page.state)) == []
    table.put("c", "new", family="f")
    table.put("aa", "behind", family="f")
    (later,) = table.keys("f", state=page.state)
    assert [key.key for key in later.items] == ["c"]


def test_a_page_that_is_known_to_be_the_last_is_not_asked_behind() -> None:
    """Else a family of one page could give half of what another has written in one batch since."""
    backend = ScriptedSegments()
    table = filled([("f", "b"), ("f", "c"), ("g", "x")], backend)
    backend.asked.clear()
    matched = []
    for page in table.entries("f"):
        matched += [entry.key.key for entry in page.items]
        table.put_all([("a", "new"), ("d", "new")], family="f")
    assert matched == ["b", "c"]
    assert [kind for kind, *_ in backend.asked] == ["page", "apply"]
    backend.asked.clear()
    assert [len(page.items) for page in table.keys("f", page_size=2)] == [2, 2]
    assert len(backend.asked) == 2
    backend.asked.clear()
    assert sum(len(page.items) for page in table.all_keys()) == 5
    assert len(backend.asked) == 4, "one request for each partition"


def test_an_empty_family_or_range_has_no_page_and_an_empty_range_no_request() -> None:
    backend = ScriptedSegments()
    table = filled([("f", "a")], backend)
    backend.asked.clear()
    assert list(table.keys("f", start="b", end="b")) == []
    assert list(table.keys("f", start="c", end="b")) == []
    assert list(table.keys("f", prefix="x", end="b")) == []
    assert backend.asked == []
    assert list(table.entries("g")) == []


@pytest.mark.parametrize(
    ("serializer", "key", "prefix"),
    [(JsonSerializer(), "log/1", b'"log/'), (IntegerSerializer(), 5, b"\x80")],
)
def test_a_text_is_no_prefix_of_keys_that_are_not_written_as_texts(
    serializer: Any, key: Any, prefix: bytes
) -> None:
    one_partition = KeyValueTableConfiguration(1)
    table = BlockingKeyValueTable(
        KeyValueTable(ID, one_partition, ScriptedSegments(), serializer, TextSerializer())
    )
    table.put(key, "v", family="f")
    with pytest.raises(ConfigurationError) as caught:
        next(table.keys("f", prefix="log/"), None)
    assert caught.value.argument == "prefix"
    assert [item.key for page in table.keys("f", prefix=prefix) for item in page.items] == [key]


@pytest.mark.parametrize(
    "use",
    [
        lambda t, s: t.entries("f", page_size=1, state=s),
        lambda t, s: t.keys("g", state=s),
        lambda t, s: t.keys("f", prefix="a", state=s),
        lambda t, s: t.keys("f", end="z", state=s),
        lambda t, s: t.keys("f", start="\x00", state=s),
        lambda t, s: t.all_keys(state=s),
        lambda t, s: t.keys("f", state=IteratorState(s.to_bytes()[:-1] + b"?")),
        lambda t, s: t.keys("f", state=s.to_bytes()),
        lambda t, s: t.keys("f", state="here"),
    ],
)
def test_a_state_is_refused_by_any_other_iteration(
    use: Callable[[Any, IteratorState], Any],
) -> None:
    table = filled([("f", "a"), ("f", "b")])
    state = next(table.keys("f", page_size=1)).state
    with pytest.raises(IteratorStateError):
        next(use(table, state), None)
    assert [
        key.key for page in table.keys("f", page_size=9, state=state) for key in page.items
    ] == ["b"]


def test_a_state_is_refused_by_other_partitions_and_by_a_table_that_was_recreated() -> None:
    backend = ScriptedSegments()
    table = filled([(None, f"{n}") for n in range(20)], backend)
    state = next(table.all_entries(page_size=1)).state
    with pytest.raises(IteratorStateError):
        next(table.all_entries(partitions=[0, 1], state=state))
    renewed = backend.table(id=TableId(ID.scope, ID.name, "00000000000000a2"))
    with pytest.raises(IteratorStateError):
        next(BlockingKeyValueTable(renewed).all_entries(state=state))


@given(st.integers(0, 60), st.integers(1, 255))
def test_no_damaged_state_is_taken(place: int, change: int) -> None:
    stored = bytearray(next(filled([("f", "a" * 30)]).keys("f")).state.to_bytes())
    stored[place % len(stored)] ^= change
    with pytest.raises(IteratorStateError):
        IteratorState.from_bytes(bytes(stored))


def test_a_state_has_these_bytes_and_can_be_pickled() -> None:
    state = next(filled([("f", "a")]).keys("f")).state
    stored = state.to_bytes()
    assert stored[:10] == b"\x01k" + bytes.fromhex(ID.incarnation)
    assert stored[30:34] == b"\x00\x01fa"
    assert pickle.loads(pickle.dumps(state)) == state
    for other in (b"", b"x" * 38, "text", None, stored[:-1]):
        with pytest.raises(IteratorStateError):
            IteratorState.from_bytes(other)  # type: ignore[arg-type]


@pytest.mark.parametrize("stored", [b"", b"\0", b"\0\2\xff\xff key"])
def test_what_somebody_else_stored_as_a_key_is_reported_with_the_table(stored: bytes) -> None:
    backend = ScriptedSegments()
    table = filled([("f", "a"), (None, "b")], backend)
    backend.stored[0] = {stored: StoredEntry(stored, b"v" * 16, b"value")}
    for pages in (table.all_keys(partitions=[0]), table.all_entries(partitions=[0])):
        with pytest.raises(SerializationError) as caught:
            next(pages)
        assert (caught.value.scope, caught.value.table) == ("scope", "table")
