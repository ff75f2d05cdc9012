"""Runs, without Spark, of an application that adds up amounts in a remote table of any store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from dagster_adjunct import Application, Lake, LakeStreams, Schema, open_lake, run_application
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.orchestration.step.run import RunReport
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable

COLUMNS = {"id": "string", "total": "bigint"}
Totals = Mapping[str, int]


@dataclass
class TableRuns:
    """A lake with one stream of amounts, and the applications that add them to the table in
    `store()`.
    """

    folder: Path
    store: Callable[[], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    _sequence: Any = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.lake: Lake = open_lake(self.folder / "lake")
        self.streams = LakeStreams(self.lake)
        self.streams.create(
            "amounts",
            schema=Schema.of({"id": "string", "amount": "bigint"}),
            key=["id"],
            partitions=1,
        )

    def send(self, *amounts: tuple[str, int]) -> None:
        rows = pa.table(
            {"id": [name for name, _ in amounts], "amount": [amount for _, amount in amounts]}
        )
        self.streams.append("amounts", rows, producer="test", sequence=next(self._sequence))

    def table(self, **options: Any) -> RemoteTable[Any, Any, Any]:
        store = self.store()
        given = {**self.options, **options}
        return RemoteTable("totals", key="id", read_function=store, write_function=store, **given)

    def app(self, name: str = "adding", **options: Any) -> Application:
        app = Application(name, engine="auto")
        table = app.table(self.table(**options))
        amounts = app.input_stream("lake.amounts", default_offset="oldest")
        amounts.update(table, add={"total": "amount"}, if_missing=[])
        return app

    def run(
        self,
        name: str = "adding",
        on_event: Callable[[StepEvent], None] = lambda event: None,
        **options: Any,
    ) -> RunReport:
        def hear(event: object) -> None:
            if isinstance(event, StepEvent):
                on_event(event)

        return run_application(
            self.app(name), lake=self.lake, spark=IN_PROCESS, on_event=hear, adopt=True, **options
        )

    def totals(self) -> dict[str, int]:
        with BlockingTable(self.table()) as table:
            return {name: row["total"] for name, row in table.get_all(["a", "b", "c"]).items()}
