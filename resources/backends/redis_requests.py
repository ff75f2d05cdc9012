"""Requests to Redis as the bytes that are sent: one call of the script for each key, one HMGET for each get.

They are made here and not by the client because that is most of what a bulk request costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dagster_adjunct.resources.backends.column_values import Kind, declared_column
from dagster_adjunct.resources.backends.redis_values import NULL, redis_column
from dagster_adjunct.resources.backends.rows import CheckedChanges, Record, Row, RowCodec
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.tables.column_changes import Changes
from dagster_adjunct.resources.tables.operation import Operation, OperationKind

OWN = "adjunct_"  # how fields begin that are no columns
Packed = tuple[int, bytes]  # how many arguments, and they


def bulk(text: bytes) -> bytes:
    """One argument of a command."""
    return b"$%d\r\n%b\r\n" % (len(text), text)


def command(*arguments: bytes) -> bytes:
    """A whole command."""
    return b"*%d\r\n%b" % (len(arguments), b"".join(map(bulk, arguments)))


class RedisRequests:
    """Between entries and what is sent and received. Errors name the table, the column and the value found."""

    def __init__(
        self, label: str, prefix: str, key: Sequence[str], columns: Mapping[str, str], largest_value: int, horizon: int
    ) -> None:
        self.label, self.largest, self._horizon = label, largest_value, horizon
        declared = [declared_column(*pair) for pair in columns.items()]
        self.rows = RowCodec(label, key, declared)
        self._columns = {column.name: redis_column(column) for column in declared}
        self._encoders = {name: (bulk(name.encode()), c.encode) for name, c in self._columns.items()}
        for name in columns:
            if name.startswith(OWN):
                raise ConfigurationError(
                    f"{label} has a column {name!r}; names that begin with {OWN} are for what conditions keep.",
                    "Rename it.",
                    argument="columns",
                )
            if name in self.rows.key and not self._columns[name].may_be_key:
                raise SchemaMismatchError(
                    f"{label}: its key column {name!r} is {columns[name]}, in which equal values may be written in "
                    "several ways.",
                    "Use a string, an integer, boolean, timestamp, date, binary or decimal(p,s).",
                    column=name,
                )
        self._prefix = prefix.encode() + b":"
        self._decoders = [(name, c.decode) for name, c in self._columns.items() if name not in self.rows.key]
        asked = [name.encode() for name in (*self.rows.key, *(name for name, _ in self._decoders))]
        self._get = b"*%d\r\n$5\r\nHMGET\r\n" % (len(asked) + 3), b"".join(map(bulk, [b"adjunct_deleted", *asked]))

    def name(self, key: Row) -> bytes:
        r"""The name of the record's hash. Of several columns "\" and ":" stand with a "\" before them."""
        if len(key) == 1:
            return self._prefix + self._text(self.rows.key[0], key[0])
        texts = map(self._text, self.rows.key, key)
        return self._prefix + b":".join(t.replace(b"\\", b"\\\\").replace(b":", b"\\:") for t in texts)

    # -- gets

    def get(self, key: Row) -> bytes:
        head, tail = self._get
        return head + bulk(self.name(key)) + tail

    def record(self, key: Row, answer: Sequence[bytes | None]) -> dict[str, Any] | None:
        """The record that was read for a key; it has the key's columns, and of the others those that are stored."""
        if answer[0] is not None or answer.count(None) == len(answer):
            return None
        record: dict[str, Any] = dict(zip(self.rows.key, key, strict=True))
        try:
            for (name, decode), text in zip(self._decoders, answer[len(key) + 1 :], strict=True):
                if text is not None:
                    record[name] = None if text == NULL else decode(text)
        except (ValueError, ArithmeticError) as error:
            raise SchemaMismatchError(
                f"{self.label}: the record of {key!r} has {text!r} as its {name}, which is no "
                f"{self.rows.columns[name].type}.",
                "Correct it, or the declaration; another program has written it.",
                column=name,
            ) from error
        return record

    # -- writes

    def compares(self, newest_by: str | None) -> str:
        """How the script compares times of this column; "-" for none."""
        if newest_by is None:
            return "-"
        compares = self._columns[self.rows.column(newest_by).name].compares
        if compares == "-":
            raise SchemaMismatchError(
                f"{self.label}: column {newest_by!r} is {self.rows.columns[newest_by].type}, and newest_by needs a "
                "column of times, numbers or text.",
                "Name another column as newest_by.",
                column=newest_by,
            )
        return compares

    def settings(self, newest_by: str | None) -> bytes:
        """What the calls of an operation have in common."""
        return b"".join(map(bulk, ((newest_by or "").encode(), b"%d" % self._horizon, self.rows.key[0].encode())))

    def entry(self, operation: Operation[Any], place: int, key: Row, used: set[str]) -> Packed:
        """The arguments of one entry; what its script has to be able to do is added to `used`."""
        entries, kind = operation.entries, operation.kind
        count, own = 0, b""
        if kind is not OperationKind.DELETE:
            assert entries.values is not None
            value = entries.values[place]
            if kind is OperationKind.UPDATE:
                default = None if entries.defaults is None else entries.defaults[place]
                count, own = self._update(key, value, default, used)
            else:
                count, own = self._fields(self.rows.whole(key, value))
        own = b"$%d\r\n%d\r\n%b" % (len(str(count)), count, own)
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
            time = self.rows.checked(conditions.newest_by, entries.newest[place])
            if time is None:
                raise SchemaMismatchError(
                    f"{self.label}: {entries.keys[place]!r} came without its {conditions.newest_by}, by which the "
                    "newest is known.",
                    "Give every record a time, or filter such records out.",
                    column=conditions.newest_by,
                )
            texts += [self._text(conditions.newest_by, time), mark.tie.encode()]
        if conditions.idempotent:
            if "\n" in mark.source or "\t" in mark.source:
                raise SchemaMismatchError(
                    f"{self.label}: a mark names the source {mark.source!r}; line ends and tabs part them.",
                    "Name sources as stream partitions are named.",
                    table=self.label,
                )
            texts += [mark.source.encode(), mark.position.encode()]
        return texts

    def _fields(self, checked: Mapping[str, Any]) -> Packed:
        """Checked values as fields and values."""
        encoders, parts = self._encoders, []
        try:
            for name, value in checked.items():
                field, encode = encoders[name]
                text = NULL if value is None else encode(value)
                parts.append(b"%b$%d\r\n%b\r\n" % (field, len(text), text))
        except ValueError:
            self._text(name, value)  # says which one
            raise
        packed = b"".join(parts)
        if len(packed) > self.largest:
            for name, value in checked.items():
                self._text(name, value)
        return 2 * len(parts), packed

    def _update(self, key: Row, update: Record | Changes, default: Record | None, used: set[str]) -> Packed:
        begins, begin = 0, b""
        if default is not None:
            used.add("default")
            begins, begin = self._fields(self.rows.whole(key, default))
        changes = self.rows.changes(key, update)
        sets, others, more = changes.set, 0, b""
        if isinstance(update, Changes):
            if update.remove:  # of a hash that others wrote, the key's columns may be all that is left
                kept = {name: value for name, value in changes.set.items() if name not in update.remove}
                sets = dict(zip(self.rows.key, key, strict=True)) | kept
            others, more = self._more(changes, update.remove, used)
        fields, packed = self._fields(sets)
        head = b"$%d\r\n%d\r\n%b$%d\r\n%d\r\n" % (len(str(begins)), begins, begin, len(str(fields)), fields)
        return 2 + begins + fields + others, b"%b%b%b" % (head, packed, more)

    def _more(self, changes: CheckedChanges, remove: Sequence[str], used: set[str]) -> Packed:
        """The arguments of what is no setting."""
        count, more = 0, []
        for name, value in changes.add.items():
            column = self._columns[name]
            if column.kind is Kind.JSON:
                used.add("merge")
                self._text(name, value)
                members = [part for item in value.items() for part in map(column.encode, item)]
                count += 4 + len(members)
                more += [b"merge", name.encode(), b"%d" % self.largest, b"%d" % len(members), *members]
            else:
                used.add("add")
                how = b"f" if column.compares == "f" else b"n"
                count += 6
                more += [b"add", name.encode(), how, self._text(name, value), column.least, column.most]
        for name, items in changes.append.items():
            used.add("append")
            count += 4
            more += [b"append", name.encode(), b"%d" % self.largest, self._text(name, items)[1:-1]]
        for name in remove:
            used.add("remove")
            count += 2
            more += [b"remove", name.encode()]
        return count, b"".join([b"$%d\r\n%b\r\n" % (len(text), text) for text in more])

    def _text(self, name: str, value: Any) -> bytes:
        """The checked value as it is stored; SchemaMismatchError where Redis can't or shall not hold it."""
        try:
            text = NULL if value is None else self._columns[name].encode(value)
        except ValueError as error:
            column = self.rows.columns[name]
            raise SchemaMismatchError(
                f"{self.label}: column {name!r} is {column.type}{column.size} and got {value!r}; {error}.",
                "Convert the value before it is written.",
                column=name,
            ) from None
        if len(text) > self.largest:
            raise SchemaMismatchError(
                f"{self.label}: a value of column {name!r} has {len(text)} bytes, and {self.largest} are allowed.",
                "Write smaller values, or allow more (largest_value=…, at most 512 MB).",
                column=name,
            )
        return text


def script_call(digest: bytes, settings: bytes, name: bytes, entries: Sequence[Packed]) -> bytes:
    """The call of a script for one key."""
    if len(entries) == 1:
        count, packed = entries[0]
    else:
        count, packed = sum(n for n, _ in entries), b"".join([p for _, p in entries])
    return b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n1\r\n$%d\r\n%b\r\n$%d\r\n%d\r\n%b%b" % (
        8 + count,
        digest,
        len(name),
        name,
        len(str(len(entries))),
        len(entries),
        settings,
        packed,
    )
