"""Which process this is, and whether one that left its name has died: as far as that can be proven from here."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from dagster_adjunct.resources.stored_documents import StoredDocument


class Process(StoredDocument):
    """A process by its number and start, in a process namespace of one boot of one machine; "" what is not known.

    A number is given out again, so the start (in ticks since the boot) belongs to it. Containers on one machine have
    process numbers of their own, and may share a host's name.
    """

    host: str
    pid: int
    boot: str = ""
    namespace: str = ""
    started: str = ""

    def is_dead(self) -> bool:
        """Whether it is proven that the process has ended; False also where nothing can be proven from here."""
        here = this_process()
        if not (self.boot and self.namespace and self.started):
            return False
        if (self.boot, self.namespace) != (here.boot, here.namespace):
            return False
        return _started(self.pid) != self.started


def this_process() -> Process:
    """Return which process this is."""
    return Process(
        host=socket.gethostname(),
        pid=os.getpid(),
        boot=_text("/proc/sys/kernel/random/boot_id"),
        namespace=_link("/proc/self/ns/pid"),
        started=_started(os.getpid()),
    )


def _started(pid: int) -> str:
    """Return when a process started, "" where there is none; one that has ended and waits for its parent is none."""
    # The command's name, in parentheses, may hold blanks and parentheses itself.
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
