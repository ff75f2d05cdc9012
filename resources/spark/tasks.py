"""Code in Spark's tasks: functions over Arrow data, and errors of Adjunct on their way to the
driver.

Spark wraps an exception of a task into exceptions of its own that contain its text. So an error is
encoded as text, and `translate_spark_errors` decodes it in the driver. Spark's errors about damaged
files and lost workers become errors of Adjunct too.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.aws import STALE_CODES
from dagster_adjunct.resources.errors import (
    OF_FILES,
    AdjunctError,
    ManifestMismatchError,
    PlanningError,
    StoreUnavailableError,
    TransientError,
    file_error,
)
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.schemas.records import frame_from_arrow
from dagster_adjunct.resources.schemas.schema import named_column, quote_name
from dagster_adjunct.resources.schemas.types import type_from_spark
from dagster_adjunct.resources.spark.jvm import spark_type_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType

T = TypeVar("T")
STACK_SIZE = "16m"
"""The stack size of threads in Spark's JVMs: enough for a chain of 1,500 operators."""
# The text of an encoded error. It is readable, because Spark's executors log it.
_ENCODED = (
    "adjunct-error[{error}] {problem} [next step] {next_step} [facts] {facts} [adjunct-error]"
)
_ENCODED_PATTERN = re.compile(
    r"adjunct-error\[(?P<error>\w+)\] (?P<problem>.*?) \[next step\] (?P<next_step>.*?)"
    r"(?: \[facts\] (?P<facts>.*?))? \[adjunct-error\]",
    re.S,
)
# The end of a Python worker's traceback for an error of Adjunct that was not encoded: its class and
# message.
_RAISED = re.compile(
    rf"^{re.escape(errors.__name__)}\.(?P<name>\w+): (?P<message>.*)", re.MULTILINE | re.DOTALL
)
# How Spark names a file that it can't read.
_UNREAD = re.compile(
    r"\[FAILED_READ_FILE\.\w+\] Encountered error while reading file (?P<file>\S+?)\.\s"
)
# How S3A reports a refused request: the code of the answer is last, "null" for a HEAD, whose answer
# has no body.
_REFUSED = re.compile(
    r"^(?:Caused by: |: )[\w.]+Exception: [^\n]*S3Exception: [^\n]*\(Service: S3, Status Code:"
    r" (?P<status>40[013]), "
    r"[^\n]*?\):(?P<code>\w+)",
    re.MULTILINE,
)
# Messages in errors of S3A about requests that failed because of the network or the server.
_CUT_OFF = re.compile(
    r"^(?:Caused by: |:"
    r" )(?:java\.net\.\w+Exception|javax\.net\.ssl\.\w+Exception|java\.io\.InterruptedIOException"
    r"|org\.apache\.http\.[\w.]*(?:ConnectionClosed|NoHttpResponse|ConnectTimeout|TruncatedChunk"
    r"|HttpHostConnect|ConnectionPoolTimeout|MalformedChunkCoding)Exception"
    r"|org\.apache\.hadoop\.net\.ConnectTimeoutException"
    r"|org\.apache\.hadoop\.fs\.s3a\.AWS(?:Status500|ServiceThrottled|NoResponse|ApiCallTimeout)"
    r"Exception"
    r"|software\.amazon\.awssdk\.core\.exception\.(?:ApiCall\w*Timeout|Retryable)Exception"
    r"|software\.amazon\.awssdk\.core\.exception\.SdkClientException(?=: Unable to execute HTTP"
    r" request)"
    r"): (?P<cause>[^\n]*)",
    re.MULTILINE,
)
# The JVM's message where a task's Python process has closed its connection.
_WORKER_LOST = "Python worker exited unexpectedly"
# The message if a Spark Connect server has ended, or another one was started in its place.
_SERVER_LOST = re.compile(
    r"\[RETRIES_EXCEEDED\]|\[INVALID_HANDLE\.SESSION_\w+\]|StatusCode\.UNAVAILABLE"
)
# The JVM's message where a plan is nested too deeply.
_TOO_DEEP = re.compile(r"^(?:Caused by: |: )java\.lang\.StackOverflowError", re.MULTILINE)
# Messages of the JVM or a Python worker about a full or read-only disk for Spark's temporary files.
_NO_ROOM = re.compile(
    r"(?:java\.(?:nio\.file\.FileSystemException|io\.(?:IOException|FileNotFoundException))"
    r"|OSError):"
    r" (?P<cause>[^\n]*?"
    r"(?:No space left on device|Disk quota exceeded|Read-only file system)[^\n]*)"
)
_DAMAGED = re.compile(
    r"^Caused by:"
    r" (?:java\.lang\.\w+|java\.io\.(?:EOF|FileNotFound)Exception"
    r"|[\w.$]*\b(?:parquet|zstd)\b[\w.$]*"
    r"|[\w.]+\.SchemaColumnConvertNotSupportedException): (?P<cause>[^\n]*)",
    re.MULTILINE,
)


