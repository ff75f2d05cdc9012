"""What users pass, checked at the edge of the package: a keyword that is mistyped, a value of a wrong type.

One way for every public function, constructor and method, from the types that they declare. `guard` wraps what the
package exports; the declarations that mypy and editors read stay what they are, and inside the floors nothing is
checked twice. What a user's own code raises passes as it is.
"""

from __future__ import annotations

import copy
import difflib
import enum
import functools
import inspect
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import chain, repeat
from types import FunctionType
from typing import Any

from dagster_adjunct._fitting import expected, fits, hints_of, is_ours
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError

_MARK = "__adjunct_checked__"
_DECLARATIONS = frozenset(
    {"bounded_dataset", "unbounded_dataset", "version_set", "build_definitions", "Application", "MessageStream"}
)
# Made once a record, and methods that are called as often: only how they are called is looked at.
_COUNTLESS = frozenset({"UpdateMessage", "Insert", "Put", "Replace", "Remove", "MustBeAbsent", "MustHaveVersion"})
_CALLED_COUNTLESS_TIMES = ("KeyValueTable.", "BlockingKeyValueTable.")
# Made and called by us for each key, value and request, and by users hardly ever.
_NOT_CHECKED = frozenset({"KeyVersion", "IteratorState", "Outcomes"})
# What a table's layers ask of each operation, of these classes and of those made of them: `RemoteTable` has looked at
# what its caller gave.
_ASKED_BY_LAYERS = {
    "BatchProvider": frozenset({"batch", "gathers", "size_of"}),
    "TableFunction": frozenset({"open", "send"}),
}
# Asked of each operation; only how they are made is looked at.
_LAYERS = frozenset(
    {"AttemptLayer", "BatchHandler", "BatchLayer", "BatchProcessor", "CacheLayer", "FunctionLayer", "LayerAsFunction"}
    | {"RateLayer", "RetryLayer", "UpdateContractLayer"}
)
_CALLED_BY_US = frozenset({"to_bytes", "from_bytes"})


def guard(names: MutableMapping[str, Any], exported: Sequence[str]) -> None:
    """Check the arguments of everything `exported` from here on; functions are replaced, classes changed in place."""
    for name in exported:
        value = names[name]
        if inspect.isclass(value):
            _guard_class(value, names)
        elif isinstance(value, FunctionType):
            checked = _checked(value, name)
            checked.__module__ = str(names["__name__"])  # where a pickle finds it again
            names[name] = checked


def _guard_class(cls: type[Any], names: Mapping[str, Any]) -> None:
    if issubclass(cls, enum.Enum):
        cls._missing_ = classmethod(_no_member)  # type: ignore[assignment]
    elif getattr(cls, "_is_protocol", False) or inspect.isabstract(cls):
        _guard_abstract(cls)
    if issubclass(cls, BaseException | enum.Enum) or getattr(cls, "_is_protocol", False):
        return
    for owner in cls.__mro__:
        if not is_ours(owner.__module__):
            continue
        asked = frozenset().union(*(_ASKED_BY_LAYERS.get(base.__name__, ()) for base in owner.__mro__))
        for name, member in list(vars(owner).items()):
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if name == "__init__":
                called = cls.__name__
            elif name.startswith("_") or name in _CALLED_BY_US or name in asked or cls.__name__ in _LAYERS:
                continue
            else:
                # A base that users do not know is a part of the class that they do.
                called = f"{(owner if owner.__name__ in names else cls).__name__}.{name}"
            if not isinstance(function, FunctionType) or hasattr(function, _MARK) or called in _NOT_CHECKED:
                continue
            checked: Any = _checked(function, called, skip=0 if isinstance(member, staticmethod) else 1)
            if isinstance(member, classmethod | staticmethod):
                checked = type(member)(checked)
            setattr(owner, name, checked)
    if _is_model(cls):
        _guard_model(cls)


def _no_member(cls: type[enum.Enum], value: object) -> None:
    known = ", ".join(f"{cls.__name__}.{member.name}" for member in cls)
    raise ConfigurationError(f"{cls.__name__} has no {value!r}.", f"Use one of {known}.")


def _guard_abstract(base: type[Any]) -> None:
    """Say which methods are to be written where a class of ours is made that only says what others have."""
    if any("__new__" in vars(owner) for owner in base.__mro__[:-1]):
        return

    def __new__(cls: type[Any], *args: object, **given: object) -> Any:
        missing = ", ".join(sorted(cls.__abstractmethods__))
        if cls is base:
            raise ConfigurationError(
                f"{base.__name__} itself can't be made: it says what such a class has to have.",
                f"Make one of those that are there, or write a class with {missing or 'its methods'}.",
            )
        if missing:
            raise ConfigurationError(
                f"{cls.__name__} can't be made: a {base.__name__} has {missing}, too.", "Write what it lacks."
            )
        return object.__new__(cls)

    setattr(base, "__new__", __new__)  # noqa: B010


def _is_model(cls: type[Any]) -> bool:
    return hasattr(cls, "__pydantic_validator__")


