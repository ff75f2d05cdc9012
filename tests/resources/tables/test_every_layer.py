"""What a table promises, through every combination of its layers, over functions as users write
them.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from copy import deepcopy
from random import Random

import pytest

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    NullKeyError,
    RecordNotFoundError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.batching import BatchProvider
from dagster_adjunct.resources.tables.cache import Cache
from dagster_adjunct.resources.tables.functions import record_not_found_error
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
    UpdateContract,
    UpdateMessage,
    first_cause,
)
from dagster_adjunct.resources.tables.rate import RateLimit
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.resources.tables.plain_oracle import (
    batches,
    counting,
    keeping_newest,
    messages,
    newest,
    record_of,
    totals,
)
from tests.resources.tables.troubled_function import TroubledFunction
from tests.resources.tables.user_function import (
    Broken,
    Busy,
    UserFunction,
    WithoutPutIfAbsent,
    WithoutUpdate,
)

ONLY, DEFAULTS = UpdateContract.UPDATE_ONLY, UpdateContract.UPDATE_WITH_DEFAULTS
LEFT = (State.FAILED, State.UNKNOWN, State.REFUSED, State.MISSING)
LAYERS = ("cache", "batch", "retry", "rate")
COMBINATIONS = [
    frozenset(name for name, is_on in zip(LAYERS, on, strict=True) if is_on)
    for on in itertools.product((False, True), repeat=len(LAYERS))
]


@pytest.fixture(
    params=COMBINATIONS, ids=lambda on: "+".join(name for name in LAYERS if name in on) or "bare"
)
def layers(request) -> frozenset[str]:
    return request.param


@pytest.fixture
def made(layers):
    def make(function, **more) -> RemoteTable:
        return table_of(function, layers, **more)

    return make


def table_of(function, layers, **more) -> RemoteTable:
    settings = {
        "retry": RetryPolicy(
            attempts=4 if "retry" in layers else 1, first_wait=0.001, max_wait=0.002
        ),
        "rate_limit": RateLimit(1e6, 1e6) if "rate" in layers else None,
        "batches": (
            BatchProvider(size=7, delay=0.001) if "batch" in layers else BatchProvider(size=1)
        ),
    }
    if "cache" in layers and not {"idempotent", "newest_by"} & more.keys():
        settings["cache"] = Cache(absent=True)
    return RemoteTable(
        "state", key="id", read_function=function, write_function=function, **settings | more
    )


def run(work):
    return asyncio.run(asyncio.wait_for(work, 20))


def every_write(table, key, args=()):
    message = UpdateMessage({"n": 1}, {"n": 0})
    return {
        "put": lambda: table.put(key, {"n": 1}, *args),
        "put_all": lambda: table.put_all([("other", {"n": 1}), (key, {"n": 1})], *args),
        "delete": lambda: table.delete(key, *args),
        "delete_all": lambda: table.delete_all(["other", key], *args),
        "update": lambda: table.update(key, {"n": 1}, *args),
        "update_all": lambda: table.update_all([("other", {"n": 1}), (key, {"n": 1})], *args),
        "update_messages": lambda: table.update_messages(
            [("other", message), (key, message)], DEFAULTS, *args
        ),
    }


# --- rules
# ------------------------------------------------------------------------------------------------------------


def test_a_put_of_none_deletes(made):
    function = UserFunction()
    function.records["a"] = {"n": 1}
    table = made(function)
    run(table.put("a", None))
    assert function.records == {}
    assert [verb for verb, *_ in function.asked] == ["delete"]


def test_puts_of_records_and_none_take_effect_in_their_order(made):
    function = UserFunction()
    function.records["gone"] = {"n": 0}
    table = made(function)
    run(
        table.put_all(
            [
                ("a", {"n": 1}),
                ("gone", None),
                ("a", None),
                ("b", {"n": 2}),
                ("a", {"n": 3}),
                ("b", None),
            ]
        )
    )
    assert function.records == {"a": {"n": 3}}


def test_an_empty_call_makes_no_request(made):
    function = UserFunction()
    table = made(function)

    async def empty():
        assert await table.get_all([]) == {}
        await table.put_all([])
        await table.delete_all([])
        await table.update_all([])
        await table.update_messages([], DEFAULTS)

    run(empty())
    assert function.asked == []
    assert table.metrics.store.requests == 0


@pytest.mark.parametrize("key", [None, (None, 1), ("a", None)])
def test_a_null_key_is_refused_before_anything_is_sent(made, key):
    function = UserFunction()
    table = made(function)
    calls = every_write(table, key) | {
        "get": lambda: table.get(key),
        "get_all": lambda: table.get_all(["a", key]),
    }
    for name, call in calls.items():
        with pytest.raises(NullKeyError) as caught:
            run(call())
        assert caught.value.table == "state"
        assert function.asked == [], name


def test_a_null_update_is_refused_before_anything_is_sent(made):
    function = UserFunction()
    table = made(function)
    for call in (
        lambda: table.update("a", None),
        lambda: table.update_all([("b", {"n": 1}), ("a", None)]),
    ):
        with pytest.raises(AdjunctError, match=r"state.*'a'"):
            run(call())
    assert function.asked == []


@pytest.mark.parametrize("verb", ["get", "put", "delete", "update"])
def test_errors_name_table_operation_and_key_and_keep_their_cause(made, verb):
    function = UserFunction()
    function.records["bad"] = {"n": 0}
    table = made(function)
    cause = Broken("the disk is full")
    one = {
        "get": lambda: table.get("bad"),
        "put": lambda: table.put("bad", {"n": 1}),
        "delete": lambda: table.delete("bad"),
        "update": lambda: table.update("bad", {"n": 1}),
    }[verb]
    many = {
        "get": lambda: table.get_all(["x", "bad"]),
        "put": lambda: table.put_all([("x", {"n": 1}), ("bad", {"n": 1})]),
        "delete": lambda: table.delete_all(["x", "bad"]),
        "update": lambda: table.update_all([("x", {"n": 1}), ("bad", {"n": 1})]),
    }[verb]
    for call in (one, many):
        function.records["x"] = {"n": 0}
        function.will(verb, "bad", cause)
        with pytest.raises(AdjunctError) as caught:
            run(call())
        assert first_cause(caught.value, Broken) is cause
        assert all(part in str(caught.value) for part in ("state", verb, "'bad'")), str(
            caught.value
        )
        assert "'x'" not in str(caught.value)
        assert caught.value.table == "state"


def test_of_many_entries_the_one_that_fails_is_the_only_one_not_done(made):
    function = UserFunction()
    function.will("put", 13, Broken("no"))
    table = made(function)
    with pytest.raises(AdjunctError, match="13"):
        run(table.put_all([(n, {"n": n}) for n in range(40)]))
    assert function.records == {n: {"n": n} for n in range(40) if n != 13}


def test_of_calls_at_once_only_that_of_the_failing_entry_fails(made):
    function = UserFunction()
    function.will("put", 13, Broken("no"))
    table = made(function)

    async def at_once():
        async with table:
            return await asyncio.gather(
                *(table.put(n, {"n": n}) for n in range(40)), return_exceptions=True
            )

    answers = run(at_once())
    assert [n for n, answer in enumerate(answers) if answer is not None] == [13]
    assert function.records == {n: {"n": n} for n in range(40) if n != 13}


# --- updates
# ----------------------------------------------------------------------------------------------------------


def plain(key):
    return record_not_found_error([key])


def raised_from(key):
    error = RuntimeError("the driver says 404")
    error.__cause__ = record_not_found_error([key])
    return error


def while_handling(key):
    error = RuntimeError("and then this")
    error.__context__ = record_not_found_error([key])
    return error


def in_a_group(key):
    return ExceptionGroup(
        "one of these", [ValueError("not this"), ExceptionGroup("deeper", [plain(key)])]
    )


def five_deep(key):
    error: BaseException = in_a_group(key)
    for number in range(5):
        outer = RuntimeError(f"wrapped {number}")
        outer.__cause__ = error
        error = outer
    return ExceptionGroup("outermost", [error])


WRAPPED = [plain, raised_from, while_handling, in_a_group, five_deep]


@pytest.mark.parametrize("missing", WRAPPED)
def test_a_missing_record_is_begun_with_its_default_however_the_error_is_wrapped(made, missing):
    function = UserFunction()
    function.missing = missing
    function.records["there"] = {"n": 5, "by": "another"}
    table = made(function)
    messages = [
        (key, UpdateMessage({"n": 1}, {"n": 0, "by": "default"})) for key in ("there", "new")
    ]
    run(table.update_messages(messages, DEFAULTS))
    assert function.records == {
        "there": {"n": 1, "by": "another"},
        "new": {"n": 1, "by": "default"},
    }
    assert function.keys_asked("put_if_absent") == ["new"]
    assert function.keys_asked("update").count("there") == 1
    assert function.keys_asked("update").count("new") == 2
    assert table.metrics.records.defaults_put == 1
    assert table.metrics.store.failures == table.metrics.store.retries == 0


@pytest.mark.parametrize("missing", WRAPPED)
def test_without_the_contract_a_missing_record_is_an_error_that_names_the_key(made, missing):
    function = UserFunction()
    function.missing = missing
    table = made(function)
    for call in (
        lambda: table.update("new", {"n": 1}),
        lambda: table.update_all([("new", {"n": 1})]),
        lambda: table.update_messages([("new", UpdateMessage({"n": 1}, {"n": 0}))], ONLY),
    ):
        with pytest.raises(RecordNotFoundError) as caught:
            run(call())
        assert caught.value.keys == ("new",)
    assert len(function.asked) == 3  # a missing record is an answer, and not asked for again
    assert table.metrics.store.failures == table.metrics.store.retries == 0


def test_a_default_never_erases_what_another_writer_began_meanwhile(made):
    function = UserFunction()

    def missing(key):
        error = record_not_found_error([key])
        function.records[key] = {"n": 7, "by": "another"}  # right after the update looked
        return error

    function.missing = missing
    run(
        made(function).update_messages(
            [("a", UpdateMessage({"n": 8}, {"n": 0, "by": "default"}))], DEFAULTS
        )
    )
    assert function.records == {"a": {"n": 8, "by": "another"}}


def test_defaults_without_put_if_absent_are_rejected_before_anything_is_sent(made):
    function = WithoutPutIfAbsent()
    with pytest.raises(ConfigurationError) as caught:
        run(made(function).update_messages([("a", UpdateMessage({"n": 1}, {"n": 0}))], DEFAULTS))
    assert (caught.value.table, caught.value.argument) == ("state", "defaults_may_overwrite")
    assert function.asked == []


def test_defaults_that_may_overwrite_are_put_where_that_was_declared(made):
    function = WithoutPutIfAbsent()
    table = made(function, defaults_may_overwrite=True)
    run(
        table.update_messages([("a", UpdateMessage({"n": 1}, {"n": 0, "by": "default"}))], DEFAULTS)
    )
    assert function.records == {"a": {"n": 1, "by": "default"}}


def test_several_updates_of_a_new_record_follow_its_first_default_in_order(made):
    function = UserFunction()
    messages = [
        ("a", UpdateMessage({"n": 1}, {"by": "first"})),
        ("b", UpdateMessage({"n": 1}, {"by": "b"})),
        ("a", UpdateMessage({"n": 2}, {"by": "second"})),
        ("a", UpdateMessage({"m": 3})),
    ]
    run(made(function).update_messages(messages, DEFAULTS))
    assert function.records == {"a": {"by": "first", "n": 2, "m": 3}, "b": {"by": "b", "n": 1}}


def test_an_error_after_a_refused_default_does_not_advise_what_was_used(made):
    function = UserFunction()
    table = made(function)
    with pytest.raises(RecordNotFoundError) as without:
        run(table.update_messages([("a", UpdateMessage({"n": 1}))], DEFAULTS))
    assert (
        "UPDATE_WITH_DEFAULTS" not in without.value.next_step
        or "default" in without.value.next_step
    )
    function.will("put_if_absent", "b", Broken("no space"))
    with pytest.raises(AdjunctError) as refused:
        run(table.update_messages([("b", UpdateMessage({"n": 1}, {"n": 0}))], DEFAULTS))
    assert "UPDATE_WITH_DEFAULTS" not in refused.value.next_step
    assert first_cause(refused.value, Broken) is not None


def test_a_function_without_updates_says_so(made):
    function = WithoutUpdate()
    for call in (
        made(function).update("a", {"n": 1}),
        made(function).update_all([("a", {"n": 1})]),
    ):
        with pytest.raises(AdjunctError) as caught:
            run(call)
        assert (caught.value.table, caught.value.function) == ("state", "WithoutUpdate")
    assert function.asked == []


# --- arguments
# --------------------------------------------------------------------------------------------------------


def test_arguments_reach_the_function_with_every_request(made):
    function = UserFunction()
    table = made(function)
    args = ("tenant-7", {"deep": [1]})

    async def all_of_them():
        async with table:
            for call in (
                every_write(table, "a", args)["put"],
                every_write(table, "a", args)["put_all"],
            ):
                await call()
            await table.get("a", *args)
            await table.get_all(["a", "never"], *args)
            await table.update("a", {"n": 2}, *args)
            await table.update_all([("a", {"n": 2})], *args)
            await table.update_messages(
                [("begun", UpdateMessage({"n": 1}, {"n": 0}))], DEFAULTS, *args
            )
            await table.delete("a", *args)
            await table.delete_all(["b", "other"], *args)

    run(all_of_them())
    assert {verb for verb, *_ in function.asked} == {
        "get",
        "put",
        "put_if_absent",
        "update",
        "delete",
    }
    assert {repr(given) for *_, given in function.asked} == {repr(args)}


def test_calls_at_once_with_other_arguments_keep_their_own(made):
    function = UserFunction()
    table = made(function)

    async def at_once():
        async with table:
            await asyncio.gather(*(table.put(n, {"n": n}, f"for {n}") for n in range(12)))
            await asyncio.gather(*(table.get(n, f"for {n}") for n in range(12)))

    run(at_once())
    assert all(args == (f"for {key}",) for _, key, _, args in function.asked)


def test_a_function_without_use_for_arguments_refuses_them(made):
    store = MemoryTable("no-arguments")
    store.clear()
    table = made(store)
    for call in (
        table.put("a", {"n": 1}, "x"),
        table.get("a", "x"),
        table.update("a", {"n": 1}, "x"),
    ):
        with pytest.raises(ConfigurationError, match="argument"):
            run(call)


# --- order
# ------------------------------------------------------------------------------------------------------------


def test_calls_for_one_key_take_effect_in_order_though_some_are_retried(made, layers):
    function = UserFunction()
    passing = 1 if "retry" in layers else 0
    for number in range(30):
        if number % 3 == 0 and passing:
            function.will("put", f"k{number % 4}", Busy("wait"), None, 0.002)
    table = made(function)

    async def at_once():
        async with table:
            await asyncio.gather(*(table.put(f"k{n % 4}", {"n": n}) for n in range(60)))

    run(at_once())
    for key in range(4):
        values = [value["n"] for verb, k, value in function.done if k == f"k{key}"]
        assert values == sorted(values)
        assert values[-1] == 56 + key
    assert function.records == {f"k{key}": {"n": 56 + key} for key in range(4)}


def test_kinds_that_alternate_keep_the_order_of_their_key(made):
    function = UserFunction()
    table = made(function)

    async def at_once():
        async with table:
            calls = []
            for number in range(10):
                calls += [
                    table.put("a", {"n": number}),
                    table.update("a", {"m": number}),
                    table.delete("b"),
                ]
                calls += [table.put("b", {"n": number}), table.delete("a")]
            await asyncio.gather(
                *calls, table.put("a", {"n": "last"}), table.update("a", {"m": "too"})
            )

    run(at_once())
    assert function.records == {"a": {"n": "last", "m": "too"}, "b": {"n": 9}}


def test_other_keys_overtake_one_that_is_slow(made):
    function = UserFunction()
    released = asyncio.Event()
    function.will("put", "slow", released)
    table = made(function)

    async def at_once():
        async with table:
            slow = asyncio.create_task(table.put("slow", {"n": 1}))
            await asyncio.sleep(0.02)
            await asyncio.wait_for(table.put("quick", {"n": 1}), 60)
            assert not slow.done()
            released.set()
            await slow

    run(at_once())


def test_a_get_sees_the_puts_that_were_called_before_it(made):
    function = UserFunction()
    function.will("put", "a", 0.01)
    table = made(function)

    async def at_once():
        async with table:
            answers = []
            for number in range(5):
                put = asyncio.create_task(table.put("a", {"n": number}))
                await asyncio.sleep(0)
                get = asyncio.create_task(table.get("a"))
                await asyncio.sleep(0)
                many = asyncio.create_task(table.get_all(["a", "b"]))
                await put
                answers.append((await get, await many))
            return answers

    assert run(at_once()) == [({"n": n}, {"a": {"n": n}}) for n in range(5)]


def test_a_get_after_a_delete_finds_nothing(made):
    function = UserFunction()
    table = made(function)

    async def in_turn():
        async with table:
            await table.put("a", {"n": 1})
            assert await table.get("a") == {"n": 1}
            await table.delete("a")
            assert await table.get("a") is None
            await table.put("a", {"n": 2})
            assert await table.get("a") == {"n": 2}
            await table.update("a", {"m": 3})
            assert await table.get("a") == {"n": 2, "m": 3}
            await table.put_all([("a", None)])
            assert await table.get_all(["a"]) == {}

    run(in_turn())


def test_a_slow_read_does_not_hide_a_newer_write(made):
    """The store answers the read with what was there before the write, and later than the write."""
    function = UserFunction()
    function.records["a"] = {"n": "old"}

    class Slow(UserFunction):
        async def get(self, key, *args):
            record = function.records.get(key)
            await asyncio.sleep(0.02)
            return record

        async def put(self, key, value, *args):
            function.records[key] = value

    table = made(Slow())

    async def race():
        async with table:
            reads = [asyncio.create_task(table.get("a")), asyncio.create_task(table.get_all(["a"]))]
            await asyncio.sleep(0.005)
            await table.put("a", {"n": "new"})
            await asyncio.gather(*reads)
            return await table.get("a"), await table.get_all(["a"])

    assert run(race()) == ({"n": "new"}, {"a": {"n": "new"}})


def test_a_record_that_a_caller_changes_is_not_what_others_get(made):
    class Copies(UserFunction):
        async def get(self, key, *args):
            return deepcopy(self.records.get(key))

        async def put(self, key, value, *args):
            self.records[key] = deepcopy(value)

    table = made(Copies())

    async def changing():
        async with table:
            own = {"n": 1, "tags": ["x"]}
            await table.put("a", own)
            own["tags"].append("changed")
            got = await table.get("a")
            got["tags"].append("changed")
            got["n"] = "changed"
            return await table.get("a"), (await table.get_all(["a"]))["a"]

    assert run(changing()) == ({"n": 1, "tags": ["x"]}, {"n": 1, "tags": ["x"]})


def test_a_key_of_several_columns_keeps_their_order_though_the_stores_is_another(tmp_path):
    store = SqliteTable(
        tmp_path / "order.sqlite",
        "t",
        ["b", "a"],
        columns=dict.fromkeys("abn", "string"),
        create=True,
    )
    table = RemoteTable("state", key=["a", "b"], read_function=store, write_function=store)

    async def in_turn():
        async with table:
            await table.put(("of a", "of b"), {"n": "1"})
            with pytest.raises(SchemaMismatchError, match="expected a tuple of a, b"):
                await table.get("of a")
            return await table.get(("of a", "of b"))

    assert run(in_turn()) == {"a": "of a", "b": "of b", "n": "1"}


# --- retries
# ----------------------------------------------------------------------------------------------------------


def test_only_the_entries_that_failed_are_sent_again():
    function = UserFunction()
    function.will("put", 3, Busy("wait"))
    function.will("put", 7, Busy("wait"), Busy("wait"))
    table = table_of(function, {"retry"})
    run(table.put_all([(n, {"n": n}) for n in range(10)]))
    asked = function.keys_asked("put")
    assert {n: asked.count(n) for n in range(10)} == {n: {3: 2, 7: 3}.get(n, 1) for n in range(10)}
    assert function.records == {n: {"n": n} for n in range(10)}


def test_an_increment_is_not_applied_again_to_entries_that_had_succeeded():
    store = MemoryTable("increments")
    store.clear()
    troubled = TroubledFunction(store, 5, chance=0.9, forgets=False)
    table = table_of(
        troubled, {"retry", "batch"}, retry=RetryPolicy(attempts=60, first_wait=0, max_wait=0)
    )

    async def count_up():
        await table.put_all([(n, {"n": 0}) for n in range(5)])
        await asyncio.gather(
            *(
                table.update_all([(n % 5, Changes(add={"n": 1})) for n in range(50)])
                for _ in range(4)
            )
        )
        return await table.get_all(range(5))

    assert run(count_up()) == {n: {"n": 40} for n in range(5)}
    assert troubled.spoilt > 10


def test_what_does_not_pass_is_asked_once(made):
    function = UserFunction()
    function.will("put", "a", Broken("never"))
    table = made(function)
    with pytest.raises(AdjunctError):
        run(table.put("a", {"n": 1}))
    assert len(function.asked) == 1
    assert (table.metrics.store.retries, table.metrics.store.failures) == (0, 1)


class FailsFirst(TroubledFunction):
    """The first so many operations have no effect."""

    fails = 1

    async def send(self, operation):
        self.seen.append(operation)
        await asyncio.sleep(0.002)
        if len(self.seen) <= self.fails:
            return Outcomes.all(len(operation), Problem(State.FAILED, Busy("down", "Wait.")))
        return await self.inner.send(operation)


def test_messages_waiting_behind_a_given_up_one_are_not_applied(made, layers):
    """Applied, the later one would make the earlier one look old, and it would be skipped when
    it comes again.
    """
    store = MemoryTable("behind")
    store.clear()
    function = FailsFirst(store)
    function.fails = 4 if "retry" in layers else 1
    table = made(function, idempotent=True, batches=BatchProvider(size=2))
    sent = messages(3, sources=1, per_source=12, keys=2)["lake.clicks.0"]

    async def twice():
        answers = []
        for _ in range(2):
            calls = [table.send(counting(batch)) for batch in batches(sent, 2)]
            calls.insert(1, table.send(Operation(OperationKind.GET, RowEntries(["k0", "k1"]))))
            answers += await asyncio.gather(*calls)
        return answers, await table.get_all(["k0", "k1"])

    answers, records = run(twice())
    assert any(outcomes.problems for outcomes in answers)
    assert {key: record["total"] for key, record in records.items()} == totals(sent)


def test_counters_with_marks_are_exact_whatever_fails(made, layers):
    store = MemoryTable("marked")
    store.clear()
    troubled = TroubledFunction(store, 9, chance=0.6 if "retry" in layers else 0.2)
    sent = messages(31, per_source=40)
    retry = (
        RetryPolicy(attempts=60, first_wait=0, max_wait=0)
        if "retry" in layers
        else RetryPolicy(attempts=1)
    )
    table = made(troubled, idempotent=True, retry=retry)

    async def source(own):
        """A reader whose checkpoint is where nothing failed any more: whatever came after it is
        sent again.
        """
        waiting = batches(own, 5)
        while waiting:
            answers = await asyncio.gather(*(table.send(counting(batch)) for batch in waiting[:3]))
            well = next(
                (n for n, outcomes in enumerate(answers) if outcomes.places(*LEFT)), len(answers)
            )
            waiting = waiting[well:]

    async def all_sources():
        await asyncio.gather(*map(source, sent.values()))
        troubled.chance = 0
        return await table.get_all(expected)

    expected = totals(message for own in sent.values() for message in own)
    assert {key: record["total"] for key, record in run(all_sources()).items()} == expected
    assert troubled.spoilt > 20


def test_the_newest_stays_whatever_fails_and_in_whatever_order_it_comes(made):
    store = MemoryTable("latest")
    store.clear()
    troubled = TroubledFunction(store, 4, chance=0.6)
    sent = [message for own in messages(32, per_source=40).values() for message in own]
    table = made(
        troubled, newest_by="seen", retry=RetryPolicy(attempts=60, first_wait=0, max_wait=0)
    )

    async def writer(seed):
        shuffled = Random(seed).sample(sent, len(sent))
        await asyncio.gather(
            *(table.send(keeping_newest(batch, epoch=seed)) for batch in batches(shuffled, 5))
        )

    async def two_writers():
        await asyncio.gather(writer(0), writer(1))
        troubled.chance = 0
        return await table.get_all(expected)

    expected = {key: record_of(message) for key, message in newest(sent).items()}
    assert run(two_writers()) == expected


@pytest.mark.lengthy
def test_a_request_that_hangs_is_given_up_and_sent_again():
    function = UserFunction()
    function.will("put", "a", 30)
    function.will("get", "a", 30)
    table = table_of(function, {"retry"}, retry=RetryPolicy(attempts=3, first_wait=0, timeout=1.5))

    async def past_it():
        async with table:
            await asyncio.gather(
                table.put("a", {"n": 1}), table.put("a", {"n": 2}), table.put("b", {"n": 1})
            )
            return await table.get("a")

    assert run(past_it()) == {"n": 2}
    assert function.records == {"a": {"n": 2}, "b": {"n": 1}}
    assert table.metrics.store.timeouts == 2


@pytest.mark.lengthy
def test_a_request_that_hangs_every_time_is_an_error_that_keeps_no_other_waiting():
    function = UserFunction()
    function.will("put", "a", *[30] * 3)
    table = table_of(function, {"retry"}, retry=RetryPolicy(attempts=3, first_wait=0, timeout=1.5))

    async def past_it():
        async with table:
            hanging = asyncio.create_task(table.put("a", {"n": 1}))
            await table.put("b", {"n": 1})
            assert not hanging.done()
            with pytest.raises(AdjunctError, match=r"state.*'a'") as caught:
                await hanging
            await table.put("a", {"n": 2})
            return caught.value

    assert first_cause(run(past_it()), TimeoutError) is not None
    assert function.records == {"a": {"n": 2}, "b": {"n": 1}}


# --- closing
# ----------------------------------------------------------------------------------------------------------


def test_closing_loses_nothing_that_was_called_before(made):
    function = UserFunction()
    function.will("put", 5, 0.01)
    table = made(function)

    async def close_at_once():
        puts = [asyncio.create_task(table.put(n, {"n": n})) for n in range(30)]
        await asyncio.sleep(0)
        await table.close()
        await asyncio.gather(*puts)

    run(close_at_once())
    assert function.records == {n: {"n": n} for n in range(30)}


def test_a_closed_table_opens_again_and_travels(made):
    store = MemoryTable("travels")
    store.clear()
    table = made(store)

    async def twice():
        async with table:
            await table.put("a", {"n": 1})
        async with table:
            await table.update("a", {"m": 2})

    run(twice())
    run(twice())  # another event loop
    copy = pickle.loads(pickle.dumps(table))
    assert run(copy.get("a")) == {"n": 1, "m": 2}


def test_the_blocking_facade_does_what_the_table_does(made):
    function = UserFunction()
    with BlockingTable(made(function)) as table:
        table.put("a", {"n": 1})
        table.put_all([("b", {"n": 2}), ("c", {"n": 3})])
        table.update("a", {"m": 1})
        table.update_all([("b", {"m": 2})])
        table.update_messages([("d", UpdateMessage({"n": 4}, {"m": 4}))], DEFAULTS)
        assert table.get("a") == {"n": 1, "m": 1}
        assert table.get_all(["b", "d", "none"]) == {"b": {"n": 2, "m": 2}, "d": {"n": 4, "m": 4}}
        table.put("a", None)
        table.delete("b")
        table.delete_all(["c"])
    assert function.records == {"d": {"n": 4, "m": 4}}


def test_every_public_request_of_the_table_has_its_blocking_form():
    def requests(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    asynchronous = {
        name
        for name in requests(RemoteTable)
        if asyncio.iscoroutinefunction(getattr(RemoteTable, name))
    }
    assert asynchronous - requests(BlockingTable) <= {"send"}


def test_a_call_that_is_cancelled_takes_no_other_with_it(made):
    function = UserFunction()
    function.will("put", "slow", 0.05)
    table = made(function)

    async def cancel_one():
        async with table:
            slow = asyncio.create_task(table.put("slow", {"n": 1}))
            others = [asyncio.create_task(table.put(n, {"n": n})) for n in range(10)]
            after = asyncio.create_task(table.put("slow", {"n": 2}))
            await asyncio.sleep(0.01)
            slow.cancel()
            await asyncio.gather(*others, after)
            await asyncio.gather(slow, return_exceptions=True)

    run(cancel_one())
    assert function.records == {n: {"n": n} for n in range(10)} | {"slow": {"n": 2}}


# --- what callers hand in
# ---------------------------------------------------------------------------------------------


def test_views_and_iterators_of_entries_are_as_good_as_lists(made):
    function = UserFunction()
    table = made(function)
    records = {n: {"n": n} for n in range(5)}

    async def with_views():
        async with table:
            await table.put_all(records.items())
            assert await table.get_all(records.keys()) == records
            assert await table.get_all(set(records)) == records
            await table.update_all(({n: {"m": n} for n in range(2)}).items())
            await table.delete_all({3, 4})

    run(with_views())
    assert function.records == {0: {"n": 0, "m": 0}, 1: {"n": 1, "m": 1}, 2: {"n": 2}}


def test_keys_that_come_twice_are_found_once(made):
    function = UserFunction()
    function.records |= {"a": {"n": 1}}
    assert run(made(function).get_all(["a", "b", "a"])) == {"a": {"n": 1}}


@pytest.mark.parametrize("number", [True, False, 2.5, 0, -1, "3", float("inf"), float("nan")])
def test_a_batch_size_is_a_whole_number_from_1_on(number):
    with pytest.raises(ConfigurationError):
        RemoteTable("state", key="id", read_function=UserFunction(), batch_size=number)


@pytest.mark.parametrize("number", [True, 0, -1, "3", float("inf"), float("nan")])
def test_a_rate_is_a_finite_number_above_0(number):
    with pytest.raises(ConfigurationError):
        RateLimit(writes_per_second=number)
    with pytest.raises(ConfigurationError):
        RateLimit(reads_per_second=number)


def test_the_entries_of_a_request_are_counted_once_whatever_layers_it_goes_through():
    counted = []

    class Counted(RowEntries):
        def __len__(self) -> int:
            counted.append(1)
            return super().__len__()

    store = MemoryTable("counted-once")
    table = RemoteTable(
        "t",
        key="id",
        read_function=store,
        write_function=store,
        cache=Cache(),
        rate_limit=RateLimit(1e9, 1e9),
    )
    asyncio.run(table.send(Operation(OperationKind.PUT, Counted(["a"], [{"id": "a"}]))))
    assert store.records() == {"a": {"id": "a"}}
    assert len(counted) == 1