def encode_task_errors(items: Iterator[T]) -> Iterator[T]:
    """Yield these items; raise an error of Adjunct encoded as text, for `translate_spark_errors`
    in the driver.
    """
    try:
        yield from items
    except AdjunctError as error:
        document = error_to_json(error)
        raise RuntimeError(
            _ENCODED.format(**document | {"facts": json.dumps(document["facts"])})
        ) from None


def error_to_json(error: AdjunctError) -> dict[str, Any]:
    """Return the error as plain values for `error_from_json`, for tasks that return errors instead
    of failing.

    Only fields that JSON can hold are included: the keys of a record, for example, may have any
    type.
    """
    kind = error_class_name(error)
    facts = {}
    for name, value in error.facts.items():
        if _is_plain(value):
            facts[name] = value
    return {"error": kind, "problem": error.problem, "next_step": error.next_step, "facts": facts}


def error_from_json(document: Mapping[str, Any]) -> AdjunctError:
    """Return the error that `error_to_json` has described, with the fields that its class has.

    It is an AdjunctError where this process has no such class.
    """
    kind = _error_class(document["error"]) or AdjunctError
    known = {field.name for field in fields(kind)}
    facts = {}
    for name, value in document["facts"].items():
        if name in known:
            facts[name] = _frozen(value)
    return kind(document["problem"], document["next_step"], **facts)


def _is_plain(value: object) -> bool:
    """Whether JSON can hold a value: a text, a number, or a tuple of such values."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float)


def _frozen(value: Any) -> Any:
    """Return a value from JSON as the fields of errors have it: tuples for lists."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return value


def error_class_name(error: AdjunctError) -> str:
    """Return the name of the error's class, or of its nearest base class in resources/errors.py."""
    return next(
        kind.__name__ for kind in type(error).__mro__ if _error_class(kind.__name__) is kind
    )


def _error_class(name: str) -> type[AdjunctError] | None:
    """Return the class of this name in resources/errors.py, None if no error there has it."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, AdjunctError):
        return kind
    return None


def raise_error_column(
    kind: type[AdjunctError], problem: Column, next_step: str, **facts: str
) -> Column:
    """Return a column that raises this error when it is evaluated: use it for rows that must not
    exist.

    `problem` is a column, so that the error may state values of the row.
    """
    text = _ENCODED.format(
        error=kind.__name__, problem="\0", next_step=next_step, facts=json.dumps(facts)
    )
    before, after = text.split("\0")  # no other part has this character
    return F.raise_error(F.concat(F.lit(before), problem, F.lit(after)))


@contextlib.contextmanager
def translate_spark_errors() -> Iterator[None]:
    """Raise errors of Adjunct instead of Spark's errors that contain or correspond to them; others
    pass unchanged.

    A context, also used as a decorator of public functions.
    """
    try:
        yield
    except Exception as error:
        ours = find_adjunct_error(error)
        if ours is None or ours is error:
            raise
        raise ours from error


def find_adjunct_error(error: BaseException) -> AdjunctError | None:
    """Return the error of Adjunct that this error is, contains, or corresponds to; None for
    other errors.

    Only errors of PySpark and py4j may contain one, in their text. Others correspond to one if they
    are about the files and limits of this process.
    """
    if isinstance(error, AdjunctError):
        return error
    if isinstance(error, OSError) and error.errno in OF_FILES:
        if error.filename:
            what = "a temporary file"
        else:
            what = "a temporary file, or the output of this command"
        return file_error(error, error.filename or tempfile.gettempdir(), what)
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    text = str(error)
    return decode_error(text) or _corresponding_error(text)


def lost_process_error(problem: str) -> TransientError:
    """Return the error for a batch that failed because one of Spark's processes has ended."""
    return TransientError(
        problem,
        "Run it again: the batch is repeated as planned. If it keeps happening, check the memory"
        " limits of the machine and of its container, and the system log for killed processes.",
    )


