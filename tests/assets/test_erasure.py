"""Erasure of keys: what is retained afterwards, what is proved, and what happens when it is
interrupted.
"""

from __future__ import annotations

import datetime as dt
import errno
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_adjunct.assets.bounded.advance import advance_version_set
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, bounded_dataset, version_set
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.verification import verify_version
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.retention.erasure import ErasureReport, erase_keys, find_keys
from dagster_adjunct.assets.retention.key_search import CLEARED
from dagster_adjunct.assets.validation.validators import Candidate, Finding, custom
from dagster_adjunct.assets.versions.leases import Lease, attempt_key
from dagster_adjunct.resources.bucketing.files import unpack_footer
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    DatasetError,
    DatasetNotFoundError,
    ManifestMismatchError,
    NullKeyError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore, ObjectStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.faulty_store import Crash, Fault, FaultyStore, deaths
from tests.servers.s3 import S3Server

SCHEMA = Schema.of(person="string", seats="int", note="string")
PEOPLE = bounded_dataset("people", input="lake.people", key="person", partitions=2)
WHY = {"reason": "request 4711", "by": "ada"}
SECRET = "zz-grace.hopper@example"

Entries = dict[str, tuple[int, str]]


@pytest.fixture
def people() -> World:
    return fresh(SCHEMA)


def fresh(schema: Schema, key: Sequence[str] = ("person",)) -> World:
    world = World(lake_in(InMemoryStore()), IN_PROCESS)
    world.stream("people", schema, key, 2)
    return world


def entries(number: int, *names: str) -> Entries:
    return {name: (number, f"{name} in {number}") for name in names}


def deliver(world: World, version: str, content: Entries, spec: AdjunctDataset = PEOPLE) -> Any:
    world.send("people", [(name, *values) for name, values in content.items()], version=version)
    return world.advance(spec)


def store_of(world: World) -> StoredVersions:
    return StoredVersions(world.lake, "people")


def rows_of(view: VersionReader) -> list[dict[str, Any]]:
    files = [(g.folder, file) for g in view.sealed.generations for file in g.files]
    tables = [
        pq.read_table(pa.BufferReader(view.store.get(f"{folder}/{f.name}").data))
        for folder, f in files
    ]
    return [row for table in tables for row in table.to_pylist()]


def content_of(view: VersionReader) -> Entries:
    content = {row["person"]: (row["seats"], row["note"]) for row in rows_of(view)}
    assert len(content) == view.rows
    for name, values in content.items():
        entry = view.get(name)
        assert entry == {"person": name, "seats": values[0], "note": values[1]}
    return content


def retained(world: World) -> dict[str, Entries]:
    """Return what every retained version holds, by name, each proved whole."""
    log = store_of(world).log
    contents = {}
    for ref in store_of(world).versions():
        if ref.document is not None:
            view = VersionReader(world.lake.store, "people", log.read_version(ref))
            assert verify_version(view, deep=True).ok
            assert (ref.rows, ref.bytes) == (
                view.rows,
                sum(g.size for g in view.sealed.generations),
            )
            contents[str(ref.name)] = content_of(view)
    return contents


def traces(store: ObjectStore, secret: str) -> list[str]:
    """Return every object in which a text stands: as it is, in a footer, or in the cells of a
    Parquet file.
    """
    places = []
    for item in store.list(""):
        if item.key.startswith("streams/"):
            continue
        data = store.get(item.key).data
        texts = [data]
        if item.key.endswith(".parquet"):
            table = pq.read_table(pa.BufferReader(data))
            texts.append(str(table.to_pylist()).encode())
        if item.key.endswith(".json"):
            texts += [unpack_footer(text) for text in footers(json.loads(data))]
        if any(secret.encode() in text for text in texts):
            places.append(item.key)
    return places


def footers(value: Any) -> list[str]:
    if isinstance(value, dict):
        mine = [value["footer"]] if isinstance(value.get("footer"), str) else []
        return mine + [text for part in value.values() for text in footers(part)]
    return [text for part in value for text in footers(part)] if isinstance(value, list) else []


# -- what is retained afterwards


