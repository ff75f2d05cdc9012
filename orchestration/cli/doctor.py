"""`adjunct doctor`: checks whether everything that runs need is there, and says how to mend what is
not.

A function `check_…` returns what it has found, or raises a Concern or another error. Nothing is
left behind: a store is tried with an object that is deleted again, a table is only opened.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from dagster_adjunct.assets.declaration.dataset import FileSource
from dagster_adjunct.orchestration.application.application import Application, load_application
from dagster_adjunct.orchestration.application.table_registry import list_uses
from dagster_adjunct.orchestration.batch_log.batch_log import application_state, check_not_renamed
from dagster_adjunct.orchestration.cli import options, output
from dagster_adjunct.orchestration.maintenance.followers import list_lagging_followers
from dagster_adjunct.orchestration.operators.windows.zone_rules import (
    differing_spans,
    java_database,
    python_database,
)
from dagster_adjunct.orchestration.planner.planner import check_syntax, list_zones, plan_application
from dagster_adjunct.orchestration.startpoints.coordinator import describe_other_writers
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError
from dagster_adjunct.resources.files.tree import open_tree
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.objects.lake import (
    Lake,
    LakeSettings,
    lake_in,
    open_store,
    probe_conditional_writes,
)
from dagster_adjunct.resources.objects.store import PROBE_PREFIX, ObjectStore
from dagster_adjunct.resources.spark.in_process import is_in_process
from dagster_adjunct.resources.spark.session import check_java, session_scope
from dagster_adjunct.resources.spark.tasks import (
    find_adjunct_error,
    first_message_line,
    translate_spark_errors,
)
from dagster_adjunct.resources.tables.operation import Conditions
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.resources.times import utc_now

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PACKAGE = "dagster-adjunct"
_MOST_SECONDS_APART = 60.0
_HEARTBEAT_SECONDS = 300.0  # Dagster's own limit for a daemon that is healthy
State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found, and the next step unless it is "ok"."""

    check: str
    state: State
    found: str
    next_step: str = ""


class Concern(Exception):
    """Raised by a check for what works, but not well ("warning"), or does not work ("failed"): the
    finding and the next step."""

    def __init__(self, found: str, next_step: str, state: State = "warning") -> None:
        super().__init__(found)
        self.found = found
        self.next_step = next_step
        self.state = state


@click.command()
@click.argument("reference", metavar="[MODULE:APP]", required=False)
@options.master_option
@options.lake_url_option
@options.output_options
def doctor(reference: str | None, master: str | None, lake_url: str | None) -> None:
    """Check what runs need: packages, Java, Spark and its workers, the lake, Dagster; with
    MODULE:APP its streams and tables, too.

    Changes nothing. Starts Spark, which takes some seconds. Exits with 1 if a check failed.
    """
    findings = []
    for finding in examine(reference, master, lake_url):
        findings.append(finding)
        output.show_line(f"{finding.state:8} {finding.check}: {finding.found}")
        if finding.next_step:
            output.show_line(f"{'':8} {finding.next_step}")
    output.show_json({"findings": [asdict(finding) for finding in findings]})
    if any(finding.state == "failed" for finding in findings):
        raise click.exceptions.Exit(1)


def examine(reference: str | None, master: str | None, lake_url: str | None) -> Iterator[Finding]:
    """Run the checks and yield their findings. A check that needs something that has failed
    before it is skipped.
    """
    yield run_check("packages", check_packages)
    no_spark = ""
    if is_in_process(master):
        no_spark = "there is no session"
        yield Finding("Java", "skipped", "the master is none: no session is started")
    else:
        java = run_check("Java", check_java)
        yield java
        if java.state == "failed":
            no_spark = "it needs Java"
    opened: list[ObjectStore] = []
    yield run_check("lake", lambda: check_lake(lake_url, opened))
    store = opened[0] if opened else None
    if store is not None and lake_in(store).exists():
        yield from _examine_followers(lake_in(store))
    if no_spark:
        yield Finding("Spark", "skipped", no_spark)
    else:
        yield run_check("Spark", lambda: check_spark(master, store))
    yield run_check("Dagster", check_dagster)
    if reference is None:
        return
    loaded: list[Application] = []
    yield run_check("application", lambda: check_application(reference, loaded))
    for app in loaded:
        if store is None:
            yield Finding("streams", "skipped", "they need the lake")
        else:
            runs_spark = not no_spark
            yield from _examine_application(app, lake_in(store), master, runs_spark=runs_spark)


