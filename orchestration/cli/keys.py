"""Keys as a command line gives them: texts, one a key column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from resources.errors import ConfigurationError

if TYPE_CHECKING:
    from assets import DatasetView


def entry_keys(view: DatasetView, values: Sequence[str]) -> list[list[str]]:
    """Return the keys that a command line gives, each as one text a key column."""
    width = len(view.sealed.key)
    if len(values) % width:
        raise ConfigurationError(
            f"dataset {view.dataset!r} has a key of {width} columns ({', '.join(view.sealed.key)}), and {len(values)} "
            "values were given.",
            f"Give {width} values for each entry.",
        )
    return [list(values[at : at + width]) for at in range(0, len(values), width)]


def leading_values(view: DatasetView, texts: Sequence[str]) -> tuple[Any, ...]:
    """Return texts as values of the leading key columns."""
    from assets.keys import key_from_text

    fields = [view.schema.field(name) for name in view.sealed.key]
    known = fields[: len(texts)] if len(texts) <= len(fields) else fields
    return key_from_text(f"dataset {view.dataset!r}", known, list(texts))