def _read_error(text: str) -> AdjunctError | None:
    """Return the error for a message about a read from the store that failed.

    That is a StoreUnavailableError for an interrupted request, and a ManifestMismatchError for a
    damaged file. None for other messages.
    """
    unread = _UNREAD.search(text)
    file = None
    if unread:
        file = unread["file"]
    cut_off = _CUT_OFF.search(text)
    if cut_off:  # the object itself may be intact
        if file:
            what = f"Spark's read of {file}"
        else:
            what = "Spark's request to the store"
        problem = f"{what} was interrupted: {cut_off['cause'].rstrip('.')}."
        return StoreUnavailableError(problem, "Run it again.", url=file)
    damaged = _DAMAGED.search(text)
    if not file or not damaged:
        return None
    step = (
        "The object is missing or damaged: restore it from a backup, or serve an earlier version"
        " (adjunct dataset rollback NAME --reason …). To list all such objects of a dataset:"
        " adjunct dataset verify NAME."
    )
    return ManifestMismatchError(f"Spark can't read {file}: {damaged['cause']}.", step, url=file)


def _corresponding_error(text: str) -> AdjunctError | None:
    """Return the error for a known message of Spark, of the JVM or of a Python worker, found in
    this text, or None.

    Of several messages, the first in this order counts: a lost process, a refused request, a failed
    read, a plan that is too deep, an error of Adjunct that was not encoded, a full disk.
    """
    if _WORKER_LOST in text:
        return lost_process_error(
            "a Python worker of Spark ended in the middle of its task: it was killed, ran out of"
            " memory, or crashed."
        )
    if _SERVER_LOST.search(text):
        return TransientError(
            "the Spark Connect server does not answer, or has been started again in the middle of a"
            " run.",
            "See that it runs, and run it again: the batch is repeated as planned.",
        )
    refused = _REFUSED.search(text)
    may_be_stale = refused is not None and refused["code"] in (*STALE_CODES, "null")
    if refused and may_be_stale:
        return _stale_error(refused["status"], refused["code"], _UNREAD.search(text))
    read_error = _read_error(text)
    if read_error is not None:
        return read_error
    if _TOO_DEEP.search(text):
        return PlanningError(
            "Spark's plan of a batch is nested too deeply for the stack of its JVM: there are too"
            " many operators in a row, or an expression has too many parts.",
            "Split the application: send intermediate results to a stream, and read that in"
            f" another application. Or give the session a larger stack than {STACK_SIZE}, with"
            " -Xss128m in spark.driver.extraJavaOptions and spark.executor.extraJavaOptions.",
        )
    raised = _RAISED.search(text)
    if raised and (kind := _error_class(raised["name"])):
        # The JVM's stack trace follows the message.
        message = re.split(
            r"\n\s*(?:\n|at |JVM stacktrace|SQLSTATE)", raised["message"], maxsplit=1
        )[0]
        return kind(message.strip())
    full = _NO_ROOM.search(text)
    if full:  # the disk for temporary files of shuffles and sorts
        cause = full["cause"].rstrip(".")
        return StoreUnavailableError(
            f"Spark could not write a file: {cause}.",
            "Free some space, or give Spark another folder for temporary files (SPARK_LOCAL_DIRS or"
            " spark.local.dir), then run it again. Nothing was committed and nothing is lost.",
            url=cause.partition(": ")[0] if cause.startswith("/") else None,
        )
    return None


