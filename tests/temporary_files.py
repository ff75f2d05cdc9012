"""Temporary files of tests lie in memory where it has room: lakes and logs wait for a disk at
every commit.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")  # of Linux
_ROOM = 6 << 30  # some times what all tests have at once


def keep_temporary_files_in_memory() -> None:
    """Let this process, and those below it, make them there from here on, unless TMPDIR says
    where they belong.
    """
    if "TMPDIR" in os.environ or sys.platform != "linux" or not _serves(_MEMORY):
        return
    os.environ["TMPDIR"] = str(_MEMORY)
    tempfile.tempdir = None


def _serves(folder: Path) -> bool:
    """Whether a folder has room, and what some tests need: programs that run there, attributes
    that servers keep.
    """
    try:
        facts = os.statvfs(folder)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            os.setxattr(made, "user.adjunct", b"1")
    except OSError:
        return False
    return (
        facts.f_bavail * facts.f_frsize >= _ROOM
        and not facts.f_flag & os.ST_NOEXEC
        and _available() >= _ROOM
    )


def _available() -> int:
    """Return the bytes of memory that can still be had."""
    facts = dict(
        line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    )
    return int(facts["MemAvailable"].split()[0]) << 10
