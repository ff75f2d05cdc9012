"""Every public function, constructor and method is given what it does not take: the answer is an
error of ours.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dagster_adjunct.errors import AdjunctError, ConfigurationError
from dagster_adjunct.resources.validation import validated
from tests.clocks import on_clock
from tests.public_names import public_names
from tests.resources.key_value.scripted_segments import ScriptedSegments

public = SimpleNamespace(**public_names())
WRONG: tuple[Any, ...] = (
    None,
    5,
    -1,
    True,
    1.5,
    [],
    [5],
    {},
    "",
    "a b",
    b"x",
    object(),
    lambda *given, **named: 1,
)
WRONG += ("\udcff", 10**20)  # half a character, and a number that no index reaches


class _NoSparkError(Exception):
    """Spark was asked for: what was given has passed all checks."""


def _no_spark() -> Any:
    raise _NoSparkError


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Values that fit, by the names of parameters: what is asked for besides the one that is
    wrong.
    """
    lake = public.open_lake("memory://public-arguments")
    schema = public.Schema.of(k="string", n="int")
    streams = public.LakeStreams(lake)
    streams.create("s", schema=schema, key=["k"], partitions=2)
    ssp = public.SystemStreamPartition("lake", "s", 0)
    dataset = public.bounded_dataset("d", input="lake.s", key="k", partitions=2)
    app = public.Application("app")
    orders = app.input_stream("lake.s")
    return {
        # a lake in memory lives as long as somebody holds it
        "streams_kept": streams,
        "lake_kept": lake,
        "lake": lake,
        "spark": _no_spark,
        "schema": schema,
        "name": "x",
        "input": "lake.s",
        "key": "k",
        "by": "ada",
        "reason": "why",
        "partitions": 2,
        "spec": dataset,
        "dataset": dataset,
        "member": dataset,
        "members": dataset,
        "system": "lake",
        "systems": {"lake": streams},
        "stream": "s",
        "ssp": ssp,
        "partition": 0,
        "app": app,
        "application": app,
        "version": "v1",
        "table": dataset,
        "on": "k",
        "condition": "n > 1",
        "expressions": "*",
        "columns": "k",
        "target": app.output_stream("lake.out", partitions=2),
        "url": "memory://x",
        "version_set": "x",
        "ranges": {ssp: public.OffsetRange("0", "0")},
        "data": pa.table({"k": ["a"], "n": pa.array([1], pa.int32())}),
        "producer": "p",
        "sequence": 1,
        "startpoint": public.StartpointOldest(),
        "position": public.StartpointOldest(),
        "message_stream": orders,
        "home": tmp_path_factory.mktemp("home"),
        "path": tmp_path_factory.mktemp("path"),
        "now": datetime.now(UTC),
        "limit": 1,
        "key_columns": ["k"],
        "keys": ["a"],
        "timestamp_ms": 10**12,
        "grace": timedelta(hours=1),
        "field": "n",
        "type": "int",
        "column": "n",
        "old": "v1",
        "new": "v2",
    }


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster_adjunct.resources.streams import system as systems
    from dagster_adjunct.resources.table_backends import columns as registry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(systems, "_registered", dict(systems._registered))
    for name, value in vars(registry).items():
        if isinstance(value, dict) and name.startswith("_") and not name.startswith("__"):
            monkeypatch.setattr(registry, name, dict(value))


def _functions() -> Iterator[tuple[str, Any]]:
    for name, member in vars(public).items():
        if inspect.isfunction(member):
            yield name, member
        elif (
            inspect.isclass(member)
            and not issubclass(member, BaseException | enum.Enum)
            and _is_made(member)
        ):
            yield name, member
            for attribute in dir(member):
                static = inspect.getattr_static(member, attribute, None)
                if (
                    not attribute.startswith("_")
                    and isinstance(static, classmethod | staticmethod)
                    and _is_ours(static)
                ):
                    yield f"{name}.{attribute}", getattr(member, attribute)


def _is_made(cls: type[Any]) -> bool:
    return not inspect.isabstract(cls) and not getattr(cls, "_is_protocol", False)


def _is_ours(member: Any) -> bool:
    module = str(getattr(getattr(member, "__func__", member), "__module__", ""))
    return module.split(".", maxsplit=1)[0] == "dagster_adjunct"


