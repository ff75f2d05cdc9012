"""Infers a schema from a sample of records, and reports where the sample leaves it unsure.

Records are read one after the other; what is kept grows with the number of different paths, not
with the number of records:

    objects    a struct of all names that occurred; a map of their values if the names vary from one
               object to the next, or are numbers or dates
    arrays     an array of what all its elements have in common
    numbers    `bigint`; `double` if one has a fraction; `decimal` beyond 64 bits, or of Decimals
    texts      `string`; with `texts=True`, as in CSV, what all of them can be read as
    two types  the more frequent one: values of the other do not fit
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.paths import find_path, write_path
from dagster_adjunct.resources.schemas.schema import Field, Schema, repeated_names
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    write_name,
)

MANY_NAMES = 64
"""Objects with more different names are maps if each has less than half of them."""
SEVERAL_NAMES = 8
"""Objects with values of one type and at least so many names are maps if each has few of them."""
_MOST_NAMES = 1_000  # of columns, or of members of a struct
_MOST_PATHS = 20_000  # in a schema
_EXACT_IN_DOUBLE = 2**53
_BIGINT = range(-(2**63), 2**63)
_MOST_DIGITS = 38

_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,37})", re.ASCII)
_FRACTION = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?", re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(?P<zone>Z|[-+]\d\d:\d\d)?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Doubt:
    """A place where the sample leaves the schema unsure: its path, what was found and how often,
    and what the schema declares there.
    """

    path: str
    found: str
    declared: str

    def __str__(self) -> str:
        return f"{self.path}: {self.found}; declared {self.declared}"


@dataclass(frozen=True, slots=True)
class InferredSchema:
    """The schema of a sample of so many records, and the places where it is unsure."""

    schema: Schema
    doubts: tuple[Doubt, ...]
    records: int
    unique: tuple[str, ...] = ()
    """The columns, then the paths of values in columns, that might be a key: simple, never null,
    and no value occurred twice.
    """


@dataclass(slots=True)
class _Numbers:
    """The range of whole numbers, and the digits of Decimals before and after the point."""

    smallest: int = 0
    largest: int = 0
    digits: int = 0
    scale: int = 0

    def merge(self, other: _Numbers) -> None:
        """Add what was found at another path."""
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)
        self.digits = max(self.digits, other.digits)
        self.scale = max(self.scale, other.scale)


@dataclass(slots=True)
class _Seen:
    """What was found at one path: how many values, nulls among them, and the number and an example
    of each kind of the others (`_kind_of`).
    """

    values: int = 0
    nulls: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    looks: Counter[str] = field(default_factory=Counter)  # as what texts could be read
    numbers: _Numbers = field(default_factory=_Numbers)
    empty: int = 0  # arrays and objects without parts
    members: dict[str, _Seen] = field(default_factory=dict)  # of objects, by name
    inner: _Seen | None = None  # the elements of arrays
    entries: _Seen | None = None  # the values of maps, once objects have too many names


_KINDS: dict[type, str] = {
    bool: "boolean",
    int: "whole number",
    float: "fraction",
    str: "text",
    bytes: "binary",
    Decimal: "decimal",
    datetime: "time",
    date: "date",
    list: "array",
    tuple: "array",
}
_SIMPLE = {
    "boolean": "boolean",
    "fraction": "double",
    "text": "string",
    "binary": "binary",
    "time": "timestamp",
    "date": "date",
}
# Kinds of values that one type of numbers has room for: a double, and a decimal.
_IN_DOUBLE = frozenset({"whole number", "fraction"})
_IN_DECIMAL = frozenset({"whole number", "decimal"})


class Inference:
    """Collects records with `add`; `result` returns their schema.

    With `texts`, all values are texts, as in CSV, and each column gets the type that all its texts
    can be read as. With `times`, columns of texts that all are dates or times with a zone become
    dates and timestamps, which files of JSON lines are read as. `what` names the sample in errors.
    """

    def __init__(self, what: str, *, texts: bool = False, times: bool = False) -> None:
        self._what = what
        self._texts = texts
        self._times = times or texts
        self._columns: dict[str, _Seen] = {}
        self.records = 0
        self._paths = 0
        # By the steps to values that might be a key so far (`_follow_distinct`): the values.
        self._distinct: dict[tuple[str, ...], set[Any]] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record of the sample."""
        self.records += 1
        for name, value in record.items():
            if name not in self._columns:
                self._columns[name] = self._new_path(name)
                self._check_width()
            self._observe(self._columns[name], value, write_name(name))
            self._follow_distinct((name,), value)

    def result(self) -> InferredSchema:
        """Return the schema of what was added. Raises SchemaMismatchError if there is none."""
        if not self._columns:
            problem = f"{self._what}: there are no records with columns in the sample."
            step = "Give files or a topic with records."
            raise SchemaMismatchError(problem, step, argument="records")
        doubts: list[Doubt] = []
        fields = []
        self._check_names()
        for name, seen in self._columns.items():
            path = write_name(name)
            type_ = self._type_of(seen, path, doubts)
            doubts += _rare(seen, path, self.records, "records", type_)
            fields.append(Field(name, str(type_)))
        schema = Schema(tuple(fields))
        return InferredSchema(schema, tuple(doubts), self.records, self.unique(schema))

    def unique(self, schema: Schema) -> tuple[str, ...]:
        """Return what might be a key of records with these columns: `InferredSchema.unique`."""
        columns = []
        paths = []
        for steps, values in self._distinct.items():
            # `_distinct` has only places where no value occurred twice.
            is_in_all_records = len(values) == self.records
            if not is_in_all_records or not self._is_simple(steps):
                continue
            if len(steps) == 1:
                columns.append(steps[0])
                continue
            path = write_path(steps)
            # There is no path into objects that became a map.
            if find_path(path, schema.types) is not None:
                paths.append(path)
        return (*columns, *paths)

    def _is_simple(self, steps: tuple[str, ...]) -> bool:
        """Whether all values at these steps are whole numbers, or all are texts."""
        members = self._columns
        seen = _Seen()
        for step in steps:
            seen = members.get(step, _Seen())
            members = seen.members
        kinds = set(seen.kinds)
        return len(kinds) == 1 and kinds <= {"whole number", "text"}

    # -- adding

    def _new_path(self, name: str) -> _Seen:
        """Return an empty record of what will be seen at a new path. Raises SchemaMismatchError if
        there are too many paths.
        """
        self._paths += 1
        if self._paths > _MOST_PATHS:
            problem = f"{self._what}: there are more than {_MOST_PATHS:,} paths, at {name!r} too."
            step = "Take a smaller sample (--rows), or store such objects as texts."
            raise SchemaMismatchError(problem, step, column=name)
        return _Seen()

    def _check_width(self) -> None:
        """Raise SchemaMismatchError if there are too many columns."""
        if len(self._columns) > _MOST_NAMES:
            problem = f"{self._what}: the records have more than {_MOST_NAMES:,} different columns."
            step = "Put what has names of its own into an object, which becomes a map."
            raise SchemaMismatchError(problem, step, argument="records")

    def _follow_distinct(self, steps: tuple[str, ...], value: Any) -> None:
        """Keep the values at these steps as long as they might be a key: none is null or empty, and
        none has occurred twice.
        """
        if isinstance(value, Mapping):
            for name, inner in value.items():
                self._follow_distinct((*steps, name), inner)
            return
        if self.records == 1:  # a later record's new path is not in all records
            self._distinct[steps] = set()
        values = self._distinct.get(steps)
        if values is None:
            return
        if isinstance(value, str | int) and value not in values and value != "":
            values.add(value)
        else:
            del self._distinct[steps]

    def _observe(self, seen: _Seen, value: Any, path: str) -> None:
        """Add a value that was found at a path to what was seen there, with all values
        within it.
        """
        seen.values += 1
        if value is None:
            seen.nulls += 1
            return
        if self._texts and isinstance(value, str):
            value = read_text(value)
        kind = self._kind_of(value, path)
        seen.kinds[kind] += 1
        if kind not in seen.examples:
            seen.examples[kind] = _shown(value)
        if kind == "object":
            self._observe_object(seen, value, path)
        elif kind == "array":
            self._observe_array(seen, value, path)
        elif kind == "whole number":
            seen.numbers.smallest = min(seen.numbers.smallest, value)
            seen.numbers.largest = max(seen.numbers.largest, value)
        elif kind == "decimal":
            _observe_decimal(seen, value)
        elif kind == "text":
            seen.looks[_classify_text(value)] += 1

    def _kind_of(self, value: Any, path: str) -> str:
        """Return the kind of a value, as in `_KINDS`, or "object". Raises SchemaMismatchError for a
        value that no column can have.
        """
        if isinstance(value, Mapping):
            return "object"
        kind = _KINDS.get(type(value))
        if kind == "time" and value.utcoffset() is None:
            problem = f"{self._what}: {path} is {value}, a time without a time zone."
            raise SchemaMismatchError(problem, "Give times with their zone.", column=path)
        if kind is None:
            problem = f"{self._what}: {path} is {_shown(value)}, a {type(value).__name__}."
            step = "Give numbers, texts, booleans, dates, times, binary, lists and dictionaries."
            raise SchemaMismatchError(problem, step, column=path)
        return kind

    def _observe_array(self, seen: _Seen, value: Iterable[Any], path: str) -> None:
        """Add the elements of an array to what was seen in arrays at this path."""
        if seen.inner is None:
            seen.inner = self._new_path(path)
        if not value:
            seen.empty += 1
        for item in value:
            self._observe(seen.inner, item, f"{path}[]")

    def _observe_object(self, seen: _Seen, value: Mapping[str, Any], path: str) -> None:
        """Add the members of an object to what was seen in objects at this path."""
        if not value:
            seen.empty += 1
        for name, item in value.items():
            if seen.entries is not None:
                self._observe(seen.entries, item, f"{path}[*]")
                continue
            if name not in seen.members:
                seen.members[name] = self._new_path(path)
            self._observe(seen.members[name], item, f"{path}.{write_name(name)}")
        if len(seen.members) > MANY_NAMES and _is_sparse(seen):
            self._become_map(seen)

    def _become_map(self, seen: _Seen) -> None:
        """Forget the names of the objects seen at a path: from now on they are maps, whose values
        have one type.
        """
        self._paths -= len(seen.members)
        seen.entries = _merge_members(seen)
        seen.members = {}

    # -- the result

    def _check_names(self) -> None:
        """Raise SchemaMismatchError for columns whose names differ only in case."""
        twice = repeated_names(name.lower() for name in self._columns)
        if twice:
            problem = f"{self._what}: columns differ only in the case of their names: {twice[0]!r}."
            step = "Spark ignores the case of names: rename one of them where they are written."
            raise SchemaMismatchError(problem, step, column=twice[0])

    def _type_of(self, seen: _Seen, path: str, doubts: list[Doubt]) -> Type:
        """Return the type of the values seen at a path; add to `doubts` if the values do not settle
        it.
        """
        kinds = set(seen.kinds)
        if not kinds:
            if not seen.values:  # a column of a file without records
                found = "never a value"
            else:
                found = f"null in all of {seen.values:,} values"
            doubts.append(Doubt(path, found, "string"))
            return Simple("string")
        if kinds <= _IN_DOUBLE or kinds <= _IN_DECIMAL:
            return _number_type(seen, path, doubts)
        if len(kinds) > 1:
            return self._mixed_type(seen, path, doubts)
        return self._type_of_kind(seen, next(iter(kinds)), path, doubts)

    def _mixed_type(self, seen: _Seen, path: str, doubts: list[Doubt]) -> Type:
        """Return the type of the most frequent kind of values; of texts, which can hold them all,
        `string`.
        """
        found = _mixture(seen)
        if self._texts:
            doubts.append(Doubt(path, found, "string"))
            return Simple("string")
        families = Counter[str]()
        for kind, count in seen.kinds.items():  # whole numbers and fractions count as one kind
            families["whole number" if kind in _IN_DOUBLE else kind] += count
        kind, _ = families.most_common(1)[0]
        if kind == "whole number" and seen.kinds["fraction"]:
            type_: Type = Simple("double")
        else:
            type_ = self._type_of_kind(seen, kind, path, doubts)
        others = "the others do not fit"
        doubts.append(Doubt(path, found, f"{_summary(type_)}: {others}"))
        return type_

    def _type_of_kind(self, seen: _Seen, kind: str, path: str, doubts: list[Doubt]) -> Type:
        """Return the type of the values of one kind that were seen at a path."""
        if kind == "object":
            return self._object_type(seen, path, doubts)
        if kind == "array":
            return self._array_type(seen, path, doubts)
        if kind in ("whole number", "decimal"):
            return _number_type(seen, path, doubts)
        if kind == "text":
            return self._text_type(seen, path, doubts)
        return Simple(_SIMPLE[kind])

    def _text_type(self, seen: _Seen, path: str, doubts: list[Doubt]) -> Type:
        """Return the type of the texts seen at a path: `date` or `timestamp` if all are such and
        are to be read so, else `string`, with a doubt if all look like something else.
        """
        texts = seen.kinds["text"]
        look, count = seen.looks.most_common(1)[0]
        if count < texts or not look:
            return Simple("string")
        if self._times and look in ("date", "timestamp") and len(seen.kinds) == 1:
            return Simple(look)
        found = f"all {texts:,} texts look like {_LOOKS[look]} ({seen.examples['text']})"
        doubts.append(Doubt(path, found, "string"))
        return Simple("string")

    def _array_type(self, seen: _Seen, path: str, doubts: list[Doubt]) -> Type:
        """Return the type of the arrays seen at a path; the elements of empty ones are taken for
        texts.
        """
        inner = seen.inner or _Seen()
        if inner.values:
            return Array(self._type_of(inner, f"{path}[]", doubts))
        found = f"all {seen.empty:,} arrays are empty: their type of elements is unknown"
        doubts.append(Doubt(path, found, "array<string>"))
        return Array(Simple("string"))

    def _object_type(self, seen: _Seen, path: str, doubts: list[Doubt]) -> Type:
        """Return the type of the objects seen at a path: a struct, or a map if their names are
        keys.
        """
        objects = seen.kinds["object"]
        if seen.entries is not None:
            names = f"more than {MANY_NAMES} different names in {objects:,} objects"
            return self._map_type(seen.entries, names, path, doubts)
        if not seen.members:
            found = f"all {objects:,} objects are empty: their names are unknown"
            doubts.append(Doubt(path, found, "map<string,string>"))
            return Map(Simple("string"))
        if "" in seen.members or repeated_names(map(str.lower, seen.members)):
            names = f"names that are empty or differ only in case, in {objects:,} objects"
            return self._map_type(_merge_members(seen), names, path, doubts)
        object_names = _Names(seen)
        if object_names.are_keys:
            return self._map_type(object_names.values, str(object_names), path, doubts)
        members = []
        rare: list[Doubt] = []
        for name, member in seen.members.items():
            inner = f"{path}.{write_name(name)}"
            type_ = self._type_of(member, inner, doubts)
            rare += _rare(member, inner, objects, "objects", type_)
            members.append(Member(name, type_))
        if object_names.might_be_keys:  # one doubt instead of one for each rare name
            value = self._type_of(object_names.values, f"{path}[*]", [])
            declared = f"a struct; it might be a map<string,{value}>"
            rare = [Doubt(path, str(object_names), declared)]
        doubts += rare
        return Struct(tuple(members))

    def _map_type(self, entries: _Seen, found: str, path: str, doubts: list[Doubt]) -> Type:
        """Return the type of maps with these values; the doubt says what was `found` of
        their keys.
        """
        type_ = Map(self._type_of(entries, f"{path}[*]", doubts))
        doubts.append(Doubt(path, found, "a map"))
        return type_


