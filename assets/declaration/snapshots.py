"""Initial snapshots of unbounded datasets: the table as it was at a recorded position of its change
stream.

A change in the snapshot may be repeated on the stream, which does not alter the result. No change
may be missing from both, so the position is always determined before the rows are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dagster_adjunct.assets.declaration.extractors import value_classes
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    DatasetError,
    SchemaMismatchError,
    TransientError,
)
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.exact_values import to_exact_array
from dagster_adjunct.resources.schemas.records import ArrowFrame, to_spark_frame
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.schemas.types import arrow_type, is_nested
from dagster_adjunct.resources.spark.tasks import first_message_line
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.table_backends import postgres_connection
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    import psycopg
    from pyspark.sql import DataFrame, SparkSession

Position = Mapping[Any, str | int] | tuple[tuple[str, str], ...]
"""The next offset of each partition, which is named in full ("lake.accounts.0") or by its
number.
"""
_POSITION_FILE = "position.json"
OR_FUNCTION = "a function that returns it"


class Named(Protocol):
    """A dataset: errors have its name."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows with the dataset's columns, and the next offset to read for each partition of its
    stream.

    `rows` may have further columns, which are ignored, and narrower types. Arrow tables are read
    once, in order. `close` is called after they have been read, or after an error; by default it
    does nothing.
    """

    rows: DataFrame | Iterable[pa.Table]
    position: Mapping[SystemStreamPartition, str]
    close: Callable[[], None] = lambda: None


@validated
@runtime_checkable
class InitialLoad(Protocol):
    """Loads the whole table at once. A frozen value without secrets."""

    def load(
        self,
        spec: Any,
        schema: Schema,
        ssps: tuple[SystemStreamPartition, ...],
        spark: SparkSession,
    ) -> Snapshot:
        """Return the table and the position at which its stream continues.

        `spec` is the `AdjunctDataset`, `schema` are its columns, `ssps` the partitions of its
        stream.

        A change in the snapshot may be repeated on the stream, but none may be missing from both.
        """
        ...

    def describe(self) -> str:
        """Return a description in one line, without secrets."""
        ...


@validated
@dataclass(frozen=True, slots=True)
class ParquetSnapshot:
    """Parquet files: one, or all `*.parquet` in a folder, at a path, `file:///…` or
    `s3://BUCKET/PREFIX`.

    `position` is the next offset of each partition, {"lake.accounts.0": "123", …}, or the name of a
    JSON file with that next to the files.
    """

    url: str
    position: Position | str = _POSITION_FILE

    def __post_init__(self) -> None:
        if not self.url:
            raise ConfigurationError(
                f"a Parquet snapshot has url={self.url!r}: expected a path or URL.",
                "Name the file, or the folder of the files.",
                argument="url",
            )
        if not isinstance(self.position, str) or not self.position:
            freeze_position(
                self,
                "a Parquet snapshot",
                self.position,
                "the name of a JSON file next to the files",
            )

    def load(
        self,
        spec: Named,
        schema: Schema,
        ssps: tuple[SystemStreamPartition, ...],
        spark: SparkSession,
    ) -> Snapshot:
        what = f"dataset {spec.name!r}: {self.describe()}"
        if isinstance(self.position, str):
            position = self._read_position(spec, what, spark)
        else:
            position = dict(self.position)
        reader = spark.read
        if not self._is_file:
            reader = reader.option("pathGlobFilter", "*.parquet")
        read = partial(reader.parquet, _for_spark(self.url))
        rows = _translate_read_errors(spec, what, read)
        return Snapshot(rows, resolve_position(spec, what, position, ssps))

    def describe(self) -> str:
        return f"Parquet files at {self.url}"

    @property
    def _is_file(self) -> bool:
        """Whether the URL is that of one file, not of a folder."""
        return self.url.endswith(".parquet")

    def _read_position(self, spec: Named, what: str, spark: SparkSession) -> Position:
        """Return the position in the file that `position` names, in the folder of the Parquet
        files. Raises DatasetError.
        """
        url = str(self.position)
        if self._is_file:
            folder = self.url.rpartition("/")[0]
        else:
            folder = self.url.rstrip("/")
        if folder:  # "" for a file in the current folder
            url = f"{folder}/{url}"

        def read() -> Any:
            return spark.read.text(_for_spark(url), wholetext=True).collect()

        rows = _translate_read_errors(spec, what, read)
        position = None
        if rows:
            with suppress(ValueError):
                position = json.loads(rows[0].value)
        if not isinstance(position, dict):
            raise DatasetError(
                f"{what}: {url} is not a JSON object.",
                'Write it as {"system.stream.0": "OFFSET", …}, with one entry for each partition.',
                dataset=spec.name,
            )
        return position


@validated
@dataclass(frozen=True, slots=True)
class QuerySnapshot:
    """The result of Spark SQL or of a function of the session: for tables in other formats, or
    JDBC.

    `position` is the next offset of each partition, {"lake.accounts.0": "123", …}, or a function
    that returns it, which is called before the query runs.
    """

    sql: str | None = None
    query: Callable[[SparkSession], DataFrame | ArrowFrame] | None = None
    position: Position | Callable[[], Position] | None = None

    def __post_init__(self) -> None:
        if (self.sql is None) == (self.query is None) or self.position is None:
            raise ConfigurationError(
                "a query snapshot needs exactly one of sql and query, and a position.",
                'Write QuerySnapshot(sql="SELECT …", position={"lake.accounts.0": "123", …}).',
                argument="sql",
            )
        if self.sql is not None and not self.sql.strip():
            raise ConfigurationError(
                f"a query snapshot has sql={self.sql!r}: expected SQL.",
                "Write SELECT ….",
                argument="sql",
            )
        if not callable(self.position):
            freeze_position(self, "a query snapshot", self.position, OR_FUNCTION)

    def load(
        self,
        spec: Named,
        schema: Schema,
        ssps: tuple[SystemStreamPartition, ...],
        spark: SparkSession,
    ) -> Snapshot:
        what = f"dataset {spec.name!r}: {self.describe()}"
        position = resolve_position(spec, what, _given_position(spec, what, self.position), ssps)
        query: str | Callable[[], object]
        if self.query is None:
            query = str(self.sql)
        else:
            query = partial(
                call_user_function, spec, what, "query function", partial(self.query, spark)
            )
        return Snapshot(run_query(spec, what, spark, query), position)

    def describe(self) -> str:
        if self.query is None:
            return f"query ({self.sql})"
        return f"query {getattr(self.query, '__name__', 'function')}"


def resolve_position(
    spec: Named, what: str, given: Any, ssps: Iterable[SystemStreamPartition]
) -> dict[SystemStreamPartition, str]:
    """Return the next offset of every partition in `ssps`, from `given`, a mapping or pairs
    (partition, offset).

    A partition is named in full ("lake.accounts.0") or by its number. Raises DatasetError for an
    invalid position, and if a partition is missing, unknown or named twice.
    """
    pairs = _pairs(given)
    if pairs is None:
        raise DatasetError(
            f"{what}: its position is {given!r}: expected the next offset of each partition.",
            'Give a mapping, as {"lake.accounts.0": "123", …}.',
            dataset=spec.name,
        )
    ssp_by_name: dict[str, SystemStreamPartition] = {}  # by each of its two names
    for ssp in ssps:
        ssp_by_name |= {str(ssp): ssp, str(ssp.partition): ssp}
    offsets: dict[SystemStreamPartition, str] = {}
    unknown = []
    for name, offset in pairs:
        if not _is_offset(offset):
            raise offset_error(DatasetError, what, name, offset)
        if str(name) in ssp_by_name:
            offsets[ssp_by_name[str(name)]] = str(offset)
        else:
            unknown.append(str(name))
    missing = sorted(map(str, set(ssp_by_name.values()) - offsets.keys()))
    problems = []
    if missing:
        problems.append(f"{', '.join(missing)} missing")
    if unknown:
        problems.append(f"{', '.join(sorted(unknown))} unknown")
    if not problems and len(offsets) != len(pairs):
        problems.append("a partition occurs twice")
    if problems:
        raise DatasetError(
            f"{what}: its position must give the next offset of every partition of the stream, each"
            f" once: {'; '.join(problems)}.",
            "Record the next offset of each partition, also of those without records.",
            dataset=spec.name,
        )
    return offsets


def _given_position(spec: Named, what: str, position: Any) -> Any:
    """Return the declared position, or what the declared function returns."""
    if callable(position):
        return call_user_function(spec, what, "position function", position)
    return position


# the last one is that of PEP 249
_CONNECTION_ERRORS = {"ConnectionError", "TimeoutError", "OperationalError"}


def call_user_function(spec: Named, what: str, function: str, call: Callable[[], Any]) -> Any:
    """Return the result of a user's function. Raises DatasetError for its errors; an AdjunctError
    propagates.

    Raises TransientError if a connection fails or breaks, which the names of the error's classes
    tell.
    """
    try:
        return call()
    except AdjunctError:
        raise
    except Exception as error:
        problem = (
            f"{what}: its {function} failed: {type(error).__name__}: {first_message_line(error)}"
        )
        if not _CONNECTION_ERRORS.isdisjoint(cls.__name__ for cls in type(error).__mro__):
            raise TransientError(
                problem, "See that the server answers, and run it again."
            ) from error
        raise DatasetError(
            problem, "Fix the function.", dataset=spec.name, function=function
        ) from error


def _pairs(given: Any) -> list[tuple[Any, Any]] | None:
    """Return a position as pairs (partition, offset), None if it is neither a mapping nor pairs."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        return None
    if isinstance(given, Mapping):
        return list(given.items())
    pairs = list(given)
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return None
    return pairs


