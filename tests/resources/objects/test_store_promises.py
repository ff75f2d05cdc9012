from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.resources.errors import (
    InvalidNameError,
    ObjectExistsError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from dagster_adjunct.resources.objects.store import ObjectStore

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_put_is_read_back(store: ObjectStore) -> None:
    etag = store.put("a/b/c.bin", b"\x00hello")
    assert store.get("a/b/c.bin").data == b"\x00hello"
    assert store.get("a/b/c.bin").etag == etag
    assert isinstance(store, ObjectStore)


def test_put_replaces_and_changes_the_etag(store: ObjectStore) -> None:
    first = store.put("k", b"one")
    assert store.put("k", b"two") != first
    assert store.get("k").data == b"two"


def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    store.put("empty", b"")
    assert store.get("empty").data == b""
    info = store.head("empty")
    assert info is not None
    assert info.size == 0


def test_head_reports_size_etag_and_time_by_the_stores_clock(store: ObjectStore) -> None:
    etag = store.put("k", b"12345")
    info = store.head("k")
    assert info is not None
    assert (info.key, info.size, info.etag) == ("k", 5, etag)
    assert abs(info.modified - datetime.now(UTC)) < timedelta(minutes=1)
    assert store.head("missing") is None


def test_reading_what_is_not_there_says_so(store: ObjectStore, tmp_path: Path) -> None:
    for read in (
        lambda: store.get("a/missing"),
        lambda: store.get_range("a/missing", 0, 1),
        lambda: store.get_range("a/missing", 0, 0),
        lambda: store.download("a/missing", tmp_path / "x"),
    ):
        with pytest.raises(ObjectNotFoundError) as failure:
            read()
        assert failure.value.facts == {"key": "a/missing"}
    assert not (tmp_path / "x").exists()


def test_a_range_ends_where_the_object_ends(store: ObjectStore) -> None:
    store.put("k", b"0123456789")
    assert store.get_range("k", 2, 3) == b"234"
    assert store.get_range("k", 8, 100) == b"89"
    assert store.get_range("k", 10, 5) == b""
    assert store.get_range("k", 500, 5) == b""
    assert store.get_range("k", 3, 0) == b""


def test_put_if_absent_creates_once(store: ObjectStore) -> None:
    etag = store.put_if_absent("k", b"mine")
    for content in (b"yours", b"mine"):
        with pytest.raises(ObjectExistsError) as failure:
            store.put_if_absent("k", content)
        assert failure.value.facts == {"key": "k"}
    assert store.get("k").data == b"mine"
    assert store.get("k").etag == etag


def test_put_if_match_replaces_only_what_was_read(store: ObjectStore) -> None:
    first = store.put("k", b"one")
    second = store.put_if_match("k", b"two", first)
    with pytest.raises(PreconditionFailedError):
        store.put_if_match("k", b"three", first)
    assert store.get("k").data == b"two"
    assert store.put_if_match("k", b"three", second) == store.get("k").etag


def test_put_if_match_never_creates(store: ObjectStore) -> None:
    etag = store.put("k", b"one")
    store.delete("k")
    with pytest.raises(PreconditionFailedError):
        store.put_if_match("k", b"two", etag)
    assert store.head("k") is None


def test_deleting_twice_is_no_error(store: ObjectStore) -> None:
    store.put("a/k", b"x")
    store.delete("a/k")
    store.delete("a/k")
    assert store.head("a/k") is None
    store.put_if_absent("a/k", b"again")


def test_many_are_deleted_at_once(store: ObjectStore) -> None:
    for n in range(5):
        store.put(f"d/{n}", b"x")
    store.delete_many(f"d/{n}" for n in (0, 1, 2, 77))
    assert [info.key for info in store.list("d/")] == ["d/3", "d/4"]
    store.delete_many([])


def test_list_is_in_order_of_keys_and_by_any_prefix(store: ObjectStore) -> None:
    keys = ["a-b", "a/b", "a/b-c/d", "a/b/c", "a0", "b/x"]
    keys.remove("a/b")  # an object that is a folder of another is not portable
    for key in keys:
        store.put(key, key.encode())
    assert [info.key for info in store.list("")] == sorted(keys)
    assert [info.key for info in store.list("a/b")] == ["a/b-c/d", "a/b/c"]
    assert [info.key for info in store.list("a/b/")] == ["a/b/c"]
    assert [info.key for info in store.list("none/")] == []
    sizes = {info.key: info.size for info in store.list("a")}
    assert sizes["a/b-c/d"] == 7


def test_an_upload_creates_once_and_leaves_the_file(store: ObjectStore, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    store.upload(path, "up/one")
    path.write_bytes(b"changed later")
    assert store.get("up/one").data == b"content"
    with pytest.raises(ObjectExistsError):
        store.upload(path, "up/one")
    assert store.get("up/one").data == b"content"


def test_a_staged_file_is_uploaded_and_then_deleted_by_its_writer(store: ObjectStore) -> None:
    path = store.staging_dir() / "part-7"
    path.write_bytes(b"rows")
    try:
        store.upload(path, "up/two")
    finally:
        path.unlink()
    assert store.get("up/two").data == b"rows"
    assert [info.key for info in store.list("")] == ["up/two"]


def test_a_download_has_all_bytes(store: ObjectStore, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    store.put("big", content)
    store.download("big", tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["here"]


def test_an_unsafe_key_is_refused_before_anything_is_done(store: ObjectStore) -> None:
    escapes = ["/a", "a/../b", "..", "./a", "a//b", "a/", ""]
    for key in [
        *escapes,
        ".hidden",
        "a/.b",
        "a b",
        "a\\b",
        "a\x00b",
        "ä",
        "a%2e",
        "x" * 300,
        "x/" * 500 + "x",
    ]:
        for use in (store.get, store.head, store.delete, store.spark_uri):
            with pytest.raises(InvalidNameError) as caught:
                use(key)
            assert caught.value.name == key[:300]
        for write in (store.put, store.put_if_absent):
            with pytest.raises(InvalidNameError) as caught:
                write(key, b"x")
            assert caught.value.name == key[:300]
    assert list(store.list("")) == []


# Not moto, which looks whether an object exists and stores it in two steps.
ATOMIC = pytest.mark.parametrize("store", ["memory", "local", "versitygw"], indirect=True)


@ATOMIC
def test_of_racing_creators_exactly_one_wins(store: ObjectStore) -> None:
    def create(key: str, content: bytes) -> bytes | None:
        try:
            store.put_if_absent(key, content)
        except ObjectExistsError:
            return None
        return content

    with ThreadPoolExecutor(8) as pool:
        for turn in range(8):
            key = f"race/{turn}"
            winners = [
                won for won in pool.map(create, [key] * 8, [b"%d" % n for n in range(8)]) if won
            ]
            assert winners == [store.get(key).data]


@ATOMIC
def test_of_racing_equal_creators_only_one_thinks_that_it_won(store: ObjectStore) -> None:
    def create(_: int) -> bool:
        try:
            store.put_if_absent("equal", b"the same")
        except ObjectExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(8))) == 1


def test_of_racing_replacers_exactly_one_wins(store: ObjectStore) -> None:
    def replace(content: bytes, etag: str) -> bytes | None:
        try:
            store.put_if_match("m", content, etag)
        except PreconditionFailedError:
            return None
        return content

    etag = store.put("m", b"start")
    with ThreadPoolExecutor(8) as pool:
        for turn in range(8):
            contents = [b"%d-%d" % (turn, n) for n in range(8)]
            winners = [won for won in pool.map(replace, contents, [etag] * 8) if won]
            stored = store.get("m")
            assert winners == [stored.data]
            etag = stored.etag


def test_a_descriptor_opens_the_same_store_elsewhere(store: ObjectStore) -> None:
    store.put("k", b"x")
    again = pickle.loads(pickle.dumps(store.descriptor)).open()
    assert again.url == store.url
    assert again.get("k").data == b"x"
    assert pickle.loads(pickle.dumps(store)) is again  # and there is one in a process
