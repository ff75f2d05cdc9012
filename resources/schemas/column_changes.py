"""How declared columns change stored ones: what is added, widened, renamed, dropped and reordered,
at every depth, and what is not allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dagster_adjunct.resources.schemas.evolution import is_widening
from dagster_adjunct.resources.schemas.paths import split_path, steps_among, write_path
from dagster_adjunct.resources.schemas.schema import (
    Field,
    Schema,
    Steps,
    StoredNames,
    schema_struct,
    sorted_names,
)
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    write_name,
)
from dagster_adjunct.resources.validation import validated


@validated
@dataclass(frozen=True, slots=True)
class ColumnChanges:
    """The renames and removals that a user declares.

    `renamed` are new names by old name, or by path for a member of a struct: `{"customer.mail":
    "email"}`, `{"lines[].sku": "item"}`. A new name that contains dots is written in backticks.
    `drop` are names and paths. Both stay in the user's code: what has happened already changes
    nothing.
    """

    renamed: Mapping[str, str] = field(default_factory=dict, hash=False)
    drop: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is renamed or dropped."""
        return bool(self.renamed or self.drop)

    def follow(self, name: str, names: Container[str] = ()) -> str:
        """Return how a column, or a path through structs, is written after the renames; unchanged
        without any. A name among `names` is that of a column.
        """
        steps = steps_among(name, names)
        now = []
        for at, step in enumerate(steps, 1):
            path = write_path(steps[:at])
            now.append(_read_name(self.renamed[path]) if path in self.renamed else step)
        return now[0] if len(now) == 1 else write_path(now)

    def unknown(self, schema: Schema, names: StoredNames) -> list[str]:
        """Return the paths that neither are in the schema, nor have been renamed or dropped as
        declared: typing errors in a change that is requested once.
        """
        paths = _find_paths(schema)
        unknown = []
        for path, name in self.renamed.items():
            parent = path.rpartition(".")[0]
            new = write_name(_read_name(name))
            target = f"{parent}.{new}" if parent else new
            if path not in paths and target not in paths:
                unknown.append(path)
        retired = {steps[-1] for steps in names.retired}
        for path in self.drop:
            _, _, last = path.rpartition(".")
            was_dropped = last.strip("`") in retired
            if path not in paths and not was_dropped:
                unknown.append(path)
        return unknown

    def unfulfilled(self, stored: Schema, now: Schema) -> Iterator[tuple[str, str]]:
        """Yield (path, new name) of the renames of stored columns and members that are under
        neither name in the schema of now.
        """
        paths = _find_paths(stored)
        names = {paths[path]: name for path, name in self.renamed.items() if path in paths}
        there = {*_find_paths(now).values()}
        for path, name in self.renamed.items():
            if path not in paths:
                continue
            steps = paths[path]
            target = []
            for at, step in enumerate(steps, 1):
                target.append(_read_name(names[steps[:at]]) if steps[:at] in names else step)
            if tuple(target) not in there:
                yield path, name


NO_CHANGES = ColumnChanges()


def _read_name(text: str) -> str:
    """Return the name that a text means, which may be in backticks."""
    steps = split_path(text)
    return steps[0] if len(steps) == 1 else text


@dataclass(frozen=True, slots=True)
class FixedColumns:
    """Columns, and paths of values in columns, that may not be renamed, dropped or get another
    type, and what they are part of. A path fixes the column and the members that it goes through,
    too.
    """

    names: Collection[str] = ()
    what: str = "the key"

    def steps(self, paths: Mapping[str, Steps]) -> list[Steps]:
        """Return the steps to each of them; `paths` has the steps by the texts of paths."""
        return [paths[name] for name in self.names if name in paths]


NONE_FIXED = FixedColumns()