def _is_offset(offset: object) -> bool:
    """Whether this is an offset: a text, or a whole number, as databases return it."""
    return isinstance(offset, str | Integral | Decimal) and not isinstance(offset, bool)


def offset_error(kind: type[AdjunctError], what: str, partition: Any, offset: Any) -> AdjunctError:
    """Return the error, of this class, for a position whose value is no offset."""
    return kind(
        f"{what}: its position has the offset {offset!r} for partition {partition}: expected an"
        " offset of the stream, such as '42'.",
        "Record offsets as the stream's system returns them.",
    )


def freeze_position(declared: Any, what: str, position: Any, other: str) -> None:
    """Store the position as sorted pairs of texts, so that the declaration is hashable.

    Raises ConfigurationError for one that is not a mapping or pairs; `other` is what may be given
    instead of one.
    """
    pairs = _pairs(position)
    if not pairs or not all(_is_offset(offset) for _, offset in pairs):
        raise ConfigurationError(
            f"{what} has position={position!r}: expected the next offset of each partition, or"
            f" {other}.",
            'Write position={"lake.accounts.0": "123", …}.',
            argument="position",
        )
    object.__setattr__(
        declared, "position", tuple(sorted((str(name), str(offset)) for name, offset in pairs))
    )


def run_query(
    spec: Named, what: str, spark: SparkSession, query: str | Callable[[], object]
) -> DataFrame:
    """Return the result of SQL, or of a function, as a Spark frame. Raises DatasetError."""
    if callable(query):
        rows = query()
    else:
        rows = _translate_read_errors(spec, what, partial(spark.sql, query))
    frame = to_spark_frame(rows, spark, what)
    if frame is None:
        raise DatasetError(
            f"{what} returned a {type(rows).__name__}.",
            "Return a Spark, pandas or Polars frame, or an Arrow table.",
            dataset=spec.name,
        )
    return frame


