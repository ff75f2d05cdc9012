"""Finds what to change where counts can't agree, the cheapest first.

At the operator where different counts meet, all of them have to become one of those that are there. A stream moves
before it, which costs the bytes that it holds; a dataset is rewritten in place, which costs those of the stream that it
is made from; an intermediate stream whose count was given gets another, which costs nothing. One whose count was
inferred follows what it was inferred from, where that is changed. A way that would leave the conflict, or make another
one, is not a way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.stream_facts import bytes_of
from dagster_adjunct.orchestration.planner.counts.auto_repartition import Inserted, mismatch, with_insertions
from dagster_adjunct.orchestration.planner.counts.join_groups import Groups, dataset_node, join_groups
from dagster_adjunct.orchestration.planner.counts.partition_counts import assign, declared_counts
from dagster_adjunct.orchestration.planner.counts.sends_that_feed_joins import Needs
from dagster_adjunct.orchestration.planner.known_records.record_flows import Flows, follow

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, Requirement
    from dagster_adjunct.orchestration.operators.spec.stream_facts import Catalog
    from dagster_adjunct.orchestration.planner.counts.partition_counts import Counts

_TRIED = 10
_PLANNED = 20_000
"""Of so many groups at most it is tried out whether a change settles them, and of fewer where more operators than this
would be planned for it; for the others a change is proposed by its size alone, and is not `tried`."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The records in `stream`, spread anew by `columns` before the operator's `input` of this number."""

    operator: str
    input: int
    stream: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mend:
    """What makes the counts at the operator `at` equal: `moved` inputs by these columns into `partitions`, `datasets`
    rewritten into as many, `given` partition_by operators with that count. `size` is in bytes, None where not known."""

    at: str
    partitions: int
    moved: tuple[Moved, ...]
    datasets: tuple[str, ...]
    given: tuple[str, ...]
    size: int | None
    tried: bool = True

    @property
    def changes(self) -> tuple[bool, int, int, int]:
        """What a way without sizes is chosen by: the fewest changes, the fewest of datasets, the most partitions."""
        return self.size is None, self.size or 0, len(self.moved) + len(self.datasets), len(self.datasets)


