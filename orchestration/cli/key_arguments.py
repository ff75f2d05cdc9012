"""Keys as a command line gives them: texts, one a key column."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dagster_adjunct.assets.reading.entry_keys import key_from_text
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.schema import Field


def entry_keys(dataset: str, columns: Sequence[str], values: Sequence[str]) -> list[list[str]]:
    """Return the keys that a command line gives one after the other, each as one text a key column."""
    width = len(columns)
    if len(values) % width:
        raise ConfigurationError(
            f"dataset {dataset!r} has a key of {width} columns ({', '.join(columns)}), and {len(values)} values were "
            "given.",
            f"Give {width} values for each entry.",
            dataset=dataset,
        )
    return [list(values[at : at + width]) for at in range(0, len(values), width)]


def keys_in_file(dataset: str, columns: Sequence[str], file: Path) -> list[list[str]]:
    """Return the keys in a CSV file without header: one a line, one field a key column; empty lines count nothing."""
    with file.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.reader(lines) if row]
    wrong = next((number for number, row in enumerate(rows, 1) if len(row) != len(columns)), None)
    if wrong is not None:
        raise ConfigurationError(
            f"{file}: key {wrong} has {len(rows[wrong - 1])} fields, and the key of dataset {dataset!r} is "
            f"({', '.join(columns)}).",
            "Write one key a line, its columns separated by commas, without a header.",
            dataset=dataset,
        )
    return rows


def leading_values(dataset: str, fields: Sequence[Field], texts: Sequence[str]) -> tuple[Any, ...]:
    """Return texts as values of the leading key columns."""
    known = fields[: len(texts)] if len(texts) <= len(fields) else fields
    return key_from_text(f"dataset {dataset!r}", known, list(texts))
