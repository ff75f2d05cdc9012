from __future__ import annotations

import errno
import gc
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConditionalWritesUnsupportedError,
    ConfigurationError,
    InvalidNameError,
    LakeNotFoundError,
    ObjectExistsError,
    PreconditionFailedError,
    StoreUnavailableError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.objects.lake import (
    LakeCreation,
    LakeSettings,
    describe_store,
    lake_in,
    open_lake,
)
from dagster_adjunct.resources.objects.local_store import LocalStore
from dagster_adjunct.resources.objects.s3_store import S3Store
from dagster_adjunct.resources.objects.store import InMemoryStore, ObjectStore, S3Options
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.faulty_store import Fault, FaultKind, FaultyStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.s3 import S3Server


class _IgnoresIfNoneMatch(InMemoryStore):
    def put_if_absent(self, key: str, data: bytes) -> str:
        return self.put(key, data)


class _IgnoresIfMatch(InMemoryStore):
    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        return self.put(key, data)


class _IgnoresBoth(_IgnoresIfMatch, _IgnoresIfNoneMatch):
    pass


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (_IgnoresIfNoneMatch, "If-None-Match"),
        (_IgnoresIfMatch, "If-Match"),
        (_IgnoresBoth, "If-None-Match"),
    ],
)
def test_a_store_that_ignores_conditions_is_refused_with_the_reason(
    kind: type[InMemoryStore], says: str
) -> None:
    store = kind()
    lake = lake_in(store)
    with pytest.raises(ConditionalWritesUnsupportedError, match=says) as caught:
        lake.store.put_if_absent("first", b"")
    assert "versitygw" in caught.value.next_step
    assert list(store.list("")) == []


def test_a_lake_is_probed_once_at_its_first_write_and_then_only_read(store: ObjectStore) -> None:
    watched = FaultyStore(store)
    first = lake_in(watched)
    assert not first.exists()
    assert {request for request, _ in watched.requests} == {"get"}
    first.store.put("x", b"")
    assert next(request for request, _ in watched.requests if request != "get") == "put_if_absent"
    assert first.exists()
    watched.requests.clear()
    assert lake_in(watched).id == first.id
    assert watched.requests == [("get", "_adjunct/lake.json")]
    assert [info.key for info in store.list("")] == ["_adjunct/lake.json", "x"]


@pytest.mark.parametrize("kind", ["a new lake", "S3"])
def test_ready_stores_answer_while_another_thread_has_their_lock(kind: str) -> None:
    """A fork copies a lock as it is: one that each request takes would be locked in some
    children for ever.
    """
    if kind == "S3":
        s3 = S3Store(
            "s3://bucket/lake", S3Options(endpoint="http://localhost:9", region="eu-west-1")
        )
        use: Callable[[], object] = s3._client
        lock = s3._lock
    else:
        use = LakeCreation(InMemoryStore())
        lock = use._lock
    use()
    with lock:
        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()


def test_processes_that_write_to_a_new_lake_together_agree_on_it(store: ObjectStore) -> None:
    lakes = [lake_in(store) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda numbered: numbered[1].store.put(f"x{numbered[0]}", b""), enumerate(lakes)
            )
        )
    assert len({lake.id for lake in lakes}) == 1


def test_reading_makes_no_lake_and_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    assert streams.list_streams() == []
    with pytest.raises(StreamNotFoundError) as caught:
        streams.describe("orders")
    assert caught.value.stream == "lake.orders"
    lake.store.delete("x/y")
    assert (lake.exists(), lake.id, list(tmp_path.iterdir())) == (False, "", [])
    with pytest.raises(LakeNotFoundError) as caught:
        open_lake(tmp_path / "lake", create=False)
    assert caught.value.url == str(tmp_path / "lake")
    assert caplog.messages == []
    streams.create("orders", schema=Schema.of(n="int"), partitions=1)
    assert caplog.messages == [f"Created a new lake at {tmp_path / 'lake'}."]
    assert lake.exists()
    assert lake.id == open_lake(tmp_path / "lake", create=False).id


def test_a_folder_a_file_url_and_the_environment_name_the_same_lake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "with space ü%20"
    open_lake(folder).store.put("x", b"")
    lake = open_lake(folder)
    assert open_lake(folder.as_uri()).id == lake.id
    assert open_lake(str(folder)).store is lake.store
    monkeypatch.setenv("ADJUNCT_LAKE", str(folder))
    monkeypatch.setenv("ADJUNCT_LAKE_SHARED", "true")
    assert open_lake().id == lake.id
    assert (open_lake().shared, lake.shared) == (True, False)
    monkeypatch.delenv("ADJUNCT_LAKE")
    monkeypatch.chdir(tmp_path)
    assert open_lake().url == str(tmp_path / ".adjunct/lake")