def test_a_key_goes_from_every_retained_version_and_the_rest_stays_as_it_was(people: World) -> None:
    model = {f"v{n}": entries(n, "ada", "bob", "cy", f"only-{n}", SECRET) for n in (1, 2, 3)}
    for name, content in model.items():
        deliver(people, name, content)
    before = store_of(people).require_manifest()
    report = erase_keys(people.lake, "people", [SECRET, "bob", "nobody"], **WHY)
    assert report.complete
    expected = {
        name: {k: v for k, v in content.items() if k not in (SECRET, "bob")}
        for name, content in model.items()
    }
    assert retained(people) == expected
    assert [version.rows for version in report.rewritten] == [2, 2, 2]
    assert [version.old for version in report.rewritten] == [ref.id for ref in before.versions]
    after = store_of(people).require_manifest()
    assert [(ref.number, ref.name, ref.state) for ref in after.versions] == [
        (ref.number, ref.name, ref.state) for ref in before.versions
    ]
    assert {ref.id for ref in after.versions} == {version.new for version in report.rewritten}
    assert after.version is not None
    assert after.version.id == after.head == report.rewritten[-1].new
    assert after.version.counters["erased"] == 2
    assert [delivered.version for delivered in after.delivered] == [
        ref.id for ref in after.versions
    ]
    assert after.doomed == ()
    assert traces(people.lake.store, SECRET) == []
    assert traces(people.lake.store, "bob in") == []
    assert report.proof.objects == sum(
        len(g.files) for v in views(people) for g in v.sealed.generations
    )
    assert report.proof.rows == 9
    assert "none of the keys is left" in report.summary()
    assert json.loads(json.dumps(report.to_json()))["complete"] is True
    assert SECRET not in json.dumps(report.to_json())


def views(world: World) -> list[VersionReader]:
    log = store_of(world).log
    return [
        VersionReader(world.lake.store, "people", log.read_version(ref))
        for ref in store_of(world).versions()
    ]


def test_versions_without_the_key_keep_their_ids_and_files(people: World) -> None:
    deliver(people, "v1", entries(1, "ada", SECRET))
    deliver(people, "v2", entries(2, "ada"))
    before = {ref.name: ref for ref in store_of(people).versions()}
    report = erase_keys(people.lake, "people", [SECRET], **WHY)
    after = {ref.name: ref for ref in store_of(people).versions()}
    assert after["v2"] == before["v2"].model_copy(update={"replaced": after["v1"].id})
    assert [version.name for version in report.rewritten] == ["v1"]
    assert report.complete


def test_files_without_the_key_are_the_same_bytes(people: World) -> None:
    deliver(people, "v1", entries(1, *(f"p{n}" for n in range(20)), SECRET))
    (old,) = views(people)
    digests = {file.bucket: (file.sha256, file.digest) for file in old.sealed.generations[0].files}
    erase_keys(people.lake, "people", [SECRET], **WHY)
    (new,) = views(people)
    same = {
        f.bucket
        for f in new.sealed.generations[0].files
        if (f.sha256, f.digest) == digests[f.bucket]
    }
    assert len(same) == 1
    assert new.sealed.digest is None, (
        "a version whose digest is not known equals nothing that is delivered later"
    )


def test_a_bucket_and_a_version_can_become_empty(people: World) -> None:
    deliver(people, "v1", entries(1, SECRET))
    deliver(people, "v2", entries(2, SECRET, "ada", "bob", "cy", "dan"))
    report = erase_keys(people.lake, "people", [SECRET], **WHY)
    assert report.complete
    assert retained(people) == {"v1": {}, "v2": entries(2, "ada", "bob", "cy", "dan")}


