"""How sensors ask for runs, and what they remember: plain values."""

from __future__ import annotations

import pytest
from dagster import SkipReason as Skip

from dagster_adjunct.orchestration.code_location.metadata import join_shortened
from dagster_adjunct.orchestration.code_location.sensor_ticks import (
    LastRequest,
    SensorCursor,
    StreamFinding,
    StreamScan,
    read_cursor,
    request_run,
    write_cursor,
)


def asked(about: object, before: LastRequest, now: float) -> tuple[str, LastRequest]:
    request = request_run("app:lake", "5 new records", about, before, now)
    assert not isinstance(request, Skip), request
    return request


def test_a_run_key_holds_the_state_of_things_and_the_attempt() -> None:
    run_key, request = asked({"lake.orders.0": "5"}, LastRequest(), 1000.0)
    assert run_key == f"app:lake:{request.about}:1"
    assert (request.attempt, request.asked_at) == (1, 1000.0)


def test_what_a_run_left_as_it_was_is_asked_for_ever_more_rarely_under_new_keys() -> None:
    (run_key, request), now, waits, keys = asked("x", LastRequest(), 0.0), 0.0, [], set()
    for _ in range(9):
        keys.add(run_key)
        wait = 30.0
        while isinstance(request_run("app:lake", "5 new records", "x", request, now + wait), Skip):
            wait += 30.0
        now, waits = now + wait, [*waits, wait]
        run_key, request = asked("x", request, now)
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert len(keys) == 9


def test_what_has_changed_is_asked_for_at_once() -> None:
    first_key, first = asked("x", LastRequest(), 0.0)
    second_key, second = asked("y", first, 1.0)
    assert second.attempt == 1
    assert second_key != first_key


def test_the_reason_for_waiting_says_what_waits_which_attempt_and_how_long() -> None:
    _, first = asked("x", LastRequest(), 0.0)
    skip = request_run("app:lake", "5 new records", "x", first, 20.0)
    assert skip == Skip(
        "5 new records; attempt 1 did not change that (see its run), the next is in 40 s."
    )


def test_a_very_late_attempt_waits_an_hour() -> None:
    old = LastRequest(about=asked("x", LastRequest(), 0.0)[1].about, attempt=5000, asked_at=0.0)
    assert isinstance(request_run("app:lake", "", "x", old, 3599.0), Skip)
    assert asked("x", old, 3600.0)[1].attempt == 5001


def test_what_was_asked_for_by_a_clock_that_was_set_back_does_not_wait_for_it() -> None:
    _, first = asked("x", LastRequest(), 1e6)
    assert asked("x", first, 1000.0)[1] == LastRequest(
        about=first.about, attempt=2, asked_at=1000.0
    )


@pytest.mark.parametrize(
    "cursor",
    [
        SensorCursor(asked=LastRequest(about="abc", attempt=3, asked_at=12.5), seen="2026-01-05"),
        SensorCursor(
            asked=LastRequest(about="a"),
            scan=StreamScan(of="c", streams={"lake.x": StreamFinding(lag=3)}, young="lake.x.1"),
        ),
        SensorCursor(failed="r", permanent="no such column"),
    ],
)
def test_a_cursor_survives_as_json(cursor: SensorCursor) -> None:
    assert read_cursor(write_cursor(cursor)) == (cursor, "")


def test_without_a_cursor_nothing_is_reported() -> None:
    assert read_cursor(None) == (SensorCursor(), "")
    assert read_cursor("") == (SensorCursor(), "")


@pytest.mark.parametrize("version", [0, 99])
def test_a_cursor_of_another_version_starts_again_and_says_so(version: int) -> None:
    cursor, notice = read_cursor(f'{{"version": {version}, "seen": "2026-01-05"}}')
    assert cursor == SensorCursor()
    assert notice == f"The cursor has version {version}, but this release writes 1: it starts over."


@pytest.mark.parametrize(
    "text", ["nonsense", "[]", "3", '{"version": 1, "seen": 7}', '{"version": 1, "more": 1}']
)
def test_a_cursor_that_cannot_be_read_starts_again_and_says_so(text: str) -> None:
    assert read_cursor(text) == (SensorCursor(), "The cursor can't be read: it starts over.")


def test_a_tag_shows_the_first_of_many_texts_and_counts_the_others() -> None:
    assert join_shortened(["a", "b", "a"]) == "a, b"
    ids = [f"{number:032x}" for number in range(1000)]
    short = join_shortened(ids)
    assert short.startswith(", ".join(ids[:5]))
    assert short.endswith(" and 995 more")
    assert len(join_shortened(["x" * 5000])) == 200