@dataclass(frozen=True, slots=True)
class Evolution:
    """The columns after a change, with their stored names.

    `changes` describes what changes, and is empty if nothing does. `problems` describes what is not
    allowed; then nothing may be changed.
    """

    schema: Schema
    names: StoredNames
    changes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def evolve(
    stored: Schema,
    names: StoredNames,
    declared: Schema | None,
    changes: ColumnChanges = NO_CHANGES,
    fixed: FixedColumns = NONE_FIXED,
    *,
    ordered: bool = False,
) -> Evolution:
    """Return what the declared columns make of the stored ones; None declares the stored ones,
    after the renames and removals.

    Columns and members keep their order, and added ones follow them; with `ordered` they get that
    of the declaration. Columns that are sensitive in either schema stay so.
    """
    request = _Request(_find_paths(stored), changes, declared)
    problems = [*request.problems(stored), *request.fixed_problems(fixed)]
    if problems:
        return Evolution(stored, names, problems=tuple(problems))
    walk = _Walk(request, names, fixed, ordered)
    wanted = None
    if declared is not None:
        wanted = schema_struct(declared)
    struct = walk.evolve_struct(schema_struct(stored), wanted, (), ())
    if walk.problems:
        return Evolution(stored, names, problems=tuple(walk.problems))
    sensitive = {request.renames.get((name,), name) for name in stored.sensitive}
    if declared is not None:
        sensitive.update(declared.sensitive)
    fields = []
    for member in struct.members:
        fields.append(Field(member.name, str(member.type), member.name in sensitive))
    after = StoredNames(sorted_names(walk.names), names.retired | walk.retired)
    return Evolution(Schema(tuple(fields)), after, tuple(walk.changes))


def describe_former(
    earlier: Sequence[tuple[Schema, StoredNames]], now: Schema, names: StoredNames
) -> dict[str, str]:
    """Return what became of columns and members that `now` does not have under their former names:
    "renamed to email", "dropped", by former name or path. `earlier` are columns of before, oldest
    first.
    """
    there = _find_paths(now)
    renamed: dict[Steps, str] = {}
    for text, stored in _stored_paths(now, names).items():
        renamed.setdefault(stored, text)
    former: dict[str, str] = {}
    for schema, before in earlier:
        for text, stored in _stored_paths(schema, before).items():
            if text in there:
                continue
            if stored in renamed:
                former[text] = f"renamed to {renamed[stored]}"
            else:
                former[text] = "dropped"
    return former


def _stored_paths(schema: Schema, names: StoredNames) -> dict[str, Steps]:
    """Return the stored steps of each column and member by the texts that users write for it."""
    return {text: names.of_steps(steps) for text, steps in _find_paths(schema).items()}


def find_known_part(schema: Schema, path: str) -> tuple[str, list[str]]:
    """Return (part, fields): the longest part of a path that exists, and the paths of the fields in
    it. If not even its column exists, they are "" and all columns.
    """
    paths = _find_paths(schema)
    part = path
    while part and part not in paths:
        part = part.rpartition(".")[0]
        # "lines" has no path "lines[]" of its own.
        container = part.removesuffix("[]").removesuffix("[*]")
        if container in paths:
            part = container
    start = paths.get(part, ())
    inner: dict[Steps, str] = {}
    for text, steps in paths.items():
        if steps[:-1] == start:
            inner.setdefault(steps, text)
    return part, list(inner.values())


def describe_part(schema: Schema, path: str) -> str:
    """Return what the longest part of a path that exists has: "lines has lines[].sku"; if not even
    its column exists, "its columns are …".
    """
    part, fields = find_known_part(schema, path)
    if not part:
        return f"its columns are {', '.join(fields)}"
    if fields:
        return f"{part} has {', '.join(fields)}"
    return f"{part} has no members"


def _find_paths(schema: Schema) -> dict[str, Steps]:
    """Return the steps of each column and member by the texts that users write for it."""
    paths: dict[str, Steps] = {}
    columns = schema_struct(schema).members
    for member in columns:
        for start in (member.name, write_name(member.name)):
            for text, steps in _iter_members(member.type, start, (member.name,)):
                paths.setdefault(text, steps)
    for member in columns:  # a column whose name looks like a path wins
        paths[write_name(member.name)] = (member.name,)
        paths[member.name] = (member.name,)
    return paths


def _iter_members(type_: Type, text: str, steps: Steps) -> Iterator[tuple[str, Steps]]:
    """Yield (text, steps) for each member within a type, the outer ones first; `text` and `steps`
    are those of the type itself.
    """
    if isinstance(type_, Array):
        yield from _iter_members(type_.element, f"{text}[]", steps)
    elif isinstance(type_, Map):
        yield from _iter_members(type_.value, f"{text}[*]", steps)
    elif isinstance(type_, Struct):
        for member in type_.members:
            inner = f"{text}.{write_name(member.name)}"
            yield inner, (*steps, member.name)
            yield from _iter_members(member.type, inner, (*steps, member.name))


