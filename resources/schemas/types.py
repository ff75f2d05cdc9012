"""The types of columns, as a tree: simple types, arrays, structs, and maps with string keys.

A type is stored and shown as text, in Spark's spelling:
`array<struct<sku:string,price:decimal(10,2)>>`. `parse_type` reads it, `str(type)` writes it.
At the end, types are converted to those of Arrow and Spark, and back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa, pt

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

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
    """Yield (path, type) for a type, whose path is "", and for all within it, the outer ones first:
    ".price" is a member of a struct, "[]" the elements of an array, "[*]" the values of a map.
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


class TypeDifference(NamedTuple):
    """A part of a type that is not as declared: its path, its type as text, and what is declared
    there, in words.
    """

    path: str
    given: str
    declared: str


def find_difference(
    given: Type, declared: Type, path: str, fits: Callable[[str, str], bool]
) -> TypeDifference | None:
    """Return the first part of a type that is not as declared; None if there is none. `path` is
    that of the type.

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
        return TypeDifference(path, str(given), str(declared))
    return _find_member_difference(given, declared, path, fits)


def _find_member_difference(
    given: Struct, declared: Struct, path: str, fits: Callable[[str, str], bool]
) -> TypeDifference | None:
    """Return the first member of a struct that is not as declared, or a part of it; None if there
    is none.
    """
    seen = set()
    for member in given.members:
        inner = f"{path}.{write_name(member.name)}"
        wanted = declared.member(member.name)
        if wanted is None or member.name in seen:
            names = ", ".join(each.name for each in declared.members)
            expected = f"no such field, only {names}, each once"
            return TypeDifference(inner, str(member.type), expected)
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


class Digits(NamedTuple):
    """How many digits a decimal type has in all, and after the point."""

    precision: int
    scale: int

    @property
    def before_point(self) -> int:
        """How many digits it has before the point."""
        return self.precision - self.scale


def decimal_digits(kind: str) -> Digits | None:
    """Return the digits of a decimal type, None for other types."""
    decimal = _DECIMAL.fullmatch(kind)
    if decimal is None:
        return None
    return Digits(int(decimal[1]), int(decimal[2]))


INTEGER_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def expected_range(kind: str) -> str:
    """Return in words which values of its family a type holds."""
    if kind in INTEGER_BITS:
        bound = 2 ** (INTEGER_BITS[kind] - 1)
        return f"expected {-bound} to {bound - 1}"
    if (digits := decimal_digits(kind)) is not None:
        return (
            f"expected at most {digits.before_point} digits before and {digits.scale} after the"
            " point"
        )
    wanted = {
        "timestamp": "whole microseconds",
        "float": "a number that 32 bits can hold",
        "double": "a number that a double holds exactly",
    }
    return f"expected {wanted.get(kind, kind)}"


class TypeReader:
    """Reads types, and lists of names with types, from a text. All that read raise TypeTextError
    for what is not expected next.
    """

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
            self._at -= len(word)  # the error shows this word, too
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
        """Read the rest of a map's type, after the word."""
        self._expect("<")
        key = self.read_type()
        if key != Simple("string"):
            raise TypeTextError(f"map<{key}, …>", "map<string, …>: keys of maps are strings")
        self._expect(",")
        value = self.read_type()
        self._expect(">")
        return Map(value)

    def _read_struct(self) -> Struct:
        """Read the rest of a struct's type, after the word."""
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
        """Read the rest of a decimal's type, after the word."""
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
        """Read a type in angle brackets."""
        self._expect("<")
        type_ = self.read_type()
        self._expect(">")
        return type_

    def _read(self, pattern: str, expected: str) -> str:
        """Read the next word or sign, which begins with a match of the pattern. Raises
        TypeTextError, which says what was expected.
        """
        token = _TOKEN.match(self._text, self._at)
        if token is None or not re.match(pattern, token[1]):
            raise self.error(expected)
        self._at = token.end()
        return token[1]

    def _expect(self, sign: str) -> None:
        """Read this sign. Raises TypeTextError if it does not come next."""
        if not self._skip(sign):
            raise self.error(f"{sign!r}")

    def _skip(self, sign: str) -> bool:
        """Read this sign if it comes next; return whether it did."""
        token = _TOKEN.match(self._text, self._at)
        if token is None or token[1] != sign:
            return False
        self._at = token.end()
        return True


def _unquote(name: str) -> str:
    """Return a name without its backticks."""
    if name.startswith("`"):
        return name[1:-1].replace("``", "`")
    return name


