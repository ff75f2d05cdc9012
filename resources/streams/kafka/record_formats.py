"""Declares the formats of topics; decodes messages to records with typed columns, and encodes them,
in Arrow batches.

__key, __value, __headers <-> the record's columns, RECORD_META
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.resources.bucketing.writer import check_readable, describe_record
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.evolution import is_widening
from dagster_adjunct.resources.schemas.parsed_columns import MAX_SHOWN, RowProblems, shorten_text
from dagster_adjunct.resources.schemas.paths import (
    NamedPath,
    read_named_path,
    read_path,
    require_value,
    set_value,
    write_path,
)
from dagster_adjunct.resources.schemas.records import RowPlace, fit_to_schema
from dagster_adjunct.resources.schemas.schema import Field, Schema, named_column, repeated_names
from dagster_adjunct.resources.schemas.types import arrow_type, is_nested, types_from_spark
from dagster_adjunct.resources.spark.tasks import encode_task_errors
from dagster_adjunct.resources.streams.kafka.formats import FAIL, Format, FormatReader, Raw, RawKey
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    OFFSET,
    PARTITION,
    RECORD_META_COLUMNS,
    TIMESTAMP,
    TOMBSTONE,
)
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
KEY = "__key"
VALUE = "__value"
HEADERS = "__headers"
BatchFunction = Callable[["pa.RecordBatch"], "pa.RecordBatch"]


def check_topic_name(name: str) -> str:
    """Return the name if it is a valid topic name. Raises ConfigurationError."""
    if not _TOPIC.fullmatch(name) or name in (".", ".."):
        problem = (
            f"{name!r} can't be a Kafka topic: expected 1 to 249 letters, digits, '.', '_' or '-'."
        )
        raise ConfigurationError(problem, topic=name)
    return name


@validated
@dataclass(frozen=True, slots=True)
class KafkaTopic:
    """The formats and options of one topic.

    `topic` is its name if the stream has another. `value` and `key` are formats; `headers` names a
    column for the headers as JSON, a list of [name, base64 of the value or null]. `partitioner` is
    how *all* its producers assign keys to partitions. `default_offset` is where a reader without a
    checkpoint begins. `transactional` makes each of Adjunct's appends a transaction. `key_paths`
    are paths of values inside columns of the value, which the key repeats in a column named like
    the path's last step, or by "as". Records have no such column, only the value.
    """

    topic: str | None = None
    value: Format = field(default_factory=Raw)
    key: Format | None = None
    partitioner: Literal["kafka-murmur2", "unknown"] = "unknown"
    headers: str | None = None
    default_offset: Literal["oldest", "upcoming"] = "oldest"
    transactional: bool = False
    key_paths: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.topic is not None:
            check_topic_name(self.topic)
        if self.key is not None:
            _check_simple_key(self.key)
        paths = (self.key_paths,) if isinstance(self.key_paths, str) else tuple(self.key_paths)
        object.__setattr__(self, "key_paths", paths)
        self._check_paths()

    def _check_paths(self) -> None:
        """Raise ConfigurationError for a path that leads to no simple value of the message's value,
        or that is no column of the key of the same type.
        """
        named = self._named_paths()
        columns = Schema(()) if self.key is None else self.key.columns()
        for path in named:
            try:
                columns.field(path.name, f"key_paths has {str(path)!r}, and the key")
                found = require_value(
                    write_path(path.steps), self.value.columns().types, "the value"
                )
            except SchemaMismatchError as error:
                raise ConfigurationError(
                    f"a Kafka topic: {error.problem}", error.next_step, argument="key_paths"
                ) from error
            kind = columns.field(path.name).type
            if found.type != kind:
                problem = (
                    f"Kafka column {path.name!r} is {kind} in the key, and {str(found)!r} is"
                    f" {found.type} in the value."
                )
                step = "Declare the same type in both."
                raise ConfigurationError(problem, step, argument="key_paths", column=path.name)
        twice = repeated_names(path.name for path in named)
        if twice:
            problem = f"key_paths names two columns {twice[0]!r} of the key."
            step = f'Give one another name, as its field in the key: "… as {twice[0]}_2".'
            raise ConfigurationError(problem, step, argument="key_paths", column=twice[0])

    def _named_paths(self) -> list[NamedPath]:
        """Return the parsed `key_paths`."""
        columns = self.value.columns()
        return [read_named_path(text, columns) for text in self.key_paths]

    def name_for(self, stream: str) -> str:
        """Return the topic's name, which is that of the stream unless another was declared."""
        return self.topic or stream

    @property
    def key_names(self) -> tuple[str, ...]:
        """The columns of the declared key, or paths of values in columns, which determine a
        record's partition; () without one.
        """
        names: list[str] = []
        if self.key is None:
            return ()
        for steps in self.key_steps.values():
            names.append(steps[0] if len(steps) == 1 else write_path(steps))
        return tuple(names)

    @property
    def key_steps(self) -> dict[str, tuple[str, ...]]:
        """By column of the key, the steps to its value in a record: the path in `key_paths`, or the
        column itself.
        """
        key = self.key_format()
        if key is None:
            return {}
        steps = {name: (name,) for name in key.columns().names}
        return steps | {path.name: path.steps for path in self._named_paths()}

    def key_format(self) -> Format | None:
        """Return the format of keys: the declared one; else raw bytes if the values are raw, or
        None (no key).
        """
        if self.key is not None or not isinstance(self.value, Raw):
            return self.key
        return RawKey()

    def schema(self) -> Schema:
        """Return a record's columns: those only in the key, those of the value, for malformed
        bytes, then for headers.

        Raises ConfigurationError if the key's and the value's formats declare a column with
        different types.
        """
        key = self.key_format()
        fields = []
        malformed = []
        if key is not None:
            fields += self._columns_only_in_key(key)
            malformed.append(key.malformed)
        fields += self.value.columns().fields
        malformed.append(self.value.malformed)
        fields += [Field(name, "binary") for name in dict.fromkeys(malformed) if name != FAIL]
        if self.headers is not None:
            fields.append(Field(self.headers, "string"))
        return Schema(tuple(fields))

    def _columns_only_in_key(self, key: Format) -> list[Field]:
        """Return the columns of the key that the value does not have, neither as a column nor, by
        `key_paths`, inside one.

        Raises ConfigurationError for a column that both have, with different types.
        """
        value_columns = self.value.columns()
        inside_value = {path.name for path in self._named_paths()}
        only_in_key = []
        for in_key in key.columns().fields:
            name = in_key.name
            if name in inside_value:
                continue
            if name not in value_columns:
                only_in_key.append(in_key)
                continue
            in_value = value_columns.field(name)
            if in_key.type != in_value.type:
                problem = (
                    f"Kafka column {name!r} is {in_key.type} in the key ({key.describe()}) and"
                    f" {in_value.type} in the value ({self.value.describe()})."
                )
                step = "Declare the same type in both, or use two names."
                raise ConfigurationError(problem, step, column=name)
        return only_in_key

    def written_schema(self) -> Schema:
        """Return the columns that are written: all except those for malformed bytes."""
        for_malformed = {side.malformed for side in filter(None, [self.key, self.value])} - {FAIL}
        columns = [field for field in self.schema().fields if field.name not in for_malformed]
        return Schema(tuple(columns))


