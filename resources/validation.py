"""Validates what users pass to public functions and declarations, by the declared types, with
pydantic.

Values must have exactly the declared type (pydantic's strict mode), except that these are accepted
as well: numbers of NumPy for Python's, a whole number for a float, the value of an enum's member
for the member, a list for a tuple, and other ordered collections (arrays, views of dictionaries)
for a sequence. For all other classes, values must be instances. The types are read when a function
is called for the first time. Limits are pydantic's, such as `PositiveInt`.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    SkipValidation,
    Strict,
    StringConstraints,
    ValidationError,
    WrapValidator,
    validate_call,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import TypedDict

from dagster_adjunct.resources.arguments import MAX_SECONDS
from dagster_adjunct.resources.code_lines import find_calling_line
from dagster_adjunct.resources.errors import ConfigurationError

T = TypeVar("T")

Seconds = Annotated[float, Field(gt=0, lt=MAX_SECONDS)]
"""A finite number of seconds above 0."""

_SCALARS = (str, bool, bytes, type(None))
# With a limit, which nothing reaches, pydantic rejects lone surrogates ("\udcff"), which UTF-8
# can't encode.
_TEXT = Annotated[str, StringConstraints(max_length=2**60)]
# Classes of Spark are known by name, because Spark is not imported to check an argument.
_CONVERSIONS = {"LazyFrame": "collect", "Series": "to_frame"}  # methods that return a frame
_SPARK_CLASSES = {name: type(name, (), {}) for name in ("SparkSession", "DataFrame", "StructType")}


def validated(item: T) -> T:
    """Return a function or method that validates its arguments, or a class whose constructor does.

    Wrong arguments raise ConfigurationError before anything is called. Errors of the function
    itself pass unchanged. An enum raises it for a value that is not of a member, an abstract class
    or protocol if a derived class lacks methods.
    """
    target: Any = item
    if not isinstance(item, type):
        _FUNCTIONS.append(target)
        target = _validate_call(target)
    elif issubclass(item, enum.Enum):
        target._missing_ = classmethod(_raise_no_member)
    elif inspect.isabstract(item) or getattr(item, "_is_protocol", False):
        target.__new__ = _reject_abstract(target)
    elif issubclass(item, BaseModel):
        target.__init__ = _translate_model_errors(target)
    else:
        target.__init__ = _validate_call(
            target.__init__, fields_of=item if is_dataclass(item) else None
        )
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
    return validated(cls) if "__init__" in vars(cls) else cls


def _raise_no_member(cls: type[enum.Enum], value: object) -> None:
    members = ", ".join(f"{cls.__name__}.{member.name}" for member in cls)
    raise _error(f"{cls.__name__} has no {value!r}.", f"Use one of {members}.")


def _reject_abstract(base: Any) -> Callable[..., Any]:
    """Return a `__new__` whose errors name the methods that a class derived from `base` has to
    have.
    """

    def __new__(cls: Any, *args: object, **kwargs: object) -> Any:
        missing = ", ".join(sorted(cls.__abstractmethods__))
        if cls is base:
            raise _error(
                f"{base.__name__} is abstract.", f"Write a class with {missing or 'its methods'}."
            )
        if missing:
            raise _error(
                f"{cls.__name__} lacks {missing}, which a {base.__name__} has.",
                "Write what it lacks.",
            )
        return object.__new__(cls)

    return __new__


def _validate_call(
    function: Callable[..., Any], fields_of: type | None = None
) -> Callable[..., Any]:
    """Return the function with validated arguments.

    If it is the constructor of the dataclass `fields_of`, the types are those of its fields.
    """
    validator = functools.cache(
        lambda: _arguments_validator(function, fields_of or inspect.unwrap(function))
    )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        validate, accepts_all = validator()
        # only the number and the names of arguments can be wrong, and Python checks those faster
        if accepts_all:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # the function itself raised it
        try:
            checked_args, checked_kwargs = validate(*args, **kwargs)
        except ValidationError as error:
            called, parameters = (
                function.__name__,
                [*inspect.signature(validate).parameters.values()],
            )
            positional = [
                each.name
                for each in parameters
                if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)
            ]
            if positional and positional[0] in ("self", "cls"):
                # Users may know only the class that is derived from the one with the method.
                cls = args[0] if isinstance(args[0], type) else type(args[0])
                called = cls.__name__ if called == "__init__" else f"{cls.__name__}.{called}"
                del parameters[0]
            known = [name for each in parameters for name in _keywords(each)]
            raise _argument_error(called, error, positional, known, args, kwargs) from None
        return function(*checked_args, **checked_kwargs)

    return call


def _keywords(parameter: inspect.Parameter) -> list[str]:
    if parameter.kind is parameter.VAR_KEYWORD:
        options = (
            get_args(parameter.annotation)[0]
            if get_origin(parameter.annotation) is Unpack
            else None
        )
        return list(getattr(options, "__annotations__", ()))
    return [] if parameter.kind is parameter.VAR_POSITIONAL else [parameter.name]


def _arguments_validator(
    function: Callable[..., Any], annotated: Any
) -> tuple[Callable[..., Any], bool]:
    """Return a function that validates arguments of `function` and returns them: a tuple and a
    dictionary.

    Also return whether it accepts values of all types. The types are those of `annotated`.
    """
    hints = type_hints(annotated)
    parameters = [
        parameter.replace(annotation=_checked_type(hints.get(parameter.name, Any)))
        for parameter in inspect.signature(function).parameters.values()
    ]

    def accept(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    accept.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    accept.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    accepts_all = all(parameter.annotation is Any for parameter in parameters)
    return validate_call(config=ConfigDict(strict=True))(accept), accepts_all


def type_hints(item: Any) -> dict[str, Any]:
    """Return the types of a function's parameters or a class's fields, by name.

    Types that are imported for type checkers only are Any, except Spark's, which are placeholders
    checked by name.
    """
    unloaded: dict[str, Any] = {}
    annotated = item
    if inspect.isfunction(item):
        parameters = {name: hint for name, hint in item.__annotations__.items() if name != "return"}
        annotated = types.SimpleNamespace(__annotations__=parameters)
    while True:
        try:
            return get_type_hints(
                annotated, getattr(item, "__globals__", None), unloaded, include_extras=True
            )
        except NameError as error:
            name = str(error.name)
            unloaded[name] = (
                _SPARK_CLASSES.get(name, Any) if name[0].isupper() else _UnloadedModule()
            )


class _UnloadedModule:
    """Stands for a module that is imported for type checkers only: all its names are Any, so
    values are not checked.
    """

    def __getattr__(self, name: str) -> Any:
        return Any


def _checked_type(hint: Any) -> Any:
    """Return a declared type as pydantic should check it, without copying or converting more
    than it must.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        skips = any(type(one) is SkipValidation for one in inner)
        return Any if skips else Annotated[(_checked_type(inner[0]), *inner[1:])]
    if hint in _SCALARS or hint is None or origin is Literal:
        return _TEXT if hint is str else hint
    if hint in (int, float):
        return _number(hint)
    if origin in (Union, types.UnionType):
        members = tuple(map(_checked_type, inner))
        return Any if Any in members else Union[members]  # noqa: UP007
    if origin is Unpack:
        types_of = {
            name: _checked_type(option) for name, option in get_type_hints(inner[0]).items()
        }
        make: Any = TypedDict
        options = make(inner[0].__name__, types_of, total=False)
        options.__pydantic_config__ = ConfigDict(
            strict=True, extra="forbid"
        )  # else other names are dropped silently
        return Unpack[options]
    kind = origin or hint
    if kind is tuple:
        plain: Any = tuple
        elements = tuple(one if one is ... else _checked_type(one) for one in inner)
        return Annotated[plain[elements] if elements else plain, Strict(False)]
    if kind is Callable:
        return _matching(callable, "a function")
    if kind is type:
        return _matching(lambda value: isinstance(value, type), "a class")
    if not isinstance(kind, type) or kind in (Any, object) or _is_unchecked_protocol(kind):
        return Any
    if issubclass(kind, enum.Enum):
        return Annotated[kind, Strict(False)]
    if kind in _SPARK_CLASSES.values():
        return _matching(
            lambda value: _is_of_spark(value, kind.__name__), f"a {kind.__name__} of Spark"
        )
    if (kind.__module__ == "collections.abc" and issubclass(kind, Iterable)) or kind in (
        list,
        dict,
        set,
        frozenset,
    ):
        return _container(kind, inner)
    return _matching(
        lambda value: isinstance(value, kind) and not isinstance(value, type), _describe(kind)
    )


