from __future__ import annotations

import json

import pytest

from dagster_adjunct.resources.errors import (
    AdjunctError,
    MalformedDocumentError,
    ManifestMismatchError,
)
from dagster_adjunct.resources.objects.commit_log import CommitLog, read_page, write_page
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore


@pytest.fixture
def store() -> InMemoryStore:
    return InMemoryStore()


@pytest.fixture
def log(store: InMemoryStore) -> CommitLog:
    log = CommitLog(store, "datasets/planes", "dataset")
    log.commit(log.commit(None, {"v": 1}, by="tests"), {"v": 2}, by="tests")
    return log


def _change(store: InMemoryStore, key: str, **fields: object) -> None:
    store.put(key, json.dumps({**json.loads(store.get(key).data), **fields}).encode())


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"format": 1}',
        b'{"format": "one"}',
        b"{}" * 1000,
    ],
)
def test_a_malformed_pointer_names_itself_and_spares_what_was_committed(
    store: InMemoryStore, log: CommitLog, damage: bytes
) -> None:
    keys = [info.key for info in store.list("datasets/planes/manifests/")]
    store.put("datasets/planes/CURRENT", damage)
    with pytest.raises(MalformedDocumentError) as caught:
        log.current()
    assert "'datasets/planes/CURRENT'" in str(caught.value.document)
    assert "datasets/planes/manifests/" in caught.value.next_step
    assert [log.read(key).body for key in keys] == [{"v": 1}, {"v": 2}]
    with pytest.raises(AdjunctError):
        log.transact(lambda current: {}, by="tests")
    assert store.get("datasets/planes/CURRENT").data == damage


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"number": 0}, "number: Input should be greater than or equal to 1"),
        ({"commit": ""}, "commit: "),
        ({"surprise": 1}, "surprise: Extra inputs"),
        ({"kind": "stream"}, "expected kind 'dataset'"),
        ({"manifest": "datasets/other/manifests/000000000002-x.json"}, "datasets/other"),
        ({"manifest": "../../etc/passwd"}, "etc/passwd"),
        (
            {"format": 7},
            "has format 7; this release of Adjunct reads format 1. Upgrade dagster-adjunct",
        ),
    ],
)
def test_a_pointer_with_a_wrong_field_says_which(
    store: InMemoryStore, log: CommitLog, fields: dict[str, object], says: str
) -> None:
    _change(store, "datasets/planes/CURRENT", **fields)
    with pytest.raises(MalformedDocumentError) as caught:
        log.current()
    assert says in str(caught.value)


def test_a_pointer_to_a_missing_manifest_says_which_is_missing(
    store: InMemoryStore, log: CommitLog
) -> None:
    current = log.current()
    assert current is not None
    store.delete(current.manifest_key)
    with pytest.raises(MalformedDocumentError) as caught:
        log.current()
    assert caught.value.document == "datasets/planes/CURRENT"
    assert current.manifest_key in str(caught.value)


def test_a_malformed_manifest_names_itself_and_spares_the_others(
    store: InMemoryStore, log: CommitLog
) -> None:
    first, second = [info.key for info in store.list("datasets/planes/manifests/")]
    store.put(second, store.get(second).data[:-5])
    with pytest.raises(MalformedDocumentError) as caught:
        log.current()
    assert second in str(caught.value.document)
    assert log.read(first).body == {"v": 1}


def test_a_manifest_under_another_name_is_refused(store: InMemoryStore, log: CommitLog) -> None:
    first, second = [info.key for info in store.list("datasets/planes/manifests/")]
    store.put(second, store.get(first).data)
    with pytest.raises(MalformedDocumentError) as caught:
        log.current()
    assert caught.value.document == second


def test_a_manifest_of_a_future_format_is_refused_by_name(
    store: InMemoryStore, log: CommitLog
) -> None:
    current = log.current()
    assert current is not None
    _change(store, current.manifest_key, format=2, new_field=True)
    with pytest.raises(
        MalformedDocumentError, match="has format 2; this release of Adjunct reads format 1"
    ) as caught:
        log.current()
    assert current.manifest_key in str(caught.value.document)


def test_a_malformed_lake_document_is_named_and_left_alone(store: InMemoryStore) -> None:
    lake_in(store)
    for damage in (b"{}", b'{"format": 9}'):
        store.put("_adjunct/lake.json", damage)
        with pytest.raises(MalformedDocumentError) as caught:
            lake_in(store)
        assert "_adjunct/lake.json" in str(caught.value.document)
        assert store.get("_adjunct/lake.json").data == damage


def test_a_page_is_read_back_and_a_changed_one_is_noticed(store: InMemoryStore) -> None:
    items = [{"file": n, "name": "ü"} for n in range(100)]
    ref = write_page(store, "streams/x", items)
    assert ref.count == 100
    assert read_page(store, ref) == items
    store.put(ref.key, b"[]")
    with pytest.raises(ManifestMismatchError) as failure:
        read_page(store, ref)
    assert failure.value.key == ref.key
