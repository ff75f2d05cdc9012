"""Drawn histories of tables: appends, compactions, changes of columns, and looks at any time."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from tests.resources.file_streams.table_lab import DeltaLab, IcebergLab, Reader, Row, compact
from tests.rounds import rounds

pytest_plugins = ["tests.resources.file_streams.table_lab"]


class Story:
    """What a table should have given: by column id, which a rename keeps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = {0: "id", 1: "c1"}
        self.rows: list[dict[int, Any]] = []
        self.parts: list[int] = []
        self.columns = 2

    def draw(self) -> pa.Table:
        """Return rows to append, with the columns of now."""
        count = self.random.randrange(1, 6)
        drawn = []
        for _ in range(count):
            row: dict[int, Any] = {column: f"{self.random.random()}" for column in self.names}
            row[0] = str(len(self.rows) + len(drawn))
            drawn.append(row)
        self.rows += drawn
        self.parts.append(count)
        names = list(self.names.items())
        return pa.table({name: [row[column] for row in drawn] for column, name in names})

    def add(self) -> str:
        name = f"c{self.columns}"
        self.names[self.columns] = name
        self.columns += 1
        return name

    def rename(self) -> tuple[str, str]:
        column = self.random.choice([one for one in self.names if one])
        old = self.names[column]
        self.names[column] = f"r{self.random.randrange(10**9)}"
        return old, self.names[column]

    def drop(self) -> str:
        return self.names.pop(self.random.choice([one for one in self.names if one]))

    def expected(self, columns: dict[str, int]) -> list[Row]:
        return [{name: row.get(column) for name, column in columns.items()} for row in self.rows]


def check(story: Story, early: Reader, columns: dict[str, int], late: Reader) -> None:
    """A stream that was declared first, and has looked at any time, and one that looks now, have
    each record once, in order, with the columns that are theirs.
    """
    assert early.rows() == story.expected(columns)
    now = {name: column for column, name in story.names.items()}
    assert sorted(late.rows(), key=repr) == sorted(story.expected(now), key=repr)


@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(3, 30)))
def test_a_history_of_an_iceberg_table(iceberg: IcebergLab, seed: int) -> None:
    from pyiceberg.types import StringType

    story = Story(seed)
    table = iceberg.create(pa.schema([("id", pa.string()), ("c1", pa.string())]))
    stream = iceberg.stream()
    stream.rows()
    for _ in range(12):
        act = story.random.choice(["append"] * 5 + ["compact", "add", "rename", "drop", "look"])
        table = iceberg.load()
        if act == "append":
            table.append(story.draw())
        elif act == "compact" and story.rows:
            compact(table)
        elif act == "add":
            with table.update_schema() as update:
                update.add_column(story.add(), StringType())
        elif act == "rename" and len(story.names) > 1:
            with table.update_schema() as update:
                update.rename_column(*story.rename())
        elif act == "drop" and len(story.names) > 2:
            with table.update_schema() as update:
                update.delete_column(story.drop())
        elif act == "look":
            stream.rows()
    check(story, stream, {"id": 0, "c1": 1}, iceberg.stream())


@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(3, 30)))
def test_a_history_of_a_delta_table(delta: DeltaLab, seed: int) -> None:
    story = Story(seed)
    delta.write(story.draw())
    stream = delta.stream(start="oldest")
    stream.rows()
    for _ in range(12):
        act = story.random.choice(["append"] * 5 + ["compact", "add", "checkpoint", "look"])
        if act == "append":
            delta.write(story.draw())
        elif act == "compact":
            delta.load().optimize.compact()
        elif act == "add":
            story.add()
            delta.write(story.draw(), schema_mode="merge")
        elif act == "checkpoint":
            delta.load().create_checkpoint()
        else:
            stream.rows()
    check(story, stream, {"id": 0, "c1": 1}, delta.stream())
