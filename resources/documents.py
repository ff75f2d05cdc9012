"""Stored documents, and what is wrong with one that can't be read."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class RepeatedMemberError(ValueError):
    """A JSON object has a member twice; the text is the member's name."""


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object, for `object_pairs_hook`. Raises RepeatedMemberError."""
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise RepeatedMemberError(name)
        members[name] = value
    return members


class StoredDocument(BaseModel):
    """A stored document, or a part of one: frozen, and rejecting fields that this release does
    not know.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def validation_problems(error: ValidationError) -> list[str]:
    """Return the problems that pydantic found, each as "field: message"; messages of validators
    stay as they are.
    """
    problems = []
    for one in error.errors(include_url=False):
        place = ".".join(map(str, one["loc"])) or "the whole document"
        problems.append(f"{place}: {one['msg'].removeprefix('Value error, ')}")
    return problems


def first_validation_problem(error: ValidationError) -> str:
    """Return the first problem that pydantic found, as "field: message"."""
    return validation_problems(error)[0]
