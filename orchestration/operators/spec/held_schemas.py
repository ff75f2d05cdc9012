"""The schemas that an operator holds, in whatever field of its."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

from dagster_adjunct.resources.schemas.schema import Schema


def schemas_of_fields(spec: object) -> Iterator[Schema]:
    """Yield the schemas in the fields of an operator that is a dataclass, and in what they hold."""
    for field in fields(spec) if is_dataclass(spec) else ():
        yield from schemas_in(getattr(spec, field.name))


def schemas_in(value: object) -> Iterator[Schema]:
    """Yield the schemas in the fields of a dataclass, and in what these hold: other dataclasses, sequences, mappings.

    What is called is left out: functions of users may hold anything.
    """
    if isinstance(value, Schema):
        yield value
    elif is_dataclass(value) and not callable(value):
        yield from schemas_of_fields(value)
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from schemas_in(element)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for element in value:
            yield from schemas_in(element)
