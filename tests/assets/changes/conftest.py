"""A world whose changes are decoded by Spark, and again in process: what holds for one holds for the other."""

from __future__ import annotations

import pytest

from dagster_adjunct.resources.spark.given_session import IN_PROCESS
from tests.assets.conftest import World


@pytest.fixture(params=["spark", "in process"])
def either(request: pytest.FixtureRequest, world: World) -> World:
    if request.param == "spark":
        session = request.getfixturevalue("spark")
        world.spark = lambda: session
    else:
        world.spark = IN_PROCESS
    return world
