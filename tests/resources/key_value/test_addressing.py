"""Table keys, byte by byte, and where they lie. The hash is compared with its definition,
written down again here.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_adjunct.errors import KeyTooLongError, SerializationError
from dagster_adjunct.resources.key_value.entries import EntryCoder
from dagster_adjunct.resources.key_value.segment import (
    KeyRange,
    KeyValueTableConfiguration,
    SegmentLimits,
    TableId,
    family_prefix,
    family_range,
    family_subrange,
    partition_of,
    split_table_key,
    table_key,
)
from dagster_adjunct.resources.key_value.serializers import BytesSerializer

_TABLE, _PLAIN = TableId("scope", "table", "0" * 16), BytesSerializer()
CODER = EntryCoder(_TABLE, KeyValueTableConfiguration(1), SegmentLimits(), _PLAIN, _PLAIN)
_MASK = 2**64 - 1
_FAMILIES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
_KEYS = st.binary(max_size=6)


def partition(family: str | None, key: bytes, partitions: int) -> int:
    """Where a table of so many partitions keeps a key."""
    coder = EntryCoder(
        _TABLE, KeyValueTableConfiguration(partitions), SegmentLimits(), _PLAIN, _PLAIN
    )
    prefix = coder.prefix(family)
    return coder.partition(prefix, coder.table_key(prefix, key))


def murmur(data: bytes) -> int:
    """The first word of MurmurHash3 x64 128 with seed 0, as its author published it."""
    c1, c2, h1, h2 = 0x87C37B91114253D5, 0x4CF5AD432745937F, 0, 0

    def rotated(x: int, by: int) -> int:
        return (x << by | x >> (64 - by)) & _MASK

    def mixed(x: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ x >> 33) * factor & _MASK
        return x ^ x >> 33

    def first(word: int) -> int:
        return rotated(word * c1 & _MASK, 31) * c2 & _MASK

    def second(word: int) -> int:
        return rotated(word * c2 & _MASK, 33) * c1 & _MASK

    whole = len(data) - len(data) % 16
    for at in range(0, whole, 16):
        h1 ^= first(int.from_bytes(data[at : at + 8], "little"))
        h1 = ((rotated(h1, 27) + h2) * 5 + 0x52DCE729) & _MASK
        h2 ^= second(int.from_bytes(data[at + 8 : at + 16], "little"))
        h2 = ((rotated(h2, 31) + h1) * 5 + 0x38495AB5) & _MASK
    tail = data[whole:]
    h2 ^= second(int.from_bytes(tail[8:], "little"))
    h1 ^= first(int.from_bytes(tail[:8], "little"))
    h1, h2 = h1 ^ len(data), h2 ^ len(data)
    h1 = (h1 + h2) & _MASK
    h2 = (h2 + h1) & _MASK
    return (mixed(h1) + mixed(h2)) & _MASK


def test_the_hash_written_down_here_gives_the_published_value() -> None:
    assert murmur(b"hello") == 0xCBD8A7B341BD9B02


@pytest.mark.parametrize(
    ("family", "key", "stored"),
    [
        ("a", b"k", b"\x00\x01ak"),
        ("a", b"", b"\x00\x01a"),
        ("ab", b"c", b"\x00\x02abc"),
        ("a", b"bc", b"\x00\x01abc"),
        ("\x00", b"\x00\x00", b"\x00\x01\x00\x00\x00"),
        ("é", b"k", b"\x00\x02\xc3\xa9k"),
        ("😀", b"", b"\x00\x04\xf0\x9f\x98\x80"),
        ("f" * 300, b"", b"\x01\x2c" + b"f" * 300),
        ("f" * 8190, b"", b"\x1f\xfe" + b"f" * 8190),
        ("é" * 4095, b"", b"\x1f\xfe" + b"\xc3\xa9" * 4095),
        ("f", b"k" * 8189, b"\x00\x01f" + b"k" * 8189),
        (None, b"", b"\x00\x00"),
        (None, b"k", b"\xff\xffk"),
        (None, b"\x00", b"\xff\xff\x00"),
        (None, b"k" * 300, b"\xfe\xd4" + b"k" * 300),
        (None, b"k" * 8190, b"\xe0\x02" + b"k" * 8190),
    ],
)
def test_a_table_key_has_these_bytes(family: str | None, key: bytes, stored: bytes) -> None:
    prefix = b"" if family is None else family_prefix(family)
    assert table_key(prefix, key) == stored
    assert split_table_key(stored) == (family, key)
    assert stored.startswith(prefix)


@pytest.mark.parametrize(
    ("family", "key"),
    [("f" * 8190, b"k"), ("é" * 4095, b"k"), ("f", b"k" * 8190), (None, b"k" * 8191)],
)
def test_a_byte_more_than_fits_is_refused(family: str | None, key: bytes) -> None:
    with pytest.raises(KeyTooLongError) as reported:
        CODER.table_key(CODER.prefix(family), key)
    assert reported.value.size is not None
    assert reported.value.size == 8191


@pytest.mark.parametrize("family", ["f" * 8191, "é" * 4096, "😀" * 2048])
def test_a_family_is_measured_in_bytes(family: str) -> None:
    with pytest.raises(KeyTooLongError):
        CODER.prefix(family)


@pytest.mark.parametrize("family", ["", "\ud800", "a\udfffb"])
def test_a_family_that_is_empty_or_no_text_is_refused(family: str) -> None:
    with pytest.raises(SerializationError):
        CODER.prefix(family)


@given(st.none() | _FAMILIES, _KEYS, st.none() | _FAMILIES, _KEYS)
def test_no_two_keys_share_a_table_key(
    family: str | None, key: bytes, other: str | None, other_key: bytes
) -> None:
    stored = table_key(b"" if family is None else family_prefix(family), key)
    also = table_key(b"" if other is None else family_prefix(other), other_key)
    assert (stored == also) == ((family, key) == (other, other_key))
    assert split_table_key(stored) == (family, key)


@given(_FAMILIES, _KEYS, _KEYS)
def test_within_a_family_the_order_is_that_of_the_keys(
    family: str, key: bytes, other: bytes
) -> None:
    prefix = family_prefix(family)
    assert (table_key(prefix, key) < table_key(prefix, other)) == (key < other)


@given(_FAMILIES, st.none() | _FAMILIES, _KEYS)
def test_the_range_of_a_family_has_its_keys_and_no_others(
    family: str, other: str | None, key: bytes
) -> None:
    stored = table_key(b"" if other is None else family_prefix(other), key)
    assert _has(family_range(family_prefix(family)), stored) == (other == family)


@given(_FAMILIES, _KEYS, st.none() | _KEYS, st.none() | _KEYS, _KEYS)
def test_a_part_of_a_family_has_what_begins_so_and_lies_between(
    family: str, beginning: bytes, start: bytes | None, end: bytes | None, key: bytes
) -> None:
    prefix = family_prefix(family)
    part = family_subrange(prefix, beginning, start, end)
    inside = (
        key.startswith(beginning) and (start is None or start <= key) and (end is None or key < end)
    )
    assert _has(part, table_key(prefix, key)) == inside
    assert not (part.is_empty and inside)


@given(_FAMILIES, _KEYS, _KEYS)
def test_what_is_left_behind_a_key_begins_with_the_next_one(
    family: str, key: bytes, other: bytes
) -> None:
    prefix = family_prefix(family)
    left = family_range(prefix).after(table_key(prefix, key))
    assert _has(left, table_key(prefix, other)) == (other > key)


@given(st.binary(max_size=40), st.integers(1, 1000))
def test_the_partition_is_that_of_the_hashes_high_bits(hashed: bytes, partitions: int) -> None:
    assert partition_of(hashed, partitions) == (murmur(hashed) >> 12) * partitions // 2**52


@pytest.mark.parametrize(
    ("family", "key", "of_16", "of_1000"),
    [("orders", b"k", 1, 98), ("é", b"", 6, 433), (None, b"", 3, 188), (None, b"order-1", 5, 333)],
)
def test_these_lie_where_they_always_have(
    family: str | None, key: bytes, of_16: int, of_1000: int
) -> None:
    assert (partition(family, key, 16), partition(family, key, 1000)) == (of_16, of_1000)


@pytest.mark.lengthy
@pytest.mark.parametrize("name", ["order-{:07d}", "{}"])
def test_a_million_keys_are_spread_evenly(name: str) -> None:
    counts = Counter(
        partition_of(table_key(b"", name.format(n).encode()), 16) for n in range(1_000_000)
    )
    assert len(counts) == 16
    assert max(abs(count - 62_500) for count in counts.values()) < 0.03 * 62_500


def test_a_family_is_in_one_partition() -> None:
    assert len({partition("orders", str(n).encode(), 16) for n in range(10_000)}) == 1
    assert {partition(None, str(n).encode(), 16) for n in range(10_000)} == set(range(16))


def _has(part: KeyRange, key: bytes) -> bool:
    return part.start <= key and (part.end is None or key < part.end)
