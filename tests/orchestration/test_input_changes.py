"""Applications that follow the changes of a dataset, against dictionaries."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.orchestration.changing_datasets import (
    Changing,
    Delivered,
    Following,
    check_followed,
    follow,
    follow_and_die,
    mirror_of,
    new_world,
)
from tests.rounds import rounds

EVENTS = ("intent", "output", "outputs", "batch")


@pytest.mark.rounds
@pytest.mark.parametrize("kind", [Following, Delivered])
@pytest.mark.parametrize("partitions", [2, None], ids=["partitioned", "broadcast"])
@pytest.mark.parametrize("seed", range(rounds(1, 30)))
def test_what_follows_a_dataset_ends_equal_to_it(
    tmp_path: Path, kind: type[Changing], partitions: int | None, seed: int
) -> None:
    draw = random.Random(f"{kind.__name__} {partitions} {seed}")
    world = new_world(tmp_path)
    dataset = kind(world, draw, partitions)
    dataset.begin()
    dataset.change()
    for _ in range(25):
        draw.choice(dataset.actions)()
        app = mirror_of(dataset.declare(), world, max_batch_records=draw.choice([1, 4, 1000]))
        match draw.randrange(4):
            case 0:
                follow_and_die(world, app, draw.choice(EVENTS))
            case 1:
                follow(world, app, max_batches=1)
            case 2 if draw.randrange(3) == 0:
                follow(world, app)
                check_followed(world, dataset.served)
                dataset.repartition()
    follow(world, mirror_of(dataset.declare(), world))
    check_followed(world, dataset.served)
