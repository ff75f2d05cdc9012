"""A client of schema registries with Confluent's REST interface (Confluent, Karapace, Apicurio's
ccompat).

Confluent's own client requires packages that only OAuth needs, on every executor. The four requests
that are needed use `requests`, which Dagster installs.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlsplit

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    SchemaMismatchError,
    StreamUnavailableError,
)
from dagster_adjunct.resources.schemas.parsed_columns import Unfit
from dagster_adjunct.resources.streams.kafka.client import is_env_reference, resolve_secret
from dagster_adjunct.resources.validation import validated_methods

_HEADER = struct.Struct(">bI")
HEADER_BYTES = _HEADER.size


def encode_schema_id(number: int) -> bytes:
    """Return the five bytes that a message of the schema with this id begins with."""
    return _HEADER.pack(0, number)


def parse_message_indexes(data: bytes, at: int) -> tuple[tuple[int, ...], int]:
    """Return the message indexes that begin at byte `at`, and the position after them.

    They are a count and as many numbers; a count of 0 stands for (0,). Raises Unfit.
    """
    count, at = _zigzag(data, at)
    if count == 0:
        return (0,), at
    if not 0 < count <= len(data):
        raise Unfit("its message indexes can't be read")
    indexes = []
    for _ in range(count):
        index, at = _zigzag(data, at)
        indexes.append(index)
    return tuple(indexes), at


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    """Return the number in Protobuf's encoding (zigzag, at most 32 bits) that begins at byte `at`,
    and the position after it. Raises Unfit.
    """
    value = shift = 0
    while at < len(data) and shift < 35:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7
    raise Unfit("its message indexes can't be read")


def encode_message_indexes(indexes: tuple[int, ...]) -> bytes:
    """Return message indexes in the form in which messages contain them; the inverse of
    `parse_message_indexes`.
    """
    if indexes == (0,):
        return b"\0"
    out = bytearray()
    for number in (len(indexes), *indexes):
        value = number << 1
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)


_PAUSES = (0.2, 0.8)  # seconds before the second and the third try
_TIMEOUT = (5, 15)  # seconds to connect, and to wait for an answer
_TYPE = "application/vnd.schemaregistry.v1+json"
_NOT_FOUND_CODES = (40401, 40402, 40403)  # no such subject, version, schema


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A registered schema: id, kind (AVRO, PROTOBUF, JSON), text, and the texts of schemas that
    it refers to.
    """

    id: int
    kind: str
    text: str
    references: tuple[str, ...] = ()


