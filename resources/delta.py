"""How Delta tables are reached by delta-rs: as a lake is, with the ADJUNCT_S3_… settings and
boto3's credentials.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dagster_adjunct.resources.objects.arrow_files import s3_filesystem_arguments
from dagster_adjunct.resources.objects.lake import LakeSettings


def is_on_s3(url: str) -> bool:
    """Return whether the URL is one of S3; else it is that, or the path, of a folder."""
    return re.match("s3a?://", url) is not None


def delta_place(url: str) -> str:
    """Return how delta-rs names a table: `s3://BUCKET/PREFIX`, or the absolute path of a folder."""
    if is_on_s3(url):
        return "s3://" + url.partition("://")[2].rstrip("/")
    if url.startswith("file:/"):
        return unquote(urlsplit(url).path).rstrip("/")
    return str(Path(url).expanduser().absolute())


def delta_options(url: str) -> dict[str, str]:
    """Return the options by which delta-rs reaches the store of a table, with the credentials of
    now. They are secret: never log or store them.
    """
    if not is_on_s3(url):
        return {}
    given = s3_filesystem_arguments(LakeSettings().s3_options())
    options = {
        "AWS_REGION": given.get("region"),
        "AWS_ACCESS_KEY_ID": given.get("access_key"),
        "AWS_SECRET_ACCESS_KEY": given.get("secret_key"),
        "AWS_SESSION_TOKEN": given.get("session_token"),
    }
    if "endpoint_override" in given:
        options["AWS_ENDPOINT_URL"] = f"{given['scheme']}://{given['endpoint_override']}"
        options["AWS_ALLOW_HTTP"] = "true"
        virtual = bool(given.get("force_virtual_addressing"))
        options["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"] = str(virtual).lower()
    return {name: value for name, value in options.items() if value}