def _translate_read_errors(spec: Named, what: str, read: Callable[[], Any]) -> Any:
    """Return `read()`, with errors of Spark raised as DatasetError."""
    from pyspark.errors import PySparkException

    try:
        return read()
    except PySparkException as error:
        raise DatasetError(
            f"{what} can't be read: {first_message_line(error)}",
            "Correct the declaration, or its source.",
            dataset=spec.name,
        ) from error


def _for_spark(url: str) -> str:
    """Return a URL with the scheme that Spark has for S3."""
    return re.sub("^s3://", "s3a://", url)


@validated
@dataclass(frozen=True, slots=True)
class PostgresSnapshot:
    """The result of `query`, read in one repeatable-read transaction of the server that `dsn_env`
    names.

    `dsn_env` is the environment variable with the DSN; only the process that advances the dataset
    needs it. The position is read by `position_query`, which returns rows of (partition, offset),
    in the same transaction and before the rows; or it is a mapping or function, called before the
    transaction begins. At most `batch` rows are in memory at a time.
    """

    dsn_env: str
    query: str
    position_query: str | None = None
    position: Position | Callable[[], Position] | None = None
    batch: int = 10_000

    def __post_init__(self) -> None:
        has_position = (self.position_query is None) != (self.position is None)
        if not self.dsn_env or not self.query or not has_position:
            raise ConfigurationError(
                "a PostgreSQL snapshot needs dsn_env, query, and exactly one of position_query and"
                " position.",
                'Write PostgresSnapshot(dsn_env="ACCOUNTS_DSN", query="SELECT …",'
                ' position_query="SELECT …").',
                argument="position_query",
            )
        if "://" in self.dsn_env or "=" in self.dsn_env:
            raise ConfigurationError(
                "a PostgreSQL snapshot has a DSN as dsn_env, which would show its password in"
                " logs.",
                "Put the DSN into an environment variable, and pass the variable's name.",
                argument="dsn_env",
            )
        if self.batch < 1:
            raise argument_error(f"batch is {self.batch}", "1 or more rows", argument="batch")
        if self.position is not None and not callable(self.position):
            freeze_position(self, "a PostgreSQL snapshot", self.position, OR_FUNCTION)

    def load(
        self,
        spec: Named,
        schema: Schema,
        ssps: tuple[SystemStreamPartition, ...],
        spark: SparkSession,
    ) -> Snapshot:
        what = f"dataset {spec.name!r}: {self.describe()}"
        postgres_connection.require_driver(what)
        settings = postgres_connection.connection_settings(what, self.dsn_env, {})
        given = _given_position(spec, what, self.position)
        connection = postgres_connection.connect_snapshot(what, settings)
        address = postgres_connection.format_address(settings)
        # An iterator: it runs the query only when the rows are read, so after the position is.
        tables = self._read_rows(connection, spec, schema, what, address)
        try:
            if self.position_query is not None:
                given = self._read_position(connection, self.position_query, spec, what, address)
            return Snapshot(tables, resolve_position(spec, what, given, ssps), connection.close)
        except BaseException:
            connection.close()
            raise

    def describe(self) -> str:
        return f"PostgreSQL query ({self.query})"

    def _read_position(
        self, connection: psycopg.Connection[Any], query: str, spec: Named, what: str, address: str
    ) -> list[tuple[Any, ...]]:
        """Return the rows of the query for the position: pairs (partition, offset). Raises
        DatasetError for other rows.
        """
        import psycopg

        try:
            rows = connection.execute(query.encode()).fetchall()
        except psycopg.Error as error:
            raise postgres_connection.translate_error(error, what, address) from error
        for row in rows:
            if len(row) != 2 or None in row:
                raise DatasetError(
                    f"{what}: its position_query returns {row!r}: expected rows of (partition,"
                    " offset).",
                    "Select the number of each partition and its next offset.",
                    dataset=spec.name,
                )
        return rows

    def _read_rows(
        self,
        connection: psycopg.Connection[Any],
        spec: Named,
        schema: Schema,
        what: str,
        address: str,
    ) -> Iterator[pa.Table]:
        """Yield the rows of the query, with the columns of `schema`. Raises DatasetError."""
        import psycopg

        try:
            with connection.cursor(name="adjunct_snapshot") as cursor:
                cursor.execute(self.query.encode())
                names = [column.name for column in cursor.description or ()]
                missing = [name for name in schema.names if name not in names]
                if missing:
                    raise DatasetError(
                        f"{what} returns the columns {', '.join(names)}:"
                        f" {', '.join(missing)} missing.",
                        "Select the columns of the dataset, under their names.",
                        dataset=spec.name,
                        column=missing[0],
                    )
                indexes = [names.index(name) for name in schema.names]
                rows = cursor.fetchmany(self.batch)
                while rows:
                    yield _table(rows, indexes, schema, what)
                    rows = cursor.fetchmany(self.batch)
        except psycopg.Error as error:
            raise postgres_connection.translate_error(error, what, address) from error


