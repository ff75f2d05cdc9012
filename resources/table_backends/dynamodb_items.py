"""Converts between records (mappings) and DynamoDB's items, and checks DynamoDB's limits before
anything is sent.

All of it is pure. An item has a record's columns as attributes, without null ones; attributes whose
names begin with `adjunct_` hold what conditions need and are not part of a record. A deleted record
whose marks are kept is an item with only these and the key (a tombstone). Values are stored without
loss, as one of DynamoDB's attribute types:

    declared column    stored as
    string             S
    integers           N
    float types        N, by the shortest text that reads back as the same float
    decimal            N, of up to 38 digits; trailing zeros are dropped, 1.50 is read as 1.5
    boolean            BOOL
    timestamp          S, in UTC, "2024-05-01T12:30:00.000000Z": texts of one length, which sort as
                       the times do
    date               S, "2024-05-01"
    binary             B
    array<type>        L; a set that another program wrote is read as a sorted list
    struct             M, without fields that are null
    map<string, type>  M, with NULL
    json               M, L, S, N, BOOL, NULL, as the value is built; a whole float is read as an
                       int

Null columns are left out of the item, so null and missing are the same. Without declared columns a
value's own type determines how it is stored; numbers are read as int if they are whole, else as
Decimal, and times as text.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Context, Decimal, DecimalException, Inexact, Overflow, Underflow
from functools import partial
from typing import Any, NamedTuple

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.types import Array, Map, Struct, Type
from dagster_adjunct.resources.table_backends.columns import (
    OWN_PREFIX,
    Column,
    Kind,
    NumberBounds,
    OutOfRangeError,
    check_cases,
    check_encodable,
    integer_bits,
    make_checker,
    number_bounds,
    parse_column,
)
from dagster_adjunct.resources.table_backends.nested_values import InnerName
from dagster_adjunct.resources.table_backends.write_plan import CheckedChanges, Row, RowCodec

AttributeValue = dict[str, Any]
Item = dict[str, AttributeValue]


class Limit(NamedTuple):
    """What a column must hold before an addition: at most ("<=") or at least (">=") a number."""

    comparison: str
    number: AttributeValue


DIGITS = 38  # that a number can have in DynamoDB
# the least and the greatest positive number
_LEAST = Decimal("1E-130")
_GREATEST = Decimal("9.9999999999999999999999999999999999999E+125")
_EXACT = Context(prec=DIGITS, traps=[Inexact, Overflow, Underflow])
_SUMS = Context(prec=300, traps=[Inexact])  # enough digits for the exact sum of 1E-130 and 9.9E+125
_MAX_DEPTH = 32  # levels of lists and maps


def encoder_for(column: Column) -> Callable[[Any], AttributeValue]:
    """Return the function that turns a value of this column, other than None, into an attribute
    value.

    It raises TypeError if the value doesn't fit the column or DynamoDB.
    """
    check = make_checker(column)
    if column.nested is not None:
        encode_part = _nested_encoder(column.nested)
        return lambda value: encode_part(check(value))
    if column.kind is Kind.LIST:
        assert column.element is not None
        encode = encoder_for(column.element)

        def encode_list(value: Any) -> AttributeValue:
            if not isinstance(value, list | tuple):
                raise TypeError("expected a list")
            return {"L": [_NULL if item is None else encode(item) for item in value]}

        return encode_list
    if column.kind not in _FORMS:  # for JSON, and in a table without declared columns
        return lambda value: encode_any(check(value))
    form = _FORMS[column.kind]
    tag = form.tag
    write = form.write
    return lambda value: {tag: check(value) if write is None else write(check(value))}


def decoder_for(column: Column) -> Callable[[AttributeValue], Any]:
    """Return the function that turns this column's attribute values back into Python values.

    An attribute of another type, which another program wrote, is read by its own type.
    """
    if column.nested is not None:
        return _nested_decoder(column.nested)
    if column.kind is Kind.LIST:
        assert column.element is not None
        return _list_decoder(column.element)
    if column.kind is Kind.JSON:
        return _decode_json
    form = _FORMS.get(column.kind)
    if form is None or form.read is None:
        return decode_any
    tag = form.tag
    read = form.read
    return lambda stored: read(stored[tag]) if tag in stored else decode_any(stored)


def _nested_encoder(type_: Type) -> Callable[[Any], AttributeValue]:
    """Return the function that turns a checked value of a type, other than None, into an attribute
    value.
    """
    if isinstance(type_, Array):
        return partial(_encode_array, _nested_encoder(type_.element))
    if isinstance(type_, Map):
        return partial(_encode_map, _nested_encoder(type_.value))
    if isinstance(type_, Struct):
        encoders = {member.name: _nested_encoder(member.type) for member in type_.members}
        return partial(_encode_struct, encoders)
    form = _FORMS[parse_column("part", type_.name).kind]
    tag = form.tag
    write = form.write
    return lambda value: {tag: value if write is None else write(value)}


Encode = Callable[[Any], AttributeValue]
Decode = Callable[[AttributeValue], Any]


def _encode_array(encode: Encode, value: Sequence[Any]) -> AttributeValue:
    return {"L": [_NULL if item is None else encode(item) for item in value]}


def _encode_map(encode: Encode, value: Mapping[str, Any]) -> AttributeValue:
    """Return a map whose values all have one type, as DynamoDB's attribute."""
    members = {}
    for name, item in value.items():
        members[_member_name(name)] = _NULL if item is None else encode(item)
    return {"M": members}


