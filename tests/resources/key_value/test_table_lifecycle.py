"""What becomes of a table's entry: the decisions, over plain values."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import Any

import mmh3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    InvalidNameError,
    KeyValueTableError,
    KeyValueTableExistsError,
    KeyValueTableNotFoundError,
    MalformedDocumentError,
)
from dagster_adjunct.resources.key_value.manager import (
    StoredTable,
    TableName,
    TableTransition,
    check_table_name,
    decide_create,
    decide_delete,
    decide_seal,
    decide_update,
    finish_transition,
    hash_range,
    parse_stored_entry,
    require_stored_table,
    table_info,
    was_deleted,
)
from dagster_adjunct.resources.key_value.segment import KeyValueTableConfiguration, partition_of

NAME = TableName("plant", "machines")


def table(state: str = "active", **other: object) -> StoredTable:
    fields = {
        "state": state,
        "incarnation": "0123456789abcdef",
        "partitions": 4,
        "backend": {"backend": "sqlite", "path": "/data/a"},
        "created_at": datetime(2026, 1, 1, tzinfo=UTC),
    }
    return StoredTable.model_validate({**fields, **other})


def create(current: StoredTable | None, **wanted: object) -> TableTransition:
    new = table("creating", incarnation="f" * 16, **wanted)
    return decide_create(current, new, NAME, lambda other: other.backend == new.backend)


def test_what_is_not_there_is_created_and_what_is_there_alike_is_not() -> None:
    assert create(None) == TableTransition(True, table("creating", incarnation="f" * 16))
    for state in ("creating", "active", "sealing", "sealed"):
        assert create(table(state)) == TableTransition(False, table(state))


def test_a_table_that_is_being_deleted_goes_first() -> None:
    assert create(table("deleting", partitions=9)) == TableTransition(
        None, table("deleting", partitions=9)
    )


@pytest.mark.parametrize(
    ("other", "reported"),
    [
        ({"partitions": 8}, r"partitions 4 \(wanted: 8\)"),
        ({"longest_key": 10}, r"longest_key None \(wanted: 10\)"),
        ({"longest_value": 10}, r"longest_value None \(wanted: 10\)"),
        (
            {"backend": {"backend": "sqlite", "path": "/data/b"}},
            r"path='/data/a' \(wanted: .*path='/data/b'\)",
        ),
    ],
)
def test_another_configuration_is_refused_and_reported(
    other: dict[str, object], reported: str
) -> None:
    with pytest.raises(KeyValueTableExistsError, match=reported) as refused:
        create(table(), **other)
    assert refused.value.facts == {"scope": "plant", "table": "machines"}


def test_limits_are_updated_and_partitions_are_not() -> None:
    assert decide_update(table(), KeyValueTableConfiguration(4), NAME) == TableTransition(
        False, table()
    )
    wider = KeyValueTableConfiguration(4, longest_key=100, longest_value=200)
    updated = decide_update(table("sealing"), wider, NAME)
    assert updated == TableTransition(True, table("sealing", longest_key=100, longest_value=200))
    assert updated.entry is not None
    assert updated.entry.configuration == wider
    with pytest.raises(KeyValueTableError) as caught:
        decide_update(table(), KeyValueTableConfiguration(5), NAME)
    assert (caught.value.scope, caught.value.table) == ("plant", "machines")


def test_who_seals_an_open_table_is_reported_so() -> None:
    assert decide_seal(table("creating"), NAME) == TableTransition(None, table("creating"))
    assert decide_seal(table("active"), NAME) == TableTransition(True, table("sealing"))
    assert decide_seal(table("sealing"), NAME) == TableTransition(False, table("sealing"))
    assert decide_seal(table("sealed"), NAME) == TableTransition(False, table("sealed"))


def test_who_deletes_a_table_is_reported_so() -> None:
    for state in ("creating", "active", "sealing", "sealed"):
        assert decide_delete(table(state)) == TableTransition(True, table("deleting"))
    assert decide_delete(table("deleting")) == TableTransition(False, table("deleting"))
    assert decide_delete(None) == TableTransition(False, None)


@pytest.mark.parametrize("current", [None, table("deleting")])
def test_what_is_not_there_is_neither_updated_nor_sealed(current: StoredTable | None) -> None:
    with pytest.raises(KeyValueTableNotFoundError) as caught:
        decide_update(current, KeyValueTableConfiguration(4), NAME)
    assert (caught.value.scope, caught.value.table) == ("plant", "machines")
    with pytest.raises(KeyValueTableNotFoundError):
        decide_seal(current, NAME)


def test_errors_do_not_suggest_creating_a_table_that_is_being_deleted() -> None:
    """Who creates it ends the deletion, and that may be one that the store refused to whoever
    began it.
    """
    with pytest.raises(KeyValueTableNotFoundError) as refused:
        require_stored_table(table("deleting"), NAME)
    assert "lost" in refused.value.next_step
    with pytest.raises(KeyValueTableNotFoundError) as refused:
        require_stored_table(None, NAME)
    assert "create it" in refused.value.next_step


def test_what_is_done_is_stored_unless_others_went_on() -> None:
    assert finish_transition(table("creating", longest_key=7), table("creating")) == table(
        "active", longest_key=7
    )
    assert finish_transition(table("sealing"), table("sealing")) == table("sealed")
    assert finish_transition(table("deleting"), table("deleting")) is None
    for current in (None, table("sealing"), table("creating", incarnation="a" * 16)):
        assert finish_transition(current, table("creating")) == current
    assert was_deleted(None, table())
    assert was_deleted(table(incarnation="a" * 16), table())
    assert was_deleted(table("deleting"), table())
    assert not was_deleted(table("sealed"), table())


def test_an_entry_is_read_as_it_was_stored_and_what_is_none_is_reported() -> None:
    stored = table("sealed", longest_value=5).model_dump(mode="json")
    assert parse_stored_entry(StoredTable, stored, "it") == table("sealed", longest_value=5)
    with pytest.raises(MalformedDocumentError) as caught:
        parse_stored_entry(StoredTable, {**stored, "format": 2}, "it")
    assert caught.value.document == "the stored entry of it"
    for broken in (
        {**stored, "state": "lost"},
        {**stored, "incarnation": "../x"},
        {**stored, "more": 1},
        [],
        None,
    ):
        with pytest.raises(MalformedDocumentError) as caught:
            parse_stored_entry(StoredTable, broken, "it")
        assert caught.value.document == "the stored entry of it"
    assert "format 2" in str(table_info(NAME, {**stored, "format": 2}).problem)


@pytest.mark.parametrize(
    "wrong",
    [
        {"partitions": 0},
        {"partitions": 65_537},
        {"partitions": True},
        {"partitions": 2.0},
        {"longest_key": -1},
    ],
)
def test_a_configuration_that_no_backend_could_keep_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        KeyValueTableConfiguration(**{"partitions": 1, **wrong})
    assert refused.value.argument == next(iter(wrong))


@pytest.mark.parametrize("good", ["a", "A.b-c_9", "-", ".", "9" * 255])
def test_names_of_letters_digits_and_three_signs_are_allowed(good: str) -> None:
    assert check_table_name("scope", good) == good


@pytest.mark.parametrize(
    "bad", ["", "_a", "a" * 256, "a/b", "a b", "ä", "a\n", "a\0", None, 7, b"a", "٣"]
)
def test_other_names_are_refused(bad: object) -> None:
    with pytest.raises(InvalidNameError) as caught:
        check_table_name("scope", bad)  # type: ignore[arg-type]
    assert caught.value.name is not None


@given(st.binary(min_size=1, max_size=20), st.integers(1, 1000))
def test_the_ranges_of_hashes_are_those_that_keys_are_placed_by(
    prefix: bytes, partitions: int
) -> None:
    number = partition_of(prefix, partitions)
    first, last = hash_range(number, partitions)
    # Of 128 bits as one number, the low 64 are the first word.
    first_word = mmh3.hash128(prefix, 0, True, False) & (2**64 - 1)
    assert first <= first_word >> 12 <= last


@given(st.integers(1, 5000))
def test_ranges_of_hashes_follow_each_other_and_hold_all(partitions: int) -> None:
    ranges = [hash_range(number, partitions) for number in range(partitions)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == 2**52 - 1
    assert all(last + 1 == first for (_, last), (first, _) in itertools.pairwise(ranges))
    sizes = [last - first + 1 for first, last in ranges]
    assert max(sizes) - min(sizes) <= 1
