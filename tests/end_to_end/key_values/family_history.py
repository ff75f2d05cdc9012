"""Whether what processes saw of one family of a key-value table can have happened one operation at
a time.

Operations of any number of keys, with the clock before and after each. The search keeps all worlds
that are possible (what the keys hold, and which operations under way have happened) and goes from
answer to answer (Wing and Gong, 1993).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Version = str
ABSENT: Literal["absent"] = "absent"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What one caller did, by a clock that all share. Values are unique; None is "no such key".

    `expected`: conditions, ABSENT or a version. `wrote`: new values. `versions`: those of the
    values written or seen. `seen`: what a read found. `refused`: of a write that was, the keys
    whose conditions fail with the version found.
    """

    began: int
    ended: int
    expected: Mapping[str, Version] = field(default_factory=dict)
    wrote: Mapping[str, str | None] = field(default_factory=dict)
    versions: Mapping[str, Version] = field(default_factory=dict)
    seen: Mapping[str, str | None] = field(default_factory=dict)
    refused: Mapping[str, Version | None] | None = None


class NotLinearisableError(AssertionError):
    """No order of the operations explains what they answered."""


@dataclass(frozen=True)
class _Step:
    """An operation as the search needs it: it can happen where `holds`, but not where one of
    `fails` holds too.
    """

    holds: Mapping[str, str | None]
    fails: Mapping[str, str | None]
    writes: Mapping[str, str | None]

    def can_happen(self, values: Mapping[str, str | None]) -> bool:
        return all(values.get(key) == value for key, value in self.holds.items()) and all(
            values.get(key) != value for key, value in self.fails.items()
        )


World = tuple[frozenset[tuple[str, str]], frozenset[int]]


def check_linearisable(operations: Iterable[Operation]) -> None:
    """Raise NotLinearisableError unless these operations can have happened one by one, from an
    empty family on.
    """
    history = sorted(operations, key=lambda operation: operation.began)
    values = _values_by_version(history)
    steps = [_step(operation, values) for operation in history]
    pending: set[int] = set()
    worlds: set[World] = {(frozenset(), frozenset())}
    for number, answers in _events(history):
        if not answers:
            pending.add(number)
            continue
        worlds = {
            (held, done - {number})
            for held, done in _reachable(worlds, pending, steps)
            if number in done
        }
        pending.discard(number)
        if not worlds:
            around = [history[operation] for operation in sorted({number, *pending})]
            raise NotLinearisableError(
                f"{history[number]} can't have been answered so; under way were {around}"
            )


def _reachable(worlds: set[World], pending: set[int], steps: list[_Step]) -> set[World]:
    """Return these worlds, and those in which more of the pending operations have happened."""
    reached: set[World] = set()
    waiting = list(worlds)
    while waiting:
        held, done = waiting.pop()
        values = dict(held)
        able = [number for number in pending - done if steps[number].can_happen(values)]
        # What changes nothing may as well happen now: it never takes a world away.
        done |= {number for number in able if not steps[number].writes}
        if (held, done) in reached:
            continue
        reached.add((held, done))
        for number in able:
            if steps[number].writes:
                after = {**values, **steps[number].writes}
                waiting.append(
                    (frozenset((k, v) for k, v in after.items() if v is not None), done | {number})
                )
    return reached


def _events(history: list[Operation]) -> Iterator[tuple[int, bool]]:
    began = [(operation.began, False, number) for number, operation in enumerate(history)]
    ended = [(operation.ended, True, number) for number, operation in enumerate(history)]
    for _, answers, number in sorted([*began, *ended]):
        yield number, answers


def _step(operation: Operation, values: Mapping[Version, str]) -> _Step:
    conditions = {key: _value(version, values) for key, version in operation.expected.items()}
    if operation.refused is None:
        return _Step({**conditions, **operation.seen}, {}, operation.wrote)
    if not operation.refused or not operation.refused.keys() <= conditions.keys():
        raise NotLinearisableError(f"{operation} was refused for a condition that it does not have")
    reasons = {
        key: None if version is None else _value(version, values)
        for key, version in operation.refused.items()
    }
    kept = {key: value for key, value in conditions.items() if key not in reasons}
    return _Step({**reasons, **kept}, {key: conditions[key] for key in reasons}, {})


def _value(version: Version, values: Mapping[Version, str]) -> str | None:
    if version != ABSENT and version not in values:
        raise NotLinearisableError(
            f"somebody found the version {version}, which nobody is known to have written"
        )
    return None if version == ABSENT else values[version]


def _values_by_version(history: list[Operation]) -> dict[Version, str]:
    """Return which value has which version. Raises where a version has two, or a value."""
    values: dict[Version, str] = {}
    versions: dict[str, Version] = {}
    for operation in history:
        for key, version in operation.versions.items():
            value = operation.wrote.get(key) or operation.seen[key]
            assert value is not None
            if (
                values.setdefault(version, value) != value
                or versions.setdefault(value, version) != version
            ):
                raise NotLinearisableError(
                    f"version {version} of {value!r} is also another's: {operation}"
                )
    return values