def _encode_struct(encoders: Mapping[str, Encode], value: Mapping[str, Any]) -> AttributeValue:
    """Return a struct as DynamoDB's attribute; fields that are None are left out."""
    members = {}
    for name, part in value.items():
        if part is not None:
            members[name] = encoders[name](part)
    return {"M": members}


def _nested_decoder(type_: Type) -> Decode:
    """Return the function that turns attribute values back into values of a type. It raises
    ValueError for one of another type.
    """
    if isinstance(type_, Array):
        return partial(_decode_array, _nested_decoder(type_.element))
    if isinstance(type_, Map):
        return partial(_decode_map, _nested_decoder(type_.value))
    if isinstance(type_, Struct):
        decoders = {member.name: _nested_decoder(member.type) for member in type_.members}
        return partial(_decode_struct, decoders)
    kind = parse_column("part", type_.name).kind
    tag = _FORMS[kind].tag
    read = int if kind is Kind.INTEGER else _FORMS[kind].read
    return lambda stored: _value_of(stored, tag) if read is None else read(_value_of(stored, tag))


def _decode_array(decode: Decode, stored: AttributeValue) -> list[Any]:
    return [_unless_null(decode, item) for item in _list_items(stored)]


def _decode_map(decode: Decode, stored: AttributeValue) -> dict[str, Any]:
    members = _value_of(stored, "M")
    return {name: _unless_null(decode, members[name]) for name in sorted(members)}


def _decode_struct(decoders: Mapping[str, Decode], stored: AttributeValue) -> dict[str, Any]:
    """Return a struct from DynamoDB's attribute; fields that it lacks are None."""
    members = _value_of(stored, "M")
    return {
        name: _unless_null(decode, members.get(name, _NULL)) for name, decode in decoders.items()
    }


def _value_of(stored: AttributeValue, tag: str) -> Any:
    """Return the value of an attribute that must have the type `tag`; else raise ValueError."""
    if tag not in stored:
        raise ValueError(f"expected {tag}, found {stored!r:.100}")
    return stored[tag]


def _unless_null(decode: Decode, stored: AttributeValue) -> Any:
    """Return the decoded value, or None for DynamoDB's null."""
    return None if "NULL" in stored else decode(stored)


_SETS = {"SS": "S", "NS": "N", "BS": "B"}


def _list_items(stored: AttributeValue) -> list[AttributeValue]:
    """The items of a list, or those of a set in order."""
    ((tag, value),) = stored.items()
    if tag not in _SETS:
        return list(_value_of(stored, "L"))
    return [{_SETS[tag]: item} for item in sorted(value, key=Decimal if tag == "NS" else None)]


def _list_decoder(element: Column) -> Callable[[AttributeValue], Any]:
    """Return the function that reads lists and sets of elements of a type; an attribute that is
    neither is read by its own type.
    """
    decode = decoder_for(element)

    def decode_list(stored: AttributeValue) -> Any:
        if not stored.keys() & {"L", *_SETS}:
            return decode_any(stored)
        return list(map(decode, _list_items(stored)))

    return decode_list


def key_attribute_type(column: Column) -> str | None:
    """The attribute type ("S", "N" or "B") of this column as a key; None if it can't be a key."""
    form = _FORMS.get(column.kind)
    if form is None or form.tag == "BOOL":
        return None
    return form.tag


