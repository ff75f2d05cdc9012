"""Requests to Redis as the bytes that are sent: one call of the script for each key, one HMGET for each get.

They are made here and not by the client because that is most of what a bulk request costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dagster_adjunct.resources.backends.redis_script import SCRIPT
from dagster_adjunct.resources.backends.redis_values import NULL, RedisColumn, redis_column
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.tables.changes import Changes
from dagster_adjunct.resources.tables.operation import Operation, OperationKind

OWN = "adjunct_"  # how fields begin that are no columns
_KINDS = {
    OperationKind.PUT: b"put",
    OperationKind.PUT_IF_ABSENT: b"put-if-absent",
    OperationKind.DELETE: b"delete",
    OperationKind.UPDATE: b"update",
}
Key = Any
Packed = tuple[int, bytes]  # how many arguments, and they


def bulk(text: bytes) -> bytes:
    """One argument of a command."""
    return b"$%d\r\n%b\r\n" % (len(text), text)


def command(*arguments: bytes) -> bytes:
    """A whole command."""
    return b"*%d\r\n%b" % (len(arguments), b"".join(map(bulk, arguments)))


class RedisCodec:
    """Between entries and what is sent and received. Errors name the table, the column and the value found."""

    def __init__(
        self, label: str, prefix: str, key: Sequence[str], columns: Mapping[str, str], largest_value: int, horizon: int
    ) -> None:
        self.label = label
        self.columns = {name: redis_column(name, declared) for name, declared in columns.items()}
        self.key = tuple(key)
        self._key_set = frozenset(key)
        self._largest, self._horizon = largest_value, horizon
        for name in self.columns:
            if name.startswith(OWN):
                raise ConfigurationError(
                    f"{label} has a column {name!r}; names that begin with {OWN} are for what conditions keep.",
                    "Rename it.",
                    argument="columns",
                )
        for name in self.key:
            if name not in self.columns:
                raise SchemaMismatchError(
                    f"{label} has no column {name!r}, which is its key; it has {', '.join(self.columns)}.",
                    "Correct the key, or the columns.",
                    column=name,
                )
            if not self.columns[name].may_be_key:
                raise SchemaMismatchError(
                    f"{label}: its key column {name!r} is {self.columns[name].declared}, in which equal values may be "
                    "written in several ways.",
                    "Use a string, an integer, boolean, timestamp, date, binary or decimal(p,s).",
                    column=name,
                )
        self._prefix = prefix.encode() + b":"
        self._encoders = {name: (bulk(name.encode()), c.encode) for name, c in self.columns.items()}
        self._decoders = [(name, self.columns[name].decode) for name in self.columns if name not in self._key_set]
        asked = [name.encode() for name in (*self.key, *(name for name, _ in self._decoders))]
        self._get = b"*%d\r\n$5\r\nHMGET\r\n" % (len(asked) + 3), b"".join(map(bulk, [b"adjunct_deleted", *asked]))

    # -- keys

    def key_texts(self, key: Key) -> tuple[bytes, ...]:
        """The encoded values of the key's columns."""
        if len(self.key) == 1:
            return (self._text(self.key[0], key),)
        if not isinstance(key, tuple) or len(key) != len(self.key):
            raise SchemaMismatchError(
                f"{self.label} got {key!r} as a key; expected a tuple of {', '.join(self.key)}.",
                "Give the key's values in that order.",
            )
        return tuple(map(self._text, self.key, key))

    def name(self, texts: Sequence[bytes]) -> bytes:
        r"""The name of the record's hash. Of several columns "\" and ":" stand with a "\" before them."""
        if len(texts) == 1:
            return self._prefix + texts[0]
        return self._prefix + b":".join(t.replace(b"\\", b"\\\\").replace(b":", b"\\:") for t in texts)

    # -- gets

    def get(self, key: Key) -> bytes:
        head, tail = self._get
        return head + bulk(self.name(self.key_texts(key))) + tail

    def record(self, key: Key, answer: Sequence[bytes | None]) -> dict[str, Any] | None:
        """The record that was read for a key; it has the key's columns, and of the others those that are stored."""
        if answer[0] is not None or answer.count(None) == len(answer):
            return None
        record: dict[str, Any] = dict(zip(self.key, key if len(self.key) > 1 else (key,), strict=True))
        try:
            for (name, decode), text in zip(self._decoders, answer[len(self.key) + 1 :], strict=True):
                if text is not None:
                    record[name] = None if text == NULL else decode(text)
        except (ValueError, ArithmeticError) as error:
            raise SchemaMismatchError(
                f"{self.label}: the record of {key!r} has a {name} that is no {self.columns[name].declared}: {text!r}.",
                "Correct it, or the declaration; another program has written it.",
                column=name,
            ) from error
        return record

    # -- writes

    def header(self, operation: Operation[Any]) -> tuple[bytes, bytes]:
        """What stands before and after the number of a key's entries in every call of this operation."""
        conditions = operation.conditions
        column = None if conditions.newest_by is None else self._column(conditions.newest_by)
        settings = (
            b"-" if column is None else column.compares.encode(),
            b"m" if conditions.idempotent else b"-",
            b"" if column is None else column.name.encode(),
            b"%d" % self._horizon,
        )
        return bulk(_KINDS[operation.kind]), b"".join(map(bulk, settings))

    def entry(self, operation: Operation[Any], place: int, key: tuple[bytes, ...]) -> Packed:
        """The arguments of one entry."""
        entries, kind = operation.entries, operation.kind
        if kind is OperationKind.DELETE:
            count, own = 0, b""
        else:
            assert entries.values is not None
            value = entries.values[place]
            if kind is OperationKind.UPDATE:
                default = None if entries.defaults is None else entries.defaults[place]
                count, own = self._update(key, value, default)
            else:
                count, own = self._record(key, value)
        own = bulk(b"%d" % count) + own
        if not operation.conditions:
            return count + 1, own
        conditions = self._conditions(operation, place)
        return count + 1 + len(conditions), b"".join(map(bulk, conditions)) + own

    def _conditions(self, operation: Operation[Any], place: int) -> list[bytes]:
        entries, conditions = operation.entries, operation.conditions
        assert entries.marks is not None  # whoever states conditions gives marks
        mark, texts = entries.marks[place], []
        if conditions.newest_by is not None:
            assert entries.newest is not None
            time = entries.newest[place]
            if time is None or time != time:  # noqa: PLR0124 - NaN
                raise SchemaMismatchError(
                    f"{self.label}: {entries.keys[place]!r} came with {time!r} as its {conditions.newest_by}, by which "
                    "the newest is known.",
                    "Give every record a time, or filter such records out.",
                    column=conditions.newest_by,
                )
            texts += [self._text(conditions.newest_by, time), mark.tie.encode()]
        if conditions.idempotent:
            texts += [mark.source.encode(), mark.position.encode()]
        return texts

    def _record(self, key: tuple[bytes, ...], record: Mapping[str, Any]) -> Packed:
        """A whole record as fields and values, the key's columns first."""
        count, fields = self._fields(key, record)
        own = b"".join([self._encoders[name][0] + bulk(text) for name, text in zip(self.key, key, strict=True)])
        return count + 2 * len(key), own + fields

    def _fields(self, key: tuple[bytes, ...], record: Mapping[str, Any]) -> Packed:
        """The record's fields and values without those of the key, which must be the key's."""
        if not isinstance(record, Mapping):
            raise SchemaMismatchError(
                f"{self.label} got a {type(record).__name__}; expected a mapping of columns to values.", "Send dicts."
            )
        parts, encoders, key_set = [], self._encoders, self._key_set
        try:
            for name, value in record.items():
                if name in key_set:
                    self._check_key(key, name, value)
                    continue
                field, encode = encoders[name]
                text = NULL if value is None else encode(value)
                parts.append(b"%b$%d\r\n%b\r\n" % (field, len(text), text))
        except (KeyError, TypeError, ValueError, ArithmeticError):
            self._text(name, value)  # says what is wrong
            raise
        packed = b"".join(parts)
        if len(packed) > self._largest:
            for name, value in record.items():
                self._text(name, value)
        return 2 * len(parts), packed

    def _update(self, key: tuple[bytes, ...], update: Mapping[str, Any] | Changes, default: Any) -> Packed:
        changes, settings = (update, update.set) if isinstance(update, Changes) else (None, update)
        fields, packed = self._fields(key, settings)
        begins, default_packed = (0, b"") if default is None else self._record(key, default)
        more: list[bytes] = []
        if changes is not None:
            self._check_named_once(changes)
            more = self._more(changes)
            if changes.remove:  # of a hash that others wrote, the key's columns may be all that is left
                own = b"".join([self._encoders[name][0] + bulk(text) for name, text in zip(self.key, key, strict=True)])
                fields, packed = fields + 2 * len(key), own + packed
        count = 2 + begins + fields + len(more)
        head = bulk(b"%d" % begins) + default_packed + bulk(b"%d" % fields)
        return count, head + packed + b"".join(map(bulk, more))

    def _more(self, changes: Changes) -> list[bytes]:
        texts: list[bytes] = []
        for name, number in changes.add.items():
            column = self._changeable(name, "add to", lambda c: c.adds)
            if number is not None:
                how = b"f" if column.compares == "f" else b"n"
                texts += [b"add", name.encode(), how, self._text(name, number), column.least, column.most]
        for name, items in changes.append.items():
            self._changeable(name, "append to", lambda c: c.appends)
            if items:
                text = self._text(name, list(items))
                texts += [b"append", name.encode(), text[1:-1], b"%d" % self._largest]
        for name in changes.remove:
            self._changeable(name, "remove", lambda _: True)
            texts += [b"remove", name.encode()]
        return texts

    def _check_named_once(self, changes: Changes) -> None:
        names = [*changes.set, *changes.add, *changes.append, *changes.remove]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SchemaMismatchError(
                f"{self.label}: one update changes the column {twice!r} in several ways.",
                "Name each column once in set, add, append and remove.",
                column=twice,
            )

    def _changeable(self, name: str, verb: str, can: Any) -> RedisColumn:
        column = self._column(name)
        if name in self._key_set or not can(column):
            what = "part of the key" if name in self._key_set else column.declared
            raise SchemaMismatchError(
                f"{self.label}: an update would {verb} the column {name!r}, which is {what}.",
                "Add to numbers, append to lists, and leave the key alone.",
                column=name,
            )
        return column

    def _check_key(self, key: tuple[bytes, ...], name: str, value: Any) -> None:
        if self._text(name, value) != key[self.key.index(name)]:
            raise SchemaMismatchError(
                f"{self.label}: a record has {value!r} as its {name}, and is put under another key.",
                "A record must carry its own key, or leave the key's columns out.",
                column=name,
            )

    def _column(self, name: str) -> RedisColumn:
        try:
            return self.columns[name]
        except KeyError:
            raise SchemaMismatchError(
                f"{self.label} has no column {name!r}; it has {', '.join(self.columns)}.",
                "Leave the field out, or declare the column.",
                column=name,
            ) from None

    def _text(self, name: str, value: Any) -> bytes:
        """The value as it is stored; SchemaMismatchError where it does not fit its column."""
        column = self._column(name)
        try:
            text = NULL if value is None else column.encode(value)
        except (TypeError, ValueError, ArithmeticError) as error:
            shown = repr(value)
            raise SchemaMismatchError(
                f"{self.label}: column {name!r} is {column.declared} and got "
                f"{shown if len(shown) < 200 else shown[:200] + '…'} ({type(value).__name__}); {error}.",
                "Convert the value before it is written.",
                column=name,
            ) from None
        if len(text) > self._largest:
            raise SchemaMismatchError(
                f"{self.label}: a value of column {name!r} has {len(text)} bytes, and {self._largest} are allowed.",
                "Write smaller values, or allow more (largest_value=…, at most 512 MB).",
                column=name,
            )
        return text


def calls(sha: bytes, header: tuple[bytes, bytes], name: bytes, entries: Sequence[Packed]) -> bytes:
    """The call of the script for one key."""
    if len(entries) == 1:
        count, packed = entries[0]
    else:
        count, packed = sum(n for n, _ in entries), b"".join([p for _, p in entries])
    kind, settings = header
    return b"*%d\r\n$7\r\nEVALSHA\r\n%b$1\r\n1\r\n$%d\r\n%b\r\n%b$%d\r\n%d\r\n%b%b" % (
        10 + count,
        sha,
        len(name),
        name,
        kind,
        len(b"%d" % len(entries)),
        len(entries),
        settings,
        packed,
    )


def script_load() -> bytes:
    """The command that makes the script known; it answers with its digest."""
    return command(b"SCRIPT", b"LOAD", SCRIPT.encode())
