"""The update contract as a layer: what an update that meets no record becomes, and what its
caller is told.
"""

from __future__ import annotations

import asyncio

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    RecordNotFoundError,
    TableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.functions import TableWriteFunction
from dagster_adjunct.resources.tables.operation import (
    Operation,
    OperationKind,
    RowEntries,
    State,
    UpdateContract,
    UpdateMessage,
)
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.resources.tables.update_contract import plan_defaults
from tests.resources.tables.slow_store import SlowStore

ONLY, WITH_DEFAULTS = UpdateContract.UPDATE_ONLY, UpdateContract.UPDATE_WITH_DEFAULTS
UPDATE = OperationKind.UPDATE


class OneAtATime(TableWriteFunction[str, dict, dict]):
    """A service of single requests; `not_found` makes the error of an update that meets no
    record.
    """

    def __init__(
        self, not_found=lambda key: RecordNotFoundError("no record.", keys=(key,))
    ) -> None:
        self.records: dict[str, dict] = {}
        self.done: list[tuple[str, str]] = []
        self.not_found = not_found

    async def put(self, key, value, *args):
        self.done.append(("put", key))
        self.records[key] = dict(value)

    async def put_if_absent(self, key, value, *args):
        self.done.append(("put-if-absent", key))
        return self.records.setdefault(key, dict(value)) is not None and self.records[key] == value

    async def delete(self, key, *args):
        self.records.pop(key, None)

    async def update(self, key, update, *args):
        self.done.append(("update", key))
        if key not in self.records:
            raise self.not_found(key)
        self.records[key] = self.records[key] | update


class NoPutIfAbsent(TableWriteFunction[str, dict, dict]):
    def __init__(self) -> None:
        self.done: list[str] = []
        self.records: dict[str, dict] = {}

    async def put(self, key, value, *args):
        self.done.append("put")
        self.records[key] = dict(value)

    async def delete(self, key, *args): ...

    async def update(self, key, update, *args):
        self.done.append("update")
        if key not in self.records:
            raise RecordNotFoundError("no record.", keys=(key,))
        self.records[key].update(update)


def table_over(function, **settings) -> RemoteTable:
    return RemoteTable("t", key="id", write_function=function, **settings)


def from_another(key):
    try:
        raise RecordNotFoundError("no record.", keys=(key,))
    except RecordNotFoundError as missing:
        try:
            raise ValueError("what the driver said") from missing
        except ValueError as driver_error:
            error = RuntimeError("what our code made of it")
            error.__cause__ = driver_error
            return error


def while_handling(key):
    try:
        try:
            raise RecordNotFoundError("no record.", keys=(key,))
        except RecordNotFoundError:
            raise KeyError(key)  # noqa: B904 - drivers do this
    except KeyError as error:
        return error


def in_a_group(key):
    return ExceptionGroup("several", [ExceptionGroup("inside", [from_another(key)])])


def in_a_group_with_others(key):
    return ExceptionGroup("several", [ValueError("noise"), from_another(key)])


@pytest.mark.parametrize(
    "wrapped", [from_another, while_handling, in_a_group, in_a_group_with_others]
)
@pytest.mark.parametrize("batch_size", [1, 100])
def test_a_missing_record_is_found_among_an_errors_causes_through_every_layer(wrapped, batch_size):
    function = OneAtATime(wrapped)
    table = table_over(function, batch_size=batch_size, retry=RetryPolicy(attempts=5))
    asyncio.run(table.update_messages([("a", UpdateMessage({"n": 1}, {"m": 0}))], WITH_DEFAULTS))
    assert function.records == {"a": {"n": 1, "m": 0}}
    assert function.done == [("update", "a"), ("put-if-absent", "a"), ("update", "a")]
    assert table.metrics.store.retries == 0


def test_only_the_missing_entries_get_a_default_and_a_second_update():
    store = SlowStore(at_once=False)
    store.records = {"a": {"n": 1}, "c": {"n": 3}}
    messages = [(key, UpdateMessage({"m": 1}, {"n": 0})) for key in "abcd"]
    asyncio.run(table_over(store).update_messages(messages, WITH_DEFAULTS))
    assert store.requests == [
        ("update", list("abcd")),
        ("put-if-absent", ["b", "d"]),
        ("update", ["b", "d"]),
    ]
    assert store.records == {
        "a": {"n": 1, "m": 1},
        "b": {"n": 0, "m": 1},
        "c": {"n": 3, "m": 1},
        "d": {"n": 0, "m": 1},
    }


