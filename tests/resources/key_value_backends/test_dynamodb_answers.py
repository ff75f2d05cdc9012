"""What DynamoDB may answer and DynamoDB Local never does: conflicts, throttling, keys that were
not processed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError

from dagster_adjunct.resources.errors import (
    KeyValueTableSealedError,
    TableAccessError,
    TableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ConditionsFailed,
    KeyRange,
    ReplyLostError,
    SegmentChange,
    TableId,
    family_prefix,
    make_version,
    new_token,
    run_without_loop,
    table_key,
)
from dagster_adjunct.resources.key_value_backends import dynamodb
from dagster_adjunct.resources.key_value_backends.dynamodb import (
    DynamoDbSegment,
    DynamoDbSegments,
    LastTry,
)
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import (
    PURGE_AFTER,
    SegmentLayout,
    TableCalls,
)
from tests.resources.key_value_backends.segment_handle import Run

TABLE = TableId("tests", "fruit", "0123456789abcdef")
NAME = "adjunct-tests-fruit-0123456789abcdef"
TOKEN = new_token()
OK: dict[str, Any] = {}
LOST = ReadTimeoutError(endpoint_url="http://there")
UNREACHED = EndpointConnectionError(endpoint_url="http://there")


def refused(code: str, **more: Any) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "why"}, **more}, "TransactWriteItems")


def cancelled(*codes: str, versions: tuple[bytes | None, ...] = ()) -> ClientError:
    """A transaction cancelled with these reasons, that of the gate first, and the items that
    conditions met.
    """
    reasons: list[dict[str, Any]] = [{"Code": code} for code in codes]
    for reason, version in zip(reasons[1:], versions, strict=False):
        if version is not None:
            reason["Item"] = {"v": {"B": version}}
    return refused("TransactionCanceledException", CancellationReasons=reasons)


FAILED, CONFLICT, NONE = "ConditionalCheckFailed", "TransactionConflict", "None"
BURNT = refused("IdempotentParameterMismatchException")
UNDER_WAY = refused("TransactionInProgressException")


class Script:
    """A client that answers what it is told to, and keeps what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = deque(answers)
        self.asked: list[dict[str, Any]] = []

    def new(self, label: str) -> Script:
        return self

    def put_item(self, **_: Any) -> Any:
        """A family is listed, as it was before."""
        return {"Attributes": {}}

    def close(self) -> None:
        pass

    def _next(self, **request: Any) -> Any:
        self.asked.append(request)
        answer = self.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    transact_write_items = batch_get_item = get_item = query = _next

    @property
    def tokens(self) -> list[str]:
        return [request["ClientRequestToken"].rpartition("-")[2] for request in self.asked]


_run: list[Run] = [asyncio.run]