def _check_simple_key(key: Format) -> None:
    """Raise ConfigurationError for a key format with a nested column."""
    for column in key.columns().fields:
        if is_nested(column.type):
            problem = (
                f"the key of a Kafka topic ({key.describe()}) has column {column.name!r} as"
                f" {column.type}: columns of keys are simple."
            )
            step = "Declare only its simple columns, or leave the key out."
            raise ConfigurationError(problem, step, argument="key", column=column.name)


def records_schema(schema: Schema) -> pa.Schema:
    """Return the Arrow schema of records: their columns, then RECORD_META, of which only
    `__epoch` can't be null.
    """
    meta = [pa.field(name, arrow_type(kind), name != EPOCH) for name, kind in RECORD_META_COLUMNS]
    return pa.schema([*schema.to_arrow(), *meta])


def create_decoder(topic: KafkaTopic, stream: str) -> BatchFunction:
    """Return a function from a batch of messages to records, with columns of `topic.schema()` and
    RECORD_META.

    Its input has `__key`, `__value`, `__headers` if a column needs them, and RECORD_META without
    `__tombstone`. It raises SchemaMismatchError for a message that can't be read, unless its format
    has a column for malformed bytes. `stream` ("kafka.flights") is for errors. Create one in each
    task.
    """
    out = records_schema(topic.schema())
    value = _SideReader("value", topic.value, topic.value.reader())
    key = None
    form = topic.key_format()
    if form is not None:
        key = _SideReader("key", form, form.reader())

    def run(batch: pa.RecordBatch) -> pa.RecordBatch:
        columns, bad_values = value.read(batch.column(VALUE).to_pylist())
        bad_keys: RowProblems = {}
        if key is not None:
            bad_keys = _read_keys(batch, key, columns, topic.key_steps)
        unreadable = bad_keys.keys() | bad_values.keys()
        if unreadable:  # such a message is null in all columns, whichever side can't be read
            is_read = np.ones(batch.num_rows, bool)
            is_read[[*unreadable]] = False
            columns = {name: pc.if_else(is_read, column, None) for name, column in columns.items()}
        if key is not None:
            key.keep_malformed(batch, bad_keys, columns, stream)
        value.keep_malformed(batch, bad_values, columns, stream)
        if topic.headers is not None:
            columns[topic.headers] = _headers_json(batch.column(HEADERS))
        columns |= {name: batch.column(name) for name in (PARTITION, OFFSET, TIMESTAMP, EPOCH)}
        columns[TOMBSTONE] = batch.column(VALUE).is_null()
        return pa.RecordBatch.from_pydict(columns, schema=out)

    return run


