"""Documents that are stored as JSON: what all of them have in common, and what is said of one that can't be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from pydantic import ValidationError


class StoredDocument(BaseModel):
    """A stored document, or a part of one: frozen, and without fields that this release does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def problems(error: ValidationError) -> list[str]:
    """Return what pydantic found wrong, each as "field: message"; a validator's own words as they are."""
    details = error.errors(include_url=False)
    return [
        f"{'.'.join(map(str, one['loc'])) or 'the whole document'}: {one['msg'].removeprefix('Value error, ')}"
        for one in details
    ]


def first_problem(error: ValidationError) -> str:
    """Return the first thing that pydantic found wrong, as "field: message"."""
    return problems(error)[0]
