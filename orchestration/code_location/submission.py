"""Runs the work of an op: in its own process, or in a Spark application that is started for it,
with Dagster Pipes.

Work is a function of a `Host`. It reports what Dagster should know (events, reports) by `tell(name,
value)`, and the op's process passes each value to the handler of that name, wherever the work runs:

    op's process                                driver of the application (driver.py)
    offers an order, starts an application  ->  takes the order, opens what the work needs
    passes the value to its handler         <-  tell(name, value), in a message of Pipes
    returns the result, or raises the error <-  tell("result", …) or tell("error", …) at the end

`spark_services.py` has what starts the application. If the op's process ends, the application ends
too, and the next run continues as after any crash. The two exchange objects in a folder of an
object store:

    driver.py          what a service starts, if it takes a script from S3
    spark.properties   settings for spark-submit on this machine; the driver deletes them
    order              the work, pickled; the driver deletes it after reading it
    op                 the heartbeat of the op's process
    messages/1, …      messages of Dagster Pipes, in order; the op's process deletes each after
                       handling it

The store is that of the lake, or a folder of this machine that belongs to the user of the op's
process. Both sides unpickle what the other one has written, so nobody else may write there. The
op's process deletes the folder at the end; if it has died, the driver does.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import platform
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

import dagster as dg
from dagster_pipes import (
    PipesCliArgsParamsLoader,
    PipesDefaultLogWriter,
    PipesEnvVarParamsLoader,
    PipesMessage,
    PipesMessageWriter,
    PipesMessageWriterChannel,
    PipesParams,
    open_dagster_pipes,
)

from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.orchestration.batch_log.run_lease import Process
from dagster_adjunct.orchestration.code_location import metadata
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    ObjectNotFoundError,
    TransientError,
)
from dagster_adjunct.resources.objects.fence import Heartbeat
from dagster_adjunct.resources.objects.lake import Lake, describe_store
from dagster_adjunct.resources.objects.store import ObjectStore, S3Options
from dagster_adjunct.resources.spark.in_process import session_factory
from dagster_adjunct.resources.spark.session import (
    new_session,
    spark_release,
    stop_session,
    submitted_settings,
)
from dagster_adjunct.resources.spark.tasks import find_adjunct_error
from dagster_adjunct.resources.streams.system import StreamSystem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

SETTINGS = "spark.properties"
STOP_SECONDS = 60.0
SECRET_REFERENCE = (  # then a name in AWS Secrets Manager, where EMR Serverless reads the secret
    "EMR.secret@"
)
_RESULT = "result"
_ERROR = "error"
_ORDER = "order"
_OP = "op"
_POLL_SECONDS = 0.5
_TTL = timedelta(minutes=1)
_log = logging.getLogger("adjunct.spark")


class Exchange(PipesMessageWriterChannel):
    """The folder where an op's process and a driver exchange objects: `prefix` in a store, or
    all of it for "".
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        ttl: float | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.store = store
        self._prefix = prefix
        self._versions = versions or _versions()
        self._ttl = ttl or _TTL.total_seconds()
        self._lock = Lock()
        self._messages_stored = 0
        self._is_removed = False
        self._beat_etag = ""
        self._beat_at = time.monotonic()

    @classmethod
    def from_params(cls, params: PipesParams) -> Exchange:
        """Return, in the driver, the exchange whose `to_params` these are."""
        s3 = params["s3"]
        store = describe_store(params["url"], None if s3 is None else S3Options(**s3)).open()
        return cls(store, params["prefix"], params["ttl"], params["versions"])

    def to_params(self) -> dict[str, Any]:
        """Return, in the op's process, the parameters of which the driver makes this exchange."""
        return {
            "prefix": self._prefix,
            "ttl": self._ttl,
            "versions": self._versions,
            **asdict(self.store.descriptor),
        }

    def key(self, name: str) -> str:
        """Return the key of an object of this exchange in the store."""
        return f"{self._prefix}{name}"

    def url(self, name: str) -> str:
        """Return the URL of an object of this exchange."""
        return f"{self.store.url}/{self.key(name)}"

    @contextmanager
    def offering(self, order: object) -> Iterator[None]:
        """Store an order, and a heartbeat while this process lives; delete everything at the end
        of the context.
        """
        heartbeat = Heartbeat(
            self.store,
            self.key(_OP),
            lambda: uuid.uuid4().hex.encode(),
            timedelta(seconds=self._ttl),
            describe_loss=lambda data: "",
            log=_log,
        )
        try:
            heartbeat.write(partial(self.store.put, self.key(_OP)))
            heartbeat.start()
            self.store.put(self.key(_ORDER), _pickle(order))
            yield
        finally:
            heartbeat.end(lambda etag: None)
            self.remove()

    def is_offered(self) -> bool:
        """Whether an order waits for a driver."""
        return self.store.head(self.key(_ORDER)) is not None

    def take_order(self) -> Any:
        """Return the order and delete it, so that no other driver takes it.

        Raises ConfigurationError if this process lacks a module that the order uses, or has other
        versions than the op's process.
        """
        for name, found in _versions().items():
            if found != (wanted := self._versions.get(name, found)):
                raise ConfigurationError(
                    f"the driver of the Spark application has {name} {found}: expected {wanted}, as"
                    " in the run.",
                    "Install the same version on both sides.",
                    package=name,
                )
        try:
            order = pickle.loads(self.store.get(self.key(_ORDER)).data)
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"the driver of the Spark application has no module {error.name!r}.",
                "Load the code location with python_module, from a folder on the Python path, and"
                " run the driver with the run's Python (PYSPARK_DRIVER_PYTHON,"
                " spark.pyspark.driver.python). In a container, use an image that contains the"
                " module.",
                module=error.name,
            ) from error
        self.store.delete_many([self.key(_ORDER), self.key(SETTINGS)])  # both may contain secrets
        return order

    def write_message(self, message: PipesMessage) -> None:
        """Store a message of the driver under the next number. If that fails, the next message
        gets this number.
        """
        with self._lock:
            if not self._is_removed:
                self.store.put(
                    self.key(f"messages/{self._messages_stored + 1}"), json.dumps(message).encode()
                )
                self._messages_stored += 1

    def op_lives(self) -> bool:
        """Return whether the heartbeat of the op's process has changed within the last `ttl`
        seconds of this clock.
        """
        with suppress(TransientError):
            found = self.store.head(self.key(_OP))
            if found is None:
                return False
            if found.etag != self._beat_etag:
                self._beat_etag = found.etag
                self._beat_at = time.monotonic()
        return time.monotonic() - self._beat_at < self._ttl

    def remove(self) -> None:
        """Delete the folder; messages that are written afterwards are dropped."""
        with self._lock, suppress(AdjunctError):
            self._is_removed = True
            if self._prefix:
                self.store.delete_many([item.key for item in self.store.list(self._prefix)])
            else:
                shutil.rmtree(self.store.url, ignore_errors=True)