@pytest.fixture(params=[asyncio.run, run_without_loop], autouse=True)
def asked_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How segments ask in a test: from an event loop, or in the thread of the caller."""
    _run[:] = [request.param]
    monkeypatch.setattr(dynamodb, "PATIENCE", 60)


def segment_of(script: Script) -> DynamoDbSegment:
    return DynamoDbSegment(TableCalls(TABLE, NAME, script.new, 4), SegmentLayout(0))  # type: ignore[arg-type]


def key(name: bytes) -> bytes:
    return table_key(family_prefix("f"), name)


CHANGES = [
    SegmentChange(key(b"a"), b"1", make_version(TOKEN, 0), ABSENT),
    SegmentChange(key(b"b"), b"2", make_version(TOKEN, 1), b"sixteen bytes it"),
]


def apply(segment: DynamoDbSegment, *, repeated: bool = False) -> None:
    _run[0](segment.apply(CHANGES, TOKEN, repeated=repeated))


def test_a_conflicting_write_is_retried_each_time_with_another_token() -> None:
    script = Script(
        cancelled(CONFLICT, NONE, NONE),
        cancelled(NONE, CONFLICT, NONE),
        cancelled(NONE, NONE, CONFLICT),
        OK,
    )
    apply(segment_of(script))
    assert script.tokens == ["0", "1", "2", "3"]
    assert len({str(request["TransactItems"]) for request in script.asked}) == 1


def test_a_conflict_next_to_a_failed_condition_is_checked_again() -> None:
    versions = (b"v of a", b"v of b")
    script = Script(
        cancelled(NONE, FAILED, CONFLICT, versions=versions),
        cancelled(CONFLICT, FAILED, FAILED, versions=versions),
    )
    with pytest.raises(ConditionsFailed) as failed:
        apply(segment_of(script))
    assert failed.value.found == {0: b"v of a", 1: b"v of b"}
    assert len(script.asked) == 2


def test_conflicts_without_end_are_reported_as_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamodb, "PATIENCE", 0.05)
    script = Script(*[cancelled(NONE, CONFLICT, NONE)] * 1000)
    with pytest.raises(TableUnavailableError):
        apply(segment_of(script))
    assert len(script.asked) > 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (cancelled(FAILED, FAILED, NONE), KeyValueTableSealedError),
        (cancelled(NONE, "ThrottlingError", NONE), TableUnavailableError),
        (cancelled(NONE, NONE, "ProvisionedThroughputExceeded"), TableUnavailableError),
        (cancelled(NONE, "ValidationError", NONE), TableError),
        (refused("ThrottlingException"), TableUnavailableError),
        (refused("ProvisionedThroughputExceededException"), TableUnavailableError),
        (UNREACHED, TableUnavailableError),
        (refused("ValidationException"), TableError),
        (refused("AccessDeniedException"), TableAccessError),
        (LOST, ReplyLostError),
        (refused("InternalServerError", ResponseMetadata={"HTTPStatusCode": 500}), ReplyLostError),
    ],
)
def test_a_refusal_is_reported_as_what_it_means(answer: Exception, error: type[Exception]) -> None:
    with pytest.raises(error):
        apply(segment_of(Script(answer)))


def test_a_lost_try_is_asked_about_under_its_own_token() -> None:
    script = Script(cancelled(NONE, CONFLICT, NONE), LOST, UNDER_WAY, UNDER_WAY, OK)
    segment = segment_of(script)
    with pytest.raises(ReplyLostError):
        apply(segment)
    apply(segment, repeated=True)
    assert script.tokens == ["0", "1", "1", "1", "1"]
    assert script.asked[1] == script.asked[-1]


def test_what_was_not_found_out_of_a_lost_try_is_not_reported_as_nothing_happened() -> None:
    script = Script(
        LOST,
        UNREACHED,
        refused("ThrottlingException"),
        cancelled(NONE, CONFLICT, NONE),
        UNREACHED,
        OK,
    )
    segment = segment_of(script)
    for repeated in (False, True, True, True):
        with pytest.raises(ReplyLostError):
            apply(segment, repeated=repeated)
    apply(segment, repeated=True)
    assert set(script.tokens) == {"0"}


class ScriptOfAll(Script):
    """A script that has also what is answered when a family is listed."""

    def put_item(self, **request: Any) -> Any:
        return self._next(**request)


def test_a_repeat_that_does_not_get_as_far_as_the_write_knows_nothing_of_it_either() -> None:
    segment = segment_of(ScriptOfAll(UNREACHED, OK))
    with pytest.raises(ReplyLostError):
        apply(segment, repeated=True)


def test_a_copy_of_a_try_that_stays_under_way_is_not_reported_as_nothing_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamodb, "PATIENCE", 0.05)
    script = Script(cancelled(NONE, CONFLICT, NONE), *[UNDER_WAY] * 1000)
    segment = segment_of(script)
    with pytest.raises(ReplyLostError):
        apply(segment)
    script.answers = deque([OK])
    apply(segment, repeated=True)
    assert set(script.tokens[1:]) == {"1"}


def test_after_the_token_of_a_lost_try_was_burnt_its_refusal_is_reported() -> None:
    script = Script(LOST, cancelled(NONE, FAILED, NONE), OK)
    segment = segment_of(script)
    with pytest.raises(ReplyLostError):
        apply(segment)
    with pytest.raises(ConditionsFailed) as failed:
        apply(segment, repeated=True)
    assert failed.value.found == {0: None}
    burning = script.asked[-1]
    assert burning["ClientRequestToken"] == script.asked[0]["ClientRequestToken"]
    assert not {"a", "b"} & {
        str(item.get("Put", {}).get("Item", {}).get("s")) for item in burning["TransactItems"]
    }


def test_a_lost_try_whose_token_was_burnt_before_is_followed_by_a_new_one() -> None:
    script = Script(LOST, cancelled(NONE, FAILED, NONE), LOST, BURNT, OK)
    segment = segment_of(script)
    for repeated in (False, True):
        with pytest.raises(ReplyLostError):
            apply(segment, repeated=repeated)
    apply(segment, repeated=True)
    assert script.tokens == ["0", "0", "0", "0", "1"]


class Forgetful(dict[bytes, LastTry]):
    """Lost tries, of which another thread forgets each that is added."""

    def __setitem__(self, token: bytes, last: LastTry) -> None:
        self.pop(token, None)


def test_a_lost_try_that_another_thread_forgets_is_followed_by_a_new_one() -> None:
    script = Script(BURNT, OK)
    segment = segment_of(script)
    segment._lost = Forgetful({TOKEN: LastTry(0, 0, 0.0)})
    apply(segment, repeated=True)
    assert script.tokens == ["0", "1"]


def test_a_first_copy_that_arrives_before_its_token_is_invalidated_is_checked() -> None:
    script = Script(LOST, cancelled(NONE, FAILED, NONE), BURNT, OK)
    segment = segment_of(script)
    with pytest.raises(ReplyLostError):
        apply(segment)
    apply(segment, repeated=True)
    assert script.asked[-1] == script.asked[0]


def test_a_server_that_remembers_cancelled_requests_is_believed() -> None:
    refusal = cancelled(NONE, FAILED, NONE, versions=(b"found",))
    script = Script(LOST, refusal, BURNT, refusal, BURNT)
    segment = segment_of(script)
    with pytest.raises(ReplyLostError):
        apply(segment)
    with pytest.raises(ConditionsFailed) as failed:
        apply(segment, repeated=True)
    assert failed.value.found == {0: b"found"}


def test_a_try_rejected_by_newer_gates_is_followed_by_one_with_listed_families() -> None:
    newer = refused(
        "TransactionCanceledException",
        CancellationReasons=[
            {"Code": FAILED, "Item": {"n": {"N": "7"}}},
            {"Code": NONE},
            {"Code": NONE},
        ],
    )
    script = Script(LOST, newer, OK)
    segment = segment_of(script)
    with pytest.raises(ReplyLostError):
        apply(segment)
    apply(segment, repeated=True)
    assert script.tokens == ["0", "0", "1"]
    gates = [request["TransactItems"][0]["ConditionCheck"] for request in script.asked]
    assert [gate["ExpressionAttributeValues"][":n"]["N"] for gate in gates] == ["0", "0", "7"]
    assert script.asked[0] == script.asked[1]


BEYOND = {"n": {"N": "1"}, "a": {"N": "0"}, "p": {"B": b"\xff\xff"}}
THEN = {"ResponseMetadata": {"HTTPHeaders": {"date": "Mon, 01 Jul 2024 00:00:00 GMT"}}}


class ScriptOfNewFamilies(Script):
    """A script in which no family was listed before."""

    def put_item(self, **_: Any) -> Any:
        return {}


@pytest.mark.parametrize(
    "answer",
    [
        refused("AccessDeniedException"),
        LOST,
        {},
        {"Item": {"n": {"S": "odd"}}},
        {"Item": BEYOND, **THEN},
    ],
)
def test_a_write_is_done_though_families_can_not_be_forgotten_after_it(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    script = ScriptOfNewFamilies(OK, answer)
    families = [table_key(family_prefix(f"f{number}"), b"a") for number in range(PURGE_AFTER)]
    changes = [
        SegmentChange(one, b"1", make_version(TOKEN, number), ABSENT)
        for number, one in enumerate(families)
    ]
    _run[0](segment_of(script).apply(changes, TOKEN))
    assert len(script.asked) == 2
    assert "stay in its list for now" in caplog.text


def test_keys_that_were_not_processed_are_asked_for_again() -> None:
    layout = SegmentLayout(0)
    keys = [key(b"%d" % number) for number in range(5)]
    items = [{**layout.entry(one), "v": {"B": b"v"}, "d": {"B": one}} for one in keys]
    left = {NAME: {"Keys": [layout.entry(one) for one in keys[2:]]}}
    script = Script(
        {"Responses": {NAME: items[:2]}, "UnprocessedKeys": left},
        {"Responses": {}, "UnprocessedKeys": left},
        {"Responses": {NAME: items[4:1:-1]}, "UnprocessedKeys": {}},
    )
    entries = _run[0](segment_of(script).get(keys))
    assert [entry and entry.value for entry in entries] == keys
    assert [len(request["RequestItems"][NAME]["Keys"]) for request in script.asked] == [5, 3, 3]
    assert all(request["RequestItems"][NAME]["ConsistentRead"] for request in script.asked)


@pytest.mark.parametrize("answer", [refused("ThrottlingException"), LOST, UNREACHED])
def test_a_read_without_an_answer_may_be_repeated(answer: Exception) -> None:
    with pytest.raises(TableUnavailableError):
        _run[0](segment_of(Script(answer)).get([key(b"a")]))


@pytest.mark.parametrize(
    "other", [{"d": {"B": b""}}, {"v": {"S": "1"}, "d": {"B": b""}}, {"v": {"B": b"v"}}]
)
def test_items_that_something_else_has_written_are_reported(other: dict[str, Any]) -> None:
    layout = SegmentLayout(0)
    item = {**layout.entry(key(b"a")), **other}
    for answer, read in (
        ({"Item": item}, lambda segment: segment.get([key(b"a")])),
        ({"Responses": {NAME: [item]}}, lambda segment: segment.get([key(b"a"), key(b"b")])),
        ({"Items": [item]}, lambda segment: segment.page(KeyRange(key(b"")), 1, values=True)),
    ):
        with pytest.raises(
            TableError, match=f"tests/fruit in DynamoDB, table {NAME}: an item has no "
        ):
            _run[0](read(segment_of(Script(answer))))


def test_pages_without_anything_in_the_range_do_not_end_it() -> None:
    items = [
        {"s": {"B": b"\1" + name}, "v": {"B": b"v"}, "d": {"B": b""}} for name in (b"a", b"b", b"c")
    ]
    script = Script(
        {"Items": [], "LastEvaluatedKey": {"s": {"B": b"\1"}}},
        {"Items": items[:1], "LastEvaluatedKey": {"s": {"B": b"\1a"}}},
        {"Items": items[1:]},
    )
    segment = segment_of(script)
    within = KeyRange(key(b"a"), key(b"z"))
    assert [*_run[0](segment.page(within, 10, values=True)).keys] == [key(b"a")]
    rest = _run[0](segment.page(within.after(key(b"a")), 10, values=True))
    assert [*rest.keys] == [key(b"b"), key(b"c")]


def backend_of(script: Script) -> DynamoDbSegments:
    backend = DynamoDbSegments(threads=1)
    backend._connect = script.new  # type: ignore[method-assign,assignment]
    return backend


def test_a_seal_goes_on_where_writes_are_under_way_and_fails_where_it_may_not() -> None:
    busy = [refused("TransactionConflictException"), refused("ThrottlingException"), LOST]

    class Gates(Script):
        def put_item(self, **request: Any) -> None:
            self._next(**request)

    script = Gates(*busy, *[OK] * 200)
    backend_of(script).seal(TABLE, 2)
    shut = {str(request["Item"]) for request in script.asked}
    assert len(script.asked) == len(shut) + len(busy)
    with pytest.raises(TableAccessError):
        backend_of(Gates(OK, refused("AccessDeniedException"), *[OK] * 200)).seal(TABLE, 2)
