"""A client of schema registries with Confluent's REST interface (Confluent, Karapace, Apicurio's ccompat).

Confluent's own client requires packages that only OAuth needs, on every executor. The four requests that are needed
use `requests`, which Dagster installs.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlsplit

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError, StreamUnavailableError
from dagster_adjunct.resources.streams.kafka.client import is_env_reference, resolve_secret
from dagster_adjunct.resources.streams.kafka.formats import Unfit

_HEADER = struct.Struct(">bI")
HEADER_BYTES = _HEADER.size


def parse_schema_id(data: bytes) -> int | None:
    """Return the schema id that a message begins with, or None without one."""
    if len(data) < HEADER_BYTES or data[0] != 0:
        return None
    return int(_HEADER.unpack_from(data)[1])


def encode_schema_id(number: int) -> bytes:
    """Return the bytes that a message of this schema begins with."""
    return _HEADER.pack(0, number)


def parse_message_indexes(data: bytes, at: int) -> tuple[tuple[int, ...], int]:
    """Return the message indexes at this position, and the position after them; a single zero means (0,)."""
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
    value = shift = 0
    while at < len(data) and shift < 35:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7
    raise Unfit("its message indexes can't be read")


def encode_message_indexes(indexes: tuple[int, ...]) -> bytes:
    """Return message indexes as bytes of a message."""
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
    """A registered schema: id, kind (AVRO, PROTOBUF, JSON), text, and the texts that it refers to."""

    id: int
    kind: str
    text: str
    references: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SchemaRegistry:
    """A schema registry, which has the schemas that messages name by id.

    `login` ("user:password") and `token` (a bearer token) are secrets: "env:NAME", read in each process.
    `ca_location` is a file of certificates to trust instead of the system's.
    """

    url: str
    login: str | None = None
    token: str | None = None
    ca_location: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ConfigurationError(
                "the URL of a schema registry is not an http or https URL, or contains a password.",
                'Write it like "https://registry.example.com:8081", and the password as login="env:NAME".',
                argument="url",
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))
        for name in ("login", "token"):
            value = getattr(self, name)
            if value is not None and not is_env_reference(value):
                raise ConfigurationError(
                    f"{name} of the schema registry {self.url} is a secret in plain text.",
                    'Put it into an environment variable of every process, and give its name: "env:NAME".',
                    argument=name,
                )

    def schema(self, number: int) -> RegisteredSchema:
        """Return the schema with this id; requested once a process.

        Raises SchemaMismatchError if the registry does not have it, StreamUnavailableError if it does not answer, and
        ConfigurationError if it rejects us.
        """
        return _fetch_schema(self, number)

    def latest(self, subject: str) -> RegisteredSchema:
        """Return the newest schema of a subject. Raises as `schema` does."""
        body = _request(self, "GET", f"/subjects/{quote(subject, safe='')}/versions/latest")
        if body is None:
            raise SchemaMismatchError(
                f"schema registry {self.url} has no subject {subject!r}.",
                "Register its schema, or correct the subject.",
                url=self.url,
            )
        return _schema_from_response(self, int(body["id"]), body)

    def register(self, subject: str, text: str) -> int:
        """Return the id of this Avro schema under the subject; register it if the subject does not have it.

        Raises SchemaMismatchError if the registry rejects it as incompatible with earlier versions.
        """
        return _register_schema(self, subject, text)


@lru_cache(maxsize=1024)
def _fetch_schema(registry: SchemaRegistry, number: int) -> RegisteredSchema:
    body = _request(registry, "GET", f"/schemas/ids/{number}")
    if body is None:
        raise SchemaMismatchError(
            f"schema registry {registry.url} has no schema {number}.",
            "Ask the topic's producers which registry is theirs.",
            url=registry.url,
        )
    return _schema_from_response(registry, number, body)


@lru_cache(maxsize=256)
def _register_schema(registry: SchemaRegistry, subject: str, text: str) -> int:
    path = f"/subjects/{quote(subject, safe='')}"
    request = {"schema": text}
    body = _request(registry, "POST", path, request) or _request(registry, "POST", f"{path}/versions", request)
    if body is None:
        raise ConfigurationError(
            f"schema registry {registry.url} does not accept schemas at {path}/versions.",
            "Check the registry's URL.",
            url=registry.url,
        )
    return int(body["id"])


def _schema_from_response(registry: SchemaRegistry, number: int, body: Mapping[str, Any]) -> RegisteredSchema:
    texts: list[str] = []
    for reference in body.get("references") or ():
        path = f"/subjects/{quote(reference['subject'], safe='')}/versions/{reference['version']}"
        under = _request(registry, "GET", path)
        if under is None:
            raise SchemaMismatchError(
                f"schema {number} of {registry.url} refers to {reference['subject']!r}, version "
                f"{reference['version']}, which does not exist.",
                "Register that version again.",
                url=registry.url,
            )
        below = _schema_from_response(registry, int(under["id"]), under)
        texts += [text for text in (*below.references, below.text) if text not in texts]
    return RegisteredSchema(number, body.get("schemaType") or "AVRO", body["schema"], tuple(texts))


def _request(registry: SchemaRegistry, method: str, path: str, body: Mapping[str, str] | None = None) -> Any:
    """Return the registry's answer, or None if the resource does not exist. Retries transient errors."""
    import requests

    what = f"schema registry {registry.url}"
    login, token = (
        resolve_secret(registry.login, f"login of {what}"),
        resolve_secret(registry.token, f"token of {what}"),
    )
    user, _, password = (login or "").partition(":")
    headers = {"Accept": _TYPE, "Content-Type": _TYPE} | ({"Authorization": f"Bearer {token}"} if token else {})
    trouble = ""
    for pause in (*_PAUSES, None):
        try:
            answer = requests.request(
                method, registry.url + path, json=body, headers=headers, auth=(user, password) if login else None,
                verify=registry.ca_location or True, timeout=_TIMEOUT,
            )  # fmt: skip
        except requests.exceptions.SSLError as error:
            raise ConfigurationError(
                f"{what}: its certificate is not trusted ({type(error).__name__}).",
                "Give its authority's certificate: ca_location.",
                url=registry.url,
                argument="ca_location",
            ) from error
        except OSError as error:  # requests' own errors are OSErrors
            trouble = type(error).__name__
        else:
            if answer.status_code < 500 and answer.status_code != 429:
                return _parse_response(answer, registry, path)
            trouble = f"HTTP {answer.status_code}"
        if pause is not None:
            time.sleep(pause)
    raise StreamUnavailableError(
        f"{what} does not answer ({trouble}).", "Check whether it is up, then retry.", url=registry.url
    )


def _parse_response(answer: Any, registry: SchemaRegistry, path: str) -> Any:
    what = f"schema registry {registry.url}"
    try:
        body = answer.json()
    except ValueError:
        body = None
    if answer.status_code < 300 and isinstance(body, dict):
        return body
    code = body.get("error_code") if isinstance(body, dict) else None
    if answer.status_code == 404 and code in _NOT_FOUND_CODES:
        return None
    reason = str(body.get("message", ""))[:300] if isinstance(body, dict) else ""
    if answer.status_code in (409, 422):
        raise SchemaMismatchError(
            f"{what} rejects the schema for {path}: {reason or answer.status_code}.",
            "Make it compatible with earlier versions, or relax the subject's compatibility.",
            url=registry.url,
        )
    step = (
        "Check the login or token."
        if answer.status_code in (401, 403)
        else "Check whether its URL is that of a registry."
    )
    raise ConfigurationError(
        f"{what} answers {path} with HTTP {answer.status_code}. {reason}".rstrip(), step, url=registry.url
    )
