"""A mistake in a validator fails the run and its check; the version waits, and is published when
it is corrected.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dagster_adjunct import AdjunctDataset, VersionPartitions, bounded_dataset
from dagster_adjunct.validators import Validator, min_rows, no_nulls
from tests.orchestration.dagster.lab import APPLES, Lab, running_lab


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with running_lab(tmp_path) as lab:
        lab.deliver("orders", [], None)
        yield lab


def items(*validators: Validator, versions: VersionPartitions | None = None) -> AdjunctDataset:
    return bounded_dataset(
        "items",
        input="lake.items",
        key="item",
        partitions=2,
        validators=validators,
        versions=versions,
    )


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "versions", [None, VersionPartitions(names=("v1",))], ids=["one by one", "as partitions"]
)
def test_a_mistake_fails_the_run_and_the_check_of_its_validator(
    lab: Lab, versions: VersionPartitions | None
) -> None:
    options = {} if versions is None else {"partition_key": "v1"}
    lab.deliver("items", APPLES, "v1")
    finished = lab.advance(items(no_nulls("wings"), min_rows(2), versions=versions), **options)
    assert not finished.success
    assert finished.made == {}
    assert (
        "version 'v1': validator 'no_nulls_wings' can't be evaluated"
        in finished.failure.description
    )
    assert finished.failure.metadata["error"].value == "ValidatorError"
    assert finished.passed == {"items no_nulls_wings": False}
    assert "has no column 'wings'" in finished.checks["items no_nulls_wings"].description
    corrected = lab.advance(items(no_nulls("label"), min_rows(2), versions=versions), **options)
    assert corrected.success
    assert corrected.passed == {
        "items adjunct_accepted": True,
        "items no_nulls_label": True,
        "items min_rows": True,
    }
