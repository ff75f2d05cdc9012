"""Types of columns and their values, which all backends share.

A column's type may be written as Spark's simple name or as SQL's usual one. Values in Python:

    string       str
    integers     int
    float types  float (an int is accepted)
    boolean      bool
    timestamp    datetime with a time zone; always an instant, read back in UTC
    date         date
    decimal      Decimal (an int is accepted); with (p,s) no more digits than that: nothing is
                 rounded
    binary       bytes
    json         what JSON can represent: dict with str keys, list, str, int, float, bool
    array<type>  list (a tuple is accepted) of a type above except json; may contain None
    nested       struct<name: type, …>, map<string, type> and arrays of these, of any depth, with
                 Spark's names of types inside: dicts and lists (`nested_values.py`)

None is null in all of them. "float" is Spark's, 32 bits wide; "timestamp" is Spark's, an instant.
Numbers are finite: NaN and infinity are rejected, because not every store supports them and NaN
can't be compared.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from enum import Enum
from typing import Any, NamedTuple

from dagster_adjunct.resources.class_registry import ClassRegistry
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.exact_values import to_exact_array
from dagster_adjunct.resources.schemas.types import (
    Array,
    Simple,
    Struct,
    Type,
    TypeTextError,
    arrow_type,
    is_nested,
    parse_type,
    write_name,
)
from dagster_adjunct.resources.table_backends.nested_values import (
    InnerName,
    PartError,
    check_json,
    conform,
    make_nested_checker,
)
from dagster_adjunct.resources.validation import validated

_BACKENDS: ClassRegistry[Any] = ClassRegistry(
    "backend of tables",
    "register_backend",
    dynamodb="resources.table_backends.dynamodb.DynamoDbTable",
    http="resources.table_backends.http.HttpTable",
    memory="resources.table_backends.memory.MemoryTable",
    postgres="resources.table_backends.postgres.PostgresTable",
    redis="resources.table_backends.redis.RedisTable",
    sqlite="resources.table_backends.sqlite.SqliteTable",
    dataset="assets.reading.dataset.DatasetTable",
    **{"key-value": "resources.table_backends.key_value_rows.KeyValueRows"},
)


@validated
def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """Register a function's class, or a callable that makes one, as `name`, so that commands can
    open its tables.

    It is called with the entries of the function's `to_dict()` as keyword arguments.
    """
    _BACKENDS.register(name, backend)


describe_function = _BACKENDS.describe
function_from_description = _BACKENDS.from_description
"""`describe_function` returns a registered function's declaration as plain values, such as
{"backend": "sqlite", …}; `function_from_description` makes a function from them, which is not
connected yet."""


class Kind(Enum):
    """What kind of values a column has, whatever its type is called in the database."""

    STRING = "string"
    INTEGER = "integer"
    FLOAT = "float"
    BOOLEAN = "boolean"
    TIMESTAMP = "timestamp"
    DATE = "date"
    DECIMAL = "decimal"
    BINARY = "binary"
    JSON = "json"
    LIST = "list"
    NESTED = "nested"
    OTHER = "other"


_WORDS = {
    Kind.STRING: "string|text|varchar|char|character|character varying|bpchar|name|clob",
    Kind.INTEGER: "tinyint|smallint|int2|int|integer|int4|bigint|int8|long|short|byte",
    Kind.FLOAT: "float|real|float4|double|double precision|float8",
    Kind.BOOLEAN: "boolean|bool",
    Kind.TIMESTAMP: (
        "timestamp|timestamptz|datetime|timestamp with time zone|timestamp without time zone"
    ),
    Kind.DATE: "date",
    Kind.DECIMAL: "decimal|numeric|text decimal",
    Kind.BINARY: "binary|bytea|blob|varbinary",
    Kind.JSON: "json|jsonb|text json",
}
_KINDS = {word: kind for kind, words in _WORDS.items() for word in words.split("|")}
# A type's name: words, optionally a size, then optionally more words ("int", "timestamp(3) with
# time zone").
_SPELLED = re.compile(
    r"\s*([a-z][a-z0-9_ ]*?)\s*(?:(\(\s*\d+\s*(?:,\s*\d+\s*)?\))\s*([a-z ]*?))?\s*", re.IGNORECASE
)
# A list's type: Spark's array<int>, PostgreSQL's integer[], or "TEXT ARRAY INTEGER", as SQLite
# tables are created.
_LIST = re.compile(r"\s*(?:array\s*<(.+)>|(.+)\[\]|text array (.+))\s*", re.IGNORECASE)
_NOT_IN_LISTS = (Kind.JSON, Kind.LIST, Kind.NESTED, Kind.OTHER)


class _Integer(NamedTuple):
    """An integer type of columns: its name in Spark, and its width in bits."""

    spark_type: str
    bits: int


# By all names of the type. A tinyint has 16 bits, because PostgreSQL has no 8-bit integers.
_INTEGERS = {
    **dict.fromkeys(("tinyint", "byte"), _Integer("tinyint", 16)),
    **dict.fromkeys(("smallint", "short", "int2"), _Integer("smallint", 16)),
    **dict.fromkeys(("int", "integer", "int4"), _Integer("int", 32)),
    **dict.fromkeys(("bigint", "long", "int8"), _Integer("bigint", 64)),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, its type's name in lower case, its size as "(10,2)" or "", and its kind.

    A list column has the type of its values as its `element`. A nested column, and a value inside
    one (`inner_column`), has its type as a tree.
    """

    name: str
    type: str
    size: str = ""
    kind: Kind = Kind.OTHER
    element: Column | None = None
    nested: Type | None = None


