"""Whether a value is what a declared type says, as far as that can be seen without running anything."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import inspect
import numbers
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from dagster_adjunct.resources.schemas.records import ArrowFrame

_FLOORS = tuple(f"dagster_adjunct.{floor}." for floor in ("resources", "assets", "orchestration"))
_UNIONS = (Union, types.UnionType)
_LOOKED_AT = 50  # elements: enough to see a mistake, and cheap for a million keys
_WORDS = {
    str: "a text", int: "a whole number", float: "a number", bool: "True or False", bytes: "bytes", type(None): "None",
    ArrowFrame: "an Arrow table, a pandas or a Polars frame",
}  # fmt: skip


class _ByName(type):
    """A class of Spark's or Arrow's, known by its name: neither is loaded to look at an argument."""

    def __instancecheck__(cls, value: object) -> bool:
        kinds = type(value).__mro__
        return any(kind.__name__ == cls.__name__ and kind.__module__.startswith(_HEAVY) for kind in kinds)


_HEAVY = ("pyspark.", "pyarrow.")
# Python 3.11 counts the depth of all trees that it builds together: two threads at once end in a SystemError.
_PARSING = threading.Lock()
_NAMED = ("SparkSession", "DataFrame", "StructType", "Table", "RecordBatch", "Schema")
_BY_NAME = {name: _ByName(name, (), {}) for name in _NAMED}
_ARROW = types.SimpleNamespace(**_BY_NAME)


class _Names(dict[str, Any]):
    """The names that an annotation may use, and Any for what is imported for type checkers only and not loaded."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module
        self._known = (vars(sys.modules[module]), vars(builtins))

    def __missing__(self, name: str) -> Any:
        value = next((names[name] for names in self._known if name in names), None)
        return _imported_for_types(self._module).get(name, Any) if value is None else value


@cache
def _imported_for_types(module: str) -> dict[str, Any]:
    """Return what a module imports for type checkers only, as far as it is of this package and loaded, or is heavy."""
    imported: dict[str, Any] = {}
    with _PARSING:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    for block in tree.body:
        if not (isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"):
            continue
        for line in block.body:
            if isinstance(line, ast.Import):
                imported |= {alias.asname: _ARROW for alias in line.names if alias.name == "pyarrow" and alias.asname}
            elif isinstance(line, ast.ImportFrom):
                source = line.module or ""
                for alias in line.names:
                    if f"{source}.".startswith(_HEAVY):
                        kind = _BY_NAME.get(alias.name)
                    elif source.startswith(("typing", "collections")) or is_ours(source):
                        kind = getattr(sys.modules.get(source), alias.name, None)
                    else:
                        kind = None
                    if kind is not None:
                        imported[alias.asname or alias.name] = kind
    return imported


def is_ours(module: str) -> bool:
    """Whether a module is of one of the floors."""
    return module.startswith(_FLOORS)


def hints_of(function: Callable[..., Any], parameters: Sequence[str]) -> dict[str, Any]:
    """Return the declared types of parameters, of those that say anything."""
    names, hints = _Names(function.__module__), {}
    for name in parameters:
        hint: Any = function.__annotations__.get(name, Any)
        if isinstance(hint, str):
            try:
                hint = eval(hint, {}, names)  # of our own source, as typing.get_type_hints does
            except (TypeError, AttributeError):  # it uses what is loaded when needed: pa.Table
                hint = Any
        if not _is_anything(hint):
            hints[name] = hint
    return hints


def _is_anything(hint: Any) -> bool:
    """Whether every value is of this type, as of a type variable, which only a type checker knows."""
    if get_origin(hint) in _UNIONS:
        return any(map(_is_anything, get_args(hint)))
    return hint is Any or hint is object or isinstance(hint, TypeVar)


def fits(value: Any, hint: Any, *, elements: bool = True) -> bool:
    """Whether a value is of a declared type; a text is no sequence of texts, and True is no number.

    Without `elements`, what is in it is not looked at, and one kind of collection does for another.
    """
    if hint is Any or hint is object:
        return True
    if hint is None:
        return value is None
    origin, inner = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return any(fits(value, option, elements=elements) for option in inner)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if origin is Annotated:
        return fits(value, inner[0], elements=elements)
    kind = origin or hint
    if kind is collections.abc.Callable:
        return callable(value)
    if not isinstance(kind, type):
        return True
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    if getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False):
        return True
    if not elements and issubclass(kind, Collection) and not issubclass(kind, str | bytes):
        return isinstance(value, Collection) and not isinstance(value, str | bytes)
    return isinstance(value, kind) and (not elements or _elements_fit(value, kind, inner))


def _elements_fit(value: Any, kind: type[Any], inner: tuple[Any, ...]) -> bool:
    if isinstance(value, str | bytes):
        return kind not in (Sequence, Collection, Iterable)
    if not inner or isinstance(value, Iterator) or not isinstance(value, Mapping | Sequence | collections.abc.Set):
        return True
    if isinstance(value, Mapping):
        return len(inner) != 2 or all(
            fits(key, inner[0]) and fits(element, inner[1]) for key, element in islice(value.items(), _LOOKED_AT)
        )
    if kind is tuple and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(fits, value, inner))
    return all(fits(element, inner[0]) for element in islice(value, _LOOKED_AT))


def expected(hint: Any) -> str:
    """Return a declared type in words."""
    if hint is Any or hint is object:
        return "any value"
    origin, inner = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return " or ".join(dict.fromkeys(expected(option) for option in inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is Annotated:
        return expected(inner[0])
    kind = origin or hint
    if kind is collections.abc.Callable:
        return "a function"
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return f"a mapping from {expected(inner[0])} to {expected(inner[1])}" if len(inner) == 2 else "a mapping"
    if kind in (Sequence, Collection, Iterable, list, tuple, set, frozenset):
        several = "several values" if not inner else f"several values, each {expected(inner[0])}"
        return "a tuple" if kind is tuple and not inner else several
    if kind is _BY_NAME["DataFrame"]:
        return "a Spark DataFrame"
    return _WORDS.get(kind, f"{getattr(kind, '__name__', kind)}")