def infer_schema(
    records: Iterable[Mapping[str, Any]], what: str = "the sample", *, times: bool = False
) -> InferredSchema:
    """Return the schema of records of Python values; see `Inference`."""
    inference = Inference(what, times=times)
    for record in records:
        inference.add(record)
    return inference.result()


# -- texts

_LOOKS = {
    "date": "dates",
    "timestamp": "times with a zone",
    "local time": "times without a zone",
    "number": "numbers",
}


def _classify_text(text: str) -> str:
    """Return what a text can be read as, a key of `_LOOKS`; "" if it is only a text."""
    if _WHOLE.fullmatch(text) or _FRACTION.fullmatch(text):
        return "number"
    try:
        if _DATE.fullmatch(text):
            date.fromisoformat(text)
            return "date"
        time = _TIME.fullmatch(text)
        if time is not None:
            datetime.fromisoformat(text)
            return "timestamp" if time["zone"] else "local time"
    except ValueError:
        return ""  # such as 2026-02-31
    return ""


def read_text(text: str) -> Any:
    """Return the number or boolean that a text of CSV stands for; any other text as it is."""
    trimmed = text.strip(" \t")
    if trimmed in ("true", "false"):
        return trimmed == "true"
    if _WHOLE.fullmatch(trimmed) and trimmed != "-0":
        return int(trimmed)
    if _FRACTION.fullmatch(trimmed):
        number = float(trimmed)
        if math.isfinite(number):
            return number
    return text


