"""What the demo prints where its output is a file or a pipe: a line for each event, as it
happens.
"""

from __future__ import annotations

import io
import logging

from rich.console import Console
from rich.progress import Progress

from dagster_adjunct.assets.versions.reports import StageEvent
from dagster_adjunct.examples.flights.demo import _Follower
from dagster_adjunct.orchestration.step.progress import StepEvent


def test_a_demo_whose_output_is_a_file_prints_each_event_at_once() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=False)
    log = logging.Logger("adjunct.run", logging.INFO)
    with Progress(console=console, disable=True) as progress:
        follower = _Follower(progress)
        log.addHandler(follower)
        follower.show("delivering part 1")
        assert "delivering part 1" in written.getvalue()
        log.info("starting Spark")
        assert "starting Spark" in written.getvalue()
        for event in (
            StageEvent("planes", "v1", "build", 2.5),
            StageEvent("planes", "v1", "seal", 0.01),
            StepEvent("batch", 1, {"records": 45_000, "unit": "records"}),
        ):
            log.info(event.summary(), extra={"adjunct_event": event})
        lines = [line.split(" s  ", 1)[1] for line in written.getvalue().splitlines()]
    assert lines == [
        "delivering part 1",
        "starting Spark",
        "dataset planes, version v1: build took 2.50 s",
        "batch 1: committed; 45,000 records so far",
    ]
