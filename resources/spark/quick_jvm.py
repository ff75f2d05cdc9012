"""The choice of a JVM that begins quickly: for runs of some seconds and small batches, not for hours of work.

Its compiler stops at quick code, its collector at one thread, and it maps an archive of the classes that a JVM before
it has loaded, in place of reading and verifying them. A JVM leaves an archive alone that was made by another Java or
over other jars, and so do we where there is none.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError

_SETTING = "ADJUNCT_SPARK_QUICK"
# With a compiler that stops at quick code, the JVM takes 48 MB for compiled code, which Spark fills in some hundred
# batches: it would drop and compile again and again.
_SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
_QUIETLY = "-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"
_SECONDS = 60.0


def is_quick(chosen: bool | None = None) -> bool:
    """Whether sessions are to begin quickly: as chosen, or where that is None as the environment says."""
    if chosen is not None:
        return chosen
    given = os.environ.get(_SETTING, "").lower()
    if given not in ("", "true", "false", "1", "0"):
        raise ConfigurationError(
            f"{_SETTING} is {given!r}: expected true or false.", "Leave it out for false.", setting=_SETTING
        )
    return given in ("true", "1")


def quick_options(java: str, *, keep_classes: bool = False) -> str:
    """Return the options of such a JVM. With `keep_classes`, one that finds no archive writes one when it ends."""
    archive = _archive(java)
    if archive.exists():
        return f"{_SHORT_LIVED} -XX:SharedArchiveFile={archive} {_QUIETLY}"
    if not keep_classes or not _can_write(archive.parent):
        return _SHORT_LIVED
    return f"{_SHORT_LIVED} -XX:ArchiveClassesAtExit={_being_written(archive)} {_QUIETLY}"


def end_jvm(gateway: Any, options: str) -> None:
    """End a JVM that was started with these options, where it is to leave an archive; some seconds, once."""
    option = re.search(r"-XX:ArchiveClassesAtExit=(\S+)", options)
    if option is None or not option[1].endswith(f".{os.getpid()}"):
        return
    written = Path(option[1])
    archive = written.with_suffix(".jsa")
    with suppress(Exception):  # the run is over, and well: the next one begins as this one did
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(_SECONDS)
        written.replace(archive)  # whole or not at all: others may be starting
    written.unlink(missing_ok=True)


def _archive(java: str) -> Path:
    import pyspark

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dagster-adjunct" / "classes"
    real = Path(java).resolve()
    of = f"{real}|{real.stat().st_mtime_ns}|{pyspark.__version__}|{Path(pyspark.__file__).parent}"
    return cache / f"{hashlib.sha256(of.encode()).hexdigest()[:16]}.jsa"


def _being_written(archive: Path) -> Path:
    return archive.with_suffix(f".{os.getpid()}")


def _can_write(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK)
    return False