# -- numbers


def _observe_decimal(seen: _Seen, value: Decimal) -> None:
    """Add the digits of a Decimal to what was seen at its path. Raises SchemaMismatchError for NaN
    and infinities.
    """
    _, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise SchemaMismatchError(f"{value} is no number.", "Use null for it.", argument="records")
    seen.numbers.scale = max(seen.numbers.scale, -exponent)
    seen.numbers.digits = max(seen.numbers.digits, len(digits) + exponent)


def _number_type(seen: _Seen, path: str, doubts: list[Doubt]) -> Type:
    """Return the type of the numbers seen at a path that holds them all; `double`, with a doubt, if
    none does.
    """
    if seen.kinds["decimal"]:
        before_point = max(seen.numbers.digits, 0)
        if seen.kinds["whole number"]:
            largest = max(seen.numbers.largest, -seen.numbers.smallest)
            before_point = max(before_point, len(str(largest)))
        precision = max(before_point + seen.numbers.scale, 1)
        if precision <= _MOST_DIGITS:
            return Simple(f"decimal({precision},{seen.numbers.scale})")
        doubts.append(Doubt(path, f"decimals of {precision} digits", "double: they are rounded"))
        return Simple("double")
    if seen.kinds["fraction"]:
        _doubt_fractions(seen, path, doubts)
        return Simple("double")
    if seen.numbers.smallest in _BIGINT and seen.numbers.largest in _BIGINT:
        return Simple("bigint")
    digits = len(str(max(seen.numbers.largest, -seen.numbers.smallest)))
    found = f"whole numbers of up to {digits} digits, more than a bigint holds"
    if digits <= _MOST_DIGITS:
        doubts.append(Doubt(path, found, "decimal(38,0)"))
        return Simple("decimal(38,0)")
    doubts.append(Doubt(path, found, "double: they are rounded"))
    return Simple("double")