def mends(
    app: Application, catalog: Catalog, needs: Needs, flows: Flows, groups: Groups, counts: Counts
) -> Callable[[str], tuple[Mend, ...]]:
    """Return what gives the ways to mend one of the groups in conflict, the cheapest first."""
    before = set(counts.conflicts)
    tried = set(counts.conflicts[: min(_TRIED, max(1, _PLANNED // len(app.operators)))])
    changes = _Changes(app, needs, flows, counts, _Held(app, catalog))

    def settles(mend: Mend) -> bool:
        if mend.at not in tried:
            return True
        inserted = {
            (item.operator, item.input): Inserted(
                item.operator, item.input, item.stream, item.columns, mend.partitions, ""
            )
            for item in mend.moved
        }
        declared = declared_counts(app, catalog) | dict.fromkeys(
            (*map(dataset_node, mend.datasets), *mend.given, *(item.node for item in inserted.values())),
            mend.partitions,
        )
        moved = follow(app, catalog, with_insertions(inserted), earlier=flows) if inserted else flows
        left = set(assign(declared, join_groups(app, needs, moved), 1).conflicts)
        return mend.at not in left and left <= before

    def ways(at: str) -> tuple[Mend, ...]:
        targets = dict.fromkeys(counts.partitions[node] for node in groups[at])
        # What a count was inferred from has other joins, too: a change there is proposed only where it is tried out.
        where = (False, True) if at in tried else (False,)
        mended = (changes.mend(at, target, at_sources=at_sources) for target in targets for at_sources in where)
        possible = [mend for mend in dict.fromkeys(mended) if settles(mend)]
        known = all(mend.size is not None for mend in possible)  # sizes of some say nothing
        possible = [replace(mend, size=mend.size if known else None, tried=at in tried) for mend in possible]
        return tuple(sorted(possible, key=lambda mend: (mend.changes, -mend.partitions)))

    return ways


@dataclass(frozen=True, slots=True)
class _Changes:
    """What has to change so that all counts at an operator are equal."""

    app: Application
    needs: Needs
    flows: Flows
    counts: Counts
    held: _Held

    def mend(self, at: str, target: int, *, at_sources: bool) -> Mend:
        """Return what makes all counts at an operator the target: there, or `at_sources` of what is inferred."""
        moved: list[Moved] = []
        datasets: dict[str, int | None] = {}
        given: dict[str, int | None] = {}
        places, seen = [at], {at}
        for place in places:  # which grows
            for number, needed, flow in self._asked(place):
                dataset = None if needed is None else needed.dataset
                if dataset is not None and needed is not None and needed.partitions != target:
                    datasets[dataset] = self.held.dataset(dataset)
                wrong = "" if needed is None else mismatch(needed, flow)
                if self.counts.partitions[flow.stream] == target and not wrong:
                    continue
                if flow.stream in self.held.given and not wrong:
                    given[flow.stream] = 0
                    continue
                source = self.counts.inferred.get(flow.stream)
                if at_sources and source is not None and not wrong:
                    if source.join not in seen:
                        seen.add(source.join)
                        places.append(source.join)
                    continue
                moved.append(Moved(place, number, flow.stream, self._columns(place, needed, flow)))
        sizes = [*(self.held.stream(item.stream) for item in moved), *datasets.values(), *given.values()]
        known = [size for size in sizes if size is not None]
        size = sum(known) if len(known) == len(sizes) else None
        return Mend(at, target, tuple(moved), tuple(datasets), tuple(given), size)

    def _asked(self, operator: str) -> Iterator[tuple[int, Requirement | None, Flow]]:
        """Yield the inputs that have to agree at an operator, with their numbers and what is asked of them."""
        arriving = self.flows.arriving[operator]
        asked = self.needs.get(operator, (None,) * len(arriving))
        for number, (needed, flow) in enumerate(zip(asked, arriving, strict=True)):
            if needed is not None or operator not in self.needs:
                yield number, needed, flow

    def _columns(self, operator: str, needed: Requirement | None, flow: Flow) -> tuple[str, ...]:
        if needed is None:  # several inputs lie alike, or one moves to where another lies
            return next(
                (one.partitioned_by for one in (flow, *self.flows.arriving[operator]) if one.partitioned_by), ()
            )
        if needed.columns is not None:
            return needed.columns
        assert needed.dataset is not None
        return self.app.dataset(needed.dataset).partition_by


class _Held:
    """How many bytes streams and datasets hold, and which streams have been given a count with partition_by."""

    def __init__(self, app: Application, catalog: Catalog) -> None:
        self._app, self._catalog = app, catalog
        self._sizes: dict[str, int | None] = {}
        self._read: Mapping[str, frozenset[str]] = {}
        counts = declared_counts(app, catalog)
        self.given = {
            operator.id
            for operator in app.operators
            if operator.spec.role == "intermediate" and counts[operator.id] is not None
        }

    def dataset(self, name: str) -> int | None:
        stream = self._app.dataset(name).stream
        return None if stream is None else self._of(stream)

    def stream(self, node: str) -> int | None:
        """Return what the inputs hold that the records here come from, each once."""
        if not self._read:
            read: dict[str, frozenset[str]] = {}
            for operator in self._app.operators:
                own = () if operator.spec.reads is None else (operator.spec.reads,)
                sources = [read[source] for source in operator.inputs]
                read[operator.id] = sources[0] if len(sources) == 1 else frozenset(own).union(*sources)
            self._read = read
        sizes = [self._of(stream) for stream in self._read[node]]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def _of(self, stream: str) -> int | None:
        if stream not in self._sizes:
            self._sizes[stream] = bytes_of(self._catalog, stream)
        return self._sizes[stream]
