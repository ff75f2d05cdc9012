"""Reading one version: by key without Spark, whole with Spark, and what happens when files are
not what they were.
"""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.key_lookup import key_from_text
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ManifestMismatchError,
    NullKeyError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World

PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=2)


def sealed(world: World, rows: int = 20) -> World:
    world.stream("planes", Schema.of(tailnum="string", seats="int"), ["tailnum"], 2)
    world.send("planes", [(f"N{n}", n) for n in range(rows)], version="v1")
    world.advance(PLANES)
    return world


def files(world: World) -> list[Path]:
    folder = Path(world.lake.url) / world.view(PLANES).sealed.generations[0].folder
    return sorted(folder.iterdir())


@pytest.mark.spark
def test_reading_by_key_imports_no_spark(sparkling: World) -> None:
    world = sealed(sparkling)
    code = (
        "import sys\n"
        "from dagster_adjunct.assets.reading.dataset import open_dataset\n"
        "from dagster_adjunct.resources.objects.lake import open_lake\n"
        f"view = open_dataset(open_lake({world.lake.url!r}), 'planes')\n"
        "assert view.get('N7') == {'tailnum': 'N7', 'seats': 7}, view.get('N7')\n"
        "assert sorted(view.get_all(['N1', 'N2', 'X'])) == ['N1', 'N2']\n"
        f"with open_dataset(open_lake({world.lake.url!r}), 'planes') as served, served.watch():\n"
        "    assert dict(served.items('N7')) == {'N7': {'tailnum': 'N7', 'seats': 7}}\n"
        "assert not {'pyspark', 'py4j', 'boto3'} & set(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=300
    )


@pytest.mark.lengthy
def test_importing_the_floor_imports_nothing_heavy() -> None:
    code = (
        "import sys, dagster_adjunct.assets; print({'pyspark', 'pandas', 'boto3', 'pyarrow', 'numpy'} &"
        " set(sys.modules) or '')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == ""


@pytest.mark.spark
def test_a_lookup_in_a_file_of_many_row_groups_reads_one_of_them(
    sparkling: World, monkeypatch
) -> None:
    monkeypatch.setattr("dagster_adjunct.resources.bucketing.writer.ROWS_PER_GROUP", 4_096)
    world = sparkling
    world.stream("wide", Schema.of(k="bigint", v="int"), ["k"], 1)
    spec = bounded_dataset("wide", input="lake.wide", key="k", partitions=1)
    world.send("wide", [(n, n) for n in range(12_500)], version="v1")
    world.advance(spec)
    view = world.view(spec)
    read: list[int] = []
    import pyarrow.parquet as pq

    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, i, **more: (read.append(i), original(self, i, **more))[1],
    )
    assert view.get(9_400) == {"k": 9_400, "v": 9_400}
    assert view.get(9_401) == {"k": 9_401, "v": 9_401}
    assert view.get(12_500) is None
    assert len(read) == 1


@pytest.mark.spark
def test_keys_of_every_type_are_found_where_spark_put_them(sparkling: World) -> None:
    world = sparkling
    schema = Schema.of(
        s="string", b="bigint", d="date", t="timestamp", m="decimal(9,2)", x="binary", v="int"
    )
    world.stream("typed", schema, ["s", "b"], 2)
    spec = bounded_dataset(
        "typed", input="lake.typed", key=["t", "d", "s", "b", "m", "x"], partitions=5
    )
    begin = dt.datetime(2013, 1, 1, tzinfo=dt.UTC)
    rows = [
        (
            f"é{n}" * (n % 5),
            n,
            dt.date(2000, 1, 1 + n),
            begin + dt.timedelta(microseconds=n),
            Decimal(n) / 4,
            bytes(range(n)),
            n,
        )
        for n in range(25)
    ]
    world.send("typed", rows, version="v1")
    world.advance(spec)
    view = world.view(spec)
    for s, b, d, t, m, x, v in rows:
        entry = view.get({"s": s, "b": b, "d": d, "t": t, "m": m, "x": x})
        assert entry is not None
        assert entry["v"] == v
        texts = [
            t.isoformat(),
            d.isoformat(),
            s,
            str(b),
            str(m),
            __import__("base64").b64encode(x).decode(),
        ]
        assert view.get(key_from_text("typed", view._key, texts)) == entry
    assert view.frame(world.spark()).count() == 25


