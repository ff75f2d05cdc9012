"""Validates what users pass to public functions and declarations, by the declared types, with
pydantic's `validate_call`.

The types are read when a function is called for the first time, and checked in pydantic's strict
mode: values must have exactly the declared type, except that these are accepted as well: numbers of
NumPy for Python's, a whole number for a float, the value of an enum's member for the member, a list
for a tuple, and other ordered collections (arrays, views of dictionaries) for a sequence. For all
other classes, values must be instances. Collections are neither copied nor consumed. Limits are
pydantic's, such as `PositiveInt`. `argument_errors.py` says what an error says.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
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
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from dagster_adjunct.resources.argument_errors import (
    TEXT_FOR_LIST,
    WRONG_TYPE,
    RejectedCall,
    argument_error,
    located_error,
    too_many_error,
    unexpected_error,
    validated_functions,
)
from dagster_adjunct.resources.arguments import MAX_SECONDS

T = TypeVar("T")

Seconds = Annotated[float, Field(gt=0, lt=MAX_SECONDS)]
"""A finite number of seconds above 0."""
SecondsOrZero = Annotated[float, Field(ge=0, lt=MAX_SECONDS)]
"""A finite number of seconds from 0 on."""

WholeSeconds = Annotated[int, Field(gt=0, lt=MAX_SECONDS)]
"""A whole number of seconds above 0."""

Limit = Annotated[int, Field(ge=0, le=sys.maxsize)]
"""How many results to return at most."""


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
    """Raise ConfigurationError for a value that is of no member of an enum."""
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
    accept_all: bool
    """Whether all arguments may be anything: only their number and their names can be wrong."""


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
    accept_all = all(parameter.annotation is Any for parameter in parameters)
    validate = validate_call(config=ConfigDict(strict=True))(accept)
    return _Arguments(parameters, validate, accept_all)


def _validate_call(
    function: Callable[..., Any], fields_of: type | None = None
) -> Callable[..., Any]:
    """Return the function with validated arguments.

    If it is the constructor of the dataclass `fields_of`, the types are those of its fields.
    """

    # What a wrapper (functools.wraps) calls would raise the TypeError for a wrong call, deeper than
    # an error of the call itself.
    is_wrapper = hasattr(function, "__wrapped__")

    @functools.cache
    def arguments() -> _Arguments:
        return _read_arguments(function, fields_of or inspect.unwrap(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        expected = arguments()
        if expected.accept_all and not is_wrapper:  # then Python's own check is enough, and faster
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                is_of_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
                if not is_of_call:
                    raise  # the function itself raised it
            # the number or names are wrong: pydantic finds out which
        try:
            checked_args, checked_kwargs = expected.validate(*args, **kwargs)
        except ValidationError as error:
            rejected = _rejected_call(function.__name__, expected.parameters, args, kwargs)
            raise argument_error(rejected, error) from None
        return function(*checked_args, **checked_kwargs)

    return call


def _rejected_call(
    name: str,
    parameters: Sequence[inspect.Parameter],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RejectedCall:
    """Return the call that was rejected, with the names that its function takes."""
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
    """Return the constructor of a pydantic model, with errors as functions have them."""
    construct = cls.__init__
    known = list(cls.model_fields)
    takes_names_only = _takes_names_only(construct)

    @functools.wraps(construct)
    def __init__(self: BaseModel, *args: Any, **kwargs: Any) -> None:
        if args and takes_names_only:
            raise too_many_error(RejectedCall(cls.__name__, [], known, args, kwargs))
        # Dagster's resources would ignore arguments that they do not know.
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


# Classes of Spark are known by name, because Spark is not imported to check an argument.
_SPARK_CLASSES = {name: type(name, (), {}) for name in ("SparkSession", "DataFrame", "StructType")}


def type_hints(item: Any) -> dict[str, Any]:
    """Return the types of a function's parameters or a class's fields, by name.

    Types that are imported for type checkers only are Any, except Spark's, which are placeholders
    checked by name.
    """
    unloaded: dict[str, Any] = {}
    annotated = item
    if inspect.isfunction(item):  # the type of its result is not resolved
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
        except NameError as error:  # once for each name that is not loaded
            unloaded[str(error.name)] = _placeholder(str(error.name))


def _placeholder(name: str) -> Any:
    """Return what stands for a name that is imported for type checkers only.

    A name with a capital is that of a class, another one that of a module.
    """
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
    if origin is Unpack:  # of `**options`
        return Unpack[_options(parts[0])]
    if origin is Literal:
        return hint
    kind = origin or hint
    if isinstance(kind, type):
        return _class(kind, parts)
    return Any  # such as a type variable


def _annotated(parts: tuple[Any, ...]) -> Any:
    """Return an annotated type as pydantic should check it."""
    declared, *constraints = parts
    if any(type(each) is SkipValidation for each in constraints):
        return Any
    return Annotated[(checked_type(declared), *constraints)]


def _union(parts: tuple[Any, ...]) -> Any:
    """Return a union of types as pydantic should check it."""
    members = tuple(map(checked_type, parts))
    return Any if Any in members else Union[members]  # noqa: UP007


def _options(declared: Any) -> Any:
    """Return the typed dictionary of a function's `**options`, which rejects other names."""
    members = {name: checked_type(option) for name, option in type_hints(declared).items()}
    make: Any = TypedDict
    options = make(declared.__name__, members, total=False)
    options.__pydantic_config__ = ConfigDict(strict=True, extra="forbid")
    return options


