"""How much time has passed, also while the machine slept, the process was stopped, or its clock
was set.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# CLOCK_MONOTONIC stands still while a machine sleeps. Where there is no CLOCK_BOOTTIME, the wall
# clock alone shows it.
_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def read_clocks() -> tuple[float, float]:
    """Return two times in seconds: since the boot, with the time that the machine slept, and by the
    wall clock.

    The wall clock also shows the sleep of a virtual machine, whose own clocks all stand still. It
    may be set, so the larger of the two differences counts.
    """
    return time.clock_gettime(_BOOT_CLOCK), time.time()


@cache
def machine_id() -> str:
    """Return what identifies this machine's clock since its boot; "" if that is not known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    return ""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment `seconds` after `since`, which `read_clocks` has returned on this machine."""

    since: tuple[float, float]
    seconds: float

    def has_passed(self) -> bool:
        """Return whether it has passed, by the clock that says that more time has."""
        now = read_clocks()
        return now[0] - self.since[0] >= self.seconds or now[1] - self.since[1] >= self.seconds
