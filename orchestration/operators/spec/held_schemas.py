"""The schemas that an operator holds, in whatever field of its."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

from dagster_adjunct.resources.schemas.schema import Schema


def schemas_in(value: object) -> Iterator[Schema]:
    """Yield the schemas in the fields of a dataclass, and in what these hold: other dataclasses, sequences, mappings.

    What is called is left out: functions of users may hold anything.
    """
    if isinstance(value, Schema):
        yield value
    elif is_dataclass(value) and not callable(value):
        for field in fields(value):
            yield from schemas_in(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from schemas_in(element)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for element in value:
            yield from schemas_in(element)
