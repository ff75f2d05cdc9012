"""What the process of an op and the driver of its Spark application exchange: objects in a folder of an object store.

    driver.py          what a service starts, if it takes a script from S3
    spark.properties   settings for spark-submit on this machine; the driver deletes them
    order              the work, pickled; the driver deletes it when it has read it
    op                 the heartbeat of the op's process
    messages/1, …      messages of Dagster Pipes, in order; the op's process deletes those that it has handled

The store is that of the lake, or a folder of this machine that belongs to the user of the op's process. Both sides
unpickle what the other one has written, so nobody else may write there. Who ends last deletes the folder: the op's
process, or the driver if the op's process has died.
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
import platform
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from threading import Event, Lock, Thread
from typing import Any

import dagster as dg
from dagster_pipes import (
    PipesDefaultLogWriter,
    PipesMessage,
    PipesMessageWriter,
    PipesMessageWriterChannel,
    PipesParams,
)

from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, ObjectNotFoundError, TransientError
from dagster_adjunct.resources.objects.heartbeat import Heartbeat
from dagster_adjunct.resources.objects.store import ObjectStore, S3Options, StoreDescriptor
from dagster_adjunct.resources.spark.session import spark_release

RESULT, ERROR = "result", "error"
SETTINGS = "spark.properties"
POLL_SECONDS = 0.5
_ORDER, _OP = "order", "op"
_TTL = timedelta(minutes=1)
_log = logging.getLogger("adjunct.spark")


class Exchange(PipesMessageWriterChannel):
    """The folder `prefix` of a store; "" if all of the store is the exchange's."""

    def __init__(
        self, store: ObjectStore, prefix: str, ttl: float | None = None, versions: Mapping[str, str] | None = None
    ) -> None:
        self.store, self._prefix, self._versions = store, prefix, versions or _versions()
        self._ttl = ttl or _TTL.total_seconds()
        self._lock, self._told, self._is_removed = Lock(), 0, False
        self._beat, self._beat_at = "", time.monotonic()

    @classmethod
    def from_params(cls, params: PipesParams) -> Exchange:
        """Return the exchange that the parameters of a message reader describe, in the driver."""
        s3 = params["s3"]
        store = StoreDescriptor(params["url"], None if s3 is None else S3Options(**s3)).open()
        return cls(store, params["prefix"], params["ttl"], params["versions"])

    def to_params(self) -> dict[str, Any]:
        return {"prefix": self._prefix, "ttl": self._ttl, "versions": self._versions, **asdict(self.store.descriptor)}

    def key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def url(self, name: str) -> str:
        return f"{self.store.url}/{self.key(name)}"

    @contextmanager
    def offering(self, order: object) -> Iterator[None]:
        """Offer an order while this process lives, at most until the end of the context; then delete everything."""
        heartbeat = Heartbeat(
            self.store,
            self.key(_OP),
            lambda: uuid.uuid4().hex.encode(),
            timedelta(seconds=self._ttl),
            not_ours=lambda data: "",
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
        return self.store.head(self.key(_ORDER)) is not None

    def take_order(self) -> Any:
        """Return the order. Raises ConfigurationError if this Python lacks a module, or has other versions."""
        for name, found in _versions().items():
            if found != (wanted := self._versions.get(name, found)):
                problem = f"the driver of the Spark application has {name} {found}: expected {wanted}, as in the run."
                raise ConfigurationError(problem, "Install the same version on both sides.", package=name)
        try:
            order = pickle.loads(self.store.get(self.key(_ORDER)).data)
        except ModuleNotFoundError as error:
            problem = f"the driver of the Spark application has no module {error.name!r}."
            step = "Load the code location by the module's name from a folder on the path, and use the same Python "
            step += "(PYSPARK_DRIVER_PYTHON, spark.pyspark.driver.python), or an image that has the module."
            raise ConfigurationError(problem, step, module=error.name) from error
        self.store.delete_many([self.key(_ORDER), self.key(SETTINGS)])  # they may have secrets
        return order

    def write_message(self, message: PipesMessage) -> None:
        """Send a message from the driver. One that can't be stored leaves no gap."""
        with self._lock:
            if not self._is_removed:
                self.store.put(self.key(f"messages/{self._told + 1}"), json.dumps(message).encode())
                self._told += 1

    def op_lives(self) -> bool:
        """Return whether the op's process has renewed its heartbeat in time, by the clock of the driver that asks."""
        with suppress(TransientError):
            found = self.store.head(self.key(_OP))
            if found is None:
                return False
            if found.etag != self._beat:
                self._beat, self._beat_at = found.etag, time.monotonic()
        return time.monotonic() - self._beat_at < self._ttl

    def remove(self) -> None:
        """Delete everything, and store nothing any more."""
        with self._lock, suppress(AdjunctError):
            self._is_removed = True
            if self._prefix:
                self.store.delete_many([item.key for item in self.store.list(self._prefix)])
            else:
                shutil.rmtree(self.store.url, ignore_errors=True)


def _versions() -> dict[str, str]:
    """Return the versions that have to be those of the other side, without what is not known."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}  # pickled functions are its bytecode
    found["Spark"] = spark_release()  # the settings name its jars
    with suppress(PackageNotFoundError):
        found["dagster-adjunct"] = version("dagster-adjunct")
    return found


def _pickle(value: object) -> bytes:
    from pyspark import cloudpickle

    pickling: Any = cloudpickle
    data: bytes = pickling.dumps(value)
    return data


def pack(name: str, value: object) -> str:
    """Return what the driver tells, as text for a message."""
    return base64.b64encode(_pickle((name, value))).decode()


class Inbox(dg.PipesMessageReader):
    """Receives what the driver tells: its result or error, what the handlers receive by name, and the rest for Dagster.

    `is_open` says that the driver has begun and has not said that it ends. `with_output` asks it for what it prints.
    """

    def __init__(
        self, exchange: Exchange, handlers: Mapping[str, Callable[[Any], object]], *, with_output: bool
    ) -> None:
        self._exchange, self._handlers, self._with_output = exchange, handlers, with_output
        self._error: Exception | None = None
        self.is_open = False
        self.results: list[Any] = []

    @contextmanager
    def read_messages(self, handler: Any) -> Iterator[PipesParams]:
        has_ended = Event()
        thread = Thread(target=self._read, args=(handler, has_ended), name="adjunct-inbox", daemon=True)
        thread.start()
        try:
            yield {**self._exchange.to_params(), "with_output": self._with_output}
        finally:
            has_ended.set()
            thread.join()

    def no_messages_debug_text(self) -> str:
        return f"Looked for messages of the driver in {self._exchange.url('messages')}."

    def raise_error(self, cause: Exception | None) -> None:
        """Raise the error that the driver told, or that was made of what it told."""
        if self._error is not None:
            raise self._error from cause

    def _read(self, dagster: Any, has_ended: Event) -> None:
        """Handle messages in order until the driver has ended and there are no more; the first exception is kept."""
        store = self._exchange.store
        try:
            for number in count(1):
                key = self._exchange.key(f"messages/{number}")
                while True:
                    is_last = has_ended.is_set()  # before looking: what the driver sent is then there
                    try:
                        message = json.loads(store.get(key).data)
                        break
                    except (ObjectNotFoundError, TransientError) as error:
                        if is_last:
                            if isinstance(error, TransientError):
                                raise
                            return
                    has_ended.wait(POLL_SECONDS)
                self._handle(message, dagster)
                with suppress(TransientError):  # it goes with the folder
                    store.delete(key)
        except Exception as error:  # noqa: BLE001 - raised when the application has ended
            self._error = self._error or error

    def _handle(self, message: PipesMessage, dagster: Any) -> None:
        self.is_open = message["method"] != "closed"
        if message["method"] != "report_custom_message":
            dagster.handle_message(message)
            return
        try:
            name, value = pickle.loads(base64.b64decode((message["params"] or {})["payload"]))
            if name == RESULT:
                self.results.append(value)
            elif name == ERROR:
                self._error = value
            else:
                self._handlers[name](value)
        except Exception as error:  # noqa: BLE001 - raised when the application has ended
            self._error = self._error or error


class Writer(PipesMessageWriter[Exchange]):
    """Sends the driver's messages through the exchange that its parameters describe."""

    exchange: Exchange

    @contextmanager
    def open(self, params: PipesParams) -> Iterator[Exchange]:
        self.exchange = Exchange.from_params(params)
        if not self.exchange.is_offered():
            sys.exit("The run that this application was started for has ended, or another attempt has begun its work.")
        with PipesDefaultLogWriter(self.exchange).open({}) if params["with_output"] else nullcontext():
            yield self.exchange
