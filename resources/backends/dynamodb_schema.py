"""A DynamoDB table made on demand, or checked against its declaration."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.dynamodb_connection import code_of
from dagster_adjunct.resources.backends.dynamodb_expressions import EXPIRES
from dagster_adjunct.resources.errors import SchemaMismatchError, TableNotFoundError, TableUnavailableError

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

READY_SECONDS = 60.0


def usable_key(
    client: DynamoDBClient,
    label: str,
    table: str,
    key: Mapping[str, str | None],
    *,
    create: bool,
    forgets: bool = False,
    tags: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The key of a table that can be used: its attributes, each with what it is stored as.

    `key` is the declared one; where it says None, the table says it. A table that isn't there is made if `create`, paid
    by request, with these tags; with `forgets` its tombstones have a time to live. One that has another key is refused.
    """
    description = _described(client, table)
    if description is None:
        if not create:
            raise TableNotFoundError(
                f"{label}: there is no such table in {client.meta.region_name}.",
                "Correct its name, the region or the endpoint, or declare it with create=True.",
                table=label,
            )
        made = _create(client, table, key, tags or {})
        description = _active(client, label, table)
        if made and forgets:
            client.update_time_to_live(
                TableName=table, TimeToLiveSpecification={"Enabled": True, "AttributeName": EXPIRES}
            )
    if description["TableStatus"] not in ("ACTIVE", "UPDATING"):
        description = _active(client, label, table)
    return _checked(label, description, key)


def _described(client: DynamoDBClient, table: str) -> Any:
    try:
        return client.describe_table(TableName=table)["Table"]
    except client.exceptions.ResourceNotFoundException:
        return None


def _create(client: DynamoDBClient, table: str, key: Mapping[str, str | None], tags: Mapping[str, str]) -> bool:
    """Begin to make the table; False where another was first."""
    roles = zip(key, ("HASH", "RANGE"), strict=False)
    types: Any = [{"AttributeName": name, "AttributeType": tag} for name, tag in key.items()]
    schema: Any = [{"AttributeName": name, "KeyType": role} for name, role in roles]
    tagged: Any = {"Tags": [{"Key": name, "Value": value} for name, value in tags.items()]} if tags else {}
    try:
        client.create_table(
            TableName=table, AttributeDefinitions=types, KeySchema=schema, BillingMode="PAY_PER_REQUEST", **tagged
        )
    except Exception as error:
        if code_of(error) != "ResourceInUseException":
            raise
        return False
    return True


def _active(client: DynamoDBClient, label: str, table: str) -> Any:
    deadline, pause = time.monotonic() + READY_SECONDS, 0.05
    while True:
        description = _described(client, table)
        if description is not None and description["TableStatus"] in ("ACTIVE", "UPDATING"):
            return description
        if time.monotonic() > deadline:
            state = "missing" if description is None else description["TableStatus"]
            raise TableUnavailableError(
                f"{label} is {state} after {READY_SECONDS:.0f} s; expected ACTIVE.",
                "It is tried again; look at the table in AWS.",
                table=label,
            )
        time.sleep(pause)
        pause = min(2.0, pause * 2)


def _checked(label: str, description: Any, declared: Mapping[str, str | None]) -> dict[str, str]:
    types = {part["AttributeName"]: part["AttributeType"] for part in description["AttributeDefinitions"]}
    parts = sorted(description["KeySchema"], key=lambda part: part["KeyType"] != "HASH")
    stored = {part["AttributeName"]: types[part["AttributeName"]] for part in parts}
    agrees = list(stored) == list(declared) and all(tag in (None, stored[name]) for name, tag in declared.items())
    if not agrees:
        raise SchemaMismatchError(
            f"{label} has the key {_told(stored)}; declared is {_told(declared)} (partition key first, then sort key).",
            "Correct the key and the types of its columns, or use another table.",
            table=label,
        )
    return stored


def _told(key: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} ({tag})" if tag else name for name, tag in key.items())
