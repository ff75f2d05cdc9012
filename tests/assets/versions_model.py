"""What a bounded dataset should be after any history: a plain Python model, with no word of the
code under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KEYS = tuple("abcdef")
MOST_ROWS = 4
Entries = dict[str, int]
Row = tuple[str, int | None]


class Refused(Exception):
    """The operation is not allowed in this state."""


@dataclass
class Version:
    """A version that is retained; `entries` None was refused before it was built."""

    name: str
    entries: Entries | None
    state: str
    replaced: int | None = None


@dataclass
class Partition:
    """One partition of the input: rows since its last marker, and what each version's first
    marker closed.
    """

    rows: list[Row] = field(default_factory=list)
    closed: dict[str, tuple[list[Row], bool]] = field(default_factory=dict)

    def mark(self, version: str, *, promised_more: bool = False) -> None:
        """End a version here; under a name that ended here before, it is a re-delivery and is
        dropped.
        """
        if version not in self.closed:
            self.closed[version] = (self.rows, promised_more)
        self.rows = []


@dataclass
class Model:
    """The dataset: its input, the versions by number, which one is served, and under which names
    they came.

    `delivered` are names with the numbers of their versions, and whether the name is free again;
    `freed` are names under which nothing was delivered since.
    """

    partitions: list[Partition]
    versions: dict[int, Version] = field(default_factory=dict)
    delivered: list[tuple[str, int, bool]] = field(default_factory=list)
    abandoned: set[str] = field(default_factory=set)
    freed: set[str] = field(default_factory=set)
    head: int | None = None
    pin: int | None = None
    pin_ends: bool = False
    numbers: int = 0

    # -- what readers and operators see

    @property
    def names(self) -> dict[str, int]:
        return {name: number for name, number, free in self.delivered if not free}

    @property
    def served(self) -> int | None:
        return self.head if self.pin is None else self.pin

    def seen(self) -> tuple[object, ...]:
        retained = tuple(
            (number, version.state) for number, version in sorted(self.versions.items())
        )
        return (
            retained,
            self.head,
            self.pin,
            self.pin_ends,
            tuple(self.names),
            tuple(sorted(self.abandoned)),
        )

    def readable(self) -> dict[int, Entries]:
        return {
            number: version.entries
            for number, version in self.versions.items()
            if version.entries is not None and version.state != "revoked"
        }

    # -- the cycle

    def next_name(self) -> str | None:
        """Return the next version that is complete in every partition."""
        number = 1
        while True:
            name = f"d{number}"
            if name not in self.names and name not in self.abandoned and name not in self.freed:
                return (
                    name if all(name in partition.closed for partition in self.partitions) else None
                )
            number += 1

    def settle(self, name: str) -> None:
        """Take in one complete version."""
        entries: Entries = {}
        for partition in self.partitions:
            for key, value in partition.closed[name][0]:
                entries.pop(key, None)
                if value is not None:
                    entries[key] = value
        refused = any(other.closed[name][1] for other in self.partitions)
        current = self.versions[self.head].entries if self.head is not None else None
        if not refused and entries == current and self.head is not None:
            self.take(name, self.head)
            return
        self.numbers += 1
        gone = [v.entries for v in self.versions.values() if (v.name, v.state) == (name, "revoked")]
        # what was revoked comes again as it was, and takes no name
        if not refused and entries in gone:
            self.take(name, self.numbers, free=True)
            self.freed.add(name)
            self.versions[self.numbers] = Version(name, entries, "rejected")
            return
        self.take(name, self.numbers)
        state = "rejected" if refused or len(entries) > MOST_ROWS else "sealed"
        self.versions[self.numbers] = Version(name, None if refused else entries, state)
        if state == "sealed":
            self.switch(self.numbers)

    def take(self, name: str, number: int, *, free: bool = False) -> None:
        self.delivered = [done for done in self.delivered if not (done[0] == name and done[2])]
        self.delivered.append((name, number, free))

    def free(self, number: int) -> None:
        self.freed |= {name for name, held in self.names.items() if held == number}
        self.delivered = [
            (name, held, free or held == number) for name, held, free in self.delivered
        ]

    def switch(self, number: int) -> None:
        self.versions[number].replaced, self.head = self.head, number

    def expire(self) -> None:
        if self.pin_ends:
            self.unpin()

    def discard(self, keep: int, leased: set[int]) -> None:
        sealed = sorted(
            (number for number, version in self.versions.items() if version.state == "sealed"),
            reverse=True,
        )
        staying = {*sealed[:keep], *leased, self.head, self.pin}
        # What a revocation of the head would serve again; a policy that keeps one version keeps no
        # other for it.
        next_best = (
            self.versions[self.head].replaced if self.head is not None and keep != 1 else None
        )
        if next_best in sealed:
            staying.add(next_best)
        self.versions = {
            number: version for number, version in self.versions.items() if number in staying
        }

    # -- operators

    def find(self, name: str, *, sealed: bool = False) -> int:
        held = {done[1] for done in self.delivered if done[0] == name}
        named = [n for n, version in self.versions.items() if n in held or version.name == name]
        if not named:
            raise Refused
        number = max(named, key=lambda n: (self.versions[n].state == "sealed", n))
        if sealed and self.versions[number].state != "sealed":
            raise Refused
        return number

    def pin_to(self, name: str, *, ends: bool) -> None:
        self.pin, self.pin_ends = self.find(name, sealed=True), ends

    def unpin(self) -> None:
        self.pin, self.pin_ends = None, False

    def rollback(self, name: str | None) -> None:
        to = self.before(self.head) if name is None else self.find(name, sealed=True)
        if to is None or (self.pin is not None and not self.pin_ends):
            raise Refused
        self.unpin()
        self.head = to

    def before(self, number: int | None) -> int | None:
        if number is None:
            return None
        return max(
            (n for n, version in self.versions.items() if n < number and version.state == "sealed"),
            default=None,
        )

    def revoke(self, name: str) -> None:
        number = self.find(name)
        if self.pin == number:
            self.unpin()
        if self.versions[number].state != "revoked":
            self.free(number)
        self.versions[number].state = "revoked"
        if self.head == number:
            self.head = self.served_before(number)

    def served_before(self, number: int) -> int | None:
        """Return what was served before the switch to a version, if that may be, else before
        that; else by number.
        """
        passed = {number}
        while (before := self.versions[number].replaced) in self.versions and before not in passed:
            assert before is not None
            if self.versions[before].state == "sealed":
                return before
            passed.add(before)
            number = before
        return self.before(number)

    def force(self, name: str, *, make_current: bool = False) -> None:
        number = self.find(name)
        version = self.versions[number]
        if version.state != "rejected" or version.entries is None:
            raise Refused
        version.state = "sealed"
        if (
            make_current
            or self.head is None
            or self.delivered_at(number) > self.delivered_at(self.head)
        ):
            self.switch(number)

    def delivered_at(self, number: int) -> int:
        """Return where a version stands in the order of delivery: what was delivered again,
        where it was last.
        """
        return max(at for at, (_, held, _) in enumerate(self.delivered) if held == number)

    def drop(self, name: str) -> None:
        number = self.find(name)
        if self.versions[number].state == "sealed":
            raise Refused
        if self.versions[number].state == "rejected":
            self.free(number)
        del self.versions[number]

    def in_flight(self) -> bool:
        """Whether a version has ended in some partitions and is not taken in, or is complete and
        waits.
        """
        settled = {*self.names, *self.abandoned, *self.freed}
        return any(set(partition.closed) - settled for partition in self.partitions)

    def abandon(self, name: str) -> None:
        self.abandoned.add(name)
