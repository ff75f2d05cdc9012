"""Any history of requests leaves on every backend what a dictionary with versions has, and is
answered as that is.
"""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ANYTHING,
    ConditionsFailed,
    KeyRange,
    StoredEntry,
    family_prefix,
    family_range,
)
from tests.resources.key_value_backends.segment_handle import (
    NOWHERE,
    Handle,
    Request,
    guard,
    insert,
    of,
    put,
    remove,
    replace,
)
from tests.resources.key_value_backends.segment_stores import QUICK_STORES

pytestmark = pytest.mark.parametrize("segment_store", QUICK_STORES, indirect=True)
KEYS = [b"", b"\0", b"a", b"a\0", b"a\xff", b"b", b"\xff", b"\xff\xff"]
KINDS = {
    "insert": lambda key, value, current, old: insert(key, value),
    "put": lambda key, value, current, old: put(key, value),
    "replace": lambda key, value, current, old: replace(key, current, value),
    "replace old": lambda key, value, current, old: replace(key, old, value),
    "remove": lambda key, value, current, old: remove(key),
    "remove current": lambda key, value, current, old: remove(key, current),
    "guard absent": lambda key, value, current, old: guard(key),
    "guard current": lambda key, value, current, old: guard(key, current),
    "guard old": lambda key, value, current, old: guard(key, old),
    "remove old": lambda key, value, current, old: remove(key, old),
}
_families = count()

keys = st.sampled_from(KEYS)
changes = st.lists(
    st.tuples(keys, st.sampled_from(sorted(KINDS)), st.binary(max_size=3)),
    min_size=1,
    max_size=5,
    unique_by=lambda c: c[0],
)


class SegmentMachine(RuleBasedStateMachine):
    """A family of one segment and the dictionary that it should equal."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self.handle = handle
        self.family = f"family {next(_families)}"
        self.expected: dict[bytes, tuple[bytes, bytes]] = {}
        self.applied: list[Request] = []
        self.old = [NOWHERE]

    @initialize()
    def neighbours(self) -> None:
        """What lies beside it is not touched."""
        self.nearby = [
            of(b"", self.family[:-1] + "0" * 9),
            of(b"\xff", self.family + "\0"),
            of(b"a", None),
        ]
        self.handle.write(*map(put, self.nearby))

    def key(self, key: bytes) -> bytes:
        return of(key, self.family)

    def request(self, chosen: list[tuple[bytes, str, bytes]]) -> Request:
        made = []
        for short, kind, value in chosen:
            key, old = self.key(short), self.old[-1]
            current = self.expected[key][0] if key in self.expected else old
            made.append(KINDS[kind](key, value, current, old))
        return Request.of(made)

    @rule(chosen=changes, repeated=st.booleans())
    def apply(self, chosen, repeated) -> None:
        """`repeated` is no difference for what was never applied."""
        request = self.request(chosen)
        failing = {}
        for place, change in enumerate(request.changes):
            version = self.expected.get(change.key, (None,))[0]
            if change.expected is not ANYTHING and version != (
                None if change.expected is ABSENT else change.expected
            ):
                failing[place] = version
        if failing:
            with pytest.raises(ConditionsFailed) as raised:
                self.handle.send(request, repeated=repeated)
            assert raised.value.found == failing
            return
        self.handle.send(request, repeated=repeated)
        self.applied.append(request)
        for change in request.changes:
            if change.is_guard:
                continue
            if change.key in self.expected:
                self.old.append(self.expected.pop(change.key)[0])
            if change.value is not None:
                self.expected[change.key] = (change.version, change.value)

    @rule(data=st.data())
    def repeat(self, data) -> None:
        """A request that was applied changes nothing, whatever came after it."""
        if self.applied:
            self.handle.send(data.draw(st.sampled_from(self.applied)), repeated=True)

    @rule(asked=st.lists(keys, max_size=10), values=st.booleans())
    def get(self, asked, values) -> None:
        entries = self.handle.get(*map(self.key, asked), values=values)
        assert entries == [self.stored(self.key(key), values) for key in asked]

    @rule(
        ends=st.lists(keys, min_size=2, max_size=2), limit=st.integers(1, 9), values=st.booleans()
    )
    def iterate(self, ends, limit, values) -> None:
        within = KeyRange(*map(self.key, sorted(ends)))
        pages = self.handle.pages(within, limit, values=values)
        inside = sorted(key for key in self.expected if within.start <= key < within.end)
        assert [entry for page in pages for entry in page] == [
            self.stored(key, values) for key in inside
        ]
        assert all(len(page) <= limit for page in pages)

    def stored(self, key: bytes, values: bool) -> StoredEntry | None:
        if key not in self.expected:
            return None
        version, value = self.expected[key]
        return StoredEntry(key, version, value if values else None)

    def teardown(self) -> None:
        entries = self.handle.entries(family_range(family_prefix(self.family)))
        assert entries == [self.stored(key, True) for key in sorted(self.expected)]
        assert None not in self.handle.get(*self.nearby)


@pytest.mark.lengthy
@pytest.mark.parametrize("often", [1, pytest.param(20, marks=pytest.mark.long)])
def test_any_history_leaves_what_a_dictionary_has(handle, backend, often):
    examples = 5 if backend.waits else 30
    run_state_machine_as_test(
        lambda: SegmentMachine(handle),
        settings=settings(
            max_examples=examples * often,
            stateful_step_count=20,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
