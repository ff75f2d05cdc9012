"""Runs the work of an op: in its own process, or in a Spark application that is started for it, with Dagster Pipes.

Work is a function of a `Host`. It tells what Dagster should know (events, reports) by name, and the op's process
handles that with the same functions, wherever the work runs:

    op's process                                driver of the application (driver.py)
    offers an order, starts an application  ->  takes the order, opens what the work needs
    handles what was told                   <-  tell(name, value), in a message of Pipes
    returns the result, or raises the error <-  the last one told

`exchange.py` has how the two exchange these, `services.py` what starts the application. An application ends with the
op's process: the next run continues as after any crash.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import dagster as dg
from dagster_pipes import PipesCliArgsParamsLoader, PipesEnvVarParamsLoader, open_dagster_pipes

from dagster_adjunct.assets.writing.generation import Runtime
from dagster_adjunct.orchestration.batch_log.run_lease import Process, this_process
from dagster_adjunct.orchestration.code_location import metadata
from dagster_adjunct.orchestration.code_location.checks import OpRun
from dagster_adjunct.orchestration.code_location.exchange import (
    ERROR,
    POLL_SECONDS,
    RESULT,
    Exchange,
    Inbox,
    Writer,
    pack,
)
from dagster_adjunct.orchestration.code_location.resources import SparkResource
from dagster_adjunct.orchestration.code_location.services import STOP_SECONDS, without_references
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import StoreDescriptor
from dagster_adjunct.resources.spark.in_process import session_factory
from dagster_adjunct.resources.spark.session import new_session, stop_session, submitted_settings
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
    if not spark.services:
        return work(local)
    if not submit_at_once:
        with suppress(HandedToSpark):
            return work(replace(local, runtime=replace(local.runtime, spark=_ask_for_application)))
    service, settings = spark.submission(op.lake.url)
    spark.stop()  # its executors may have the cores that the application needs
    with ExitStack() as stack:
        if service.is_remote:
            exchange = Exchange(op.lake.store, f"exchanges/{context.run.run_id}-{uuid.uuid4().hex[:8]}/")
        else:
            folder = stack.enter_context(TemporaryDirectory(prefix="adjunct-", ignore_cleanup_errors=True))
            exchange = Exchange(StoreDescriptor(folder).open(), "")
        inbox = Inbox(exchange, handlers, with_output=service.is_remote)
        # spark-submit has them from elsewhere.
        ours = without_references(settings) if service.is_remote else {}
        order = Order(work, open_systems, op.lake, context.run.run_id, few_in_process, ours, this_process())
        stack.enter_context(exchange.offering(order))
        try:
            service.run(context, inbox, exchange, settings)
        except Exception as error:
            inbox.raise_error(error)
            if inbox.is_open:
                found = error.problem if isinstance(error, AdjunctError) else str(error)
                problem = f"the driver of the Spark application ended early: {found.rstrip('.')}."
                raise lost_process_error(problem) from error
            if not inbox.results:
                raise
            context.log.warning(f"The application has ended with a result, but: {error}")
        finally:
            # Pipes demands an event for each output, but the op itself reports, and some outputs are not made.
            context.get_step_execution_context()._requires_typed_event_stream = False
    inbox.raise_error(None)
    if not inbox.results:
        raise lost_process_error("the driver of the Spark application ended without a result.")
    result: T = inbox.results[0]
    return result


class HandedToSpark(BaseException):
    """Work asks for a session. No handler of errors takes it for one."""


def _ask_for_application() -> SparkSession:
    raise HandedToSpark


@dataclass(frozen=True, slots=True)
class Order:
    """What the driver of an application needs to run work for an op's process; for another machine without secrets."""

    work: Callable[[Host], Any]
    open_systems: Callable[..., Mapping[str, StreamSystem]]
    lake: Lake
    run: str
    few_in_process: bool
    settings: Mapping[str, str]
    process: Process


def drive() -> None:
    """Do the work that the op's process offers, in the driver of an application. Glue's has arguments, no variables."""
    writer = Writer()
    loaders: list[Any] = [PipesCliArgsParamsLoader, PipesEnvVarParamsLoader]
    loader = next((one for kind in loaders if (one := kind()).is_dagster_pipes_process()), None)
    with open_dagster_pipes(message_writer=writer, params_loader=loader) as pipes:
        do_order(writer.exchange, pipes.report_custom_message)


def do_order(exchange: Exchange, send: Callable[[str], None]) -> None:
    """Take the order and do its work; `send` sends what the work tells."""

    def tell(name: str, value: object) -> None:
        send(pack(name, value))

    try:
        order: Order = exchange.take_order()
        Thread(target=_end_with, args=(order.process, exchange), name="end-with-op", daemon=True).start()
        with ExitStack() as stack:

            @cache
            def start() -> SparkSession:
                settings = {**submitted_settings(), **order.settings}
                master = settings["spark.master"]
                session = new_session(settings, master=master, lake_url=order.lake.url)
                stack.callback(stop_session, session)
                tell("info", f"Spark application {session.sparkContext.applicationId} on {master}")
                return session

            systems = order.open_systems(lake=order.lake)
            runtime = Runtime(order.lake, systems, session_factory(start), order.run, order.few_in_process)
            result = order.work(Host(runtime, tell, _find_runs(stack)))
        tell(RESULT, result)
    except Exception as error:
        if (ours := find_adjunct_error(error)) is not None:
            tell(ERROR, ours)
        raise


def _find_runs(stack: ExitStack) -> Callable[[str], bool]:
    """Return what tells whether Dagster has ended a run: False for all of them where Dagster has no home."""
    if "DAGSTER_HOME" not in os.environ:
        return lambda run: False
    return partial(metadata.has_ended, stack.enter_context(dg.DagsterInstance.get()))


def _end_with(op: Process, exchange: Exchange) -> None:
    """End this process when that of the op or spark-submit has ended: without it, nobody hears what this one does."""
    parent = os.getppid()
    while os.getppid() == parent and not op.is_dead() and exchange.op_lives():
        time.sleep(POLL_SECONDS)
    if op.is_dead() or not exchange.op_lives():
        exchange.remove()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(STOP_SECONDS)
    os._exit(1)
