"""Runs the work of an op: in its own process, or in a Spark application that spark-submit starts, with Dagster Pipes.

Work is a function of a `Host`. It tells what Dagster should know (events, reports) by name, and the op's process
handles that with the same functions, wherever the work runs:

    op's process                                  driver of the application (driver.py)
    work.pickle, spark.properties, spark-submit   -> reads both, opens what the work needs
    handles what was told                         <- tell(name, value), as "3.pickle"; its name is a message of Pipes
    returns the result, or raises the error       <- the last one told

Only these two processes read the folder of these files, which belongs to the user of the op's process. An application
ends with the op's process: the next run continues as after any crash.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

import dagster as dg
from dagster._core.errors import DagsterPipesExecutionError
from dagster_pipes import PipesMessage, PipesParams

from dagster_adjunct.assets.writing.generation import Runtime
from dagster_adjunct.orchestration.batch_log.run_lease import Process, this_process
from dagster_adjunct.orchestration.code_location import metadata
from dagster_adjunct.orchestration.code_location.checks import OpRun
from dagster_adjunct.orchestration.code_location.resources import SparkResource
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.in_process import session_factory
from dagster_adjunct.resources.spark.session import new_session, stop_session
from dagster_adjunct.resources.spark.tasks import find_adjunct_error, lost_process_error
from dagster_adjunct.resources.streams.system import StreamSystem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Host:
    """Where work runs: what it works with, whom it tells, and whether Dagster has ended a run of an id."""

    runtime: Runtime
    tell: Callable[[str, Any], None]
    has_ended: Callable[[str], bool]


def run_work(
    op: OpRun,
    spark: SparkResource,
    work: Callable[[Host], T],
    handlers: Mapping[str, Callable[[Any], object]],
    open_systems: Callable[..., Mapping[str, StreamSystem]],
    *,
    few_in_process: bool,
    submit_at_once: bool = False,
) -> T:
    """Return the result of the work; `handlers` receive what it tells, by name.

    If the resource submits applications, the work is submitted at once, or else when it asks for a session: it then
    begins again in the application, as after a crash. `open_systems` opens its streams there, given `lake`.
    """
    context = op.context

    def tell(name: str, value: object) -> None:
        handlers[name](value)

    local = Host(
        Runtime(op.lake, op.systems, session_factory(spark.starter), context.run.run_id, few_in_process),
        tell,
        partial(metadata.has_ended, context.instance),
    )
    if spark.submit is None:
        return work(local)
    if not submit_at_once:
        with suppress(HandedToSpark):
            return work(replace(local, runtime=replace(local.runtime, spark=_ask_for_application)))
    command, settings = spark.submission()
    spark.stop()  # its executors may have the cores that the application needs
    with TemporaryDirectory(prefix="adjunct-") as name:
        folder = Path(name)
        order = Order(work, open_systems, op.lake, context.run.run_id, few_in_process, settings, this_process())
        inbox = _Inbox(folder, handlers)
        _write_pickle(folder / _ORDER, order)
        properties = folder / _SETTINGS
        properties.write_text("".join(f"{key} {_escape(value)}\n" for key, value in settings.items()), encoding="utf-8")
        client = dg.PipesSubprocessClient(message_reader=_Reader(inbox), termination_timeout_seconds=_STOP_SECONDS)
        try:
            client.run(
                context=context,
                command=[command, "--load-spark-defaults", "--properties-file", str(properties), str(_DRIVER)],
                extras={"folder": name},
                env={"PYTHONPATH": _python_path(context.run)},
            )
        except DagsterPipesExecutionError as error:
            inbox.raise_error(error)
            _raise_if_killed(error)
            raise
        finally:
            # Pipes demands an event for each output, but the op itself reports, and some outputs are not made.
            context.get_step_execution_context()._requires_typed_event_stream = False
        inbox.raise_error(None)
        result: T = inbox.result
        return result


class HandedToSpark(BaseException):
    """Work asks for a session. No handler of errors takes it for one."""


def _ask_for_application() -> SparkSession:
    raise HandedToSpark


def _python_path(run: dg.DagsterRun) -> str:
    """Return the path on which the driver finds what this process has imported.

    Dagster has the folder of a code location on its own only while it loads it.
    """
    pointer = run.job_code_origin and run.job_code_origin.repository_origin.code_pointer
    folders = [*sys.path, getattr(pointer, "working_directory", None)]
    return os.pathsep.join(dict.fromkeys(folder or str(Path.cwd()) for folder in folders))


def _raise_if_killed(error: Exception) -> None:
    """Raise TransientError if spark-submit was ended by a signal, by its code in the error's text."""
    found = re.search(r"code (-?\d+)$", str(error))
    code = int(found[1]) if found else 0
    number = -code if code < 0 else code - _BY_SIGNAL
    if 0 < number < signal.NSIG:
        raise lost_process_error(f"the driver of the Spark application was ended by signal {number}.") from error