def _read_keys(
    batch: pa.RecordBatch,
    key: _SideReader,
    columns: dict[str, pa.Array],
    steps_of: Mapping[str, tuple[str, ...]],
) -> RowProblems:
    """Add the columns of the keys to those of the values; return why keys can't be read.

    If the values have all columns of the key, only the keys of tombstones are read.
    """
    tombstones = batch.column(VALUE).is_null()
    keys: list[bytes | None] = batch.column(KEY).to_pylist()
    if all(steps[0] in columns for steps in steps_of.values()):
        if not batch.column(VALUE).null_count:
            return {}  # the batch has no tombstones
        is_read = tombstones.to_pylist()
        keys = [data if read else None for data, read in zip(keys, is_read, strict=True)]
    of_keys, bad = key.read(keys)
    for name, values in of_keys.items():
        column, *inside = steps_of[name]
        if column in columns:
            columns[column] = set_value(columns[column], inside, values, tombstones)
        else:
            columns[column] = values
    return bad


@dataclass(frozen=True, slots=True)
class _SideReader:
    """Reads one side of messages, "key" or "value"."""

    which: str
    form: Format
    reader: FormatReader

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that this side has."""
        return self.form.columns().names

    def read(self, data: Sequence[bytes | None]) -> tuple[dict[str, pa.Array], RowProblems]:
        """Return the columns by name, and the reason for each row that can't be read."""
        bad: RowProblems = {}
        return dict(zip(self.names, self.reader(data, bad), strict=True)), bad

    def keep_malformed(
        self, batch: pa.RecordBatch, bad: RowProblems, columns: dict[str, pa.Array], stream: str
    ) -> None:
        """Put the bytes of the rows that can't be read into their column of `columns`; without one,
        raise SchemaMismatchError. If key and value have the same such column, and neither can be
        read, it keeps the bytes of the key.
        """
        data = batch.column(f"__{self.which}")
        column = self.form.malformed
        if column != FAIL:
            is_bad = pa.array([row in bad for row in range(len(data))], pa.bool_())
            bad_bytes = pc.if_else(is_bad, data, pa.scalar(None, pa.binary()))
            columns[column] = pc.coalesce(columns.get(column, bad_bytes), bad_bytes)
        elif bad:
            raise self.unreadable_error(batch, data.to_pylist(), bad, stream)

    def unreadable_error(
        self, batch: pa.RecordBatch, data: Sequence[bytes | None], bad: RowProblems, stream: str
    ) -> SchemaMismatchError:
        """Return the error for the first message that can't be read."""
        row = min(bad)
        partition = batch.column(PARTITION)[row].as_py()
        offset = batch.column(OFFSET)[row].as_py()
        problem = (
            f"{stream}.{partition}: the {self.which} of the message at offset {offset} can't be"
            f" read as {self.form.describe()}: {bad[row]}. It is"
            f" {_describe_bytes(data[row] or b'')}."
        )
        if len(bad) > 1:
            problem += (
                f" {len(bad) - 1} more of the next {len(data) - row - 1} messages can't be read"
                " either."
            )
        step = (
            f"Correct the producer, and declare malformed=COLUMN in the format of the {self.which}:"
            " the next run reads the bytes of such messages into that column, with nulls in the"
            ' others, and .filter("COLUMN is null") leaves them out. Or let an application skip'
            " only this message: abandon its open batch, run with max_batch_records=1 until one"
            " fails again, and abandon that with --skip. A startpoint would also pass over good"
            " messages of the open batch."
        )
        return SchemaMismatchError(problem, step, stream=stream)


