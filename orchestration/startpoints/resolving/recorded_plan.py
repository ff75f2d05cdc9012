"""What a recorded replay reads and meets, written down when it is asked for; it holds the versions as long as it lasts.

    applications/{name}/recorded/{id}.json      pieces of each partition, and the versions of each piece

It is written before the requests that name it, and looks then whether its versions are retained; who discards dooms
first and reads the plans then. So one of the two always sees the other, as with leases. A plan counts while it is
young, while a request or a fan-out names it, and while one of its replays is under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from pydantic import Field as Default
from pydantic import ValidationError

from dagster_adjunct.assets.reading.chosen_version import version_of_batch
from dagster_adjunct.assets.unbounded.transient_version import is_transient
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.orchestration.batchlog.batch_log import BatchLog, Range
from dagster_adjunct.orchestration.batchlog.stored_positions import Partition
from dagster_adjunct.orchestration.startpoints.requests.startpoint_manager import StartpointManager
from dagster_adjunct.resources.errors import (
    DatasetError,
    MalformedDocumentError,
    ObjectNotFoundError,
    PermanentError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects.object_store import time_of_store
from dagster_adjunct.resources.stored_documents import StoredDocument, first_problem

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.orchestration.startpoints.requests.fan_out import FanOut
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.objects.object_store import ObjectInfo

# From the plan to the requests that name it: a few requests to the store.
_YOUNG = timedelta(minutes=10)


class RecordedPiece(StoredDocument):
    """What one batch read first: up to this offset, from where the piece before it ends."""

    end: str
    batch: int


class RecordedPlan(StoredDocument):
    """The offsets that are read as they were, in pieces, and the versions that each batch met.

    `over_time` are, by batch, all versions that it met of bounded datasets which it joined by time. Requests that no
    run has taken up by `expires_at` hold nothing any more. `streams` are the identities of the streams, as far as they
    have one.
    """

    id: str
    application: str
    expires_at: datetime
    streams: dict[str, str]
    spans: dict[Partition, Range]
    pieces: dict[Partition, tuple[RecordedPiece, ...]]
    versions: dict[int, dict[str, str | None]]
    over_time: dict[int, dict[str, tuple[str, ...]]] = Default(default_factory=dict)

    def met(self) -> Iterator[tuple[str, str, list[int]]]:
        """Yield each dataset and version of it that batches met, with these batches."""
        batches_of: dict[tuple[str, str], list[int]] = {}
        for batch, versions in sorted(self.versions.items()):
            for dataset, version in versions.items():
                for version_met in {version, *self.over_time.get(batch, {}).get(dataset, ())} - {None}:
                    batches_of.setdefault((dataset, str(version_met)), []).append(batch)
        for (dataset, version), batches in sorted(batches_of.items()):
            yield dataset, version, batches

    def words(self) -> tuple[str, ...]:
        """Return what the plan meets, a line for the batches and one for each dataset."""
        batches = sorted(self.versions)
        if not batches:
            return ()
        which = f"batch {batches[0]}" if len(batches) == 1 else f"{len(batches)} batches, {batches[0]} to {batches[-1]}"
        versions: dict[str, list[str]] = {}
        for dataset, version, _ in self.met():
            versions.setdefault(dataset, []).append(version)
        told = [f"recorded: what {which} met, held until the replay has ended"]
        for dataset, met in versions.items():
            more = f" and {len(met) - 3} more" if len(met) > 3 else ""
            told.append(f"recorded: dataset {dataset}: {', '.join(met[:3])}{more}")
        return tuple(told)


def write_plan(lake: Lake, plan: RecordedPlan) -> None:
    """Write it, and hold its versions by that. Raises VersionDiscardedError, and leaves nothing, where one is gone."""
    key = _key(lake, plan.application, plan.id)
    lake.store.put_if_absent(key, plan.model_dump_json().encode())
    try:
        check_all_retained(lake, plan)
    except BaseException:
        lake.store.delete(key)
        raise


def read_plan(lake: Lake, application: str, plan: str) -> RecordedPlan:
    """Return a plan that was written. Raises ObjectNotFoundError and MalformedDocumentError."""
    key = _key(lake, application, plan)
    try:
        return RecordedPlan.model_validate_json(lake.store.get(key).data)
    except ValidationError as error:
        raise MalformedDocumentError(
            f"what a recorded replay reads can't be read in {key}: {first_problem(error)}.",
            "Take the replay back (adjunct startpoint clear) and ask again, or upgrade if a newer version wrote it.",
            document=key,
        ) from error


def check_all_retained(lake: Lake, plan: RecordedPlan) -> None:
    """Raise VersionDiscardedError where a version that batches met can't be read any more; the first one is named."""
    for gone in _gone(lake, plan):
        raise gone.error


def _check_all_held(lake: Lake, plan: RecordedPlan) -> None:
    """The same of a plan that holds them since before: what a discard that was under way then has spared is there."""
    for gone in _gone(lake, plan):
        if gone.doomed_in is None or not is_readable(lake, gone.doomed_in, gone.version):
            raise gone.error


