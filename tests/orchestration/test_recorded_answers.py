"""What batches have recorded of the outside goes once they are over, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.lookups import TableLookup
from dagster_adjunct.orchestration.operators.stream_facts import Columns
from dagster_adjunct.orchestration.step.lookups import describe_lookup
from dagster_adjunct.orchestration.step.recorded_answers import RecordedAnswers, purge_answers
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.step_world import StepWorld


def test_answers_of_an_operator_that_is_gone_go_when_a_run_begins(tmp_path: Path) -> None:
    world = StepWorld(open_lake(str(tmp_path / "lake")), tmp_path, spark=lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    world.stream("s", "k", 1, k="string")
    app = Application("app")
    app.input_stream("lake.s").send_to(app.output_stream("lake.t", partitions=1, key="k"))
    answers = pa.table({"k": ["a"]})
    over, begun = (RecordedAnswers(world.lake, "app", batch, "join-2-gone", {}) for batch in (0, 1))
    over.keep(1, answers)
    begun.keep(1, answers)
    world.run(app)
    assert over.read(1) is None
    assert begun.read(1) is not None


def test_an_object_of_somebody_else_stays_and_keeps_no_answers_from_going(tmp_path: Path) -> None:
    lake = open_lake(str(tmp_path / "lake"))
    recorded = RecordedAnswers(lake, "app", 3, "sink-2", {})
    recorded.keep(1, pa.table({"k": ["a"]}))
    note = f"{lake.application_prefix('app')}/answers/README"
    lake.store.put_if_absent(note, b"kept")
    purge_answers(lake, "app", 3)
    assert recorded.read(1) is None
    assert lake.store.get(note).data == b"kept"


def test_a_lookup_with_other_arguments_does_not_meet_the_answers_to_the_first_ones(
    tmp_path: Path,
) -> None:
    lake = open_lake(str(tmp_path / "lake"))

    def recorded(*args: object) -> RecordedAnswers:
        records = Columns.of_schema(Schema.of(item="string"))
        asked = describe_lookup(TableLookup("prices", ("item",), (), args=args), records)
        return RecordedAnswers(lake, "app", 1, "join-2-prices", asked)

    recorded("EUR").keep(1, pa.table({"k": ["a"]}))
    assert recorded("EUR").read(1) is not None
    with pytest.raises(ConfigurationError) as failure:
        recorded("USD").read(1)
    assert failure.value.operator == "join-2-prices"
    assert "EUR" not in str(recorded("EUR").about)
