"""Which tests go to a process together where a run has several (`-n 3 --dist loadfile`), and which
go first.

A file stays together, since its tests may share a server or a lake. Two kinds do not go by file:
pages, runs of the main job and runs that are stopped, which share nothing and take up to two
minutes each, are given out one at a time; and some files are one bundle: those that look at the finished main job, or one
process would wait for the other to run it, and those that use a Kafka broker, DynamoDB Local or Spark
with the jars of tables, or each process would start one and keep it. What waits more than it computes is spread between what
keeps a processor busy.

Files that use the session of Spark go to half of the processes: in each, a JVM starts, loads its
classes and compiles what it runs, a minute's work of a processor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ONE_AT_A_TIME = (
    "tests/test_docs.py",
    "tests/assets/test_unbounded_postgres.py",
    "tests/examples/test_main_job_elsewhere.py",
    "tests/examples/test_main_job_killed.py",
    "tests/examples/test_postgres_walkthrough.py",
    "tests/orchestration/test_stopped_runs.py",
)
# By name, what the files and folders of a bundle begin with.
TOGETHER = {
    "the main job": (
        "tests/examples/test_main_job.py",
        "tests/examples/test_main_job_commands.py",
        "tests/examples/test_documented_lookups.py",
    ),
    "spark tables": (
        "tests/orchestration/test_rest_catalogs.py",
        "tests/orchestration/test_tables_beside_spark.py",
    ),
    "kafka": (
        "tests/end_to_end/test_relay.py",
        "tests/orchestration/test_cut_batches.py",
        "tests/orchestration/test_times_from_kafka.py",
        "tests/resources/streams/kafka/",
    ),
    "dynamodb": (
        "tests/end_to_end/key_values/",
        "tests/packaging/test_iam_policies.py",
        "tests/resources/table_backends/",
        "tests/resources/key_value_backends/",
    ),
}
# What waits for servers and pauses more than it computes: the others have the processors meanwhile.
WAITING = ("kafka", "dynamodb", "tests/resources/tables/", "tests/resources/sql/")


def bundle(nodeid: str) -> str:
    """Return the name of what this test stays together with."""
    file = nodeid.partition("::")[0]
    for name, places in TOGETHER.items():
        if file.startswith(places):
            return name
    return nodeid if file in ONE_AT_A_TIME else file


_ROOT = Path(__file__).parents[1]
# Only workers know which fixtures a test has. A file that is taken for another kind costs time only.
_SPARK = re.compile(r"mark\.spark|\b(step_world|sparkling|main_job)\b|\bspark: (Any|SparkSession)")


def uses_session(nodeids: Iterable[str]) -> bool:
    """Return whether the files of these tests use the session of Spark that a process shares."""
    files = {nodeid.partition("::")[0] for nodeid in nodeids}
    return any(map(_uses_session, files))


@cache
def _uses_session(file: str) -> bool:
    if file in ONE_AT_A_TIME:  # their processes start their own
        return False
    return _SPARK.search((_ROOT / file).read_text(encoding="utf-8")) is not None


class Bundles(LoadScopeScheduling):  # type: ignore[misc]
    """Gives out bundles in the order in which their tests were collected: to the first half of
    the processes those that use Spark's session, then all others; to the second half the others.
    """

    def _split_scope(self, nodeid: str) -> str:
        return bundle(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        chosen = self._choose(node)
        if chosen is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)

    def _choose(self, node: Any) -> str | None:
        """Return what this process runs next; None if only others may run what is left."""
        working = [each for each in self.nodes if not each.shutting_down]
        may_use_session = node in working[: max(2, self.numnodes // 2)]
        others = None
        for name, tests in self.workqueue.items():
            if uses_session(tests) == may_use_session:
                return str(name)
            others = others or str(name)
        return others if may_use_session else None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Bundles | None:
    return Bundles(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the bundles that take longest, so that no process is left with one of them at
    the end.
    """
    slow = dict.fromkeys(bundle(item.nodeid) for item in items if item.get_closest_marker("slow"))
    others = dict.fromkeys(
        name for name in map(bundle, (item.nodeid for item in items)) if name not in slow
    )
    first = sorted(slow, key=lambda name: "/examples/" not in name)
    order = {name: number for number, name in enumerate([*first, *spread(list(others))])}
    items.sort(key=lambda item: order[bundle(item.nodeid)])


def spread(bundles: Sequence[str]) -> list[str]:
    """Return them in their order, but those that wait evenly between the others."""
    waiting = [name for name in bundles if name.startswith(WAITING)]
    others = [name for name in bundles if not name.startswith(WAITING)]
    place = {
        name: number / len(group)
        for group in (waiting, others)
        for number, name in enumerate(group)
    }
    return sorted(bundles, key=place.__getitem__)
