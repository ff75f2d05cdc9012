"""A manifest is stored flat, with the fields of both kinds in one order, and which kind it is decides what is read."""

import datetime as dt
import json
from typing import Any

import pytest
from pydantic import ValidationError

from dagster_adjunct.assets.versions.deliveries import Abandoned
from dagster_adjunct.assets.versions.manifest import (
    Bootstrap,
    BoundedManifest,
    DatasetManifest,
    UnboundedManifest,
    manifest_from_body,
    manifest_to_body,
)
from dagster_adjunct.assets.versions.version import DatasetDeclaration

NOW = dt.datetime(2026, 11, 22, tzinfo=dt.UTC)
FIELDS = [
    "format", "name", "declaration", "version", "head", "pin", "versions", "delivered", "known", "abandoned",
    "awaited", "doomed", "lost", "stream", "offsets", "bootstrap", "retired", "retained_from", "confirmed_at",
    "horizon", "first_ordered", "positions_from", "quarantining", "applied", "decision", "next_number",
    "next_generation", "counters", "change", "numbers", "written",
]  # fmt: skip
DECLARED: dict[str, Any] = {
    "input": "lake.planes", "key": ("k",), "key_types": ("string",), "partition_by": ("k",), "input_partitions": 1,
}  # fmt: skip
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
def test_a_manifest_is_stored_with_all_fields_in_their_order_and_read_back_as_it_was(manifest: DatasetManifest) -> None:
    stored = json.loads(json.dumps(manifest_to_body(manifest)))
    assert list(stored) == FIELDS
    assert manifest_from_body(stored) == manifest
    assert list(manifest_to_body(manifest_from_body(stored))) == FIELDS


@pytest.mark.parametrize("kind", [BoundedManifest, UnboundedManifest])
def test_no_field_of_a_manifest_is_dropped_when_it_is_stored(kind: type[DatasetManifest]) -> None:
    assert set(kind.model_fields) <= set(FIELDS)


def test_what_only_the_other_kind_has_is_stored_empty() -> None:
    bounded, unbounded = manifest_to_body(BOUNDED), manifest_to_body(UNBOUNDED)
    assert (bounded["bootstrap"], bounded["retained_from"], bounded["applied"], bounded["numbers"]) == (None, 1, {}, [])
    assert (unbounded["head"], unbounded["versions"], unbounded["next_number"]) == (None, [], 1)
    assert (bounded["known"], bounded["next_number"]) == (["v1"], 4)
    assert (unbounded["retained_from"], unbounded["positions_from"]) == (3, 9)


def test_a_table_in_which_a_version_was_abandoned_once_can_be_read() -> None:
    ended = Abandoned(name="v1", reason="a mistake", by="me", at=NOW).model_dump(mode="json")
    assert manifest_from_body(manifest_to_body(UNBOUNDED) | {"abandoned": [ended]}) == UNBOUNDED


def test_a_bounded_dataset_with_a_bootstrap_and_a_table_without_one_are_malformed() -> None:
    bootstrap = manifest_to_body(UNBOUNDED)["bootstrap"]
    with pytest.raises(ValidationError, match="bootstrap"):
        manifest_from_body(manifest_to_body(BOUNDED) | {"bootstrap": bootstrap})
    with pytest.raises(ValidationError, match="bootstrap"):
        manifest_from_body(manifest_to_body(UNBOUNDED) | {"bootstrap": None})
    with pytest.raises(ValidationError, match="declared unbounded"):
        BoundedManifest(name="planes", declaration=UNBOUNDED.declaration, offsets=OFFSETS)
