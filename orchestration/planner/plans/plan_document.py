"""A plan as JSON.

The document is one object: `format`, the number of its format, and a member for each field of `ExecutionPlan`, whose
items have members for their fields. A reader ignores members that it doesn't know. Whatever changes the meaning of what
is there gets the next number.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from dagster_adjunct.resources.errors import ConfigurationError, MalformedDocumentError
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

FORMAT = 1
P = TypeVar("P")
_MAKE = "Write it with adjunct plan MODULE:APP --format json."


def document_of(plan: Any) -> dict[str, Any]:
    """Return a plan as plain JSON values."""
    return {"format": FORMAT, **_plain(plan)}


def read_document(kind: type[P], document: object) -> P:
    """Return the plan that a document describes.

    Raises MalformedDocumentError for one of a later format, and for what is no plan, with the member that is wrong.
    """
    from pydantic import TypeAdapter, ValidationError

    from dagster_adjunct.resources.stored_documents import first_problem

    if not isinstance(document, dict):
        raise _refused(f"it is {type(document).__name__}, and a plan is an object", _MAKE)
    stored_format = document.get("format")
    if isinstance(stored_format, bool) or not isinstance(stored_format, int) or stored_format < 1:
        raise _refused(f"its format is {stored_format!r}, and a plan has a number there", _MAKE)
    if stored_format > FORMAT:
        raise _refused(
            f"it has format {stored_format}, and this version of dagster-adjunct reads formats up to {FORMAT}",
            f"Read it with the version that wrote it, or a later one, or write it again: {_MAKE}",
        )
    try:
        # As text, for only there a tuple may be written as a list while a number may not be written as text.
        return TypeAdapter(kind).validate_json(json.dumps(_with_partitions(document)), strict=True)
    except ValidationError as error:
        raise _refused(first_problem(error), _MAKE) from error
    except (ConfigurationError, TypeError) as error:
        raise _refused(str(error), _MAKE) from error


def _with_partitions(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the partitions of its tasks, which are written `system.stream.3`, member by member."""
    tasks = document.get("tasks")
    if not isinstance(tasks, list):
        return document
    return {**document, "tasks": [_task(task) for task in tasks]}


def _task(task: Any) -> Any:
    if not isinstance(task, dict) or not isinstance(task.get("ssps"), list):
        return task
    parsed = [SystemStreamPartition.parse(ssp) for ssp in task["ssps"]]
    return {**task, "ssps": [{f.name: getattr(ssp, f.name) for f in fields(ssp)} for ssp in parsed]}


def _plain(value: Any) -> Any:
    if isinstance(value, SystemStreamPartition):
        return str(value)
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _refused(what: str, next_step: str) -> MalformedDocumentError:
    return MalformedDocumentError(f"the document of a plan can't be read: {what}.", next_step, document="plan")
