"""The types of columns, as a tree: simple types, arrays, structs, and maps with string keys.

A type is stored and shown as text, in Spark's spelling:
`array<struct<sku:string,price:decimal(10,2)>>`. `parse_type` reads it, `str(type)` writes it.
`arrow_types.py` and `spark_types.py` convert types to those of Arrow and Spark, and back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

SIMPLE_TYPES = (
    "string",
    "boolean",
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "float",
    "double",
    "date",
    "timestamp",
    "binary",
)
"""The simple types without parameters; the only other one is `decimal(precision,scale)`."""
_ALIASES = {
    "long": "bigint",
    "integer": "int",
    "short": "smallint",
    "byte": "tinyint",
    "bool": "boolean",
}
_DECIMAL = re.compile(r"decimal\((\d{1,2}),\s*(\d{1,2})\)")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)+`|[^\s`,:<>()]+|[,:<>()])")
_PATH_COLUMN = re.compile(r"`(?:[^`]|``)+`|[^`.\[]+")
_MAX_DIGITS = 38


class TypeTextError(ValueError):
    """A text is not a type: the rest of the text from the place where the mistake is, and what was
    expected there.
    """

    def __init__(self, rest: str, expected: str) -> None:
        super().__init__(f"at {rest!r}: expected {expected}")
        self.rest = rest
        self.expected = expected


@dataclass(frozen=True, slots=True)
class Simple:
    """A type without parts, such as `bigint` or `decimal(10,2)`."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Array:
    """A list of elements of one type."""

    element: Type

    def __str__(self) -> str:
        return f"array<{self.element}>"


@dataclass(frozen=True, slots=True)
class Map:
    """Values of one type by keys, which are strings."""

    value: Type

    def __str__(self) -> str:
        return f"map<string,{self.value}>"


@dataclass(frozen=True, slots=True)
class Member:
    """A field of a struct."""

    name: str
    type: Type

    def __str__(self) -> str:
        return f"{write_name(self.name)}:{self.type}"


@dataclass(frozen=True, slots=True)
class Struct:
    """Fields with names, in order. Names differ in more than their case, as Spark ignores it."""

    members: tuple[Member, ...]

    def __str__(self) -> str:
        return f"struct<{','.join(map(str, self.members))}>"

    def member(self, name: str) -> Member | None:
        """Return the field of this name, None if there is none."""
        return next((member for member in self.members if member.name == name), None)


Type: TypeAlias = Simple | Array | Map | Struct


def write_name(name: str) -> str:
    """Return the name of a struct's field as types spell it: in backticks unless it is an
    identifier.
    """
    if _PLAIN_NAME.fullmatch(name):
        return name
    return f"`{name.replace('`', '``')}`"


@lru_cache(maxsize=1024)
def parse_type(text: str) -> Type:
    """Return the type that a text names. Raises TypeTextError for any other text."""
    reader = TypeReader(text)
    type_ = reader.read_type()
    reader.expect_end()
    return type_


def is_nested(text: str) -> bool:
    """Whether the type with this text has parts: an array, a map or a struct."""
    return text.endswith(">")


def nested_types(type_: Type) -> Iterator[tuple[str, Type]]:
    """Yield each type within a type with its path, as `member_path` writes it, the outermost first
    with the path "".
    """
    yield "", type_
    if isinstance(type_, Array):
        parts = [("[]", type_.element)]
    elif isinstance(type_, Map):
        parts = [("[*]", type_.value)]
    elif isinstance(type_, Struct):
        parts = [(f".{write_name(member.name)}", member.type) for member in type_.members]
    else:
        return
    for step, part in parts:
        for path, inner in nested_types(part):
            yield step + path, inner


def find_difference(
    given: Type, declared: Type, path: str, fits: Callable[[str, str], bool]
) -> tuple[str, str, str] | None:
    """Return the path of the first part of a type that is not as declared, its text, and what is
    declared there; None if there is none.

    `fits` compares the texts of two parts that differ, of which one is simple. Members of structs
    may be missing, and in another order.
    """
    if given == declared:
        return None
    if isinstance(given, Array) and isinstance(declared, Array):
        return find_difference(given.element, declared.element, f"{path}[]", fits)
    if isinstance(given, Map) and isinstance(declared, Map):
        return find_difference(given.value, declared.value, f"{path}[*]", fits)
    if not isinstance(given, Struct) or not isinstance(declared, Struct):
        if fits(str(given), str(declared)):
            return None
        return path, str(given), str(declared)
    return _find_member_difference(given, declared, path, fits)


def _find_member_difference(
    given: Struct, declared: Struct, path: str, fits: Callable[[str, str], bool]
) -> tuple[str, str, str] | None:
    seen = set()
    for member in given.members:
        inner = f"{path}.{write_name(member.name)}"
        wanted = declared.member(member.name)
        if wanted is None or member.name in seen:
            names = ", ".join(each.name for each in declared.members)
            return inner, str(member.type), f"no such field, only {names}, each once"
        seen.add(member.name)
        found = find_difference(member.type, wanted.type, inner, fits)
        if found is not None:
            return found
    return None