def encode_any(value: Any, depth: int = 0) -> AttributeValue:
    """Return the attribute value of any Python value, in which it is `depth` levels deep; TypeError
    if DynamoDB can't store it.
    """
    if value is None:
        return _NULL
    for types, tag, write in _SCALARS:
        if isinstance(value, types):
            return {tag: write(value)}
    if depth >= _MAX_DEPTH:
        raise TypeError(f"expected at most {_MAX_DEPTH} levels of lists and maps")
    if isinstance(value, list | tuple):
        return {"L": [encode_any(item, depth + 1) for item in value]}
    if isinstance(value, Mapping):
        return {
            "M": {_member_name(name): encode_any(item, depth + 1) for name, item in value.items()}
        }
    raise TypeError("expected str, bool, int, float, Decimal, bytes, datetime, date, list or dict")


def decode_any(stored: AttributeValue) -> Any:
    """Return the Python value of an attribute value."""
    ((tag, value),) = stored.items()
    if tag == "N":
        return _whole_or_decimal(value)
    if tag == "L":
        return [decode_any(item) for item in value]
    if tag == "M":
        return {name: decode_any(item) for name, item in value.items()}
    if tag == "NULL":
        return None
    if tag == "NS":
        return {_whole_or_decimal(item) for item in value}
    if tag in ("SS", "BS"):
        return set(value)
    return value


def exact_sum(left: AttributeValue, right: AttributeValue) -> Decimal:
    """Add two number attributes exactly; the sum may have more digits than DynamoDB stores."""
    return _SUMS.add(Decimal(left["N"]), Decimal(right["N"]))


