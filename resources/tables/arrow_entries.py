"""`ArrowEntries`: entries as an Arrow batch, of which Python values are made when somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.tables.changes import Changes
from dagster_adjunct.resources.tables.operation import Mark

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class ArrowEntries:
    """Entries whose columns are Arrow arrays of one length.

    `key` are the key's columns, by name. `records` is a struct array: the records of puts, or what updates set; where
    `typed`, its fields are those of `Changes`, each a struct (but `remove`, which updates of a batch have in common).
    `to_python` makes a list of Python values of an array, of a struct dictionaries.
    """

    key: pa.StructArray
    records: pa.StructArray | None
    to_python: Callable[[Any], list[Any]]
    default_records: pa.StructArray | None = None
    sources: pa.Array | None = None
    positions: pa.Array | None = None
    times: pa.Array | None = None
    typed: bool = False
    remove: Sequence[str] = ()
    _made: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def key_names(self) -> tuple[str, ...]:
        """The names of the key's columns, in the order of keys that are tuples."""
        return tuple(self.key.type.field(place).name for place in range(self.key.type.num_fields))

    @property
    def keys(self) -> Sequence[Any]:
        keys: list[Any] = self._once("keys", self._keys)
        return keys

    def _keys(self) -> list[Any]:
        columns = [self.to_python(column) for column in self.key.flatten()]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    @property
    def values(self) -> Sequence[Any] | None:
        values = self._python("values", self.records)
        if values is None or not self.typed:
            return values
        changes: list[Changes] = self._once("changes", lambda: [Changes(**row, remove=self.remove) for row in values])
        return changes

    @property
    def defaults(self) -> Sequence[Any] | None:
        return self._python("defaults", self.default_records)

    @property
    def newest(self) -> Sequence[Any] | None:
        return self._python("newest", self.times)

    @property
    def marks(self) -> Sequence[Mark] | None:
        if self.sources is None or self.positions is None:
            return None
        marks: list[Mark] = self._once("marks", self._marks)
        return marks

    def _marks(self) -> list[Mark]:
        assert self.sources is not None
        assert self.positions is not None
        return list(map(Mark, self.sources.to_pylist(), self.positions.to_pylist()))

    def __len__(self) -> int:
        return len(self.key)

    def take(self, indices: Sequence[int]) -> ArrowEntries:
        return self._with(lambda array: array.take(indices))

    def part(self, start: int, end: int) -> ArrowEntries:
        return self if start == 0 and end >= len(self) else self._with(lambda array: array.slice(start, end - start))

    def without_defaults(self) -> ArrowEntries:
        return self if self.default_records is None else replace(self, default_records=None, _made={})

    def null_key(self) -> int | None:
        return _first_null(self.key, *self.key.flatten())

    def null_value(self) -> int | None:
        return None if self.records is None else _first_null(self.records)

    @property
    def nbytes(self) -> int:
        return sum(
            int(column.nbytes) for column in (self.key, self.records, self.default_records) if column is not None
        )

    def _with(self, pick: Callable[[Any], Any]) -> ArrowEntries:
        columns = ("key", "records", "default_records", "sources", "positions", "times")
        arrays: dict[str, Any] = {name: getattr(self, name) for name in columns}
        picked: dict[str, Any] = {name: None if array is None else pick(array) for name, array in arrays.items()}
        return replace(self, **picked, _made={})

    def _python(self, name: str, array: Any) -> list[Any] | None:
        return None if array is None else self._once(name, lambda: self.to_python(array))

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def _first_null(*columns: pa.Array) -> int | None:
    import pyarrow.compute as pc

    places = [pc.index(pc.is_null(column), True).as_py() for column in columns if column.null_count]
    return min(places, default=None)
