"""Translates errors of the local file system into Adjunct's errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, StoreUnavailableError

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# Permanent until somebody changes permissions or paths. Other errors (a full or failing disk) may pass.
REFUSED_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)


def file_error(error: OSError, place: str | Path, what: str) -> AdjunctError:
    """Return Adjunct's error for an error of the file system at `place`; `what` names the operation.

    It is a ConfigurationError where access is denied or the path is wrong, and else a StoreUnavailableError, which is
    transient.
    """
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (*REFUSED_ERRNOS, errno.ENOENT):
        step = "Give this user read and write access, or choose another path (for temporary files: TMPDIR)."
        return ConfigurationError(f"{what}: {place} can't be accessed: {reason}.", step, url=str(place))
    step = "Check whether the disk is full or failing, then run it again. Nothing was committed and nothing is lost."
    return StoreUnavailableError(f"{what}: the file system failed at {place}: {reason}.", step, url=str(place))


@contextmanager
def translate_file_errors(place: str | Path, what: str) -> Iterator[None]:
    """Raise errors of the file system as `file_error` translates them."""
    try:
        yield
    except OSError as error:
        raise file_error(error, place, what) from error
