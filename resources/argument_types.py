"""The types that arguments are validated by: declared types, as pydantic checks them in strict
mode.

Values must have exactly the declared type, except that these are accepted as well: numbers of NumPy
for Python's, a whole number for a float, the value of an enum's member for the member, a list for a
tuple, and other ordered collections (arrays, views of dictionaries) for a sequence. For all other
classes, values must be instances. Collections are neither copied nor consumed.
"""

from __future__ import annotations

import collections.abc
import enum
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    SkipValidation,
    Strict,
    StringConstraints,
    WrapValidator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

# The types of our own errors among those of pydantic. Their context has `expected`, in words.
WRONG_TYPE: Final = "wrong_type"
TEXT_FOR_LIST: Final = "text_for_list"

# Classes of Spark are known by name, because Spark is not imported to check an argument.
_SPARK_CLASSES = {name: type(name, (), {}) for name in ("SparkSession", "DataFrame", "StructType")}


def type_hints(item: Any) -> dict[str, Any]:
    """Return the types of a function's parameters or a class's fields, by name.

    Types that are imported for type checkers only are Any, except Spark's, which are placeholders
    checked by name.
    """
    unloaded: dict[str, Any] = {}
    annotated = item
    if inspect.isfunction(item):
        parameters = {}
        for name, hint in item.__annotations__.items():
            if name != "return":
                parameters[name] = hint
        annotated = types.SimpleNamespace(__annotations__=parameters)
    while True:
        try:
            return get_type_hints(
                annotated, getattr(item, "__globals__", None), unloaded, include_extras=True
            )
        except NameError as error:
            unloaded[str(error.name)] = _placeholder(str(error.name))


def _placeholder(name: str) -> Any:
    if name[0].isupper():
        return _SPARK_CLASSES.get(name, Any)
    return _UnloadedModule()


class _UnloadedModule:
    """Stands for a module that is imported for type checkers only: all its names are Any, so
    values are not checked.
    """

    def __getattr__(self, name: str) -> Any:
        return Any


def checked_type(hint: Any) -> Any:
    """Return a declared type as pydantic should check it; Any if it accepts every value."""
    origin = get_origin(hint)
    parts = get_args(hint)
    if origin is Annotated:
        return _annotated(parts)
    if origin in (Union, types.UnionType):
        return _union(parts)
    if origin is Unpack:
        return Unpack[_options(parts[0])]
    if origin is Literal:
        return hint
    kind = origin or hint
    if isinstance(kind, type):
        return _class(kind, parts)
    return Any  # such as a type variable


def _annotated(parts: tuple[Any, ...]) -> Any:
    declared, *constraints = parts
    if any(type(each) is SkipValidation for each in constraints):
        return Any
    return Annotated[(checked_type(declared), *constraints)]


def _union(parts: tuple[Any, ...]) -> Any:
    members = tuple(map(checked_type, parts))
    return Any if Any in members else Union[members]  # noqa: UP007


def _options(declared: Any) -> Any:
    """Return the typed dictionary of a function's `**options`, which rejects other names."""
    members = {name: checked_type(option) for name, option in get_type_hints(declared).items()}
    make: Any = TypedDict
    options = make(declared.__name__, members, total=False)
    options.__pydantic_config__ = ConfigDict(strict=True, extra="forbid")
    return options


def _class(kind: type, parts: tuple[Any, ...]) -> Any:
    if kind in _BY_CLASS:
        return _BY_CLASS[kind]
    if kind is tuple:
        return _tuple(parts)
    if issubclass(kind, enum.Enum):
        return Annotated[kind, Strict(False)]
    if _is_collection(kind):
        return _collection(kind, parts)
    if _is_unchecked_protocol(kind):
        return Any
    return _matching(partial(_is_instance, kind), _with_article(kind), kind)


def _is_instance(kind: type, value: object) -> bool:
    """Return whether the value is an object of the class, and no class that has its methods."""
    return isinstance(value, kind) and not isinstance(value, type)


def _is_unchecked_protocol(kind: type) -> bool:
    return getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False)


def _is_of_spark(name: str, value: object) -> bool:
    return any(
        cls.__name__ == name and cls.__module__.startswith("pyspark.")
        for cls in type(value).__mro__
    )


def _matching(accepts: Callable[[Any], bool], expected: str, kind: type | None = None) -> Any:
    """Return the type of values that a function accepts, as they are."""
    context = {"expected": expected, "class": None if kind is None else kind.__name__}

    def check(value: Any) -> Any:
        if not accepts(value):
            raise PydanticCustomError(WRONG_TYPE, "Input should be {expected}", context)
        return value

    return Annotated[Any, PlainValidator(check)]


