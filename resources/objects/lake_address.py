"""Where a lake is, as users write it: `s3://BUCKET/PREFIX`, a folder, `file:///…` or `memory://NAME`, and how it is
reached."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.object_store import S3Options, StoreDescriptor

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.object_store import ObjectStore

DEFAULT_LAKE = ".adjunct/lake"
_SCHEMES = ("s3", "s3a", "memory", "file")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?P<slashes>/*)")
_WINDOWS = re.compile(r"[A-Za-z]:([\\/]|$)|(?![/.~]).*\\|\.{1,2}\\")
_NO_COLON = re.compile(rf"({'|'.join(_SCHEMES)}|https?|gs|gcs|abfss?|wasbs?|hdfs)//", re.IGNORECASE)
_FORMS = {"s3": "s3://BUCKET/PREFIX", "file": "file:///FOLDER"}


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


def store_at(url: str | os.PathLike[str] | None, settings: LakeSettings) -> ObjectStore:
    """Return the store at a lake's URL; without one at that of ADJUNCT_LAKE, else in `.adjunct/lake`."""
    named = os.fspath(url) if url is not None else os.environ.get("ADJUNCT_LAKE") or DEFAULT_LAKE
    return StoreDescriptor(*_address(named, settings)).open()


def _address(url: str, settings: LakeSettings) -> tuple[str, S3Options | None]:
    if not isinstance(url, str) or not url.strip():
        raise ConfigurationError(
            f"lake {url!r} is no address: expected s3://BUCKET/PREFIX, a folder or file:///FOLDER.",
            "Leave it out for ADJUNCT_LAKE, else .adjunct/lake.",
            argument="url",
        )
    check_address(url, "lake")
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
        return unquote(urlsplit(url).path), None
    return str(Path(url).expanduser().absolute()), None


def check_address(url: str, what: str, schemes: Sequence[str] = _SCHEMES) -> None:
    """Refuse what is neither a URL of these schemes nor plainly a folder; `what` says in the error what is there.

    A folder of any name can be written as ./NAME. Raises ConfigurationError.
    """
    named = _URL.match(url)
    scheme, slashes = (named["scheme"], named["slashes"]) if named else ("", "")
    right = " or ".join(form for kind, form in _FORMS.items() if kind in schemes)
    if url != url.strip() or url[:1] in ("'", '"'):
        problem, right = "begins or ends with a space or a quotation mark", url.strip(" \t\n\r'\"")
    elif _WINDOWS.match(url):
        problem, right = "is a path of Windows", "the folder as this machine names it, with slashes"
    elif _NO_COLON.match(url):
        problem, (scheme, _, rest) = "has no colon after its scheme", url.partition("//")
        if scheme.lower() in schemes and scheme.lower() != "file":
            right = f"{scheme.lower()}://{rest}"
    elif named and scheme not in schemes and (slashes or scheme.lower() in schemes):
        problem = f"has the unknown scheme {scheme!r}"
    elif named and scheme == "file" and (not slashes or urlsplit(url).netloc not in ("", "localhost")):
        problem, right = "names a host, or no folder from the root on", _FORMS["file"]
    elif named and scheme in schemes and scheme != "file" and len(slashes) < 2:
        problem = f"has {'one slash' if slashes else 'no slashes'} after its scheme: expected two"
        right = f"{scheme}://{url[named.end() :]}"
    else:
        return
    if "@" in url:
        raise ConfigurationError(
            f"the URL of the {what}, which is not shown as it may hold a login, {problem}.",
            f"Write it as in {_FORMS['s3']}, and leave credentials to boto3's own chain.",
            argument="url",
        )
    or_folder = "" if url != url.strip() else f", or ./{url} for a folder of this very name"
    raise ConfigurationError(f"{what} {url!r} {problem}.", f"Write {right}{or_folder}.", argument="url")
