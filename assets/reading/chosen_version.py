"""Which stored version somebody means: by id, by the beginning of one, by name, or as it was served at a time.

Of what was served at a time or after a commit, also whether it can still be read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from dagster_adjunct.assets.versions.choose_version import SHORT_ID, readable_version, require_version
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, version_number
from dagster_adjunct.assets.versions.stored_manifest import parse_manifest
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetError,
    MalformedDocumentError,
    NoSealedVersionError,
    ObjectNotFoundError,
    VersionDiscardedError,
)

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.dataset_log import DatasetLog
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.resources.objects.commit_log import Commit

AsOf: TypeAlias = datetime | int | str
"""A time with its zone, or a commit by its number or id."""


def chosen_version(
    log: DatasetLog, current: Commit, manifest: DatasetManifest, version: str | None, as_of: AsOf | None = None
) -> SealedVersion:
    """Return any retained version by its id, or the newest of a name, or what was served `as_of` a time or commit.

    One of the two is given. `manifest` is that of the `current` commit. Times are those of the commits, by the clocks
    of those who made them. Raises DatasetError for a version or commit that is not there or withdrawn,
    NoSealedVersionError where nothing was served yet, and VersionDiscardedError for a version of an unbounded dataset
    that can't be read any more.
    """
    _check_asked(log.name, version, as_of)
    if version is not None and manifest.version is not None and manifest.version.id == version:
        return manifest.version
    if isinstance(manifest, UnboundedManifest):
        return _of_table(log, current, manifest, version, as_of)
    if version is not None:
        return log.read_version(readable_version(manifest, version))
    served = next((then.version for commit, then in log.history() if _is_then(commit, as_of)), None)
    if served is None:
        raise NoSealedVersionError(
            f"dataset {log.name!r}: nothing was served {_told(as_of)}, as far back as its history goes.",
            f"See adjunct dataset history {log.name}, and adjunct dataset versions {log.name}.",
            dataset=log.name,
        )
    readable_version(manifest, served.id)  # which says so, where it was withdrawn or is not retained
    return served


def _check_asked(dataset: str, version: str | None, as_of: AsOf | None) -> None:
    if (version is None) == (as_of is None):
        asked = "at no version and as of nothing" if version is None else f"at version {version!r} and as of {as_of}"
        raise ConfigurationError(
            f"dataset {dataset!r} is to be read {asked}.",
            "Give version= or as_of=, one of them.",
            argument="as_of",
            dataset=dataset,
        )
    if isinstance(as_of, datetime) and as_of.tzinfo is None:
        raise ConfigurationError(
            f"dataset {dataset!r} is to be read as of {as_of}, a time without its zone.",
            "Give one: tzinfo=UTC.",
            argument="as_of",
            dataset=dataset,
        )


def _is_then(commit: Commit, as_of: AsOf | None) -> bool:
    """Whether it is the commit that is asked for, or, newest first, one that was there at that time."""
    return commit.created_at <= as_of if isinstance(as_of, datetime) else as_of in (commit.number, commit.id)


def _told(as_of: AsOf | None) -> str:
    return f"at {as_of:%Y-%m-%d %H:%M:%S %Z}" if isinstance(as_of, datetime) else f"after commit {as_of}"


def _of_table(
    log: DatasetLog, current: Commit, manifest: UnboundedManifest, version: str | None, as_of: AsOf | None
) -> SealedVersion:
    if as_of is not None:
        return _Past(log, current, manifest).served(as_of)
    assert version is not None, "one of them is given"
    if version_number(version):
        manifest.check_kept(version)
    return _Past(log, current, manifest).begun(version) or committed_version(log, manifest, version)


def version_of_batch(log: DatasetLog, manifest: DatasetManifest, version: str) -> SealedVersion:
    """Return the version of this id that a batch was begun with.

    Also one that was withdrawn since, or that an erasure has rewritten, which is kept as it was until that batch
    has ended: a part of its output may be written already, and the batch could never end with another version.
    """
    if manifest.version is not None and manifest.version.id == version:
        return manifest.version
    if isinstance(manifest, UnboundedManifest):
        return committed_version(log, manifest, version)
    ref = manifest.ref(version)
    if ref is not None:
        return log.read_version(ref)
    document = f"{log.prefix}/versions/{version}-"
    for entry in manifest.doomed:
        if entry.startswith(document):
            with suppress(ObjectNotFoundError):
                return SealedVersion.model_validate_json(log.lake.store.get(entry).data)
    return log.read_version(require_version(manifest, version))


def committed_version(log: DatasetLog, manifest: UnboundedManifest, version: str) -> SealedVersion:
    """Return an unbounded dataset's version by its id, whose number is that of the commit that holds it."""
    number, dash, commit_id = version.removeprefix("v").partition("-")
    sealed = None
    if dash and number.isdecimal() and commit_id:
        with suppress(ObjectNotFoundError, MalformedDocumentError):
            own = log.log
            sealed = parse_manifest(log.name, own.read(own.manifest_key(int(number), commit_id))).version
    if sealed is None or sealed.id != version:
        newest = manifest.version.id if manifest.version else "none"
        raise DatasetError(
            f"dataset {log.name!r} has no version {version!r}; the current one is {newest}, and those from "
            f"number {manifest.retained_from} on can be read.",
            f"See adjunct dataset history {log.name}.",
            dataset=log.name,
            version=version,
        )
    return sealed


