"""Says of counts that can't agree which join needs them to, and everything that has to do with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.planner.counts.join_groups import Groups, dataset_node
from dagster_adjunct.orchestration.planner.counts.sends_that_feed_joins import Needs
from dagster_adjunct.orchestration.planner.plans.traverse import traverse

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.planner.counts.partition_counts import Counts


@dataclass(frozen=True, slots=True)
class Conflict:
    """A join whose streams have different counts. `at` are the operators where they meet: the join itself, sinks to
    its table, or operators that bring streams together before it; `nodes` is all that takes part, those that agree
    and those that feed or read its table included.

    `joins` says how many joins need this, where it is the table that they all read.
    """

    join: str
    at: tuple[str, ...]
    nodes: tuple[str, ...]
    joins: int = 1


def conflicts_of(needs: Needs, groups: Groups, counts: Counts, streams: Sequence[str]) -> tuple[Conflict, ...]:
    """Return every join that can't be, in the order of definition, each once; `streams` are ids in their order."""
    place = {node: number for number, node in enumerate(streams)}
    reading: dict[str, list[str]] = {}
    feeds: dict[str, str] = {}
    for operator, asked in needs.items():
        for needed in asked:
            if needed is not None and needed.dataset is not None:
                if needed.feeds:
                    feeds[operator] = needed.dataset
                else:
                    reading.setdefault(needed.dataset, []).append(operator)
    relying: dict[str, str] = {}
    for operator, members in groups.items():
        for member in members:
            if member != operator:
                relying.setdefault(member, operator)

    def join_behind(operator: str) -> tuple[str, int]:
        while operator not in needs:
            operator = relying[operator]
        if operator in feeds:
            joins = reading[feeds[operator]]
            return joins[0], len(joins)
        return operator, 1

    at: dict[str, list[str]] = {}
    joins: dict[str, int] = {}
    for operator in counts.conflicts:
        join, number = join_behind(operator)
        at.setdefault(join, []).append(operator)
        joins[join] = max(joins.get(join, 1), number)
    order = {operator: number for number, operator in enumerate(groups)}
    tables = _by_table(needs)
    by_table: dict[tuple[str, ...], tuple[str, ...]] = {}  # joins of one table have the same that take part

    def taking_part(join: str, where: Sequence[str]) -> tuple[str, ...]:
        read = tuple(member for member in groups.get(join, ()) if member in tables)
        if read not in by_table or not read:
            meeting = [operator for table in read for operator in tables[table]]
            involved = _involved(dict.fromkeys([join, *where, *meeting]), groups, counts)
            by_table[read] = tuple(sorted(involved, key=lambda node: place[node]))
        return by_table[read]

    return tuple(
        Conflict(join, tuple(where), taking_part(join, where), joins[join])
        for join, where in sorted(at.items(), key=lambda item: order[item[0]])
    )


def majority(nodes: Iterable[str], counts: Counts) -> tuple[int, tuple[str, ...]] | None:
    """Return the count that more streams have by themselves than any other, and which; None where there is none."""
    own = [node for node in nodes if node not in counts.inferred]
    most = Counter(counts.partitions[node] for node in own).most_common(2)
    if not most or most[0][1] < 2 or (len(most) > 1 and most[1][1] == most[0][1]):
        return None
    return most[0][0], tuple(node for node in own if counts.partitions[node] == most[0][0])


def _by_table(needs: Needs) -> dict[str, list[str]]:
    """Return the operators that read a dataset or feed it, by its node."""
    operators_of: dict[str, list[str]] = {}
    for operator, asked in needs.items():
        for name in dict.fromkeys(needed.dataset for needed in asked if needed is not None and needed.dataset):
            operators_of.setdefault(dataset_node(name), []).append(operator)
    return operators_of


def _involved(operators: Iterable[str], groups: Groups, counts: Counts) -> list[str]:
    """Return the members of these groups, what was brought together into one, and what inferred counts come from."""
    reached: list[str] = []

    def onward(node: str) -> Iterable[str]:
        source = counts.inferred.get(node)
        return (*groups.get(node, ()), *(() if source is None else (source.source,)))

    traverse((member for operator in operators for member in groups.get(operator, ())), onward, reached.append)
    return [node for node in reached if node not in groups]