@pytest.mark.spark
def test_a_key_of_another_type_is_an_error_and_never_a_miss(sparkling: World) -> None:
    view = sealed(sparkling).view(PLANES)
    with pytest.raises(SchemaMismatchError) as caught:
        view.get(7)
    assert caught.value.column == "tailnum"
    with pytest.raises(SchemaMismatchError) as caught:
        view.get(("N1", "N2"))
    assert caught.value.argument == "key"
    with pytest.raises(SchemaMismatchError) as caught:
        view.get({"seats": 1})
    assert caught.value.argument == "key"
    with pytest.raises(NullKeyError):
        view.get(None)


@pytest.mark.parametrize("key", [{"tailnum": "N1"}, ["N1"]])
def test_keys_that_an_answer_can_not_have_are_refused(world: World, key: object) -> None:
    world.spark = IN_PROCESS
    view = sealed(world).view(PLANES)
    assert view.get(key) == {"tailnum": "N1", "seats": 1}
    with pytest.raises(ConfigurationError, match="as a tuple") as caught:
        view.get_all([key])
    assert caught.value.argument == "keys"


@pytest.mark.spark
def test_a_stray_file_in_the_folder_is_refused(sparkling: World) -> None:
    world = sealed(sparkling)
    one = files(world)[0]
    (one.parent / one.name.replace("part-00000", "part-00009")).write_bytes(one.read_bytes())
    with pytest.raises(ManifestMismatchError) as caught:
        world.view(PLANES).frame(world.spark())
    stray = one.parent / one.name.replace("part-00000", "part-00009")
    assert str(stray).endswith(f"/{caught.value.key}")
    assert str(caught.value.key).startswith("datasets/")
    assert world.view(PLANES).get("N1") is not None, (
        "a reader by key opens only what the manifest lists"
    )


@pytest.mark.spark
def test_a_missing_file_is_named(sparkling: World) -> None:
    world = sealed(sparkling)
    names = [file.name for file in files(world)]
    for file in files(world):
        file.unlink()
    with pytest.raises(ManifestMismatchError) as caught:
        world.view(PLANES).frame(world.spark())
    assert str(caught.value.key).rsplit("/", 1)[-1] in names
    with pytest.raises(ManifestMismatchError) as caught:
        world.view(PLANES).get("N1")
    assert str(caught.value.key).rsplit("/", 1)[-1] in names


@pytest.mark.spark
def test_a_damaged_file_is_named(sparkling: World) -> None:
    world = sealed(sparkling)
    names = [file.name for file in files(world)]
    for file in files(world):
        file.write_bytes(b"PAR1" + b"x" * 60 + file.read_bytes()[64:])
    with pytest.raises(ManifestMismatchError) as caught:
        world.view(PLANES).get("N1")
    assert str(caught.value.key).rsplit("/", 1)[-1] in names


@pytest.mark.spark
def test_names_and_values_with_odd_characters_come_back_as_they_were(sparkling: World) -> None:
    world = sparkling
    schema = Schema(Schema.of({"the.key": "string", "a`b": "string"}).fields)
    world.stream("odd", schema, ["the.key"], 2)
    spec = bounded_dataset("odd", input="lake.odd", key="`the.key`", partitions=2)
    rows = [("a/b", "it's"), ("50%", 'q"'), ("ключ", "\\")]
    world.send("odd", rows, version="v1")
    world.advance(spec)
    view = open_dataset(world.lake, "odd")
    assert sorted(map(tuple, view.frame(world.spark()).collect())) == sorted(rows)
    assert view.get("ключ") == {"the.key": "ключ", "a`b": "\\"}


@pytest.mark.spark
def test_threads_may_share_a_view(sparkling: World) -> None:
    from concurrent.futures import ThreadPoolExecutor

    view = StoredVersions(sealed(sparkling, 200).lake, "planes").current()
    with ThreadPoolExecutor(8) as pool:
        seats = list(pool.map(lambda n: view.get(f"N{n}")["seats"], [*range(200)] * 3))
    assert seats == [*range(200)] * 3


@pytest.mark.spark
def test_a_version_read_again_and_again_outlives_the_tables_of_others(
    sparkling: World, monkeypatch
) -> None:
    monkeypatch.setattr("dagster_adjunct.resources.bucketing.files._MAX_TABLES", 3)
    world = sealed(sparkling)
    view = world.view(PLANES)
    for number in range(2, 6):
        frame = view.frame(world.spark())
        world.send("planes", [("N1", number)], version=f"v{number}")
        world.advance(PLANES)
        assert frame.count() == 20
