"""What only S3 has to prove: replies that get lost, refusals that pass, large files, processes."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.objects.commit_log import CommitLog
from dagster_adjunct.resources.objects.s3_store import S3Store
from dagster_adjunct.resources.objects.store import S3Options
from tests.servers.s3_proxy import TroubledS3

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.s3 import S3Server
    from tests.servers.s3_proxy import Trouble

MIB = 1024 * 1024
pytestmark = pytest.mark.server


@pytest.fixture
def troubled(moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[TroubledS3]:
    moto_s3.set_in(monkeypatch)
    yield from TroubledS3(moto_s3.endpoint).running()


@pytest.fixture
def store(moto_s3: S3Server, troubled: TroubledS3) -> S3Store:
    options = S3Options(
        endpoint=troubled.endpoint,
        region="us-east-1",
        path_style=True,
        multipart_threshold=5 * MIB,
        part_size=5 * MIB,
        attempts=4,
    )
    return S3Store(moto_s3.url(), options)


@pytest.mark.parametrize("trouble", ["503", "500", "lost-before", "lost-after"])
def test_unconditional_requests_are_repeated(
    store: S3Store, troubled: TroubledS3, trouble: Trouble
) -> None:
    troubled.next("PUT", trouble, trouble)
    store.put("k", b"x")
    troubled.next("GET", trouble)
    assert store.get("k").data == b"x"
    troubled.next("HEAD", trouble)
    assert store.head("k") is not None
    troubled.next("GET", trouble)
    assert [info.key for info in store.list("")] == ["k"]
    troubled.next("POST", trouble)
    store.delete_many(["k"])
    troubled.next("DELETE", trouble)
    store.delete("k")
    with pytest.raises(ObjectNotFoundError):
        store.get("k")


def test_repeating_ends(store: S3Store, troubled: TroubledS3) -> None:
    troubled.next("GET", *["503"] * 10)
    with pytest.raises(StoreUnavailableError, match="503 SlowDown"):
        store.get("k")
    assert troubled.seen == ["GET"] * 4


@pytest.mark.parametrize("trouble", ["409", "503", "500", "lost-before", "lost-after"])
def test_a_create_whose_reply_is_lost_still_knows_that_it_won(
    store: S3Store, troubled: TroubledS3, trouble: Trouble
) -> None:
    troubled.next("PUT", trouble, trouble)
    etag = store.put_if_absent("k", b"mine")
    assert store.get("k").etag == etag
    with pytest.raises(ObjectExistsError):
        store.put_if_absent("k", b"mine")


@pytest.mark.parametrize("trouble", ["lost-before", "lost-after"])
def test_a_create_whose_reply_is_lost_recognizes_an_equal_object_of_another_writer(
    store: S3Store, troubled: TroubledS3, trouble: Trouble
) -> None:
    store.put_if_absent("k", b"the same bytes")
    troubled.next("PUT", trouble)
    with pytest.raises(ObjectExistsError):
        store.put_if_absent("k", b"the same bytes")


@pytest.mark.parametrize("trouble", ["409", "503"])
def test_a_replace_that_was_refused_for_now_is_repeated(
    store: S3Store, troubled: TroubledS3, trouble: Trouble
) -> None:
    etag = store.put("k", b"one")
    troubled.next("PUT", trouble, trouble)
    store.put_if_match("k", b"two", etag)
    assert store.get("k").data == b"two"


@pytest.mark.parametrize("trouble", ["500", "lost-before", "lost-after"])
def test_a_replace_of_unknown_outcome_is_sent_once_and_reported(
    store: S3Store, troubled: TroubledS3, trouble: Trouble
) -> None:
    etag = store.put("k", b"one")
    troubled.seen.clear()
    troubled.next("PUT", trouble)
    with pytest.raises(StoreUnavailableError):
        store.put_if_match("k", b"two", etag)
    assert troubled.seen == ["PUT"]
    assert store.get("k").data == (b"two" if trouble == "lost-after" else b"one")


@pytest.mark.parametrize("trouble", ["409", "503", "500", "lost-before", "lost-after"])
def test_a_commit_gets_through_trouble_exactly_once(
    store: S3Store, troubled: TroubledS3, trouble: Trouble
) -> None:
    log = CommitLog(store, "streams/x", "stream")
    last = None
    for n in range(3):
        # at the pointer, or at the manifest
        troubled.next("PUT", *([None, trouble] if n else [trouble]))
        last = log.commit(last, {"n": n}, by="tests")
    assert [commit.body["n"] for commit in log.history()] == [2, 1, 0]


class OvertakenStore(S3Store):
    """A competitor writes just after each look at an object, which sees nothing."""

    def head(self, key: str) -> None:
        self.put(key, b"theirs")


def _in_parts(server: S3Server, kind: type[S3Store] = S3Store) -> S3Store:
    options = dataclasses.replace(
        server.settings.s3_options(), multipart_threshold=5 * MIB, part_size=5 * MIB
    )
    return kind(server.url(), options)


def test_a_large_file_goes_in_parts_and_creates_once(s3_server: S3Server, tmp_path: Path) -> None:
    store = _in_parts(s3_server)
    path = tmp_path / "large"
    path.write_bytes(os.urandom(11 * MIB))
    etag = store.upload(path, "data/large")
    assert etag.endswith('-3"')
    store.download("data/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    with pytest.raises(ObjectExistsError):
        store.upload(path, "data/large")


def test_a_large_upload_that_is_overtaken_loses_and_leaves_no_parts(
    s3_server: S3Server, tmp_path: Path
) -> None:
    store = _in_parts(s3_server, OvertakenStore)
    path = tmp_path / "large"
    path.write_bytes(os.urandom(6 * MIB))
    with pytest.raises(ObjectExistsError):
        store.upload(path, "data/large")
    assert store.get("data/large").data == b"theirs"
    bucket = store.url.split("/")[2]
    assert not s3_server.client().list_multipart_uploads(Bucket=bucket).get("Uploads")


@pytest.mark.parametrize("trouble", ["lost-before", "lost-after", "409"])
def test_a_large_upload_gets_through_trouble_at_its_end(
    store: S3Store, troubled: TroubledS3, tmp_path: Path, trouble: Trouble
) -> None:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(6 * MIB))
    troubled.next("POST", None, trouble)  # creating the upload passes, completing it does not
    store.upload(path, "data/large")
    assert store.get("data/large").data == path.read_bytes()


def test_listing_and_deleting_go_past_one_page(
    versitygw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    versitygw.set_in(monkeypatch)
    store = S3Store(versitygw.url(), versitygw.settings.s3_options())
    keys = [f"many/{n:04d}" for n in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    assert [info.key for info in store.list("many/")] == keys
    store.delete_many(keys)
    assert list(store.list("many/")) == []


def _read_and_commit(store: S3Store, who: int) -> int:
    log = CommitLog(store, "streams/x", "stream")
    for _ in range(5):
        log.transact(
            lambda current: {"n": 0 if current is None else current.body["n"] + 1},
            by=f"p{who}",
            attempts=99,
        )
    return os.getpid()


def test_forked_processes_make_clients_of_their_own(s3_server: S3Server) -> None:
    store = S3Store(s3_server.url(), s3_server.settings.s3_options())
    CommitLog(store, "streams/x", "stream").commit(None, {"n": 0}, by="parent")
    children = [
        multiprocessing.get_context("fork").Process(target=_read_and_commit, args=(store, n))
        for n in range(2)
    ]
    for child in children:
        child.start()
    _read_and_commit(store, 9)
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    current = CommitLog(store, "streams/x", "stream").current()
    assert current is not None
    assert current.body == {"n": 15}


def test_server_side_encryption_is_asked_for(s3_server: S3Server) -> None:
    if s3_server.name == "versitygw":
        options = dataclasses.replace(s3_server.settings.s3_options(), sse="AES256")
    else:
        options = dataclasses.replace(
            s3_server.settings.s3_options(), sse="aws:kms", sse_kms_key_id="a-key"
        )
    store = S3Store(s3_server.url(), options)
    assert store._encryption()["ServerSideEncryption"] == options.sse
    if s3_server.name == "moto":
        store.put_if_absent("k", b"x")
        assert store._head("k")["SSEKMSKeyId"].endswith("a-key")


def test_a_closed_port_and_missing_credentials_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = S3Options(endpoint="http://127.0.0.1:9", region="us-east-1", attempts=2)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    with pytest.raises(StoreUnavailableError) as caught:
        S3Store("s3://bucket/x", closed).get("k")
    assert (caught.value.url, caught.value.key) == ("s3://bucket/x", "k")
    assert "the-secret" not in str(caught.value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="credentials"):
        S3Store("s3://bucket/x", closed).get("k")


def test_a_range_is_right_also_of_a_server_that_ignores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_object(**request: str) -> dict[str, Any]:
        return {"Body": io.BytesIO(b"0123456789"), "ETag": '"e"'}

    store = S3Store("s3://bucket/x")
    monkeypatch.setattr(store, "_client", lambda: SimpleNamespace(get_object=get_object))
    assert store.get_range("k", 4, 3) == b"456"
    assert store.get_range("k", 8, 5) == b"89"
    assert store.get_range("k", 20, 5) == b""


def test_a_key_is_placed_below_the_prefix_for_spark_too(s3_server: S3Server) -> None:
    store = S3Store("s3://bucket/a/prefix/")
    assert store.url == "s3://bucket/a/prefix"
    assert store.spark_uri("streams/x") == "s3a://bucket/a/prefix/streams/x"
    with pytest.raises(PreconditionFailedError):
        S3Store(s3_server.url(), s3_server.settings.s3_options()).put_if_match(
            "missing", b"x", '"0"'
        )