def _to_int(value: Any) -> Any:
    """Return a whole number of another class, such as NumPy's, as an int."""
    if isinstance(value, Integral) and not isinstance(value, int):
        return int(value)
    return value


def _to_number(value: Any) -> int | float:
    """Return a number as an int or a float; raise for all else, also for True and False."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise PydanticCustomError(WRONG_TYPE, "Input should be a valid number")
    if isinstance(value, int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value)


_BY_CLASS: dict[Any, Any] = {
    Any: Any,
    object: Any,
    bool: bool,
    bytes: bytes,
    types.NoneType: None,
    # With a limit, which nothing reaches, pydantic rejects lone surrogates ("\udcff"), which UTF-8
    # can't encode.
    str: Annotated[str, StringConstraints(max_length=2**60)],
    int: Annotated[int, BeforeValidator(_to_int)],
    float: Annotated[Any, PlainValidator(_to_number)],
    type: _matching(lambda value: isinstance(value, type), "a class"),
    collections.abc.Callable: _matching(callable, "a function"),
    **{
        kind: _matching(partial(_is_of_spark, name), f"a {name} of Spark")
        for name, kind in _SPARK_CLASSES.items()
    },
}


def _tuple(parts: tuple[Any, ...]) -> Any:
    """Return the type of a tuple, which a list may be given for."""
    plain: Any = tuple
    elements = tuple(part if part is ... else checked_type(part) for part in parts)
    return Annotated[plain[elements] if elements else plain, Strict(False)]


@dataclass(frozen=True, slots=True)
class _Collection:
    """Checks a collection. Elements are checked only where that doesn't consume or load them."""

    kind: type
    elements: tuple[Any, ...]  # their declared types, empty if they may be anything

    def check(self, value: Any, check_elements: Callable[[Any], Any]) -> Any:
        if self.kind is Sequence and _is_ordered(value):
            return tuple(check_elements(tuple(value)))
        if self._is_text_for_list(value):
            raise self._error(TEXT_FOR_LIST)
        if isinstance(value, str | bytes) or not isinstance(value, self.kind):
            raise self._error(WRONG_TYPE)
        if isinstance(value, dict if self.is_mapping else (list, tuple, set, frozenset)):
            check_elements(value)
        return value

    @property
    def is_mapping(self) -> bool:
        return issubclass(self.kind, Mapping)

    def _is_text_for_list(self, value: object) -> bool:
        """Return whether a text was given alone where a list of it is meant."""
        is_element = not self.elements or type(value) in self.elements
        return isinstance(value, str | bytes) and is_element and not self.is_mapping

    def _error(self, type_of_error: Literal["wrong_type", "text_for_list"]) -> PydanticCustomError:
        expected = _with_article(self.kind)
        if self.elements:
            expected += f" of {' to '.join(map(_name, self.elements))}"
        return PydanticCustomError(
            type_of_error, "Input should be {expected}", {"expected": expected}
        )


def _is_collection(kind: type) -> bool:
    is_abstract = kind.__module__ == "collections.abc" and issubclass(kind, Iterable)
    return is_abstract or kind in (list, dict, set, frozenset)


def _collection(kind: type, parts: tuple[Any, ...]) -> Any:
    is_typed = any(part not in (Any, object) for part in parts)
    collection = _Collection(kind, parts if is_typed else ())
    elements = tuple(map(checked_type, parts))
    if all(element is Any for element in elements):
        return Annotated[Any, WrapValidator(collection.check)]
    container: Any = dict if collection.is_mapping else list
    return Annotated[container[elements], Strict(False), WrapValidator(collection.check)]


def _is_ordered(value: object) -> bool:
    """Return whether the value is no sequence and has an order, as arrays and views have."""
    if isinstance(value, Sequence | Mapping | bytes | set | frozenset):
        return False
    return isinstance(value, Collection) and getattr(value, "ndim", 1) == 1


def _name(kind: Any) -> str:
    if kind in (Any, object):
        return "any value"
    return str(getattr(get_origin(kind) or kind, "__name__", kind))


def _with_article(kind: type) -> str:
    """Return the name of a class with its article."""
    name = kind.__name__
    if name == "ArrowFrame":
        return "an Arrow table, or a pandas or Polars frame"
    if kind.__module__ in ("collections.abc", "builtins"):
        name = name.lower()
    article = "a"
    if name[0] in "AEIOUaeiou":
        article = "an"
    return f"{article} {name}"
