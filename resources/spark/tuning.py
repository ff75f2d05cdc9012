"""Makes small batches fast: Python workers that are started early, interpreted plans, persisted
frames, a quick JVM.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.small_work import SMALL_ROWS
from dagster_adjunct.resources.spark.in_process import IN_PROCESS, is_remote

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import Column, DataFrame, SparkSession

_prewarming: WeakKeyDictionary[SparkContext, Thread] = WeakKeyDictionary()


def prewarm_workers(session: SparkSession) -> None:
    """Start the daemon of Spark's Python workers in the background, once for each session with a
    local master.

    That takes seconds. Otherwise the first task that needs a worker would wait for it.
    """
    if is_remote(session):
        return
    context = session.sparkContext
    if context not in _prewarming and (context.master or "").startswith("local"):
        _prewarming[context] = Thread(
            target=_run_one_task, args=(session,), name="prewarm-workers", daemon=True
        )
        _prewarming[context].start()


def wait_for_workers(context: SparkContext) -> None:
    """Wait until prewarming has ended: if the session were stopped before, Spark would log a
    lost task.
    """
    if context in _prewarming:
        _prewarming[context].join()


def _run_one_task(session: SparkSession) -> None:
    """Run a task in a Python worker, which starts the daemon of workers."""
    with suppress(Exception):  # if workers can't be started, the first task of a batch fails
        session.range(1).coalesce(1).mapInArrow(_pass_through, "id bigint").collect()


def _pass_through(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches unchanged: the worker is to start, not to compute."""
    yield from batches


_COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
_INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


@contextmanager
def use_interpreted_plans(session: SparkSession) -> Iterator[None]:
    """Let Spark interpret plans in this context, unless the session's settings for this differ from
    Spark's defaults.

    Otherwise Spark generates and compiles classes for each new stage: in a session's first batch,
    and whenever a literal changes.
    """
    if any(session.conf.get(name) != value for name, value in _COMPILED.items()):
        yield
        return
    _set(session, _INTERPRETED)
    try:
        yield
    except BaseException:
        with suppress(Exception):  # if the session has died, the first error matters
            _set(session, _COMPILED)
        raise
    _set(session, _COMPILED)


def interpret_small_plans(
    spark: Callable[[], SparkSession], rows: int | None
) -> AbstractContextManager[None]:
    """Let Spark interpret plans in this context if there are at most SMALL_ROWS rows.

    For more or an unknown number of rows (None), and for IN_PROCESS, it does nothing, and does not
    ask for the session.
    """
    few = rows is not None and rows <= SMALL_ROWS and spark is not IN_PROCESS
    if few:
        return use_interpreted_plans(spark())
    return nullcontext()


def _set(session: SparkSession, settings: dict[str, str]) -> None:
    """Change these settings of a session."""
    for name, value in settings.items():
        session.conf.set(name, value)


def bigint_array(values: Iterable[int]) -> Column:
    """Return a column with this array of bigint. It is one string literal, cast, to keep the
    plan small.
    """
    return F.split(F.lit(",".join(map(str, values))), ",").cast("array<bigint>")


class PersistedFrames:
    """Keeps frames persisted during a batch: Spark computes each when it is first read, and
    keeps its rows.
    """

    def __init__(self) -> None:
        self._frames: list[DataFrame] = []

    def keep(self, frame: DataFrame) -> DataFrame:
        """Persist a frame until `release`, and return it."""
        self._frames.append(frame.persist())
        return self._frames[-1]

    def release(self) -> None:
        """Unpersist all frames, the newest first.

        In another order, Spark would plan those frames again that have not been computed and read
        one that is unpersisted.
        """
        while self._frames:
            self._frames.pop().unpersist()


_SETTING = "ADJUNCT_SPARK_QUICK"
# With its fast compiler only, the JVM reserves 48 MB for compiled code, which Spark fills within
# some hundred batches. Then the JVM would discard and recompile code over and over.
_SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
_QUIETLY = "-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"
_SECONDS = 60.0


def is_quick(chosen: bool | None = None) -> bool:
    """Return `chosen`; if it is None, whether ADJUNCT_SPARK_QUICK asks for sessions that start
    quickly. Raises ConfigurationError for another value of this variable than true or false.
    """
    if chosen is not None:
        return chosen
    given = os.environ.get(_SETTING, "").lower()
    if given not in ("", "true", "false", "1", "0"):
        problem = f"{_SETTING} is {given!r}: expected true or false."
        raise ConfigurationError(
            problem, f"Set {_SETTING} to true or false, or unset it (false).", setting=_SETTING
        )
    return given in ("true", "1")


def quick_jvm_options(java: str, *, keep_classes: bool = False) -> str:
    """Return the options of a JVM that starts quickly: for runs of some seconds and small batches,
    not for long work.

    It uses the fast compiler and the serial garbage collector, and loads classes from an archive
    that an earlier JVM has written. With `keep_classes`, a JVM that finds no archive writes one
    when it ends, which `stop_jvm` then puts in its place. JVMs ignore archives of another Java or
    other jars.
    """
    archive = _archive(java)
    if archive.exists():
        return f"{_SHORT_LIVED} -XX:SharedArchiveFile={archive} {_QUIETLY}"
    if not keep_classes or not _can_write(archive.parent):
        return _SHORT_LIVED
    dumped = archive.with_suffix(f".{os.getpid()}")
    return f"{_SHORT_LIVED} -XX:ArchiveClassesAtExit={dumped} {_QUIETLY}"


def stop_jvm(gateway: Any, options: str) -> None:
    """End the JVM if this process started it with options that archive its classes at its end.

    That takes some seconds, once: later JVMs find the archive. Otherwise it does nothing.
    """
    option = re.search(r"-XX:ArchiveClassesAtExit=(\S+)", options)
    # `quick_jvm_options` names the file after the process
    if option is None or not option[1].endswith(f".{os.getpid()}"):
        return
    written = Path(option[1])
    archive = written.with_suffix(".jsa")
    with suppress(Exception):
        # The run itself has succeeded; without an archive the next JVM tries again.
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(_SECONDS)
        written.replace(archive)  # atomically: other JVMs may be starting
    written.unlink(missing_ok=True)


def _archive(java: str) -> Path:
    """Return the path of the archive of classes for this Java and this PySpark."""
    import pyspark

    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "dagster-adjunct"
        / "classes"
    )
    real = Path(java).resolve()
    pyspark_folder = Path(pyspark.__file__).parent
    made_for = f"{real}|{real.stat().st_mtime_ns}|{pyspark.__version__}|{pyspark_folder}"
    return cache / f"{hashlib.sha256(made_for.encode()).hexdigest()[:16]}.jsa"


def _can_write(folder: Path) -> bool:
    """Whether this user can write files in a folder, which is made if it is missing."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK)
    return False