def parse_column(name: str, declared: str) -> Column:
    """Return the column `name` of the type `declared`, which may have any of its usual SQL or Spark
    names.

    Examples are "int8" and "array<int>". The column's kind is OTHER for an unknown type.
    """
    nested = _parse_nested(declared)
    if nested is not None:
        check_identifier("column", name)
        return Column(name, str(nested), kind=Kind.NESTED, nested=nested)
    listed = _LIST.fullmatch(declared)
    if listed is not None:
        element = parse_column(name, listed[1] or listed[2] or listed[3])
        if element.kind in _NOT_IN_LISTS:
            kind = Kind.OTHER
        else:
            kind = Kind.LIST
        return Column(name, f"array<{element.type}{element.size}>", "", kind, element)
    match = _SPELLED.fullmatch(declared)
    if match is None:
        return Column(check_identifier("column", name), declared.strip().lower())
    word = " ".join(f"{match[1]} {match[3] or ''}".lower().split())
    size = (match[2] or "").replace(" ", "")
    return Column(check_identifier("column", name), word, size, _KINDS.get(word, Kind.OTHER))


def _parse_nested(declared: str) -> Type | None:
    """Return the tree of a nested type; None for lists of simple values and all other types."""
    if not is_nested(declared.rstrip()):
        return None
    try:
        tree = parse_type(declared)
    except TypeTextError:
        return None
    if isinstance(tree, Array) and isinstance(tree.element, Simple):
        return None
    return tree


def parse_known_column(name: str, declared: str) -> Column:
    """Return the column `name` of the type `declared`.

    Unlike `parse_column`, it raises ConfigurationError for an unknown type.
    """
    column = parse_column(name, declared)
    if column.kind is Kind.OTHER:
        reason = ""
        if is_nested(declared.rstrip()):
            reason = f" ({_nested_mistake(declared)})"
        raise ConfigurationError(
            f"column {name!r} has the unknown type {declared!r}{reason}; expected string, smallint,"
            " int, bigint, float, double, boolean, timestamp, date, decimal(p,s), binary, json, one"
            " of SQL's usual names for them, array<type>, or struct<name: type, …>, map<string,"
            " type> and arrays of these, with Spark's names of types inside.",
            column=name,
        )
    return column


def _nested_mistake(declared: str) -> str:
    """Return why a nested type can't be used, for an error."""
    try:
        parse_type(declared)
    except TypeTextError as error:
        return str(error)
    return "it has an element of an unknown type"


def nested_form(column: Column) -> Type | None:
    """Return the type of a column that stores without nested types hold in the JSON of
    `nested_values.py`; None for other columns.

    These are nested columns and lists of binary values, whose elements become base64.
    """
    is_binary_list = column.element is not None and column.element.kind is Kind.BINARY
    if is_binary_list:
        return Array(Simple("binary"))
    return column.nested


