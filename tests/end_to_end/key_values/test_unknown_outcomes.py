"""Writes whose reply is lost: known by what is kept with the data, and beyond the horizon said
to be unknown.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from dagster_adjunct.errors import OutcomeUnknownError
from dagster_adjunct.key_value import BlockingKeyValueTable, Insert, KeyVersion, Put, Remove
from tests.end_to_end.key_values.worlds import SERVERS, World
from tests.servers.tcp_proxy import Trouble

pytestmark = pytest.mark.parametrize("world", SERVERS, indirect=True)
Blocking = BlockingKeyValueTable[str, str]
MARK = "this is the write whose answer nobody gets"
FAMILY = "family"


@dataclass
class Silence:
    """From the request with the mark on, nothing gets through any more; `trouble` is what
    befalls that one.
    """

    trouble: Trouble
    fell: bool = False

    def __call__(self, request: bytes) -> Trouble | None:
        if self.fell:  # the body of an HTTP request comes after its head
            return None if request.startswith(b"{") else "lost-before"
        if MARK.encode() in request or b"TransactWriteItems" in request:
            self.fell = True
            return self.trouble
        return None


def insert(table: Blocking, _: KeyVersion) -> KeyVersion:
    return table.put_if_absent("new", MARK, family=FAMILY)


def replace(table: Blocking, old: KeyVersion) -> KeyVersion:
    return table.replace("old", MARK, old, family=FAMILY)


def batch(table: Blocking, old: KeyVersion) -> KeyVersion:
    versions = table.apply(
        [Remove("old", old), Insert("new", MARK), Put("other", MARK)], family=FAMILY
    )
    assert versions[0] is None
    assert versions[1] is not None
    return versions[1]


WRITES = {"insert": (insert, "new"), "replace": (replace, "old"), "batch": (batch, "new")}


@pytest.mark.parametrize("kind", WRITES)
def test_a_success_is_not_called_a_conflict_even_after_another_writers(world: World, kind: str):
    write, key = WRITES[kind]
    table = world.table(partitions=1)
    direct = world.direct
    assert direct is not None
    silence = Silence("lost-after")
    with (
        BlockingKeyValueTable(table) as lost,
        BlockingKeyValueTable(world.over(direct(), table)) as other,
    ):
        old = lost.put("old", "before", family=FAMILY)
        with ThreadPoolExecutor(1) as pool:
            with world.troubled(silence):
                answer = pool.submit(write, lost, old)
                deadline = time.monotonic() + 120
                while (entry := other.get(key, family=FAMILY)) is None or entry.value != MARK:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                theirs = other.replace(key, "another's", entry.version, family=FAMILY)
                other.remove(key, version=theirs, family=FAMILY)
                last = other.put_if_absent(key, "the last", family=FAMILY)
                assert not answer.done()
            assert answer.result(30) == entry.version
        held = other.get(key, family=FAMILY)
        assert held is not None
        assert (held.value, held.version) == ("the last", last)


@pytest.mark.parametrize("trouble", ["lost-before", "lost-after"])
def test_beyond_the_horizon_the_outcome_is_unknown_whether_it_happened_or_not(
    world: World, trouble: Trouble
):
    write, key = WRITES["batch"]
    table = world.table(partitions=1)
    backend = world.backend()
    backend.horizon = 0.3
    with BlockingKeyValueTable(world.over(backend, table)) as lost:
        old = lost.put("old", "before", family=FAMILY)
        with world.troubled(Silence(trouble)), pytest.raises(OutcomeUnknownError) as error:
            write(lost, old)
        assert (error.value.scope, error.value.table) == (table.id.scope, table.id.name)
        entry = lost.get(key, family=FAMILY)
        assert (entry is not None and entry.value == MARK) is (trouble == "lost-after")