def _opened() -> Any:
    """A dataset that exists and waits for its first version, in a lake of its own."""
    lake = public.open_lake("memory://public-arguments-of-a-dataset")
    streams = public.LakeStreams(lake)
    streams.create("s", schema=public.Schema.of(k="string"), key=["k"], partitions=2)
    declared = public.bounded_dataset("d", input="lake.s", key="k", partitions=2)
    public.advance_dataset(
        declared, lake=lake, systems={"lake": streams}, spark=_no_spark, by="ada"
    )
    return public.open_dataset(lake, declared)


def _objects(known: dict[str, Any]) -> dict[str, Any]:
    """One object of each public class whose methods users call and that needs neither Spark nor
    a server.
    """
    lake, app = known["lake"], public.Application("shop")
    return {
        "Application": app,
        "MessageStream": app.input_stream("lake.s"),
        "Dataset": _opened(),
        "LakeStreams": public.LakeStreams(lake),
        "Lake": lake,
        "Schema": known["schema"],
        "StartpointManager": public.StartpointManager(public.MetadataStore(lake), "shop"),
        "CheckpointManager": public.CheckpointManager(lake, "shop"),
        "MetadataStore": public.MetadataStore(lake),
        "AdjunctDatasetManager": public.AdjunctDatasetManager(
            [public.unbounded_dataset("u", input="lake.s", key="k", partitions=2)],
            lake=lake,
            systems=known["systems"],
        ),
        "Startpoints": public.Startpoints(app, lake=lake),
        "KeyValueTable": ScriptedSegments().table(),
        "BlockingKeyValueTable": public.BlockingKeyValueTable(ScriptedSegments().table()),
    }


def _methods(known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, member in _objects(known).items():
        for attribute in dir(type(member)):
            static = inspect.getattr_static(type(member), attribute, None)
            if not attribute.startswith("_") and inspect.isfunction(static) and _is_ours(static):
                yield f"{name}.{attribute}", getattr(member, attribute)


def _given(function: Any, known: dict[str, Any]) -> tuple[list[inspect.Parameter], dict[str, Any]]:
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
        and not parameter.name.startswith("_")  # pydantic's own are none of ours
    ]
    needed = {
        parameter.name: known.get(parameter.name, "x")
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
    }
    return parameters, needed


def _call(function: Any, parameters: list[inspect.Parameter], given: dict[str, Any]) -> None:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.name not in given:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            args.append(given[parameter.name])
        else:
            kwargs[parameter.name] = given[parameter.name]
    # what stands before it is given by position
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        before = [
            parameter.name
            for parameter in parameters
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name in kwargs
        ]
        args = [*(kwargs.pop(name) for name in before), *args]
    result = function(*args, **kwargs)
    if inspect.iscoroutine(result):
        asyncio.run(asyncio.wait_for(result, 5))
    elif inspect.isgenerator(result):
        next(result, None)


def _attack(functions: Iterator[tuple[str, Any]], known: dict[str, Any]) -> list[str]:
    bare = []
    for name, function in functions:
        parameters, needed = _given(function, known)
        for parameter in parameters:
            for value in WRONG:
                try:
                    _call(function, parameters, {**needed, parameter.name: value})
                except (AdjunctError, _NoSparkError):
                    pass
                except Exception as error:  # noqa: BLE001 - that is what is looked for
                    bare.append(
                        f"{name}({parameter.name}={value!r:.30}): {type(error).__name__}:"
                        f" {str(error)[:90]}"
                    )
    return bare


@pytest.mark.lengthy
def test_no_function_or_constructor_answers_a_wrong_value_with_a_bare_error(
    known: dict[str, Any],
) -> None:
    assert "\n".join(_attack(_functions(), known)) == ""