def attribute_bytes(stored: AttributeValue) -> int:
    """How many bytes a value adds to its item's size, by DynamoDB's rules."""
    ((tag, value),) = stored.items()
    if tag == "S":
        return len(value) if value.isascii() else len(value.encode())
    if tag == "N":
        return min(len(value) // 2 + 2, 21)
    if tag == "B":
        return len(value)
    if tag == "L":
        return 3 + len(value) + sum(map(attribute_bytes, value))
    if tag == "M":
        return 3 + len(value) + item_bytes(value)
    return 1  # BOOL and NULL; sets are only read


def item_bytes(item: Mapping[str, AttributeValue]) -> int:
    """How many bytes names and values of attributes have, by DynamoDB's rules."""
    return sum(len(name.encode()) + attribute_bytes(value) for name, value in item.items())


_NULL: AttributeValue = {"NULL": True}


def _text(value: str) -> str:
    """Return a text that DynamoDB can store; else raise TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"expected str as names in a map, found {value!r}")
    return check_encodable(value)


def _member_name(name: str) -> str:
    """Return the name of a map's member if DynamoDB takes it; else raise TypeError."""
    if name == "":
        raise TypeError("DynamoDB takes no empty name in a map")
    return _text(name)


def _number_text(value: float | Decimal) -> str:
    """Return a number as DynamoDB takes it, without loss; TypeError if it can't be stored so."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError("expected a finite number, or None for NaN and infinity")
        if value and not 1e-130 <= abs(value) < 1e126:
            raise OutOfRangeError("out of range: DynamoDB stores numbers of 1E-130 to 9.9E+125")
        return repr(value)
    if isinstance(value, int) and -(10**38) < value < 10**38:
        return str(int(value))
    if isinstance(value, Decimal) and not value.is_finite():
        raise TypeError("expected a finite number, or None for NaN and infinity")
    try:
        exact = _EXACT.create_decimal(value)
    except DecimalException:
        raise OutOfRangeError("expected at most 38 digits, DynamoDB's limit") from None
    if exact and not _LEAST <= abs(exact) <= _GREATEST:
        raise OutOfRangeError("out of range: DynamoDB stores numbers of 1E-130 to 9.9E+125")
    return str(exact)


def _whole_or_decimal(text: str) -> int | Decimal:
    """Return a number as an int if it is whole, else as a Decimal."""
    try:
        return int(text)
    except ValueError:
        number = Decimal(text)
        if number == number.to_integral_value():
            return int(number)
        return number


def _timestamp_text(value: datetime) -> str:
    """Return an instant as text in UTC, all of one length: "2024-05-01T12:30:00.000000Z"."""
    if value.tzinfo is None or value.utcoffset() is None:  # pandas' NaT has no offset to ask for
        raise TypeError("expected a datetime with a time zone, or None")
    return f"{value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


def _decode_json(stored: AttributeValue) -> Any:
    """Return what JSON has for an attribute value: numbers that are not whole as floats."""
    ((tag, value),) = stored.items()
    if tag == "N":
        try:
            return int(value)
        except ValueError:
            return float(value)
    if tag == "L":
        return [_decode_json(item) for item in value]
    if tag == "M":
        return {name: _decode_json(item) for name, item in value.items()}
    return decode_any(stored)


class _Form(NamedTuple):
    """How values of a kind are stored: their attribute type, and the functions that write and
    read them (None: unchanged).
    """

    tag: str
    write: Callable[[Any], Any] | None = None
    read: Callable[[Any], Any] | None = None


_FORMS: dict[Kind, _Form] = {
    Kind.STRING: _Form("S"),
    Kind.INTEGER: _Form("N", lambda value: str(int(value)), _whole_or_decimal),
    Kind.FLOAT: _Form("N", _number_text, float),
    Kind.BOOLEAN: _Form("BOOL"),
    Kind.TIMESTAMP: _Form("S", _timestamp_text, datetime.fromisoformat),
    Kind.DATE: _Form("S", date.isoformat, date.fromisoformat),
    Kind.DECIMAL: _Form("N", _number_text, Decimal),
    Kind.BINARY: _Form("B"),
}


# How values of a column that is not declared are stored: the first line whose Python type they have
# gives the attribute type and the function that writes them.
_SCALARS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (str, "S", _text),
    (bool, "BOOL", bool),
    ((int, float, Decimal), "N", _number_text),
    ((bytes, bytearray, memoryview), "B", bytes),
    (datetime, "S", _timestamp_text),
    (date, "S", date.isoformat),
)


DELETED = f"{OWN_PREFIX}deleted"
MAX_ITEM_BYTES = 400 * 1024
_MOST_SUMS = (
    60  # an expression can have 300 operators: each sum takes four, and conditions take some
)
_MAX_KEY_BYTES = (2048, 1024)  # of the partition key and of the sort key

KeyItem = dict[str, AttributeValue]

RUNS_ATTRIBUTE = f"{OWN_PREFIX}runs"
COUNT_KEY: Item = {
    "S": {"S": RUNS_ATTRIBUTE},
    "N": {"N": str(_GREATEST.copy_negate())},
    "B": {"B": RUNS_ATTRIBUTE.encode()},
}
"""The key of the item that counts runs (`dynamodb_bookkeeping.py`), by its column's type."""


class InsideChange(NamedTuple):
    """A change of a value inside a map: the value to set, None to remove it, or a number to add, if
    what is there does not exceed `limit`.
    """

    value: AttributeValue | None
    adds: bool = False
    limit: Limit | None = None


@dataclass(frozen=True, slots=True)
class EncodedChanges:
    """An update's changes as attribute values; `remove` includes the columns that it sets to null.

    `merge` has the maps whose members are added to those of JSON columns. `limits` are what columns
    must hold before `add` (at most or at least a number), so that the sum is within the column's
    type. `inside` has the changes of values inside columns.
    """

    set: Item = field(default_factory=dict)
    add: Item = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)
    merge: Item = field(default_factory=dict)
    append: Item = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    inside: Mapping[InnerName, InsideChange] = field(default_factory=dict)

    @property
    def late(self) -> EncodedChanges:
        """The part of a late update that still applies to a newer record
        (`Operation.applies_late_changes`).
        """
        sums = {path: change for path, change in self.inside.items() if change.adds}
        return EncodedChanges(add=self.add, limits=self.limits, append=self.append, inside=sums)


def _is_column_name(name: object) -> bool:
    """Whether a record may have a column of this name."""
    return isinstance(name, str) and name != "" and not name.startswith(OWN_PREFIX)


class _AnyColumn(dict[str, Callable[[Any], AttributeValue]]):
    """The encoders of columns by name: `encode_any` for every valid name that is not in it."""

    def __missing__(self, name: str) -> Callable[[Any], AttributeValue]:
        if not _is_column_name(name):
            raise KeyError(name)
        return encode_any


