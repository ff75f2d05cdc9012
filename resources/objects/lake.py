"""A lake: one root in an object store that contains streams, datasets and applications."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.commit_log import (
    CommitLog,
    LakeDocument,
    ManifestCache,
    decode_document,
    encode_document,
)
from dagster_adjunct.resources.objects.fence import Fence, fenced_store
from dagster_adjunct.resources.objects.local_store import LocalDescriptor
from dagster_adjunct.resources.objects.store import (
    LAKE_DOCUMENT,
    PROBE_PREFIX,
    WRITES,
    MemoryDescriptor,
    ObjectStore,
    S3Options,
    StoreDescriptor,
    guard_store,
    read_store_clock,
)
from dagster_adjunct.resources.times import utc_now
from dagster_adjunct.resources.validation import validated, validated_methods


def describe_store(url: str, s3: S3Options | None = None) -> StoreDescriptor:
    """Return the descriptor of the store at a URL: `s3://BUCKET/PREFIX`, a folder or
    `memory://NAME`. Raises ConfigurationError for another scheme.
    """
    if url.startswith("memory://"):
        return MemoryDescriptor(url, s3)
    if url.startswith("s3://"):
        from dagster_adjunct.resources.objects.s3_store import S3Descriptor

        return S3Descriptor(url, s3)
    if "://" in url:
        expected = "s3://BUCKET/PREFIX, a folder or memory://NAME"
        raise argument_error(f"store {url!r} has an unknown scheme", expected, argument="url")
    return LocalDescriptor(url, s3)


_INSTEAD = (
    "Use a store that honours conditional writes (Amazon S3, versitygw, MinIO, Ceph since Squid, a"
    " local folder), or upgrade this one."
)


def probe_conditional_writes(store: ObjectStore) -> None:
    """Raise `ConditionalWritesUnsupportedError` unless the store honours conditional writes.

    Nobody else writes to the probe's key. So its content shows which writes happened, even if a
    reply was lost, or a write was repeated on its way and the reply is that to the repetition.
    Leaves no object behind.
    """
    key = f"{PROBE_PREFIX}{uuid.uuid4().hex}"

    def unsupported(what: str) -> errors.ConditionalWritesUnsupportedError:
        problem = f"store {store.url} does not honour conditional writes: {what}."
        return errors.ConditionalWritesUnsupportedError(problem, _INSTEAD, url=store.url)

    try:
        first = _write_and_verify(store, key, b"first", lambda: store.put_if_absent(key, b"first"))
        if first is None:
            raise unsupported(
                "a put-if-absent (PUT with If-None-Match: *) of a new key was refused"
            )
        if _write_and_verify(store, key, b"second", lambda: store.put_if_absent(key, b"second")):
            raise unsupported(
                "a second put-if-absent (PUT with If-None-Match: *) replaced the first"
            )
        if not _write_and_verify(
            store, key, b"third", lambda: store.put_if_match(key, b"third", first)
        ):
            raise unsupported(
                "a put-if-match (PUT with If-Match) with the current ETag was refused"
            )
        if _write_and_verify(
            store, key, b"fourth", lambda: store.put_if_match(key, b"fourth", first)
        ):
            raise unsupported("a put-if-match (PUT with If-Match) with a stale ETag was accepted")
    finally:
        with contextlib.suppress(errors.AdjunctError):
            store.delete(key)


def _write_and_verify(
    store: ObjectStore, key: str, data: bytes, write: Callable[[], str]
) -> str | None:
    """Return the ETag of this write, or None if the store rejected it.

    A write with an unknown outcome (StoreUnavailableError) that did not happen is tried once more.
    """
    for is_last in (False, True):
        try:
            return write()
        except (
            errors.ObjectExistsError,
            errors.PreconditionFailedError,
            errors.StoreUnavailableError,
        ) as error:
            with contextlib.suppress(errors.ObjectNotFoundError):
                stored = store.get(key)
                if stored.data == data:
                    return stored.etag
            if not isinstance(error, errors.StoreUnavailableError):
                return None
            if is_last:
                raise
    raise AssertionError("unreachable")


DEFAULT_LAKE = ".adjunct/lake"
RUN_TTL = timedelta(minutes=2)
"""For how long a run of an application counts as alive without renewing its lease."""
_SCHEMES = ("s3", "s3a", "memory", "file")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?P<slashes>/*)")
_WINDOWS = re.compile(r"[A-Za-z]:([\\/]|$)|(?![/.~]).*\\|\.{1,2}\\")
_NO_COLON = re.compile(rf"({'|'.join(_SCHEMES)}|https?|gs|gcs|abfss?|wasbs?|hdfs)//", re.IGNORECASE)
_FORMS = {"s3": "s3://BUCKET/PREFIX", "file": "file:///FOLDER"}


@validated
class LakeSettings(BaseSettings):
    """How to reach the lake's store, from ADJUNCT_S3_… variables; credentials come from boto3's own
    chain.

    Where these are not set, boto3's variables (AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_PROFILE, …)
    apply. Sizes in bytes, time-outs in seconds. `shared` (ADJUNCT_LAKE_SHARED) states that all
    machines mount a local lake under the same path. `run_ttl` (ADJUNCT_RUN_TTL) is the time for
    which a run counts as alive without a sign of life.
    """

    model_config = SettingsConfigDict(
        env_prefix="ADJUNCT_S3_",
        env_ignore_empty=True,
        frozen=True,
        populate_by_name=True,
        hide_input_in_errors=True,
    )

    endpoint: str | None = None
    region: str | None = None
    path_style: bool = False
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    sse_kms_key_id: str | None = None
    multipart_threshold: int = Field(default=64 * 1024 * 1024, ge=5 * 1024 * 1024)
    part_size: int = Field(default=16 * 1024 * 1024, ge=5 * 1024 * 1024)
    connect_timeout: float = Field(default=5.0, gt=0)
    read_timeout: float = Field(default=60.0, gt=0)
    attempts: int = Field(default=6, ge=1)
    shared: bool = Field(default=False, validation_alias="ADJUNCT_LAKE_SHARED")
    run_ttl: float = Field(
        default=RUN_TTL.total_seconds(), ge=1, le=86_400, validation_alias="ADJUNCT_RUN_TTL"
    )

    @model_validator(mode="after")
    def _kms_key_needs_kms(self) -> Self:
        """Reject a KMS key for objects that are not encrypted by KMS."""
        if self.sse_kms_key_id and self.sse not in ("aws:kms", "aws:kms:dsse"):
            raise ValueError('sse_kms_key_id needs sse "aws:kms" or "aws:kms:dsse"')
        return self

    def s3_options(self) -> S3Options:
        """Return the options of the store."""
        return S3Options(**self.model_dump(exclude={"shared", "run_ttl"}))


def open_store(url: str | os.PathLike[str] | None, settings: LakeSettings) -> ObjectStore:
    """Return the store at a lake's URL (default: ADJUNCT_LAKE, else `.adjunct/lake`). Raises
    ConfigurationError for an invalid URL.
    """
    named = os.fspath(url) if url is not None else os.environ.get("ADJUNCT_LAKE") or DEFAULT_LAKE
    place, options = _read_lake_url(named, settings)
    try:
        place.encode()
    except UnicodeEncodeError:
        found = f"lake {place!r} has a name that is not UTF-8"
        step = "Choose or rename the folder."
        raise argument_error(found, "a URL or folder in UTF-8", step, argument="url") from None
    return describe_store(place, options).open()


def _read_lake_url(url: str, settings: LakeSettings) -> tuple[str, S3Options | None]:
    """Return where the lake's store is, as `describe_store` takes it, and the options of S3, None
    for other stores. Raises ConfigurationError.
    """
    if not isinstance(url, str) or not url.strip():
        problem = (
            f"lake {url!r} is not a URL: expected s3://BUCKET/PREFIX, a folder or file:///FOLDER."
        )
        step = "Leave it out to use ADJUNCT_LAKE, or .adjunct/lake if that is not set."
        raise errors.ConfigurationError(problem, step, argument="url")
    check_store_url(url, "lake")
    scheme = ""
    if "://" in url:
        scheme = url.partition("://")[0]
    if scheme in ("s3", "s3a"):
        place = url.partition("://")[2].rstrip("/")
        if set(place.partition("/")[0]) & set("@:"):
            found = (
                "the lake's URL has a login or something else before the bucket, which is not shown"
                " here"
            )
            step = "Give credentials by boto3's own chain (AWS_PROFILE, …)."
            raise argument_error(found, "s3://BUCKET/PREFIX", step, argument="url")
        return f"s3://{place}", settings.s3_options()
    if scheme == "memory":
        return url, None
    if scheme == "file" or url.startswith("file:/"):
        return unquote(urlsplit(url).path), None
    return str(Path(url).expanduser().absolute()), None


def check_store_url(url: str, what: str, schemes: Sequence[str] = _SCHEMES) -> None:
    """Raise ConfigurationError unless `url` has one of these schemes or is clearly a folder; `what`
    names it in errors.

    A folder of any name can be written as ./NAME.
    """
    found = _find_url_problem(url, schemes)
    if found is None:
        return
    if "@" in url:
        problem = (
            f"the URL of the {what}, which is not shown as it may contain a login, {found.problem}."
        )
        step = f"Write it as in {_FORMS['s3']}, and give credentials by boto3's own chain."
        raise errors.ConfigurationError(problem, step, argument="url")
    or_folder = ""
    if url == url.strip():
        or_folder = f", or ./{url} for a folder of this very name"
    raise errors.ConfigurationError(
        f"{what} {url!r} {found.problem}.", f"Write {found.right}{or_folder}.", argument="url"
    )


class _UrlProblem(NamedTuple):
    """What is wrong with a URL, as the end of a sentence about it, and what is right."""

    problem: str
    right: str


def _find_url_problem(url: str, schemes: Sequence[str]) -> _UrlProblem | None:
    """Return what is wrong with a store's URL; None if it may be right.

    In this order: it is quoted; it is a Windows path; its scheme has no colon; it has no scheme, so
    that it is a folder; its scheme is not the right one, or not written right.
    """
    if url != url.strip() or url[:1] in ("'", '"'):
        problem = "begins or ends with a space or a quotation mark"
        return _UrlProblem(problem, url.strip(" \t\n\r'\""))
    if _WINDOWS.match(url):
        right = "the folder as this machine names it, with slashes"
        return _UrlProblem("is a Windows path", right)
    forms = " or ".join(form for kind, form in _FORMS.items() if kind in schemes)
    if _NO_COLON.match(url):
        scheme, _, rest = url.partition("//")
        # "file://REST" would name a host.
        if scheme.lower() in schemes and scheme.lower() != "file":
            forms = f"{scheme.lower()}://{rest}"
        return _UrlProblem("has no colon after its scheme", forms)
    named = _URL.match(url)
    if named is None:
        return None
    return _find_scheme_problem(url, schemes, named, forms)


def _find_scheme_problem(
    url: str, schemes: Sequence[str], named: re.Match[str], forms: str
) -> _UrlProblem | None:
    """Return what is wrong with a URL's scheme or the slashes after it; None if nothing is. `forms`
    are the right forms of URLs.
    """
    scheme = named["scheme"]
    slashes = named["slashes"]
    if scheme not in schemes:
        if slashes or scheme.lower() in schemes:
            return _UrlProblem(f"has the unknown scheme {scheme!r}", forms)
        return None  # a folder whose name has a colon
    if scheme == "file":
        if not slashes or urlsplit(url).netloc not in ("", "localhost"):
            return _UrlProblem("names a host, or not an absolute folder", _FORMS["file"])
        return None
    right = f"{scheme}://{url[named.end() :]}"
    if not slashes:
        return _UrlProblem("has no slashes after its scheme: expected two", right)
    if len(slashes) == 1:
        return _UrlProblem("has one slash after its scheme: expected two", right)
    return None


def read_lake_document(store: ObjectStore) -> LakeDocument | None:
    """Return the document of the lake at a store's root, or None without a lake. Raises
    MalformedDocumentError.
    """
    try:
        data = store.get(LAKE_DOCUMENT).data
    except errors.ObjectNotFoundError:
        return None
    step = (
        "Restore this object from a backup or an older object version; nothing else in the lake is"
        " affected."
    )
    return decode_document(
        LakeDocument, data, f"lake document {LAKE_DOCUMENT!r} in {store.url}", step
    )


_log = logging.getLogger("adjunct.lake")


class LakeCreation:
    """Creates the lake at the root of a store, if it does not exist, when it is first called."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._exists = False

    def __call__(self) -> None:
        # Without the lock if it exists: a fork while another thread holds it would copy it locked.
        if self._exists:
            return
        with self._lock:
            if not self._exists:
                _create_lake(self._store)
                self._exists = True


