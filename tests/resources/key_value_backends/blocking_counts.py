"""Blocking tables of counts, over any backend, and what is done with them in several processes
and threads.
"""

from __future__ import annotations

import os

from dagster_adjunct.key_value import (
    BlockingKeyValueTable,
    IntegerSerializer,
    KeyValueTable,
    KeyValueTableConfiguration,
    TextSerializer,
)
from dagster_adjunct.resources.errors import ConditionsNotMetError
from dagster_adjunct.resources.key_value.segment import SegmentBackend, TableId

Counts = BlockingKeyValueTable[str, int]


def counts_in(backend: SegmentBackend, table: TableId) -> Counts:
    declared = KeyValueTableConfiguration(1)
    return BlockingKeyValueTable(
        KeyValueTable(table, declared, backend, TextSerializer(), IntegerSerializer())
    )


def count_up(counts: Counts, key: str) -> None:
    """Add one, as often as others come between."""
    while True:
        entry = counts.get(key)
        assert entry is not None
        try:
            counts.replace(key, entry.value + 1, entry.version)
        except ConditionsNotMetError:
            continue
        return


def count_up_in_a_child(counts: Counts, key: str) -> None:
    """Add one in a process that is forked from this one, with the table as it is."""
    process = os.fork()
    if process == 0:
        done = 1
        try:
            count_up(counts, key)
            counts.close()
            done = 0
        finally:
            os._exit(done)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
