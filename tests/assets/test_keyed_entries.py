"""Entries in memory are found by key as a dictionary finds them, whatever few or many records."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.reading.keyed_entries import KeyedEntries

KINDS: dict[str, tuple[pa.DataType, Any]] = {
    "string": (pa.string(), lambda n: f"N{n}"),
    "bigint": (pa.int64(), lambda n: n - 20),
    "decimal": (pa.decimal128(10, 2), lambda n: Decimal(n) / 4),
    "timestamp": (
        pa.timestamp("us", tz="UTC"),
        lambda n: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=n),
    ),
    "binary": (pa.binary(), lambda n: bytes([n])),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("records", [0, 1, 5, 60])
def test_entries_are_found_as_a_dictionary_finds_them(name: str, records: int) -> None:
    kind, made = KINDS[name]
    draw = Random(records)
    stored = [made(n) for n in draw.sample(range(100), 50)]
    entries = KeyedEntries.of(pa.table({"k": pa.array(stored, kind)}), ("k",))
    keys = [draw.choice([None, made(draw.randrange(100))]) for _ in range(records)]
    keys += keys[:1]
    places = {key: place for place, key in enumerate(stored)}
    cut = len(keys) // 2
    found = entries.find([pa.chunked_array([keys[:cut], keys[cut:]], kind)])
    assert found.type == pa.int32()
    assert found.to_pylist() == [places.get(key) for key in keys]