def test_pins_rollbacks_revocations_and_rejections_stay_what_they_were(people: World) -> None:
    def nine(candidate: Candidate) -> Finding:
        return Finding(
            candidate.view.get("nine") is None,
            f"nine and {SECRET} are there",
            {"sample": [[SECRET]]},
        )

    spec = bounded_dataset(
        "people",
        input="lake.people",
        key="person",
        partitions=2,
        validators=[custom("no_nine", nine)],
    )
    for n in (1, 2, 3):
        deliver(people, f"v{n}", entries(n, "ada", SECRET), spec)
    rejected = deliver(people, "v4", entries(4, "nine", SECRET), spec)
    assert rejected.action == "rejected"
    store_of(people).revoke("v3", reason=f"it says too much of {SECRET}", by="ada")
    store_of(people).pin("v1", reason=f"{SECRET} complained", by="ada")
    erase_keys(people.lake, "people", [SECRET], **WHY)
    manifest = store_of(people).require_manifest()
    states = {ref.name: ref.state for ref in manifest.versions}
    assert states == {"v1": "sealed", "v2": "sealed", "v3": "revoked", "v4": "rejected"}
    assert manifest.pin is not None
    assert manifest.pin.reason == CLEARED
    assert manifest.version is not None
    assert manifest.version.name == "v1"
    head = manifest.ref(str(manifest.head))
    assert head is not None
    assert head.name == "v2"
    refused = next(ref for ref in manifest.versions if ref.state == "rejected")
    assert refused.reason == CLEARED
    assert [(v.name, v.passed, v.message, v.facts) for v in refused.verdicts] == [
        ("no_nine", False, CLEARED, {})
    ]
    assert retained(people) == {
        "v1": entries(1, "ada"),
        "v2": entries(2, "ada"),
        "v3": entries(3, "ada"),
        "v4": entries(4, "nine"),
    }
    assert traces(people.lake.store, SECRET) == []
    store_of(people).unpin(reason="done", by="ada")
    store_of(people).accept("v4", reason="it is fine now", by="ada")
    assert content_of(store_of(people).require_current()) == entries(4, "nine")


def test_what_a_revocation_goes_back_to_is_known_after_an_erasure(people: World) -> None:
    for number in (1, 2, 3):
        deliver(people, f"v{number}", entries(number, "ada", SECRET))
    store_of(people).rollback("v1", reason="v3 is wrong", by="ada")
    deliver(people, "v4", entries(4, "ada", SECRET))
    assert erase_keys(people.lake, "people", [SECRET], **WHY).complete
    store_of(people).revoke("v4", reason="wrong, too", by="ada")
    assert content_of(store_of(people).require_current()) == entries(1, "ada")


def test_a_version_that_only_names_the_key_gets_another_document_and_keeps_its_files(
    people: World,
) -> None:
    known = custom(
        "known", lambda c: Finding(False, f"{SECRET} and x10 are missing"), severity="warn"
    )
    spec = bounded_dataset(
        "people", input="lake.people", key="person", partitions=2, validators=[known]
    )
    deliver(people, "v1", entries(1, "ada"), spec)
    before = store_of(people).require_manifest()
    with Lease.acquire(people.lake, "people", [str(before.head)], holder="a reader"):
        report = erase_keys(people.lake, "people", [SECRET, "x1"], **WHY)
    after = store_of(people).require_manifest()
    assert report.complete
    assert report.rewritten == ()
    assert after.head == before.head
    assert after.version is not None
    assert after.version.generations == before.version.generations  # type: ignore[union-attr]
    assert after.version.verdicts[0].message == CLEARED
    assert traces(people.lake.store, SECRET) == []
    erase_keys(people.lake, "people", ["x1"], **WHY)
    assert store_of(people).require_manifest() == after, "x10 is another key than x1"


def test_history_goes_on_telling_who_did_what_without_the_key(people: World) -> None:
    deliver(people, "v1", entries(1, "ada", SECRET))
    deliver(people, "v2", entries(2, "ada", SECRET))
    store_of(people).rollback(reason="v2 is wrong", by="bob")
    report = erase_keys(people.lake, "people", [SECRET], **WHY)
    assert report.redacted >= 3
    reported = [(entry.action, entry.by) for entry in store_of(people).history()]
    assert reported[:2] == [("expire", "ada"), ("erase", "ada")]
    assert ("rollback", "bob") in reported
    assert len([action for action, _ in reported if action == "seal"]) == 2
    entry = store_of(people).history()[1]
    assert entry.reason == "request 4711"
    assert entry.version == report.rewritten[0].new


def test_the_old_id_of_a_version_says_what_became_of_it(people: World) -> None:
    deliver(people, "v1", entries(1, "ada", SECRET))
    old = store_of(people).require_current().version
    report = erase_keys(people.lake, "people", [SECRET], **WHY)
    with pytest.raises(
        DatasetError,
        match=f"version {old} was rewritten by an erasure, as {report.rewritten[0].new}",
    ):
        store_of(people).version(old)
    assert content_of(store_of(people).version("v1")) == entries(1, "ada")