def _versions() -> dict[str, str]:
    """Return the versions, by package, that must be the same on both sides; unknown ones are
    left out.
    """
    # pickled functions contain bytecode
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    found["Spark"] = spark_release()  # the settings name jars for this version
    with suppress(PackageNotFoundError):
        found["dagster-adjunct"] = version("dagster-adjunct")
    return found


def _pickle(value: object) -> bytes:
    """Return a value as bytes; functions and classes that are not in a module too."""
    from pyspark import cloudpickle

    pickling: Any = cloudpickle
    data: bytes = pickling.dumps(value)
    return data


def pack(name: str, value: object) -> str:
    """Return what the driver tells, pickled and in base64, as the payload of a message."""
    return base64.b64encode(_pickle((name, value))).decode()


class Inbox(dg.PipesMessageReader):
    """Receives the driver's messages: keeps its result or error, passes values to the handlers by
    name, and passes messages of Pipes itself to Dagster.

    `is_open` says that the driver has begun and has not reported its end. `with_output` requests
    what it prints.
    """

    def __init__(
        self,
        exchange: Exchange,
        handlers: Mapping[str, Callable[[Any], object]],
        *,
        with_output: bool,
    ) -> None:
        self._exchange = exchange
        self._handlers = handlers
        self._with_output = with_output
        self._error: Exception | None = None
        self.is_open = False
        self.results: list[Any] = []

    @contextmanager
    def read_messages(self, handler: Any) -> Iterator[PipesParams]:
        """Receive messages in a thread of its own; yield the parameters for the driver's
        `Writer`.
        """
        has_ended = Event()
        thread = Thread(
            target=self._read, args=(handler, has_ended), name="adjunct-inbox", daemon=True
        )
        thread.start()
        try:
            yield {**self._exchange.to_params(), "with_output": self._with_output}
        finally:
            has_ended.set()
            thread.join()

    def no_messages_debug_text(self) -> str:
        """Return what Dagster adds to its warning if no message has come."""
        return f"Looked for messages of the driver in {self._exchange.url('messages')}."

    def raise_error(self, cause: Exception | None) -> None:
        """Raise the error that the driver has reported, or that handling its messages has
        raised, if any.
        """
        if self._error is not None:
            raise self._error from cause

    def _read(self, dagster: Any, has_ended: Event) -> None:
        """Handle messages in order until `has_ended` is set and none is left; keep an exception
        for `raise_error`.
        """
        store = self._exchange.store
        try:
            for number in count(1):
                key = self._exchange.key(f"messages/{number}")
                message = self._await_message(key, has_ended)
                if message is None:
                    return
                self._handle(message, dagster)
                with suppress(TransientError):  # it is deleted with the folder
                    store.delete(key)
        except Exception as error:  # noqa: BLE001 - raised when the application has ended
            self._error = self._error or error

    def _await_message(self, key: str, has_ended: Event) -> PipesMessage | None:
        """Return a message as soon as it is there; None if the driver has ended without it."""
        while True:
            # Read before the store: all messages of an ended driver are stored.
            is_last = has_ended.is_set()
            try:
                message: PipesMessage = json.loads(self._exchange.store.get(key).data)
                return message
            except ObjectNotFoundError:
                if is_last:
                    return None
            except TransientError:
                if is_last:
                    raise
            has_ended.wait(_POLL_SECONDS)

    def _handle(self, message: PipesMessage, dagster: Any) -> None:
        """Handle one message: one of Pipes by Dagster, a result or error by keeping it, others by
        their handler.
        """
        self.is_open = message["method"] != "closed"
        if message["method"] != "report_custom_message":
            dagster.handle_message(message)
            return
        try:
            name, value = pickle.loads(base64.b64decode((message["params"] or {})["payload"]))
            if name == _RESULT:
                self.results.append(value)
            elif name == _ERROR:
                self._error = value
            else:
                self._handlers[name](value)
        except Exception as error:  # noqa: BLE001 - raised when the application has ended
            self._error = self._error or error