def test_a_function_that_can_begin_records_gets_one_request():
    store = SlowStore(at_once=True)
    table = table_over(store)
    asyncio.run(
        table.update_messages(
            [(key, UpdateMessage({"m": 1}, {"n": 0})) for key in "abc"], WITH_DEFAULTS
        )
    )
    assert store.requests == [("update", list("abc"))]
    assert table.metrics.records.defaults_put == 3


@pytest.mark.parametrize("at_once", [True, False])
def test_update_only_takes_defaults_off(at_once):
    store = SlowStore(at_once=at_once)
    operation = Operation(UPDATE, RowEntries(["a"], [{"n": 1}], [{"m": 1}]), contract=ONLY)
    outcomes = asyncio.run(table_over(store).send(operation))
    assert outcomes.places(State.MISSING) == [0]
    assert "UPDATE_ONLY ignores the default" in str(outcomes.problems[0].error)
    assert store.records == {}
    assert len(store.requests) == 1


def test_what_another_writer_begins_between_is_kept():
    class Raced(SlowStore):
        async def send(self, operation):
            if operation.kind is OperationKind.PUT_IF_ABSENT:
                self.records["a"] = {"theirs": True}
            return await super().send(operation)

    store = Raced(at_once=False)
    table = table_over(store)
    asyncio.run(
        table.update_messages([("a", UpdateMessage({"n": 1}, {"ours": True}))], WITH_DEFAULTS)
    )
    assert store.records == {"a": {"theirs": True, "n": 1}}
    assert table.metrics.records.defaults_put == 0


def test_a_function_that_cannot_put_if_absent_gets_no_defaults_in_silence():
    function = NoPutIfAbsent()
    table = table_over(function)
    message = [("a", UpdateMessage({"n": 1}, {"m": 0}))]
    with pytest.raises(ConfigurationError) as error:
        asyncio.run(table.update_messages(message, WITH_DEFAULTS))
    assert error.value.argument == "defaults_may_overwrite"
    assert function.done == []
    asyncio.run(
        table_over(function, defaults_may_overwrite=True).update_messages(message, WITH_DEFAULTS)
    )
    assert function.records == {"a": {"m": 0, "n": 1}}
    # nothing to put
    asyncio.run(table.update_messages([("a", UpdateMessage({"n": 2}))], WITH_DEFAULTS))
    assert function.records == {"a": {"m": 0, "n": 2}}


def test_a_rejected_default_is_reported_with_its_cause():
    class ReadOnly(OneAtATime):
        async def put_if_absent(self, key, value, *args):
            raise TableError("the store is read-only.", "Ask for write access.")

    with pytest.raises(RecordNotFoundError) as error:
        asyncio.run(
            table_over(ReadOnly()).update_messages([("a", UpdateMessage({}, {}))], WITH_DEFAULTS)
        )
    assert error.value.keys == ("a",)
    assert "DEFAULTS" not in str(error.value)
    causes, cause = [], error.value
    while cause is not None:
        causes.append(type(cause))
        cause = cause.__cause__
    assert TableError in causes


def test_a_default_that_fails_a_whole_request_concerns_its_own_key_only():
    class Bulk(NoPutIfAbsent):
        async def send(self, operation):
            if operation.kind is OperationKind.PUT and {"bad": 1} in operation.entries.values:
                raise ValueError("nothing was put")
            return await super().send(operation)

    function = Bulk()
    table = table_over(function, defaults_may_overwrite=True)

    async def scenario():
        calls = [
            [(key, UpdateMessage({"n": 1}, {default: 1}))]
            for key, default in (("a", "m"), ("b", "bad"))
        ]
        return await asyncio.gather(
            *(table.update_messages(call, WITH_DEFAULTS) for call in calls), return_exceptions=True
        )

    first, second = asyncio.run(scenario())
    assert first is None
    assert isinstance(second, RecordNotFoundError)
    assert second.keys == ("b",)
    assert function.records == {"a": {"m": 1, "n": 1}}


class Counters(NoPutIfAbsent):
    """Numbers that updates add to; `fails` says which requests raise a ConfigurationError."""

    def __init__(self, fails=lambda operation: False) -> None:
        super().__init__()
        self.fails = fails

    async def put(self, key, value, *args):
        self.records[key] = value

    async def update(self, key, update, *args):
        if key not in self.records:
            raise RecordNotFoundError("no record.", keys=(key,))
        self.records[key] += update

    async def send(self, operation):
        if self.fails(operation):
            raise ConfigurationError("a wrong declaration.", "Correct it.")
        return await super().send(operation)


