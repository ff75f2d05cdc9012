"""Functions of Spark SQL over nested Arrow arrays, with Spark's results in ANSI mode.

Each takes and returns arrays; where Spark raises an error, an Arrow function does, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_adjunct.resources.lazy_modules import pa, pc, pt


def field_of(name: str, arrow: pa.DataType) -> Any:
    """Return the function for `value.name` of structs; of arrays of structs, for the arrays of
    these fields. `arrow` is the type of the result.
    """

    def read(values: Any) -> Any:
        if not pt.is_list(values.type):
            return pc.struct_field(values, name)
        first, last = _bounds(values)
        inner = pc.struct_field(values.values.slice(first, last - first), name)
        offsets = pc.subtract(values.offsets, pa.scalar(first, values.offsets.type))
        return pa.ListArray.from_arrays(offsets, inner, type=arrow, mask=pc.is_null(values))

    return read


def value_of(key: str) -> Any:
    """Return the function for the value of this key in maps: null where there is none."""
    return lambda maps: pc.map_lookup(maps, pa.scalar(key, pa.string()), "first")


def element_at(index: int, *, or_null: bool) -> Any:
    """Return the function for the element at an index from 0, or from the end if it is negative.

    An array without that element gives null, or else raises an error.
    """

    def read(arrays: Any) -> Any:
        lengths = size(arrays)
        places = pa.scalar(index, pa.int32())
        if index < 0:
            places = pc.add(lengths, places)
        is_there = pc.and_(pc.less(places, lengths), pc.greater_equal(places, pa.scalar(0)))
        if not or_null and pc.all(is_there, min_count=0).as_py() is False:
            raise pa.ArrowInvalid("an index that is out of bounds")
        found = pc.add(arrays.offsets[:-1], places)
        return arrays.values.take(pc.if_else(is_there, found, pa.scalar(None, found.type)))

    return read


def size(values: Any) -> Any:
    """Return the number of elements of arrays or of entries of maps; null for null."""
    offsets = values.offsets
    lengths = pc.subtract(offsets[1:], offsets[:-1])
    return pc.if_else(pc.is_valid(values), lengths, pa.scalar(None, lengths.type))


def contains(arrays: Any, wanted: Any) -> Any:
    """Return whether arrays contain a value: null if they don't, but contain null."""
    first, last = _bounds(arrays)
    elements = arrays.values.slice(first, last - first)
    lengths = pc.subtract(arrays.offsets[1:], arrays.offsets[:-1])
    rows = pa.array(range(len(arrays)), pa.int64())
    parents = _repeat(rows, lengths)
    sought = wanted
    if not isinstance(wanted, pa.Scalar):
        sought = wanted.take(parents)
    equal = pc.equal(elements, sought)
    found = pc.is_in(rows, value_set=parents.filter(pc.fill_null(equal, False)).unique())
    unsure = pc.is_in(rows, value_set=parents.filter(pc.is_null(equal)).unique())
    unknown = pa.scalar(None, pa.bool_())
    answers = pc.if_else(found, True, pc.if_else(unsure, unknown, False))
    known = pc.is_valid(arrays)
    if isinstance(wanted, pa.Scalar):
        known = pc.and_(known, pa.scalar(wanted.is_valid))
    else:
        known = pc.and_(known, pc.is_valid(wanted))
    return pc.if_else(known, answers, unknown)


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of all arrays: the row of each, its number within the row from 0, and its
    value.
    """

    rows: pa.Array
    numbers: pa.Array
    values: pa.Array


def explode(arrays: Any, arrow: pa.DataType, *, keep_empty: bool) -> Elements:
    """Return the elements of arrays, or the entries of maps, which are of this type.

    With `keep_empty`, a row without elements gets one, null.
    """
    import numpy as np

    lengths = pc.fill_null(size(arrays), 0).to_numpy()
    counts = np.maximum(lengths, 1) if keep_empty else lengths
    rows = np.repeat(np.arange(len(arrays)), counts)
    numbers = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = arrays.offsets.to_numpy()[rows] + numbers
    values = arrays.values
    if pt.is_map(arrays.type):
        values = pa.StructArray.from_arrays([arrays.keys, arrays.items], fields=list(arrow))
    taken = values.take(pa.array(places, pa.int64(), mask=lengths[rows] == 0))
    return Elements(pa.array(rows, pa.int64()), pa.array(numbers, pa.int64()), taken)


def _repeat(rows: Any, counts: Any) -> Any:
    """Return each row as often as counted."""
    import numpy as np

    return pa.array(np.repeat(rows.to_numpy(), counts.to_numpy()), pa.int64())


def _bounds(arrays: Any) -> tuple[int, int]:
    """Return where the elements of arrays begin and end in their values."""
    if not len(arrays):
        return 0, 0
    return arrays.offsets[0].as_py(), arrays.offsets[-1].as_py()
