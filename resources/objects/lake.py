"""A lake: one root in an object store, below which streams, datasets and applications live."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, cast
from urllib.parse import unquote, urlsplit

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    LakeNotFoundError,
    MetadataMovedError,
    ObjectExistsError,
)
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.commit_log import CommitLog
from dagster_adjunct.resources.objects.conditional_write_probe import probe_conditional_writes
from dagster_adjunct.resources.objects.documents import MetadataPlace
from dagster_adjunct.resources.objects.lake_document import LAKE_DOCUMENT, new_lake_document, read_lake_document
from dagster_adjunct.resources.objects.lake_to_be_made import UnmadeLakeStore
from dagster_adjunct.resources.objects.object_store import S3Options, StoreDescriptor
from dagster_adjunct.resources.routed_opener import routed_opener
from dagster_adjunct.resources.times import utc_now

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from dagster_adjunct.resources.objects.object_store import ObjectStore

DEFAULT_LAKE = ".adjunct/lake"
_SCHEMES = ("s3", "s3a", "memory", "file")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?P<slashes>/*)")
_log = logging.getLogger("adjunct.lake")


class LakeSettings(BaseSettings):
    """How to reach the lake's store, from ADJUNCT_S3_… variables; credentials come from boto3's own chain.

    boto3's variables (AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_PROFILE, …) hold where these are not set.
    Sizes in bytes, time-outs in seconds. `shared` (ADJUNCT_LAKE_SHARED) says that all machines see a local
    lake under the same path.
    """

    model_config = SettingsConfigDict(
        env_prefix="ADJUNCT_S3_", frozen=True, populate_by_name=True, hide_input_in_errors=True
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

    @model_validator(mode="after")
    def _kms_key_needs_kms(self) -> Self:
        if self.sse_kms_key_id and self.sse not in ("aws:kms", "aws:kms:dsse"):
            raise ValueError('sse_kms_key_id needs sse "aws:kms" or "aws:kms:dsse"')
        return self

    def s3_options(self) -> S3Options:
        """Return the part that a store needs, as a plain value."""
        return S3Options(**self.model_dump(exclude={"shared"}))


class Lake:
    """An opened lake. Picklable: it travels as its store's descriptor and is not probed again.

    `clock` gives the time, with a zone; another process goes by its machine's.
    """

    def __init__(
        self, store: ObjectStore, lake_id: str, *, shared: bool = False, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self.store = store
        self._id = lake_id
        self.shared = shared
        self._clock = clock

    def now(self) -> datetime:
        """Return the time that everything in this lake is dated with: that of its clock."""
        now = self._clock()
        if now.tzinfo is None:
            raise ConfigurationError(
                f"the clock of the lake {self.url} says {now}, which names no zone.",
                "Give one that does: clock=lambda: datetime.now(UTC).",
                argument="clock",
                url=self.url,
            )
        return now

    @property
    def id(self) -> str:
        """The lake's own id; "" while nothing has been written to it."""
        if not self._id:
            document = read_lake_document(self.store)
            self._id = document.id if document is not None else ""
        return self._id

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def metadata_place(self) -> MetadataPlace | None:
        """The key-value table that its metadata are in; None where they are objects like all others."""
        routed = self.store.descriptor.routed
        return None if routed is None else MetadataPlace.model_validate_json(routed)

    def exists(self) -> bool:
        """Whether anything has ever been written to the lake. One request while there is none."""
        return bool(self.id)

    def stream_prefix(self, name: str) -> str:
        return f"streams/{check_name('stream', name)}"

    def dataset_prefix(self, name: str) -> str:
        return f"datasets/{check_name('dataset', name)}"

    def application_prefix(self, name: str) -> str:
        return f"applications/{check_name('application', name)}"

    def commit_log(self, prefix: str, kind: str) -> CommitLog:
        """Return the log of what is committed below `prefix`."""
        return CommitLog(self.store, prefix, kind, clock=self.now)

    def __reduce__(self) -> tuple[object, tuple[StoreDescriptor, str, bool]]:
        return (_reopen, (self.store.descriptor, self.id, self.shared))

    def __repr__(self) -> str:
        return f"Lake({self.url!r})"


