"""What is decided of a table that was seen: plain values, no lake, no stream and no session."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.sources.entries import OpenedChanges, offsets_to_json
from dagster_adjunct.assets.unbounded.recovery import (
    TableSnapshot,
    assess_continuity,
    decide_recovery,
    plan_recovery,
    require_matching_manifest,
)
from dagster_adjunct.assets.versions.manifest import Bootstrap, UnboundedManifest
from dagster_adjunct.assets.versions.version import SealedVersion, declaration_from_spec
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    DatasetError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    LogCompaction,
    StreamInfo,
    SystemStreamPartition,
)

NOW = datetime(2026, 3, 1, tzinfo=UTC)
DAY = timedelta(days=1)
COLUMNS = Schema.of(k="string", n="int")
SSPS = (SystemStreamPartition("lake", "t", 0), SystemStreamPartition("lake", "t", 1))
OFFSET_OF = LakeStreams(lake_in(InMemoryStore()))  # compares offsets, and is asked for nothing else


def offsets(first: int, second: int) -> dict[SystemStreamPartition, str]:
    return dict(zip(SSPS, (str(first), str(second)), strict=True))


def declared(**options: Any) -> AdjunctDataset:
    return unbounded_dataset("t", input="lake.t", key="k", partitions=2, **options)


def seen(
    spec: AdjunctDataset,
    manifest: UnboundedManifest | None = None,
    *,
    columns: Schema = COLUMNS,
    ssps: tuple[SystemStreamPartition, ...] = SSPS,
    info: dict[str, Any] | None = None,
    **given: Any,
) -> TableSnapshot:
    """Return what a look finds of a stream that holds everything, five records in each
    partition.
    """
    facts: dict[str, Any] = {"identity": "first", **(info or {})}
    stream = StreamInfo("t", len(ssps), ("k",), "spark-murmur3", columns, **facts)
    source = OpenedChanges(spec, OFFSET_OF, stream, ssps, columns)
    return TableSnapshot(
        source, NOW, None, manifest, **{"oldest": offsets(0, 0), "ends": offsets(5, 5), **given}
    )


def table(
    spec: AdjunctDataset, *, read: tuple[int, int] = (5, 5), **changes: Any
) -> UnboundedManifest:
    """Return the manifest of a table that has read so far of each partition."""
    start, end = offsets_to_json(offsets(0, 0)), offsets_to_json(offsets(*read))
    version = SealedVersion(
        id="v000002-a",
        number=2,
        name=None,
        sealed_at=NOW,
        columns=COLUMNS,
        key=("k",),
        partition_by=("k",),
        partitions=2,
        positioned=True,
        generations=(Generation(1, "datasets/t/data/a", ()),),
        offsets={ssp: (start[ssp], end[ssp]) for ssp in start},
    )
    facts: dict[str, Any] = {
        "bootstrap": Bootstrap(
            state="done", start=start, target=end, started_at=NOW - DAY, columns=COLUMNS
        ),
        "confirmed_at": NOW,
        "stream": "first",
    }
    return UnboundedManifest(
        name="t",
        declaration=declaration_from_spec(spec, COLUMNS, input_partitions=2),
        version=version,
        offsets=end,
        next_generation=2,
        **{**facts, **changes},
    )


def building(spec: AdjunctDataset, **options: Any) -> UnboundedManifest:
    """Return the manifest of a table whose bootstrap has read two of the five records of each
    partition.
    """
    bootstrap = Bootstrap(
        state="running",
        start=offsets_to_json(offsets(0, 0)),
        target=offsets_to_json(offsets(5, 5)),
        started_at=NOW - DAY,
        columns=COLUMNS,
    )
    return table(spec, read=(2, 2), **{"bootstrap": bootstrap, **options})


# -- the recovery table


@pytest.mark.parametrize(
    ("bootstrap", "there", "first", "action", "store"),
    [
        (True, "none", "begin", "bootstrap", "none"),
        (True, "invalid", "begin", "bootstrap", "invalid"),
        (True, "valid", "apply", "continue", "valid"),
        (False, "none", "begin", "create", "none"),
        (False, "invalid", "begin", "recreate", "invalid"),
        (False, "valid", "apply", "continue", "valid"),
        (True, "building", "apply", "continue", "building"),
        (False, "building", "apply", "continue", "building"),
        (False, "building, not whole", "begin", "bootstrap", "invalid"),
    ],
)
def test_each_cell_of_the_recovery_table(
    bootstrap: bool, there: str, first: str, action: str, store: str
) -> None:
    spec = declared(bootstrap=bootstrap)
    state = {
        "none": seen(spec),
        "invalid": seen(spec, table(spec), missing=("datasets/t/data/a/b0.parquet",)),
        "valid": seen(spec, table(spec)),
        "building": seen(spec, building(spec)),
        "building, not whole": seen(
            spec, building(spec), missing=("datasets/t/data/a/b0.parquet",)
        ),
    }[there]
    plan = plan_recovery(state)
    assert (plan.first, plan.decision.action, plan.decision.store, plan.decision.at) == (
        first,
        action,
        store,
        NOW,
    )
    assert plan.decision == decide_recovery(state)
    assert plan_recovery(state) == plan, "deciding changes nothing"


def test_what_is_wrong_with_a_table_is_the_reason() -> None:
    spec = declared()
    added = (*SSPS, SystemStreamPartition("lake", "t", 2))
    reasons = [
        decide_recovery(state).reason
        for state in (
            seen(spec, table(spec), damage="it is cut"),
            seen(spec, table(spec), missing=("a/b0.parquet", "a/b1.parquet")),
            seen(spec, table(spec), ssps=added),
            seen(spec, building(spec), columns=Schema.of(k="string", n="int", at="date")),
        )
    ]
    assert reasons == [
        "its manifest is damaged (it is cut)",
        "2 of its objects are missing or cut, first a/b0.parquet",
        "the partitions of its stream have changed (lake.t.2 added)",
        (
            "the unfinished bootstrap starts again: the declared columns have changed since it"
            f" began ({COLUMNS.difference(Schema.of(k='string', n='int', at='date'))})"
        ),
    ]


@pytest.mark.parametrize(
    ("behind", "age", "store"),
    [(True, DAY, "valid"), (True, 8 * DAY, "invalid"), (False, 8 * DAY, "valid")],
    ids=["behind for a day", "behind for too long", "idle for long"],
)
def test_only_a_table_that_is_behind_grows_old(behind: bool, age: timedelta, store: str) -> None:
    spec = declared(max_age=7 * DAY)
    manifest = table(spec, read=(5, 4) if behind else (5, 5), confirmed_at=NOW - age)
    assert assess_continuity(seen(spec, manifest)).store == store


def test_as_long_as_a_compacted_stream_keeps_deletions_unless_an_age_is_declared() -> None:
    spec, compacted = declared(), {"compaction": LogCompaction(tombstones_kept=DAY)}
    old = table(spec, read=(5, 4), confirmed_at=NOW - 2 * DAY)
    assert assess_continuity(seen(spec, old, info=compacted)).store == "invalid"
    begun = building(spec)
    begun = begun.after(bootstrap=begun.bootstrap.model_copy(update={"started_at": NOW - 2 * DAY}))
    assert (
        "its stream keeps deletions for 1 day, 0:00:00 only"
        in decide_recovery(seen(spec, begun, info=compacted)).reason
    )


# -- what the stream has dropped


def test_a_lost_offset_is_followed_as_declared() -> None:
    lost = {"oldest": offsets(0, 3), "ends": offsets(5, 9)}
    spec = declared(on_lost_offset="serve_stale")
    assert plan_recovery(seen(spec, table(spec, read=(5, 2)), **lost)).first == "leave"
    spec = declared(on_lost_offset="fail")
    with pytest.raises(
        OffsetOutOfRangeError,
        match=r"it continues at offset 2 of lake\.t\.1, and the oldest in the",
    ):
        plan_recovery(seen(spec, table(spec, read=(5, 2)), **lost))
    spec = declared(on_lost_offset="fail")
    again = plan_recovery(seen(spec, building(spec), oldest=offsets(0, 3)), forced=True)
    assert again.decision.action == "bootstrap", "what is built is not served yet: nobody loses it"


def test_a_bootstrap_needs_a_stream_that_reports_of_every_key_unless_it_is_forced() -> None:
    spec = declared()
    cut = seen(spec, oldest=offsets(0, 3))
    with pytest.raises(
        DatasetError,
        match=r"has to be bootstrapped \(there is no table yet\), and its input lake\.t",
    ):
        plan_recovery(cut)
    assert plan_recovery(cut, forced=True).decision.action == "bootstrap"
    assert (
        plan_recovery(
            seen(spec, oldest=offsets(0, 3), info={"compaction": LogCompaction()})
        ).decision.action
        == "bootstrap"
    )
    unmarked = declared(bootstrap=False)
    assert plan_recovery(seen(unmarked, oldest=offsets(0, 3))).decision.action == "create"


# -- a rebuild


def test_a_rebuild_asks_nothing_of_the_table_before_and_all_of_the_stream() -> None:
    spec = declared(bootstrap=False)
    overtaken = CommitConflictError("another writer committed first.", "Advance again.")
    for state in (
        seen(spec, table(spec)),
        seen(spec, table(spec), missing=("a/b0.parquet",), refusal=overtaken),
        seen(spec, table(spec), info={"identity": "second"}),
        seen(spec),
    ):
        plan = plan_recovery(state, rebuild="new rules")
        assert (plan.first, plan.decision.action, plan.decision.reason) == (
            "begin",
            "bootstrap",
            "rebuild: new rules",
        )
    with pytest.raises(DatasetError, match="new rules") as failure:
        plan_recovery(seen(spec, table(spec), oldest=offsets(1, 0)), rebuild="new rules")
    assert failure.value.dataset == spec.name


def test_a_rebuild_may_have_other_columns() -> None:
    spec, narrow = declared(), Schema.of(k="string")
    with pytest.raises(DatasetError, match="is stored with other columns than declared"):
        plan_recovery(seen(spec, table(spec), columns=narrow))
    assert plan_recovery(seen(spec, table(spec), columns=narrow), rebuild="n went").first == "begin"


def test_another_key_is_rejected_and_other_input_partitions_are_decided_on() -> None:
    spec, stored = declared(), table(declared())
    other = replace(spec, key=("n",), partition_by=("n",))
    with pytest.raises(DatasetError, match=r"key is \(n\), was \(k\)"):
        require_matching_manifest(
            other, stored, declaration_from_spec(other, COLUMNS, input_partitions=2)
        )
    more = declaration_from_spec(spec, COLUMNS, input_partitions=3)
    assert require_matching_manifest(spec, stored, more) is stored


# -- columns, and what refuses any decision


def test_added_columns_are_taken_on_first() -> None:
    spec, wider = declared(), Schema.of(k="string", n="int", at="date")
    assert plan_recovery(seen(spec, table(spec), columns=wider)).first == "evolve"
    assert plan_recovery(seen(spec, building(spec), columns=wider)).first == "begin", (
        "what is built has the old ones"
    )


def test_a_stream_that_was_recreated_is_refused_before_a_writer_who_was_first() -> None:
    spec = declared()
    overtaken = CommitConflictError("another writer committed first.", "Advance again.")
    with pytest.raises(OffsetOutOfRangeError) as caught:
        plan_recovery(seen(spec, table(spec), info={"identity": "second"}, refusal=overtaken))
    assert (caught.value.dataset, caught.value.stream) == ("t", "lake.t")
    with pytest.raises(OffsetOutOfRangeError) as failure:
        plan_recovery(seen(spec, table(spec), ends=offsets(4, 5), refusal=overtaken))
    assert (failure.value.partition, failure.value.offset, failure.value.upcoming) == (0, "5", "4")
    with pytest.raises(CommitConflictError):
        plan_recovery(seen(spec, table(spec), missing=("a/b0.parquet",), refusal=overtaken))
