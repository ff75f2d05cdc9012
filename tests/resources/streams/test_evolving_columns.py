"""Columns of lake streams that are renamed, dropped, added again, reordered and widened: everything
is read after each change, with and without Spark, and compared with plain dictionaries.
"""

from __future__ import annotations

import random
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.resources.bucketing.hashing import arrow_checksum
from dagster_adjunct.resources.errors import (
    CommitStateUnknownError,
    ProducerConflictError,
    SchemaMismatchError,
    StoreUnavailableError,
    StreamExistsError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.column_changes import ColumnChanges
from dagster_adjunct.resources.schemas.records import to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy
from dagster_adjunct.resources.streams.lake.readers import read_new
from dagster_adjunct.resources.streams.lake.repartition import repartition
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import AppendOptions, OffsetRange
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.rounds import rounds

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

COLUMNS = Schema.of(
    k="bigint",
    note="string",
    customer={"id": "int", "mail": "string"},
    lines=[{"sku": "string", "n": "int"}],
)
ROW: dict[str, Any] = {
    "k": 1,
    "note": "a",
    "customer": {"id": 7, "mail": "x@y"},
    "lines": [{"sku": "s", "n": 2}, None],
}


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


def _start(lake: Lake) -> LakeStreams:
    streams = LakeStreams(lake)
    streams.create("s", schema=COLUMNS, key=["k"], partitions=2)
    streams.append("s", [ROW], producer="p", sequence=0)
    return streams


def _table(row: dict[str, Any]) -> pa.Table:
    """Return a record with the columns of before."""
    return to_arrow_table([row], "rows", COLUMNS)


def _rows(streams: LakeStreams) -> list[dict[str, Any]]:
    table = streams.read_arrow(streams.all_ranges("s"))
    names = streams.info("s").schema.names
    rows = table.select(names).to_pylist(maps_as_pydicts="strict")
    return sorted(rows, key=lambda row: int(row["k"]))


def _spark_rows(streams: LakeStreams, spark: SparkSession) -> list[dict[str, Any]]:
    frame = streams.read(spark, streams.all_ranges("s")).select(*streams.info("s").schema.names)
    return [row.asDict(recursive=True) for row in frame.orderBy("k").collect()]


def test_records_from_before_have_the_new_names(lake: Lake) -> None:
    streams = _start(lake)
    renamed = {"note": "remark", "customer.mail": "email", "lines[].sku": "item"}
    done = streams.change_columns("s", renamed=renamed, drop=["lines[].n"])
    assert len(done) == 4
    assert _rows(streams) == [
        {
            "k": 1,
            "remark": "a",
            "customer": {"id": 7, "email": "x@y"},
            "lines": [{"item": "s"}, None],
        }
    ]
    assert streams.change_columns("s", renamed=renamed, drop=["lines[].n"]) == ()
    assert streams.log("s").current().number == 3


def test_a_repeated_append_is_found_under_the_new_names(lake: Lake) -> None:
    streams = _start(lake)
    streams.change_columns(
        "s", renamed={"note": "remark", "customer.mail": "email", "lines[].sku": "item"}
    )
    again = {
        "k": 1,
        "remark": "a",
        "customer": {"id": 7, "email": "x@y"},
        "lines": [{"item": "s", "n": 2}, None],
    }
    assert streams.append("s", [again], producer="p", sequence=0).duplicate
    assert streams.append("s", _table(ROW), producer="p", sequence=0).duplicate
    other = {**again, "customer": {"id": 7, "email": "other"}}
    with pytest.raises(ProducerConflictError):
        streams.append("s", [other], producer="p", sequence=0)
    assert len(_rows(streams)) == 1


def test_a_repeated_append_without_a_dropped_column_adds_nothing(lake: Lake) -> None:
    streams = _start(lake)
    streams.change_columns("s", drop=["note", "customer.mail"])
    without = {"k": 1, "customer": {"id": 7}, "lines": [{"sku": "s", "n": 2}, None]}
    assert streams.append("s", [without], producer="p", sequence=0).duplicate
    assert streams.append("s", _table(ROW), producer="p", sequence=0).duplicate
    with pytest.raises(ProducerConflictError):
        streams.append("s", _table({**ROW, "note": "b"}), producer="p", sequence=0)
    for other in ({**without, "k": 2}, {**without, "customer": {"id": 8}}):
        with pytest.raises(ProducerConflictError):
            streams.append("s", [other], producer="p", sequence=0)
    assert streams.append("s", [without], producer="p", sequence=1).rows == 1
    assert _rows(streams) == [without, without]
    repartition(streams, "s", 3, reason="more", by="ada", check=lambda state: None)
    with pytest.raises(ProducerConflictError):  # where the first records are is not known
        streams.append("s", [without], producer="p", sequence=0)


def test_a_producer_with_the_columns_of_before_keeps_working(lake: Lake) -> None:
    streams = _start(lake)
    streams.change_columns("s", renamed={"note": "remark"}, drop=["lines"])
    old = _table({**ROW, "k": 2, "note": "b"})
    streams.append("s", old, producer="old", sequence=0)
    kept = {"customer": {"id": 7, "mail": "x@y"}}
    assert _rows(streams) == [{"k": 1, "remark": "a", **kept}, {"k": 2, "remark": "b", **kept}]


def test_spark_reads_a_part_of_a_stream_whose_columns_were_renamed(
    tmp_path: Path, spark: SparkSession
) -> None:
    streams = LakeStreams(open_lake(str(tmp_path), create=True))
    streams.create("s", schema=COLUMNS, key=["k"], partitions=2)
    for sequence in range(2):
        rows = [{**ROW, "k": 10 * sequence + k} for k in range(10)]
        streams.append("s", rows, producer="p", sequence=sequence)
    streams.change_columns("s", renamed={"note": "remark", "customer.mail": "email"})
    names = ["k", "remark", "customer"]
    for number in range(2):
        (ssp,) = (ssp for ssp in streams.all_ranges("s") if ssp.partition == number)
        end = int(streams.upcoming([ssp])[ssp]) - 1
        ranges = {ssp: OffsetRange("2", str(end))}
        expected = streams.read_arrow(ranges, names).select(names).to_pylist()
        assert len(expected) == end - 2
        found = streams.read(spark, ranges).select(*names).orderBy("__offset").collect()
        assert [row.asDict(recursive=True) for row in found] == expected


def test_spark_repeats_an_append_of_before_a_change(tmp_path: Path, spark: SparkSession) -> None:
    streams = _start(open_lake(str(tmp_path), create=True))
    streams.change_columns("s", renamed={"note": "remark", "lines[].sku": "item"})
    after = Schema.of(
        k="bigint",
        remark="string",
        customer={"id": "int", "mail": "string"},
        lines=[{"item": "string", "n": "int"}],
    )
    row = (1, "a", (7, "x@y"), [("s", 2), None])
    frame = spark.createDataFrame([row], after.ddl())
    ordered = AppendOptions(order_by=["remark"])
    assert streams.append("s", frame, producer="p", sequence=0, options=ordered).duplicate
    streams.change_columns("s", drop=["lines[].n"])
    without = after.types | {"lines": "array<struct<item:string>>"}
    for remark, is_same in (("a", True), ("b", False)):
        row = (1, remark, (7, "x@y"), [("s",), None])
        frame = spark.createDataFrame([row], Schema.of(without).ddl())
        with nullcontext() if is_same else pytest.raises(ProducerConflictError):
            assert streams.append("s", frame, producer="p", sequence=0).duplicate
    row = (1, "a", (7, "x@y"), [("s", 2), None])
    frame = spark.createDataFrame([row], after.ddl())
    assert streams.append("s", frame, producer="p", sequence=0).duplicate
    other = spark.createDataFrame([(1, "b", (7, "x@y"), [("s", 2), None])], after.ddl())
    with pytest.raises(ProducerConflictError):
        streams.append("s", other, producer="p", sequence=0)


def test_an_append_from_before_a_change_commits_after_it(lake: Lake) -> None:
    streams = _start(lake)
    changing = LakeStreams(lake)
    wrote = streams._commit

    def commit_late(*given: Any) -> Any:
        changing.change_columns("s", renamed={"note": "remark"}, drop=["customer"])
        streams._commit = wrote  # type: ignore[method-assign]
        return wrote(*given)

    streams._commit = commit_late  # type: ignore[method-assign]
    streams.append("s", [{**ROW, "k": 2, "note": "b"}], producer="late", sequence=0)
    lines = ROW["lines"]
    assert _rows(streams) == [
        {"k": 1, "remark": "a", "lines": lines},
        {"k": 2, "remark": "b", "lines": lines},
    ]


@pytest.mark.parametrize(
    ("renamed", "drop"),
    [({"k": "key"}, []), ({}, ["k"]), ({"missing": "x"}, []), ({}, ["missing"])],
)
def test_keys_and_unknown_columns_can_not_be_changed(
    lake: Lake, renamed: dict[str, str], drop: list[str]
) -> None:
    streams = _start(lake)
    with pytest.raises(SchemaMismatchError) as caught:
        streams.change_columns("s", renamed=renamed, drop=drop)
    assert caught.value.stream == "lake.s"
    assert streams.info("s").schema == COLUMNS


@pytest.mark.parametrize(
    "renamed",
    [
        {"customer.mail": "customer.email"},
        {"lines[].sku": "lines[].item"},
        {"note": "customer.note"},
        {"customer.mail": "contact.email"},
        {"note": "re.mark"},
    ],
)
def test_a_new_name_is_no_path(lake: Lake, renamed: dict[str, str]) -> None:
    streams = _start(lake)
    with pytest.raises(SchemaMismatchError):
        streams.change_columns("s", renamed=renamed)
    assert streams.info("s").schema == COLUMNS
    streams.change_columns("s", renamed={"note": "`re.mark`"})
    assert "re.mark" in streams.info("s").schema.names


@pytest.mark.parametrize(
    ("path", "named"), [("lines.sku", "lines[].sku"), ("customer.post", "customer.mail")]
)
def test_a_wrong_path_names_the_paths_that_are_there(lake: Lake, path: str, named: str) -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        _start(lake).change_columns("s", renamed={path: "new"})
    assert named in caught.value.problem


def test_columns_are_not_removed_while_a_checksum_covers_them(lake: Lake) -> None:
    streams = _start(lake)
    checksum = arrow_checksum(to_arrow_table([ROW], "rows", COLUMNS), COLUMNS)
    streams.append_markers("s", "v1", producer="p", sequence=1, checksum=checksum)
    with pytest.raises(SchemaMismatchError):
        streams.change_columns("s", drop=["note"])
    streams.change_columns("s", renamed={"note": "remark", "customer.mail": "email"})
    read = streams.read_arrow(streams.all_ranges("s"))
    assert arrow_checksum(read, streams.info("s").schema) == checksum


def test_a_dry_run_tells_the_changes_and_makes_none(lake: Lake) -> None:
    streams = _start(lake)
    done = streams.change_columns("s", renamed={"note": "remark"}, drop=["lines"], dry_run=True)
    assert len(done) == 2
    assert streams.info("s").schema == COLUMNS


def test_create_applies_declared_changes_once(lake: Lake) -> None:
    streams = _start(lake)
    declared = Schema.of(k="bigint", remark="string", lines=[{"sku": "string", "n": "int"}])
    changes = ColumnChanges({"note": "remark"}, ("customer",))
    for _ in range(2):
        info = streams.create("s", schema=declared, key=["k"], partitions=2, changes=changes)
        assert info.schema == declared
    assert streams.log("s").current().number == 3
    with pytest.raises(StreamExistsError):
        streams.create("s", schema=COLUMNS, key=["k"], partitions=2, changes=changes)


@pytest.mark.parametrize("kind", ["crash-before", "crash-after", "lost-after", "lost-before"])
def test_a_change_that_is_interrupted_at_any_request_happens_once(lake: Lake, kind: Any) -> None:
    _start(lake)
    for nth in count(1):
        store = FaultyStore(lake.store, [Fault("*", nth, kind)])
        changes: dict[str, Any] = {"renamed": {"note": f"note{nth}"}, "drop": ["customer"]}
        if nth > 1:
            changes = {"renamed": {f"note{nth - 1}": f"note{nth}"}}
        with suppress(Crash, StoreUnavailableError, CommitStateUnknownError):
            LakeStreams(lake_in(store)).change_columns("s", **changes)
        there = LakeStreams(lake)
        there.change_columns("s", **changes)
        assert _rows(there) == [{"k": 1, f"note{nth}": "a", "lines": ROW["lines"]}]
        if len(store.requests) < nth:
            return


def test_two_changes_at_once_are_both_made(lake: Lake) -> None:
    streams = _start(lake)
    other = LakeStreams(lake)
    rename = Fault(
        "put_if_match", 1, "meanwhile", lambda: other.change_columns("s", renamed={"note": "n"})
    )
    first = LakeStreams(lake_in(FaultyStore(lake.store, [rename])))
    first.change_columns("s", drop=["customer"])
    assert _rows(streams) == [{"k": 1, "n": "a", "lines": ROW["lines"]}]


def test_a_reader_of_before_continues_with_the_new_names(lake: Lake) -> None:
    streams = _start(lake)
    with read_new(lake, "s", reader="r") as batch:
        assert batch.table(["note"]).column("note").to_pylist() == ["a"]
        batch.commit()
    streams.append("s", [{**ROW, "k": 2, "note": "b"}], producer="p", sequence=1)
    late = read_new(lake, "s", reader="r")
    streams.change_columns("s", renamed={"note": "remark"}, drop=["customer.mail"])
    assert late.table(["remark", "customer"]).select([0, 1]).to_pylist() == [
        {"remark": "b", "customer": {"id": 7}}
    ]
    with pytest.raises(SchemaMismatchError):
        late.table(["note"])


def test_records_of_before_are_rewritten_under_the_new_names(lake: Lake) -> None:
    streams = _start(lake)
    streams.change_columns(
        "s", renamed={"note": "remark", "lines[].sku": "item"}, drop=["customer"]
    )
    streams.append("s", [{"k": 2, "remark": "b", "lines": []}], producer="p", sequence=1)
    expected = [
        {"k": 1, "remark": "a", "lines": [{"item": "s", "n": 2}, None]},
        {"k": 2, "remark": "b", "lines": []},
    ]
    repartition(streams, "s", 3, reason="more", by="ada", check=lambda state: None)
    assert _rows(streams) == expected
    changed = Schema.of(**streams.info("s").schema.types, note="int")
    streams.change_columns("s", schema=changed)
    assert _rows(streams) == [{**row, "note": None} for row in expected]


# -- drawn sequences of changes, against dictionaries by column


@dataclass
class _Column:
    """A column or member by identity: its values are found by `id`, whatever its name is now."""

    id: int
    name: str
    type: str = ""
    members: list[_Column] = field(default_factory=list)
    repeated: bool = False

    def text(self) -> str:
        if not self.members:
            return self.type
        struct = ",".join(f"`{each.name}`:{each.text()}" for each in self.members)
        if self.repeated:
            return f"array<struct<{struct}>>"
        return f"struct<{struct}>"


_WIDER = {"int": "bigint", "float": "double", "decimal(5,2)": "decimal(9,2)"}
_VALUES: dict[str, Any] = {
    "int": 5,
    "bigint": 2**40,
    "string": "text",
    "float": 0.5,
    "double": 0.1,
    "boolean": True,
}


class _Model:
    """A stream's columns and rows as plain Python has them, and drawn changes to them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self._ids = count()
        self.columns = [
            self.column("k", "bigint"),
            self.column("a", "int"),
            self.column("b", "string"),
            self.struct("s", repeated=False),
            self.struct("t", repeated=True),
        ]
        self.rows: list[dict[int, Any]] = []

    def column(self, name: str, kind: str) -> _Column:
        return _Column(next(self._ids), name, kind)

    def struct(self, name: str, *, repeated: bool) -> _Column:
        members = [self.column("x", "int"), self.column("y", "string")]
        if not repeated:
            members.append(
                _Column(next(self._ids), "in", members=[self.column("z", self._simple())])
            )
        return _Column(next(self._ids), name, members=members, repeated=repeated)

    def schema(self) -> Schema:
        return Schema.of({each.name: each.text() for each in self.columns})

    def add_row(self) -> dict[str, Any]:
        row = {each.id: self._value(each) for each in self.columns}
        row[self.columns_by_name()["k"].id] = len(self.rows)
        self.rows.append(row)
        return self.shown(row)

    def columns_by_name(self) -> dict[str, _Column]:
        return {each.name: each for each in self.columns}

    def shown(self, row: dict[int, Any]) -> dict[str, Any]:
        return {each.name: self._show(each, row.get(each.id)) for each in self.columns}

    def _show(self, column: _Column, value: Any) -> Any:
        if value is None or not column.members:
            return value
        if column.repeated:
            return [self._show_struct(column, each) for each in value]
        return self._show_struct(column, value)

    def _show_struct(self, column: _Column, value: Any) -> Any:
        if value is None:
            return None
        return {each.name: self._show(each, value.get(each.id)) for each in column.members}

    def _simple(self) -> str:
        return self.draw.choice(list(_VALUES))

    def _value(self, column: _Column) -> Any:
        if self.draw.random() < 0.15:
            return None
        if not column.members:
            return _VALUES[column.type]
        if column.repeated:
            return [self._struct_value(column) for _ in range(self.draw.randrange(3))]
        return self._struct_value(column)

    def _struct_value(self, column: _Column) -> Any:
        if self.draw.random() < 0.15:
            return None
        return {each.id: self._value(each) for each in column.members}

    def change(self) -> dict[str, Any]:
        """Change the columns, and return how a user declares that."""
        path, siblings = self.draw.choice(list(self._lists("", self.columns)))
        changeable = [each for each in siblings if each.name != "k"]
        column = self.draw.choice(changeable) if changeable else None
        kind = self.draw.choice(["rename", "drop", "add", "add", "reorder", "widen"])
        if kind == "rename" and column is not None:
            before = f"{path}{column.name}"
            column.name = self._new_name(siblings)
            return {"renamed": {before: column.name}}
        if kind == "drop" and column is not None and len(siblings) > 1:
            siblings.remove(column)
            return {"drop": [f"{path}{column.name}"]}
        if kind == "widen" and column is not None and column.type in _WIDER:
            column.type = _WIDER[column.type]
        elif kind == "reorder":
            self.draw.shuffle(siblings)
        else:
            name = self._new_name(siblings)
            new = self.column(name, self._simple())
            if self.draw.random() < 0.3:
                new = self.struct(name, repeated=self.draw.random() < 0.5)
            siblings.insert(self.draw.randrange(len(siblings) + 1), new)
        return {"schema": self.schema()}

    def _new_name(self, siblings: list[_Column]) -> str:
        taken = {each.name for each in siblings}
        return self.draw.choice([name for name in "abcdefstxyz" if name not in taken])

    def _lists(self, path: str, columns: list[_Column]) -> Any:
        yield path, columns
        for each in columns:
            if each.members:
                step = "[]." if each.repeated else "."
                yield from self._lists(f"{path}{each.name}{step}", each.members)


def _check_rounds(
    lake: Lake, model: _Model, rounds: int, spark: SparkSession | None = None
) -> LakeStreams:
    streams = LakeStreams(lake)
    streams.create("s", schema=model.schema(), key=["k"], partitions=2)
    sequence = count()
    for _ in range(rounds):
        rows = [model.add_row() for _ in range(2)]
        before = model.schema()
        table = to_arrow_table(rows, "rows", before)
        streams.append("s", table, producer="p", sequence=next(sequence))
        declared = model.change()
        streams.change_columns("s", **declared)
        assert streams.info("s").schema == model.schema()
        if model.draw.random() < 0.2:
            compaction = CompactionPolicy(min_segments=2)
            streams.configure("s", retention=None, compaction=compaction)
            streams.maintain("s")
        expected = [model.shown(row) for row in model.rows]
        assert _rows(streams) == expected
        if spark is not None:
            assert _spark_rows(streams, spark) == expected
    return streams


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("seed", rounds(range(6), range(400)))
def test_drawn_changes_keep_every_value_under_its_present_name(lake: Lake, seed: int) -> None:
    _check_rounds(lake, _Model(seed), 12)


@pytest.mark.rounds
@pytest.mark.parametrize("seed", rounds(range(1000, 1002), range(1000, 1030)))
def test_spark_reads_the_same_after_drawn_changes(
    tmp_path: Path, spark: SparkSession, seed: int
) -> None:
    _check_rounds(open_lake(str(tmp_path), create=True), _Model(seed), 10, spark)
