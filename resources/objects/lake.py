"""A lake: one root in an object store, below which streams, datasets and applications live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.commit_log import CommitLog
from dagster_adjunct.resources.objects.documents import LakeDocument, MetadataPlace
from dagster_adjunct.resources.objects.lake_document import read_lake_document
from dagster_adjunct.resources.objects.lake_to_be_made import lake_to_be_made
from dagster_adjunct.resources.objects.object_store import S3Options, StoreDescriptor
from dagster_adjunct.resources.times import utc_now

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from dagster_adjunct.resources.objects.object_store import ObjectStore

DEFAULT_LAKE = ".adjunct/lake"


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
        return None if routed is None else MetadataPlace.model_validate_json(routed.place)

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


def lake_of_objects(store: ObjectStore, document: LakeDocument | None, *, shared: bool = False) -> Lake:
    """Return the lake at a store's root, whose document this is; where there is none yet, the first write makes it.

    Nothing of it is looked for in a key-value table: for what is in none. `lakes/open_lake.py` opens all others.
    """
    if document is None:
        return Lake(lake_to_be_made(store), "", shared=shared)
    return Lake(store, document.id, shared=shared)


def _reopen(descriptor: StoreDescriptor, lake_id: str, shared: bool) -> Lake:
    return Lake(descriptor.open(), lake_id, shared=shared)
