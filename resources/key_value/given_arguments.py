"""What callers of a table give, checked without a look at every element's type: requests come too often for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from dagster_adjunct.resources.checked_numbers import check_whole_number
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.avro_serializer import AvroSerializer
from dagster_adjunct.resources.key_value.json_serializers import JsonSerializer, ModelSerializer
from dagster_adjunct.resources.key_value.serializers import IntegerSerializer, Serializer
from dagster_adjunct.resources.key_value.table_segment import TableId
from dagster_adjunct.resources.key_value_errors import KeyValueTableError

T = TypeVar("T")


def listed(table: TableId, name: str, given: Iterable[T]) -> list[T]:
    """Return several values as a list. A text is one value, and refused."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ConfigurationError(
            f"key-value table {table}: {name} is {given!r:.80}: expected several.", "Give a list.", argument=name
        )
    return list(given)


def pairs(table: TableId, name: str, given: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return pairs of key and value as a list."""
    given_pairs = listed(table, name, given)
    for pair in given_pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigurationError(
                f"key-value table {table}: {pair!r:.80} is among {name}: expected pairs of key and value.",
                "Give tuples of two; a dictionary has them as its items().",
                argument=name,
            )
    return given_pairs


def check_family(table: TableId, family: str | None) -> None:
    """Raise KeyValueTableError where something that is within one family has none."""
    if family is None:
        raise KeyValueTableError(
            f"key-value table {table}: family is None: batches and iterators are within one family.",
            "Give its name; keys without a family are written one by one, and iterated with the whole table.",
            scope=table.scope,
            table=table.name,
        )


def prefix_bytes(table: TableId, prefix: str | bytes | None, keys: Serializer[Any]) -> bytes:
    """Return what the bytes of keys are to begin with; a text stands for its UTF-8, where keys are such."""
    if prefix is None or isinstance(prefix, bytes):
        return prefix or b""
    try:
        stored = prefix.encode()
    except (AttributeError, UnicodeEncodeError):
        raise ConfigurationError(
            f"key-value table {table}: prefix is {prefix!r:.80}: expected bytes, or a text that UTF-8 can hold.",
            "Give what the serialised keys begin with.",
            argument="prefix",
        ) from None
    if prefix and isinstance(keys, JsonSerializer | ModelSerializer | AvroSerializer | IntegerSerializer):
        raise ConfigurationError(
            f"key-value table {table}: prefix is the text {prefix!r:.60}, which no key need begin with where "
            f"{type(keys).__name__} writes them: expected bytes.",
            "Give what the serialised keys begin with; a text in JSON begins with a quotation mark.",
            argument="prefix",
        )
    return stored


def chosen_partitions(table: TableId, count: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the partitions to iterate over: those given, else all."""
    if given is None:
        return tuple(range(count))
    chosen = tuple(listed(table, "partitions", given))
    if not all(type(number) is int and 0 <= number < count for number in chosen) or len({*chosen}) < len(chosen):
        raise ConfigurationError(
            f"key-value table {table} has no such partitions: {list(chosen)!r:.80}.",
            f"Give different numbers from 0 to {count - 1}.",
            argument="partitions",
        )
    return chosen


def checked_page_size(page_size: int) -> int:
    """Return the most items that a page is to have."""
    check_whole_number(page_size, f"page_size={page_size!r}", "a whole number from 1 on", argument="page_size")
    return page_size
