"""`UpdateContractLayer`: what updates do whose record is missing (SAMZA-2709).

    update ---- found -----------------------------------------> done
       `------- no record, default, UPDATE_WITH_DEFAULTS
                    -> put the default if there is still none -> update -> done
       `------- no record otherwise ----------------------------> missing

A function that supports this in one request gets one request. Others get three: the update, the
defaults of missing records, and the updates of these. The layer is below the one that keeps the
order of each key, so later operations on the keys wait until the third is answered.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    RecordNotFoundError,
    RunLeaseLostError,
    TransientError,
)
from dagster_adjunct.resources.tables.functions import outcomes_from_missing
from dagster_adjunct.resources.tables.operation import (
    Capabilities,
    Conditions,
    Layer,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
    UpdateContract,
    concatenate_outcomes,
    may_have_effect,
    may_send_separately,
)
from dagster_adjunct.resources.validation import validated


class _Answer(NamedTuple):
    """The outcomes of a request, and whether its entries may now be sent by themselves."""

    outcomes: Outcomes
    may_send_apart: bool


@validated
class UpdateContractLayer:
    """Applies the contract of each update; passes on everything else.

    Under UPDATE_ONLY it drops the defaults. Under UPDATE_WITH_DEFAULTS it puts a default if there
    is no record. If the function can't check that in the request of the put, the put could replace
    a record that another writer has put meanwhile. So it raises ConfigurationError, unless
    `defaults_may_overwrite` accepts this.
    """

    def __init__(
        self,
        below: Layer,
        *,
        table: str,
        capabilities: Capabilities,
        defaults_may_overwrite: bool = False,
    ) -> None:
        self._below = below
        self._table = table
        self._updates_with_defaults = capabilities.updates_with_defaults
        self._puts_if_absent = capabilities.puts_if_absent
        self._may_overwrite = defaults_may_overwrite

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Send updates by their contract: defaults by the store if it can, else as puts of their
        own. Raises ConfigurationError if a default could overwrite another record.
        """
        if operation.kind is not OperationKind.UPDATE:
            return await self._below.send(operation)
        defaults = operation.entries.defaults
        if defaults is not None and operation.contract is UpdateContract.UPDATE_ONLY:
            operation = operation.with_entries(operation.entries.without_defaults())
            defaults = None
        if defaults is None or self._updates_with_defaults:
            return await self._send_update(operation)
        if all(default is None for default in defaults):
            # Updates without a default have shared a request with others.
            return await self._send_update(operation)
        if not (self._puts_if_absent or self._may_overwrite):
            problem = (
                f"table {self._table}: without put_if_absent, a default could overwrite another"
                " writer's record."
            )
            step = (
                "Implement put_if_absent(), accept the risk with defaults_may_overwrite=True, or"
                " send no defaults."
            )
            raise ConfigurationError(
                problem, step, argument="defaults_may_overwrite", table=self._table
            )
        return await self._send_in_three(operation, defaults)

    async def close(self) -> None:
        await self._below.close()

    async def _send_in_three(self, operation: Operation[Any], defaults: Sequence[Any]) -> Outcomes:
        """Send the updates, then the defaults of missing records, then the updates of these."""
        keys = operation.entries.keys
        updates = operation.with_entries(operation.entries.without_defaults())
        outcomes = await self._send_update(updates)
        plan = plan_defaults(keys, defaults, outcomes.places(State.MISSING))
        if not plan.begun:
            return outcomes
        if self._puts_if_absent:
            kind = OperationKind.PUT_IF_ABSENT
        else:
            kind = OperationKind.PUT
        created = list(plan.begun)
        rows = RowEntries(created, [defaults[place] for place in plan.begun.values()])
        # Without conditions, because a default is no message: it must not count as the newest or
        # leave a mark.
        puts = await self._send_apart(
            replace(operation, kind=kind, entries=rows, conditions=Conditions())
        )
        repeated = await self._send_apart(updates.with_entries(updates.entries.take(plan.again)))
        repeated = replace(repeated, defaults_put=repeated.defaults_put + puts.done)
        outcomes = outcomes.with_retried(plan.again, repeated)
        # A record that is still missing because its default could not be put has the put's problem.
        failed = {created[place]: problem for place, problem in puts.problems.items()}
        problems = dict(outcomes.problems)
        for place in outcomes.places(State.MISSING):
            put_problem = failed.get(keys[place])
            if put_problem is not None and put_problem.state is not State.SKIPPED:
                error = self._failed_default_error(keys[place], put_problem, problems[place])
                problems[place] = replace(put_problem, error=error)
        return replace(outcomes, problems=problems)

    async def _send_apart(self, operation: Operation[Any]) -> Outcomes:
        """Send the second or third request; if it is rejected as a whole, send each entry by
        itself.

        Errors are returned as outcomes: a raised one would tell the layers above that nothing was
        sent, and they might repeat the first request.
        """
        answer = await self._send_part(operation)
        if len(operation) == 1 or not answer.may_send_apart:
            return answer.outcomes
        entries = operation.entries
        parts = list[Outcomes]()
        failed: dict[Hashable, Problem] = {}
        for place, key in enumerate(entries.keys):
            if key in failed:  # the earlier entry may still succeed, and must not be overtaken
                part = Outcomes.all(1, failed[key].unsent)
            else:
                alone = operation.with_entries(entries.part(place, place + 1))
                part = (await self._send_part(alone)).outcomes
                if (problem := part.problems.get(0)) is not None and problem.may_pass:
                    failed[key] = problem
            parts.append(part)
        return concatenate_outcomes(parts)

    async def _send_part(self, operation: Operation[Any]) -> _Answer:
        """Send one request; an error is its outcomes."""
        try:
            outcomes = await self._send_update(operation)
        except RunLeaseLostError:
            raise
        except Exception as error:  # noqa: BLE001 - it becomes the outcome
            if isinstance(error, TransientError):
                state = State.FAILED
            else:
                state = State.REFUSED
            problem = Problem(state, error, of_request=True)
            outcomes = Outcomes.all(len(operation), problem)
            return _Answer(outcomes, not may_have_effect(operation, error))
        return _Answer(outcomes, may_send_separately(operation, outcomes))

    async def _send_update(self, operation: Operation[Any]) -> Outcomes:
        """Send one request; an error about missing records is the outcome of their entries."""
        try:
            return await self._below.send(operation)
        except Exception as error:
            outcomes = outcomes_from_missing(
                operation, error, lambda other: Problem(State.REFUSED, other)
            )
            if outcomes is None:
                raise
            return outcomes

    def _failed_default_error(
        self, key: Any, put: Problem, missing: Problem
    ) -> RecordNotFoundError:
        """The error for a record that is missing, because its default could not be put."""
        problem = (
            f"table {self._table} has no record to update for key {key!r}, and its default could"
            " not be put: "
        )
        step = "Correct what the store rejects in the default."
        error = RecordNotFoundError(f"{problem}{put.error}", step, keys=(key,), table=self._table)
        error.__cause__ = put.error or missing.error
        return error