def test_what_is_delivered_again_is_published_again_with_the_key(people: World) -> None:
    content = entries(1, "ada", "bob", SECRET)
    deliver(people, "v1", content)
    erase_keys(people.lake, "people", [SECRET], **WHY)
    again = deliver(people, "v2", content)
    assert again.action == "sealed"
    assert content_of(store_of(people).require_current()) == content
    without = deliver(people, "v3", entries(1, "ada", "bob"))
    assert without.action == "sealed"
    erase_keys(people.lake, "people", [SECRET], **WHY)
    assert deliver(people, "v4", entries(1, "ada", "bob")).action == "unchanged"


# -- what is proved


def test_a_search_says_where_keys_are_and_changes_nothing(people: World) -> None:
    deliver(people, "v1", entries(1, "ada", SECRET))
    before = {item.key: item.etag for item in people.lake.store.list("")}
    search = find_keys(people.lake, "people", [SECRET])
    assert not search.clean
    (file,) = [str(sighting) for sighting in search.found if sighting.object.endswith(".parquet")]
    assert "1 row has one of the keys" in file
    assert {item.key: item.etag for item in people.lake.store.list("")} == before
    assert find_keys(people.lake, "people", ["nobody"]).clean


class _OutOfFiles(InMemoryStore):
    """A store on a machine on which no more files can be opened."""

    def get(self, key: str) -> Any:
        if key.endswith(".parquet"):
            raise OSError(errno.EMFILE, "Too many open files")
        return super().get(key)


def test_a_search_on_a_machine_without_open_files_calls_nothing_unreadable(people: World) -> None:
    deliver(people, "v1", entries(1, "ada"))
    store = _OutOfFiles()
    for item in people.lake.store.list(""):
        store.put(item.key, people.lake.store.get(item.key).data)
    with pytest.raises(ConfigurationError):
        find_keys(lake_in(store), "people", ["ada"])


def plant(world: World, folder: str, names: Sequence[str]) -> str:
    table = pa.table(
        {
            "person": list(names),
            "seats": pa.array([1] * len(names), pa.int32()),
            "note": list(names),
        }
    )
    path = world.lake.store.staging_dir() / "planted"
    pq.write_table(table, path)
    key = f"{folder}/part-00000-planted_00000.c000.zstd.parquet"
    world.lake.store.put(key, path.read_bytes())
    return key


def test_garbage_with_the_key_is_deleted_and_other_garbage_is_left_alone(people: World) -> None:
    deliver(people, "v1", entries(1, "ada"))
    data = f"{people.lake.dataset_prefix('people')}/data"
    mine, other = (
        plant(people, f"{data}/dead1", ["ada", SECRET]),
        plant(people, f"{data}/dead2", ["ada"]),
    )
    people.lake.store.put(f"{data}/dead3/part-0.parquet", b"half an upload")
    report = erase_keys(people.lake, "people", [SECRET], **WHY)
    assert report.complete
    assert people.lake.store.head(mine) is None
    assert people.lake.store.head(other) is not None
    assert report.deleted == 2


def test_a_build_on_record_is_named_and_goes_when_it_is_off_record(people: World) -> None:
    deliver(people, "v1", entries(1, "ada"))
    key = plant(people, f"{people.lake.dataset_prefix('people')}/data/build7", [SECRET])
    record = attempt_key(people.lake, "people", "build7")
    people.lake.store.put(record, b"{}")
    report = erase_keys(people.lake, "people", [SECRET], **WHY)
    assert not report.complete
    assert [sighting.object for sighting in report.proof.found] == [key]
    (pending,) = report.pending
    assert "a build on record" in pending.reason
    assert "NOT complete" in report.summary()
    people.lake.store.delete(record)
    assert erase_keys(people.lake, "people", [SECRET], **WHY).complete


def test_a_stray_file_next_to_a_version_s_own_is_found_and_left_to_a_human(people: World) -> None:
    deliver(people, "v1", entries(1, "ada"))
    folder = store_of(people).versions()[0].folders[0]
    key = plant(people, folder, [SECRET])
    report = erase_keys(people.lake, "people", [SECRET], **WHY)
    assert not report.complete
    assert [str(sighting) for sighting in report.proof.found] == [
        f"{key}: 1 row has one of the keys"
    ]