def _table(rows: list[tuple[Any, ...]], indexes: list[int], schema: Schema, what: str) -> pa.Table:
    """Return rows as a table; `indexes` says which of their values each column is. Raises
    SchemaMismatchError.
    """
    columns = []
    for index, field in zip(indexes, schema.fields, strict=True):
        columns.append(_array([row[index] for row in rows], field, what))
    return pa.table(columns, schema=schema.to_arrow())


def _array(values: list[Any], field: Field, what: str) -> pa.Array:
    """Return values of the server as a column. Raises SchemaMismatchError for those that do not
    fit.
    """
    if is_nested(field.type):
        return _nested_array(values, field, what)
    known = [value for value in values if value is not None]
    wrong_types = {*map(type, known)}.difference(value_classes(field.type))
    if wrong_types:
        names = ", ".join(sorted(kind.__name__ for kind in wrong_types))
        raise _misfit_error(what, field, f"holds values of {names}")
    if field.type == "timestamp" and any(value.tzinfo is None for value in known):
        raise _misfit_error(what, field, "holds timestamps without a time zone")
    try:
        return pa.array(values, arrow_type(field.type))
    except (pa.ArrowException, OverflowError) as error:
        first_line = str(error).splitlines()[0]
        problem = f"holds a value that does not fit ({first_line})"
        raise _misfit_error(what, field, problem) from error


def _nested_array(values: list[Any], field: Field, what: str) -> pa.Array:
    """Return arrays and JSON of the server as a column of the declared nested type. Raises
    SchemaMismatchError, which shows no values of a sensitive column.
    """
    try:
        return to_exact_array(values, arrow_type(field.type))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        path = field.name + getattr(error, "path", "")
        shown = ""
        cause: Exception | None = None
        if not field.sensitive:
            reason = getattr(error, "reason", None) or str(error).splitlines()[0]
            shown = f" ({reason})"
            cause = error
        raise SchemaMismatchError(
            f"{what}: column {path!r} holds a value that does not fit{shown}, expected"
            f" {field.type}.",
            "Select an array, or build JSON of the declared form in the query, as with"
            " jsonb_build_object.",
            column=field.name,
        ) from cause


def _misfit_error(what: str, field: Field, what_it_holds: str) -> SchemaMismatchError:
    """Return the error for a column with values of another type."""
    return SchemaMismatchError(
        f"{what}: column {field.name!r} {what_it_holds}, expected {field.type}.",
        "Cast the column in the query.",
        column=field.name,
    )