def _examine_followers(lake: Lake) -> Iterator[Finding]:
    """Yield a finding for each application that has yet to read changes of a dataset."""
    now = lake.now()
    for follower in list_lagging_followers(lake):
        found = follower.describe(now)
        if follower.is_kept(now):
            yield Finding("followed datasets", "ok", found)
            continue
        step = f"Run {follower.application}; it says what to do if it can't go on."
        yield Finding("followed datasets", "warning", found, step)


def _examine_application(
    app: Application, lake: Lake, master: str | None, *, runs_spark: bool
) -> Iterator[Finding]:
    """Yield the findings about an application's name, streams, time zones, files and tables;
    `runs_spark` says whether the check of time zones can start a session.
    """
    has_session = not is_in_process(master)
    yield run_check("name", lambda: check_name_in_use(app, lake))
    yield run_check("streams", lambda: check_plan(app, lake, parse=has_session))
    zones = list_zones(app)
    if zones and runs_spark:
        yield run_check("time zones", lambda: check_time_zones(zones, master))
    elif zones:
        why = "they need Java" if has_session else "there is no session"
        yield Finding("time zones", "skipped", why)
    for dataset in app.datasets:
        if isinstance(dataset.input, FileSource):
            yield run_check(f"files of {dataset.name}", partial(check_files, dataset.input))
    for table in app.tables.values():
        yield run_check(f"table {table.name}", partial(check_table, app, table))


def run_check(name: str, look: Callable[[], str]) -> Finding:
    """Run the check `look` and return its finding, which is "ok" with the text that it returns. An
    error that it raises becomes a finding, too.
    """
    try:
        return Finding(name, "ok", look())
    except Concern as concern:
        return Finding(name, concern.state, concern.found, concern.next_step)
    except Exception as error:  # noqa: BLE001 - whatever is wrong is what is asked for
        ours = find_adjunct_error(error)
        if isinstance(ours, AdjunctError):
            return Finding(name, "failed", ours.problem, ours.next_step)
        return Finding(name, "failed", f"{type(error).__name__}: {first_message_line(error)}")


def check_packages() -> str:
    """Check the versions of the required packages, and return what was found; those that only
    extras require may be missing.
    """
    from packaging.requirements import Requirement

    needed = 0
    wrong = []
    for requirement in map(Requirement, requires(_PACKAGE) or ()):
        is_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            if not is_extra:
                wrong.append(f"{requirement.name} is missing")
            continue
        needed += 1
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found}, expected {requirement.specifier}")
    if wrong:
        step = (
            "Install them again, in an environment of their own: pip install --upgrade"
            f' "{_PACKAGE}".'
        )
        raise Concern("; ".join(sorted(set(wrong))), step, "failed")
    return (
        f"{_PACKAGE} {version(_PACKAGE)} on Python {sys.version.split()[0]}, {needed} packages as"
        " required"
    )


def check_lake(url: str | None, opened: list[ObjectStore]) -> str:
    """Check that the lake's store can be read and written, honours conditional writes, and that its
    clock is right; return what was found.

    A folder that does not exist is only checked for whether it can be created. Appends the store to
    `opened`, for later checks.
    """
    store = open_store(url, LakeSettings())
    exists = lake_in(store).exists()
    if not exists and not store.url.startswith("s3://"):
        if not store.url.startswith("memory:"):
            _check_new_folder(store.url)
        opened.append(store)
        return f"there is none at {store.url} yet; the first write creates it"
    probe_conditional_writes(store)
    key = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    began = time.perf_counter()
    now = utc_now()
    store.put(key, b"doctor")
    try:
        head = store.head(key)
        listed = [item.key for item in store.list(PROBE_PREFIX)]
        read = store.get(key).data
        milliseconds = 1000 * (time.perf_counter() - began) / 4  # of each of the four requests
    finally:
        store.delete(key)
    if head is None or read != b"doctor" or key not in listed:
        raise Concern(
            f"{store.url} does not show an object that was just written",
            "Use another store.",
            "failed",
        )
    opened.append(store)
    about = f"{store.url}, {milliseconds:.0f} ms a request"
    if not exists:
        about += "; there is no lake yet"
    apart = (head.modified - now).total_seconds()
    if abs(apart) > _MOST_SECONDS_APART:
        raise Concern(
            f"{about}; its clock is {apart:+.0f} s from this machine's",
            "Let this machine follow a time server: leases and retention compare these clocks.",
        )
    return about


