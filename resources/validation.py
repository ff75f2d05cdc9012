"""Validates what users pass to public functions and declarations, by the declared types, with
pydantic's `validate_call`.

`argument_types.py` says what pydantic accepts for a type, `argument_errors.py` what an error says.
The types are read when a function is called for the first time. Limits are pydantic's, such as
`PositiveInt`.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, TypeVar, Unpack, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, validate_call

from dagster_adjunct.resources.argument_errors import (
    RejectedCall,
    argument_error,
    located_error,
    too_many_error,
    unexpected_error,
    validated_functions,
)
from dagster_adjunct.resources.argument_types import checked_type, type_hints
from dagster_adjunct.resources.arguments import MAX_SECONDS

T = TypeVar("T")

Seconds = Annotated[float, Field(gt=0, lt=MAX_SECONDS)]
"""A finite number of seconds above 0."""


def validated(item: T) -> T:
    """Return a function or method that validates its arguments, or a class whose constructor does.

    Wrong arguments raise ConfigurationError before anything is called. Errors of the function
    itself pass unchanged. An enum raises it for a value that is not of a member, an abstract class
    or protocol if a derived class lacks methods.
    """
    target: Any = item
    if not isinstance(item, type):
        validated_functions.append(target)
        target = _validate_call(target)
    elif issubclass(item, enum.Enum):
        target._missing_ = classmethod(_raise_no_member)
    elif inspect.isabstract(item) or getattr(item, "_is_protocol", False):
        target.__new__ = _reject_abstract(target)
    elif issubclass(item, BaseModel):
        target.__init__ = _translate_model_errors(target)
    elif is_dataclass(item):
        target.__init__ = _validate_call(target.__init__, fields_of=item)
    else:
        target.__init__ = _validate_call(target.__init__)
    return target  # type: ignore[no-any-return]


def validated_methods(cls: type[T]) -> type[T]:
    """Return the class, whose constructor and public methods now validate their arguments."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_"):
            continue
        if isinstance(member, classmethod | staticmethod):
            setattr(cls, name, type(member)(_validate_call(member.__func__)))
        elif isinstance(member, types.FunctionType):
            setattr(cls, name, _validate_call(member))
    if "__init__" in vars(cls):
        return validated(cls)
    return cls


def _raise_no_member(cls: type[enum.Enum], value: object) -> None:
    members = ", ".join(f"{cls.__name__}.{member.name}" for member in cls)
    raise located_error(f"{cls.__name__} has no {value!r}.", f"Use one of {members}.")


def _reject_abstract(base: Any) -> Callable[..., Any]:
    """Return a `__new__` whose errors name the methods that a class derived from `base` has to
    have.
    """

    def __new__(cls: Any, *args: object, **kwargs: object) -> Any:
        missing = ", ".join(sorted(cls.__abstractmethods__))
        if cls is base:
            step = f"Write a class with {missing or 'its methods'}."
            raise located_error(f"{base.__name__} is abstract.", step)
        if missing:
            problem = f"{cls.__name__} lacks {missing}, which a {base.__name__} has."
            raise located_error(problem, "Write what it lacks.")
        return object.__new__(cls)

    return __new__


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The parameters of a function with the types to check, and pydantic's validator for them.

    The validator returns the arguments, as a tuple and a dictionary.
    """

    parameters: Sequence[inspect.Parameter]
    validate: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]

    @property
    def accept_all(self) -> bool:
        return all(parameter.annotation is Any for parameter in self.parameters)


def _read_arguments(function: Callable[..., Any], annotated: Any) -> _Arguments:
    """Return the arguments of `function`, whose types are those of `annotated`."""
    hints = type_hints(annotated)
    parameters = [
        parameter.replace(annotation=checked_type(hints.get(parameter.name, Any)))
        for parameter in inspect.signature(function).parameters.values()
    ]

    # A function of its own, so that errors of pydantic in the function's body are not taken for
    # errors of its arguments.
    def accept(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    accept.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    accept.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return _Arguments(parameters, validate_call(config=ConfigDict(strict=True))(accept))


def _validate_call(
    function: Callable[..., Any], fields_of: type | None = None
) -> Callable[..., Any]:
    """Return the function with validated arguments.

    If it is the constructor of the dataclass `fields_of`, the types are those of its fields.
    """

    @functools.cache
    def arguments() -> tuple[_Arguments, bool]:
        read = _read_arguments(function, fields_of or inspect.unwrap(function))
        return read, read.accept_all

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        expected, accept_all = arguments()
        # only the number and the names of arguments can be wrong, and Python checks those faster
        if accept_all:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # the function itself raised it
        try:
            checked_args, checked_kwargs = expected.validate(*args, **kwargs)
        except ValidationError as error:
            rejected = _reject(function.__name__, expected.parameters, args, kwargs)
            raise argument_error(rejected, error) from None
        return function(*checked_args, **checked_kwargs)

    return call


def _reject(
    name: str,
    parameters: Sequence[inspect.Parameter],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RejectedCall:
    called = name
    positional = []
    for parameter in parameters:
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            positional.append(parameter.name)
    if positional[:1] in (["self"], ["cls"]):
        # Users may know only the class that is derived from the one with the method.
        cls = args[0] if isinstance(args[0], type) else type(args[0])
        called = cls.__name__ if name == "__init__" else f"{cls.__name__}.{name}"
        parameters = parameters[1:]
    known = [keyword for parameter in parameters for keyword in _keywords(parameter)]
    return RejectedCall(called, positional, known, args, kwargs)


def _keywords(parameter: inspect.Parameter) -> list[str]:
    """Return the names by which a parameter takes arguments."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return []
    if parameter.kind is not parameter.VAR_KEYWORD:
        return [parameter.name]
    if get_origin(parameter.annotation) is not Unpack:
        return []
    (options,) = get_args(parameter.annotation)
    return list(options.__annotations__)


def _translate_model_errors(cls: type[BaseModel]) -> Callable[..., None]:
    construct = cls.__init__
    known = list(cls.model_fields)
    takes_names_only = _takes_names_only(construct)

    @functools.wraps(construct)
    def __init__(self: BaseModel, *args: Any, **kwargs: Any) -> None:
        if args and takes_names_only:
            raise too_many_error(RejectedCall(cls.__name__, [], known, args, kwargs))
        # Dagster's resources would ignore it
        unknown = []
        for name in kwargs:
            if name not in known and not name.startswith("_"):
                unknown.append(name)
        if unknown:
            raise unexpected_error(cls.__name__, unknown[0], known)
        try:
            construct(self, *args, **kwargs)
        except ValidationError as error:
            raise argument_error(RejectedCall(cls.__name__, [], known, args, kwargs), error) from (
                None
            )

    return __init__


def _takes_names_only(construct: Callable[..., None]) -> bool:
    """Return whether a constructor takes nothing but itself by position."""
    _, *parameters = inspect.signature(construct).parameters.values()
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return all(parameter.kind in by_name for parameter in parameters)
