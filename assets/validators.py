"""Validators: what must hold of a version before anybody can read it (rule 12)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from assets.manifest import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from assets.view import DatasetView


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version that is built and not published, beside the one that is served now (None before the first).

    `view` reads it whole or by key; `view.sealed.counters` has `read`, `superseded` (records that a later one of
    the same key replaced) and `deleted`. `spark` starts the session where a validator needs one.
    """

    view: DatasetView
    current: DatasetView | None
    spark: Callable[[], SparkSession]


@runtime_checkable
class Validator(Protocol):
    """Looks at a candidate and says whether it may be published. A frozen value; `name` is unique in a dataset."""

    @property
    def name(self) -> str: ...

    def __call__(self, candidate: Candidate) -> Verdict: ...
