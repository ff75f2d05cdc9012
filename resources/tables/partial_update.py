"""Partial updates with a default for the first one (SAMZA-2709).

    update ---- found -----------------------------------------> done
       `------- no record, default, UPDATE_WITH_DEFAULTS
                    -> put the default (if absent, where the store can) -> update -> done
       `------- no record otherwise ----------------------------> RecordNotFoundError

This is the way for stores that know single requests only. One that can do it all in one request
offers `UpdatesWithDefaults`, and then none of this is used.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from dagster_adjunct.resources.errors import RecordNotFoundError, TableError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
U = TypeVar("U")

logger = logging.getLogger(__name__)


class UpdateContract(Enum):
    """What a sink may do when an update meets no record."""

    UPDATE_ONLY = "update-only"
    UPDATE_WITH_DEFAULTS = "update-with-defaults"


@dataclass(frozen=True, slots=True)
class UpdateMessage(Generic[U, V]):
    """A part of a record to set (`update`), and the whole record to begin with where there is none."""

    update: U
    default: V | None = None

    def __post_init__(self) -> None:
        if self.update is None:
            raise TableError(
                "an UpdateMessage has None as its update; it must say what to change.",
                "Drop the message, or use delete() to remove a record.",
            )

    @property
    def has_default(self) -> bool:
        return self.default is not None


@dataclass(frozen=True, slots=True)
class SecondTry(Generic[K, V, U]):
    """What to do about the keys that a first round of updates did not find."""

    defaults: tuple[tuple[K, V], ...]  # one per key: that of its first message with one
    updates: tuple[tuple[K, U], ...]  # what to apply on top, in order
    hopeless: tuple[K, ...]  # keys of messages that came before any default


def plan_second_try(entries: Sequence[tuple[K, UpdateMessage[U, V]]], missing: frozenset[object]) -> SecondTry[K, V, U]:
    """Decide, message by message, what becomes of the keys in `missing`. Pure."""
    defaults: dict[K, V] = {}
    updates: list[tuple[K, U]] = []
    hopeless: dict[K, None] = {}
    for key, message in entries:
        if key not in missing:
            continue
        if key not in defaults:
            if message.default is None:
                hopeless[key] = None
                continue
            defaults[key] = message.default
        updates.append((key, message.update))
    return SecondTry(tuple(defaults.items()), tuple(updates), tuple(hopeless))


async def apply_updates(
    entries: Sequence[tuple[K, UpdateMessage[U, V]]],
    contract: UpdateContract,
    *,
    table: str,
    update_all: Callable[[Sequence[tuple[K, U]]], Awaitable[None]],
    put_defaults: Callable[[Sequence[tuple[K, V]]], Awaitable[int]],
) -> None:
    """Apply each message in order for its key, putting defaults where `contract` allows it.

    Messages that can be applied are, whatever happens to others; then RecordNotFoundError names the
    keys of those that can't. A default that can't be put is logged and passed over, since somebody
    else may have put the record meanwhile: the update that follows tells.
    """
    try:
        await update_all([(key, message.update) for key, message in entries])
    except RecordNotFoundError as error:
        missing = frozenset(error.keys)
        if not missing:
            raise TableError(
                f"table {table}: its write function raised RecordNotFoundError for a batch without keys.",
                "Give the error the keys without a record: RecordNotFoundError(…, keys=…).",
                table=table,
            ) from error
    else:
        return
    if contract is UpdateContract.UPDATE_ONLY:
        raise refused(table, contract, entries, missing)
    plan = plan_second_try(entries, missing)
    if plan.defaults:
        try:
            await put_defaults(plan.defaults)
        except Exception:
            logger.warning(
                "Table %s: putting %d defaults failed; going on with the updates.",
                table,
                len(plan.defaults),
                exc_info=True,
            )
        await update_all(plan.updates)
    if plan.hopeless:
        raise refused(table, contract, entries, frozenset(plan.hopeless))


def refused(
    table: str,
    contract: UpdateContract,
    entries: Sequence[tuple[K, UpdateMessage[U, V]]],
    missing: frozenset[object],
) -> RecordNotFoundError:
    """The error for messages that met no record and may not, or can't, put a default."""
    keys = tuple(dict.fromkeys(key for key, _ in entries if key in missing))
    shown = ", ".join(repr(key) for key in keys[:3]) + (", …" if len(keys) > 3 else "")
    problem = f"table {table} has no record for {len(keys)} of the updated keys ({shown})"
    if contract is UpdateContract.UPDATE_ONLY and any(m.has_default for k, m in entries if k in missing):
        return RecordNotFoundError(
            f"{problem}, and the contract {contract.name} forbids putting the defaults that came along.",
            "Send them with UpdateContract.UPDATE_WITH_DEFAULTS.",
            keys=keys,
            table=table,
        )
    return RecordNotFoundError(
        f"{problem}, and their messages have no default.",
        "Put the records first, or give each UpdateMessage a default and send it with "
        "UpdateContract.UPDATE_WITH_DEFAULTS.",
        keys=keys,
        table=table,
    )
