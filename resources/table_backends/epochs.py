"""The epochs of runs in a table's book-keeping, by which a store refuses writes of a run that has
lost its lease.

With `RemoteTable(…, fenced=True)` each write of a run checks, in its own request, that no later run
of the application has announced a greater epoch. A run announces its epoch before its first write
(`TableFunction.begin_run`).
"""

from __future__ import annotations

from dagster_adjunct.resources.errors import TableAccessError
from dagster_adjunct.resources.objects.fence import Fence, lease_lost_error


def epoch_name(fence: Fence) -> str:
    """Return the name of the application's epoch in the book-keeping."""
    return f"epoch of {fence.application}"


def must_raise_epoch(label: str, known: int | None, fence: Fence) -> bool:
    """Whether the store must raise the epoch that it knows (None: none). RunLeaseLostError if it
    is a later run's.
    """
    if known is not None and known > fence.epoch:
        problem = (
            f"a later run writes {label}, with the epoch {known} after {fence.epoch} of this one"
        )
        raise lease_lost_error(fence.application, fence.run, problem)
    return known is None or known < fence.epoch


def no_bookkeeping_error(label: str, name: str | None, columns: str) -> TableAccessError:
    """Return the error for a fenced table that has no book-keeping; `name` is None if its own
    name is too long.
    """
    if name is None:
        problem = (
            f"{label}: its name is too long for a table with the epochs of runs, which fenced=True"
            " needs."
        )
        return TableAccessError(problem, "Use a shorter name, or remove fenced=True.", table=label)
    problem = (
        f"{label}: fenced=True needs a table {name!r} with the columns {columns}; there is none."
    )
    return TableAccessError(
        problem, "Declare the table with create=True, or create that table.", table=label
    )