def test_no_method_answers_a_wrong_value_with_a_bare_error(known: dict[str, Any]) -> None:
    assert "\n".join(_attack(_methods(known), known)) == ""


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: public.bounded_dataset("d", input="lake.s", key="k", partition=2),
            "no partition=. Did you mean part",
        ),
        (
            lambda: public.bounded_dataset("d", input="lake.s", key=7, partitions=2),
            r"key is 7 \(int\): expected a valid string or a sequence of str",
        ),
        (
            lambda: public.bounded_dataset("d", input=None, key="k", partitions=2),
            "input is None: expected a valid str",
        ),
        (lambda: public.bounded_dataset("d", input="lake.s", partitions=2), "lacks key="),
        (lambda: public.Application("a", owners=5), "owners is 5"),
        (lambda: public.Application("a", max_batch=5), "Did you mean max_batch_records="),
        (
            lambda: public.unbounded_dataset(
                "d", input="lake.s", key="k", partitions=2, valid_for=None
            ),
            "no valid_for=. It is an argument of bounded_dataset:",
        ),
        (
            lambda: public.bounded_dataset(
                "d", input="lake.s", key="k", partitions=2, order_by="at"
            ),
            "no order_by=. It is an argument of unbounded_dataset:",
        ),
        (
            lambda: public.values_in("title", "abc"),
            r"'abc' \(str\): expected an iterable. Put it into a list: \[",
        ),
        (
            lambda: public.Application("a", "b", "c"),
            "takes 1 arguments by position .name., and 3 are given",
        ),
        (
            lambda: public.KeyValueTableConfiguration(0),
            r"partitions is 0 \(int\): expected a value greater than 0",
        ),
        (
            lambda: public.Retention(max_age=timedelta(0)),
            "max_age is .*: expected a value greater than 0 seconds",
        ),
        (lambda: public.Retention(max_bites=5), "Did you mean max_bytes="),
        (lambda: public.no_nulls("a", None), "columns is None"),
        (lambda: public.open_lake(5), "url is 5"),
        (lambda: public.Schema.of(k=5), "k is 5"),
        (
            lambda: public.SparkResource(spark_conf={}),
            "SparkResource takes no spark_conf=. Did you mean spark_config=",
        ),
        (
            lambda: public.LakeResource(lake="x"),
            "LakeResource takes no lake=. LakeResource takes url=",
        ),
        (lambda: public.run_application(nonsense=1), "run_application takes no nonsense="),
        (
            lambda: public.Application("a").local_table(
                "t", key="k", schema=public.Schema.of(k="string"), partitions=1, nonsense=1
            ),
            "Application.local_table.'t'. takes no nonsense=",
        ),
        (
            lambda: public.session_scope(lake="x"),
            "session_scope takes no lake=. Did you mean lake_url=",
        ),
        (
            lambda: public.UpdateContract("nothing"),
            "UpdateContract has no 'nothing'. Use one of UpdateContract.UPDATE",
        ),
        (
            lambda: public.StreamSystem(),
            "StreamSystem is abstract. Write a class with advance, compare, distance",
        ),
        (
            lambda: type("Mine", (public.StreamWriter, public.NumberedOffsets), {})(),
            (
                "Mine lacks append, create, info, list_streams, oldest, read, upcoming, which a"
                " StreamWriter has"
            ),
        ),
        (lambda: public.Validator(), "Validator is abstract. Write a class with "),
        (
            lambda: type("Mine", (public.TableWriteFunction,), {"put": print})(),
            "Mine lacks delete, which a TableWriteFunction has",
        ),
    ],
)
def test_what_is_mistyped_is_named_with_what_was_meant(
    call: Callable[[], object], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        call()


def _takes_names_only(item: object) -> bool:
    """Return whether a class or function of ours takes no argument by position."""
    if not callable(item) or (isinstance(item, type) and issubclass(item, BaseException)):
        return False
    kinds = {each.kind for each in inspect.signature(item).parameters.values()}
    return kinds <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


# A result that users do not make, a class whose constructor is Python's own, and one of no class.
NOT_CALLED = {"AdvanceReport", "AdjunctTranslator", "IN_PROCESS"}
BY_NAME = sorted(name for name, item in vars(public).items() if _takes_names_only(item))


@pytest.mark.parametrize("name", sorted({*BY_NAME} - NOT_CALLED))
def test_an_argument_by_position_is_refused_where_all_are_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} takes 0 arguments by position"):
        getattr(public, name)(5)


def test_settings_that_are_given_by_position_are_among_those_that_are_refused() -> None:
    assert {"Retention", "CompactionPolicy", "stale", "StreamCapabilities"} <= {*BY_NAME}