class DefaultsPlan(NamedTuple):
    """The keys whose record to create, each with the index of its default, and the indices of the
    entries to send again.
    """

    begun: dict[Hashable, int]
    again: list[int]


def plan_defaults(
    keys: Sequence[Hashable], defaults: Sequence[Any], missing: Sequence[int]
) -> DefaultsPlan:
    """Return from which defaults to create records, and what to send again afterwards.

    `missing` are the indices of the entries whose record is missing, in order. The record of a key
    is created from the first default among the key's missing entries. The entry with this default
    and the key's later ones are sent again; its earlier ones stay missing.
    """
    begun: dict[Hashable, int] = {}
    again: list[int] = []
    for place in missing:
        key = keys[place]
        if key not in begun:
            if defaults[place] is None:
                continue
            begun[key] = place
        again.append(place)
    return DefaultsPlan(begun, again)


def explain_missing_records(table: str, operation: Operation[Any], outcomes: Outcomes) -> Outcomes:
    """Return the outcomes with one error for all missing records, which names the table and says
    what to do.

    The advice depends on the contract, and on whether the messages had defaults.
    """
    missing = outcomes.places(State.MISSING)
    if not missing:
        return outcomes
    keys = tuple(dict.fromkeys(operation.entries.keys[place] for place in missing))
    shown = ", ".join(map(repr, keys[:3])) + (", …" if len(keys) > 3 else "")
    defaults = operation.entries.defaults
    had_default = defaults is not None and any(defaults[place] is not None for place in missing)
    problem = (
        f"table {table} has no record to update for"
        f" {len(keys)} key{'s' if len(keys) > 1 else ''} ({shown})"
    )
    if operation.contract is UpdateContract.UPDATE_WITH_DEFAULTS and had_default:
        why = "; it was deleted right after its default was put."
        help_ = "Send the update again."
    elif operation.contract is UpdateContract.UPDATE_WITH_DEFAULTS:
        why = ", and the message has no default."
        help_ = "Put the record first, or give each UpdateMessage a default."
    elif had_default:
        why = ", and the contract UPDATE_ONLY ignores the default."
        help_ = "Send it with UpdateContract.UPDATE_WITH_DEFAULTS."
    else:
        why = ", and the update has no default."
        help_ = (
            "Put the record first, or give a default: if_missing=… of stream.update(), or an"
            " UpdateMessage with a default under UpdateContract.UPDATE_WITH_DEFAULTS."
        )
    error = RecordNotFoundError(problem + why, help_, keys=keys, table=table)
    error.__cause__ = outcomes.problems[missing[0]].error
    return replace(
        outcomes,
        problems={**outcomes.problems, **dict.fromkeys(missing, Problem(State.MISSING, error))},
    )
