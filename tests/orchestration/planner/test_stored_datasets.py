"""What a plan says of datasets as they are stored: those that can't be advanced as declared, and
those that have nothing to serve.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct import (
    IN_PROCESS,
    Application,
    LakeStreams,
    Schema,
    advance_dataset,
    bounded_dataset,
    open_lake,
    plan_application,
    run_application,
    unbounded_dataset,
)
from dagster_adjunct.errors import DatasetError, NoSealedVersionError

SCHEMA = Schema.of(id="string", v="bigint")
WRONG = {
    "partitions": unbounded_dataset("ref", input="lake.ref", key="id", broadcast=True),
    "kind": bounded_dataset("ref", input="lake.ref", key="id", partitions=1),
    "key": unbounded_dataset(
        "ref", input="lake.ref", key=["id", "v"], partition_by="id", partitions=1
    ),
}


@pytest.fixture
def streams(tmp_path: Path) -> LakeStreams:
    streams = LakeStreams(open_lake(str(tmp_path / "lake")))
    for name in ("in", "ref"):
        streams.create(name, schema=SCHEMA, key=["id"], partitions=1)
        streams.append(name, [{"id": "a", "v": 1}], producer="p", sequence=1)
    return streams


def joining(dataset: Any) -> Application:
    app = Application("joining", engine="auto")
    on = ["id", "v"] if len(dataset.key) == 2 else "id"
    app.input_stream("lake.in").join(
        app.table(dataset), on=on, how="left", select=[] if on != "id" else ["v as w"]
    ).send_to(app.output_stream("lake.out", partitions=1, key="id"))
    return app


def advance(dataset: Any, streams: LakeStreams) -> None:
    advance_dataset(
        dataset, lake=streams.lake, systems={"lake": streams}, spark=IN_PROCESS, by="test"
    )


def run(app: Application, streams: LakeStreams) -> None:
    run_application(app, lake=streams.lake, systems={"lake": streams}, spark=IN_PROCESS, run="test")


def noted(app: Application, streams: LakeStreams) -> str:
    return plan_application(app, systems={"lake": streams}).render().partition("\nNotes\n")[2]


@pytest.mark.lengthy
@pytest.mark.parametrize("what", WRONG)
def test_a_dataset_that_was_built_under_another_declaration_is_noted_as_the_run_says(
    what: str, streams: LakeStreams
) -> None:
    advance(unbounded_dataset("ref", input="lake.ref", key="id", partitions=1), streams)
    app = joining(WRONG[what])
    note = noted(app, streams)
    with pytest.raises(DatasetError) as reported:
        run(app, streams)
    assert f"{what} is" in reported.value.problem
    assert f"{what} is" in note
    assert "Its next advance fails" in note


def test_undeclared_renames_of_a_dataset_are_noted_as_the_run_says(streams: LakeStreams) -> None:
    def ref(**changes: Any) -> Any:
        return unbounded_dataset("ref", input="lake.ref", key="id", partitions=1, **changes)

    streams.change_columns("ref", schema=Schema.of(id="string", v="bigint", note="string"))
    advance(ref(), streams)
    streams.change_columns("ref", renamed={"note": "memo"})
    assert "Its next advance fails" in noted(joining(ref()), streams)
    with pytest.raises(DatasetError) as reported:
        run(joining(ref()), streams)
    assert 'declare drop=["note"], or renamed=' in reported.value.problem
    declared = joining(ref(renamed={"note": "memo"}))
    assert "Its next advance fails" not in noted(declared, streams)
    run(declared, streams)


@pytest.mark.lengthy
def test_a_dataset_whose_stream_has_no_marker_is_noted_until_it_has_one(
    streams: LakeStreams,
) -> None:
    app = joining(bounded_dataset("ref", input="lake.ref", key="id", partitions=1))
    assert "lake.ref has no end-of-dataset marker" in noted(app, streams)
    with pytest.raises(NoSealedVersionError):
        run(app, streams)
    before = plan_application(app, systems={"lake": streams})
    streams.append_markers("ref", "v1", producer="p", sequence=2)
    assert plan_application(app, systems={"lake": streams}).differences_from(before) == ()
    assert noted(app, streams) == ""
    run(app, streams)
    assert noted(app, streams) == ""
