"""Processor time of a process and of all that it has started: steadier than wall time on a
shared machine.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_SUBREAPER = 36


def tree_seconds(root: int | None = None) -> float:
    """Return the user and system seconds of a process (default: this one) and of its
    descendants, ended ones too.
    """
    return sum(seconds_by_process(root).values())


def seconds_by_process(root: int | None = None) -> dict[int, float]:
    """Return the seconds of a process and of its descendants by their ids, each with those that
    it has waited for.
    """
    stats: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # ended meanwhile
                continue
            stats[int(entry.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / _TICKS)
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    waiting, found = [root or os.getpid()], dict[int, float]()
    while waiting:
        pid = waiting.pop()
        found[pid] = stats.get(pid, (0, 0.0))[1]
        waiting += children.get(pid, [])
    return found


def timed_process(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Run a command until all its processes have ended; return its wall seconds, and the
    processor's of all.
    """
    # what it leaves behind becomes ours, so that we are told its time
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    others, before, began = _children(), _of_children(), time.time()
    process = subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = process.communicate()
    wall = time.time() - began
    while left := _children() - others:
        os.waitpid(left.pop(), 0)
    ctypes.CDLL(None).prctl(_SUBREAPER, 0, 0, 0, 0)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{output.decode()}")
    return wall, _of_children() - before


def _of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _children() -> set[int]:
    return {
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    }