def path_column(path: str) -> str:
    """Return the column that a path begins with: "customer" for "customer.email", and "a.b" for
    "`a.b`.c".
    """
    column = _PATH_COLUMN.match(path)
    if column is None:
        return path
    return _unquote(column[0])


def is_storable(text: str) -> bool:
    """Whether a column of a schema may have the type with this text."""
    try:
        parse_type(text)
    except TypeTextError:
        return False
    return True


def decimal_digits(kind: str) -> tuple[int, int] | None:
    """Return the precision and scale of a decimal type, None for other types."""
    decimal = _DECIMAL.fullmatch(kind)
    if decimal is None:
        return None
    return (int(decimal[1]), int(decimal[2]))


INTEGER_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def expected_range(kind: str) -> str:
    """Return in words which values of its family a type holds."""
    if kind in INTEGER_BITS:
        bound = 2 ** (INTEGER_BITS[kind] - 1)
        return f"expected {-bound} to {bound - 1}"
    if (digits := decimal_digits(kind)) is not None:
        return (
            f"expected at most {digits[0] - digits[1]} digits before and {digits[1]} after the"
            " point"
        )
    wanted = {
        "timestamp": "whole microseconds",
        "float": "a number that 32 bits can hold",
        "double": "a number that a double holds exactly",
    }
    return f"expected {wanted.get(kind, kind)}"


class TypeReader:
    """Reads types, and lists of names with types, from a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    @property
    def rest(self) -> str:
        """What has not been read yet."""
        return self._text[self._at :].strip()

    def error(self, expected: str) -> TypeTextError:
        """Return the error for what comes next."""
        return TypeTextError(self.rest[:40], expected)

    def expect_end(self) -> None:
        """Raise TypeTextError unless the whole text has been read."""
        if self.rest:
            raise self.error("the end of the type")

    def read_type(self) -> Type:
        """Read a type."""
        word = self._read(r"[^`]", "a type").lower()
        if word == "array":
            return Array(self._in_brackets())
        if word == "map":
            return self._read_map()
        if word == "struct":
            return self._read_struct()
        if word == "decimal":
            return self._read_decimal()
        name = _ALIASES.get(word, word)
        if name not in SIMPLE_TYPES:
            self._at -= len(word)
            raise self.error(
                f"{', '.join(SIMPLE_TYPES)}, decimal(p,s), array<type>, struct<name: type, …>, or"
                " map<string, type>"
            )
        return Simple(name)

    def read_columns(self, separator: str) -> Iterator[Member]:
        """Read names with their types until the end or a `>`; `separator` ("" or ":") may stand
        between both.
        """
        while True:
            name = self._read(r"[^,:<>()]", "a name")
            if separator:
                self._skip(separator)
            yield Member(_unquote(name), self.read_type())
            if not self._skip(","):
                return

    def _read_map(self) -> Map:
        self._expect("<")
        key = self.read_type()
        if key != Simple("string"):
            raise TypeTextError(f"map<{key}, …>", "map<string, …>: keys of maps are strings")
        self._expect(",")
        value = self.read_type()
        self._expect(">")
        return Map(value)

    def _read_struct(self) -> Struct:
        self._expect("<")
        members = tuple(self.read_columns(":"))
        self._expect(">")
        seen: set[str] = set()
        for member in members:
            if member.name.lower() in seen:
                raise TypeTextError(member.name, "each name of a struct once, whatever its case")
            seen.add(member.name.lower())
        return Struct(members)

    def _read_decimal(self) -> Simple:
        expected = f"decimal(p,s) of at most {_MAX_DIGITS} digits, s of them after the point"
        self._expect("(")
        precision = self._read(r"\d{1,2}$", expected)
        self._expect(",")
        scale = self._read(r"\d{1,2}$", expected)
        self._expect(")")
        if not max(1, int(scale)) <= int(precision) <= _MAX_DIGITS:
            raise TypeTextError(f"decimal({precision},{scale})", expected)
        return Simple(f"decimal({int(precision)},{int(scale)})")

    def _in_brackets(self) -> Type:
        self._expect("<")
        type_ = self.read_type()
        self._expect(">")
        return type_

    def _read(self, pattern: str, expected: str) -> str:
        token = _TOKEN.match(self._text, self._at)
        if token is None or not re.match(pattern, token[1]):
            raise self.error(expected)
        self._at = token.end()
        return token[1]

    def _expect(self, sign: str) -> None:
        if not self._skip(sign):
            raise self.error(f"{sign!r}")

    def _skip(self, sign: str) -> bool:
        token = _TOKEN.match(self._text, self._at)
        if token is None or token[1] != sign:
            return False
        self._at = token.end()
        return True


def _unquote(name: str) -> str:
    if name.startswith("`"):
        return name[1:-1].replace("``", "`")
    return name
