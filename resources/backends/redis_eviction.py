"""Whether a Redis server may evict keys to free memory, which takes records and their marks without a trace.

The policy alone decides, also without a limit (`maxmemory 0`): one that is set later evicts at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables.operation import Conditions, Problem

KEEPS_ALL = "noeviction"
_STEP = (
    "Set maxmemory-policy to noeviction, in redis.conf and by CONFIG SET, or in the parameter group of a managed service"
)

Ask = Callable[..., Awaitable[object]]
"""Sends one command and returns its answer, or a Problem."""


async def read_eviction_policy(ask: Ask) -> str | None:
    """Return the server's `maxmemory-policy`; None if the user may read it in neither way.

    Managed services hide CONFIG, and an access list may allow only one of the two commands.
    """
    information = await ask("INFO", "memory")
    if isinstance(information, bytes):
        for line in information.decode(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "maxmemory_policy":
                return value.strip()
    setting = await ask("CONFIG", "GET", "maxmemory-policy")
    if isinstance(setting, list) and len(setting) == 2:
        return bytes(setting[1]).decode(errors="replace")
    for answer in (information, setting):
        if isinstance(answer, Problem) and answer.may_pass and answer.error is not None:
            raise answer.error
    return None


def note_eviction(label: str, place: str, policy: str | None) -> str | None:
    """Return what to say about a policy (None: unknown); None if the server keeps all keys."""
    if policy == KEEPS_ALL:
        return None
    if policy is None:
        return (
            f"{label}: this user may read neither INFO nor CONFIG of the Redis server at {place}, so it is not known "
            f"whether it evicts records. Its maxmemory-policy must be {KEEPS_ALL}."
        )
    return (
        f"{label}: the Redis server at {place} may evict records when its memory is full: its maxmemory-policy is "
        f"{policy}. {_STEP}."
    )


def check_eviction(label: str, place: str, policy: str | None, conditions: Conditions) -> None:
    """Raise ConfigurationError if keys that conditions depend on may be evicted."""
    if policy in (KEEPS_ALL, None):
        return
    needed = "idempotent" if conditions.idempotent or conditions.keeps_marks else "newest_by"
    if not conditions and not conditions.keeps_marks:
        return
    raise ConfigurationError(
        f"{label}: the Redis server at {place} may evict records when its memory is full, because its maxmemory-policy "
        f"is {policy}. With the marks of an evicted record, {needed} can't be kept: messages would be applied again.",
        f"{_STEP}; or remove {needed}.",
        argument=needed,
        table=label,
        setting="maxmemory-policy",
    )
