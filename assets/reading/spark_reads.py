"""What a Spark read of a version's files that failed is told as."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ManifestMismatchError
from dagster_adjunct.resources.spark.spark_errors import adjunct_error

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.version_reader import VersionReader


def unread_version(
    error: BaseException | None, readers: Iterable[VersionReader]
) -> tuple[ManifestMismatchError, VersionReader] | None:
    """Return Spark's error as one of ours, and the version of these whose file Spark could not read.

    None for any other error, and for files that are none of these versions'.
    """
    translated = None if error is None else adjunct_error(error)
    if translated is error or not isinstance(translated, ManifestMismatchError):
        return None
    for reader in readers:
        if any(f"/{generation.folder}/" in translated.problem for generation in reader.sealed.generations):
            return translated, reader
    return None