def _describe_bytes(data: bytes) -> str:
    """Return the size and the beginning of a message for errors, never all of it."""
    if not data:
        return "empty"
    # A character may be cut.
    text = data[: MAX_SHOWN * 4].decode("utf-8", "replace").rstrip("\ufffd")
    if text and text.isprintable() and "\ufffd" not in text:
        shown = text[: MAX_SHOWN * 2]
    else:
        shown = data[:MAX_SHOWN].hex()
    return f"{len(data)} bytes: {shorten_text(shown)}"


def _headers_json(headers: pa.Array) -> pa.Array:
    """Return the headers of each message as JSON: a list of [name, base64 of the value or null]."""
    made = []
    for of_message in headers.to_pylist():
        pairs = []
        for header in of_message or ():
            value = header["value"]
            if value is not None:
                value = base64.b64encode(value).decode()
            pairs.append([header["name"], value])
        made.append(json.dumps(pairs, ensure_ascii=False, separators=(",", ":")))
    return pa.array(made, pa.string())


BATCH_ROWS = 10_000


def encode_frame(frame: DataFrame, topic: KafkaTopic, stream: str) -> DataFrame:
    """Return the messages of records: `__key`, `__value`, `__headers` if the topic declares them,
    then the columns of the frame that begin with `__`, unchanged.

    `stream` ("kafka.flights") is for errors. The value is null if `__tombstone` is true. Raises
    SchemaMismatchError if the columns differ from the topic's, and ConfigurationError if a format
    can't write.
    """
    written = topic.written_schema()
    meta = [name for name in frame.schema.names if name.startswith("__")]
    own = [named_column(name) for name in frame.columns if name not in meta]
    given = Schema.from_spark(frame.select(*own).schema)
    _check_columns(given, written, stream)
    create_encoder(topic, stream)  # what fails here would fail in every task
    casts = [
        named_column(field.name).cast(field.type).alias(field.name) for field in written.fields
    ]
    types = types_from_spark(frame.schema)
    ddl = [f"{KEY} BINARY", f"{VALUE} BINARY"]
    if topic.headers is not None:
        ddl += [f"{HEADERS} ARRAY<STRUCT<name: STRING, value: BINARY>>"]
    ddl += [f"`{name}` {types[name]}" for name in meta]

    def encoded(batches: Iterator[Any]) -> Iterator[Any]:
        yield from map(create_encoder(topic, stream), batches)

    return frame.select(*casts, *[F.col(name) for name in meta]).mapInArrow(
        lambda batches: encode_task_errors(encoded(batches)), ", ".join(ddl)
    )