def _stale_error(status: str, code: str, unread: re.Match[str] | None) -> AdjunctError:
    """Return the error for a request of S3A's that S3 refused for now, with this code ("null" for
    an unknown one).

    `unread` has the file that Spark was reading, or is None if it read none.
    """
    answer = f"{status} {code}"
    reason = "the credentials have expired, or a clock is wrong"
    if code == "null":
        answer = f"{status} to a HEAD, which states no code"
        reason = f"{reason}, or the credentials do not allow it"
    step = (
        "Renew the credentials of Spark's driver and executors, then run it again. adjunct doctor"
        " says what is wrong."
    )
    problem = f"Spark's request to the store was answered {answer}: {reason}."
    return StoreUnavailableError(problem, step, url=unread["file"] if unread else None)


def first_message_line(error: Exception) -> str:
    """Return the first line of a Spark error that is a message, and not py4j's description of
    the call; the name of the error's class if there is none.
    """
    for line in str(error).splitlines():
        useful = line.strip().removeprefix(": ")
        if useful and not useful.startswith("An error occurred while calling "):
            return useful
    return type(error).__name__


def decode_error(text: str) -> AdjunctError | None:
    """Return the error that is encoded in the text of another error, or None."""
    match = _ENCODED_PATTERN.search(text)
    if match is None:
        return None
    try:
        facts = json.loads(match["facts"] or "{}")
    except ValueError:
        # Not an error of a row: Spark quotes a plan that contains a `raise_error_column`.
        facts = {}
    return error_from_json({**match.groupdict(), "facts": facts})


# Functions over Arrow data, for frames whose columns may have any name.
#
# Spark's own `mapInArrow` and `applyInArrow` look up columns by name: they take a dot in a name for
# a path into a struct, and the name `*` for all columns.


