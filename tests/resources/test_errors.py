"""Errors carry what they are about as fields, through pickles, Spark's texts and other words."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import fields

import pytest

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    LakeNotFoundError,
    OffsetOutOfRangeError,
    PartitionCountMismatchError,
    PermanentError,
    RecordNotFoundError,
    TransientError,
)
from dagster_adjunct.resources.spark.tasks import (
    decode_error,
    encode_task_errors,
    error_from_json,
    error_to_json,
)

ALL = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, AdjunctError)
]
LOST = OffsetOutOfRangeError(
    "gone.", "Begin later.", stream="lake.orders", partition=3, offset="7", oldest="9"
)
COUNTS = PartitionCountMismatchError("no.", counts=(("lake.flights", 16), ("dataset weather", 8)))


class OwnError(RecordNotFoundError):
    """As a table function of a user's may raise it."""

    def __init__(self, machine: str) -> None:
        super().__init__(f"there is no {machine}.", keys=(machine,))
        self.machine = machine


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_ends_in_error_and_needs_nothing_but_its_problem(
    kind: type[AdjunctError],
) -> None:
    assert kind.__name__.endswith("Error")
    assert kind.__doc__
    assert kind in (AdjunctError, PermanentError, TransientError) or issubclass(
        kind, PermanentError | TransientError
    )
    error = kind("it is wrong.", "Correct it.")
    assert (str(error), error.facts) == ("it is wrong. Correct it.", {})
    with pytest.raises(TypeError):
        kind("it is wrong.", "Correct it.", "orders")


def test_what_an_error_is_about_are_its_fields() -> None:
    assert LOST.facts == {"stream": "lake.orders", "partition": 3, "offset": "7", "oldest": "9"}
    assert (LOST.stream, LOST.partition, LOST.offset, LOST.upcoming) == (
        "lake.orders",
        3,
        "7",
        None,
    )


@pytest.mark.parametrize(
    "error", [LOST, COUNTS, OwnError("m1")], ids=lambda error: type(error).__name__
)
def test_a_pickle_keeps_class_texts_and_fields(error: AdjunctError) -> None:
    error.add_note("while reading")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)
    assert again.problem == error.problem


@pytest.mark.parametrize(
    "error", [LOST, COUNTS, OwnError("m1")], ids=lambda error: type(error).__name__
)
def test_a_task_s_error_keeps_its_fields_on_the_way_through_spark(error: AdjunctError) -> None:
    def task() -> Iterator[int]:
        yield 1
        raise error

    with pytest.raises(RuntimeError) as reported:
        list(encode_task_errors(task()))
    for carried in (
        decode_error(f"Job aborted: {reported.value} at java"),
        error_from_json(error_to_json(error)),
    ):
        assert carried is not None
        assert (carried.problem, carried.next_step, carried.facts) == (
            error.problem,
            error.next_step,
            error.facts,
        )


def test_keys_that_no_text_holds_stay_where_they_are() -> None:
    error = RecordNotFoundError("no record.", table="state", keys=(b"\0", object()))
    assert error_from_json(error_to_json(error)).facts == {"table": "state"}


def test_an_error_in_other_words_is_about_the_same_things() -> None:
    again = LOST.reworded("the checkpoint is gone.", "")
    assert (type(again), str(again), again.facts) == (
        OffsetOutOfRangeError,
        "the checkpoint is gone.",
        LOST.facts,
    )
    more = ConfigurationError("wrong.", argument="key").reworded(
        "dataset 'd': wrong.", "", dataset="d"
    )
    assert more.facts == {"argument": "key", "dataset": "d"}


def test_neither_text_nor_field_holds_a_password() -> None:
    error = LakeNotFoundError(
        "s3://ada:secret@host/lake is empty.", url="s3://ada:secret@host/lake"
    )
    assert (error.problem, error.url) == ("s3://***@host/lake is empty.", "s3://***@host/lake")


def test_facts_of_another_release_are_passed_over() -> None:
    document = {"error": "NoSuchError", "problem": "no.", "next_step": "", "facts": {"moon": 1}}
    assert (type(error_from_json(document)), error_from_json(document).facts) == (AdjunctError, {})
    assert ConfigurationError("no.", argument="key").argument == "key"
    common = {field.name for field in fields(AdjunctError)}
    assert common >= {
        "problem",
        "next_step",
        "application",
        "operator",
        "dataset",
        "stream",
        "table",
        "column",
    }
    own = {"argument", "setting", "system", "topic", "backend", "module", "package"}
    own |= {"declared_at"}
    assert {field.name for field in fields(ConfigurationError)} == common | own
