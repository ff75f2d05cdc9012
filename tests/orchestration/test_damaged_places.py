"""Stored places of a restatement that are damaged, and a machine without memory to read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.orchestration.step.recorded_answers import answers_prefix
from dagster_adjunct.orchestration.step.restated_places import read_places
from dagster_adjunct.resources.errors import MalformedDocumentError
from dagster_adjunct.resources.objects.arrow_files import write_sealed_table
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore


@pytest.fixture
def context() -> Any:
    lake = lake_in(InMemoryStore())
    lake.store.put(f"{answers_prefix(lake, 'orders')}places-1", b"no Arrow file")
    return SimpleNamespace(lake=lake, app=SimpleNamespace(name="orders"))


@pytest.mark.parametrize("name", ["places-1", "places-2"])
def test_damaged_and_missing_places_are_named(context: Any, name: str) -> None:
    restating: Any = SimpleNamespace(places=name)
    with pytest.raises(MalformedDocumentError) as caught:
        read_places(context, restating)
    assert str(caught.value.document).endswith(name)


def test_too_little_memory_does_not_damage_places(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_file(source: Any) -> Any:
        raise pa.ArrowMemoryError("malloc failed")

    prefix = answers_prefix(context.lake, "orders")
    context.lake.store.put(f"{prefix}places-1", write_sealed_table(pa.table({"n": [1]})))
    monkeypatch.setattr(pa.ipc, "open_file", open_file)
    restating: Any = SimpleNamespace(places="places-1")
    with pytest.raises(pa.ArrowMemoryError):
        read_places(context, restating)