@pytest.mark.parametrize("number", [True, "2", 2.0])
def test_nothing_but_a_whole_number_is_a_number_of_partitions(
    number: Any, known: dict[str, Any]
) -> None:
    app, schema, why = (
        public.Application("a"),
        public.Schema.of(k="string"),
        {"reason": "why", "by": "me"},
    )
    calls: list[Callable[[], object]] = [
        lambda: public.bounded_dataset("d", input="lake.s", key="k", partitions=number),
        lambda: public.unbounded_dataset("d", input="lake.s", key="k", partitions=number),
        lambda: public.LakeStreams(known["lake"]).create(
            "x", schema=schema, key=["k"], partitions=number
        ),
        lambda: app.output_stream("lake.o", partitions=number),
        lambda: app.local_table("t", key="k", schema=schema, partitions=number),
        lambda: public.repartition_stream(known["lake"], "s", number, **why),
        lambda: public.KeyValueTableConfiguration(number),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError) as caught:
            call()
        assert caught.value.argument == "partitions"


@pytest.mark.parametrize(
    "name",
    ["Sum", "Min", "Max", "Mean", "Distinct", "IcebergTable", "FunctionSerializer", "LakeStreams"],
)
def test_constructors_without_or_with_wrong_arguments_raise_our_errors(name: str) -> None:
    construct = getattr(public, name)
    needed = [
        each.name
        for each in inspect.signature(construct).parameters.values()
        if each.default is each.empty
    ]
    wrong: dict[str, object] = dict.fromkeys(needed, object())
    for given in ({}, wrong):
        with pytest.raises(ConfigurationError) as failure:
            construct(**given)
        assert failure.value.argument == needed[0]


def test_an_operation_is_refused_before_it_begins() -> None:
    opened = _opened()
    with pytest.raises(ConfigurationError) as caught:
        opened.pin("v1", reason=None, by="ada")  # type: ignore[arg-type]
    assert caught.value.argument == "reason"


def test_what_is_refused_when_it_is_made_has_started_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigurationError) as caught:
        public.Watch("planes", "x", 60.0)
    assert caught.value.argument == "refresh"
    assert set(threading.enumerate()) <= before


def test_a_list_of_columns_is_no_text_and_a_truth_is_no_number() -> None:
    for value in ("ab", b"ab", [b"a"], 5):
        with pytest.raises(ConfigurationError) as caught:
            public.LakeStreams(public.open_lake("memory://x")).create(
                "t",
                schema=public.Schema.of(k="int"),
                key=value,
                partitions=1,  # type: ignore[arg-type]
            )
        assert caught.value.argument == "key"
    with pytest.raises(ConfigurationError) as caught:
        public.LakeStreams(public.open_lake("memory://x")).create(
            "t", schema=public.Schema.of(k="int"), key=["k"], partitions=True
        )
    assert caught.value.argument == "partitions"


@pytest.mark.parametrize(
    "key",
    [
        ["a", "b"],
        ("a", "b"),
        {"a": 1, "b": 2}.keys(),
        {1: "a", 2: "b"}.values(),
        np.array(["a", "b"]),
    ],
    ids=["list", "tuple", "keys", "values", "array"],
)
def test_an_ordered_collection_of_any_kind_names_columns(key: Any) -> None:
    declared = public.bounded_dataset(
        "d", input="lake.s", key=key, partitions=np.int64(2), owners={"ada"}
    )
    assert (declared.key, declared.partitions) == (("a", "b"), 2)
    assert declared.presentation.owners == ("ada",)
    with pytest.raises(ConfigurationError) as failure:  # of which nobody knows the order
        public.bounded_dataset("d", input="lake.s", key={"a", "b"}, partitions=2)
    assert failure.value.argument == "key"


def test_numbers_of_other_classes_become_pythons() -> None:
    policy = public.RetryPolicy(np.int32(3), first_wait=np.float32(0.5), max_wait=np.int64(2))
    assert [type(value) for value in (policy.attempts, policy.first_wait, policy.max_wait)] == [
        int,
        float,
        int,
    ]
    for argument, value in (
        ("attempts", True),
        ("attempts", np.float64(3)),
        ("max_wait", Decimal(2)),
    ):
        with pytest.raises(ConfigurationError) as failure:
            public.RetryPolicy(**{argument: value})
        assert failure.value.argument == argument


