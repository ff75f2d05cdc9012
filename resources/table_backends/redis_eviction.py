"""Whether a Redis server may evict keys to free memory, which takes records and their marks without
a trace.

The policy alone decides, also without a limit (`maxmemory 0`): one that is set later evicts at
once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables.operation import Conditions, Problem

KEEPS_ALL = "noeviction"
_STEP = (
    "Set maxmemory-policy to noeviction, in redis.conf and by CONFIG SET, or in a managed service's"
    " parameter group"
)

Ask = Callable[..., Awaitable[object]]
"""Sends one command and returns its answer, or a Problem."""


async def read_eviction_policy(ask: Ask) -> str | None:
    """Return the server's `maxmemory-policy`; None if the user may read it in neither way. Raises
    the error of a server that can't answer now.

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


def note_eviction(label: str, address: str, policy: str | None) -> str | None:
    """Return what to say about the policy (None: unknown) of the server at `address`; None if the
    server keeps all keys.
    """
    if policy == KEEPS_ALL:
        return None
    if policy is None:
        return (
            f"{label}: this user may read neither INFO nor CONFIG of the Redis server at {address},"
            " so it is not known whether it evicts records. Its maxmemory-policy must be"
            f" {KEEPS_ALL}."
        )
    return (
        f"{label}: the Redis server at {address} may evict records when its memory is full: its"
        f" maxmemory-policy is {policy}. {_STEP}."
    )


def check_eviction(
    label: str, address: str, policy: str | None, conditions: Conditions, *, fenced: bool = False
) -> None:
    """Raise ConfigurationError if keys that conditions or fences depend on may be evicted under
    this policy; an unknown one (None) is accepted.
    """
    wanted = {
        "idempotent": conditions.idempotent or conditions.keeps_marks,
        "newest_by": conditions.newest_by is not None,
        "fenced": fenced,
    }
    needed = next((name for name, is_wanted in wanted.items() if is_wanted), None)
    if needed is None or policy in (KEEPS_ALL, None):
        return
    raise ConfigurationError(
        f"{label}: the Redis server at {address} may evict records when its memory is full, because"
        f" its maxmemory-policy is {policy}. Without what is evicted {needed} can't be kept: old or"
        " repeated messages would be applied.",
        f"{_STEP}; or remove {needed}.",
        argument=needed,
        table=label,
        setting="maxmemory-policy",
    )