class InnerNameError(ValueError):
    """A path does not name a simple value inside a column of structs: what is wrong with it, and
    the next step.
    """

    def __init__(self, problem: str, next_step: str) -> None:
        super().__init__(problem)
        self.next_step = next_step


def inner_column(path: InnerName, root: Column | None) -> Column:
    """Return the simple value at a path inside the column `root` as a column named by the path.

    Raises InnerNameError, whose text continues the words "table X".
    """
    if root is None:
        raise InnerNameError(f" has no column {path.root!r}", "Correct the name, or add the column")
    type_: Type | None = root.nested
    where = write_name(path.root)
    for name in path.names:
        if not isinstance(type_, Struct):
            found = type_ or f"{root.type}{root.size}"
            raise InnerNameError(
                f": {path!r} names a part of {where}, which is {found}, not a struct",
                f"Set all of column {path.root!r}; paths go through structs only",
            )
        member = type_.member(name)
        if member is None:
            names = ", ".join(write_name(member.name) for member in type_.members)
            raise InnerNameError(
                f": {where} has no field {name!r}; it has {names}",
                "Correct the path, or the column's declared type",
            )
        type_ = member.type
        where += f".{write_name(name)}"
    if not isinstance(type_, Simple):
        raise InnerNameError(
            f": {path!r} is {type_}, which an update can't change by itself",
            f"Name a simple value in it, or set all of column {path.root!r}",
        )
    parsed = parse_column("part", type_.name)
    return Column(path, parsed.type, parsed.size, parsed.kind, nested=type_)


def check_columns_and_key(
    table: str,
    names: Sequence[str],
    declared: Iterable[Column],
    key: Sequence[str],
    unique_sets: Sequence[set[str]],
) -> None:
    """Raise SchemaMismatchError if a declared column or the key is missing in the table, or if the
    key is not unique.

    `names` are the table's columns. `unique_sets` are the sets of columns of which the table has a
    primary key or a unique index; the key must be one of them.
    """
    for column in declared:
        if column.name not in names:
            problem = (
                f"{table} has no column {column.name!r}, but one is declared; it has"
                f" {', '.join(names)}."
            )
            raise SchemaMismatchError(
                problem, "Correct the declaration, or add the column.", column=column.name
            )
    for name in key:
        if name not in names:
            problem = (
                f"{table} has no column {name!r}, which its key names; it has {', '.join(names)}."
            )
            raise SchemaMismatchError(problem, "Correct key=, or add the column.", column=name)
    if set(key) not in unique_sets:
        problem = (
            f"{table} has no primary key or unique index on {', '.join(key)} that distinguishes all"
            " values."
        )
        step = "Add one without a collation that equates different texts, or correct the key."
        raise SchemaMismatchError(problem, step, table=table)


def check_required_columns(table: str, required: Iterable[str], written: Collection[str]) -> None:
    """Raise SchemaMismatchError for a column that each new row has to give, and that is not
    written.
    """
    for name in required:
        if name not in written:
            raise SchemaMismatchError(
                f"{table}: column {name!r} is NOT NULL without a default, and it is not among the"
                f" declared columns, which are {', '.join(written)}: no record could be created.",
                "Declare and send it, or give it a default.",
                column=name,
            )


OWN_PREFIX = "adjunct_"
"""The prefix of what conditions store in the record itself, in stores without an idempotency
table.
"""


def check_not_reserved(table: str, columns: Iterable[Column]) -> None:
    """Raise ConfigurationError for a column whose name is reserved for conditions."""
    name = next((column.name for column in columns if column.name.startswith(OWN_PREFIX)), None)
    if name is not None:
        problem = (
            f"{table} has a column {name!r}; names that begin with {OWN_PREFIX} are reserved for"
            " conditions."
        )
        raise ConfigurationError(problem, "Rename it.", argument="columns")