@validated_methods
@dataclass(frozen=True, slots=True)
class SchemaRegistry:
    """A schema registry, which has the schemas that messages name by id.

    `login` ("user:password") and `token` (a bearer token) are secrets: "env:NAME", read in each
    process. `ca_location` is a file of certificates to trust instead of the system's.
    """

    url: str
    login: str | None = None
    token: str | None = None
    ca_location: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            problem = (
                "the URL of a schema registry is not an http or https URL, or contains a password."
            )
            step = (
                'Write it like "https://registry.example.com:8081", and the password as'
                ' login="env:NAME".'
            )
            raise ConfigurationError(problem, step, argument="url")
        object.__setattr__(self, "url", self.url.rstrip("/"))
        for name in ("login", "token"):
            value = getattr(self, name)
            if value is not None and not is_env_reference(value):
                problem = f"{name} of the schema registry {self.url} is a secret in plain text."
                step = (
                    "Put it into an environment variable of every process, and give its name:"
                    ' "env:NAME".'
                )
                raise ConfigurationError(problem, step, argument=name)

    @lru_cache(maxsize=1024)  # noqa: B019 - registered schemas never change
    def schema(self, number: int) -> RegisteredSchema:
        """Return the schema with this id. A process requests each only once.

        Raises SchemaMismatchError if the registry does not have it, StreamUnavailableError if it
        does not answer, and ConfigurationError if it rejects us.
        """
        step = "Ask the topic's producers which registry is theirs."
        return self._with_references(
            number, self._get(f"/schemas/ids/{number}", f"schema {number}", step)
        )

    def latest(self, subject: str) -> RegisteredSchema:
        """Return the newest schema of a subject. Raises as `schema` does."""
        path = _versions_path(subject, "latest")
        step = "Register its schema, or correct the subject."
        body = self._get(path, f"subject {subject!r}", step)
        return self._with_references(int(body["id"]), body)

    @lru_cache(maxsize=256)  # noqa: B019
    def register(self, subject: str, text: str) -> int:
        """Return the id of this Avro schema under the subject; register it if the subject does not
        have it.

        Raises SchemaMismatchError if the registry rejects it as incompatible with earlier versions.
        """
        path = f"/subjects/{quote(subject, safe='')}"
        request = {"schema": text}
        body = self._request("POST", path, request)  # looks it up
        if body is None:
            body = self._request("POST", f"{path}/versions", request)  # registers it
        if body is None:
            problem = f"schema registry {self.url} does not accept schemas at {path}/versions."
            raise ConfigurationError(problem, "Check the registry's URL.", url=self.url)
        return int(body["id"])

    def _with_references(self, number: int, body: Mapping[str, Any]) -> RegisteredSchema:
        """Return the schema in a registry's answer, with the schemas that it refers to, which are
        requested.
        """
        texts: list[str] = []
        for reference in body.get("references") or ():
            subject = reference["subject"]
            version = reference["version"]
            what = f"version {version} of {subject!r}, to which schema {number} refers"
            found = self._get(
                _versions_path(subject, version), what, "Register that version again."
            )
            below = self._with_references(int(found["id"]), found)
            texts += [text for text in (*below.references, below.text) if text not in texts]
        return RegisteredSchema(
            number, body.get("schemaType") or "AVRO", body["schema"], tuple(texts)
        )

    def _get(self, path: str, what: str, next_step: str) -> Any:
        """Return the registry's JSON at this path. Raises SchemaMismatchError if the registry
        has no `what`.
        """
        body = self._request("GET", path)
        if body is None:
            raise SchemaMismatchError(
                f"schema registry {self.url} has no {what}.", next_step, url=self.url
            )
        return body

    def _request(self, method: str, path: str, body: Mapping[str, str] | None = None) -> Any:
        """Return the JSON of the registry's answer, None for a missing schema or subject.
        Retries transient errors.
        """
        import requests

        what = f"schema registry {self.url}"
        login = resolve_secret(self.login, f"login of {what}")
        token = resolve_secret(self.token, f"token of {what}")
        user, _, password = (login or "").partition(":")
        headers = {"Accept": _TYPE, "Content-Type": _TYPE}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        problem = ""
        for pause in (*_PAUSES, 0):
            try:
                answer = requests.request(
                    method,
                    self.url + path,
                    json=body,
                    headers=headers,
                    auth=(user, password) if login else None,
                    verify=os.fspath(self.ca_location) if self.ca_location else True,
                    timeout=_TIMEOUT,
                )
            except requests.exceptions.SSLError as error:
                problem = f"{what}: its certificate is not trusted ({type(error).__name__})."
                step = "Give its authority's certificate: ca_location."
                raise ConfigurationError(
                    problem, step, url=self.url, argument="ca_location"
                ) from error
            except OSError as error:  # requests' own errors are OSErrors
                problem = type(error).__name__
            else:
                if answer.status_code < 500 and answer.status_code != 429:
                    return self._parse_response(answer, path)
                problem = f"HTTP {answer.status_code}"
            time.sleep(pause)
        problem = f"{what} does not answer ({problem})."
        raise StreamUnavailableError(problem, "Check whether it is up, then retry.", url=self.url)

    def _parse_response(self, answer: Any, path: str) -> Any:
        """Return the JSON of an answer, None for a missing schema or subject. Raises for a
        rejection.
        """
        what = f"schema registry {self.url}"
        status = answer.status_code
        try:
            body = answer.json()
        except ValueError:
            body = None
        if status < 300 and isinstance(body, dict):
            return body
        details = {}
        if isinstance(body, dict):
            details = body
        if status == 404 and details.get("error_code") in _NOT_FOUND_CODES:
            return None
        reason = str(details.get("message", ""))[:300]
        if status in (409, 422):
            step = "Make it compatible with earlier versions, or relax the subject's compatibility."
            raise SchemaMismatchError(
                f"{what} rejects the schema for {path}: {reason or status}.", step, url=self.url
            )
        if status in (401, 403):
            step = "Check the login or token."
        else:
            step = "Check whether its URL is that of a registry."
        raise ConfigurationError(
            f"{what} answers {path} with HTTP {status}. {reason}".rstrip(), step, url=self.url
        )


def _versions_path(subject: str, version: object) -> str:
    """Return the registry's path of a version of a subject."""
    return f"/subjects/{quote(subject, safe='')}/versions/{version}"


def read_schema_id(data: bytes, registry: SchemaRegistry, kind: str, name: str) -> RegisteredSchema:
    """Return the registered schema that a message begins with. Raises Unfit if it is not of this
    kind ("AVRO").
    """
    if len(data) < HEADER_BYTES or data[0] != 0:
        raise Unfit(
            f"not {name} with a schema id: it begins with {data[:HEADER_BYTES].hex() or 'nothing'}"
        )
    number = int(_HEADER.unpack_from(data)[1])
    try:
        registered = registry.schema(number)
    except SchemaMismatchError as error:
        raise Unfit(error.problem.rstrip(".")) from error
    if registered.kind != kind:
        raise Unfit(f"schema {number} of the registry is {registered.kind}, not {name}")
    return registered