def call_both(table, **defaults):
    """Update the keys a and b at once, each by a caller of its own; return what each got."""

    async def scenario():
        calls = ([(key, UpdateMessage(1, defaults.get(key)))] for key in "ab")
        return await asyncio.gather(
            *(table.update_messages(call, WITH_DEFAULTS) for call in calls), return_exceptions=True
        )

    return asyncio.run(scenario())


def test_a_default_that_may_not_be_put_concerns_its_own_caller_only():
    function = Counters()
    function.records = {"a": 1}
    first, second = call_both(table_over(function), b=10)
    assert first is None
    assert isinstance(second, ConfigurationError)
    assert function.records == {"a": 2}


@pytest.mark.parametrize("failing", [OperationKind.PUT, UPDATE])
def test_what_fails_after_the_first_request_does_not_repeat_that(failing):
    def fails(operation):
        return operation.kind is failing and (
            failing is OperationKind.PUT or "b" in function.records
        )

    function = Counters(fails)
    function.records = {"a": 1}
    first, second = call_both(table_over(function, defaults_may_overwrite=True), b=10)
    assert first is None
    assert isinstance(
        second, RecordNotFoundError if failing is OperationKind.PUT else ConfigurationError
    )
    assert "a wrong declaration" in str(second)
    assert function.records == {"a": 2} | ({} if failing is OperationKind.PUT else {"b": 10})


def test_a_record_that_is_deleted_right_after_its_default_was_put_is_missing():
    class Deleted(SlowStore):
        async def send(self, operation):
            outcomes = await super().send(operation)
            self.records.clear()
            return outcomes

    message = [("a", UpdateMessage({"n": 1}, {"m": 0}))]
    with pytest.raises(
        RecordNotFoundError, match=r"deleted right after its default was put. Send the update again"
    ):
        asyncio.run(table_over(Deleted(at_once=False)).update_messages(message, WITH_DEFAULTS))


def test_a_lost_answer_to_a_default_is_not_a_missing_record():
    class Lost(OneAtATime):
        async def put_if_absent(self, key, value, *args):
            raise TableUnavailableError("no answer.")

    table = table_over(Lost(), retry=RetryPolicy(attempts=1))
    outcomes = asyncio.run(
        table.send(Operation(UPDATE, RowEntries(["a"], [{}], [{}]), contract=WITH_DEFAULTS))
    )
    assert outcomes.places(State.UNKNOWN) == [0]


def test_a_group_of_errors_names_its_missing_keys_and_does_not_call_the_others_done():
    class Bulk(OneAtATime):
        async def update_all(self, entries, *args):
            raise ExceptionGroup(
                "some",
                [
                    RecordNotFoundError("no.", keys=("a",)),
                    RecordNotFoundError("no.", keys=("b",)),
                    *self.others,
                ],
            )

        others: tuple[Exception, ...] = ()

    function = Bulk()
    operation = Operation(UPDATE, RowEntries(list("abc"), [{}, {}, {}]), contract=ONLY)
    outcomes = asyncio.run(table_over(function).send(operation))
    assert (outcomes.places(State.MISSING), outcomes.done) == ([0, 1], 1)
    function.others = (ValueError("what"),)
    outcomes = asyncio.run(table_over(function).send(operation))
    assert (outcomes.places(State.MISSING), outcomes.places(State.REFUSED)) == ([0, 1], [2])


def test_an_empty_record_is_a_default():
    store = MemoryTable("an-empty-default")
    store.clear()
    asyncio.run(
        table_over(store).update_messages([("a", UpdateMessage({"n": 1}, {}))], WITH_DEFAULTS)
    )
    assert asyncio.run(store.get("a")) == {"n": 1}


def test_what_begins_a_key_is_the_first_default_among_its_missing_messages():
    begun, again = plan_defaults(list("aabab"), [None, 1, 2, None, 3], [0, 1, 2, 3, 4])
    assert (begun, again) == ({"a": 1, "b": 2}, [1, 2, 3, 4])


def test_what_is_asked_of_a_key_while_its_record_begins_waits_for_it():
    store = SlowStore(at_once=False)
    table = table_over(store, batch_size=1)

    async def scenario():
        first = table.update_messages([("a", UpdateMessage({"n": 1}, {"born": 1}))], WITH_DEFAULTS)
        second = table.update_messages([("a", UpdateMessage({"n": 2}, {"born": 2}))], WITH_DEFAULTS)
        await asyncio.gather(first, second, table.put("b", {}), table.update("a", {"n": 3}))

    asyncio.run(scenario())
    assert store.records == {"a": {"n": 3, "born": 1}, "b": {}}
    assert [kind for kind, keys in store.requests if keys == ["a"]] == [
        "update",
        "put-if-absent",
        *["update"] * 3,
    ]
