"""What every error that Adjunct raises on purpose is: two texts, and what they are about as fields."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Self

# What follows the colon is a password, unless it is a port and a path behind it. Some write a slash in a password.
_LOGIN = re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^\s/@'\"]*:(?!\d+/)[^\s@'\"]*@(?=[\w\[])")


def without_passwords(text: str) -> str:
    """Return a text in which URLs have no login any more: `***` stands for user and password."""
    return _LOGIN.sub(r"\1***@", text)


@dataclass(eq=False, repr=False)
class AdjunctError(Exception):
    """Base of all errors that Adjunct raises on purpose.

    `problem` says what was found where; `next_step` says what to do about it. Classes below add what they are about, as
    fields that are given by name.
    """

    problem: str
    next_step: str = ""

    def __post_init__(self) -> None:
        # What others say, such as a driver that did not reach its server, may quote a URL with its password.
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                setattr(self, field.name, without_passwords(value))
        super().__init__(f"{self.problem} {self.next_step}" if self.next_step else self.problem)

    @property
    def facts(self) -> dict[str, Any]:
        """What the error is about: its fields that are known, by name, besides the two texts."""
        values = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        return {name: value for name, value in values.items() if value not in (None, ())}

    def reworded(self, problem: str, next_step: str, **more: Any) -> Self:
        """Return the same error, about the same things and `more` of them, in other words."""
        return type(self)(problem, next_step, **self.facts | more)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders (Spark workers): without a call of the constructor, subclasses with one of
        # their own travel too.
        return _rebuild, (type(self), *self.args), self.__dict__


def _rebuild(kind: type[AdjunctError], *args: object) -> AdjunctError:
    return kind.__new__(kind, *args)