_DRIVER = Path(__file__).with_name("driver.py")
_ORDER, _SETTINGS = "work.pickle", "spark.properties"
_BY_SIGNAL = 128  # what a shell adds to the number
_RESULT, _ERROR = "result", "error"
_STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Order:
    """What the driver of an application needs to run work for an op's process."""

    work: Callable[[Host], Any]
    open_systems: Callable[..., Mapping[str, StreamSystem]]
    lake: Lake
    run: str
    few_in_process: bool
    settings: Mapping[str, str]
    process: Process


def _write_pickle(path: Path, value: object) -> None:
    from pyspark import cloudpickle

    pickling: Any = cloudpickle
    path.write_bytes(pickling.dumps(value))


def _escape(value: str) -> str:
    """Return the value as a file of Java properties has it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n")


class _Inbox:
    """Receives what an application tells: its result or error, and what the handlers receive."""

    def __init__(self, folder: Path, handlers: Mapping[str, Callable[[Any], object]]) -> None:
        self._folder, self._handlers = folder, handlers
        self._error: Exception | None = None
        self.result: Any = None

    def receive(self, file: str) -> None:
        """Handle one message; an exception is kept, because Pipes stops to read after one."""
        path = self._folder / file
        try:
            name, value = pickle.loads(path.read_bytes())
            path.unlink()
            if name == _RESULT:
                self.result = value
            elif name == _ERROR:
                self._error = value
            else:
                self._handlers[name](value)
        except Exception as error:  # noqa: BLE001 - raised when the application has ended
            self._error = self._error or error

    def raise_error(self, cause: Exception | None) -> None:
        """Raise the error that the application told, or that was made of what it told."""
        if self._error is not None:
            raise self._error from cause


class _Reader(dg.PipesTempFileMessageReader):
    """Hands the messages of an application to an inbox as they arrive, and all others to Dagster."""

    def __init__(self, inbox: _Inbox) -> None:
        super().__init__()
        self._inbox = inbox

    @contextmanager
    def read_messages(self, handler: Any) -> Iterator[PipesParams]:
        with super().read_messages(_Handler(handler, self._inbox)) as params:  # type: ignore[arg-type]
            yield params


@dataclass(frozen=True, slots=True)
class _Handler:
    handler: Any
    inbox: _Inbox

    def handle_message(self, message: PipesMessage) -> None:
        if message["method"] == "report_custom_message":
            self.inbox.receive((message["params"] or {})["payload"])
        else:
            self.handler.handle_message(message)

    def report_pipes_framework_exception(self, origin: str, error: Any) -> None:
        self.handler.report_pipes_framework_exception(origin, error)


def drive(folder: Path, announce: Callable[[str], None]) -> None:
    """Run the work that is in the folder, in the driver of an application; `announce` sends the name of a file."""
    numbers, lock = count(1), Lock()

    def tell(name: str, value: object) -> None:
        with lock:  # in order, also where threads tell
            path = folder / f"{next(numbers)}.pickle"
            _write_pickle(path, (name, value))
            announce(path.name)

    try:
        order = _read_order(folder / _ORDER)
        (folder / _SETTINGS).unlink(missing_ok=True)  # read by now; they may have secrets
        end_with = partial(_end_with, order.process, os.getppid(), folder)
        Thread(target=end_with, name="end-with-op", daemon=True).start()
        with ExitStack() as stack:

            @cache
            def start() -> SparkSession:
                master = order.settings["spark.master"]
                session = new_session(order.settings, master=master, lake_url=order.lake.url)
                stack.callback(stop_session, session)
                tell("info", f"Spark application {session.sparkContext.applicationId} on {master}")
                return session

            systems = order.open_systems(lake=order.lake)
            runtime = Runtime(order.lake, systems, session_factory(start), order.run, order.few_in_process)
            result = order.work(Host(runtime, tell, _find_runs(stack)))
        tell(_RESULT, result)
    except Exception as error:
        if (ours := find_adjunct_error(error)) is not None:
            tell(_ERROR, ours)
        raise


def _read_order(path: Path) -> Order:
    """Return the order. Raises ConfigurationError if this Python lacks a module of the application."""
    try:
        order: Order = pickle.loads(path.read_bytes())
        path.unlink()
    except ModuleNotFoundError as error:
        problem = f"the driver of the Spark application has no module {error.name!r}."
        step = "Load the code location by the module's name from a folder on the path, and use the same Python "
        raise ConfigurationError(
            problem, f"{step}(PYSPARK_DRIVER_PYTHON, spark.pyspark.driver.python).", module=error.name
        ) from error
    return order


def _find_runs(stack: ExitStack) -> Callable[[str], bool]:
    """Return what tells whether Dagster has ended a run: False for all of them where Dagster has no home."""
    if "DAGSTER_HOME" not in os.environ:
        return lambda run: False
    return partial(metadata.has_ended, stack.enter_context(dg.DagsterInstance.get()))


def _end_with(op: Process, parent: int, folder: Path) -> None:
    """End this process when that of the op or spark-submit has ended: without it, nobody hears what this one does.

    If the op's has, nobody else deletes the folder.
    """
    while os.getppid() == parent and not op.is_dead():
        time.sleep(_POLL_SECONDS)
    if op.is_dead():
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_STOP_SECONDS)
    os._exit(1)


_POLL_SECONDS = 0.5
