"""Who follows the changes of a dataset, from which of its commits, and what is kept for them.

An application that reads `changes.planes` is at a commit of the dataset `planes`. To read on, it
needs the version that was served after it. That is kept because of the position in the batch log,
so that nothing has to be released: until the application has read on or is deleted, or as long as
the policy of the dataset says (`followed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.change_streams import followed_dataset, parse_commit
from dagster_adjunct.assets.reading.served_history import ServedHistory
from dagster_adjunct.assets.versions.manifest import BoundedManifest
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    application_state,
    list_application_states,
)
from dagster_adjunct.orchestration.batch_log.intent import ReadVersions
from dagster_adjunct.resources.errors import (
    AdjunctError,
    OffsetOutOfRangeError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.times import add_span


@dataclass(frozen=True, slots=True)
class Follower:
    """An application that reads the changes of a dataset and has not read the newest ones.

    It has read them up to the commit `number`. The version that was served at that commit is
    `version`: None if it was discarded, or if nothing was served. It was replaced by another one at
    the time `replaced_at`, and is kept for the application until `kept_until`. `manifests` are the
    keys of the manifests that list what was served at that commit.
    """

    application: str
    dataset: str
    number: int
    version: str | None
    replaced_at: datetime
    kept_until: datetime
    manifests: tuple[str, ...] = ()

    def is_kept(self, now: datetime) -> bool:
        """Whether the version is kept for the application."""
        return self.version is not None and now < self.kept_until

    def describe(self, now: datetime) -> str:
        """Return which version the application needs and until when it is kept, in a sentence."""
        where = (
            f"application {self.application} follows the changes of dataset {self.dataset} from"
            f" commit {self.number}, replaced at {self.replaced_at:%Y-%m-%d %H:%M:%S} UTC"
        )
        if self.version is None:
            return f"{where}: that version is gone"
        if not self.is_kept(now):
            return f"{where}: version {self.version} is not kept any more"
        return f"{where}: version {self.version} is kept until {self.kept_until:%Y-%m-%d %H:%M} UTC"


def find_lagging_followers(
    lake: Lake,
    dataset: str,
    states: Mapping[str, ApplicationState] | None = None,
    policy: DiscardPolicy | None = None,
) -> list[Follower]:
    """Return the applications that have not read all changes of a dataset, each once for every
    commit at which it begins or ends to read, the earliest commit first; [] if there are none.

    `states` are the states of all applications; they are read if not given. The default policy is
    the one declared at the last advance.
    """
    if states is None:
        states = list_application_states(lake)
    positions = set()
    for position in _iter_positions(states):
        if followed_dataset(position.ssp.qualified_stream) == dataset:
            with suppress(
                OffsetOutOfRangeError
            ):  # no commit: a test put another stream in its place
                number = parse_commit(position.offset, str(position.ssp))
                positions.add((number, position.application))
    if not positions:
        return []
    history = ServedHistory.read(lake, dataset)
    if policy is None:
        policy = history.manifest.declaration.discard
    found = []
    for number, application in sorted(positions):
        replaced_at = None
        if 0 < number <= history.number:
            replaced_at = history.replaced_at(number)
        if replaced_at is None:  # it has read all changes, or its offset is no commit
            continue
        version = None
        manifests: tuple[str, ...] = ()
        with suppress(VersionDiscardedError):
            versions = history.versions_at(number)
            manifests = history.manifests_of(number)
            if versions:
                version = versions[0].id
        follower = Follower(
            application=application,
            dataset=dataset,
            number=number,
            version=version,
            replaced_at=replaced_at,
            kept_until=add_span(replaced_at, policy.followed),
            manifests=manifests,
        )
        found.append(follower)
    return found


def list_lagging_followers(lake: Lake, application: str | None = None) -> list[Follower]:
    """Return the applications, or only this one, that have not read all changes of the datasets
    that they follow, by dataset.
    """
    states: Mapping[str, ApplicationState]
    if application is None:
        states = list_application_states(lake)
    else:
        states = {application: application_state(lake, application)}
    datasets = set()
    for position in _iter_positions(states):
        dataset = followed_dataset(position.ssp.qualified_stream)
        if dataset is not None:
            datasets.add(dataset)
    found = []
    for dataset in sorted(datasets):
        with suppress(AdjunctError):  # it was deleted, or can't be read, which others report
            found += find_lagging_followers(lake, dataset, states)
    return found


def find_versions_for_followers(
    lake: Lake,
    dataset: str,
    states: Mapping[str, ApplicationState] | None = None,
    policy: DiscardPolicy | None = None,
) -> dict[str, str]:
    """Return, by version id, a text that says which application needs the version.

    Needed are the version from which a lagging application reads on, and the versions of which an
    application has made results that it has yet to restate (`Restate`). Nothing is kept for an
    application whose version is gone, or was kept for as long as the policy says. `states` and
    `policy` are those of `find_lagging_followers`.
    """
    now = lake.now()
    if states is None:
        states = list_application_states(lake)
    needed = {}
    lagging = set()
    let_go = set()
    for follower in find_lagging_followers(lake, dataset, states, policy):
        if follower.version is not None and follower.is_kept(now):
            needed[follower.version] = follower.describe(now)
            lagging.add(follower.application)
        else:
            let_go.add(follower.application)
    for application, joined in _iter_joined_versions(states, dataset):
        if application in let_go:
            continue
        has_read_all = application not in lagging
        if has_read_all and _are_all_served(lake, dataset, joined):
            continue  # no result differs from what it would be now
        text = f"application {application} has results that follow dataset {dataset}, made with"
        for version in _iter_versions(joined):
            needed.setdefault(version, f"{text} version {version}")
    return needed


def _iter_joined_versions(
    states: Mapping[str, ApplicationState], dataset: str
) -> Iterator[tuple[str, tuple[ReadVersions, ...]]]:
    """Yield each application that restates results when the dataset changes, with the versions of
    the dataset that its present results were made of.

    These are the versions that its batches have read for a join with `restate=`, since such results
    were last restated. Applications without any are left out.
    """
    for application, state in states.items():
        if state.names.renamed_to is not None:
            continue  # the log of the new name has the same state
        joined = state.offsets.joined.get(dataset, ())
        if joined:
            yield application, joined


def _are_all_served(lake: Lake, dataset: str, joined: Iterable[ReadVersions]) -> bool:
    """Whether no other versions were joined than are served now; always True for an unbounded
    dataset.
    """
    manifest = ServedHistory.read(lake, dataset).manifest
    if not isinstance(manifest, BoundedManifest):
        return True
    for read in joined:
        if read.version != manifest.served_id:
            return False
        if read.over_time and set(read.over_time) != set(manifest.versions_over_time):
            return False
    return True


def _iter_versions(joined: Iterable[ReadVersions]) -> Iterator[str]:
    """Yield the ids of all versions that were read."""
    for read in joined:
        if read.version is not None:
            yield read.version
        yield from read.over_time


def find_manifests_for_followers(
    lake: Lake, dataset: str, policy: DiscardPolicy | None = None
) -> frozenset[str]:
    """Return the keys of the manifests that lagging applications need to read the dataset's
    changes.
    """
    now = lake.now()
    needed: set[str] = set()
    for follower in find_lagging_followers(lake, dataset, policy=policy):
        if follower.is_kept(now):
            needed |= set(follower.manifests)
    return frozenset(needed)


class _Position(NamedTuple):
    """An offset in the changes of a dataset at which an application begins or ends to read, now or
    in a later batch.
    """

    application: str
    ssp: SystemStreamPartition
    offset: str


def _iter_positions(states: Mapping[str, ApplicationState]) -> Iterator[_Position]:
    """Yield the offsets in changes of datasets at which applications begin or end to read."""
    for application, state in states.items():
        if state.names.renamed_to is not None:
            continue  # it reads on under its new name
        for ssp, offset in _iter_offsets(state):
            if followed_dataset(ssp.qualified_stream) is not None:
                yield _Position(application, ssp, offset)


def _iter_offsets(state: ApplicationState) -> Iterator[tuple[SystemStreamPartition, str]]:
    """Yield each partition with the offsets at which the application begins or ends to read it:
    checkpoint, startpoints, ends of abandoned batches, replays and open batch.
    """
    yield from state.checkpoint.items()
    for start in state.offsets.resolved.values():
        yield start.ssp, start.offset
    for ssp, abandoned in state.offsets.abandoned.items():
        for end in abandoned.ends:
            yield ssp, end
    for replay in state.offsets.replays.values():
        yield replay.ssp, replay.next
        yield replay.ssp, replay.until
    if state.open is not None:
        for ssp, span in state.open.ranges.items():
            yield ssp, span.start
            yield ssp, span.end