class Writer(PipesMessageWriter[Exchange]):
    """Writes the driver's messages to the exchange that the parameters from `Inbox` describe.

    Ends the process if no order is offered there: the run has ended, or another attempt has taken
    it.
    """

    exchange: Exchange

    @contextmanager
    def open(self, params: PipesParams) -> Iterator[Exchange]:
        """Yield the exchange, to which what the driver prints goes too if `Inbox` asks for it."""
        self.exchange = Exchange.from_params(params)
        if not self.exchange.is_offered():
            sys.exit(
                "The run that this application was started for has ended, or another attempt has"
                " begun its work."
            )
        with (
            PipesDefaultLogWriter(self.exchange).open({})
            if params["with_output"]
            else nullcontext()
        ):
            yield self.exchange


@dataclass(frozen=True, slots=True)
class Host:
    """What work gets from the process in which it runs.

    `tell` reports a value to the op's process, under the name of a handler. `has_ended` returns
    whether the Dagster run of an id has ended, False if unknown.
    """

    runtime: Runtime
    tell: Callable[[str, Any], None]
    has_ended: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Order:
    """What a driver needs to do the work of an op.

    `run` is the id of the Dagster run, `process` the op's process. `settings` are Spark settings
    for a driver on another machine, without references to secrets; empty for spark-submit.
    """

    work: Callable[[Host], Any]
    open_systems: Callable[..., Mapping[str, StreamSystem]]
    lake: Lake
    run: str
    few_in_process: bool
    settings: Mapping[str, str]
    process: Process


def drive() -> None:
    """Take the order of the op's process and do its work; called in the driver.

    Glue passes the parameters of Pipes as arguments, other services as environment variables.
    """
    writer = Writer()
    kinds: list[Any] = [PipesCliArgsParamsLoader, PipesEnvVarParamsLoader]
    loaders = [kind() for kind in kinds]
    loader = next((each for each in loaders if each.is_dagster_pipes_process()), None)
    with open_dagster_pipes(message_writer=writer, params_loader=loader) as pipes:
        do_order(writer.exchange, pipes.report_custom_message)


def do_order(exchange: Exchange, send: Callable[[str], None]) -> None:
    """Take the order and do its work; `send` is called with each message that the work tells,
    packed.
    """

    def tell(name: str, value: object) -> None:
        send(pack(name, value))

    try:
        order: Order = exchange.take_order()
        Thread(
            target=_end_with, args=(order.process, exchange), name="end-with-op", daemon=True
        ).start()
        with ExitStack() as stack:

            @cache
            def start() -> SparkSession:
                """Return the driver's session, which the first call starts."""
                settings = {**submitted_settings(), **order.settings}
                master = settings["spark.master"]
                session = new_session(settings, master=master, lake_url=order.lake.url)
                stack.callback(stop_session, session)
                tell("info", f"Spark application {session.sparkContext.applicationId} on {master}")
                return session

            systems = order.open_systems(lake=order.lake)
            runtime = Runtime(
                order.lake, systems, session_factory(start), order.run, order.few_in_process
            )
            result = order.work(Host(runtime, tell, _open_has_ended(stack)))
        tell(_RESULT, result)
    except Exception as error:
        if (ours := find_adjunct_error(error)) is not None:
            tell(_ERROR, ours)
        raise


def _open_has_ended(stack: ExitStack) -> Callable[[str], bool]:
    """Return `has_ended` of the driver's Host; without DAGSTER_HOME it returns False for every
    run.
    """
    if "DAGSTER_HOME" not in os.environ:
        return lambda run: False
    return partial(metadata.has_ended, stack.enter_context(dg.DagsterInstance.get()))


def _end_with(op: Process, exchange: Exchange) -> None:
    """Wait until the op's process or this process's parent (spark-submit) has ended, then end this
    process too.

    Nobody would receive its result. It gets a signal first, and STOP_SECONDS to clean up.
    """
    parent = os.getppid()
    while os.getppid() == parent and not op.is_dead() and exchange.op_lives():
        time.sleep(_POLL_SECONDS)
    if op.is_dead() or not exchange.op_lives():
        exchange.remove()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(STOP_SECONDS)
    os._exit(1)
