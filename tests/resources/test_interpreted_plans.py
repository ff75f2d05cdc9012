"""What is known to be few rows is interpreted by Spark; everything else is left as it is."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.resources.small_work import SMALL_ROWS
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.spark.tuning import interpret_small_plans, use_interpreted_plans

WHOLE, EACH = "spark.sql.codegen.wholeStage", "spark.sql.codegen.factoryMode"
COMPILED, INTERPRETED = {WHOLE: "true", EACH: "FALLBACK"}, {WHOLE: "false", EACH: "NO_CODEGEN"}


class Settings(dict[str, str]):
    """A session's settings; once it has died, it takes none."""

    dead = False

    def set(self, name: str, value: str) -> None:
        if self.dead:
            raise ConnectionError("the JVM is gone")
        self[name] = value


class Session:
    def __init__(self, **settings: str) -> None:
        self.conf = Settings(settings)


def test_plans_are_interpreted_meanwhile_and_compiled_again_after_it() -> None:
    session: Any = Session(**COMPILED)
    with use_interpreted_plans(session):
        assert session.conf == INTERPRETED
        with use_interpreted_plans(session):
            assert session.conf == INTERPRETED
        assert session.conf == INTERPRETED
    assert session.conf == COMPILED


@pytest.mark.parametrize("dead", [False, True])
def test_an_error_comes_through_also_where_the_session_has_died_of_it(*, dead: bool) -> None:
    session: Any = Session(**COMPILED)

    def batch() -> None:
        with use_interpreted_plans(session):
            session.conf.dead = dead
            raise ValueError("the batch")

    with pytest.raises(ValueError, match="the batch"):
        batch()
    assert dead or session.conf == COMPILED


def test_a_session_with_other_settings_keeps_them() -> None:
    session: Any = Session(**COMPILED | {EACH: "CODEGEN_ONLY"})
    with use_interpreted_plans(session):
        assert session.conf == COMPILED | {EACH: "CODEGEN_ONLY"}
    assert session.conf == COMPILED | {EACH: "CODEGEN_ONLY"}


def test_only_for_few_rows_a_session_is_asked_for() -> None:
    session: Any = Session(**COMPILED)
    with interpret_small_plans(lambda: session, SMALL_ROWS):
        assert session.conf == INTERPRETED

    def never() -> Any:
        raise AssertionError("no session is needed")

    for rows in (None, SMALL_ROWS + 1):
        with interpret_small_plans(never, rows):
            pass
    with interpret_small_plans(IN_PROCESS, 1):
        pass
