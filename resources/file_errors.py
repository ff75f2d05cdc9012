"""What the file system of this machine refuses, or fails at, as an error of ours that names the place."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, StoreUnavailableError

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# What only somebody else can change; another error of the file system (a full or failing disk) may pass.
REFUSED_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)


def file_error(error: OSError, place: str | Path, what: str) -> AdjunctError:
    """Return the error of ours for one of the file system's at `place`; `what` says what was done there.

    A ConfigurationError where it refuses, a StoreUnavailableError, which may pass, where the disk is full or failing.
    """
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (*REFUSED_ERRNOS, errno.ENOENT):
        return ConfigurationError(
            f"{what}: the file system refuses {place}: {reason}.",
            "Let this user read and write there, or choose another place (for temporary files: TMPDIR).",
            url=str(place),
        )
    return StoreUnavailableError(
        f"{what}: the file system of {place} failed: {reason}.",
        "See whether the disk is full or failing, then run it again. Nothing was committed, and nothing is lost.",
        url=str(place),
    )


@contextmanager
def translate_file_errors(place: str | Path, what: str) -> Iterator[None]:
    """Raise what the file system refuses, or fails at, as `file_error` tells it."""
    try:
        yield
    except OSError as error:
        raise file_error(error, place, what) from error