def _number(kind: type) -> Any:
    """Return the type to check an int or float by; numbers of other classes, such as NumPy's,
    are converted.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, int | float) or not isinstance(value, Real):
            return value
        return (
            int(value) if isinstance(value, Integral) else float(value) if kind is float else value
        )

    def check(value: Any) -> Any:
        number = convert(value)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise PydanticCustomError("wrong_type", "Input should be a valid number")
        return number

    return (
        Annotated[int, BeforeValidator(convert)]
        if kind is int
        else Annotated[Any, PlainValidator(check)]
    )


def _matching(accepts: Callable[[Any], bool], expected: str) -> Any:
    def check(value: Any) -> Any:
        if not accepts(value):
            raise PydanticCustomError(
                "wrong_type", "Input should be {expected}", {"expected": expected}
            )
        return value

    return Annotated[Any, PlainValidator(check)]


_TEXT_FOR_LIST = "text_for_list"


def _container(kind: type, inner: tuple[Any, ...]) -> Any:
    """Return the type to check a collection by. Elements are checked only where that doesn't
    consume or load them.
    """
    elements = tuple(map(_checked_type, inner))
    readable = dict if issubclass(kind, Mapping) else (list, tuple, set, frozenset)
    named = inner if any(part not in (Any, object) for part in inner) else ()
    expected = (
        f"{_describe(kind)} of {' to '.join(map(_name, named))}" if named else _describe(kind)
    )

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        if kind is Sequence and not isinstance(value, Sequence) and _is_ordered(value):
            return tuple(validate(tuple(value)))
        if (
            isinstance(value, str | bytes)
            and not issubclass(kind, Mapping)
            and (not named or str in inner)
        ):
            raise PydanticCustomError(
                _TEXT_FOR_LIST, "Input should be {expected}", {"expected": expected}
            )
        if not isinstance(value, kind) or isinstance(value, str | bytes):
            raise PydanticCustomError(
                "wrong_type", "Input should be {expected}", {"expected": expected}
            )
        if isinstance(value, readable):
            validate(value)
        return value

    if all(element is Any for element in elements):
        return Annotated[Any, WrapValidator(check)]
    collection: Any = dict if issubclass(kind, Mapping) else list
    return Annotated[collection[elements], Strict(False), WrapValidator(check)]


def _is_ordered(value: object) -> bool:
    unordered = isinstance(value, str | bytes | Mapping | set | frozenset)
    return isinstance(value, Collection) and not unordered and getattr(value, "ndim", 1) == 1


def _is_of_spark(value: object, name: str) -> bool:
    return any(
        cls.__name__ == name and cls.__module__.startswith("pyspark.")
        for cls in type(value).__mro__
    )


def _is_unchecked_protocol(kind: type) -> bool:
    return getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False)


def _name(kind: Any) -> str:
    if kind in (Any, object):
        return "any value"
    return str(getattr(get_origin(kind) or kind, "__name__", kind))


def _describe(kind: type) -> str:
    """Return the name of a class with its article."""
    if kind.__name__ == "ArrowFrame":
        return "an Arrow table, or a pandas or Polars frame"
    name = (
        kind.__name__.lower()
        if kind.__module__ in ("collections.abc", "builtins")
        else kind.__name__
    )
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _translate_model_errors(cls: type[BaseModel]) -> Callable[..., None]:
    construct, known = cls.__init__, list(cls.model_fields)

    @functools.wraps(construct)
    def __init__(self: BaseModel, *args: Any, **kwargs: Any) -> None:
        unknown = next(
            (name for name in kwargs if name not in known and not name.startswith("_")), None
        )
        if unknown is not None:  # Dagster's resources would ignore it
            raise _unexpected_error(cls.__name__, unknown, known)
        try:
            construct(self, *args, **kwargs)
        except ValidationError as error:
            raise _argument_error(cls.__name__, error, [], known, args, kwargs) from None

    return __init__


def _argument_error(
    called: str,
    error: ValidationError,
    positional: Sequence[str],
    known: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> ConfigurationError:
    """Return the error for the worst problem that pydantic found; `positional` names the
    parameters of `args`.
    """

    def name_of(problem: ErrorDetails) -> str:
        place = problem["loc"][0] if problem["loc"] else ""
        return positional[min(place, len(positional) - 1)] if isinstance(place, int) else place

    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    given_name = given.get(
        "name", given.get(positional.index("name")) if "name" in positional else None
    )
    if isinstance(given_name, str):
        called = f"{called}({given_name!r})"
    problems = error.errors(include_url=False)
    kinds = {problem["type"]: name_of(problem) for problem in reversed(problems)}
    if unexpected := kinds.get("unexpected_keyword_argument") or kinds.get("extra_forbidden"):
        return _unexpected_error(called, unexpected, known)
    if "unexpected_positional_argument" in kinds:
        taken = [name for name in positional if name in known]
        named = [f"{name}=" for name in known if name not in taken]
        problem = (
            f"{called} takes {len(taken)} arguments by position ({', '.join(taken) or 'none'}),"
            " and "
        )
        problem += f"{len(args) - len(positional) + len(taken)} are given."
        return _error(
            problem, f"Name the others: {', '.join(named)}." if named else "Leave the others out."
        )
    if missing := [
        name_of(problem) for problem in problems if problem["type"].startswith("missing")
    ]:
        return _error(
            f"{called} lacks {', '.join(f'{name}=' for name in missing)}.", argument=missing[0]
        )
    argument = name_of(problems[0])
    own = [problem for problem in problems if name_of(problem) == argument]
    # If the type is a union, the alternative in which only an element is wrong has the most useful
    # message.
    elements = [
        problem
        for problem in own
        if problem["loc"] and problem["input"] is not given.get(problem["loc"][0])
    ]
    if convertible := [
        problem for problem in own if type(problem["input"]).__name__ in _CONVERSIONS
    ]:
        own, elements = convertible, []
    value = (elements or own)[0]["input"]
    shown = " ".join(repr(value).split())
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    kind = "" if value is None else f" ({type(value).__name__})"
    found = f"{argument} {'has' if elements else 'is'} {shown}{kind}" if argument else shown
    messages = [problem["msg"].removeprefix("Input should be ") for problem in elements or own]
    limits = ("greater than", "less than")  # as pydantic names them
    expected = dict.fromkeys(
        f"a value {text}" if text.startswith(limits) else text for text in messages
    )
    if any(problem["type"] == "string_unicode" for problem in own):
        expected = {"whole characters, which UTF-8 can hold": None}
    step = ""
    if type(value).__name__ in _CONVERSIONS:
        step = f"Pass the result of its {_CONVERSIONS[type(value).__name__]}()."
    elif isinstance(value, str) and "a Lake" in expected:
        step = f"Pass open_lake({value!r})."
    elif own[0]["type"] == _TEXT_FOR_LIST:
        step = f"Put it into a list: [{shown}]."
    elif isinstance(value, type):
        step = f"Pass an object of it: {value.__name__}(…)."
    return _error(
        f"{called}: {found}: expected {' or '.join(expected)}.", step, argument=argument or shown
    )


# how similar a name must be to be taken for a misspelling: "validators" is none of "valid_from"
_CLOSE = 0.75
_FUNCTIONS: list[Callable[..., Any]] = []


def _unexpected_error(called: str, argument: str, known: Sequence[str]) -> ConfigurationError:
    accepted = ", ".join(f"{name}=" for name in known) or "nothing"
    step = f"{called} takes {accepted}."
    if others := _functions_that_take(argument, called.partition("(")[0]):
        step = (
            f"It is an argument of {' and of '.join(others)}: use that, or leave {argument}= out."
        )
    elif near := _nearest_argument(argument, known):
        step = f"Did you mean {near}=?"
    return _error(f"{called} takes no {argument}=.", step, argument=argument)


def _functions_that_take(argument: str, called: str) -> list[str]:
    """Return the functions of the same module as the function `called` that take this argument."""
    modules = {function.__module__ for function in _FUNCTIONS if function.__name__ == called}
    return [
        function.__name__
        for function in _FUNCTIONS
        if function.__module__ in modules and argument in inspect.signature(function).parameters
    ]


def _nearest_argument(argument: str, known: Sequence[str]) -> str | None:
    for near in difflib.get_close_matches(argument, known, n=1):
        longer = near.startswith(f"{argument}_") or argument.startswith(f"{near}_")
        if longer or difflib.SequenceMatcher(None, near, argument).ratio() >= _CLOSE:
            return near
    return None


def _error(problem: str, next_step: str = "", *, argument: str | None = None) -> ConfigurationError:
    place = find_calling_line()
    return ConfigurationError(
        problem if place is None else f"{place}: {problem}", next_step, argument=argument
    )
