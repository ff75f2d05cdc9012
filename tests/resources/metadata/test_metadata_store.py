"""Namespaces of the metadata store: pages, conflicts, crashes, and what a change costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources import metadata as document_module
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    InvalidNameError,
    MalformedDocumentError,
    ManifestMismatchError,
)
from dagster_adjunct.resources.metadata import MetadataStore, Namespace, NamespaceSnapshot
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.clocks import on_clock
from tests.faulty_store import Crash, Fault, FaultyStore

Contents = dict[str, Any]


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_module, "PAGE_BYTES", 200)


def named(lake: Lake) -> Namespace:
    return MetadataStore(lake).namespace("things", "app")


def put(namespace: Namespace, changes: Mapping[str, Any]) -> None:
    namespace.transact(lambda _: (changes, None), by="me")


def contents(namespace: Namespace) -> Contents:
    return dict(namespace.read().items())


def faulty(lake: Lake, *plan: Fault) -> tuple[Namespace, FaultyStore]:
    store = FaultyStore(lake.store, plan)
    return named(Lake(store, lake.id)), store


def test_entries_are_set_replaced_and_removed(lake: Lake) -> None:
    namespace = named(lake)
    assert contents(namespace) == {}
    assert namespace.read().get("a") is None
    put(namespace, {"b": {"n": 1}, "a": [2, None, "ü"], "c": 0})
    assert list(namespace.read().items()) == [("a", [2, None, "ü"]), ("b", {"n": 1}), ("c", 0)]
    put(namespace, {"b": 3, "c": None, "not there": None})
    assert contents(named(lake)) == {"a": [2, None, "ü"], "b": 3}
    assert named(lake).read().get("b") == 3
    assert len(namespace.read()) == 2
    put(namespace, {"a": None, "b": None})
    assert contents(named(lake)) == {}
    assert namespace.read().version == 3


def test_namespaces_and_scopes_do_not_meet(lake: Lake) -> None:
    store = MetadataStore(lake)
    put(store.namespace("things", "app"), {"a": 1})
    assert contents(store.namespace("things", "other")) == {}
    assert contents(store.namespace("others", "app")) == {}
    with pytest.raises(InvalidNameError) as caught:
        store.namespace("things", "a/b")
    assert caught.value.name == "a/b"


def test_what_changes_nothing_is_no_commit(lake: Lake) -> None:
    namespace = named(lake)
    put(namespace, {})
    put(namespace, {"a": None})
    assert namespace.read().version == 0
    put(namespace, {"a": 1})
    put(namespace, {"a": 1, "b": None})
    assert namespace.read().version == 1


def test_a_snapshot_stays_what_it_was(lake: Lake) -> None:
    namespace = named(lake)
    put(namespace, {"a": 1})
    before = named(lake).read()
    put(namespace, {"a": 2, "b": 2})
    assert dict(before.items()) == {"a": 1}
    assert before.get("b") is None


def test_a_change_that_meets_another_decides_again(lake: Lake) -> None:
    rival = named(lake)
    put(rival, {"n": 1})
    namespace, _ = faulty(
        lake, Fault("put_if_match", 1, "meanwhile", lambda: put(rival, {"n": 10, "other": 1}))
    )

    def add_one(snapshot: NamespaceSnapshot) -> tuple[Contents, int]:
        return {"n": snapshot.get("n") + 1}, snapshot.get("n")

    assert namespace.transact(add_one, by="me") == 10
    assert contents(rival) == {"n": 11, "other": 1}


@pytest.mark.parametrize("kind", ["crash-before", "crash-after"])
def test_a_crash_at_any_request_shows_all_of_a_change_or_nothing(
    lake: Lake, small_pages: None, kind: Any
) -> None:
    before = {f"k{n}": "x" * 50 for n in range(20)}
    after = {**before, **{f"k{n}": "y" * 70 for n in range(0, 20, 3)}, "new": 1}
    seen = []
    for nth in _until_no_crash():
        fresh = lake_in(InMemoryStore())
        put(named(fresh), before)
        namespace, _ = faulty(fresh, Fault("*", nth, kind))
        try:
            put(namespace, after)
        except Crash:
            seen.append(contents(named(fresh)))
            assert seen[-1] in (before, after)
            put(named(fresh), after)
            assert contents(named(fresh)) == after
            continue
        break
    assert len(seen) > 5
    assert before in seen


def _until_no_crash() -> Iterator[int]:
    yield from range(1, 200)
    raise AssertionError("it never ended")


def test_a_change_costs_what_it_touches_and_no_more(lake: Lake, small_pages: None) -> None:
    put(named(lake), {f"k{n:04}": "x" * 30 for n in range(1000)})
    pages = len(named(lake).read().document.pages)
    assert pages > 100
    namespace, store = faulty(lake)
    put(namespace, {"k0500": 1})
    assert [request for request, _ in store.requests].count(
        "put_if_absent"
    ) == 2  # a page and the manifest
    assert len(store.requests) <= 7
    reader, store = faulty(lake)
    assert reader.read().get("k0500") == 1
    assert len(store.requests) == 3


def test_pages_grow_with_bytes_and_shrink_again(lake: Lake) -> None:
    namespace = named(lake)
    put(namespace, {f"k{n:05}": "x" * 300 for n in range(10_000)})
    sizes = [page.count for page in namespace.read().document.pages]
    assert 10 <= len(sizes) <= 15
    assert max(sizes) <= 2 * min(sizes)
    put(namespace, {f"k{n:05}": None for n in range(10_000) if n % 100})
    assert len(namespace.read().document.pages) == 1
    assert len(contents(named(lake))) == 100


def test_an_entry_larger_than_a_page_has_one_of_its_own(lake: Lake, small_pages: None) -> None:
    entries = {"a": 1, "b": "x" * 1000, "c": 3}
    put(named(lake), entries)
    assert contents(named(lake)) == entries


@pytest.mark.parametrize("value", [float("nan"), object(), "\ud800"])
def test_what_json_can_not_hold_is_refused_by_its_key(lake: Lake, value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        put(named(lake), {"a": value})
    assert caught.value.key == "a"
    assert named(lake).read().version == 0


def test_a_changed_page_is_an_error_that_names_it(lake: Lake) -> None:
    put(named(lake), {"a": 1})
    page = named(lake).read().document.pages[0]
    lake.store.put(page.key, b'[["a",2]]')
    with pytest.raises(ManifestMismatchError) as caught:
        contents(named(lake))
    assert caught.value.key == page.key


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"format": 2, "pages": []}, "format 2; this release of Adjunct reads format 1"),
        ({"format": 1, "pages": [{"first": "a"}]}, "not a namespace of format 1: pages.0"),
        ({"format": 1, "pages": [], "more": 1}, "more"),
    ],
)
def test_a_document_of_another_form_is_refused(lake: Lake, body: Contents, message: str) -> None:
    lake.commit_log("metadata/things/app", "metadata").commit(None, body, by="me")
    with pytest.raises(MalformedDocumentError, match=message):
        named(lake).read()


KEYS = st.text(st.sampled_from("abcdefgh"), min_size=1, max_size=3)
CHANGES = st.dictionaries(
    KEYS, st.one_of(st.none(), st.integers(0, 3), st.text(max_size=90)), max_size=12
)


@pytest.mark.lengthy
@settings(max_examples=80)
@given(st.lists(CHANGES, max_size=12))
def test_any_changes_are_those_of_a_dictionary(all_changes: list[Contents]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_module, "PAGE_BYTES", 120)
        lake = lake_in(InMemoryStore())
        namespace = named(lake)
        model: Contents = {}
        for changes in all_changes:
            put(namespace, changes)
            model = {key: value for key, value in {**model, **changes}.items() if value is not None}
            fresh = named(lake).read()
            assert dict(fresh.items()) == model
            assert list(fresh.items()) == sorted(model.items())
            assert all(fresh.get(key) == model.get(key) for key in changes)
            firsts = [page.first for page in fresh.document.pages]
            assert firsts == sorted(set(firsts))


def test_collecting_deletes_what_no_namespace_reaches_and_nothing_else(
    lake: Lake, small_pages: None
) -> None:
    others = MetadataStore(lake).namespace("things", "other")
    put(others, {f"o{n}": n for n in range(50)})
    for round_number in range(5):
        put(named(lake), {f"k{n}": [round_number, n] for n in range(50)})
    expected = contents(named(lake)), contents(others)
    pages = {item.key for item in lake.store.list("metadata/") if "/pages/" in item.key}
    reached = {page.key for name in (named(lake), others) for page in name.read().document.pages}
    assert pages > reached

    # it is all too young: somebody may be about to commit it
    assert MetadataStore(lake).collect() == 0
    deleted = MetadataStore(
        on_clock(lake, lambda: datetime.now(UTC) + timedelta(hours=2))
    ).collect()
    assert deleted == len(pages - reached)
    assert {item.key for item in lake.store.list("metadata/") if "/pages/" in item.key} == reached
    assert (contents(named(lake)), contents(others)) == expected
    put(named(lake), {"one more": 1})
    assert contents(MetadataStore(lake).namespace("things", "app"))["one more"] == 1


def test_collecting_keeps_the_newest_manifests(lake: Lake) -> None:
    for number in range(130):
        put(named(lake), {"k": number})
    later = datetime.now(UTC) + timedelta(hours=2)
    MetadataStore(on_clock(lake, lambda: later)).collect()
    assert len(list(lake.store.list("metadata/things/app/manifests/"))) in range(100, 103)
    assert contents(named(lake)) == {"k": 129}


@pytest.mark.parametrize("name", ["pages", "manifests"])
def test_collecting_keeps_namespaces_named_like_a_folder_of_theirs(lake: Lake, name: str) -> None:
    namespaces = [
        MetadataStore(lake).namespace(name, "app"),
        MetadataStore(lake).namespace("things", name),
        MetadataStore(lake).namespace(name, name),
    ]
    for namespace in namespaces:
        for number in range(3):
            put(namespace, {"k": number})
    later = datetime.now(UTC) + timedelta(hours=2)
    deleted = MetadataStore(on_clock(lake, lambda: later)).collect()
    assert deleted == len(namespaces) * 2  # the two pages that were replaced
    for namespace in namespaces:
        assert contents(namespace) == {"k": 2}
        put(namespace, {"k": 3})
        assert contents(namespace) == {"k": 3}
