"""What a stored dataset says of itself, and what is refused when its documents are not what they
should be.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from dagster_adjunct.assets.declaration.dataset import QuerySource, bounded_dataset
from dagster_adjunct.assets.declaration.policies import VersionPartitions
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.key_lookup import coerce_key, decode_key, key_from_text
from dagster_adjunct.assets.reading.stored_versions import StoredVersions, list_datasets
from dagster_adjunct.resources.errors import (
    DatasetError,
    DatasetNotFoundError,
    MalformedDocumentError,
    NoSealedVersionError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.objects.commit_log import seal_json, unseal_json
from dagster_adjunct.resources.reports import to_json_value
from dagster_adjunct.resources.schemas.schema import Field, Schema
from tests.assets.conftest import World

PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=2)


def sealed(world: World) -> World:
    world.stream("planes", Schema.of(tailnum="string", seats="int"), ["tailnum"], 2)
    world.mark("planes", "v1", [0, 1])
    world.advance(PLANES)
    return world


def manifest_of(world: World, name: str) -> Path:
    (manifest,) = (item.key for item in world.lake.store.list(f"datasets/{name}/manifests/"))
    return Path(world.lake.url) / manifest


def test_datasets_are_listed_and_described_from_what_is_stored(world: World) -> None:
    assert list_datasets(world.lake) == []
    sealed(world)
    assert list_datasets(world.lake) == ["planes"]
    described = open_dataset(world.lake, "planes").describe()
    assert described["declaration"]["key"] == ["tailnum"]
    assert described["version"]["name"] == "v1"
    assert described["offsets"] == {"lake.planes.0": "1", "lake.planes.1": "1"}
    json.dumps(described)


def test_a_dataset_whose_manifest_can_not_be_read_is_listed_next_to_the_others(
    world: World,
) -> None:
    sealed(world)
    world.stream("crews", Schema.of(tailnum="string", seats="int"), ["tailnum"], 2)
    world.advance(bounded_dataset("crews", input="lake.crews", key="tailnum", partitions=2))
    body = manifest_of(world, "planes")
    body.write_bytes(body.read_bytes().replace(b'"offsets"', b'"offset"'))
    assert list_datasets(world.lake) == ["crews", "planes"]
    assert open_dataset(world.lake, "crews").describe()["name"] == "crews"
    with pytest.raises(MalformedDocumentError) as caught:
        open_dataset(world.lake, "planes")
    assert "datasets/planes/manifests/" in str(caught.value.document)
    with pytest.raises(DatasetNotFoundError, match="there are: crews, planes"):
        open_dataset(world.lake, "plans")
    body.write_bytes(b"{")
    assert list_datasets(world.lake) == ["crews", "planes"]


QUERY = QuerySource("SELECT …", Schema.of(tailnum="string", seats="int"))


@pytest.mark.parametrize(
    ("versions", "named"),
    [
        (None, ["has not run yet", "Materialise its asset", "dataset advance fleet MODULE:APP."]),
        (
            VersionPartitions("day", start="2026-01-01"),
            ["2026-01-01 is the first", "--partition NAME"],
        ),
        (
            VersionPartitions("name", names=("q1", "q2")),
            ["none has been materialised", "its asset (q1, q2"],
        ),
        (
            VersionPartitions("name"),
            ["none has been materialised", "Materialise a partition of its asset"],
        ),
    ],
)
def test_what_a_query_computes_waits_for_somebody_who_asks_for_it(
    world: World, versions, named: list[str]
) -> None:
    spec = bounded_dataset("fleet", input=QUERY, key="tailnum", broadcast=True, versions=versions)
    for systems in (None, {}):
        with pytest.raises(NoSealedVersionError) as caught:
            StoredVersions(world.lake, spec).require_current(systems)
        assert "marke" not in str(caught.value)
        for text in named:
            assert text in str(caught.value)


def test_a_dataset_that_is_not_there_is_named_with_those_that_are(world: World) -> None:
    sealed(world)
    with pytest.raises(DatasetNotFoundError, match=r"no dataset 'plans' in .*; there are: planes"):
        open_dataset(world.lake, "plans")


def test_a_version_that_is_not_there_is_named_with_the_current_one(world: World) -> None:
    current = sealed(world).view(PLANES).version
    with pytest.raises(
        DatasetError, match=f"no version 'v000009-x'; the newest retained are {current}"
    ):
        StoredVersions(world.lake, PLANES).version("v000009-x")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda body: body.pop("offsets"), "offsets"),
        (lambda body: body.update(surprise=1), "surprise"),
        (lambda body: body.update(name="other"), "describes the dataset 'other'"),
        (
            lambda body: body["version"].update(key=["nothing"]),
            "key column 'nothing' is not among the columns",
        ),
        (
            lambda body: body["version"]["columns"][0].update(type="text"),
            "'tailnum' has type 'text'",
        ),
        (lambda body: body["version"].update(generations=[{"id": 1}]), "generation"),
        (lambda body: body["offsets"].pop("lake.planes.0"), "it has offsets of 1 partitions"),
        (lambda body: body.update(next_generation=1), "next_generation is 1"),
        (lambda body: body.update(versions=[]), "is not among the retained"),
    ],
)
def test_a_malformed_manifest_is_refused_and_says_what_is_wrong_where(
    world: World, change, named: str
) -> None:
    sealed(world)
    path = manifest_of(world, "planes")
    content = unseal_json(path.read_bytes())
    assert content is not None
    document = json.loads(content)
    change(document["body"])
    path.write_bytes(seal_json(json.dumps(document).encode()))
    with pytest.raises(MalformedDocumentError) as caught:
        world.view(PLANES)
    assert path.relative_to(world.lake.url).as_posix() in str(caught.value)
    assert named in str(caught.value)
    with pytest.raises(MalformedDocumentError):
        world.advance(PLANES)


def test_a_report_is_plain_json(world: World) -> None:
    sealed(world)
    report = world.advance(PLANES)
    assert json.loads(json.dumps(report.to_json()))["action"] == "up-to-date"
    assert "nothing new was delivered" in report.summary()


LARGE = Decimal("123456789012345678901234567890.12")
KEYS = [
    ("bigint", 2**40, str(2**40)), ("tinyint", -128, "-128"), ("string", "a b", "a b"),
    ("decimal(38,2)", LARGE, str(LARGE)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "text"), KEYS)
def test_a_key_survives_text_and_manifest(kind: str, value: object, text: str) -> None:
    fields = [Field("k", kind)]
    assert key_from_text("dataset", fields, [text]) == (value,)
    assert decode_key([kind], to_json_value([value])) == (value,)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("int", 2**31), ("int", True), ("int", 1.0), ("int", "1"), ("decimal(5,2)", 1000)],
)
def test_values_that_do_not_fit_the_declared_type_are_refused(kind: str, value: object) -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        coerce_key("dataset", [Field("k", kind)], value)
    assert caught.value.column == "k"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("date", "tomorrow"), ("date", "20260131"), ("bigint", "1_000"), ("bigint", "\u0663"), ("bigint", "0x1F"),
        ("int", " 1"), ("decimal(5,2)", "1_0"), ("decimal(5,2)", "NaN"), ("decimal(5,2)", "\u0663"),
        ("timestamp", "20260131T100000Z"), ("timestamp", "2026-01-31T10:00:00+01:70"), ("binary", "YQ"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_value_of_the_keys_type_is_refused(kind: str, text: str) -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        key_from_text("dataset", [Field("k", kind)], [text])
    assert caught.value.column == "k"