def type_from_spark(kind: DataType) -> str:
    """Return the text of a type of Spark. Unlike Spark's own text, it quotes names of fields where
    that is needed, so that it can be read again.
    """
    return str(tree_from_spark(kind))


def tree_from_spark(kind: DataType) -> Type:
    """Return a type of Spark as a tree. A type that no schema may have, such as `void` or a map
    whose keys are numbers, is a simple one with its text as name.
    """
    name = kind.typeName()
    if name == "array":
        return Array(tree_from_spark(kind.elementType))  # type: ignore[attr-defined]
    if name == "struct":
        members = []
        for field in kind.fields:  # type: ignore[attr-defined]
            members.append(Member(field.name, tree_from_spark(field.dataType)))
        return Struct(tuple(members))
    if name != "map":
        return Simple(kind.simpleString())
    value = tree_from_spark(kind.valueType)  # type: ignore[attr-defined]
    key = type_from_spark(kind.keyType)  # type: ignore[attr-defined]
    if key == "string":
        return Map(value)
    return Simple(f"map<{key},{value}>")


def types_from_spark(schema: StructType) -> dict[str, str]:
    """Return the text of the type of each column."""
    return {field.name: type_from_spark(field.dataType) for field in schema.fields}


# The functions of pyarrow that return the Arrow types.
_ARROW_TYPES = {
    "string": "string",
    "boolean": "bool_",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "date": "date32",
    "binary": "binary",
}


@lru_cache(maxsize=1024)
def arrow_type(kind: str) -> Any:
    """Return the Arrow type of a type's text; timestamps are in microseconds, UTC."""
    return _to_arrow(parse_type(kind))


def _to_arrow(type_: Type) -> pa.DataType:
    """Return the Arrow type of a type."""
    if isinstance(type_, Array):
        return pa.list_(pa.field("element", _to_arrow(type_.element)))
    if isinstance(type_, Map):
        return pa.map_(pa.string(), _to_arrow(type_.value))
    if isinstance(type_, Struct):
        return pa.struct([(member.name, _to_arrow(member.type)) for member in type_.members])
    digits = decimal_digits(type_.name)
    if digits is not None:
        return pa.decimal128(*digits)
    if type_.name == "timestamp":
        return pa.timestamp("us", tz="UTC")
    return getattr(pa, _ARROW_TYPES[type_.name])()


def type_from_arrow(field: pa.Field) -> str:
    """Return the text of the type of an Arrow column, or Arrow's own name for a type that no
    schema may have.
    """
    return str(tree_from_arrow(field.type, field.name))


def tree_from_arrow(kind: pa.DataType, path: str) -> Type:
    """Return an Arrow type as a tree; `path` names its place in errors. A type that no schema may
    have is a simple one with Arrow's own name.
    """
    if pt.is_dictionary(kind):
        kind = kind.value_type
    if is_list(kind):
        return Array(tree_from_arrow(kind.value_type, f"{path}[]"))
    if pt.is_struct(kind):
        members = []
        for field in kind:
            inner = f"{path}.{write_name(field.name)}"
            members.append(Member(field.name, tree_from_arrow(field.type, inner)))
        return Struct(tuple(members))
    if not pt.is_map(kind):
        return Simple(_simple_from_arrow(kind, path))
    value = tree_from_arrow(kind.item_type, f"{path}[*]")
    key = tree_from_arrow(kind.key_type, path)
    if key == Simple("string"):
        return Map(value)
    return Simple(f"map<{key},{value}>")


def _simple_from_arrow(kind: pa.DataType, path: str) -> str:
    """Return the text of a simple Arrow type, or Arrow's own name. Raises SchemaMismatchError for
    timestamps without a zone.
    """
    if pt.is_large_string(kind) or pt.is_string_view(kind):
        return "string"
    if pt.is_large_binary(kind) or pt.is_binary_view(kind):
        return "binary"
    if pt.is_timestamp(kind):
        if kind.tz is None:
            problem = f"column {path!r} is a timestamp without a time zone."
            raise SchemaMismatchError(problem, time_zone_advice(path), column=path)
        return "timestamp"
    if pt.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return next((name for name in SIMPLE_TYPES if arrow_type(name).equals(kind)), str(kind))


def time_zone_advice(path: str) -> str:
    """Return how to give the times of a column of a frame, or of a part of one, a time zone."""
    if "[" in path or "." in path:  # a part of a nested value, which these functions don't take
        return (
            "Give its times a time zone where they are made, as in"
            " time.replace(tzinfo=datetime.timezone.utc), or in Arrow with the type"
            " pyarrow.timestamp('us', 'UTC')."
        )
    return (
        f"Set its time zone, as in pandas df[{path!r}].dt.tz_localize('UTC'), or in Arrow "
        f"pyarrow.compute.assume_timezone(table[{path!r}], 'UTC')."
    )


