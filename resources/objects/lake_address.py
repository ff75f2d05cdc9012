"""Where a lake is, as users write it: `s3://BUCKET/PREFIX`, a folder, `file:///…` or `memory://NAME`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import DEFAULT_LAKE, LakeSettings
from dagster_adjunct.resources.objects.object_store import S3Options, StoreDescriptor

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.object_store import ObjectStore

_SCHEMES = ("s3", "s3a", "memory", "file")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?P<slashes>/*)")


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