def check_key_text(table: str, column: Column) -> None:
    """Raise SchemaMismatchError for a key column whose type may write equal values as different
    texts.
    """
    is_any_decimal = column.kind is Kind.DECIMAL and declared_digits(column) is None
    if column.kind is Kind.FLOAT or is_any_decimal:
        raise SchemaMismatchError(
            f"{table}: its key column {column.name!r} is {column.type}, whose equal values may have"
            " several texts.",
            "Use a string, an integer, boolean, timestamp, date, binary or decimal(p,s).",
            column=column.name,
        )


def loose_key_error(table: str, column: str, kind: str, wanted: str) -> SchemaMismatchError:
    """The error for a key column that is `kind`, so that the store considers some different values
    equal.

    `wanted` is a type that it could have instead.
    """
    problem = f"{table}: the key column {column!r} is {kind}: several keys would be one record."
    return SchemaMismatchError(
        problem, f"Make it {wanted}, or use another column that is as the key.", column=column
    )


def check_identifier(what: str, name: str) -> str:
    """Return `name` if every backend can quote it as an identifier: 1 to 63 bytes, no control
    characters.
    """
    if isinstance(name, str) and 0 < len(name.encode()) <= 63 and name.isprintable():
        return name
    raise ConfigurationError(
        f"{what} name {name!r} is invalid: expected 1 to 63 bytes of printable text.", argument=what
    )


class OutOfRangeError(TypeError):
    """A value that has the column's type, but can't be stored in the column, so that no record
    has it.
    """


def make_checker(column: Column, bits: int | None = None) -> Callable[[Any], Any]:
    """Return the function that checks a value other than None for the column and normalizes it.

    It raises TypeError, naming the expected type, if the value doesn't fit. `bits` is the width of
    all integers, for stores that have only one.
    """
    if column.nested is not None:
        return make_nested_checker(column.nested, _simple_checker)
    if column.kind is Kind.INTEGER:
        return _integer_checker(bits or integer_bits(column))
    if column.kind is Kind.DECIMAL and (digits := declared_digits(column)) is not None:
        return _decimal_checker(*digits)
    if column.kind is Kind.LIST:
        assert column.element is not None
        return list_checker(make_checker(column.element, bits))
    return _CHECKERS[column.kind]


def _simple_checker(kind: str) -> Callable[[Any], Any]:
    """Return the checker of a simple type within nested values."""
    if kind == "tinyint":  # in columns it has 16 bits, because of PostgreSQL
        return _integer_checker(8)
    return make_checker(parse_column("part", kind))


def integer_bits(column: Column) -> int:
    """The width of the column's integers in bits; 64 for columns of other types."""
    if column.type in _INTEGERS:
        return _INTEGERS[column.type].bits
    return 64


class Digits(NamedTuple):
    """How many digits a decimal has at most, and how many of them are after the point."""

    precision: int
    scale: int


def declared_digits(column: Column) -> Digits | None:
    """Return the digits of a decimal column; None if it is declared without.

    For other columns with a size, such as varchar(10), the size is the precision.
    """
    if not column.size:
        return None
    precision, _, scale = column.size.strip("()").partition(",")
    return Digits(int(precision), int(scale or 0))


_EXACT = Context(prec=2100)


def decimal_writer(column: Column) -> Callable[[Decimal], str]:
    """Return the function that writes decimals of a column as text.

    It writes all declared digits after the point, so that equal numbers have equal texts.
    """
    digits = declared_digits(column)
    if digits is None:
        return str
    unit = Decimal((0, (1,), -digits.scale))  # the last digit that is written
    zero = Decimal((0, (0,), -digits.scale))
    # Str is faster, but writes numbers below 1E-6 with an exponent.
    to_text = str if digits.scale <= 6 else "{:f}".format
    zero_text = to_text(zero)  # also of -0.00
    return lambda number: to_text(number.quantize(unit, context=_EXACT)) if number else zero_text


class NumberBounds(NamedTuple):
    """The least and the greatest number that a column can hold."""

    least: Decimal
    greatest: Decimal


def number_bounds(column: Column) -> NumberBounds | None:
    """The bounds of the numbers in an integer or decimal column.

    None for other columns, and for decimals without declared digits.
    """
    if column.kind is Kind.INTEGER:
        most = Decimal(2 ** (integer_bits(column) - 1) - 1)
        return NumberBounds(-most - 1, most)
    digits = None
    if column.kind is Kind.DECIMAL:
        digits = declared_digits(column)
    if digits is None:
        return None
    precision, scale = digits
    most = Decimal((0, (9,) * precision, -scale))
    least = most.copy_negate()  # `-most` would round to the context's precision
    return NumberBounds(least, most)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError("expected a bool")


