"""What a validator is: a named rule that is asked about each version before anybody can read it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from dagster_adjunct.resources.errors import ConfigurationError

Severity = Literal["error", "warn"]
NAME = re.compile(r"[A-Za-z0-9_]{1,200}")


@runtime_checkable
class Validator(Protocol):
    """Looks at a candidate and says whether it may be published. A frozen value; `name` is unique in a dataset."""

    @property
    def name(self) -> str: ...

    @property
    def severity(self) -> Severity: ...

    def __call__(self, candidate: Any, /) -> Any:
        """Return the Verdict on a Candidate."""
        ...


def check_validators(what: str, validators: Sequence[Validator]) -> None:
    """Refuse validators that can't be told apart, or that are none. `what` names the dataset in errors."""
    names: list[str] = []
    for validator in validators:
        if not isinstance(validator, Validator) or not callable(validator) or isinstance(validator, type):
            raise ConfigurationError(
                f"{what} has {validator!r} among its validators, which has no name, severity or call.",
                "Use one of the functions of Adjunct, called (unique_keys()), or custom(NAME, FUNCTION).",
                argument="validators",
            )
        names.append(validator.name)
        if not NAME.fullmatch(validator.name):
            raise ConfigurationError(
                f"{what} has a validator named {validator.name!r}: expected letters, digits and underscores.",
                "Rename it.",
                argument="validators",
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(
            f"{what} has two validators of the name {twice[0]!r}.",
            "Drop one; a rule that is declared twice with other numbers needs names: custom(NAME, …).",
            argument="validators",
        )