class ItemCodec(RowCodec):
    """Encodes and decodes the items of one table; a checked value, as `RowCodec` calls it, is an
    attribute value.

    `key` has the attribute type ("S", "N" or "B") of the partition key and the sort key, by name.
    Without `columns`, records may have any columns (`is_open`).
    """

    def __init__(
        self, label: str, key: Mapping[str, str], columns: Sequence[Column] | None
    ) -> None:
        self.is_open = columns is None
        if columns is None:
            known_columns: Sequence[Column] = [Column(name, tag) for name, tag in key.items()]
        else:
            known_columns = columns
        super().__init__(label, tuple(key), known_columns, check=encoder_for, decode=decoder_for)
        if columns is None:
            self._check = _AnyColumn(self._check)
        self.key_types = dict(key)
        self._count_key: Row = tuple(COUNT_KEY[tag] for tag in key.values())
        # The bounds of sums. There are none for types with more digits than DynamoDB, which rejects
        # larger sums itself, and for 64-bit integers, which no counter exceeds: the check would
        # make an increment some 4% more expensive.
        self._bounds: dict[str, NumberBounds] = {}
        for column in columns or ():
            self._add_bounds(column)

    def _add_bounds(self, column: Column) -> None:
        """Note the bounds of sums in a column, if it has any that must be checked."""
        bounds = number_bounds(column)
        is_bigint = column.kind is Kind.INTEGER and integer_bits(column) == 64
        if bounds is None or is_bigint:
            return
        digits = len(bounds.greatest.as_tuple().digits)
        if digits <= DIGITS:
            self._bounds[column.name] = bounds

    def key_row(self, key: Any) -> Row:
        """Return the key as checked attributes. Raises SchemaMismatchError for one that the table
        can't have.
        """
        row = super().key_row(key)
        for name, stored, largest in zip(self.key, row, _MAX_KEY_BYTES, strict=False):
            tag = self.key_types[name]
            size = attribute_bytes(stored)
            if tag not in stored:
                what = f"{self.table}: its key {name!r} is stored as {tag}, but got {stored}."
                raise SchemaMismatchError(what, "Convert it to the type of the key.", column=name)
            # The OutOfRangeError says that no record can have the key: a get finds none.
            if tag != "N" and not 0 < size <= largest:
                text = f"{self.table}: key {name!r} has {size} bytes; expected 1 to {largest}."
                step = "Shorten the key, for example to a hash of it."
                raise SchemaMismatchError(text, step, column=name) from OutOfRangeError(text)
        if row == self._count_key:
            text = f"{self.table}: the key {key!r} is reserved for the item that counts runs."
            raise SchemaMismatchError(
                text, "Rename the key.", column=self.key[0]
            ) from OutOfRangeError(text)
        return row

    def key_item(self, key: Row) -> KeyItem:
        """The attributes of the key, by name."""
        return dict(zip(self.key, key, strict=True))

    def columns_of(self, key: KeyItem, record: Mapping[str, Any]) -> Item:
        """The attributes of a checked record, without those of the key and null ones.

        Raises SchemaMismatchError if the item would be too large.
        """
        columns = {}
        for name, stored in record.items():
            if stored is not None and name not in key:
                columns[name] = stored
        self.check_size({**columns, **key})
        return columns

    def encode_changes(self, changes: CheckedChanges) -> EncodedChanges:
        """Return checked changes as DynamoDB's update expressions need them."""
        sets = {}
        removed = []
        inside: dict[InnerName, InsideChange] = {}
        for name, stored in changes.set.items():
            if isinstance(name, InnerName):
                inside[name] = InsideChange(stored)
            elif stored is None:
                removed.append(name)
            else:
                sets[name] = stored
        numbers = {}
        merged = {}
        for name, stored in changes.add.items():
            if isinstance(name, InnerName):
                inside[name] = InsideChange(stored, True, self._limit(name, stored))
            elif "N" in stored:
                numbers[name] = stored
            else:
                merged[name] = stored
        limits = self._limits(numbers)
        append = {name: stored for name, stored in changes.append.items() if stored["L"]}
        return EncodedChanges(sets, numbers, limits, merged, append, tuple(removed), inside)

    def check_order(self, newest_by: str) -> None:
        """Raise SchemaMismatchError if the values of a declared column have no order.

        In a table without declared columns any column is accepted: the values are checked when they
        are compared (`Guard.holds`).
        """
        if not self.is_open:
            super().check_order(newest_by)

    def column(self, name: str) -> Column:
        """Return the column of this name; a table without declared columns has one of any name.
        Raises SchemaMismatchError for a name that no record may have.
        """
        if not self.is_open:
            return super().column(name)
        if not _is_column_name(name):
            what = (
                f"{self.table}: the column name {name!r} is not a text, or begins with"
                f" {OWN_PREFIX}."
            )
            raise SchemaMismatchError(what, "Rename it.", table=self.table, column=name)
        return self.columns.get(name) or Column(name, "any")

    def are_equal(self, value: AttributeValue | None, part: AttributeValue) -> bool:
        if value is not None and "N" in value and "N" in part:
            return Decimal(value["N"]) == Decimal(part["N"])
        return value == part

    def check_added(self, name: str, value: Any) -> AttributeValue:
        stored: AttributeValue = self.checked(name, value)
        if not stored.keys() & {"N", "M"}:
            raise self.misfit_error(name, value, "only a number or a mapping can be added")
        return stored

    def check_appended(self, name: str, value: Any) -> AttributeValue:
        stored: AttributeValue = self.checked(name, value)
        if "L" not in stored:
            raise self.misfit_error(name, value, "only a list can be appended")
        return stored

    def sum(self, name: str, old: AttributeValue | None, number: AttributeValue) -> AttributeValue:
        """The value of column `name` after adding `number` to `old`; SchemaMismatchError if it
        exceeds its type.
        """
        if old is None or "NULL" in old:
            return number
        if name in self._bounds:
            self._check_sum(name, exact_sum(old, number))
        return {"N": _number_text(exact_sum(old, number))}

    def _check_sum(self, name: str, total: Decimal) -> None:
        """Raise SchemaMismatchError if a column can't hold the sum."""
        value: int | Decimal = total
        if self.column(name).kind is Kind.INTEGER:
            value = int(total)
        self.checked(name, value)

    def check_sums(self, changes: EncodedChanges, item: Item) -> None:
        """Raise SchemaMismatchError if adding to what `item` holds would exceed a column's type, or
        if what leads to a value inside a column is no map.
        """
        for name, limit in changes.limits.items():
            self._check_room(name, item.get(name), changes.add[name], limit)
        for path, change in changes.inside.items():
            # Raises if what leads there is no map.
            change_inside(self, item.get(path.root), path, path.names, InsideChange(None))
            if change.adds and change.limit is not None and change.value is not None:
                old = item.get(path.root)
                for name in path.names:
                    old = (old or {}).get("M", {}).get(name)
                self._check_room(path, old, change.value, change.limit)

    def _check_room(
        self, name: str, old: AttributeValue | None, number: AttributeValue, limit: Limit
    ) -> None:
        """Raise SchemaMismatchError if adding a number to what a column holds would exceed its
        type.
        """
        if old is None:
            return
        if "N" not in old:
            problem = (
                f"{self.table}: an update adds to column {name!r}, which holds {old}, not a number."
            )
            raise SchemaMismatchError(problem, "Set the column instead.", column=str(name))
        is_beyond = operator.gt if limit.comparison == "<=" else operator.lt
        if is_beyond(Decimal(old["N"]), Decimal(limit.number["N"])):
            self.sum(name, old, number)  # raises an error that names the sum

    def record(self, item: Item) -> dict[str, Any] | None:
        """Return the record that an item holds; None for a tombstone. Raises SchemaMismatchError
        if values don't fit the columns, or a column is there in another case only.
        """
        if DELETED in item:
            return None
        try:
            if not self.is_open:
                if not item.keys() >= self.columns.keys():  # a null column is missing, too
                    key = tuple(self.read(self.key, list(map(item.get, self.key))).values())
                    check_cases(self.table, key, item, self.names)
                return self.read(self.names, list(map(item.get, self.names)))
            record = {}
            for name, stored in item.items():
                if not name.startswith(OWN_PREFIX):
                    record[name] = decode_any(stored)
            return record
        except (ValueError, TypeError, ArithmeticError) as error:
            problem = f"{self.table}: an item does not fit its declared columns ({error})."
            raise SchemaMismatchError(
                problem, "Correct the item, or the columns.", table=self.table
            ) from error

    def check_size(self, item: Item) -> None:
        """Raise SchemaMismatchError for an item that exceeds DynamoDB's size limit."""
        size = item_bytes(item)
        if size > MAX_ITEM_BYTES:
            key = {name: item[name] for name in self.key if name in item}
            problem = (
                f"{self.table}: a record of the key {key} has {size:,} bytes; DynamoDB takes"
                f" {MAX_ITEM_BYTES:,}."
            )
            step = (
                "Store large values elsewhere and keep a reference in the record, or split the"
                " record."
            )
            raise SchemaMismatchError(problem, step, table=self.table)

    def _inner_column(self, path: InnerName) -> Column:
        column = super()._inner_column(path)
        self._add_bounds(column)
        return column

    def _limit(self, name: str, number: AttributeValue) -> Limit | None:
        """What a column must hold so that adding `number` stays within its type; None if anything
        may be there.
        """
        step = Decimal(number["N"])
        if name not in self._bounds or not step:
            return None
        bounds = self._bounds[name]
        if step > 0:
            return Limit("<=", {"N": _number_text(_EXACT.subtract(bounds.greatest, step))})
        return Limit(">=", {"N": _number_text(_EXACT.subtract(bounds.least, step))})

    def _limits(self, numbers: Item) -> dict[str, Limit]:
        """What columns must hold so that adding these numbers stays within their types, by
        column.
        """
        limits: dict[str, Limit] = {}
        for name, value in numbers.items():
            limit = self._limit(name, value)
            if limit is not None:
                limits[name] = limit
        if len(limits) > _MOST_SUMS:
            problem = (
                f"{self.table}: an update adds to {len(limits)} columns whose type's limits must be"
                f" checked; one DynamoDB condition can check {_MOST_SUMS}."
            )
            raise SchemaMismatchError(
                problem, "Add to fewer of them in one update.", table=self.table
            )
        return limits


