"""What operators do to version sets: whatever it is, all members serve what was published
together.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.assets.bounded.advance import advance_version_set
from dagster_adjunct.assets.declaration.dataset import bounded_dataset, version_set
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.dataset import current_versions
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.versions.switches import describe_unserved_version
from dagster_adjunct.assets.versions.version import Verdict
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.cycle import pin_that_has_ended
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.rounds import rounds

WHY = {"reason": "ticket 7", "by": "ada"}
NAMES = ("fares", "routes")


class NotNegative:
    """Refuses versions whose number is below zero."""

    name = "not_negative"
    severity = "error"

    def __call__(self, candidate) -> Verdict:
        return Verdict(name=self.name, passed=candidate.view.get("a")["n"] >= 0)


SET = version_set(
    "prices",
    *(
        bounded_dataset(
            name, input=f"lake.{name}", key="k", broadcast=True, validators=[NotNegative()]
        )
        for name in NAMES
    ),
)
Pair = tuple[int, int]


def prices_with(*pairs: Pair) -> World:
    """Return a world that has published `v1`, `v2`, …: what fares and routes hold in each."""
    world = World(lake_in(InMemoryStore()), IN_PROCESS)
    for name in NAMES:
        world.stream(name, Schema.of(k="string", n="int"), ["k"], 1)
    publish(world, *pairs)
    return world


def publish(world: World, *pairs: Pair, lake: Lake | None = None) -> None:
    for pair in pairs:
        version = f"v{world.sequences.get('fares', 0) + 1}"
        for name, value in zip(NAMES, pair, strict=True):
            world.send(name, [("a", value)], version=version)
    advance_version_set(
        SET, lake=lake or world.lake, systems=world.systems, spark=IN_PROCESS, by="test"
    )


def seen(world: World) -> tuple[int | None, ...]:
    with ExitStack() as open_meanwhile:
        served = {
            name: it and open_meanwhile.enter_context(it)
            for name, it in current_versions(world.lake, NAMES).items()
        }
        return tuple(None if (it := served[name]) is None else it.get("a")["n"] for name in NAMES)


def store(world: World, name: str) -> StoredVersions:
    return StoredVersions(world.lake, name)


def test_a_name_means_the_same_delivery_in_all_members() -> None:
    """Fares did not change, so that one version of it stands for three names."""
    world = prices_with((1, 1), (1, 2), (1, 3), (4, 4))
    for number in (1, 2, 3):
        store(world, "fares").rollback(f"v{number}", **WHY)
        assert seen(world) == (1, number)
        store(world, "fares").pin(f"v{4 - number}", **WHY)
        assert seen(world) == (1, 4 - number)
        store(world, "fares").unpin(**WHY)
        assert seen(world) == (1, number)


def test_an_id_means_what_was_served_with_it_last() -> None:
    world = prices_with((1, 1), (1, 2), (3, 3))
    store(world, "fares").rollback(store(world, "fares").versions()[0].id, **WHY)
    assert seen(world) == (1, 2)


def test_the_start_of_an_id_means_the_same_as_the_id_in_all_members() -> None:
    """Members number their versions by themselves: the number is no name in another member."""
    world = prices_with((1, 1), (1, 2), (3, 3))
    assert store(world, "fares").versions()[0].id.startswith("v000001")
    store(world, "fares").rollback("v000001", **WHY)
    assert seen(world) == (1, 2)


def test_the_version_before_is_the_one_that_the_set_served_before() -> None:
    world = prices_with((1, 1), (1, 2), (2, 2), (3, 2))
    for expected in ((2, 2), (1, 2), (1, 1)):
        store(world, "routes").rollback(**WHY)
        assert seen(world) == expected
    with pytest.raises(DatasetError, match="no sealed version before"):
        store(world, "fares").rollback(**WHY)


def test_a_revocation_takes_along_what_was_delivered_under_that_name_alone() -> None:
    world = prices_with((1, 1), (2, 1), (2, 3), (4, 4))
    store(world, "routes").revoke("v3", **WHY)  # fares holds it under the version of v2
    assert [(ref.name, ref.state) for ref in store(world, "fares").versions()] == [
        ("v1", "sealed"), ("v2", "sealed"), ("v4", "sealed"),
    ]  # fmt: skip
    assert seen(world) == (4, 4)
    store(world, "fares").revoke("v4", **WHY)
    assert [ref.state for ref in store(world, "routes").versions()] == [
        "sealed",
        "revoked",
        "revoked",
    ]
    assert seen(world) == (2, 1), "v3 is revoked, v2 is whole"
    with pytest.raises(DatasetError, match="is revoked"):
        store(world, "fares").rollback("v3", **WHY)
    store(world, "fares").revoke("v2", **WHY)
    assert seen(world) == (1, 1)


def test_a_revocation_restores_what_the_set_served_before_and_no_rolled_back_version() -> None:
    world = prices_with((1, 1), (2, 2), (2, 3))
    store(world, "fares").rollback("v1", **WHY)
    publish(world, (1, 4))  # fares is as it was
    assert seen(world) == (1, 4)
    store(world, "routes").revoke("v4", **WHY)
    assert seen(world) == (1, 1)


def test_a_revocation_passes_over_what_is_not_whole_in_the_set_any_more() -> None:
    world = prices_with((1, 1), (2, 2), (2, 3))
    store(world, "routes").revoke("v2", **WHY)  # fares holds it as v3, too
    store(world, "routes").revoke("v3", **WHY)
    assert seen(world) == (1, 1), "routes has nothing left that was published with the second fares"


def test_a_forced_version_that_is_older_is_served_in_no_member() -> None:
    world = prices_with((1, 1))
    publish(world, (2, -2))  # refused for routes
    publish(world, (1, 3))
    assert seen(world) == (1, 3)
    # By its number alone, that of fares would come after the first, which stands for v3 as well.
    assert "sealed but not served" in describe_unserved_version(
        store(world, "fares").accept("v2", **WHY)
    )
    assert seen(world) == (1, 3)
    assert [store(world, name).versions()[1].state for name in NAMES] == ["sealed", "sealed"]
    store(world, "routes").rollback("v2", **WHY)
    assert seen(world) == (2, -2)


def test_a_forced_version_is_served_in_all_members_if_newest_or_requested() -> None:
    world = prices_with((1, 1))
    publish(world, (2, -2))
    publish(world, (3, -3))
    store(world, "routes").accept("v3", **WHY)
    assert seen(world) == (3, -3)
    store(world, "fares").accept("v2", **WHY, make_current=True)
    assert seen(world) == (2, -2)
    store(world, "fares").revoke("v2", **WHY)
    assert seen(world) == (3, -3)


def test_when_nothing_is_left_that_was_published_together_nothing_is_served() -> None:
    world = prices_with((1, 1), (1, 2))
    store(world, "fares").revoke("v2", **WHY)
    assert seen(world) == (None, None)
    publish(world, (3, 3))
    assert seen(world) == (3, 3)


def test_revoking_a_pinned_version_ends_the_pin_in_all_members() -> None:
    world = prices_with((1, 1), (1, 2), (3, 3))
    store(world, "fares").pin("v2", **WHY)
    store(world, "routes").revoke("v2", **WHY)  # in fares it stays, as v1
    assert seen(world) == (3, 3)
    assert [store(world, name).require_manifest().pin for name in NAMES] == [None, None]


def test_a_revoked_version_is_dropped_where_it_is_revoked() -> None:
    world = prices_with((1, 1), (1, 2), (3, 3))
    store(world, "routes").revoke("v2", **WHY)
    store(world, "routes").remove_version("v2", **WHY)
    assert [[ref.name for ref in store(world, name).versions()] for name in NAMES] == [
        ["v1", "v3"],
        ["v1", "v3"],
    ]
    with pytest.raises(DatasetError, match="is sealed; only rejected and revoked"):
        store(world, "fares").remove_version("v1", **WHY)


def test_what_only_one_member_still_holds_can_be_revoked_there() -> None:

    world = prices_with((1, 1), (2, 2), (3, 3))
    discard(world.lake, "fares", DiscardPolicy(keep=1, grace=timedelta(0)), by="test")
    store(world, "routes").revoke("v1", **WHY)
    assert [ref.state for ref in store(world, "routes").versions()] == [
        "revoked",
        "sealed",
        "sealed",
    ]
    assert seen(world) == (3, 3)


OPERATIONS = st.tuples(
    st.sampled_from(
        [
            "publish",
            "publish",
            "rollback",
            "back",
            "pin",
            "ending pin",
            "unpin",
            "revoke",
            "discard",
        ]
    ),
    st.sampled_from(NAMES),
    st.integers(1, 6),
    st.tuples(st.booleans(), st.booleans()),
    st.one_of(
        st.none(), st.tuples(st.integers(1, 40), st.sampled_from(["crash-before", "crash-after"]))
    ),
)
Step = tuple[str, str, int, tuple[bool, bool], tuple[int, str] | None]


@pytest.mark.lengthy
@pytest.mark.rounds
@settings(max_examples=rounds(8, 20), derandomize=True)
@given(st.lists(OPERATIONS, min_size=2, max_size=16))
def test_after_any_operations_and_crashes_all_members_serve_one_delivery(steps: list[Step]) -> None:
    world, pairs, revoked = prices_with((1, 1)), [(1, 1)], set()
    for what, member, number, changes, crash in steps:
        fault = [Fault("*", crash[0], crash[1])] if crash else []  # type: ignore[arg-type]
        lake = Lake(FaultyStore(world.lake.store, fault), world.lake.id)
        if what == "publish":
            fares, routes = (
                len(pairs) + 1 if new else old for new, old in zip(changes, pairs[-1], strict=True)
            )
            pairs.append((fares, routes))
        # Refused: not there, revoked, pinned, or nothing before.
        with suppress(DatasetError, Crash):
            _operate(world, lake, what, member, f"v{number}", pairs[-1])
        displayed = seen(world)
        assert displayed == (None, None) or displayed in pairs, (
            "what is served was published together"
        )
        revoked |= {
            (name, ref.id)
            for name in NAMES
            for ref in store(world, name).versions()
            if ref.state == "revoked"
        }
        # takes no lease
        served = {
            (name, it.version) for name, it in current_versions(world.lake, NAMES).items() if it
        }
        assert not served & revoked
    publish(world, (99, 99))
    for name in NAMES:
        with suppress(DatasetError):
            store(world, name).unpin(**WHY)
    assert seen(world) == (99, 99), "nothing blocks what comes next"


def _operate(world: World, lake: Lake, what: str, member: str, version: str, pair: Pair) -> None:
    opened = StoredVersions(lake, member)
    if what == "publish":
        publish(world, pair, lake=lake)
    elif what == "back":
        opened.rollback(**WHY)
    elif what == "unpin":
        opened.unpin(**WHY)
    elif what == "ending pin":
        pin_that_has_ended(opened, version)
    elif what == "discard":
        discard(lake, member, DiscardPolicy(keep=2, grace=timedelta(0)), by="test")
    else:
        getattr(opened, what)(version, **WHY)
