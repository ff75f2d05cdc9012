"""Any history of one table, with lost replies and requests that fail, is what a dictionary with
versions says.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_adjunct.errors import ConditionsNotMetError, TableUnavailableError
from dagster_adjunct.key_value import (
    BlockingKeyValueTable,
    Insert,
    KeyVersion,
    Put,
    Remove,
    Replace,
    TableKey,
)
from dagster_adjunct.resources.key_value import segment as repeating
from dagster_adjunct.resources.key_value.segment import ReplyLostError
from tests.resources.key_value.scripted_segments import Lose, ScriptedSegments

_LOST = ReplyLostError("the line is cut.", "")
_FAULTS = (
    None,
    TableUnavailableError("nobody answers.", ""),
    Lose(_LOST),
    Lose(_LOST, after=False),
)
_FAMILIES = st.sampled_from(["f", "g"])
_KEYS = st.sampled_from("abc")
# Which version a condition names: the key's own, one that it had, another key's, or none at all.
_CHANGES = st.lists(
    st.tuples(
        st.sampled_from([Insert, Put, Replace, Remove]),
        _KEYS,
        st.sampled_from(["own", "old", "other"]),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda change: change[1],
)
_STEPS = st.lists(
    st.tuples(_FAMILIES, _CHANGES, st.lists(st.sampled_from(_FAULTS), max_size=3), st.booleans()),
    max_size=12,
)


@pytest.mark.lengthy
@given(_STEPS)
def test_a_table_holds_what_a_dictionary_holds(steps: list[Any]) -> None:
    backend = ScriptedSegments()
    table = BlockingKeyValueTable(backend.table())
    model: dict[tuple[str, str], tuple[str, KeyVersion]] = {}
    seen: dict[tuple[str, str], list[KeyVersion]] = {}
    never = KeyVersion.from_bytes(bytes(16))
    with patch.object(repeating, "_FIRST_PAUSE", 0):
        for number, (family, planned, faults, by_name) in enumerate(steps):
            changes = [
                _change(kind, key, which, seen.get((family, key), []), never, number)
                for kind, key, which in planned
            ]
            now = {change.key: model.get((family, change.key)) for change in changes}
            failing = {
                change.key: None if (entry := now[change.key]) is None else entry[1]
                for change in changes
                if not _holds(change, now[change.key])
            }
            backend.script = list(faults)
            try:
                if by_name and len(changes) == 1:
                    versions = [_called(table, changes[0], family)]
                else:
                    versions = table.apply(changes, family=family)
            except ConditionsNotMetError as error:
                reported = {failure.key: failure.found for failure in error.failures}
            else:
                reported = {}
                for change, version in zip(changes, versions, strict=True):
                    if version is None:
                        model.pop((family, change.key), None)
                    else:
                        assert version not in seen.setdefault((family, change.key), [])
                        seen[family, change.key].append(version)
                        model[family, change.key] = (change.value, version)
            assert reported == failing
            backend.script = []
            asked = [TableKey(f, key) for f in "fg" for key in "abc"]
            entries = table.get_all(asked)
            assert [entry and (entry.value, entry.version) for entry in entries] == [
                model.get((key.family or "", key.key)) for key in asked
            ]
    for family in "fg":
        matched = [
            (entry.key.key, entry.value) for page in table.entries(family) for entry in page.items
        ]
        assert matched == sorted(
            (key, value) for (f, key), (value, _) in model.items() if f == family
        )


def _change(
    kind: Any, key: str, which: str, seen: list[KeyVersion], never: KeyVersion, number: int
) -> Any:
    version = {"own": seen[-1:], "old": seen[:1], "other": []}[which] or [never]
    if kind is Remove:
        return Remove(key, None if which == "other" else version[0])
    return Replace(key, f"{number}", version[0]) if kind is Replace else kind(key, f"{number}")


def _holds(change: Any, now: tuple[str, KeyVersion] | None) -> bool:
    match change:
        case Insert():
            return now is None
        case Replace() | Remove() if change.version is not None:
            return now is not None and now[1] == change.version
    return True


def _called(table: BlockingKeyValueTable[str, str], change: Any, family: str) -> KeyVersion | None:
    match change:
        case Insert(key, value):
            return table.put_if_absent(key, value, family=family)
        case Put(key, value):
            return table.put(key, value, family=family)
        case Replace(key, value, version):
            return table.replace(key, value, version, family=family)
        case _:
            table.remove(change.key, version=change.version, family=family)
            return None