def is_list(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of its types of lists."""
    return bool(
        pt.is_list(kind)
        or pt.is_large_list(kind)
        or pt.is_fixed_size_list(kind)
        or pt.is_list_view(kind)
        or pt.is_large_list_view(kind)
    )


def is_same_family(given: pa.DataType, expected: pa.DataType) -> bool:
    """Whether values of the first Arrow type may be cast to the second, if each value fits."""
    return find_type_mismatch(given, expected, "") is None


def find_type_mismatch(given: pa.DataType, expected: pa.DataType, path: str) -> str | None:
    """Return why values of the first Arrow type can't be cast to the second one, None if they
    can. `path` names the place of the value.
    """
    if pt.is_dictionary(given):
        given = given.value_type
    if pt.is_null(given):
        return None
    if pt.is_struct(expected) and pt.is_struct(given):
        return _find_member_mismatch(given, expected, path)
    if pt.is_map(expected) and pt.is_map(given):
        of_keys = find_type_mismatch(given.key_type, pa.string(), f"{path}, the keys,")
        return of_keys or find_type_mismatch(given.item_type, expected.item_type, f"{path}[*]")
    if pt.is_map(expected) and is_list(given) and is_entry(given.value_type):
        return find_type_mismatch(given.value_type[1].type, expected.item_type, f"{path}[*]")
    if pt.is_list(expected) and is_list(given):
        return find_type_mismatch(given.value_type, expected.value_type, f"{path}[]")
    if _is_same_simple_family(given, expected):
        return None
    declared = tree_from_arrow(expected, path)
    return f"column {path!r} is {given}, but the schema declares {declared}"


def is_entry(kind: pa.DataType) -> bool:
    """Whether an Arrow type is that of an entry of a map, as data frames without maps have it:
    a struct of a key, which is a string, and a value.
    """
    if not pt.is_struct(kind) or kind.num_fields != 2:
        return False
    return kind[0].name == "key" and kind[1].name == "value" and _is_text(kind[0].type)


def _find_member_mismatch(given: pa.DataType, expected: pa.DataType, path: str) -> str | None:
    """Return why structs of the first Arrow type can't be cast to the second one, None
    if they can.
    """
    declared = {field.name: field.type for field in expected}
    seen = set()
    for field in given:
        inner = f"{path}.{write_name(field.name)}"
        if field.name not in declared:
            names = ", ".join(declared)
            return f"column {path!r} has a field {field.name!r}, but the schema declares {names}"
        if field.name in seen:
            return f"column {path!r} has the field {field.name!r} twice"
        seen.add(field.name)
        mismatch = find_type_mismatch(field.type, declared[field.name], inner)
        if mismatch is not None:
            return mismatch
    return None


def _is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of its types of strings."""
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def _is_same_simple_family(given: pa.DataType, expected: pa.DataType) -> bool:
    """Whether values of the first simple type may be cast to the second, if each value fits."""
    # By the family of the expected type: the families whose values fit.
    families = {
        pt.is_timestamp: (lambda kind: pt.is_timestamp(kind) and kind.tz is not None,),
        pt.is_floating: (pt.is_floating, pt.is_integer),
        pt.is_string: (_is_text,),
        pt.is_binary: (
            pt.is_binary,
            pt.is_large_binary,
            pt.is_binary_view,
            pt.is_fixed_size_binary,
        ),
    }
    for family in (pt.is_integer, pt.is_decimal, pt.is_date, pt.is_boolean):
        families[family] = (family,)
    for family, fitting in families.items():
        if family(expected):
            return any(fits(given) for fits in fitting)
    return False


def has_maps(kind: pa.DataType) -> bool:
    """Whether an Arrow type is a map, or has one at any depth."""
    if pt.is_dictionary(kind):
        return has_maps(kind.value_type)
    if not pt.is_nested(kind):
        return False
    return bool(pt.is_map(kind)) or any(
        has_maps(kind.field(place).type) for place in range(kind.num_fields)
    )


def known_type(text: str | None) -> Type | None:
    """Return the type with this text, None if it is unknown, known in part only, or one that only
    Spark has.
    """
    if text is None or "…" in text:
        return None
    try:
        return parse_type(text)
    except TypeTextError:
        return None
