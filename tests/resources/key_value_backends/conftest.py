"""A store of each backend, a table in it, and its first segment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dagster_adjunct.resources.key_value.segment import SegmentBackend, TableId
from tests.resources.key_value_backends.segment_handle import Handle, Run
from tests.resources.key_value_backends.segment_stores import (
    SEGMENT_STORES,
    SegmentStore,
    new_table_id,
)


@pytest.fixture(scope="module", params=SEGMENT_STORES)
def segment_store(request, tmp_path_factory) -> SegmentStore:
    """A store of one backend."""
    return request.param(request, tmp_path_factory.mktemp("segments"))


@pytest.fixture(scope="module")
def run(segment_store) -> Iterator[Run]:
    """Runs coroutines of segments, in one event loop or in none."""
    with segment_store.running() as run:
        yield run


@pytest.fixture(scope="module")
def backend(segment_store) -> SegmentBackend:
    return segment_store.backend()


@pytest.fixture
def table(backend) -> Iterator[TableId]:
    """A table of one partition, so that every key is in it."""
    table = new_table_id()
    backend.create(table, 1)
    yield table
    backend.delete(table, 1)


@pytest.fixture
def handle(backend, table, run) -> Iterator[Handle]:
    segment = backend.open(table, 0)
    yield Handle(segment, run)
    run(segment.close())
