"""From Kafka's messages to records with typed columns; records.py has the way back.

    __key, __value, __headers -> key format, value format -> the record's columns, RECORD_META

All of it works on Arrow batches, in the task that reads them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.streams.interface.stream_system import (
    EPOCH,
    OFFSET,
    PARTITION,
    RECORD_META,
    TIMESTAMP,
    TOMBSTONE,
)
from dagster_adjunct.resources.streams.kafka.avro_format import Avro
from dagster_adjunct.resources.streams.kafka.codec import FAIL, Format
from dagster_adjunct.resources.streams.kafka.json_format import Json
from dagster_adjunct.resources.streams.kafka.protobuf_format import Protobuf
from dagster_adjunct.resources.streams.kafka.raw_format import KeyText, Raw, RawKey, Text
from dagster_adjunct.resources.streams.kafka.record_values import SHOWN, Problems, part
from dagster_adjunct.resources.streams.kafka.schema_registry import SchemaRegistry

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.resources.streams.kafka.kafka_settings import KafkaTopic

KEY, VALUE, HEADERS = "__key", "__value", "__headers"
Batches = Callable[["pa.RecordBatch"], "pa.RecordBatch"]


def schema_of(topic: KafkaTopic) -> Schema:
    """Return the columns of a topic's records: of the key what is not also in the value, the value, the headers.

    Raises ConfigurationError where the declared formats contradict each other.
    """
    key, value = key_format(topic), topic.value
    shared = set(key.columns().names) & set(value.columns().names) if key else set()
    fields = [field for field in (key.columns().fields if key else ()) if field.name not in shared]
    for name in shared:
        assert key is not None
        here, there = key.columns().field(name).type, value.columns().field(name).type
        if here != there:
            raise ConfigurationError(
                f"Kafka column {name!r} is {here} in the key ({key.describe()}) and {there} in the value "
                f"({value.describe()}).",
                "Declare it alike in both, or under two names.",
                column=name,
            )
    fields += value.columns().fields
    bad = list(dict.fromkeys(side.malformed for side in (key, value) if side is not None and side.malformed != FAIL))
    fields += [Field(name, "binary") for name in bad]
    if topic.headers is not None:
        fields.append(Field(topic.headers, "string"))
    return Schema(tuple(fields))


def key_format(topic: KafkaTopic) -> Format | None:
    """Return the format of keys: a raw value comes with its raw key, other values with none."""
    if topic.key is not None or not isinstance(topic.value, Raw):
        return topic.key
    return RawKey()


def decoder(topic: KafkaTopic, stream: str) -> Batches:
    """Return what makes records of a batch of messages, with the columns of `schema_of(topic)` and RECORD_META.

    It takes `__key`, `__value`, `__headers` where a column is made of them, and RECORD_META without `__tombstone`. It
    raises SchemaMismatchError at a message that can't be read, unless its format names a column for such. `stream`
    ("kafka.flights") is for errors. Make one in each task.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    schema, key, value = schema_of(topic), key_format(topic), topic.value
    read_value = value.reader()
    read_key = key.reader() if key else None
    key_names = key.columns().names if key else ()
    shared = [name for name in key_names if name in value.columns().names]
    only_for_tombstones = len(shared) == len(key_names)
    kinds = (pa.int32(), pa.int64(), pa.timestamp("us", tz="UTC"), pa.bool_(), pa.int32())
    meta = [pa.field(name, kind, name != EPOCH) for name, kind in zip(RECORD_META, kinds, strict=True)]
    out = pa.schema([*schema.to_arrow(), *meta])

    def run(batch: pa.RecordBatch) -> pa.RecordBatch:
        data, keys = batch.column(VALUE).to_pylist(), batch.column(KEY).to_pylist()
        gone = batch.column(VALUE).is_null()
        bad_values: Problems = {}
        bad_keys: Problems = {}
        columns = dict(zip(value.columns().names, read_value(data, bad_values), strict=True))
        if read_key is not None and not (only_for_tombstones and shared and not batch.column(VALUE).null_count):
            wanted = keys
            if only_for_tombstones:
                wanted = [key if none is None else None for key, none in zip(keys, data, strict=True)]
            of_keys = dict(zip(key_names, read_key(wanted, bad_keys), strict=True))
            for name in shared:
                of_keys[name] = pc.if_else(gone, of_keys[name], columns[name])
            columns |= of_keys
        if bad_keys or bad_values:
            rows = pa.array([row in bad_keys or row in bad_values for row in range(len(data))])
            columns = {name: pc.if_else(rows, pa.scalar(None, column.type), column) for name, column in columns.items()}
        sides: list[tuple[str, Format | None, Sequence[bytes | None], Problems]]
        sides = [("key", key, keys, bad_keys), ("value", value, data, bad_values)]
        for which, form, given, bad in sides:
            if form is None:
                continue
            if form.malformed != FAIL:
                kept = pa.array([given[row] if row in bad else None for row in range(len(given))], pa.binary())
                columns[form.malformed] = pc.coalesce(columns.get(form.malformed, kept), kept)
            elif bad:
                raise _unreadable(batch, which, form, given, bad, stream)
        if topic.headers is not None:
            columns[topic.headers] = _headers_json(batch.column(HEADERS))
        columns |= {name: batch.column(name) for name in (PARTITION, OFFSET, TIMESTAMP, EPOCH)} | {TOMBSTONE: gone}
        return pa.RecordBatch.from_arrays([columns[name].cast(out.field(name).type) for name in out.names], schema=out)

    return run


def _unreadable(
    batch: pa.RecordBatch, which: str, form: Format, data: Sequence[bytes | None], bad: Problems, stream: str
) -> SchemaMismatchError:
    """Return the error for the first message that can't be read."""
    row = min(bad)
    partition, offset = batch.column(PARTITION)[row].as_py(), batch.column(OFFSET)[row].as_py()
    more = (
        f" {len(bad) - 1} more of the next {len(data) - row - 1} messages can't be read either." if len(bad) > 1 else ""
    )
    return SchemaMismatchError(
        f"{stream}.{partition}: the {which} of the message at offset {offset} can't be read as {form.describe()}: "
        f"{bad[row]}. It is {_shown(data[row] or b'')}.{more}",
        "Correct the producer, and go on behind the message by a startpoint; or declare malformed=COLUMN in the format "
        f"of the {which}, which keeps the bytes of such messages in that column.",
        stream=stream,
    )


def _shown(data: bytes) -> str:
    """Return the beginning of a message, never all of it: at most SHOWN characters."""
    text = data[: SHOWN * 4].decode("utf-8", "replace").rstrip("\ufffd")  # a character may be cut
    readable = text and text.isprintable() and "\ufffd" not in text
    return f"{len(data)} bytes: {part(text[: SHOWN * 2] if readable else data[:SHOWN].hex())}" if data else "empty"


def _headers_json(headers: pa.Array) -> pa.Array:
    """Return the headers of each message as JSON: a list of [name, base64 of the value or null]."""
    import pyarrow as pa

    made = []
    for of_message in headers.to_pylist():
        pairs = [
            [h["name"], None if h["value"] is None else base64.b64encode(h["value"]).decode()] for h in of_message or ()
        ]
        made.append(json.dumps(pairs, ensure_ascii=False, separators=(",", ":")))
    return pa.array(made, pa.string())


__all__ = [
    "Avro",
    "Format",
    "Json",
    "KeyText",
    "Protobuf",
    "Raw",
    "SchemaRegistry",
    "Text",
    "decoder",
    "schema_of",
]