@pytest.mark.parametrize(
    "call",
    [
        lambda: public.RedisTableResource(url="redis://x", password=["hunter2"]),
        lambda: public.PostgresTableResource(dsn={"password": "hunter2"}),
        lambda: public.DynamoDbTableResource(credentials="hunter2"),
        lambda: public.HttpTableResource(secret_headers={"Authorization": [b"hunter2"]}),
        lambda: public.SchemaRegistry("http://x", token=[b"hunter2"]),
        lambda: public.LakeSettings(sse_kms_key_id="hunter2"),
    ],
    ids=["password", "dsn", "credentials", "headers", "token", "several"],
)
def test_errors_show_no_value_of_an_argument_that_holds_a_secret(
    call: Callable[[], object],
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_mistake_inside_of_a_setting_is_at_the_users_line() -> None:
    with pytest.raises(ConfigurationError) as caught:
        public.SparkResource(emr_serverless={"application_id": None})
    assert caught.value.argument == "application_id"
    assert str(caught.value).startswith(f"{__file__}:")  # the working directory is another one


def test_values_of_variables_that_name_a_secret_are_displayed() -> None:
    with pytest.raises(ConfigurationError, match="password_env is 5"):
        public.RedisTable("t", key="id", columns={"id": "int"}, password_env=5)


def test_arguments_that_do_not_fit_together_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="LakeSettings: sse_kms_key_id needs sse"):
        public.LakeSettings(sse_kms_key_id="k")


def test_numbers_may_be_parameters_of_a_request() -> None:
    assert public.HttpExtra(params={"limit": 5, "deep": True}).params == (
        ("deep", True),
        ("limit", 5),
    )


def test_a_text_finds_its_record_in_a_cache_of_files() -> None:
    assert public.FileCache(1).get("key", lambda: ("record", 1)) == "record"


def test_what_a_users_own_function_raises_passes_as_it_is(known: dict[str, Any]) -> None:
    def clock() -> datetime:
        return datetime.now(UTC) + 1  # type: ignore[operator, no-any-return]

    streams = public.LakeStreams(on_clock(known["lake"], clock))
    with pytest.raises(TypeError, match="unsupported operand"):
        streams.append("s", known["data"], producer="p", sequence=1)


@pytest.mark.lengthy
def test_checked_functions_keep_signature_documentation_and_pickle() -> None:
    from dagster_adjunct.assets.declaration.dataset import bounded_dataset

    assert inspect.signature(public.bounded_dataset) == inspect.signature(bounded_dataset)
    assert public.bounded_dataset.__doc__ == bounded_dataset.__doc__
    assert pickle.loads(pickle.dumps(public.bounded_dataset)) is public.bounded_dataset


def test_users_arguments_are_checked_and_those_between_layers_are_not() -> None:
    functions = [
        each
        for each in vars(public).values()
        if inspect.isclass(each) and any(base.__name__ == "TableFunction" for base in each.__mro__)
    ]
    assert {public.MemoryTable, public.PostgresTable, public.KeyValueRows, public.HttpTable} <= set(
        functions
    )
    for each in functions:
        assert not hasattr(each.send, "__wrapped__"), each
        assert not hasattr(each.open, "__wrapped__"), each
    table = public.RemoteTable("t", key="id", write_function=public.MemoryTable("not-checked"))
    with pytest.raises(ConfigurationError) as caught:
        asyncio.run(table.send(5))
    assert caught.value.argument == "operation"


def test_functions_that_accept_any_values_name_missing_and_unknown_arguments() -> None:
    table = public.RemoteTable("t", key="id", write_function=public.MemoryTable("not-checked"))
    with pytest.raises(ConfigurationError) as caught:
        table.put("a")
    assert caught.value.argument == "value"
    with pytest.raises(ConfigurationError, match="valeu"):
        table.put("a", valeu={})

    @validated
    def refuse(value: object) -> None:
        raise TypeError(value)

    with pytest.raises(TypeError, match="its own"):
        refuse("its own")


def test_a_wrong_call_of_a_wrapped_function_is_refused_as_one_of_the_function() -> None:
    def refuse(value: object) -> None:
        raise TypeError(value)

    @functools.wraps(refuse)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        refuse(*args, **kwargs)

    wrapped = validated(wrapper)
    with pytest.raises(ConfigurationError) as caught:
        wrapped()
    assert caught.value.argument == "value"
    with pytest.raises(TypeError, match="its own"):
        wrapped("its own")
