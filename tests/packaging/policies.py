"""What an IAM policy allows, and which of it the requests of a client need."""

from __future__ import annotations

import fnmatch
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from botocore.client import BaseClient

_OBJECT_ACTIONS = {
    "GetObject": "GetObject",
    "HeadObject": "GetObject",
    "PutObject": "PutObject",
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
    "AbortMultipartUpload": "AbortMultipartUpload",
    "DeleteObject": "DeleteObject",
}
_TRANSACTED = {
    "Put": "PutItem",
    "Delete": "DeleteItem",
    "Update": "UpdateItem",
    "ConditionCheck": "ConditionCheckItem",
}


@dataclass(frozen=True)
class Need:
    """A permission that a request needs; `prefix` is that of a listing."""

    action: str
    resource: str
    prefix: str = ""


def needs_of_s3(operation: str, given: Mapping[str, Any], status: int) -> Iterator[Need]:
    """Yield what a request to S3 needs. An object that is missing is found to be so only by who
    may list it.
    """
    bucket = f"arn:aws:s3:::{given['Bucket']}"
    if operation == "ListObjectsV2":
        yield Need("s3:ListBucket", bucket, given["Prefix"])
    elif operation == "DeleteObjects":
        for item in given["Delete"]["Objects"]:
            yield Need("s3:DeleteObject", f"{bucket}/{item['Key']}")
    else:
        yield Need(f"s3:{_OBJECT_ACTIONS[operation]}", f"{bucket}/{given['Key']}")
        if status == 404:
            yield Need("s3:ListBucket", bucket, given["Key"])


def needs_of_dynamodb(operation: str, given: Mapping[str, Any], where: str) -> Iterator[Need]:
    """Yield what a request to DynamoDB needs; `where` is the ARN of a table without its name."""
    if operation == "TransactWriteItems":
        for action in given["TransactItems"]:
            ((kind, of),) = action.items()
            yield Need(f"dynamodb:{_TRANSACTED[kind]}", where + of["TableName"])
        return
    tables = [given["TableName"]] if "TableName" in given else list(given["RequestItems"])
    for table in tables:
        yield Need(f"dynamodb:{operation}", where + table)
        if given.get("Tags"):
            yield Need("dynamodb:TagResource", where + table)


@dataclass(frozen=True)
class Recorder:
    """Collects the permissions that the clients of this process need, by `role`."""

    needs: dict[str, set[Need]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def recording(
        self, role: str, needs_of: Callable[[str, Mapping[str, Any], int], Iterable[Need]]
    ) -> Iterator[None]:
        """Collect for this role what is sent meanwhile."""
        send: Any = BaseClient._make_api_call  # type: ignore[attr-defined]
        found = self.needs.setdefault(role, set())

        def recorded(client: Any, operation: str, given: Mapping[str, Any]) -> Any:
            status = 200
            try:
                return send(client, operation, given)
            except Exception as error:
                status = (
                    getattr(error, "response", {})
                    .get("ResponseMetadata", {})
                    .get("HTTPStatusCode", 0)
                )
                raise
            finally:
                with self._lock:
                    found.update(needs_of(operation, given, status))

        with mock.patch.object(BaseClient, "_make_api_call", recorded):
            yield


@dataclass(frozen=True)
class Grant:
    """What one statement allows."""

    actions: tuple[str, ...]
    resources: tuple[str, ...]
    prefixes: tuple[str, ...]

    def allows(self, need: Need) -> bool:
        return (
            _matches(need.action, self.actions)
            and _matches(need.resource, self.resources)
            and (not self.prefixes or _matches(need.prefix, self.prefixes))
        )

    def unused(self, needs: Iterable[Need]) -> list[str]:
        """Return the actions, resources and prefixes that none of these needs uses."""
        allowed = [need for need in needs if self.allows(need)]
        used = [
            (pattern, any(_matches(getattr(need, attribute), [pattern]) for need in allowed))
            for attribute, patterns in (
                ("action", self.actions),
                ("resource", self.resources),
                ("prefix", self.prefixes),
            )
            for pattern in patterns
        ]
        return [pattern for pattern, is_used in used if not is_used]


def read_policy(*files: Path) -> list[Grant]:
    """Return what policies allow. Those here have no other effect, and no condition but on the
    prefix of a listing.
    """
    return [
        _grant(statement)
        for file in files
        for statement in json.loads(file.read_text("utf-8"))["Statement"]
    ]


def _grant(statement: Mapping[str, Any]) -> Grant:
    assert statement.keys() <= {"Sid", "Effect", "Action", "Resource", "Condition"}, statement
    assert statement["Effect"] == "Allow", statement
    assert re.fullmatch(r"[A-Za-z0-9]+", statement["Sid"]), statement
    condition = statement.get("Condition", {"StringLike": {"s3:prefix": []}})
    ((operator, keys),) = condition.items()
    ((key, prefixes),) = keys.items()
    assert (operator, key) == ("StringLike", "s3:prefix"), statement
    return Grant(_several(statement["Action"]), _several(statement["Resource"]), _several(prefixes))


def _several(given: str | list[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _matches(text: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns)