def _guard_model(cls: type[Any]) -> None:
    """Say what pydantic finds wrong with a setting as an error of ours; values are its to check."""
    from pydantic import ValidationError

    from dagster_adjunct.resources.common import validation_problems

    made = cls.__init__

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        known = list(type(self).model_fields)
        unknown = [name for name in given if name not in known and not name.startswith("_")]
        if unknown:  # which pydantic passes over
            raise ConfigurationError(
                f"{cls.__name__} takes no {unknown[0]}=.",
                _nearest(given, known, cls.__name__),
                argument=unknown[0],
            )
        try:
            made(self, *args, **given)
        except (ValidationError, TypeError) as error:
            wrong = validation_problems(error) if isinstance(error, ValidationError) else [str(error)]
            at = error.errors()[0]["loc"] if isinstance(error, ValidationError) else ()
            raise ConfigurationError(
                f"{cls.__name__}: {'; '.join(wrong)}.",
                _nearest(given, known, cls.__name__),
                argument=str(at[0]) if at else None,
            ) from None

    cls.__init__ = __init__


def _checked(function: Any, called: str, skip: int = 0) -> Any:
    """Return the function with its arguments checked; `skip` is 1 for a method, whose first is the object itself."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[skip:]
    positional = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    optional = {parameter.name for parameter in parameters if parameter.default is not parameter.empty}
    several = next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL), "")
    anything = next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD), "")
    known = {parameter.name for parameter in parameters}
    declares = function.__name__ == "__init__" or called.partition(".")[0] in _DECLARATIONS
    hints: dict[str, Any] | None = {} if called in _COUNTLESS or called.startswith(_CALLED_COUNTLESS_TIMES) else None

    def named(args: Sequence[Any], given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        places = chain(positional, repeat(several)) if several else positional
        return chain(zip(places, args[skip:], strict=False), given.items())

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        nonlocal hints
        if hints is None:
            hints = hints_of(function, [parameter.name for parameter in parameters])
        # Requests of single records take any key and record, and must not pay for a look at them.
        for name, value in named(args, given) if hints else ():
            hint = hints.get(name if name in known else anything)
            if hint is not None and type(value) is not hint and not fits(value, hint):
                # It reaches nothing outside, so it may have more to say, or make of the elements what it wants.
                if declares and _takes(function, args, given) and fits(value, hint, elements=False):
                    continue
                raise _misfit(called, name, value, hint, optional=name in optional)
        try:
            return function(*args, **given)
        except TypeError as error:
            try:  # Python's word for a call that can't be made is the word for what goes wrong inside one, too
                signature.bind(*args, **given)
            except TypeError:
                raise _misplaced(called, error, given, args[skip:], parameters) from None
            raise

    setattr(call, _MARK, True)
    return call


def _takes(function: Any, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Whether a declaration takes what it was given; raises what it says itself, where that is an error of ours.

    Tried on copies: what builds an application would otherwise have built it with the value that is refused.
    """
    try:
        if function.__name__ != "__init__":
            args, given = copy.deepcopy((args, given))
        function(*args, **given)
    except AdjunctError:
        raise
    except Exception:  # noqa: BLE001 - the type that is wrong says it better
        return False
    return True


def _misfit(called: str, name: str, value: object, hint: Any, *, optional: bool) -> AdjunctError:
    shown = " ".join(repr(value).split())
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    kind = "" if value is None else f" ({type(value).__name__})"
    such = {"LazyFrame": ".collect() of it", "Series": ".to_frame() of it"}.get(type(value).__name__, "such a value")
    return ConfigurationError(
        f"{called}: {name} is {shown}{kind}: expected {expected(hint)}.",
        f"Give {name}= {such}{', or leave it out' if optional else ''}.",
        argument=name,
    )


def _misplaced(
    called: str,
    error: TypeError,
    given: Mapping[str, Any],
    args: Sequence[Any],
    parameters: Sequence[inspect.Parameter],
) -> ConfigurationError:
    known = [
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    unknown = [name for name in given if name not in known]
    if unknown:
        return ConfigurationError(
            f"{called} takes no {unknown[0]}=.", _nearest(given, known, called), argument=unknown[0]
        )
    placed = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(args) > len(placed):
        first = ", ".join(placed) or "none"
        named = [name for name in known if name not in placed]
        return ConfigurationError(
            f"{called} takes {len(placed)} arguments by position ({first}), and {len(args)} are given.",
            f"Name the others: {', '.join(f'{name}=' for name in named)}." if named else "Leave the others out.",
        )
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.name not in given
        and parameter.name not in placed[: len(args)]
    ]
    if missing:
        return ConfigurationError(
            f"{called} lacks {', '.join(f'{name}=' for name in missing)}.",
            "Give what is missing.",
            argument=missing[0],
        )
    return ConfigurationError(f"{called}: {error}.", "Give each argument once.")


def _nearest(given: Mapping[str, Any], known: Sequence[str], called: str) -> str:
    """Return the next step for keywords that are not known: the nearest one that is, or all there are."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            if near:
                return f"Did you mean {near[0]}=?"
    return f"{called} takes {', '.join(f'{name}=' for name in known) or 'nothing'}."