def _check_new_folder(url: str) -> None:
    """Raise ConfigurationError if a lake can't be created in this folder."""
    folder = Path(url)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        problem = f"there is no lake at {url} yet, and {folder} is not writable."
        step = "Give another folder (--lake, ADJUNCT_LAKE), or the right to write."
        raise ConfigurationError(problem, step, setting="--lake")


class _Versions(NamedTuple):
    """The versions of Python and of Adjunct in a process."""

    python: str
    package: str


def _versions_here() -> _Versions:
    """Return the versions in the process where this runs."""
    return _Versions(f"{sys.version_info.major}.{sys.version_info.minor}", version(_PACKAGE))


def worker_versions(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the versions of Python and of Adjunct in the process where this runs, once for each
    batch.
    """
    for _ in batches:
        yield pa.RecordBatch.from_pylist([_versions_here()._asdict()])


def check_spark(master: str | None, store: ObjectStore | None) -> str:
    """Check that a session starts, that its workers have this process's versions, and that Spark
    reads the lake; return what was found.
    """
    with session_scope(master=master, lake_url=None if store is None else store.url) as session:
        spark = session()
        with translate_spark_errors():
            rows = (
                spark.range(0, 2, 1, 2)
                .mapInArrow(worker_versions, "python string, package string")
                .collect()
            )
        found = f"Spark {spark.version} at {spark.conf.get('spark.master')}"
        here = _versions_here()
        others = {_Versions(row.python, row.package) for row in rows} - {here}
        if others:
            other = min(others)
            raise Concern(
                f"{found}: workers run Python {other.python} with {_PACKAGE} {other.package}, this"
                f" is {here.python} with {here.package}",
                "Give executors the same environment: PYSPARK_PYTHON, or an archive of it"
                " (spark.archives).",
                "failed",
            )
        found += ", workers have this Python and package"
        if store is None or store.url.startswith("memory:"):
            return found
        return f"{found}; {_check_spark_reads(spark, store)}"


def _check_spark_reads(spark: SparkSession, store: ObjectStore) -> str:
    """Check that Spark reads a file that this process has just written to the store; return what
    was found. Without a lake nothing is written.
    """
    import pyarrow.parquet as pq

    if not lake_in(store).exists():
        return "the lake is not there yet"
    folder = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": [1, 2, 3]}), sink)
    key = f"{folder}/rows.parquet"
    store.put(key, sink.getvalue().to_pybytes())
    try:
        with translate_spark_errors():
            count = spark.read.schema("n bigint").parquet(store.spark_uri(key)).count()
    finally:
        store.delete(key)
    if count != 3:
        raise Concern(
            f"Spark reads {count} of 3 records from {store.url}",
            "Check its S3A settings.",
            "failed",
        )
    return "it reads the lake"


def check_dagster() -> str:
    """Check that Dagster's instance opens, and whether its daemon runs; return what was found."""
    home = os.environ.get("DAGSTER_HOME")
    if not home:
        step = (
            "Set DAGSTER_HOME to a folder with a dagster.yaml, or serve the UI with adjunct ui,"
            " which has its own."
        )
        raise Concern(
            "DAGSTER_HOME is not set: runs leave nothing, and no schedule or sensor works", step
        )
    import dagster as dg

    from dagster_adjunct.orchestration.code_location.pools import FREE_SLOTS, keeps_slots

    with dg.DagsterInstance.get() as instance:
        found = f"version {dg.__version__}, {type(instance.run_storage).__name__} in {home}"
        concerns = []
        beats = [heartbeat.timestamp for heartbeat in instance.get_daemon_heartbeats().values()]
        if not beats or time.time() - max(beats) > _HEARTBEAT_SECONDS:
            step = (
                "Start it, with the same DAGSTER_HOME: dagster-daemon run (adjunct ui and dg dev"
                " start their own)."
            )
            problem = "its daemon does not run, so schedules and sensors start nothing"
            concerns.append(Concern(problem, step))
        if keeps_slots(instance):
            problem = (
                "a run whose process is killed keeps its slot in a pool, and the next one waits for"
                " it for ever"
            )
            concerns.append(Concern(problem, f"{FREE_SLOTS}."))
        if concerns:
            raise Concern(
                "; ".join([found, *(concern.found for concern in concerns)]),
                " ".join(concern.next_step for concern in concerns),
            )
        return f"{found}, the daemon runs"


def check_application(reference: str, loaded: list[Application]) -> str:
    """Check that the application can be imported; return what it has, and append it to `loaded`."""
    loaded.append(load_application(reference))
    app = loaded[0]
    return (
        f"{app.name}: {len(app.datasets)} dataset(s), {len(app.operators)} operator(s),"
        f" {len(app.tables)} table(s)"
    )


def check_plan(app: Application, lake: Lake, *, parse: bool) -> str:
    """Check that the application's streams can be reached and its plan is valid; return what was
    found. `parse` lets Spark check the SQL.
    """
    planned = plan_application(app, lake=lake)
    if parse:
        check_syntax(app)
    if planned.stored_notes:
        first, *others = planned.stored_notes
        more = f" (and {len(others)} more)" if others else ""
        raise Concern(f"{first}{more}", "See the notes of adjunct plan MODULE:APP.")
    edges = [edge for edge in planned.streams if edge.role != "intermediate"]
    reached = ", ".join(f"{edge.name} ({edge.partitions or 'one copy'})" for edge in edges)
    return f"the plan is proven; partitions of {reached}" if reached else "the plan is proven"


def check_time_zones(zones: Sequence[str], master: str | None) -> str:
    """Check that the rules of these time zones are the same for Spark's Java and for Python; return
    what was found.
    """
    with session_scope(master=master) as session:
        spark = session()
        for zone in zones:
            differing_spans(spark, zone)  # raises an error for a difference that matters
        java = java_database(spark)
        python = python_database(zones[0])
    return f"the rules of {', '.join(zones)} are the same by {java} and by Python's {python}"


def check_name_in_use(app: Application, lake: Lake) -> str:
    """Check that a run may start under the application's name; return what was found."""
    if not lake.exists():
        return f"{app.name} has not run yet"
    state = application_state(lake, app.name)
    check_not_renamed(app.name, state)
    if others := describe_other_writers(lake, app):
        raise Concern(
            others[0],
            "Rename it, or see what else a first run may do: docs/applications.md, Another name.",
        )
    return f"{app.name} has run {state.batch} batch(es)"


def check_files(source: FileSource) -> str:
    """Check that the folder from which a dataset gets its versions exists; return its URL."""
    tree = open_tree(source.url)
    absent = tree.absence()
    if absent:
        found = f"{tree.url} holds no files: {absent}; the dataset waits for a first version"
        raise Concern(found, "Correct the url of its FileSource, or deliver a version there.")
    return tree.url


def check_table(app: Application, table: RemoteTable[Any, Any, Any]) -> str:
    """Check that a table's functions can be opened: that they reach its store, and find the
    declared columns there, with the rights for what the application does.

    Also check that the store's settings keep what is written. Return the functions as text.
    """
    uses = [used for used in list_uses(app) if used.table.name == table.name]
    conditions = Conditions(table.newest_by, table.idempotent)
    notes = list[str]()
    functions = dict.fromkeys(filter(None, (table.read_function, table.write_function)))

    async def open_and_close() -> None:
        """Open each function, check its uses, and collect notes about its store's settings."""
        for function in functions:
            try:
                await function.open()
                for used in uses:
                    if used.function is function:
                        await function.check(used.use)
                if function is table.write_function:
                    notes.extend(await function.check_settings(conditions, fenced=table.fenced))
            finally:
                await function.close()

    asyncio.run(open_and_close())
    if notes:
        raise Concern(notes[0], "Or accept that records may be lost.")
    return ", ".join(map(repr, functions))
