"""The page on key-value tables: its table of limits is that of the backends, and its bytes are
those of the package.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from dagster_adjunct.key_value import (
    DynamoDbSegments,
    KeyValueTableConfiguration,
    ObjectSegments,
    PostgresSegments,
    SqliteSegments,
)
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.segment import (
    SegmentBackend,
    family_prefix,
    partition_of,
    table_key,
)
from tests.doc_blocks import ROOT

PAGE = (ROOT / "docs" / "key-value-tables.md").read_text(encoding="utf-8")
BACKENDS: dict[str, Any] = {
    "SQLite": lambda: SqliteSegments("unused.sqlite"),
    "PostgreSQL": PostgresSegments,
    "DynamoDB": DynamoDbSegments,
    "objects": ObjectSegments,
}
GOLDEN = re.compile(
    r"^(?P<family>.{5}) (?P<key>.{3}) (?P<stored>[0-9a-f ]{20}) (?P<hash>[0-9a-f]{13})"
    r" (?P<of_16>\d+)$"
)


def rows_of(section: str) -> list[list[str]]:
    lines = PAGE.split(f"## {section}\n")[1].split("\n## ")[0].splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]


def expected(backend: SegmentBackend) -> dict[str, int | None]:
    limits = backend.limits
    return {
        "family and key together, bytes": limits.table_key - 2,
        "family, bytes of UTF-8": (limits.family_prefix or limits.table_key) - 2,
        "key, bytes": limits.key or limits.table_key - 2,
        "value, bytes": limits.value,
        "changes in a batch": limits.changes,
        "keys and values of a batch, bytes": limits.request,
        "a lost reply is looked for, seconds": round(backend.horizon),
        "partitions": 65_536,
    }


@pytest.mark.parametrize("name", BACKENDS)
def test_the_page_reports_the_limits_of_each_backend(name: str) -> None:
    (_, *names), _, *rows = rows_of("Limits")
    place = names.index(name) + 1
    reported = {
        row[0]: None if row[place] == "any" else int(row[place].replace(",", "")) for row in rows
    }
    assert reported == expected(BACKENDS[name]())


def test_the_page_reports_the_most_partitions() -> None:
    KeyValueTableConfiguration(65_536)
    with pytest.raises(ConfigurationError):
        KeyValueTableConfiguration(65_537)


def test_the_bytes_that_the_page_shows_are_those_that_are_stored() -> None:
    lines = [match for line in PAGE.splitlines() if (match := GOLDEN.match(line))]
    assert len(lines) == 6
    for displayed in lines:
        family, key = displayed["family"].strip(), displayed["key"].strip().encode()
        prefix = b"" if family == "None" else family_prefix(family)
        stored = table_key(prefix, key)
        assert stored == bytes.fromhex(displayed["stored"])
        assert partition_of(prefix or stored, 16) == int(displayed["of_16"])
        assert partition_of(prefix or stored, 2**52) == int(displayed["hash"], 16)