def _doubt_fractions(seen: _Seen, path: str, doubts: list[Doubt]) -> None:
    """Add a doubt if numbers with and without fractions were seen at a path."""
    if not seen.kinds["whole number"]:
        return
    if max(seen.numbers.largest, -seen.numbers.smallest) > _EXACT_IN_DOUBLE:
        declared = "double, which does not hold all of these whole numbers"
    else:
        declared = "double"
    doubts.append(Doubt(path, _mixture(seen), declared))


# -- objects


class _Names:
    """Whether the names in the objects at a path are the keys of a map, and what values they have.

    Keys vary: no object has many of them. Members of a struct may be missing, too, but hardly all
    of them in most objects, and seldom have values of one type.
    """

    def __init__(self, seen: _Seen) -> None:
        self.values = _merge_members(seen)
        self._objects = seen.kinds["object"]
        self._names = list(seen.members)
        self._counts = [member.values for member in seen.members.values()]

    def __str__(self) -> str:
        return (
            f"{len(self._names)} different names in {self._objects:,} objects, none in more than"
            f" {max(self._counts):,}, with values of one type"
        )

    @property
    def are_keys(self) -> bool:
        """Whether the objects are maps."""
        if self._have_one_type and all(_classify_text(name) for name in self._names):
            return True  # numbers or dates
        # On average, an object has at most a quarter of the names.
        has_few_each = sum(self._counts) * 4 <= self._objects * len(self._names)
        return self.might_be_keys and len(self._names) >= SEVERAL_NAMES and has_few_each

    @property
    def might_be_keys(self) -> bool:
        """Whether the objects could be maps: they have several names, none of which is in more than
        half of them, and values of one type.
        """
        vary = len(self._names) > 2 and max(self._counts) * 2 <= self._objects
        return vary and self._have_one_type

    @property
    def _have_one_type(self) -> bool:
        """Whether the values under all names have one type, such as numbers of any kind."""
        kinds = set(self.values.kinds)
        if kinds == {"object"}:
            return not _is_sparse(self.values)  # else each name has a struct of its own
        if len(kinds) <= 1:
            return bool(kinds)
        return kinds <= _IN_DOUBLE or kinds <= _IN_DECIMAL