def test_a_file_that_is_missing_leaves_the_proof_open(people: World) -> None:
    deliver(people, "v1", entries(1, "ada", "bob", "cy", "dan"))
    generation = store_of(people).require_current().sealed.generations[0]
    (view,) = views(people)
    wanted = next(n for n in ("ada", "bob") if view.get(n))
    other = next(
        f for f in generation.files if wanted not in str(f.min_key) and wanted not in str(f.max_key)
    )
    people.lake.store.delete(f"{generation.folder}/{other.name}")
    search = find_keys(people.lake, "people", [SECRET])
    assert not search.clean
    assert "it is missing" in str(search.unsearched[0])


def test_a_damaged_file_stops_the_erasure_before_anything_is_erased(people: World) -> None:
    deliver(people, "v1", entries(1, "ada", SECRET))
    deliver(people, "v2", entries(2, "ada", "bob", "cy", SECRET))
    before = store_of(people).require_manifest()
    generation = before.version.generations[0]  # type: ignore[union-attr]
    damaged = f"{generation.folder}/{generation.files[-1].name}"
    data = people.lake.store.get(damaged).data
    # Several bytes: a single one may lie in a page header's statistics, which nobody needs.
    people.lake.store.put(damaged, data[:40] + bytes(byte ^ 1 for byte in data[40:80]) + data[80:])
    with pytest.raises(
        ManifestMismatchError,
        match=r"nothing was erased.*Restore that object, or give the version up",
    ):
        erase_keys(people.lake, "people", [SECRET, "ada", "bob", "cy"], **WHY)
    assert store_of(people).require_manifest() == before
    people.lake.store.put(damaged, data)
    assert erase_keys(people.lake, "people", [SECRET, "ada", "bob", "cy"], **WHY).complete


# -- readers


def test_a_leased_version_is_pending_until_it_is_let_go(people: World) -> None:
    deliver(people, "v1", entries(1, "ada", SECRET))
    old = store_of(people).require_current()
    lease = Lease.acquire(people.lake, "people", [old.version], holder="a dashboard")
    report = erase_keys(people.lake, "people", [SECRET], **WHY)
    assert not report.complete
    assert report.pending
    assert all("leased by a dashboard until" in judged.reason for judged in report.pending)
    assert old.get(SECRET) is not None, "what is leased is not pulled from under its reader"
    assert store_of(people).require_current().get(SECRET) is None
    lease.release()
    assert erase_keys(people.lake, "people", [SECRET], **WHY).complete
    assert traces(people.lake.store, SECRET) == []


def test_what_an_open_batch_needs_is_pending_and_a_discard_finishes_it(people: World) -> None:
    deliver(people, "v1", entries(1, "ada", SECRET))
    old = store_of(people).require_current().version
    why = "open batch 3 of application delays"
    report = erase_keys(people.lake, "people", [SECRET], **WHY, roots=lambda: {old: why})
    assert {judged.reason for judged in report.pending} == {why}
    assert not report.complete
    assert store_of(people).version_of_batch(old).get(SECRET) is not None, (
        "the batch is run again as it was begun"
    )
    with pytest.raises(DatasetError, match="rewritten by an erasure"):
        store_of(people).version(old)
    discard(people.lake, "people", DiscardPolicy(keep=None), by="ada")
    assert find_keys(people.lake, "people", [SECRET]).clean
    with pytest.raises(DatasetError, match="rewritten by an erasure"):
        store_of(people).version_of_batch(old)


# -- interruptions


def copy_of(world: World) -> World:
    store = InMemoryStore()
    for item in world.lake.store.list(""):
        store.put(item.key, world.lake.store.get(item.key).data)
    return World(Lake(store, world.lake.id), world.spark, dict(world.sequences))


