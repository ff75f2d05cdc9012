"""Columns that are renamed, dropped, added again, reordered and widened by chance, at the top and
in structs; and what they mean, in plain Python, by the identity of each column.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from dagster_adjunct.resources.schemas.schema import Schema

NAMES = ("note", "memo", "seats", "home", "mail")


@dataclass
class Part:
    """A column, or a member of a struct. `type` is "int", "bigint", "string", or the members of a
    struct; with `many`, values are lists of structs.
    """

    id: int
    name: str
    type: str | list[Part]
    many: bool = False

    def text(self) -> str:
        if isinstance(self.type, str):
            return self.type
        struct = f"struct<{','.join(f'{part.name}:{part.text()}' for part in self.type)}>"
        return f"array<{struct}>" if self.many else struct


@dataclass
class Evolving:
    """The columns of a dataset, besides its key `k`, and the renames and removals that its users
    declare: those of the past stay, unless the name is used again.
    """

    random: Random
    columns: list[Part] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    drop: list[str] = field(default_factory=list)
    used: int = 0

    def __post_init__(self) -> None:
        for _ in range(3):
            self._add(self.columns)

    @property
    def schema(self) -> Schema:
        return Schema.of({"k": "bigint", **{part.name: part.text() for part in self.columns}})

    def change(self) -> None:
        """Make one or two changes, and declare them."""
        renamed: dict[str, str] = {}
        drop: list[str] = []
        before = dict(_paths(self.columns))
        path_of = {part.id: path for path, part in before.items()}
        for _ in range(self.random.randint(1, 2)):
            self._change_once()
        now = {part.id: part for _, part in _paths(self.columns)}
        for id_, path in path_of.items():
            parent_stays = path.rpartition(".")[0].removesuffix("[]")
            if id_ not in now:
                if not parent_stays or before[parent_stays].id in now:
                    drop.append(path)
            elif now[id_].name != path.rpartition(".")[2]:
                renamed[path] = now[id_].name
        declared = {path for path, _ in _paths(self.columns)}
        self.renamed = {old: new for old, new in self.renamed.items() if old not in declared}
        self.drop = [old for old in self.drop if old not in declared]
        clashing = declared.intersection([*renamed, *drop])
        if clashing:  # a name that is used again at once can't be declared in one step
            raise Clash
        self.renamed = {old: new for old, new in self.renamed.items() if old not in drop} | renamed
        self.drop = [old for old in dict.fromkeys([*self.drop, *drop]) if old not in renamed]

    def _change_once(self) -> None:
        siblings, part = self.random.choice(list(_places(self.columns)))
        kind = self.random.choice(["rename", "drop", "add", "add", "widen", "reorder"])
        free = [name for name in NAMES if name not in {each.name for each in siblings}]
        if kind == "rename" and free:
            part.name = self.random.choice(free)
        elif kind == "drop" and len(siblings) > 1:
            siblings.remove(part)
        elif kind == "add" and free:
            self._add(siblings)
        elif kind == "widen" and part.type == "int":
            part.type = "bigint"
        elif kind == "reorder":
            self.random.shuffle(siblings)

    def _add(self, siblings: list[Part]) -> None:
        free = [name for name in NAMES if name not in {each.name for each in siblings}]
        self.used += 1
        part = Part(self.used, self.random.choice(free), self.random.choice(["int", "string"]))
        if siblings is self.columns and self.random.random() < 0.5:
            part.many = self.random.random() < 0.4
            part.type = members = []
            for _ in range(2):
                self._add(members)
        siblings.append(part)

    def step(self) -> None:
        """Change the columns, once or again until the changes can be declared in one step."""
        while True:
            state = deepcopy((self.columns, self.renamed, self.drop))
            try:
                return self.change()
            except Clash:
                self.columns, self.renamed, self.drop = state

    def draw_values(self) -> dict[int, Any]:
        """Return values by the identity of their columns."""
        return {part.id: self._draw(part) for part in self.columns}

    def _draw(self, part: Part) -> Any:
        if self.random.random() < 0.2:
            return None
        if isinstance(part.type, str):
            number = self.random.randint(-9, 9)
            return f"t{number}" if part.type == "string" else number
        count = self.random.randint(0, 2) if part.many else 1
        structs = [{each.id: self._draw(each) for each in part.type} for _ in range(count)]
        return structs if part.many else structs[0]


class Clash(Exception):
    """A path that is renamed or dropped is declared again."""


def _paths(columns: list[Part], start: str = "") -> Iterator[tuple[str, Part]]:
    """Yield the path of each part, and the part."""
    for part in columns:
        yield f"{start}{part.name}", part
        if not isinstance(part.type, str):
            yield from _paths(part.type, f"{start}{part.name}{'[]' if part.many else ''}.")


def _places(columns: list[Part]) -> Iterator[tuple[list[Part], Part]]:
    for part in columns:
        yield columns, part
        if not isinstance(part.type, str):
            yield from _places(part.type)


def shown(values: dict[int, Any], columns: list[Part]) -> dict[str, Any]:
    """Return an entry with these columns; those without a value are null."""
    entry = {}
    for part in columns:
        value = values.get(part.id)
        if value is not None and not isinstance(part.type, str):
            members = part.type
            structs = [shown(each, members) for each in (value if part.many else [value])]
            value = structs if part.many else structs[0]
        entry[part.name] = value
    return entry


def named_now(columns: list[Part], now: list[Part]) -> list[Part]:
    """Return the columns of then with the names of now, without what was dropped since."""
    current = {part.id: part for part in now}
    found = []
    for part in columns:
        same = current.get(part.id)
        if same is None:
            continue
        type_ = part.type
        if not isinstance(type_, str):
            assert not isinstance(same.type, str)
            type_ = named_now(type_, same.type)
            if not type_:
                continue
        found.append(Part(part.id, same.name, type_, part.many))
    return found