def _is_sparse(seen: _Seen) -> bool:
    """Whether objects have on average less than half of all names that were seen in them, or have
    more names than a struct may have.
    """
    if len(seen.members) > _MOST_NAMES:
        return True
    present = sum(member.values for member in seen.members.values())
    return present * 2 < seen.kinds["object"] * len(seen.members)


def _merge_members(seen: _Seen) -> _Seen:
    """Return what was seen in the members of objects, as if all had one name."""
    merged = _Seen()
    for member in seen.members.values():
        _merge(merged, member)
    return merged


def _merge(into: _Seen, other: _Seen) -> None:
    """Add what was found at another path to a first one. If one of them has become a map, both are
    maps.
    """
    for count in ("values", "nulls", "empty"):
        setattr(into, count, getattr(into, count) + getattr(other, count))
    into.kinds += other.kinds
    into.looks += other.looks
    into.examples = {**other.examples, **into.examples}
    into.numbers.merge(other.numbers)
    if other.inner is not None:
        into.inner = into.inner or _Seen()
        _merge(into.inner, other.inner)
    if other.entries is not None and into.entries is None:
        into.entries = _merge_members(into)
        into.members = {}
    if into.entries is not None:
        _merge(into.entries, other.entries or _merge_members(other))
        return
    for name, member in other.members.items():
        _merge(into.members.setdefault(name, _Seen()), member)


