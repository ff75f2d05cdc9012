"""Disks without room, limits of a process, and folders that it may not write."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount a small file system in memory at a folder, if this user may."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if (
        sys.platform != "linux"
        or os.geteuid() != 0
        or subprocess.run(mount, check=False, capture_output=True).returncode
    ):
        pytest.skip("only root may mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@contextmanager
def no_room(folder: Path) -> Iterator[None]:
    """Fill the disk of a folder."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (65_536, 4_096, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)
    try:
        yield
    finally:
        (folder / "filler").unlink()


@contextmanager
def no_inodes(folder: Path) -> Iterator[None]:
    """Use all inodes of the disk of a folder."""
    (folder / "many").mkdir()
    with suppress(OSError):
        for number in range(100_000):
            (folder / "many" / str(number)).touch()
    try:
        yield
    finally:
        subprocess.run(["rm", "-rf", str(folder / "many")], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Mount the disk of a folder so that it can only be read."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)


@contextmanager
def more_open_files(number: int) -> Iterator[None]:
    """Let this process open only so many files more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