def map_in_arrow(
    frame: DataFrame,
    task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: StructType | str,
) -> DataFrame:
    """Return the frame of what `task` yields for the batches of each partition; like Spark's
    `mapInArrow`.
    """
    task = _with_limited_batches(frame, task)
    names = frame.columns
    if not _needs_other_names(names):
        return frame.mapInArrow(task, schema)

    def named(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from task(batch.rename_columns(names) for batch in batches)

    return frame.toDF(*names_by_position(names)).mapInArrow(named, schema)


def apply_in_arrow(
    frame: DataFrame, key: Sequence[str], task: Callable[[Any], Any], schema: StructType | str
) -> DataFrame:
    """Return the frame of what `task` returns for the rows of each key, as a table; like Spark's
    `applyInArrow`.

    The task gets the rows of a key as one table, so small batches need not be gathered.
    """
    _limit_batches(frame)
    names = frame.columns
    if not _needs_other_names(names):
        return frame.groupBy(*[F.col(name) for name in key]).applyInArrow(task, schema)

    def named(rows: pa.Table) -> pa.Table:
        return task(rows.rename_columns(names))

    plain = frame.toDF(*names_by_position(names))
    return plain.groupBy(*[F.col(f"c{names.index(name)}") for name in key]).applyInArrow(
        named, schema
    )


TASK_BYTES = 64 * 1024 * 1024
"""How many bytes of files a task reads at most, but for a part that can't be cut."""
_LEAST_BYTES = 16 * 1024 * 1024
_TASKS = 32
_MOST_PARTS = 256


def share_among_tasks(parts: Sequence[T], size_of: Callable[[T], int]) -> list[list[T]]:
    """Return which parts of files each task reads, in order: some 32 tasks, so that the cores of a
    machine end together.

    A task gets at most 16 to 64 MiB, and at most 256 parts. A larger part is alone in its task.
    """
    total = sum(map(size_of, parts))
    most = min(max(total // _TASKS, _LEAST_BYTES), TASK_BYTES)
    tasks: list[list[T]] = []
    room = 0  # bytes that the last task may still get
    for part in parts:
        size = size_of(part)
        if not tasks or size > room or len(tasks[-1]) >= _MOST_PARTS:
            tasks.append([])
            room = most
        tasks[-1].append(part)
        room -= size
    return tasks


def read_in_tasks(
    spark: SparkSession,
    parts: Sequence[T],
    read: Callable[[T], Iterator[pa.RecordBatch]],
    columns: Sequence[tuple[str, str]],
) -> DataFrame:
    """Return a frame of the batches that `read` yields for each of `parts`, in a Spark task for
    each part.

    `columns` are the (name, type) of the batches' columns.
    """
    names = names_by_position(columns)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the parts whose numbers are in these batches."""
        numbers: list[int] = []
        for batch in batches:
            numbers += batch.column(0).to_pylist()
        for number in numbers:
            for batch in read(parts[number]):
                yield batch.rename_columns(names)

    tasks = max(1, len(parts))  # Spark accepts no frame of 0 partitions
    return convert_in_tasks(spark.range(0, len(parts), 1, tasks), run, columns)


def convert_in_tasks(
    frame: DataFrame,
    convert: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    columns: Sequence[tuple[str, str]],
) -> DataFrame:
    """Return the frame of what `convert` yields for the batches of each partition, with these
    (name, type) as columns.

    The columns of these batches, and of those that it yields, are identified by position: they are
    named c0, c1, … (`names_by_position`).
    """
    convert = _with_limited_batches(frame, convert)
    ddl = ", ".join(f"c{index} {kind}" for index, (_, kind) in enumerate(columns))
    plain = frame.toDF(*names_by_position(frame.columns))
    made = plain.mapInArrow(lambda batches: encode_task_errors(convert(batches)), ddl)
    return made.toDF(*[name for name, _ in columns])


_BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_UNLIMITED = 2**31 - 1
_LIST_ROWS = 512


def _limit_batches(frame: DataFrame) -> bool:
    """Let the session limit batches for Python by 512 records, and no longer by their bytes, if
    the frame has arrays or maps. Return whether this limit holds for the frame.

    The limit stays in force for the session; one that already asks for smaller batches keeps its
    settings. For a limit in bytes, Spark asks for the size of the batch after each record. Arrow
    then goes through all vectors within nested ones, and a list writes the offsets of all nulls at
    its end again: the time grows with the square of the batch.
    """
    if not _has_lists(frame.schema):
        return False
    conf = frame.sparkSession.conf
    if int(conf.get(_BATCH_ROWS) or 0) > _LIST_ROWS:
        conf.set(_BATCH_ROWS, _LIST_ROWS)
        conf.set(_BATCH_BYTES, _UNLIMITED)
        return True
    was_set_before = conf.get(_BATCH_BYTES) == str(_UNLIMITED)
    return was_set_before


def _has_lists(kind: DataType) -> bool:
    """Whether a type of Spark is an array or a map, or has one within its structs."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, StructType):
        return any(_has_lists(field.dataType) for field in kind)
    return isinstance(kind, ArrayType | MapType)


_Task: TypeAlias = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]
_GATHERED_ROWS = 16_384
_GATHERED_BYTES = 64 * 1024 * 1024


def _with_limited_batches(frame: DataFrame, task: _Task) -> _Task:
    """Limit the frame's batches, and return the task for them.

    The task gets the rows of several limited batches together, since much of its work costs as much
    for a small batch as for a large one. Where no limit is needed, it is the task itself.
    """
    if not _limit_batches(frame):
        return task
    return lambda batches: task(_gather(batches))


def _gather(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of batches in fewer, larger batches."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= _GATHERED_ROWS or size >= _GATHERED_BYTES:
            yield from _join_batches(waiting)
            waiting = []
            rows = size = 0
    yield from _join_batches(waiting)


def _join_batches(batches: Sequence[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
    """Return the rows of these batches as one batch, or as several where Arrow can't join them."""
    if not batches:
        return ()
    joined: list[pa.RecordBatch] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


def _needs_other_names(names: Sequence[str]) -> bool:
    """Whether Spark would take one of these column names for a path or for all columns."""
    return any(name == "*" or "." in name or "`" in name for name in names)


def names_by_position(columns: Sequence[object]) -> list[str]:
    """Return the names c0, c1, … for as many columns."""
    return [f"c{index}" for index in range(len(columns))]


# Moving few rows between this process and Spark.


def small_frame(session: SparkSession, rows: pa.Table) -> DataFrame:
    """Return a small Arrow table as a frame of one partition."""
    if rows.num_rows:
        return frame_from_arrow(session, rows).coalesce(1)
    # Connect rejects empty tables.
    return session.createDataFrame([], spark_type_of(rows.schema)).coalesce(1)


# Not within a comment of a column: its quotes are escaped in JSON.
_NOT_NULL = re.compile(r'(?<!\\)"(nullable|containsNull|valueContainsNull)":false')
_TEXTS = "__texts"


@translate_spark_errors()
def fetch_small(frame: DataFrame, largest: int) -> pa.Table | None:
    """Return the rows of a frame that has few of them, as an Arrow table with its columns.

    None if the values of any row have more than `largest` bytes in total. Only values that may be
    long count, nested and binary ones as text.
    """
    from pyspark.sql.types import StructType

    # `toArrow` fails for a null struct with a member that is declared not null, so all members are
    # declared nullable.
    loose = StructType.fromJson(json.loads(_NOT_NULL.sub(r'"\1":true', frame.schema.json())))
    changed = {}
    texts: dict[str, str] = {}  # by column that may have long values: `_text_of` it
    members = []  # of the struct that has the values of these columns
    for field, as_nullable in zip(frame.schema.fields, loose.fields, strict=True):
        if field.dataType != as_nullable.dataType:
            changed[field.name] = named_column(field.name).cast(as_nullable.dataType)
        text = _text_of(as_nullable)
        if text is None:
            continue
        member = quote_name(field.name)
        if not field.nullable:  # makes it nullable
            member = f"if(false, null, {member})"
        members.append(f"'c{len(texts)}', {member}")
        texts[field.name] = text
    if changed:
        frame = frame.withColumns(changed)
    if not texts:
        return frame.toArrow()
    # Spark's process would run out of memory before `toArrow` failed, so Spark leaves out the
    # values of large rows: all values are in one struct, which is null for a large row.
    is_large = f"octet_length(concat_ws('', {', '.join(texts.values())})) > {largest}"
    others = [name for name in frame.columns if name not in texts]
    long_values = f"if({is_large}, null, named_struct({', '.join(members)})) as {_TEXTS}"
    rows = frame.selectExpr(*map(quote_name, others), long_values).toArrow()
    if rows.column(_TEXTS).null_count:
        return None
    arrays = [*rows.columns[:-1], *rows.select([_TEXTS]).flatten().columns]
    columns = dict(zip([*others, *texts], arrays, strict=True))
    return pa.table({name: columns[name] for name in frame.columns})


def _text_of(field: StructField) -> str | None:
    """Return an SQL expression for text that is about as long as a column's values.

    None where all values have few bytes, and for hidden columns of text or bytes.
    """
    kind = type_from_spark(field.dataType)
    name = quote_name(field.name)
    if kind.startswith(("array<", "map<", "struct<", "variant")):
        return f"to_json(named_struct('value', {name}))"
    if field.name.startswith("__") or not kind.startswith(("binary", "string", "char", "varchar")):
        return None
    if kind == "string":
        return name
    return f"cast({name} as string)"