@dataclass(frozen=True, slots=True)
class _GoneVersion:
    """A version that is not retained any more.

    `doomed_in` is the dataset's manifest where that says so: the files may be there all the same.
    """

    version: str
    error: VersionDiscardedError
    doomed_in: DatasetManifest | None


def _gone(lake: Lake, plan: RecordedPlan) -> Iterator[_GoneVersion]:
    """Yield the versions of a plan that are not retained any more."""
    manifests: dict[str, DatasetManifest | None] = {}
    for dataset, version, batches in plan.met():
        if dataset not in manifests and not is_transient(version):
            manifests[dataset] = DatasetLog(lake, dataset).read()[1]
        manifest = manifests.get(dataset)
        why = _why_gone(manifest, version)
        if why is None:
            continue
        met = f"batch {batches[0]}" if len(batches) == 1 else f"batches {batches[0]} to {batches[-1]}"
        error = VersionDiscardedError(
            f"dataset {dataset!r}: version {version}, which {met} of application {plan.application!r} met, is gone: "
            f"{why}.",
            "Nothing can meet it again. Replay with versions=as-of, where joins are as-of, or with versions=current "
            "(--versions). A policy that keeps more keeps earlier versions longer: discard=DiscardPolicy(keep=…, "
            "grace=…).",
            dataset=dataset,
            version=version,
        )
        yield _GoneVersion(version, error, None if is_transient(version) else manifest)


def _why_gone(manifest: DatasetManifest | None, version: str) -> str | None:
    """Return why a version is not retained any more, as a sentence may end; None where it is."""
    if is_transient(version):
        return "its table lived for one run"
    if manifest is None:
        return "the dataset was deleted"
    try:
        manifest.check_kept(version)
    except VersionDiscardedError:
        return "it was discarded"
    return None


def is_readable(lake: Lake, manifest: DatasetManifest, version: str) -> bool:
    """Whether the files of a version are there, also of one that is doomed and spared."""
    try:
        sealed = version_of_batch(DatasetLog(lake, manifest.name), manifest, version)
    except (DatasetError, ObjectNotFoundError):
        return False
    there = manifest.reachable() | set(manifest.doomed)
    return all(generation.folder in there for generation in sealed.generations if generation.files)


def plans_of(lake: Lake, application: str, fan_out: FanOut) -> dict[str, RecordedPlan | PermanentError]:
    """Return the plans that handed out requests name, by their ids; instead of one whose versions are gone, why."""
    plans: dict[str, RecordedPlan | PermanentError] = {}
    for held in fan_out.tasks.values():
        for request in held.values():
            if request.recorded is not None and request.recorded not in plans:
                try:
                    plan = read_plan(lake, application, request.recorded)
                    _check_all_held(lake, plan)
                    plans[plan.id] = plan
                except ObjectNotFoundError:
                    continue
                except PermanentError as error:
                    plans[request.recorded] = error
    return plans


def versions_held(lake: Lake, application: str) -> dict[str, dict[str, str]]:
    """Return, by dataset and version, which recorded replay of an application needs the version."""
    held: dict[str, dict[str, str]] = {}
    for plan in _live_plans(lake, application):
        for dataset, version, _ in plan.met():
            why = f"a recorded replay of application {application}, {', '.join(map(str, sorted(plan.spans)[:3]))}"
            held.setdefault(dataset, {})[version] = why
    return held


def forget_plans(lake: Lake, application: str) -> int:
    """Delete the plans that hold nothing any more; return how many."""
    stored = _stored(lake, application)
    if not stored:
        return 0
    live = {plan.id for plan in _live_plans(lake, application)}
    gone = [key for plan, key in ((_id(item), item.key) for item in stored) if plan not in live]
    lake.store.delete_many(gone)
    return len(gone)


def _live_plans(lake: Lake, application: str) -> list[RecordedPlan]:
    stored = _stored(lake, application)
    if not stored:
        return []
    now = time_of_store(lake.store, f"{lake.application_prefix(application)}/clock")
    # In the order in which they go from one to the next, so that one that moves meanwhile is met where it comes to.
    startpoints = StartpointManager(MetadataStore(lake), application).read()
    replays = BatchLog(lake, application).read().state.offsets.replays.values()
    waiting = {request.recorded for request in (*startpoints.waiting, *startpoints.expired)}
    used = {request.recorded for held in startpoints.handed.values() for request in held.values()}
    used |= {replay.recorded for replay in replays}
    plans = []
    for item in stored:
        try:
            plan = read_plan(lake, application, _id(item))
        except ObjectNotFoundError:
            continue
        is_young = item.modified > now - _YOUNG
        is_asked = plan.id in waiting and now < plan.expires_at
        if is_young or is_asked or plan.id in used or startpoints.unreadable:
            plans.append(plan)
    return plans


def _stored(lake: Lake, application: str) -> list[ObjectInfo]:
    return list(lake.store.list(f"{lake.application_prefix(application)}/recorded/"))


def _id(item: ObjectInfo) -> str:
    return item.key.rsplit("/", 1)[1].removesuffix(".json")


def _key(lake: Lake, application: str, plan: str) -> str:
    return f"{lake.application_prefix(application)}/recorded/{plan}.json"