def encode_table(table: pa.Table, topic: KafkaTopic, stream: str) -> pa.Table:
    """Return the messages of an Arrow table's records, in its order; see `encode_frame`."""
    encoded = create_encoder(topic, stream)
    batches = table.combine_chunks().to_batches(max_chunksize=BATCH_ROWS)
    return pa.Table.from_batches(
        map(encoded, batches or [pa.RecordBatch.from_pylist([], schema=table.schema)])
    )


def create_encoder(topic: KafkaTopic, stream: str) -> BatchFunction:
    """Return a function from a batch of records to messages; see `encode_frame`. Create one in
    each task.
    """
    key = topic.key_format()
    written = topic.written_schema()
    about = {"stream": stream}
    subject = topic.name_for(split_stream_name(stream).stream)
    value_names = topic.value.columns().names
    write_value = topic.value.writer(stream, f"{subject}-value")
    key_steps = topic.key_steps.values()
    write_key = None
    if key is not None:
        write_key = key.writer(stream, f"{subject}-key")

    def run(batch: pa.RecordBatch) -> pa.RecordBatch:
        names = batch.schema.names
        meta = {name: batch.column(name) for name in names if name.startswith("__")}
        table = pa.Table.from_batches([batch]).drop_columns([*meta])
        records = fit_to_schema(
            table,
            written,
            stream,
            lambda row: RowPlace(describe_record(table, row, written), about),
        )
        check_readable(records, written, stream, **about)
        flat = pa.RecordBatch.from_arrays(
            [column.combine_chunks() for column in records.columns], written.names
        )
        no_tombstones = pa.array(np.zeros(batch.num_rows, bool))
        has_value = pc.invert(meta.get(TOMBSTONE, no_tombstones).fill_null(False))
        written_values = write_value(flat.select(value_names).filter(has_value).columns)
        nulls = pa.nulls(batch.num_rows, pa.binary())
        values_out = pc.replace_with_mask(nulls, has_value, pa.array(written_values, pa.binary()))
        out = {KEY: nulls, VALUE: values_out}
        if write_key is not None:
            key_values = [read_path(flat, steps) for steps in key_steps]
            out[KEY] = pa.array(write_key(key_values), pa.binary())
        if topic.headers is not None:
            out[HEADERS] = _headers_from_json(flat.column(topic.headers), topic.headers, stream)
        for name, column in meta.items():
            out.setdefault(name, column)
        return pa.RecordBatch.from_pydict(out)

    return run


def _check_columns(given: Schema, written: Schema, stream: str) -> None:
    """Raise SchemaMismatchError unless records with the columns `given` can be written as
    `written`.
    """
    fits = set(given.names) == set(written.names)
    if fits:
        fits = all(is_widening(given.field(each.name).type, each.type) for each in written.fields)
    if not fits:
        problem = f"{stream}: the records do not have its columns: {written.difference(given)}."
        raise SchemaMismatchError(problem, f"Select exactly {written.ddl()}.", stream=stream)


def _headers_from_json(texts: pa.Array, name: str, stream: str) -> pa.Array:
    """Return the headers in JSON texts; the inverse of `_headers_json`. Raises
    SchemaMismatchError.
    """
    kind = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))
    made: list[Any] = []
    try:
        for text in texts.to_pylist():
            headers = []
            for header, value in [] if text is None else json.loads(text):
                if header is None:
                    raise TypeError("a header without a name")
                data = None
                if value is not None:
                    data = base64.b64decode(value, validate=True)
                headers.append({"name": header, "value": data})
            made.append(headers)
        return pa.array(made, kind)
    except (ValueError, TypeError) as error:
        problem = f"{stream}: column {name!r} has a text that is not a list of headers."
        step = 'Write it like [["name","base64"]].'
        raise SchemaMismatchError(problem, step, column=name, stream=stream) from error