@pytest.mark.lengthy
@pytest.mark.rounds
def test_an_erasure_that_dies_at_any_request_is_finished_by_the_next(people: World) -> None:
    deliver(people, "v1", entries(1, "ada", "bob", SECRET))
    deliver(people, "v2", entries(2, "ada", "cy"))
    plant(people, f"{people.lake.dataset_prefix('people')}/data/dead1", [SECRET])
    before = retained(people)
    expected = {"v1": entries(1, "ada", "bob"), "v2": entries(2, "ada", "cy")}
    whole = copy_of(people)
    counted = FaultyStore(whole.lake.store)
    erase_keys(Lake(counted, whole.lake.id), "people", [SECRET], **WHY)
    assert retained(whole) == expected
    assert len(counted.requests) > 30
    for number, nth in enumerate(deaths(counted.requests), 1):
        world = copy_of(people)
        faulty = FaultyStore(world.lake.store, [Fault("*", nth, "crash-before")])
        with pytest.raises(Crash):
            erase_keys(Lake(faulty, world.lake.id), "people", [SECRET], **WHY)
        assert retained(world) in (before, expected)
        assert erase_keys(world.lake, "people", [SECRET], **WHY).complete
        assert retained(world) == expected
        assert traces(world.lake.store, SECRET) == []
        if number % 5 == 0:
            assert deliver(world, "v3", entries(3, "eve")).action == "sealed"


@pytest.mark.lengthy
@pytest.mark.parametrize("fault", ["lost-before", "lost-after", "throttle"])
def test_a_store_that_fails_leaves_an_error_and_the_repetition_finishes(
    people: World, fault: Any
) -> None:
    deliver(people, "v1", entries(1, "ada", SECRET))
    nth = 1
    while True:
        world = copy_of(people)
        faulty = FaultyStore(world.lake.store, [Fault("*", nth, fault)])
        try:
            erase_keys(Lake(faulty, world.lake.id), "people", [SECRET], **WHY)
        except AdjunctError:
            assert erase_keys(world.lake, "people", [SECRET], **WHY).complete
        assert retained(world) == {"v1": entries(1, "ada")}
        if nth > len(faulty.requests):
            break
        nth += 3


def meanwhile(world: World, nth: int, act: Callable[[], object]) -> Lake:
    return Lake(
        FaultyStore(world.lake.store, [Fault("put_if_match", nth, "meanwhile", act)]), world.lake.id
    )


def test_a_version_that_seals_meanwhile_is_searched_too(people: World) -> None:
    deliver(people, "v1", entries(1, "ada", SECRET))
    lake = meanwhile(people, 1, lambda: deliver(people, "v2", entries(2, "bob", SECRET)))
    report = erase_keys(lake, "people", [SECRET], **WHY)
    assert report.complete
    assert retained(people) == {"v1": entries(1, "ada"), "v2": entries(2, "bob")}
    assert content_of(store_of(people).require_current()) == entries(2, "bob")


def test_a_rollback_and_a_revocation_meanwhile_hold(people: World) -> None:
    for n in (1, 2, 3):
        deliver(people, f"v{n}", entries(n, "ada", SECRET))

    def act() -> None:
        store_of(people).revoke("v3", reason="wrong", by="bob")
        store_of(people).rollback("v1", reason="older", by="bob")

    assert erase_keys(meanwhile(people, 1, act), "people", [SECRET], **WHY).complete
    assert content_of(store_of(people).require_current()) == entries(1, "ada")
    assert [ref.state for ref in store_of(people).versions()] == ["sealed", "sealed", "revoked"]


def test_what_a_version_replaced_that_is_forced_meanwhile_is_known_afterwards(
    people: World,
) -> None:
    no_two = custom("no_two", lambda c: Finding(all(row["seats"] != 2 for row in rows_of(c.view))))
    spec = bounded_dataset(
        "people", input="lake.people", key="person", partitions=2, validators=[no_two]
    )
    for n in (1, 2, 3):
        deliver(people, f"v{n}", entries(n, "ada", SECRET), spec)

    def act() -> None:
        store_of(people).accept("v2", reason="it is fine", by="bob", make_current=True)

    assert erase_keys(meanwhile(people, 1, act), "people", [SECRET], **WHY).complete
    assert content_of(store_of(people).require_current()) == entries(2, "ada")
    store_of(people).revoke("v2", reason="it is not", by="bob")
    assert content_of(store_of(people).require_current()) == entries(3, "ada")


def test_a_version_that_is_discarded_meanwhile_leaves_nothing_rewritten(people: World) -> None:
    for n in (1, 2):
        deliver(people, f"v{n}", entries(n, "ada", SECRET))
    keep_one = DiscardPolicy(keep=1, grace=dt.timedelta(0))
    report = erase_keys(
        meanwhile(people, 1, lambda: discard(people.lake, "people", keep_one, by="bob")),
        "people",
        [SECRET],
        **WHY,
    )
    assert report.complete
    assert [version.name for version in report.rewritten] == ["v2"]
    assert retained(people) == {"v2": entries(2, "ada")}
    folders = {
        item.key.rsplit("/", 1)[0] for item in people.lake.store.list("datasets/people/data/")
    }
    assert folders == set(store_of(people).versions()[0].folders)