@dataclass
class _Past:
    """The commits of an unbounded dataset that can be read: listed once, and looked into where they are asked for.

    `manifest` is that of the `current` commit.
    """

    log: DatasetLog
    current: Commit
    manifest: UnboundedManifest
    read: dict[int, Commit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read[self.current.number] = self.current

    @cached_property
    def keys(self) -> dict[int, list[str]]:
        """The manifests that are there, by the number of their commit."""
        keys: dict[int, list[str]] = {}
        for item in self.log.lake.store.list(f"{self.log.prefix}/manifests/"):
            number = int(item.key.rsplit("/", 1)[1].partition("-")[0])
            keys.setdefault(number, []).append(item.key)
        return keys

    @cached_property
    def numbers(self) -> list[int]:
        """The numbers of the commits that can be read, in order."""
        bounds = self.manifest.retained_from, self.current.number
        return [number for number in sorted(self.keys) if bounds[0] <= number <= bounds[1]]

    def served(self, as_of: AsOf) -> SealedVersion:
        """Return what was served then; raises as `chosen_version`."""
        then = self.before(as_of) if isinstance(as_of, datetime) else self.by_commit(as_of)
        if then is None or then.version is None:
            self.refuse(_told(as_of))
        self.manifest.check_kept(then.version.id)
        return then.version

    def begun(self, version: str) -> SealedVersion | None:
        """Return the version whose id begins so, with its whole number at least, which is that of a commit."""
        number = version_number(version) if SHORT_ID.fullmatch(version) else 0
        if not self.manifest.retained_from <= number <= self.current.number:
            return None
        with suppress(DatasetError):  # nothing was served after that commit
            sealed = self.served(number)
            return sealed if sealed.id.startswith(version) else None
        return None

    def at(self, number: int) -> Commit:
        """Return a commit by its number. An attempt that lost may have left a manifest of the same number."""
        if number not in self.read:
            keys = self.keys[number]
            if len(keys) > 1:
                keys = [self.log.log.manifest_key(number, str(self.at(number + 1).parent))]
            try:
                self.read[number] = self.log.log.read(keys[0])
            except ObjectNotFoundError as error:
                raise VersionDiscardedError(
                    f"dataset {self.log.name!r}: commit {number} was discarded just now.",
                    "Ask again for what is left.",
                    dataset=self.log.name,
                ) from error
        return self.read[number]

    def manifest_at(self, number: int) -> DatasetManifest:
        return parse_manifest(self.log.name, self.at(number))

    def before(self, when: datetime) -> DatasetManifest | None:
        place = bisect_right(self.numbers, when, key=lambda number: self.at(number).created_at)
        return self.manifest_at(self.numbers[place - 1]) if place else None

    def by_commit(self, asked: int | str) -> DatasetManifest | None:
        """Return the manifest of a commit that is readable. Raises DatasetError for one that never was."""
        if isinstance(asked, str):
            ours = (candidate for candidate in self.numbers if any(_is_of(key, asked) for key in self.keys[candidate]))
            number = next((candidate for candidate in ours if self.at(candidate).id == asked), None)
        else:
            number = asked if asked in self.numbers else None
            if number is None and 1 <= asked < self.manifest.retained_from:
                return None
        if number is None:
            raise DatasetError(
                f"dataset {self.log.name!r} has no commit {asked!r}; those that can be read are numbered "
                f"{self.numbers[0]} to {self.numbers[-1]}.",
                f"See adjunct dataset history {self.log.name}.",
                dataset=self.log.name,
            )
        return self.manifest_at(number)

    def refuse(self, asked: str) -> NoReturn:
        """Say that nothing can be read as of what was asked for, and what the oldest is that can be."""
        name = self.log.name
        place = bisect_left(self.numbers, True, key=lambda number: self.manifest_at(number).version is not None)
        if place == len(self.numbers):
            raise NoSealedVersionError(
                f"dataset {name!r} has no version to read yet: its bootstrap is not finished.",
                "Advance the dataset.",
                dataset=name,
            )
        commit = self.at(self.numbers[place])
        oldest = f"the oldest that can be read was committed at {commit.created_at:%Y-%m-%d %H:%M:%S} UTC, as number "
        oldest += f"{commit.number}"
        if self.manifest.retained_from > 1:
            raise VersionDiscardedError(
                f"dataset {name!r}: what was served {asked} has been discarded; {oldest}.",
                f"See adjunct dataset history {name}. A longer grace keeps more: discard=DiscardPolicy(grace=…).",
                dataset=name,
            )
        raise NoSealedVersionError(
            f"dataset {name!r} served nothing {asked}; {oldest}.", f"See adjunct dataset history {name}.", dataset=name
        )


def _is_of(key: str, commit_id: str) -> bool:
    return key.endswith(f"-{commit_id}.json")
