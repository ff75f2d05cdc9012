"""Returns the columns that a Pydantic model or a dataclass declares by its annotations."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    write_name,
)

_SIMPLE: dict[Any, str] = {
    str: "string",
    bool: "boolean",
    int: "bigint",
    float: "double",
    bytes: "binary",
    date: "date",
    datetime: "timestamp",
}
_LISTS = (list, tuple, Sequence, Iterable)
_MAPS = (dict, Mapping)
_STEP = (
    "Use str, bool, int, float, bytes, date, datetime, Decimal with max_digits and decimal_places,"
    " a model, a dataclass, list[…], dict[str, …], Literal or Enum of texts, each possibly | None."
)


def columns_of_model(model: type) -> dict[str, str]:
    """Return the names and types of the columns of a Pydantic model or a dataclass.

    Raises SchemaMismatchError, which names the path, for a type that no column can have.
    """
    columns = {}
    for name, hint in _annotations(model, model.__name__).items():
        columns[name] = str(_type_of(hint, write_name(name), (model,)))
    return columns


def is_model(kind: Any) -> bool:
    """Whether a class declares columns: a Pydantic model or a dataclass."""
    return isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "model_fields"))


def _annotations(model: Any, path: str) -> Mapping[str, Any]:
    """Return the annotated types of a model's fields, with their metadata. Raises
    SchemaMismatchError for anything but a model, and for an annotation with an undefined name.
    """
    if not is_model(model):
        problem = f"{getattr(model, '__name__', model)!r} declares no columns."
        step = "Give a class: a Pydantic model or a dataclass."
        raise SchemaMismatchError(problem, step, column=path)
    try:
        hints = get_type_hints(model, include_extras=True)
    except NameError as error:
        problem = f"{model.__name__}: the annotation names {error.name!r}, which is not defined."
        step = "Define the classes of the fields in the module of the model, before it is used."
        raise SchemaMismatchError(problem, step, column=path) from error
    if is_dataclass(model):
        return {name: hints[name] for name in model.__dataclass_fields__}
    annotations = {}
    for name, info in model.model_fields.items():
        hint = hints.get(name, info.annotation)
        metadata = tuple(info.metadata)
        annotations[name] = Annotated[hint, *metadata] if metadata else hint
    return annotations


def _type_of(hint: Any, path: str, within: tuple[type, ...]) -> Type:
    """Return the type of values that an annotation allows. `within` are the models that contain
    it.
    """
    hint, metadata = _without_none(hint, path)
    if hint in _SIMPLE:
        return Simple(_SIMPLE[hint])
    if hint is Decimal:
        return _decimal_type(metadata, path)
    if is_model(hint):
        return _struct_type(hint, path, within)
    if get_origin(hint) is Literal:
        return _text_type(get_args(hint), path)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _text_type([member.value for member in hint], path)
    return _container_type(hint, path, within)


def _without_none(hint: Any, path: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without the alternative None, and its metadata. Raises SchemaMismatchError for
    several other alternatives.
    """
    metadata: tuple[Any, ...] = ()
    while True:
        hint = getattr(hint, "__value__", hint)  # of `type Name = …`
        if get_origin(hint) is Annotated:
            metadata = (*hint.__metadata__, *metadata)
            hint = hint.__origin__
        elif get_origin(hint) in (Union, types.UnionType):
            others = [each for each in get_args(hint) if each is not type(None)]
            if len(others) > 1:
                names = " or ".join(map(_name, others))
                problem = f"{path} is {names}: a column has values of one type."
                step = "Choose one of them, or give each a field of its own."
                raise SchemaMismatchError(problem, step, column=path)
            hint = others[0]
        else:
            return hint, metadata


def _struct_type(model: Any, path: str, within: tuple[type, ...]) -> Type:
    """Return the type of a model's values. Raises SchemaMismatchError for a model that contains
    itself or has no fields.
    """
    if model in within:
        problem = f"{path} is a {model.__name__}, within which it is: a type has a finite depth."
        step = "Declare the inner level with a model of its own, or as a text."
        raise SchemaMismatchError(problem, step, column=path)
    members = []
    for name, hint in _annotations(model, path).items():
        inner = f"{path}.{write_name(name)}"
        members.append(Member(name, _type_of(hint, inner, (*within, model))))
    if not members:
        problem = f"{path} is a {model.__name__}, which has no fields."
        raise SchemaMismatchError(problem, "Give it fields, or leave it out.", column=path)
    return Struct(tuple(members))


def _text_type(values: Iterable[Any], path: str) -> Type:
    """Return `string` for a Literal or Enum of these values. Raises SchemaMismatchError for values
    that are no texts.
    """
    others = [value for value in values if not isinstance(value, str) and value is not None]
    if others:
        problem = f"{path} is one of several values, of which {others[0]!r} is no text."
        step = "Use int, bool or another type for values that are no texts."
        raise SchemaMismatchError(problem, step, column=path)
    return Simple("string")


def _container_type(hint: Any, path: str, within: tuple[type, ...]) -> Type:
    """Return the type of lists or of dictionaries. Raises SchemaMismatchError for any other
    annotation.
    """
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in _MAPS:
        if arguments[0] is not str:
            problem = f"{path} has keys of the type {_name(arguments[0])}: keys of maps are texts."
            raise SchemaMismatchError(problem, "Use dict[str, …].", column=path)
        return Map(_type_of(arguments[1], f"{path}[*]", within))
    is_one_type = len(arguments) == 1 or (len(arguments) == 2 and arguments[1] is ...)
    if origin in _LISTS and is_one_type:
        return Array(_type_of(arguments[0], f"{path}[]", within))
    problem = f"{path} has the type {_name(hint)}, which no column can have."
    raise SchemaMismatchError(problem, _STEP, column=path)


def _decimal_type(metadata: Sequence[Any], path: str) -> Type:
    """Return the type of a Decimal with this metadata. Raises SchemaMismatchError if that lacks the
    number of digits.
    """
    digits = _limit(metadata, "max_digits")
    places = _limit(metadata, "decimal_places")
    if digits is None or places is None or not 0 <= places <= digits <= 38:
        problem = f"{path} is a Decimal of max_digits={digits}, decimal_places={places}."
        step = (
            "Say how many digits it has, at most 38, as in Annotated[Decimal,"
            " pydantic.Field(max_digits=10, decimal_places=2)]."
        )
        raise SchemaMismatchError(problem, step, column=path)
    return Simple(f"decimal({digits},{places})")


def _limit(metadata: Sequence[Any], name: str) -> int | None:
    """Return the limit of this name from annotations, which may be a field of Pydantic with
    annotations of its own; None if none has it.
    """
    for item in metadata:
        found = getattr(item, name, None)
        if found is None:
            found = _limit(getattr(item, "metadata", ()), name)
        if found is not None:
            return int(found)
    return None


def _name(hint: Any) -> str:
    """Return a type's name for errors."""
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