def _string(value: Any) -> str:
    """Return the text if it can be stored; else raise TypeError."""
    if not isinstance(value, str):
        raise TypeError("expected a str")
    return check_encodable(value)


def check_encodable(text: str) -> str:
    """Return the text if it can be encoded as UTF-8; else raise TypeError."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        raise TypeError("expected text without lone surrogates") from None
    return text


def _integer_checker(bits: int) -> Callable[[Any], Any]:
    """Return the function that accepts an int of so many bits, and no bool."""
    least = -(2 ** (bits - 1))
    most = 2 ** (bits - 1) - 1

    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError("expected an int")
        if least <= value <= most:
            return value
        raise OutOfRangeError(f"out of range, expected an int of {bits} bits")

    return check


def list_checker(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function that checks a list or tuple, each item other than None with `check`, and
    returns a list.
    """

    def checked(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise TypeError("expected a list")
        try:
            return [None if item is None else check(item) for item in value]
        except TypeError as error:
            raise TypeError(f"in the list: {error}") from None

    return checked


def _float(value: Any) -> float:
    """Return a finite number as a float; else raise TypeError."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise TypeError("expected a finite float, or None for NaN and infinity")
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("expected a float")
    try:
        return float(value)
    except OverflowError:
        raise TypeError("out of range, expected a float") from None


def _decimal(value: Any) -> Decimal:
    """Return a finite number as a Decimal; else raise TypeError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value)
    if not isinstance(value, Decimal):
        raise TypeError("expected a Decimal")
    if not value.is_finite():
        raise TypeError("expected a finite Decimal, or None")
    return value


def _decimal_checker(precision: int, scale: int) -> Callable[[Any], Any]:
    """Return the function that accepts a number which a column of these digits can hold without
    rounding, and returns it as a Decimal.
    """

    def check(value: Any) -> Decimal:
        """Return the number; OutOfRangeError if it has too many digits."""
        number = _decimal(value)
        digits = len(number.as_tuple().digits)
        may_exceed = digits + abs(_exponent_of(number)) > min(scale, precision - scale)
        if number and may_exceed:  # a quick test, which most numbers pass
            shortest = number.normalize(Context(prec=max(digits, 1)))
            exponent = _exponent_of(shortest)
            digits_before_point = len(shortest.as_tuple().digits) + exponent
            digits_after_point = -exponent
            if digits_after_point > scale or digits_before_point > precision - scale:
                raise OutOfRangeError(
                    f"out of range, expected a Decimal of {precision} digits, {scale} behind the"
                    " point"
                )
        return number

    return check


def _exponent_of(number: Decimal) -> int:
    """Return the power of ten by which the number's digits are multiplied."""
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)  # it is finite
    return exponent


def _timestamp(value: Any) -> datetime:
    """Return an instant in UTC; TypeError for a value that is not a datetime with a time zone."""
    if type(value) is datetime and value.tzinfo is UTC:
        return value
    if isinstance(value, datetime) and value.tzinfo is not None and value.utcoffset() is not None:
        try:
            return value.astimezone(UTC)
        except OverflowError:
            raise OutOfRangeError("out of range, expected years 1 to 9999 in UTC") from None
    raise TypeError("expected a datetime with a time zone, or None")


def _date(value: Any) -> date:
    if isinstance(value, date) and not isinstance(value, datetime):
        return value
    raise TypeError("expected a date without a time")


