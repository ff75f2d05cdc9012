"""What a dataset was declared as, as earlier releases stored it."""

from __future__ import annotations

import pytest

from dagster_adjunct.assets.versions.stored_declaration import DatasetDeclaration

STORED = {"kind": "bounded", "key": ["k"], "key_types": ["bigint"], "partition_by": ["k"], "input_partitions": 0}


@pytest.mark.parametrize(("source", "computed"), [("query daily", True), ("files in s3://b/query ", False)])
def test_a_declaration_without_the_field_is_computed_where_its_input_is_a_query(source: str, computed: bool) -> None:
    read = DatasetDeclaration.model_validate({**STORED, "input": source})
    assert read.computed is computed
    assert DatasetDeclaration.model_validate_json(read.model_dump_json()) == read


def test_what_is_stored_counts_and_not_the_name_of_the_input() -> None:
    assert not DatasetDeclaration.model_validate({**STORED, "input": "query.s", "computed": False}).computed