class _Request:
    """The renames and removals that apply to the stored columns, by steps.

    Those of columns that are not there have happened already, or are of no concern: they are left
    out.
    """

    def __init__(
        self, paths: Mapping[str, Steps], changes: ColumnChanges, declared: Schema | None
    ) -> None:
        self.paths = paths
        self._changes = changes
        self._declared: Mapping[str, Steps] = {}
        if declared is not None:
            self._declared = _find_paths(declared)
        self.renames: dict[Steps, str] = {}
        for path, name in changes.renamed.items():
            if path in paths:
                self.renames[paths[path]] = _read_name(name)
        self.drops = {paths[path] for path in changes.drop if path in paths}
        self.texts: dict[Steps, str] = {}
        for text, steps in paths.items():
            self.texts.setdefault(steps, text)

    def text(self, steps: Steps) -> str:
        """Return how a user writes the path of a stored column or member."""
        return self.texts[steps]

    def problems(self, stored: Schema) -> Iterator[str]:
        """Yield why the renames and removals contradict each other, the declared or the stored
        columns.
        """
        yield from self._contradictions()
        yield from self._collisions()
        is_everything_dropped = self.drops >= {(name,) for name in stored.names}
        if is_everything_dropped:
            yield "all columns are dropped: expected at least one to stay"

    def _contradictions(self) -> Iterator[str]:
        """Yield which renames and removals contradict each other or the declaration."""
        for path, name in self._changes.renamed.items():
            if not name or name.startswith("__"):
                yield f"{path} can't be renamed to {name!r}: expected a name without '__' before it"
            if "." in name and len(split_path(name)) != 1:
                new = name.rpartition(".")[2]
                yield (
                    f"{path} can't be renamed to the path {name}: expected a name, such as {new},"
                    f" or `{name}` if the dots are part of it"
                )
            if path in self._declared:
                yield f"{path} is renamed to {name}, but declared too: remove the rename"
            if path in self._changes.drop:
                yield f"{path} is both renamed and dropped: keep one of these"
        for path in self._changes.drop:
            if path in self._declared:
                yield f"{path} is dropped, but declared too: remove it from drop"

    def _collisions(self) -> Iterator[str]:
        """Yield which renames would give two columns or members one name."""
        targets: dict[Steps, str] = {}
        there = {tuple(map(str.lower, steps)): steps for steps in self.texts}
        for steps, name in self.renames.items():
            target = (*steps[:-1], name)
            lowered = tuple(map(str.lower, target))
            if lowered in targets:
                yield f"{targets[lowered]} and {self.text(steps)} are both renamed to {name}"
            elif there.get(lowered, steps) != steps:
                yield f"{self.text(steps)} can't be renamed to {name}, which exists"
            targets[lowered] = self.text(steps)

    def fixed_problems(self, fixed: FixedColumns) -> Iterator[str]:
        """Yield which columns may be neither renamed nor dropped, but are."""
        parts: dict[Steps, None] = {}
        for steps in fixed.steps(self.paths):
            for length in range(1, len(steps) + 1):
                parts[steps[:length]] = None
        for steps in parts:
            for done, changed in (("renamed", self.renames), ("dropped", self.drops)):
                if steps in changed:
                    yield f"{self.text(steps)} can't be {done}: it is a part of {fixed.what}"
        for name in fixed.names:
            steps = self.paths.get(name, (name,))
            # A column whose name looks like the path would take its place.
            if self._declared.get(name, steps) != steps:
                yield f"{name} can't be added: {fixed.what} has the path {name}"


