"""What becomes of a write whose reply is lost, and of requests that meet a table out of reach."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from dagster_adjunct.errors import (
    ConditionsNotMetError,
    ConfigurationError,
    KeyValueTableSealedError,
    MalformedDocumentError,
    OutcomeUnknownError,
    TableAccessError,
    TableUnavailableError,
)
from dagster_adjunct.key_value import BlockingKeyValueTable, Insert, Put
from dagster_adjunct.resources.key_value import segment as repeating
from dagster_adjunct.resources.key_value.segment import ReplyLostError, TableId
from tests.resources.key_value.scripted_segments import Lose, ScriptedSegments

LOST = ReplyLostError("the line is cut.", "")
AWAY = TableUnavailableError("nobody answers.", "")


@pytest.fixture(params=[False, True], ids=["one after the other", "at once"])
def backend(request: pytest.FixtureRequest) -> ScriptedSegments:
    return ScriptedSegments(waits=request.param)


@pytest.fixture
def table(backend: ScriptedSegments) -> Any:
    with BlockingKeyValueTable(backend.table()) as table:
        yield table


def test_an_insert_that_succeeded_is_no_conflict_when_its_reply_was_lost(
    backend: Any, table: Any
) -> None:
    backend.script = [Lose(LOST)]
    version = table.put_if_absent("k", "1")
    assert table.get("k").version == version


def test_nor_is_it_one_after_another_writers_write(backend: Any, table: Any) -> None:
    other = BlockingKeyValueTable(backend.table())
    backend.script = [Lose(LOST, then=lambda: other.put("k", "theirs"))]
    version = table.put_if_absent("k", "1")
    assert table.get("k").value == "theirs"
    assert table.get("k").version != version


def test_a_batch_is_resolved_as_a_whole(backend: Any, table: Any) -> None:
    backend.script = [Lose(LOST), AWAY, Lose(LOST)]
    versions = table.apply([Insert("a", "1"), Put("b", "1")], family="f")
    assert [entry.version for entry in table.get_all(["a", "b"], family="f")] == versions


def test_a_write_that_was_lost_on_its_way_is_done_by_its_repeat(backend: Any, table: Any) -> None:
    backend.script = [Lose(LOST, after=False)]
    version = table.put_if_absent("k", "1")
    assert table.get("k").version == version


def test_and_meets_what_others_wrote_meanwhile(backend: Any, table: Any) -> None:
    other = BlockingKeyValueTable(backend.table())
    backend.script = [Lose(LOST, after=False, then=lambda: other.put("k", "theirs"))]
    with pytest.raises(ConditionsNotMetError) as caught:
        table.put_if_absent("k", "1")
    assert caught.value.failures[0].found == table.get("k").version


@pytest.mark.lengthy
def test_beyond_the_horizon_the_outcome_is_unknown(backend: Any, table: Any) -> None:
    backend.horizon = 1.0
    backend.repeat = Lose(LOST)
    with pytest.raises(OutcomeUnknownError) as caught:
        table.put("k", "1")
    assert caught.value.table == "table"
    times = [at for _, _, _, at in backend.asked]
    assert len(times) > 1
    assert times[-1] - times[0] <= 1.0


def test_nothing_is_asked_beyond_the_horizon_though_a_pause_was_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a machine is stopped for a while: the store may have forgotten the token by then."""
    asked: list[bool] = []

    class Segment:
        async def apply(self, changes: Any, token: bytes, *, repeated: bool = False) -> None:
            asked.append(repeated)
            raise ReplyLostError("the line is cut.", "")

    async def slow(seconds: float) -> None:
        await asyncio.sleep(0.3)

    async def repeat() -> None:
        table = TableId("scope", "table", "1")
        await repeating.apply_until_settled(table, cast(Any, Segment()), [], b"token", horizon=0.2)

    monkeypatch.setattr(repeating, "pause", slow)

    with pytest.raises(OutcomeUnknownError, match="the line is cut") as caught:
        asyncio.run(repeat())
    assert (caught.value.scope, caught.value.table) == ("scope", "table")
    assert asked == [False]


@pytest.mark.lengthy
def test_so_it_is_where_the_table_is_out_of_reach_after_a_reply_was_lost(
    backend: Any, table: Any
) -> None:
    backend.horizon = 1.0
    backend.script, backend.repeat = [Lose(LOST)], AWAY
    with pytest.raises(OutcomeUnknownError) as caught:
        table.put("k", "1")
    assert (caught.value.scope, caught.value.table) == ("scope", "table")
    for error in (
        TableAccessError("no entry.", ""),
        MalformedDocumentError("no entry.", ""),
        ConfigurationError("no entry.", ""),
    ):
        backend.script, backend.repeat = [Lose(LOST)], error
        with pytest.raises(OutcomeUnknownError) as caught:
            table.put("k", "1")
        assert (caught.value.scope, caught.value.table) == ("scope", "table")
    backend.script, backend.repeat = (
        [Lose(LOST, after=False)],
        KeyValueTableSealedError("sealed.", ""),
    )
    with pytest.raises(KeyValueTableSealedError):
        table.put("k", "1")


def test_what_did_nothing_is_tried_again_and_then_reported_as_it_is(
    backend: Any, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeating, "RETRY_SECONDS", 0.2)
    backend.script = [AWAY, AWAY]
    table.put("k", "1")
    backend.script = [AWAY]
    assert table.get("k").value == "1"
    backend.script = [AWAY]
    assert [entry.value for page in table.all_entries() for entry in page.items] == ["1"]
    backend.repeat = AWAY
    for request in (
        lambda: table.put("k", "2"),
        lambda: table.get("k"),
        lambda: table.get_all(["k", "l"]),
    ):
        with pytest.raises(TableUnavailableError, match="nobody answers"):
            request()


def test_what_asking_again_does_not_help_is_reported_at_once(backend: Any, table: Any) -> None:
    for error in (TableAccessError("no entry.", ""), KeyValueTableSealedError("sealed.", "")):
        backend.script = [error]
        with pytest.raises(type(error)):
            table.put("k", "1")
        backend.script = [AWAY, error]
        with pytest.raises(type(error)):
            table.put("k", "1")
    assert table.get("k") is None


def test_an_event_loop_goes_on_while_a_request_waits() -> None:
    backend = ScriptedSegments(waits=True)
    backend.script = [AWAY, AWAY, AWAY]
    table, ticks = backend.table(), []

    async def tick() -> None:
        while True:
            ticks.append(len(backend.asked))
            await asyncio.sleep(0)

    async def both() -> None:
        ticking = asyncio.ensure_future(tick())
        await table.put("k", "1")
        ticking.cancel()

    asyncio.run(both())
    assert {1, 2, 3} <= set(ticks)