def open_lake(
    url: str | os.PathLike[str] | None = None, *, settings: LakeSettings | None = None, create: bool = True
) -> Lake:
    """Return the lake at `url`: `s3://BUCKET/PREFIX`, a folder, `file:///…` or `memory://NAME`.

    Without a URL: ADJUNCT_LAKE, else `.adjunct/lake`. One GET, which creates nothing. Where there is no lake yet, the
    first write makes one, and logs so: it probes the store's conditional writes (ConditionalWritesUnsupportedError) and
    writes `_adjunct/lake.json`. With `create=False`, a lake that is not there is a LakeNotFoundError.
    """
    settings = settings or LakeSettings()
    named = os.fspath(url) if url is not None else os.environ.get("ADJUNCT_LAKE") or DEFAULT_LAKE
    store = StoreDescriptor(*_address(named, settings)).open()
    lake = lake_in(store, shared=settings.shared)
    if not create and not lake.exists():
        raise LakeNotFoundError(
            f"there is no lake at {lake.url}.",
            "Check --lake and ADJUNCT_LAKE; the first command or program that writes to a lake makes it.",
            url=lake.url,
        )
    return lake


def lake_in(store: ObjectStore, *, shared: bool = False) -> Lake:
    """Return the lake at a store's root; where there is none yet, the first write makes it, after a probe."""
    document = read_lake_document(store)
    if document is None:
        return Lake(cast("ObjectStore", UnmadeLakeStore(store, _make)), "", shared=shared)
    if document.metadata is not None:
        store = _routed(store, document.metadata)
    return Lake(store, document.id, shared=shared)


def _routed(store: ObjectStore, place: MetadataPlace) -> ObjectStore:
    """Return the store with a part of its objects in a key-value table; one a process, as stores are."""
    routed = place.model_dump_json()
    if store is store.descriptor.open():
        return replace(store.descriptor, routed=routed).open()
    opened: ObjectStore = routed_opener()(store, routed)
    return opened


def _make(store: ObjectStore) -> None:
    """Write the lake's document where there is none yet, and say so: a mistyped URL makes a new lake."""
    made = read_lake_document(store)
    if made is not None:  # another process was first
        if made.metadata is not None:
            raise MetadataMovedError(
                f"the lake at {store.url} was made meanwhile, with its metadata in a key-value table.",
                "Open it again.",
                url=store.url,
            )
        return
    probe_conditional_writes(store)
    try:
        store.put_if_absent(LAKE_DOCUMENT, new_lake_document().to_bytes())
    except ObjectExistsError:
        return
    if not store.url.startswith("memory:"):
        _log.warning("A new lake is made at %s.", store.url)


def _address(url: str, settings: LakeSettings) -> tuple[str, S3Options | None]:
    if not isinstance(url, str) or not url.strip():
        raise ConfigurationError(
            f"lake {url!r} is no address: expected s3://BUCKET/PREFIX, a folder or file:///FOLDER.",
            "Leave it out for ADJUNCT_LAKE, else .adjunct/lake.",
            argument="url",
        )
    # Of file:/FOLDER it is plain what it means; s3:/BUCKET would be a folder.
    named = _URL.match(url)
    slashes = named["slashes"] if named and not url.startswith("file:/") else "//"
    if named and len(slashes) < 2 and (slashes or named["scheme"].lower() in _SCHEMES):
        raise ConfigurationError(
            f"lake {url!r} has {'one slash' if slashes else 'no slashes'} after its scheme: expected two.",
            f"Write {named['scheme'].lower()}://{url[named.end() :]}, or ./{url} for a folder of this name.",
            argument="url",
        )
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme in ("s3", "s3a"):
        if set(url.partition("://")[2].partition("/")[0]) & set("@:"):
            raise ConfigurationError(
                "the lake's URL holds a login, or something else beside a bucket, which is not shown here: expected "
                "s3://BUCKET/PREFIX.",
                "Leave credentials to boto3's own chain (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, …).",
                argument="url",
            )
        return f"s3://{url.partition('://')[2].rstrip('/')}", settings.s3_options()
    if scheme == "memory":
        return url, None
    if scheme == "file" or url.startswith("file:/"):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise ConfigurationError(
                f"lake {url!r} names the host {parts.netloc!r}: expected file:///FOLDER.",
                "Write three slashes.",
                argument="url",
            )
        return unquote(parts.path), None
    if scheme:
        raise ConfigurationError(
            f"lake {url!r} has the unknown scheme {scheme!r}: expected s3://BUCKET/PREFIX, a folder or file:///FOLDER.",
            "Write the lake's URL in one of these forms.",
            argument="url",
        )
    return str(Path(url).expanduser().absolute()), None


def _reopen(descriptor: StoreDescriptor, lake_id: str, shared: bool) -> Lake:
    return Lake(descriptor.open(), lake_id, shared=shared)
