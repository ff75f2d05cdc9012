"""How Delta tables are reached by delta-rs: as a lake is, with the ADJUNCT_S3_… settings and
boto3's credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.arrow_files import s3_filesystem_arguments
from dagster_adjunct.resources.objects.lake import LakeSettings
from dagster_adjunct.resources.optional_packages import import_package

if TYPE_CHECKING:
    from deltalake import DeltaTable


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
    now; {} for a folder. They are secret: never log or store them.
    """
    if not is_on_s3(url):
        return {}
    settings = LakeSettings().s3_options()
    given = s3_filesystem_arguments(settings)
    options = {
        # delta-rs would ask a store that does not answer 11 times, for up to three minutes.
        "max_retries": str(settings.attempts - 1),
        "connect_timeout": _milliseconds(settings.connect_timeout),
        "timeout": _milliseconds(settings.read_timeout),
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


def _milliseconds(seconds: float) -> str:
    """Return a duration as delta-rs reads it."""
    return f"{max(round(seconds * 1000), 1)}ms"


def open_delta(url: str, version: int | None = None) -> DeltaTable:
    """Return a table as it is now, or as it was.

    Raises ConfigurationError without the package, and what `translate_delta_errors` does.
    """
    table = import_package("Delta", "deltalake", "delta").DeltaTable
    with translate_delta_errors(url, version):
        opened: DeltaTable = table(
            delta_place(url), version=version, storage_options=delta_options(url)
        )
        return opened


@contextmanager
def translate_delta_errors(url: str, version: int | None = None) -> Iterator[None]:
    """Raise the errors of delta-rs as Adjunct's: TableNotFoundError; DatasetError for a version of
    which files are gone; AdmittedFileError for a table with features that are not read; else
    TransientError.
    """
    from deltalake import exceptions

    what = f"the Delta table at {url}"
    if version is not None:
        what = f"version {version} of {what}"
    try:
        yield
    except exceptions.TableNotFoundError as error:
        raise errors.TableNotFoundError(
            f"there is no Delta table at {url}.", "Create it, or correct the URL.", table=url
        ) from error
    except (exceptions.DeltaProtocolError, exceptions.SchemaMismatchError) as error:
        raise unreadable_delta(url, errors.first_line(error)) from error
    except (exceptions.DeltaError, OSError) as error:
        raise _translate(what, url, version, error) from error


def _translate(what: str, url: str, version: int | None, error: Exception) -> errors.AdjunctError:
    """Return Adjunct's error for a general one of delta-rs, by its text; `what` names the table and
    the version.

    A missing file is no transient error only where one version is read: it does not come back.
    """
    reason = errors.first_line(error)
    gone = isinstance(error, FileNotFoundError) or re.search("(?i)not found|no such file", reason)
    if gone and version is not None:
        return errors.DatasetError(
            f"{what} can't be read: a file of it is gone, as after a vacuum: {reason}.",
            "Go on with a later version: declare on_expired='skip' of a dataset, start='current' of"
            " a stream; or abandon this version.",
            version=str(version),
        )
    if re.search("(?i)unsupported|not supported|feature", reason):
        return unreadable_delta(url, reason)
    return errors.TransientError(
        f"{what} can't be read: {reason}.",
        "See that its store answers, and that the credentials are right; then run it again.",
    )


def unreadable_delta(url: str, reason: str) -> errors.AdmittedFileError:
    """Return the error for a table with features that are not read."""
    return errors.AdmittedFileError(
        f"the Delta table at {url} can't be read: {reason}.",
        "Write the table without this feature; Delta's ALTER TABLE … DROP FEATURE removes it.",
        rule="format",
    )