def change_inside(
    codec: ItemCodec,
    value: AttributeValue | None,
    path: InnerName,
    names: Sequence[str],
    change: InsideChange,
) -> AttributeValue:
    """Return the map `value` with the change at `names`, the rest of `path` from here on. Missing
    maps on the way are created. Raises SchemaMismatchError if what is on the way is no map.
    """
    if value is not None and not value.keys() & {"M", "NULL"}:
        problem = f"{codec.table}: an update changes {path!r}, but {value!r:.100} is no map."
        raise SchemaMismatchError(problem, "Set the whole column.", column=str(path))
    members = dict((value or {}).get("M", {}))
    first, *rest = names
    if rest:
        members[first] = change_inside(codec, members.get(first), path, rest, change)
    elif change.value is None:
        members.pop(first, None)
    elif change.adds:
        members[first] = codec.sum(path, members.get(first), change.value)
    else:
        members[first] = change.value
    return {"M": members}


def begin_record(codec: ItemCodec, default: Item, changes: EncodedChanges) -> Item:
    """Return the attributes of a new record: those of `default`, with the changes applied. Raises
    SchemaMismatchError if they do not fit it.
    """
    columns = {**default, **changes.set}
    try:
        for name, number in changes.add.items():
            columns[name] = codec.sum(name, columns.get(name), number)
        for name, values in changes.append.items():
            columns[name] = {"L": [*columns.get(name, {"L": []})["L"], *values["L"]]}
        for name, members in changes.merge.items():
            columns[name] = {"M": {**columns.get(name, {"M": {}})["M"], **members["M"]}}
    except (KeyError, ArithmeticError, TypeError) as error:
        raise SchemaMismatchError(
            f"an update can't be applied to its default: column {name!r} begins as"
            f" {columns.get(name)} ({error!r}).",
            "Use a number in the default where an update adds, and a list where it appends.",
            column=name,
        ) from None
    for name in changes.remove:
        columns.pop(name, None)
    for path, change in changes.inside.items():
        columns[path.root] = change_inside(codec, columns.get(path.root), path, path.names, change)
    return columns


def is_default_redundant(default: Item, changes: EncodedChanges) -> bool:
    """Whether the changes make the same new record from nothing as from `default`.

    Then one UpdateItem, without a condition, updates the record or creates it.
    """
    if changes.merge or changes.inside:
        return False
    for name, stored in default.items():
        is_replaced = name in changes.set or name in changes.remove
        is_added_to_zero = name in changes.add and "N" in stored and not Decimal(stored["N"])
        is_appended_to_nothing = name in changes.append and stored == {"L": []}
        if not (is_replaced or is_added_to_zero or is_appended_to_nothing):
            return False
    return True
