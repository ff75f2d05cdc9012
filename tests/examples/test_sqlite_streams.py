"""The example of a stream system, in a SQLite file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.errors import StreamExistsError
from dagster_adjunct.examples.sqlite_streams import SqliteStreams
from dagster_adjunct.resources.schemas.schema import Schema

DECLARED: dict[str, Any] = {
    "schema": Schema.of(sensor="string", celsius="double"),
    "key": ["sensor"],
    "partitions": 2,
}


@pytest.mark.parametrize(
    "other",
    [
        {"partitions": 3},
        {"key": ["sensor", "celsius"]},
        {"schema": Schema.of(sensor="string", celsius="float")},
    ],
)
def test_another_declaration_of_a_stream_is_refused_by_name(
    other: dict[str, Any], tmp_path: Path
) -> None:
    streams = SqliteStreams(tmp_path / "streams.sqlite")
    created = streams.create("readings", **DECLARED)
    assert streams.create("readings", **DECLARED) == created
    with pytest.raises(StreamExistsError) as caught:
        streams.create("readings", **DECLARED | other)
    assert caught.value.stream == "sqlite.readings"
    assert streams.info("readings") == created
