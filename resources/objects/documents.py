"""The JSON documents of a commit: how pointers and manifests are written, and read with suspicion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AwareDatetime, Field, ValidationError

from dagster_adjunct.resources.errors import ConfigurationError, MalformedDocumentError
from dagster_adjunct.resources.stored_documents import StoredDocument, first_problem

FORMAT: Final = 1
Text = Annotated[str, Field(min_length=1)]


class Document(StoredDocument):
    """A document of a format that is stored with it: `format` changes whenever the fields do."""

    format: Literal[1] = 1


class Pointer(Document):
    """`CURRENT`: which commit is current. `nonce` keeps two pointers from ever having equal bytes."""

    kind: Text
    number: int = Field(ge=1)
    commit: Text
    manifest: Text
    nonce: Text


class Manifest(Document):
    """One commit: who, when, after which commit (`parent` is its id), and the body, which `kind` defines."""

    kind: Text
    number: int = Field(ge=1)
    commit: Text
    parent: Text | None
    created_at: AwareDatetime
    by: Text
    body: dict[str, Any]


class LakeDocument(Document):
    """`_adjunct/lake.json`: that this is a lake, and when its store passed the probe."""

    kind: Literal["lake"] = "lake"
    id: Text
    probed_at: AwareDatetime


D = TypeVar("D", bound=StoredDocument)


def encode(document: Document) -> bytes:
    """Return the document's bytes. A body that JSON can't hold exactly is a `ConfigurationError`."""
    fields = {name: v.isoformat() if isinstance(v, datetime) else v for name, v in document}
    try:
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"a {type(document).__name__.lower()} can't be written as JSON: {error}.",
            "Use strings, numbers, booleans, None, lists and dictionaries only.",
            argument="body",
        ) from error
    return text.encode()


def decode(cls: type[D], data: bytes, where: str, next_step: str) -> D:
    """Return the document in `data`, or raise `MalformedDocumentError` saying what is wrong `where`."""
    try:
        return cls.model_validate_json(data)
    except ValidationError as error:
        format_found = _format_of(data)
        if isinstance(format_found, int) and format_found > FORMAT:
            raise _of_newer_release(where, format_found) from None
        raise MalformedDocumentError(
            f"{where} is no {cls.__name__.lower()} of format {FORMAT}: {first_problem(error)} "
            f"({len(data)} bytes found).",
            next_step,
            document=where,
        ) from None


def decode_body(cls: type[D], body: object, where: str, problem: str, next_step: str) -> D:
    """Return the document that a commit holds as `body`, or raise `MalformedDocumentError`: it `problem`, and why."""
    stored_format = body.get("format") if isinstance(body, Mapping) else None
    if isinstance(stored_format, int) and stored_format > FORMAT:
        raise _of_newer_release(where, stored_format)
    try:
        return cls.model_validate(body)
    except ValidationError as error:
        raise MalformedDocumentError(
            f"{where} {problem}: {first_problem(error)}.", next_step, document=where
        ) from error


def _of_newer_release(where: str, stored_format: int) -> MalformedDocumentError:
    return MalformedDocumentError(
        f"{where} has format {stored_format}; this release of Adjunct reads format {FORMAT}.",
        "Upgrade dagster-adjunct: a newer version wrote this.",
        document=where,
    )


def _format_of(data: bytes) -> object:
    try:
        return json.loads(data)["format"]
    except (ValueError, TypeError, KeyError):
        return None
