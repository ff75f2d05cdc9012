"""`PageItems`: the keys or entries of a page, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

T_co = TypeVar("T_co", covariant=True)


class PageItems(Sequence[T_co]):
    """A list in all but its time: iterating makes the items one by one and keeps none.

    To hold thousands of new objects at once, page after page, costs more than to make them: Python's collector looks at
    the whole process again and again.
    """

    __slots__ = ("_count", "_items", "_made")

    def __init__(self, count: int, items: Callable[[], Iterable[T_co]]) -> None:
        self._count, self._items = count, items
        self._made: list[T_co] | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T_co]:
        return iter(self._items() if self._made is None else self._made)

    @overload
    def __getitem__(self, place: int) -> T_co: ...

    @overload
    def __getitem__(self, place: slice) -> list[T_co]: ...

    def __getitem__(self, place: int | slice) -> Any:
        if self._made is None:
            self._made = list(self._items())
        return self._made[place]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, PageItems | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _held, (list(self),)


def _held(items: list[Any]) -> PageItems[Any]:
    return PageItems(len(items), items.__iter__)
