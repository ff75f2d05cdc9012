"""The choice of a JVM that begins quickly: for runs of some seconds and small batches, not for hours of work.

Its compiler stops at quick code, its collector at one thread, and it maps an archive of the classes that a JVM before
it has loaded, in place of reading and verifying them. A JVM leaves an archive alone that was made by another Java or
over other jars, and so do we where there is none.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.spark.in_process import IN_PROCESS

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

# Spark's Python workers, started while the driver is still busy with what they are to do.
#
# The process that workers are forked from takes seconds to begin in, and Spark starts it when the first task asks for
# it.


_prewarming: WeakKeyDictionary[SparkContext, Thread] = WeakKeyDictionary()


def prewarm_workers(session: SparkSession) -> None:
    """Start them beside whatever comes next, once a session; only on this machine, as executors elsewhere are many."""
    context = session.sparkContext
    if context not in _prewarming and (context.master or "").startswith("local"):
        _prewarming[context] = Thread(target=_run_one_task, args=(session,), name="early-workers", daemon=True)
        _prewarming[context].start()


def wait_for_workers(context: SparkContext) -> None:
    """Wait until those that were begun are there: a session that ends before would tell of a task that it has lost."""
    if context in _prewarming:
        _prewarming[context].join()


def _run_one_task(session: SparkSession) -> None:
    with suppress(Exception):  # where workers can't be started, the first task of a batch says so
        session.range(1).coalesce(1).mapInArrow(_pass_through, "id bigint").collect()


def _pass_through(batches: Iterator[Any]) -> Iterator[Any]:
    yield from batches


# Lets Spark interpret the plans of few rows: compiling one takes longer than it takes them to pass.
#
# Spark writes, compiles and loads some classes for each stage of a plan that it has not met before, as those of a
# session's first batch, and where a literal has changed.


FEW_ROWS = 100_000
"""So many rows, at most, are worked on sooner by a plan that is interpreted."""
_COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
_INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


@contextmanager
def use_interpreted_plans(session: SparkSession) -> Iterator[None]:
    """Have what this session plans meanwhile interpreted; a session that was given other settings keeps them."""
    if any(session.conf.get(name) != value for name, value in _COMPILED.items()):
        yield
        return
    _set(session, _INTERPRETED)
    try:
        yield
    except BaseException:
        with suppress(Exception):  # of a session that has died the first error counts
            _set(session, _COMPILED)
        raise
    _set(session, _COMPILED)


def interpret_small_plans(spark: Callable[[], SparkSession], rows: int | None) -> AbstractContextManager[None]:
    """Have plans interpreted that are known to work on so few rows; `spark` is not asked for a session otherwise."""
    few = rows is not None and rows <= FEW_ROWS and spark is not IN_PROCESS
    return use_interpreted_plans(spark()) if few else nullcontext()


def _set(session: SparkSession, settings: dict[str, str]) -> None:
    for name, value in settings.items():
        session.conf.set(name, value)


class PersistedFrames:
    """What is kept for a batch. Spark computes such a frame when it is first read, and keeps its rows."""

    def __init__(self) -> None:
        self._frames: list[DataFrame] = []

    def keep(self, frame: DataFrame) -> DataFrame:
        """Return a frame of the same rows, which are kept once they are computed."""
        self._frames.append(frame.persist())
        return self._frames[-1]

    def release(self) -> None:
        """Let go of all of them, the newest first.

        Spark plans what reads a frame that is let go anew, as long as it is kept itself and nobody has read it yet.
        """
        while self._frames:
            self._frames.pop().unpersist()


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


def quick_jvm_options(java: str, *, keep_classes: bool = False) -> str:
    """Return the options of such a JVM. With `keep_classes`, one that finds no archive writes one when it ends."""
    archive = _archive(java)
    if archive.exists():
        return f"{_SHORT_LIVED} -XX:SharedArchiveFile={archive} {_QUIETLY}"
    if not keep_classes or not _can_write(archive.parent):
        return _SHORT_LIVED
    return f"{_SHORT_LIVED} -XX:ArchiveClassesAtExit={_being_written(archive)} {_QUIETLY}"


def stop_jvm(gateway: Any, options: str) -> None:
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


# Spark's functions, looked up in its JVM once and not at each call.
#
# For each `F.col("a")`, py4j asks the JVM what `functions` is, then what `col` of it is, and only then has the column
# made. A small batch makes about a thousand columns.


_CLASSES = ("functions", "org.apache.spark.sql.functions", "PythonUtils")


class JvmMethodCache:
    """A class of the JVM whose static methods are asked for once each."""

    def __init__(self, jvm_class: Any) -> None:
        self._class = jvm_class

    def __getattr__(self, name: str) -> Any:
        from py4j.java_gateway import JavaMember

        member = getattr(self._class, name)
        if isinstance(member, JavaMember):  # it knows its name alone: any thread may call it
            setattr(self, name, member)
        return member


def cache_jvm_functions(session: SparkSession) -> None:
    """Have Python look up Spark's functions in the JVM of this session once, whatever sessions it has later."""
    jvm = session.sparkContext._jvm
    for name in _CLASSES:
        if name not in vars(jvm):  # what an object has, it does not ask the JVM for
            setattr(jvm, name, JvmMethodCache(getattr(jvm, name)))