def _class(kind: type, parts: tuple[Any, ...]) -> Any:
    """Return a class, with the types of its elements, as pydantic should check it."""
    if kind in _BY_CLASS:
        return _BY_CLASS[kind]
    if kind is tuple:
        return _tuple(parts)
    if issubclass(kind, enum.Enum):
        return Annotated[kind, Strict(False)]  # also accepts the values of members
    if _is_collection(kind):
        return _collection(kind, parts)
    if _is_unchecked_protocol(kind):
        return Any
    return _matching(partial(_is_instance, kind), _with_article(kind), kind)


def _is_instance(kind: type, value: object) -> bool:
    """Return whether the value is an object of the class.

    A class is none, though it may have all methods of a protocol.
    """
    return isinstance(value, kind) and not isinstance(value, type)


def _is_unchecked_protocol(kind: type) -> bool:
    """Whether a class is a protocol that can't be checked at run time."""
    return getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False)


def _is_of_spark(name: str, value: object) -> bool:
    """Whether a value is an object of the class of this name in PySpark."""
    return any(
        cls.__name__ == name and cls.__module__.startswith("pyspark.")
        for cls in type(value).__mro__
    )


def _matching(accepts: Callable[[Any], bool], expected: str, kind: type | None = None) -> Any:
    """Return the type of values for which `accepts` is true; they stay as they are.

    `expected` says in errors what they are, `kind` is their class, if they have one.
    """
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
    # `...` follows the type of all elements
    elements = tuple(part if part is ... else checked_type(part) for part in parts)
    return Annotated[plain[elements] if elements else plain, Strict(False)]


@dataclass(frozen=True, slots=True)
class _Collection:
    """Checks a collection. Elements are checked only where that doesn't consume or load them."""

    kind: type
    elements: tuple[Any, ...]  # their declared types, empty if they may be anything

    def check(self, value: Any, check_elements: Callable[[Any], Any]) -> Any:
        """Return the value as it is, after checking it with its elements; a tuple for an array or
        a view that is given for a sequence.

        `check_elements` is pydantic's check of the elements, which returns a copy of the
        collection. Raises PydanticCustomError for what is no such collection, and for a text.
        """
        if self.kind is Sequence and _is_array_or_view(value):
            return tuple(check_elements(tuple(value)))
        if self._is_text_for_list(value):
            raise self._error(TEXT_FOR_LIST)
        if isinstance(value, str | bytes) or not isinstance(value, self.kind):
            raise self._error(WRONG_TYPE)
        is_in_memory = isinstance(value, dict if self.is_mapping else (list, tuple, set, frozenset))
        if is_in_memory:
            check_elements(value)
        return value

    @property
    def is_mapping(self) -> bool:
        """Whether it is a mapping."""
        return issubclass(self.kind, Mapping)

    def _is_text_for_list(self, value: object) -> bool:
        """Return whether a text was given alone where a list of it is meant."""
        is_element = not self.elements or type(value) in self.elements
        return isinstance(value, str | bytes) and is_element and not self.is_mapping

    def _error(self, type_of_error: Literal["wrong_type", "text_for_list"]) -> PydanticCustomError:
        """Return the error of pydantic for a value that is no such collection."""
        expected = _with_article(self.kind)
        if self.elements:
            expected += f" of {' to '.join(map(_name, self.elements))}"
        return PydanticCustomError(
            type_of_error, "Input should be {expected}", {"expected": expected}
        )


def _is_collection(kind: type) -> bool:
    """Whether a class is one of Python's collections, or an abstract one."""
    is_abstract = kind.__module__ == "collections.abc" and issubclass(kind, Iterable)
    return is_abstract or kind in (list, dict, set, frozenset)


def _collection(kind: type, parts: tuple[Any, ...]) -> Any:
    """Return a collection's type, with the types of its elements, as pydantic should check it.

    `_Collection` checks the collection itself, pydantic only the elements: of whatever is no
    mapping, as those of a list.
    """
    is_typed = any(part not in (Any, object) for part in parts)
    collection = _Collection(kind, parts if is_typed else ())
    elements = tuple(map(checked_type, parts))
    if all(element is Any for element in elements):
        return Annotated[Any, WrapValidator(collection.check)]
    container: Any = dict if collection.is_mapping else list
    return Annotated[container[elements], Strict(False), WrapValidator(collection.check)]


def _is_array_or_view(value: object) -> bool:
    """Whether the value has an order without being a sequence, as arrays of one dimension and
    views of dictionaries have.
    """
    if isinstance(value, Sequence | Mapping | bytes | set | frozenset):
        return False
    return isinstance(value, Collection) and getattr(value, "ndim", 1) == 1


def _name(kind: Any) -> str:
    """Return a type's name for errors."""
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
