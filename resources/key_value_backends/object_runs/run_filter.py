"""A Bloom filter: tells of most keys that a run does not hold them, so that they are not looked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mmh3

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_BITS_A_KEY = 10  # with seven probes: one key in a hundred is looked for in vain
_PROBES = 7
_SEED = 1  # not that of the partitions, which leaves only some hashes to each segment
_WORD = (1 << 64) - 1

Hashed = tuple[int, int]


def hashed(key: bytes) -> Hashed:
    """Return what `may_hold` asks for: it is the same for every filter."""
    first, second = mmh3.hash64(key, _SEED, True, signed=False)
    return first, second


def hashes_of(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Return the two hashes of each key, which `build_filter` takes."""
    import numpy as np

    return np.array([hashed(key) for key in keys], dtype=np.uint64).reshape(len(keys), 2)


def build_filter(hashes: Sequence[npt.NDArray[np.uint64]]) -> bytes:
    """Return the filter of all keys that these are the hashes of, at least one byte."""
    import numpy as np

    size = max(8, (sum(map(len, hashes)) * _BITS_A_KEY + 7) // 8 * 8)
    marks = np.zeros(size, dtype=bool)
    for part in hashes:
        for probe in range(_PROBES):
            marks[(part[:, 0] + np.uint64(probe) * part[:, 1]) % np.uint64(size)] = True
    return np.packbits(marks, bitorder="little").tobytes()


def may_hold(stored: bytes, key: Hashed) -> bool:
    """Whether the key may be one that the filter was built of; where it was, this is True."""
    size = 8 * len(stored)
    first, second = key
    for probe in range(_PROBES):
        bit = ((first + probe * second) & _WORD) % size
        if not stored[bit >> 3] >> (bit & 7) & 1:
            return False
    return True
