"""What operators do to versions, and what readers get afterwards."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from dagster_adjunct.assets.declaration.dataset import QuerySource, bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.versions.switches import describe_unserved_version
from dagster_adjunct.assets.versions.version import Verdict
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError, NoSealedVersionError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.cycle import pin_that_has_ended

SCHEMA = Schema.of(tailnum="string", seats="int")
PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=2)
WHY = {"reason": "ticket 7", "by": "ada"}


@pytest.fixture
def planes(world: World) -> World:
    world.spark = IN_PROCESS
    world.stream("planes", SCHEMA, ["tailnum"], 2)
    return world


def deliver(world: World, version: str, seats: int, spec=PLANES):
    world.send("planes", [("N1", seats), ("N2", seats)], version=version)
    return world.advance(spec)


def store(world: World, spec=PLANES) -> StoredVersions:
    return StoredVersions(world.lake, spec)


def seats(world: World) -> int:
    entry = store(world).require_current().get("N1")
    assert entry is not None
    return int(entry["seats"])


def test_a_rollback_serves_the_version_before_until_the_next_one_seals(planes: World) -> None:
    for number in (1, 2):
        deliver(planes, f"v{number}", number)
    store(planes).rollback(**WHY)
    assert seats(planes) == 1
    assert planes.advance(PLANES).action == "up-to-date"
    assert seats(planes) == 1, "a version that was rolled back does not come back by itself"
    deliver(planes, "v3", 3)
    assert seats(planes) == 3


def test_a_rollback_can_name_any_sealed_version_and_is_refused_for_what_is_not_there(
    planes: World,
) -> None:
    for number in (1, 2, 3):
        deliver(planes, f"v{number}", number)
    store(planes).rollback("v1", **WHY)
    assert seats(planes) == 1
    with pytest.raises(DatasetError) as failure:
        store(planes).rollback("v9", **WHY)
    assert failure.value.version == "v9"
    with pytest.raises(DatasetError, match="no sealed version before"):
        store(planes).rollback(**WHY)


def test_a_pin_holds_readers_while_versions_seal_and_unpin_serves_the_newest(planes: World) -> None:
    deliver(planes, "v1", 1)
    store(planes).pin("v1", **WHY)
    report = deliver(planes, "v2", 2)
    assert (report.action, seats(planes)) == ("sealed", 1)
    assert "pinned to" in report.note
    assert store(planes).version("v2").get("N1") == {"tailnum": "N1", "seats": 2}
    with pytest.raises(DatasetError, match="is pinned to"):
        store(planes).rollback(**WHY)
    store(planes).unpin(**WHY)
    assert seats(planes) == 2


def test_an_expired_pin_ends_at_the_next_advance(planes: World) -> None:
    deliver(planes, "v1", 1)
    pin_that_has_ended(store(planes), "v1")
    deliver(planes, "v2", 2)
    planes.advance(PLANES)
    assert seats(planes) == 2
    assert any(
        entry.reason == "expired" or entry.action == "seal" for entry in store(planes).history()
    )
    with pytest.raises(ConfigurationError) as failure:
        store(planes).pin("v1", **WHY, expires_at=datetime(2030, 1, 1))
    assert failure.value.argument == "expires_at"


def test_an_expired_pin_ends_at_a_rollback(planes: World) -> None:
    for number in (1, 2, 3):
        deliver(planes, f"v{number}", number)
    pin_that_has_ended(store(planes), "v1")
    store(planes).rollback("v2", **WHY)
    manifest = store(planes).require_manifest()
    assert (seats(planes), manifest.pin) == (2, None)
    assert store(planes).history()[0].action == "rollback"


def test_a_pin_that_would_have_ended_already_is_refused(planes: World) -> None:
    deliver(planes, "v1", 1)
    with pytest.raises(ConfigurationError) as failure:
        store(planes).pin("v1", **WHY, expires_at=datetime(2020, 1, 1, tzinfo=UTC))
    assert failure.value.argument == "expires_at"
    assert store(planes).require_manifest().pin is None


def test_a_revoked_version_is_never_served_again(planes: World) -> None:
    for number in (1, 2, 3):
        deliver(planes, f"v{number}", number)
    store(planes).revoke("v3", **WHY)
    assert seats(planes) == 2
    for attempt in (store(planes).version, lambda v: store(planes).pin(v, **WHY)):
        with pytest.raises(DatasetError, match=r"is revoked \(ticket 7 \(by ada\)\)"):
            attempt("v3")
    store(planes).revoke("v2", **WHY)
    store(planes).revoke("v1", **WHY)
    with pytest.raises(NoSealedVersionError) as caught:
        store(planes).require_current(planes.systems)
    assert caught.value.dataset == "planes"
    deliver(planes, "v4", 4)
    assert seats(planes) == 4


@pytest.mark.lengthy
def test_revoking_serves_what_was_served_before_and_not_what_a_rollback_had_left(
    planes: World,
) -> None:
    for number in (1, 2, 3):
        deliver(planes, f"v{number}", number)
    store(planes).rollback("v1", **WHY)
    deliver(planes, "v4", 4)
    store(planes).revoke("v4", **WHY)
    assert seats(planes) == 1
    deliver(planes, "v5", 5)
    store(planes).revoke("v1", **WHY)
    store(planes).revoke("v5", **WHY)
    with pytest.raises(NoSealedVersionError):
        store(planes).require_current()
    deliver(planes, "v6", 6)
    assert seats(planes) == 6


def test_what_was_served_before_a_rollback_was_mended_is_not_discarded(planes: World) -> None:
    for number in (1, 2, 3):
        deliver(planes, f"v{number}", number)
    store(planes).rollback("v1", **WHY)
    deliver(planes, "v4", 4)
    discard(planes.lake, "planes", DiscardPolicy(keep=3, grace=timedelta(0)), by="test")
    store(planes).revoke("v4", **WHY)
    assert seats(planes) == 1


def test_revoking_the_pinned_version_ends_the_pin(planes: World) -> None:
    deliver(planes, "v1", 1)
    deliver(planes, "v2", 2)
    store(planes).pin("v1", **WHY)
    manifest = store(planes).revoke("v1", **WHY)
    assert (manifest.pin, seats(planes)) == (None, 2)


def test_every_change_says_who_when_and_why(planes: World) -> None:
    deliver(planes, "v1", 1)
    deliver(planes, "v2", 2)
    store(planes).rollback("v1", **WHY)
    newest = store(planes).history()[0]
    assert (newest.action, newest.by, newest.reason) == ("rollback", "ada", "ticket 7")
    assert newest.served == store(planes).require_current().version
    for wrong in ({"reason": " ", "by": "ada"}, {"reason": "x", "by": ""}):
        with pytest.raises(ConfigurationError) as caught:
            store(planes).rollback("v1", **wrong)
        assert caught.value.argument == ("reason" if wrong["by"] else "by")


def test_a_version_equal_to_the_one_rolled_back_to_is_not_published_again(planes: World) -> None:
    deliver(planes, "v1", 1)
    deliver(planes, "v2", 2)
    store(planes).rollback("v1", **WHY)
    report = deliver(planes, "v3", 1)
    assert report.action == "unchanged"
    assert store(planes).version("v3").version == store(planes).require_current().version


class TooFew:
    """Refuses versions where N1 has less than ten seats."""

    name = "ten_seats"
    severity = "error"

    def __call__(self, candidate) -> Verdict:
        entry = candidate.view.get("N1")
        return Verdict(
            name=self.name, passed=entry["seats"] >= 10, message=f"N1 has {entry['seats']} seats"
        )


def test_a_rejected_version_is_kept_aside_looked_at_forced_or_dropped(planes: World) -> None:
    spec = bounded_dataset(
        "planes", input="lake.planes", key="tailnum", partitions=2, validators=[TooFew()]
    )
    assert deliver(planes, "v1", 10, spec).action == "sealed"
    report = deliver(planes, "v2", 2, spec)
    assert (report.action, len(report.rejected), seats(planes)) == ("rejected", 1, 10)
    assert [(verdict.name, verdict.passed) for verdict in report.verdicts] == [("ten_seats", False)]
    assert "N1 has 2 seats" in report.note
    assert store(planes).version("v2").get("N2") == {"tailnum": "N2", "seats": 2}, (
        "it can be looked at"
    )
    with pytest.raises(DatasetError, match=r"is rejected .*and is not served"):
        store(planes).pin("v2", **WHY)
    assert deliver(planes, "v3", 30, spec).action == "sealed", (
        "a rejected version does not block the next one"
    )
    after = store(planes).accept("v2", **WHY)
    assert seats(planes) == 30, "it does not come after v3"
    forced = next(ref for ref in after.versions if ref.name == "v2")
    assert (forced.state, forced.reason) == ("sealed", "accepted by ada: ticket 7")
    assert f"adjunct dataset rollback planes {forced.id}" in describe_unserved_version(after)
    assert after.change.reason == f"ticket 7 (sealed but not served: {after.head} stays current)"
    assert describe_unserved_version(store(planes).rollback("v2", **WHY)) == ""
    assert seats(planes) == 2
    deliver(planes, "v4", 4, spec)
    store(planes).remove_version("v4", **WHY)
    assert "v4" not in [ref.name for ref in store(planes).versions()]
    with pytest.raises(DatasetError, match="is sealed; only rejected and revoked"):
        store(planes).remove_version("v3", **WHY)


@pytest.mark.lengthy
def test_a_forced_version_is_served_where_it_is_the_newest_or_is_asked_for(planes: World) -> None:
    spec = bounded_dataset(
        "planes", input="lake.planes", key="tailnum", partitions=2, validators=[TooFew()]
    )
    for version, number in (("v1", 10), ("v2", 2), ("v3", 10), ("v4", 4)):
        deliver(planes, version, number, spec)
    assert describe_unserved_version(store(planes).accept("v2", **WHY)) != "", (
        "v3 came after it, and was equal to v1"
    )
    assert seats(planes) == 10
    assert describe_unserved_version(store(planes).accept("v4", **WHY)) == ""
    assert seats(planes) == 4
    deliver(planes, "v5", 5, spec)
    deliver(planes, "v6", 60, spec)
    assert describe_unserved_version(store(planes).accept("v5", **WHY, make_current=True)) == ""
    assert seats(planes) == 5
    store(planes).revoke("v5", **WHY)
    assert seats(planes) == 60, "what was served before v5 was forced"


def test_conflicting_duplicates_refuse_a_version_where_the_dataset_says_so(planes: World) -> None:
    spec = bounded_dataset(
        "planes", input="lake.planes", key="tailnum", partitions=2, duplicates="error"
    )
    planes.send("planes", [("N1", 1), ("N1", 1)], version="v1")
    assert planes.advance(spec).action == "sealed", "the same record twice is no contradiction"
    planes.send("planes", [("N1", 1), ("N1", 2)], version="v2")
    report = planes.advance(spec)
    assert report.action == "rejected"
    assert (
        "1 record(s) have the same key (tailnum) as another record but other values" in report.note
    )
    assert "Such keys: 'N1'" in report.note
    planes.send("planes", [(f"N{i % 8}", i) for i in range(24)], version="v3")
    note = planes.advance(spec).note
    assert "16 record(s) have the same key" in note
    named = re.findall(r"'N\d'", note.partition("Such keys")[2].partition("Next:")[0])
    assert (len(named), len(set(named))) == (5, 5)
    assert "…" in note
    with pytest.raises(DatasetError, match="rejected before it was built"):
        store(planes).accept("v2", **WHY)


def test_a_query_has_no_partition_to_wait_for_in_a_set() -> None:
    from dagster_adjunct.assets.declaration.dataset import version_set

    query = bounded_dataset(
        "q", input=QuerySource("SELECT 1", SCHEMA), key="tailnum", broadcast=True
    )
    with pytest.raises(ConfigurationError) as caught:
        version_set("both", PLANES, query)
    assert (caught.value.dataset, caught.value.argument) == ("q", "members")