# -- words


def _mixture(seen: _Seen) -> str:
    """Return in words how many values of which kinds were seen, with an example of each."""
    parts = []
    for kind, count in seen.kinds.most_common():
        plural = "s" if count > 1 and kind != "binary" else ""
        parts.append(f"{count:,} {kind}{plural} ({seen.examples[kind]})")
    return ", ".join(parts)


def _rare(seen: _Seen, path: str, records: int, what: str, type_: Type) -> Iterator[Doubt]:
    """Yield a doubt for a name that at most half of the records or objects have."""
    if seen.values * 2 <= records:
        found = f"only in {seen.values:,} of {records:,} {what}"
        yield Doubt(path, found, f"{_summary(type_)}, null elsewhere")


_WORDS: dict[type, Callable[[Any], str]] = {
    Struct: lambda type_: "a struct",
    Array: lambda type_: "an array",
    Map: lambda type_: "a map",
}


def _summary(type_: Type) -> str:
    """Return a type in words, a simple one by its name."""
    return _WORDS.get(type(type_), str)(type_)


def _shown(value: Any) -> str:
    """Return a value as ASCII text of at most 40 characters."""
    shown = value.decode(errors="replace") if isinstance(value, bytes) else value
    text = ascii(shown)
    return text if len(text) <= 40 else f"{text[:37]}..."
