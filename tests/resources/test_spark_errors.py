"""Errors on their way through Spark, without Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from resources.errors import AdjunctError, PermanentError, StoreUnavailableError, TableAccessError, TransientError
from resources.objects.s3_errors import StoreBusyError, UploadGoneError
from resources.spark_errors import find, wrapped


class OwnError(TableAccessError):
    """As a table function of a user's may raise it."""


@pytest.mark.parametrize(
    ("raised", "kind", "base"),
    [
        (StoreBusyError, StoreUnavailableError, TransientError),
        (UploadGoneError, StoreUnavailableError, TransientError),
        (OwnError, TableAccessError, PermanentError),
    ],
)
def test_an_error_of_a_task_stays_transient_or_permanent_whatever_its_own_class(
    raised: type[AdjunctError], kind: type[AdjunctError], base: type[AdjunctError]
) -> None:
    def task() -> Iterator[int]:
        yield 1
        raise raised("it was slow.", "Run it again.")

    with pytest.raises(RuntimeError) as told:
        list(wrapped(task()))
    found = find(f"org.apache.spark.SparkException: Job aborted: {told.value}")
    assert found is not None
    assert (type(found), found.problem, found.next_step) == (kind, "it was slow.", "Run it again.")
    assert isinstance(found, base)
