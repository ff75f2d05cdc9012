"""What a key-value table says is wrong, in the errors of an object store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dagster_adjunct.resources.errors import MetadataMovedError, StoreUnavailableError, TableUnavailableError
from dagster_adjunct.resources.key_value_errors import (
    KeyValueTableNotFoundError,
    KeyValueTableSealedError,
    OutcomeUnknownError,
)


@contextmanager
def as_of_a_store() -> Iterator[None]:
    """Raise what a table raises as an object store would; also for decorating functions, not generators.

    A write whose outcome is unknown is a StoreUnavailableError, as it is with a store: it may have happened.
    """
    try:
        yield
    except (TableUnavailableError, OutcomeUnknownError) as error:
        raise StoreUnavailableError(error.problem, error.next_step, table=error.table) from error
    except (KeyValueTableSealedError, KeyValueTableNotFoundError) as error:
        raise MetadataMovedError(
            f"the lake's metadata are not in this key-value table any more: {error.problem}",
            "Open the lake again, in a new process. Where a move has been interrupted, repeat it: adjunct metadata "
            "move --back.",
            table=error.table,
        ) from error