def test_an_advance_that_meets_an_erasure_publishes_and_the_erasure_stands(people: World) -> None:
    deliver(people, "v1", entries(1, "ada", SECRET))
    people.send("people", [("bob", 2, "bob in 2")], version="v2")
    reports: list[ErasureReport] = []
    lake = meanwhile(
        people, 1, lambda: reports.append(erase_keys(people.lake, "people", [SECRET], **WHY))
    )
    assert people.advance(PEOPLE, lake=lake).action == "sealed"
    assert retained(people) == {"v1": entries(1, "ada"), "v2": entries(2, "bob")}
    assert traces(people.lake.store, SECRET) == []


# -- version sets


def test_a_member_of_a_version_set_forgets_alone(people: World) -> None:
    people.stream("planes", SCHEMA, ["person"], 2)
    planes = bounded_dataset("planes", input="lake.planes", key="person", broadcast=True)
    deliver(people, "v0", entries(0, "ada", SECRET))  # before it joined
    members = version_set("both", PEOPLE, planes)
    for n in (1, 2):
        for stream in ("people", "planes"):
            people.send(stream, [(SECRET, n, "x"), ("ada", n, "y")], version=f"v{n}")
        advance_version_set(
            members, lake=people.lake, systems=people.systems, spark=people.spark, by="test"
        )
    before = StoredVersions(people.lake, "planes").require_manifest()
    report = erase_keys(people.lake, "people", [SECRET], **WHY)
    assert report.complete
    assert [set(content) for content in retained(people).values()] == [{"ada"}] * 3
    assert StoredVersions(people.lake, "planes").require_manifest() == before
    assert find_keys(people.lake, "people", [SECRET]).clean
    assert not find_keys(people.lake, "planes", [SECRET]).clean
    left = traces(people.lake.store, SECRET)
    assert all(key.startswith(("datasets/planes/", "version-sets/both/")) for key in left)
    assert erase_keys(people.lake, "planes", [SECRET], **WHY).complete
    assert traces(people.lake.store, SECRET) == []
    StoredVersions(people.lake, "people").rollback("v1", reason="both", by="ada")
    assert StoredVersions(people.lake, "planes").require_current().get("ada") == {
        "person": "ada",
        "seats": 1,
        "note": "y",
    }


# -- on a real S3 server


@pytest.mark.server
def test_an_erasure_on_s3_is_whole_proved_and_finished_later_where_a_reader_holds_it(
    people: World, s3_server: S3Server
) -> None:
    world = World(open_lake(s3_server.url(), settings=s3_server.settings), IN_PROCESS)
    world.stream("people", SCHEMA, ["person"], 2)
    for n in (1, 2):
        deliver(world, f"v{n}", entries(n, "ada", "bob", SECRET))
    lease = Lease.acquire(
        world.lake, "people", [store_of(world).require_current().version], holder="a dashboard"
    )
    report = erase_keys(world.lake, "people", [SECRET], **WHY)
    assert {judged.reason.partition(" until")[0] for judged in report.pending} == {
        "leased by a dashboard"
    }
    assert report.not_erased[-1].startswith("older object versions in s3://")
    lease.release()
    assert erase_keys(world.lake, "people", [SECRET], **WHY).complete
    assert retained(world) == {f"v{n}": entries(n, "ada", "bob") for n in (1, 2)}
    assert traces(world.lake.store, SECRET) == []


# -- refused


def test_what_can_t_be_forgotten_is_refused_with_what_to_do(people: World) -> None:
    deliver(people, "v1", entries(1, "ada", SECRET))

    def refused(error: type[AdjunctError], match: str, keys: Any = (SECRET,), **given: str) -> None:
        with pytest.raises(error, match=match):
            erase_keys(people.lake, given.pop("dataset", "people"), keys, **{**WHY, **given})

    refused(DatasetNotFoundError, "dataset 'nobody' has no commit", dataset="nobody")
    refused(ConfigurationError, "argument 'keys' is empty", keys=[])
    refused(SchemaMismatchError, "key column 'person' is string, and 5", keys=[5])
    refused(NullKeyError, "key column 'person' is null", keys=[None])
    refused(ConfigurationError, "has no reason", reason=" ")
    refused(ConfigurationError, "has no author", by="")
    refused(
        ConfigurationError,
        "the reason of the erasure contains a key",
        reason=f"{SECRET} asked for it",
    )