def _binary(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError("expected bytes")


def _json(value: Any) -> Any:
    """Return a value that JSON can hold unchanged; else raise TypeError."""
    try:
        check_json(value)
    except RecursionError:
        raise TypeError("expected what JSON can hold: it is nested too deeply") from None
    except PartError as error:
        raise TypeError(f"expected what JSON can hold: {error}") from None
    return value


_CHECKERS: dict[Kind, Callable[[Any], Any]] = {
    Kind.STRING: _string,
    Kind.FLOAT: _float,
    Kind.BOOLEAN: _boolean,
    Kind.TIMESTAMP: _timestamp,
    Kind.DATE: _date,
    Kind.DECIMAL: _decimal,
    Kind.BINARY: _binary,
    Kind.JSON: _json,
    Kind.OTHER: lambda value: value,
}


_SIMPLE = {
    Kind.STRING: "string",
    Kind.BOOLEAN: "boolean",
    Kind.TIMESTAMP: "timestamp",
    Kind.DATE: "date",
    Kind.BINARY: "binary",
    Kind.JSON: "string",
}
_FLOATS = {"float": "float", "real": "float", "float4": "float"}


def to_spark_type(declared: str | Column) -> str | None:
    """Return the Spark type of a column's declared type; None if the declaration doesn't determine
    it.

    JSON becomes a string; nested types stay as they are. A decimal needs both numbers of digits, as
    in "decimal(10,2)".
    """
    column = parse_column("column", declared) if isinstance(declared, str) else declared
    if column.kind is Kind.INTEGER:
        return _INTEGERS[column.type].spark_type
    if column.kind is Kind.FLOAT:
        return _FLOATS.get(column.type, "double")
    if column.kind is Kind.DECIMAL:
        if "," in column.size:
            return f"decimal{column.size}"
        return None
    if column.kind is Kind.LIST and column.element is not None:
        element = to_spark_type(column.element)
        if element is None:
            return None
        return f"array<{element}>"
    if column.kind is Kind.NESTED:
        return column.type
    return _SIMPLE.get(column.kind)


def check_cases(what: str, key: object, record: Collection[str], names: Collection[str]) -> None:
    """Raise SchemaMismatchError for a record that lacks one of these columns, but has one whose
    name differs from it only by case.

    The column would be read as null. `what` says where the record of this key comes from.
    """
    missing = [name for name in names if name not in record]
    if not missing:
        return
    others = {str(name).lower(): name for name in record if name not in names}
    for name in missing:
        if name.lower() in others:
            raise SchemaMismatchError(
                f"{what}: the record of key {key!r} has no column {name!r}, but"
                f" {others[name.lower()]!r} in another case.",
                "Name the column as the store does.",
                column=name,
                keys=(key,),
            )


def arrow_column_from_records(
    what: str,
    keys: Sequence[Any],
    records: Sequence[Mapping[str, Any] | None],
    name: str,
    kind: str,
    known: Collection[str],
) -> pa.Array:
    """Return one column of records as an Arrow array; null for missing records and values.

    `name` is the column, `kind` its Spark type, `keys` are the records' keys; `known` are all
    columns that are read. Raises SchemaMismatchError for the first value of another type, and for a
    column that is there in another case only; `what` says in it where the records come from.
    """
    values = []
    for key, record in zip(keys, records, strict=True):
        value = None
        if record:
            if name not in record:
                check_cases(what, key, record, known)
            value = record.get(name)
        if kind == "string" and isinstance(value, dict | list):  # of a column of JSON
            value = json.dumps(value, sort_keys=True)
        values.append(value)
    misfits = (pa.ArrowException, TypeError, ValueError, OverflowError)
    try:
        return _array(values, kind)
    except misfits:
        for key, value in zip(keys, values, strict=True):
            try:
                _array([value], kind)
            except misfits as error:
                raise SchemaMismatchError(
                    f"{what}: the record of key {key!r} has {value!r} ({type(value).__name__}) in"
                    f" {name!r}, which is {kind}: {str(error).splitlines()[0]}.",
                    "Correct the table's declared columns, or the type given in select=.",
                    column=name,
                ) from error
        raise  # each value fits by itself, but not all together


def _array(values: list[Any], kind: str) -> pa.Array:
    """Return values of one column as an array of its Spark type `kind`; raises an error if a value
    doesn't fit without loss.
    """
    if kind != "boolean" and any(value.__class__ is bool for value in values):
        raise TypeError("a boolean fits only a boolean column")
    if is_nested(kind):
        tree = parse_type(kind)
        values = [conform(tree, value) for value in values]
    return to_exact_array(values, arrow_type(kind))
