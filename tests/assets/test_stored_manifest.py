"""A manifest is stored with the fields of its kind, which the stored declaration tells."""

import datetime as dt
import json
from typing import Any

import pytest
from pydantic import ValidationError

from dagster_adjunct.assets.versions.manifest import (
    Bootstrap,
    BoundedManifest,
    DatasetManifest,
    UnboundedManifest,
    manifest_from_body,
)
from dagster_adjunct.assets.versions.version import DatasetDeclaration

NOW = dt.datetime(2026, 11, 22, tzinfo=dt.UTC)
DECLARED: dict[str, Any] = {
    "input": "lake.planes",
    "key": ("k",),
    "key_types": ("string",),
    "partition_by": ("k",),
    "input_partitions": 1,
}
OFFSETS = {"lake.planes.0": "7"}
BOUNDED = BoundedManifest(
    name="planes",
    declaration=DatasetDeclaration(kind="bounded", **DECLARED),
    offsets=OFFSETS,
    known=("v1",),
    next_number=4,
)
UNBOUNDED = UnboundedManifest(
    name="planes",
    declaration=DatasetDeclaration(kind="unbounded", **DECLARED),
    offsets=OFFSETS,
    bootstrap=Bootstrap(state="done", start=OFFSETS, target=OFFSETS, started_at=NOW),
    retained_from=3,
    positions_from=9,
)


@pytest.mark.parametrize("manifest", [BOUNDED, UNBOUNDED], ids=["bounded", "unbounded"])
def test_a_manifest_is_stored_with_all_its_fields_and_read_back_as_it_was(
    manifest: DatasetManifest,
) -> None:
    stored = json.loads(json.dumps(manifest.model_dump(mode="json")))
    assert list(stored) == list(type(manifest).model_fields)
    assert manifest_from_body(stored) == manifest


def test_a_bounded_dataset_with_a_bootstrap_and_a_table_without_one_are_malformed() -> None:
    bounded, unbounded = BOUNDED.model_dump(mode="json"), UNBOUNDED.model_dump(mode="json")
    for body in (bounded | {"bootstrap": unbounded["bootstrap"]}, unbounded | {"bootstrap": None}):
        with pytest.raises(ValidationError) as failure:
            manifest_from_body(body)
        assert [problem["loc"] for problem in failure.value.errors()] == [("bootstrap",)]
    with pytest.raises(ValidationError, match="declared unbounded"):
        BoundedManifest(name="planes", declaration=UNBOUNDED.declaration, offsets=OFFSETS)