# The methods of a store before which a missing lake is created.
_CREATES = WRITES - {"delete", "delete_many"} | {"staging_dir"}


def _create_lake(store: ObjectStore) -> None:
    """Write the lake's document unless it exists, and log a warning, since a mistyped URL
    creates a new lake.
    """
    if read_lake_document(store) is not None:
        return
    probe_conditional_writes(store)
    try:
        store.put_if_absent(
            LAKE_DOCUMENT, encode_document(LakeDocument(id=uuid.uuid4().hex, probed_at=utc_now()))
        )
    except (errors.ObjectExistsError, errors.StoreUnavailableError):
        if read_lake_document(store) is None:
            raise
        return  # created by another process, or by our request, whose reply was lost
    if not store.url.startswith("memory:"):
        _log.warning("Created a new lake at %s.", store.url)


@validated_methods
class Lake:
    """An open lake. Pickles as the descriptor of its store, which is not probed again when it is
    unpickled.

    `clock` returns the time with its zone. It is not pickled: another process uses the system
    clock. `manifests` is the cache of manifests that runs of this process share. A run that has not
    renewed its lease for `run_ttl` counts as dead; `run_ttl` is not pickled.
    """

    def __init__(
        self,
        store: ObjectStore,
        lake_id: str,
        *,
        shared: bool = False,
        run_ttl: timedelta = RUN_TTL,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self.store = store
        self._id = lake_id
        self.shared = shared
        self.run_ttl = run_ttl
        self.manifests = ManifestCache()
        self._clock = clock

    def fenced(self, fence: Fence) -> Lake:
        """Return this lake as a run writes to it: not once its lease is lost."""
        store = fenced_store(self.store, fence)
        lake = Lake(store, self._id, shared=self.shared, run_ttl=self.run_ttl, clock=self._clock)
        lake.manifests = self.manifests
        return lake

    def now(self) -> datetime:
        """Return the time of the lake's clock, which dates everything in the lake."""
        now = self._clock()
        if now.tzinfo is None:
            problem = f"the clock of the lake {self.url} returned {now}, which has no time zone."
            step = "Return a time with a zone: clock=lambda: datetime.now(UTC)."
            raise errors.ConfigurationError(problem, step, argument="clock", url=self.url)
        return now

    def cautious_now(self, prefix: str) -> datetime:
        """Return the time of the lake's clock or of the store's, whichever is behind: what is
        deleted by its age must not depend on a machine whose clock is ahead. Writes an object below
        `prefix`.
        """
        return min(self.now(), read_store_clock(self.store, f"{prefix}/clock"))

    @property
    def id(self) -> str:
        """The lake's id; "" until something is written to it."""
        if not self._id:
            document = read_lake_document(self.store)
            if document is not None:
                self._id = document.id
        return self._id

    @property
    def url(self) -> str:
        return self.store.url

    def exists(self) -> bool:
        """Return whether anything has been written to the lake. Costs one request, until
        something was found.
        """
        return bool(self.id)

    def stream_prefix(self, name: str) -> str:
        return f"streams/{check_name('stream', name)}"

    def dataset_prefix(self, name: str) -> str:
        return f"datasets/{check_name('dataset', name)}"

    def application_prefix(self, name: str) -> str:
        return f"applications/{check_name('application', name)}"

    def commit_log(self, prefix: str, kind: str) -> CommitLog:
        """Return the commit log below `prefix`."""
        return CommitLog(self.store, prefix, kind, clock=self.now, cache=self.manifests)

    def __reduce__(self) -> tuple[object, tuple[StoreDescriptor, str, bool]]:
        return (_reopen, (self.store.descriptor, self.id, self.shared))

    def __repr__(self) -> str:
        return f"Lake({self.url!r})"


@validated
def open_lake(
    url: str | os.PathLike[str] | None = None,
    *,
    settings: LakeSettings | None = None,
    create: bool = True,
) -> Lake:
    """Return the lake at `url`: `s3://BUCKET/PREFIX`, a folder, `file:///…` or `memory://NAME`.

    Without a URL: ADJUNCT_LAKE, else `.adjunct/lake`. One GET, which creates nothing. If there is
    no lake yet, the first write creates one and logs a warning: it probes the store's conditional
    writes (ConditionalWritesUnsupportedError) and writes `_adjunct/lake.json`. With `create=False`,
    a missing lake raises LakeNotFoundError.
    """
    settings = settings or LakeSettings()
    run_ttl = timedelta(seconds=settings.run_ttl)
    lake = lake_in(open_store(url, settings), shared=settings.shared, run_ttl=run_ttl)
    if not create and not lake.exists():
        problem = f"there is no lake at {lake.url}."
        step = "Check --lake and ADJUNCT_LAKE; a run or LakeStreams.create makes a lake."
        raise errors.LakeNotFoundError(problem, step, url=lake.url)
    return lake


def lake_in(store: ObjectStore, *, shared: bool = False, run_ttl: timedelta = RUN_TTL) -> Lake:
    """Return the lake at a store's root; if there is none, the first write creates it after a
    probe.
    """
    document = read_lake_document(store)
    if document is None:
        lazy = guard_store(store, LakeCreation(store), _CREATES)
        return Lake(lazy, "", shared=shared, run_ttl=run_ttl)
    return Lake(store, document.id, shared=shared, run_ttl=run_ttl)


def _reopen(descriptor: StoreDescriptor, lake_id: str, shared: bool) -> Lake:
    """Return an unpickled lake."""
    return Lake(descriptor.open(), lake_id, shared=shared)
