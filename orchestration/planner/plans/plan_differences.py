"""What changed between two plans, in words.

Operators are numbered in the order of their definition, so one that is added in front renumbers the rest. They are
therefore paired by what they are, and the older plan is told in the numbers of the newer one. Members that only one of
two versions writes are not compared.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Item = Mapping[str, Any]

_TOKEN = re.compile(r"[\w-]+")
_NUMBER = re.compile(r"-\d+(?=-|$)")
_SINGULAR = {
    "exchanges": "exchange",
    "tables": "send to a table",
    "streams": "stream",
    "state": "local table",
    "fed_joins": "join with what is written here",
    "by_time": "join by time",
    "fed": "fed dataset",
    "calls": "call",
}
_SAID = {
    "summary": "does {new}, did {old}",
    "inputs": "takes the records of {new}, took those of {old}",
    "partitions": "has {new} partitions, had {old}",
    "partitioned_by": "is partitioned by {new}, was by {old}",
    "partitioner": "is partitioned with {new}, was with {old}",
    "count_from": "has its count from {new}, had it from {old}",
    "order": "keeps the order {new}, kept {old}",
    "marks": "marks what it has had as {new}, did as {old}: what a crash left half-way is applied again, and "
    "what {new} has had is skipped; name it by marks_as",
    "streams": "has the streams {new}, had {old}",
}


def differences(older: Item, newer: Item) -> tuple[str, ...]:
    """Return what is other in the newer of two documents of plans (`ExecutionPlan.to_json`), a line each."""
    pairs = _paired(older.get("operators", ()), newer.get("operators", ()))
    renamed = {old["id"]: new["id"] for old, new in pairs if old is not None and new is not None}
    before = _renumbered(older, renamed, older.get("application", ""))
    lines = list(_operators(pairs, before))
    for part, named in _NAMED.items():
        if part in before and part in newer:
            lines += _items(part, before[part], newer[part], named)
    lines += _rest(before, newer)
    return tuple(lines)


def _paired(older: Sequence[Item], newer: Sequence[Item]) -> list[tuple[Item | None, Item | None]]:
    """Operators of both plans: pairs that do the same, pairs of one kind and name, and what is only in one."""
    paired: dict[int, Item] = {}
    left = {item["id"]: item for item in older}
    for signature in (_same, _alike):
        waiting: dict[object, list[Item]] = defaultdict(list)
        for item in reversed(left.values()):
            waiting[signature(item)].append(item)
        for number, item in enumerate(newer):
            if number not in paired and waiting[signature(item)]:
                paired[number] = waiting[signature(item)].pop()
                del left[paired[number]["id"]]
    pairs: list[tuple[Item | None, Item | None]] = [(paired.get(number), item) for number, item in enumerate(newer)]
    return [*((item, None) for item in left.values()), *pairs]


def _same(item: Item) -> object:
    return _alike(item), item["summary"]


def _alike(item: Item) -> object:
    return _NUMBER.sub("", item["id"], count=1)


def _renumbered(value: Any, renamed: Mapping[str, str], application: str) -> Any:
    """A document in which operators have the ids of the other plan, also within texts and names of streams."""

    def token(match: re.Match[str]) -> str:
        for prefix in ("", f"{application}-", f"{application}-before-"):
            name = match[0].removeprefix(prefix)
            if match[0].startswith(prefix) and name in renamed:
                return prefix + renamed[name]
        return match[0]

    if isinstance(value, str):
        return _TOKEN.sub(token, value)
    if isinstance(value, Mapping):
        return {name: _renumbered(item, renamed, application) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_renumbered(item, renamed, application) for item in value]
    return value


def _operators(pairs: Sequence[tuple[Item | None, Item | None]], before: Item) -> Iterator[str]:
    there = {item["id"]: item for item in before.get("operators", ())}
    for old, new in pairs:
        if new is None and old is not None:
            yield f"operator {old['id']} is gone: {old['summary']}"
        elif new is not None and old is None:
            yield f"operator {new['id']} is new: {new['summary']}"
        elif new is not None:
            yield from _changed(f"operator {new['id']}", there[new["id"]], new, ("id",))


def _items(part: str, older: Sequence[Item], newer: Sequence[Item], named: Any) -> Iterator[str]:
    before, after = _by_name(older, named), _by_name(newer, named)
    yield from (f"{_singular(part, item)} {name} is gone" for name, item in before.items() if name not in after)
    for name, item in after.items():
        what = f"{_singular(part, item)} {name}"
        if name not in before:
            yield f"{what} is new{_counted(item)}"
        else:
            yield from _changed(what, before[name], item, ())


def _singular(part: str, item: Item) -> str:
    if part == "join_groups":
        return "proven join" if item.get("dataset") is not None else "what is kept at"
    return _SINGULAR[part]


def _by_name(items: Sequence[Item], named: Any) -> dict[str, Item]:
    result: dict[str, Item] = {}
    for item in items:
        name, number = named(item), 2
        while name in result:  # more than one exchange at an operator, say
            name, number = f"{named(item)} ({number})", number + 1
        result[name] = item
    return result


def _stream(item: Item) -> str:
    return f"{item['name']} ({item['role']})" if item.get("dataset") is None else f"{item['name']} ({item['dataset']})"


def _join(item: Item) -> str:
    return str(item["join"])


def _exchange(item: Item) -> str:
    return f"at {item['operator']} ({item['reason']})"


def _table(item: Item) -> str:
    return f"{item['table']} at {item['operator']}"


def _state(item: Item) -> str:
    return str(item["table"])


def _fed(item: Item) -> str:
    return str(item["dataset"])


def _call(item: Item) -> str:
    return f"of {item['of']} at {item['operator']} ({item['kind']})"


_NAMED = {
    "streams": _stream,
    "join_groups": _join,
    "exchanges": _exchange,
    "tables": _table,
    "fed": _fed,
    "calls": _call,
    "state": _state,
    "fed_joins": _join,
}


def _counted(item: Item) -> str:
    if item.get("partitions") is None:
        return ""
    by = ", ".join(item.get("partitioned_by") or ())
    return f": {item['partitions']} partitions{f' by {by}' if by else ''}"


def _changed(what: str, old: Item, new: Item, without: Sequence[str]) -> Iterator[str]:
    """The members that both have and that differ."""
    for name in (name for name in new if name in old and name not in without):
        before, after = _plain(old[name]), _plain(new[name])
        if before == after:
            continue
        if name == "columns" and isinstance(before, list) and isinstance(after, list):
            yield f"{what}: {_columns(before, after)}"
            continue
        wording = _SAID.get(name, f"{name} is {{new}}, was {{old}}")
        yield f"{what} {wording.format(new=_shown(after), old=_shown(before))}"


def _columns(before: list[Any], after: list[Any]) -> str:
    added = [str(name) for name in after if name not in before]
    gone = [str(name) for name in before if name not in after]
    parts = [f"new columns {', '.join(added)}"] if added else []
    parts += [f"columns {', '.join(gone)} are gone"] if gone else []
    return "; ".join(parts) or f"the columns are in another order: {', '.join(map(str, after))}"


def _rest(before: Item, newer: Item) -> Iterator[str]:
    told = ("format", "operators", "tasks", "notes", *_NAMED)
    yield from _changed("the plan:", before, newer, told)
    for what, there, other in (("is new", newer, before), ("is gone", before, newer)):
        known = set(map(str, other.get("notes", ())))
        yield from (f"note {what}: {note}" for note in there.get("notes", ()) if str(note) not in known)
    old, new = _plain(before.get("tasks", [])), _plain(newer.get("tasks", []))
    if len(old) != len(new):
        yield f"there are {len(new)} tasks, there were {len(old)}"
    elif old != new:
        differing = [after["name"] for one, after in zip(old, new, strict=True) if one != after]
        yield f"tasks own other partitions or datasets: {_first(differing)}"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return "none" if value is None else str(value)
