"""`DatasetTable`: a dataset's entries by key, as the records of a table that is only read."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.reading.entry_keys import coerce_key
from dagster_adjunct.assets.reading.open_dataset import Dataset, open_dataset
from dagster_adjunct.resources.backends import register_backend
from dagster_adjunct.resources.checked_numbers import check_seconds
from dagster_adjunct.resources.errors import ConfigurationError, NullKeyError, SchemaMismatchError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.tables.key_columns import in_own_order
from dagster_adjunct.resources.tables.layer import Capabilities
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, RowEntries
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State
from dagster_adjunct.resources.tables.table_functions import TableReadFunction, check_args

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake


class DatasetTable(TableReadFunction[Any, dict[str, Any]]):
    """Read function over a served dataset: `RemoteTable("planes", key="tailnum", read_function=DatasetTable(…))`.

    The keys of one request are read together, of one version. That version is leased while it is read from, and left
    for the one that is served by then when a request comes more than `refresh_every` seconds after the last look (one
    request of its own); None: only when the table is closed and opened again. With `version`, an id or a name, it is
    that version for good. Threads and event loops share the open dataset; what they read is kept for all of them.

    A dataset is written by whoever publishes it: such a table has no write function, and a write is refused.
    """

    def __init__(
        self, lake: Lake | str, dataset: str, *, version: str | None = None, refresh_every: float | None = 5.0
    ) -> None:
        self.lake, self.dataset, self.version, self.refresh_every = lake, dataset, version, refresh_every
        what = f"the table of dataset {dataset!r} has refresh_every={refresh_every!r}"
        check_seconds(refresh_every, what, argument="refresh_every", none=True, zero=True)
        self._begin()

    def _begin(self) -> None:
        self._open: _Used | None = None
        self._looked = 0.0
        self._moving = threading.Lock()  # held while the dataset is opened, refreshed or closed

    def __repr__(self) -> str:
        return f"DatasetTable({self._url!r}, {self.dataset!r})"

    @property
    def _url(self) -> str:
        return self.lake if isinstance(self.lake, str) else self.lake.url

    def to_dict(self) -> dict[str, Any]:
        """The declaration as plain values."""
        settings = {"version": self.version, "refresh_every": self.refresh_every}
        return {"lake": self._url, "dataset": self.dataset, **settings}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_open", "_looked", "_moving")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def column_types(self) -> dict[str, str] | None:
        opened = self._open
        return None if opened is None else {field.name: field.type for field in opened.dataset.schema.fields}

    def problem_of(self, error: BaseException, *, sent: bool = True) -> Problem:
        return super().problem_of(error, sent=False)  # what only reads had no effect

    async def close(self) -> None:
        """Give the lease back when the requests that read have ended; the next one opens the dataset again."""
        await asyncio.to_thread(self._close)

    async def get(self, key: Any, *args: object) -> dict[str, Any] | None:
        return (await self.get_all([key], *args)).get(key)

    async def get_all(self, keys: Sequence[Any], *args: object) -> dict[Any, dict[str, Any]]:
        gets = Operation(OperationKind.GET, RowEntries(list(keys)), args)
        check_args(self, gets)
        outcomes = await self.send(gets)
        for problem in outcomes.problems.values():
            if problem.error is not None:
                raise problem.error
        records = outcomes.records or ()
        return {key: record for key, record in zip(keys, records, strict=True) if record is not None}

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if operation.kind.writes:
            raise ConfigurationError(
                f"dataset {self.dataset!r} is read as a table, and was asked to {operation.kind.value}.",
                "Publish to the stream or the files that it is made of.",
                dataset=self.dataset,
            )
        try:
            return await asyncio.to_thread(self._read, operation)
        except ConfigurationError:
            raise
        except Exception as error:  # noqa: BLE001 - it becomes the outcome
            return Outcomes.all(len(operation), self.problem_of(error))

    def _read(self, operation: Operation[Any]) -> Outcomes:
        used = self._enter()
        try:
            keys = operation.entries.keys
            if ordered := in_own_order(f"dataset {self.dataset!r}", used.dataset.sealed.key, operation.key):
                keys = list(map(ordered, keys))
            misfits: dict[int, Problem] = {}
            try:
                entries = used.dataset.get_all(keys)
            except (SchemaMismatchError, NullKeyError):
                misfits = self._misfits(used.dataset, keys)
                entries = used.dataset.get_all([key for place, key in enumerate(keys) if place not in misfits])
            values = [None if place in misfits else entries.get(key) for place, key in enumerate(keys)]
            return Outcomes(len(keys), values, misfits)
        finally:
            self._leave(used)

    def _misfits(self, opened: Dataset, keys: Sequence[Any]) -> dict[int, Problem]:
        """The places of keys that are none of the dataset's."""
        fields = [opened.schema.field(name) for name in opened.sealed.key]
        misfits: dict[int, Problem] = {}
        for place, key in enumerate(keys):
            try:
                coerce_key(f"dataset {self.dataset!r}", fields, key)
            except (SchemaMismatchError, NullKeyError) as error:
                misfits[place] = Problem(State.REFUSED, error)
        return misfits

    def _enter(self) -> _Used:
        """The open dataset for one request, which leaves it in the end."""
        with self._moving:
            if self._open is None:
                lake = open_lake(self.lake, create=False) if isinstance(self.lake, str) else self.lake
                self._open = _Used(open_dataset(lake, self.dataset, version=self.version))
                self._looked = time.monotonic()
            elif self._is_due():
                self._open.dataset.refresh()
                self._looked = time.monotonic()
            self._open.by += 1
            return self._open

    def _is_due(self) -> bool:
        """Whether it is time to look which version is served."""
        every = None if self.version is not None else self.refresh_every
        return every is not None and time.monotonic() - self._looked >= every

    def _leave(self, used: _Used) -> None:
        with self._moving:
            used.by -= 1
            over = not used.by and used is not self._open
        if over:
            used.dataset.close()

    def _close(self) -> None:
        with self._moving:
            used, self._open = self._open, None
            over = used is not None and not used.by
        if used is not None and over:
            used.dataset.close()


@dataclass(slots=True, eq=False)
class _Used:
    """An open dataset, and how many requests read from it."""

    dataset: Dataset
    by: int = 0


register_backend("dataset", DatasetTable)