def test_prefixes_take_safe_names_only(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    assert lake.stream_prefix("flights") == "streams/flights"
    assert lake.dataset_prefix("planes") == "datasets/planes"
    assert lake.application_prefix("flight-delays") == "applications/flight-delays"
    for prefix in (lake.stream_prefix, lake.dataset_prefix, lake.application_prefix):
        with pytest.raises(InvalidNameError):
            prefix("../escape")


@pytest.mark.parametrize(
    "url",
    [
        "gs://bucket/x",
        "file://host/folder",
        "s3://",
        "s3:///x",
        "s3:/bucket/x",
        "S3:/b",
        "s3:b",
        "memory:/x",
        "hdfs:/x",
        "dbfs:/x",
        "https://bucket.example/x",
        "S3://b",
        "s3//bucket/x",
        "file//x",
        "gs//bucket",
        "file:x",
        "C:\\data\\lake",
        "C:/data/lake",
        "c:",
        "data\\lake",
        "data/x\\lake",
        "..\\lake",
        "\\\\server\\share",
        " s3://bucket/x",
        "s3://bucket/x\n",
        '"s3://bucket/x"',
        "",
    ],
)
def test_an_address_that_can_not_work_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as refused:
        open_lake(url)
    assert refused.value.argument == "url"
    if url and url == url.strip():  # a folder of this very name can still be had, as the error says
        assert open_lake(f"./{url}").url == str((tmp_path / url).absolute())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["gs//bucket", "abfss//c", "file//x", "S3//b/x", "s3//b/x"])
def test_an_address_without_a_colon_is_not_reported_as_one_that_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        open_lake(url)
    takes = (
        "Write s3://b/x,"
        if url.lower().startswith("s3")
        else "Write s3://BUCKET/PREFIX or file:///FOLDER,"
    )
    assert takes in str(refused.value)


@pytest.mark.parametrize("url", ["s3//key:secret@b", "s3a:/key:secret@b", "https://key:secret@b/x"])
def test_a_login_in_an_address_that_is_refused_is_not_displayed(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        open_lake(url)
    assert "secret" not in str(refused.value)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError) as failure:
        open_lake(tmp_path / "file")
    assert failure.value.facts == {"argument": "url"}


def test_a_folder_whose_name_is_not_utf_8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "caf\udce9"
    odd.mkdir()
    monkeypatch.setenv("ADJUNCT_LAKE", str(odd))
    for opened in (None, odd):
        with pytest.raises(ConfigurationError) as failure:
            open_lake(opened)
        assert failure.value.facts == {"argument": "url"}
    monkeypatch.chdir(odd)
    with pytest.raises(ConfigurationError):
        open_lake("lake")


@pytest.mark.parametrize("folder", ["/proc/x", "/dev/null/x", "/sys/lake"])
def test_a_folder_that_the_system_refuses_is_reported_as_ours(folder: str) -> None:
    with pytest.raises(ConfigurationError) as failure:
        open_lake(folder).store.put("x", b"")
    assert failure.value.facts == {"argument": "url"}


def test_a_disk_that_fails_is_reported_as_what_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = open_lake(tmp_path)
    lake.store.put("x", b"")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreUnavailableError) as caught:
        lake.store.put("y", b"")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LakeSettings.model_fields:
        monkeypatch.setenv(
            "ADJUNCT_LAKE_SHARED" if name == "shared" else f"ADJUNCT_S3_{name.upper()}", ""
        )
    settings = LakeSettings()
    assert not settings.model_fields_set
    assert (settings.region, settings.shared, settings.attempts) == (None, False, 6)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises((ValueError, ConfigurationError), match="sse_kms_key_id needs sse"):
        LakeSettings(sse_kms_key_id="key")
    assert LakeSettings(sse="aws:kms", sse_kms_key_id="key").s3_options().sse_kms_key_id == "key"


def test_a_lake_travels_in_a_pickle_without_a_new_probe(tmp_path: Path) -> None:
    open_lake(tmp_path).store.put("x", b"")
    lake = open_lake(tmp_path)
    lake.store.delete("_adjunct/lake.json")
    again = pickle.loads(pickle.dumps(lake))
    assert (again.url, again.id) == (lake.url, lake.id)
    assert again.store is lake.store
    assert pickle.loads(pickle.dumps(LocalStore(tmp_path))).url == lake.url


def test_no_secret_and_no_connection_travels_in_a_pickle(s3_server: S3Server) -> None:
    lake = open_lake(s3_server.url())
    lake.commit_log("streams/x", "stream").commit(None, {}, by="tests")  # so that a client exists
    for value in (lake, lake.store, lake.store.descriptor, lake.commit_log("streams/x", "stream")):
        data = pickle.dumps(value)
        for secret in (s3_server.env["AWS_SECRET_ACCESS_KEY"], s3_server.env["AWS_ACCESS_KEY_ID"]):
            assert secret.encode() not in data
    again = pickle.loads(pickle.dumps(lake))
    current = again.commit_log("streams/x", "stream").current()
    assert current is not None
    assert current.number == 1