# -- keys that stand in words by chance


@pytest.mark.parametrize(
    ("kind", "held", "reason"),
    [
        ("bigint", [1, 4711], "request 4711"),
        ("int", [0, 2], "2 requests"),
        ("string", ["1", "2"], "request 4711"),
    ],
)
def test_a_key_that_looks_like_a_count_or_a_request_is_forgotten(
    people: World, kind: str, held: list[Any], reason: str
) -> None:
    world = fresh(Schema.of(person=kind, seats="int"))
    for number in (1, 2):
        world.send(
            "people", [(key, number) for key in (*held, held[0] + held[0])], version=f"v{number}"
        )
        world.advance(PEOPLE)
    for key in held:
        assert find_keys(world.lake, "people", [key]).found
        report = erase_keys(world.lake, "people", [key], reason=reason, by="ada")
        assert report.complete, report.summary()
    reported = [(entry.action, entry.reason) for entry in store_of(world).history(limit=4)]
    assert reported.count(("erase", reason)) == len(held), "the history keeps the reasons"
    again = erase_keys(world.lake, "people", held, reason=reason, by="ada")
    assert (again.complete, again.rewritten) == (True, ())


# -- against a model


KEYS = st.tuples(st.sampled_from(["JFK", "LGA", "EWR", "ä"]), st.integers(-2, 12))
CONTENT = st.dictionaries(KEYS, st.integers(0, 99), max_size=25)
ROUTES = Schema.of(origin="string", hour="bigint", v="int")


def by_key(view: VersionReader) -> dict[tuple[str, int], int]:
    return {(row["origin"], row["hour"]): row["v"] for row in rows_of(view)}


@pytest.mark.lengthy
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    versions=st.lists(CONTENT, min_size=1, max_size=4),
    rounds=st.lists(st.sets(KEYS, min_size=1, max_size=6), min_size=1, max_size=2),
    spread=st.sampled_from([None, ("origin",), ("origin", "hour")]),
    operations=st.lists(st.sampled_from(["pin", "rollback", "revoke"]), max_size=2),
)
def test_all_versions_hold_what_a_dict_without_the_keys_holds(
    people: World,
    versions: list[Mapping[tuple[str, int], int]],
    rounds: list[set[tuple[str, int]]],
    spread: tuple[str, ...] | None,
    operations: list[str],
) -> None:
    world = fresh(ROUTES, ("origin", "hour"))
    spec = bounded_dataset(
        "people",
        input="lake.people",
        key=["origin", "hour"],
        **({"broadcast": True} if spread is None else {"partitions": 3, "partition_by": spread}),  # type: ignore[arg-type]
    )
    model: dict[int, dict[tuple[str, int], int]] = {}
    for number, content in enumerate(versions, 1):
        world.send("people", [(*key, value) for key, value in content.items()])
        world.mark("people", f"v{number}", [0, 1])
        world.advance(spec)
        ref = store_of(world).versions()[-1]
        model[ref.number] = dict(content)
    for operation in operations:
        try:
            {
                "pin": lambda: store_of(world).pin("v1", reason="r", by="b"),
                "rollback": lambda: store_of(world).rollback(reason="r", by="b"),
                "revoke": lambda: store_of(world).revoke("v1", reason="r", by="b"),
            }[operation]()
        except DatasetError:
            continue
    served = store_of(world).require_manifest().version
    for keys in rounds:
        report = erase_keys(world.lake, "people", keys, **WHY)
        assert report.complete
        gone = {number: set(content) & keys for number, content in model.items()}
        assert sum(version.rows for version in report.rewritten) == sum(map(len, gone.values()))
        model = {
            n: {k: v for k, v in content.items() if k not in keys} for n, content in model.items()
        }
        for view in views(world):
            assert by_key(view) == model[view.sealed.number]
            assert verify_version(view, deep=True).ok
    now = store_of(world).require_manifest().version
    assert (served and served.number) == (now and now.number)
