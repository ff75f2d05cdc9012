"""Writes to the records of one partition of a key-value table: look, decide, write what was looked at, or look again.

A request to the segment is atomic, and expects of each key the version that was seen. Where another writer was faster
nothing of it happened, and all is decided anew over what is there then. A key that was lost once goes alone from then
on, so that it holds up no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tenacity import AsyncRetrying, RetryError, retry_if_result, stop_after_delay, wait_random_exponential

from dagster_adjunct.resources.backends.rows import Row
from dagster_adjunct.resources.backends.write_plan import Checked, Entry
from dagster_adjunct.resources.errors import AdjunctError, TableUnavailableError
from dagster_adjunct.resources.key_value.key_version import new_token, version_of
from dagster_adjunct.resources.key_value.request_parts import in_requests
from dagster_adjunct.resources.key_value.table_segment import ConditionsFailed, SegmentChange, StoredEntry
from dagster_adjunct.resources.key_value_rows.open_table import OpenPartition
from dagster_adjunct.resources.key_value_rows.planned_documents import PlannedWrites
from dagster_adjunct.resources.tables.outcomes import Problem

_PAUSE, _LONGEST_PAUSE = 0.005, 0.5  # seconds
_CONTESTED = 30.0  # seconds for which a lost race is run again

Decide = Callable[[Checked, Mapping[Row, StoredEntry | None]], PlannedWrites]


@dataclass(slots=True)
class OptimisticWrites:
    """The entries of a request that lie in one partition, and what has become of them so far.

    `looks` says that `decide` needs what is there. `problem_of` says what an error means for the entries that met it.
    """

    label: str
    partition: OpenPartition
    left: Sequence[Entry]
    table_keys: Mapping[Row, bytes]
    looks: bool
    decide: Decide
    problem_of: Callable[[AdjunctError], Problem]
    problems: dict[int, Problem] = field(default_factory=dict)
    defaults_put: int = 0
    _contested: set[Row] = field(default_factory=set)

    async def finish(self) -> None:
        """Go on until each entry is done or has a problem."""
        if not await self._round():
            return
        rounds = AsyncRetrying(
            retry=retry_if_result(bool),
            wait=wait_random_exponential(multiplier=_PAUSE, max=_LONGEST_PAUSE),
            stop=stop_after_delay(_CONTESTED),
        )
        try:
            await rounds(self._round)
        except RetryError:
            self._give_up(self.left, self._too_contested())

    async def _round(self) -> bool:
        """Look, decide and write once; return whether entries are left."""
        entries, self.left = self.left, ()
        stored_entries: Mapping[Row, StoredEntry | None] = {}
        if self.looks:
            keys = list(dict.fromkeys(entry.key for entry in entries))
            try:
                stored = await self.partition.get([self.table_keys[key] for key in keys])
            except AdjunctError as error:
                self._give_up(entries, error)
                return False
            stored_entries = dict(zip(keys, stored, strict=True))
        decision = self.decide(Checked(entries, {}), stored_entries)
        failed, lost = await self._write(decision)
        for entry in entries:
            if entry.key in failed:
                self.problems[entry.place] = failed[entry.key]
            elif entry.key not in lost and entry.place in decision.problems:
                self.problems[entry.place] = decision.problems[entry.place]
        self.left = [entry for entry in entries if entry.key in lost]
        return bool(self.left)

    async def _write(self, decision: PlannedWrites) -> tuple[dict[Row, Problem], set[Row]]:
        """Send what is decided; return the keys whose request failed, and those whose request came too late."""
        failed: dict[Row, Problem] = {}
        lost: set[Row] = set()
        for keys, changes in self._requests(decision):
            token = new_token()
            request = [change._replace(version=version_of(token, place)) for place, change in enumerate(changes)]
            try:
                await self.partition.apply(request, token)
            except ConditionsFailed as late:
                self._contested |= {keys[place] for place in late.found}
                lost.update(keys)
            except AdjunctError as error:
                failed.update(dict.fromkeys(keys, self.problem_of(error)))
            else:
                self.defaults_put += sum(decision.written[key].begins for key in keys)
        return failed, lost

    def _requests(self, decision: PlannedWrites) -> Iterator[tuple[list[Row], list[SegmentChange]]]:
        """Yield the keys of each request and their changes, which have no versions yet."""
        changes = {
            key: SegmentChange(self.table_keys[key], written.document, b"", written.expected)
            for key, written in decision.written.items()
        }
        # Lists: a request that comes too late makes more keys contested, in the next round.
        alone = [key for key in changes if key in self._contested]
        together = [key for key in changes if key not in self._contested]
        keys = iter(together)
        for part in in_requests([changes[key] for key in together], self.partition.limits):
            yield [next(keys) for _ in part], part
        for key in alone:
            yield [key], [changes[key]]

    def _give_up(self, entries: Sequence[Entry], error: AdjunctError) -> None:
        problem = self.problem_of(error)
        self.problems.update({entry.place: problem for entry in entries})

    def _too_contested(self) -> TableUnavailableError:
        keys = list(dict.fromkeys(entry.key for entry in self.left))
        return TableUnavailableError(
            f"{self.label}: for {_CONTESTED:g} s others were faster each time that {len(keys)} keys were written, the "
            f"first of them {keys[0]!r}.",
            "It is tried again; if that goes on, have fewer writers change one key.",
            table=self.label,
        )
