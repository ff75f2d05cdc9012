"""What `make test` hands out together is there, and is named as it lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.doc_blocks import ROOT
from tests.scheduling import ONE_AT_A_TIME, TOGETHER, WAITING, Bundles, bundle, spread, uses_session


def test_the_files_that_do_not_go_by_file_exist() -> None:
    together = [place for places in TOGETHER.values() for place in places]
    waiting = [place for place in WAITING if place not in TOGETHER]
    assert [
        place for place in (*ONE_AT_A_TIME, *together, *waiting) if not (ROOT / place).exists()
    ] == []


def test_pages_are_given_out_one_at_a_time_and_other_files_whole() -> None:
    assert bundle("tests/test_docs.py::test_page[a]") != bundle("tests/test_docs.py::test_page[b]")
    assert bundle("tests/assets/test_diff.py::test_a") == bundle(
        "tests/assets/test_diff.py::test_b"
    )
    for name, places in TOGETHER.items():
        assert {bundle(f"{place}::test_a") for place in places} == {name}


def test_what_waits_is_spread_between_what_computes() -> None:
    waiting = ["kafka", "tests/resources/tables/test_0.py"]
    others = [f"tests/assets/test_{number}.py" for number in range(4)]
    spread_out = spread([*others, *waiting])
    assert sorted(spread_out) == sorted([*others, *waiting])
    assert [name in waiting for name in spread_out] == [False, True, False, False, True, False]
    assert spread(others) == others


@dataclass(eq=False)
class Worker:
    """A process of a run, as the scheduler knows it."""

    number: int
    given: list[int] = field(default_factory=list)
    shutting_down: bool = False

    def __post_init__(self) -> None:
        self.gateway = SimpleNamespace(id=f"gw{self.number}")

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given.extend(indices)

    def shutdown(self) -> None:
        self.shutting_down = True


WITH_SPARK = [f"tests/orchestration/{name}.py" for name in ("test_step_sinks", "test_step_tables")]
WITH_SPARK += [f"tests/orchestration/test_step_{name}.py" for name in ("merge", "rate", "latest")]
WITHOUT = [f"tests/test_{name}.py" for name in ("rules", "timings", "lazy_names", "scheduling")]
PAGES = [f"tests/test_docs.py::test_page[{number}]" for number in range(3)]
TESTS = [
    *PAGES,
    *(f"{file}::test_{number}" for file in WITH_SPARK + WITHOUT for number in range(4)),
]


def run_to_end(scheduling: Bundles, workers: list[Worker], left: list[Worker]) -> list[str]:
    """Have the workers in `left` run what they are given, in turns; return what was run."""
    done: list[str] = []
    position = dict.fromkeys(workers, 0)
    while any(position[each] < len(each.given) for each in left):
        for worker in left:
            if position[worker] < len(worker.given):
                test = worker.given[position[worker]]
                position[worker] += 1
                done.append(TESTS[test])
                scheduling.mark_test_complete(worker, test)
    return done


def scheduled(count: int) -> tuple[Bundles, list[Worker]]:
    config: Any = SimpleNamespace(
        getvalue=lambda name: [f"{count}*popen"], option=SimpleNamespace(loadscopereorder=False)
    )
    scheduling = Bundles(config)
    workers = [Worker(number) for number in range(count)]
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, TESTS)
    scheduling.schedule()
    return scheduling, workers


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_half_of_the_processes_use_spark_and_each_test_is_run_once(count: int) -> None:
    assert {test for test in TESTS if uses_session([test])} == {
        test for test in TESTS if test.startswith(tuple(WITH_SPARK))
    }
    scheduling, workers = scheduled(count)
    assert sorted(run_to_end(scheduling, workers, workers)) == sorted(TESTS)
    assert scheduling.tests_finished
    assert all(worker.shutting_down for worker in workers)
    for worker in workers[max(2, count // 2) :]:
        assert worker.given, "it has what needs no session"
        assert not uses_session(TESTS[test] for test in worker.given)


def test_a_process_that_takes_the_place_of_one_that_died_runs_what_that_has_left() -> None:
    scheduling, workers = scheduled(6)
    dead, *living = workers
    died_at = scheduling.remove_node(dead)
    scheduling.add_node(added := Worker(6))
    scheduling.add_node_collection(added, TESTS)
    scheduling.schedule()
    done = run_to_end(scheduling, [*living, added], [*living, added])
    assert died_at in done
    assert set(done) == set(TESTS)
    assert scheduling.tests_finished