class _Walk:
    """Compares stored and declared types at every depth, and collects what changes: the stored
    `names` of all members (as `StoredNames.names`), the stored steps to the dropped ones
    (`retired`), a line for each of the `changes`, and `problems`.
    """

    def __init__(
        self, request: _Request, names: StoredNames, fixed: FixedColumns, ordered: bool
    ) -> None:
        self._request = request
        self._before = names
        self._fixed = fixed
        self._fixed_steps = fixed.steps(request.paths)
        self._ordered = ordered
        self.names: list[tuple[Steps, str]] = []
        self.retired: set[Steps] = set()
        self.changes: list[str] = []
        self.problems: list[str] = []

    def evolve_struct(
        self, stored: Struct, declared: Struct | None, steps: Steps, stored_steps: Steps
    ) -> Struct:
        """Return the struct with the changed members; `steps` lead to it by its names, and
        `stored_steps` by its stored names.
        """
        kept: dict[str, Member] = {}  # by their names after the renames
        stored_names = [self._before.of(stored_steps, member.name) for member in stored.members]
        for member, stored_name in zip(stored.members, stored_names, strict=True):
            member_steps = (*steps, member.name)
            stored_member_steps = (*stored_steps, stored_name)
            if member_steps in self._request.drops:
                self.retired.add(stored_member_steps)
                text = self._request.text(member_steps)
                self.changes.append(f"{text} ({member.type}) is dropped")
                continue
            name = self._request.renames.get(member_steps, member.name)
            if name != member.name:
                self.changes.append(f"{self._request.text(member_steps)} is renamed to {name}")
            self.names.append(((*stored_steps, name), stored_name))
            wanted: Type | None = None
            if declared is not None:
                wanted = self._find_declared(member_steps, name, member, declared)
            type_ = self._evolve_type(member.type, wanted, member_steps, stored_member_steps)
            kept[name] = Member(name, type_)
        if not kept:
            self.problems.append(f"{self._request.text(steps)} would have no members: drop it")
        return self._add_members(kept, declared, steps, stored_steps, stored_names)

    def _add_members(
        self,
        kept: dict[str, Member],
        declared: Struct | None,
        steps: Steps,
        stored_steps: Steps,
        stored_names: list[str],
    ) -> Struct:
        """Return the struct of the kept members and the added ones, in the order of the declaration
        if that counts. `stored_names` are the stored names of all members that it had.
        """
        if declared is None:
            return Struct(tuple(kept.values()))
        members = dict(kept)
        for member in declared.members:
            if member.name in kept:
                continue
            members[member.name] = member
            stored_name = self._before.choose(stored_steps, member.name, stored_names)
            self.names.append(((*stored_steps, member.name), stored_name))
            if steps:
                place = f"{self._request.text(steps)}.{write_name(member.name)}"
            else:
                place = member.name
            self.changes.append(f"{place} ({member.type}) is added")
        if not self._ordered:
            return Struct(tuple(members.values()))
        order = [member.name for member in declared.members]
        is_reordered = [name for name in order if name in kept] != list(kept)
        if is_reordered:
            place = self._request.text(steps) if steps else "the columns"
            self.changes.append(f"{place}: the order is now {', '.join(order)}")
        return Struct(tuple(members[name] for name in order))

    def _find_declared(
        self, steps: Steps, name: str, member: Member, declared: Struct
    ) -> Type | None:
        """Return the declared type of a stored member, which is called `name` after the renames. If
        it is not declared, add a problem, which says what was probably meant, and return None.
        """
        found = declared.member(name)
        if found is not None:
            return found.type
        path = self._request.text(steps)
        was_renamed = name != member.name
        if was_renamed:
            siblings = {other[-1] for other in self._request.texts if other[:-1] == steps[:-1]}
            new = [each.name for each in declared.members if each.name not in siblings]
            hint = f": new there is {', '.join(new)}" if new else ""
            self.problems.append(f"{path} is renamed to {name}, which is not declared{hint}")
            return None
        problem = (
            f'{path} ({member.type}) is removed: declare drop=["{path}"], or'
            f' renamed={{"{path}": "…"}}'
        )
        for each in declared.members:
            if each.name.lower() == name.lower():
                problem = (
                    f"{path} ({member.type}) is renamed to {each.name}: declare"
                    f' renamed={{"{path}": "{each.name}"}}'
                )
        self.problems.append(problem)
        return None

    def _evolve_type(self, was: Type, now: Type | None, steps: Steps, stored_steps: Steps) -> Type:
        """Return the changed type of a column or member, or of a part of it; `now` is the declared
        one, None if nothing is declared but renames and removals.
        """
        if isinstance(was, Struct) and (now is None or isinstance(now, Struct)):
            return self.evolve_struct(was, now, steps, stored_steps)
        if isinstance(was, Array) and (now is None or isinstance(now, Array)):
            return Array(self._evolve_type(was.element, now and now.element, steps, stored_steps))
        if isinstance(was, Map) and (now is None or isinstance(now, Map)):
            return Map(self._evolve_type(was.value, now and now.value, steps, stored_steps))
        if now is None or was == now:
            return was
        self._widen(was, now, steps)
        return now

    def _widen(self, was: Type, now: Type, steps: Steps) -> None:
        """Record that a type becomes another one, as a change or, where that is not allowed, as a
        problem.
        """
        path = self._request.text(steps)
        if steps in self._fixed_steps:
            self.problems.append(
                f"{path} is {now}, was {was}, and is a part of {self._fixed.what}, which can't"
                " change"
            )
        elif not isinstance(was, Simple) or not is_widening(str(was), str(now)):
            self.problems.append(f"{path} is {now}, was {was}, whose values do not all fit")
        else:
            self.changes.append(f"{path} is {now}, was {was}")
