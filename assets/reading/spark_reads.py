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
    if translated is error or not isinstance(translated, ManifestMismatchError) or translated.url is None:
        return None
    for reader in readers:
        for generation in reader.sealed.generations:
            if f"/{generation.folder}/" in translated.url:
                key = f"{generation.folder}/{translated.url.rpartition('/')[2]}"
                about = {"dataset": reader.dataset, "version": reader.version, "key": key}
                return translated.reworded(translated.problem, translated.next_step, **about), reader
    return None