def test_a_missing_bucket_and_wrong_credentials_are_reported(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="the bucket does not exist") as caught:
        open_lake("s3://no-such-bucket-here/lake")
    assert caught.value.url == "s3://no-such-bucket-here/lake"
    if s3_server.name == "versitygw":  # moto accepts any credentials
        url = s3_server.url() + "2"
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(ConfigurationError) as caught:
            open_lake(url)
        assert caught.value.url == url


def test_a_store_in_memory_is_found_by_its_name_as_long_as_somebody_holds_it() -> None:
    store = InMemoryStore.named("memory://kept")
    store.put("a", b"1")
    assert InMemoryStore.named("memory://kept") is store
    assert describe_store("memory://kept").open() is pickle.loads(pickle.dumps(store)) is store
    nameless = InMemoryStore()
    assert describe_store(nameless.url).open() is nameless
    assert InMemoryStore.named("memory://") is not InMemoryStore.named("memory://")
    del store
    gc.collect()
    assert InMemoryStore.named("memory://kept").head("a") is None


def test_a_lake_whose_folder_is_deleted_is_recreated_by_who_opens_it_again(tmp_path: Path) -> None:
    folder, numbers = tmp_path / "lake", pa.table({"n": pa.array([1, 2], pa.int32())})
    ids = set()
    for _ in range(3):
        lake = open_lake(folder)
        assert not lake.exists()
        streams = LakeStreams(lake)
        streams.create("orders", schema=Schema.of(n="int"), partitions=1)
        assert streams.append("orders", numbers, producer="p", sequence=1).rows == 2
        assert streams.read_arrow(streams.all_ranges("orders"), ["n"])["n"].to_pylist() == [1, 2]
        ids.add(lake.id)
        shutil.rmtree(folder)
    assert len(ids) == 3


def test_who_opened_a_lake_before_it_was_deleted_makes_no_part_of_it_again(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake")
    lake.store.put("x", b"1")
    before = open_lake(tmp_path / "lake")
    shutil.rmtree(tmp_path / "lake")
    for opened in (lake, before):
        for write in (
            lambda store: store.put("x", b"2"),
            lambda store: store.put_if_absent("x", b"2"),
            lambda store: store.staging_dir(),
        ):
            with pytest.raises(LakeNotFoundError) as refused:
                write(opened.store)
            assert refused.value.url == str(tmp_path / "lake")
    assert not (tmp_path / "lake").exists()
    open_lake(tmp_path / "lake").store.put("y", b"3")
    assert [info.key for info in before.store.list("")] == ["_adjunct/lake.json", "y"]


def test_a_lake_whose_hidden_folder_alone_is_deleted_is_written_to_as_before(
    tmp_path: Path,
) -> None:
    lake = open_lake(tmp_path)
    lake.store.put("x", b"1")
    shutil.rmtree(tmp_path / ".adjunct-store")
    lake.store.put("x", b"2")
    assert lake.store.get("x").data == b"2"


class _AnswersARepeat(FaultyStore):
    """A store whose `nth` conditional write is done, and answered as the repeat of one that was
    done before.
    """

    def __init__(self, inner: ObjectStore, nth: int) -> None:
        super().__init__(inner)
        self._left = nth

    def put_if_absent(self, key: str, data: bytes) -> str:
        return self._answered(super().put_if_absent(key, data), ObjectExistsError)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        return self._answered(super().put_if_match(key, data, etag), PreconditionFailedError)

    def _answered(self, etag: str, repeated: type[AdjunctError]) -> str:
        self._left -= 1
        if self._left == 0:
            raise repeated("412", "")
        return etag


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_the_first_write_to_a_lake_that_a_store_does_and_answers_as_refused_makes_it(
    nth: int,
) -> None:
    inner = InMemoryStore()
    lake = lake_in(_AnswersARepeat(inner, nth))
    lake.store.put("x", b"1")
    assert [info.key for info in inner.list("")] == ["_adjunct/lake.json", "x"]


@pytest.mark.parametrize("kind", ["lost-after", "lost-before"])
@pytest.mark.parametrize("request_", ["put_if_absent", "put_if_match"])
def test_a_lost_reply_to_the_first_write_is_no_store_without_conditional_writes(
    kind: FaultKind, request_: str
) -> None:
    for nth in (1, 2, 3):
        inner = InMemoryStore()
        lake = lake_in(FaultyStore(inner, [Fault(request_, nth, kind)]))
        # the document itself: nothing is made
        if (request_, nth, kind) == ("put_if_absent", 3, "lost-before"):
            with pytest.raises(StoreUnavailableError):
                lake.store.put("x", b"1")
        lake.store.put("x", b"1")
        assert [info.key for info in inner.list("")] == ["_adjunct/lake.json", "x"]
