"""Decides what an advance does with the table that it finds (SAMZA-1278, Recovery).

    inspect_table       -> TableSnapshot      the manifest, the stream's ends and the declaration as
                                              they are now
    assess_continuity   -> TableContinuity    whether the table is valid, and if not, why
    plan_recovery       -> RecoveryPlan       what to do first

Only the first one reads anything. A table is valid if its manifest and objects are complete, its
stream has the same partitions and still holds its offsets, and it was confirmed caught up within
`max_age`. A bootstrap continues unless its stream or its columns have changed. What an advance
does:

                                no table      found, not valid                     valid
    marked for bootstrap        bootstrap     bootstrap next to the served one     continue
    not marked                  create        recreate empty, from the last offset continue

A bootstrap that can't be continued starts again, whether the dataset is marked or not; the served
version stays until it is done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

from dagster_adjunct.assets.declaration.change_values import describe_order
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, UnboundedDataset
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.sources.entries import (
    Offsets,
    OpenedChanges,
    offsets_by_partition,
    open_changes,
)
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import (
    DatasetManifest,
    Decision,
    UnboundedManifest,
    as_unbounded,
    follow_repartition,
)
from dagster_adjunct.assets.versions.version import (
    DatasetDeclaration,
    SealedVersion,
    check_declaration,
    describe_history_length,
    history_from_spec,
)
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    DatasetError,
    KeyOrderError,
    MalformedDocumentError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.objects.commit_log import Commit, is_deletion_commit
from dagster_adjunct.resources.schemas.column_changes import Evolution, FixedColumns, evolve
from dagster_adjunct.resources.schemas.schema import AS_NAMED, Schema, StoredNames
from dagster_adjunct.resources.schemas.version_columns import (
    NamedColumns,
    adopt_columns,
    drop_replaced,
    names_in_files,
)
from dagster_adjunct.resources.streams.system import order_keys_step


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """A table and its stream at the moment `at`.

    `commit` is the current one, None before the first. `manifest` is None without a table; where
    `damage` says why the current manifest can't be read, it is the newest readable one. With
    `carried`, the stream was repartitioned, and `manifest` is one that continues in the new stream
    and is not committed yet. `oldest` and `ends` are, by partition, the first offset that the
    stream holds and the next one to come. `missing` are objects of the table that are missing or
    truncated. `refusal` is the error where nothing can be decided: the pointer is lost, or another
    writer committed meanwhile.
    """

    source: OpenedChanges
    at: datetime
    commit: Commit | None
    manifest: UnboundedManifest | None
    oldest: Offsets
    ends: Offsets
    carried: bool = False
    damage: str = ""
    missing: tuple[str, ...] = ()
    refusal: CommitConflictError | MalformedDocumentError | None = None

    @property
    def spec(self) -> UnboundedDataset:
        """The declaration of the dataset."""
        return self.source.spec

    @property
    def has_all_keys(self) -> bool:
        """Whether the stream, read from its oldest offset, holds a record of every key that was
        ever in it.
        """
        return self.source.info.has_all_keys(self.oldest)


@dataclass(frozen=True, slots=True)
class TableContinuity:
    """Whether a table can be continued: `store` is the state of the table.

    `problem` says why it is invalid. `lost` says that retention has deleted the changes that come
    next, `building` that its bootstrap is not finished. `refusal` is the error to raise if the
    stream was recreated.
    """

    store: Literal["none", "building", "invalid", "valid"]
    problem: str = ""
    lost: bool = False
    building: bool = False
    refusal: OffsetOutOfRangeError | None = None


def inspect_table(context: Runtime, spec: UnboundedDataset) -> TableSnapshot:
    """Return the table and its stream as they are now. Reads no data files and changes nothing.

    Raises DatasetError for an input that does not fit this dataset, and for another key,
    partitioning or input than the table was declared with. Columns are compared later, by
    `plan_recovery`.
    """
    source = open_changes(context.systems, spec)
    log = context.log(spec.name)
    commit, stored, damage = log.read_or_newest()
    manifest = None
    if stored is not None:
        manifest = require_matching_manifest(spec, stored, source.declaration)
    followed = None
    missing: list[str] = []
    if manifest is not None and not damage:
        followed = follow_repartition(manifest, source.info)
        if followed is not None:
            manifest = as_unbounded(followed)
        missing = _missing_objects(log, manifest)
    snapshot = TableSnapshot(
        source,
        context.now(),
        commit,
        manifest,
        oldest=source.system.oldest(source.ssps),
        ends=source.system.upcoming(source.ssps),
        carried=followed is not None,
        damage=damage,
        missing=tuple(missing),
    )
    if manifest is None and not damage:
        return replace(snapshot, refusal=_lost_pointer_error(log))
    if commit is not None and assess_continuity(snapshot).store == "invalid":
        head = log.log.head()
        if head is not None and head.id != commit.id:  # that commit's writer may have removed files
            refusal = _overtaken_error(log, f" (number {head.number}, after {commit.number})")
            return replace(snapshot, refusal=refusal)
    return snapshot


def require_matching_manifest(
    spec: UnboundedDataset, stored: DatasetManifest, declared: DatasetDeclaration
) -> UnboundedManifest:
    """Return the stored manifest; raise DatasetError where its declaration does not match the
    declared one.

    The number of input partitions is not compared: `assess_continuity` does that.
    """
    partitions = {"input_partitions": stored.declaration.input_partitions}
    check_declaration(spec, stored.declaration, declared.model_copy(update=partitions))
    return as_unbounded(stored)


def assess_continuity(snapshot: TableSnapshot) -> TableContinuity:
    """Return whether the table can be continued, and if not, why: the first reason of damage, a
    recreated stream, other partitions, lost changes, missing objects, and a bootstrap or an age
    that does not allow it.
    """
    source = snapshot.source
    manifest = snapshot.manifest
    if snapshot.damage:
        return TableContinuity("invalid", f"its manifest is damaged ({snapshot.damage})")
    if manifest is None:
        return TableContinuity("none")
    building = manifest.bootstrap.state == "running"
    invalid = partial(TableContinuity, "invalid", building=building)
    offsets = offsets_by_partition(manifest.offsets)
    refusal = source.recreated_error(manifest.stream, offsets, snapshot.ends)
    if refusal is not None:
        return invalid(refusal.problem, refusal=refusal)
    changed = describe_changed_partitions(source, offsets)
    if changed:
        return invalid(f"the partitions of its stream have changed ({changed})")
    for ssp, offset in offsets.items():
        oldest = snapshot.oldest[ssp]
        if source.system.compare(offset, oldest) < 0:
            problem = (
                f"it continues at offset {offset} of {ssp}, and the oldest in the stream is"
                f" {oldest}"
            )
            return invalid(problem, lost=True)
    if snapshot.missing:
        count = len(snapshot.missing)
        return invalid(f"{count} of its objects are missing or cut, first {snapshot.missing[0]}")
    if building:
        problem = _bootstrap_problem(manifest, source, snapshot.at)
    else:
        problem = _age_problem(snapshot, manifest.confirmed_at, offsets)
    if problem:
        return invalid(problem)
    return TableContinuity("building" if building else "valid")


def _age_problem(snapshot: TableSnapshot, confirmed: datetime | None, offsets: Offsets) -> str:
    """Return why a table was behind for too long to be continued, "" if it was not.

    `confirmed` is when it was last known to be caught up, None if never. `offsets` are the next
    ones that it reads.
    """
    source = snapshot.source
    limit = effective_max_age(source)
    if limit is None or confirmed is None or snapshot.at - confirmed <= limit:
        return ""
    has_read_all = all(
        source.system.compare(offset, snapshot.ends[ssp]) >= 0 for ssp, offset in offsets.items()
    )
    if has_read_all:
        return ""
    return (
        f"it was last confirmed caught up {confirmed:%Y-%m-%d %H:%M} UTC, longer than"
        f" {limit} ago, and has not read all that came since"
    )


def describe_changed_partitions(source: OpenedChanges, offsets: Offsets) -> str:
    """Return which partitions of the stream were added or removed since the table read these
    offsets, "" for none.
    """
    present = set(source.ssps)
    read = set(offsets)
    changes = []
    if present - read:
        changes.append(f"{', '.join(map(str, sorted(present - read)))} added")
    if read - present:
        changes.append(f"{', '.join(map(str, sorted(read - present)))} removed")
    return "; ".join(changes)


def effective_max_age(source: OpenedChanges) -> timedelta | None:
    """Return how long a table that is behind stays valid: `max_age`, else how long its stream keeps
    deletions.

    None is without limit.
    """
    return source.spec.following.max_age or _deletions_kept(source)


def _deletions_kept(source: OpenedChanges) -> timedelta | None:
    """Return how long the stream of a table keeps deletions; None is without limit."""
    compaction = source.info.compaction
    if compaction is None:
        return None
    return compaction.tombstones_kept


def _missing_objects(log: DatasetLog, manifest: UnboundedManifest) -> list[str]:
    """Return the files that are missing or truncated: of the table that is built, else of the
    served version.
    """
    if manifest.bootstrap.state == "running":
        generations = manifest.bootstrap.building
    else:
        generations = manifest.served_generations
    return log.find_missing_files(f"{log.prefix}/data", generations)


def _lost_pointer_error(log: DatasetLog) -> CommitConflictError | MalformedDocumentError | None:
    """Return the error for a log that has commits but no pointer to the current one; None for any
    other log.

    A new table would begin again at commit 1 and hide these commits.
    """
    if is_deletion_commit(log.log.current()):
        return None
    newest = next(log.log.commits_before(sys.maxsize), None)
    if newest is None or newest.number <= 1:  # nobody has made the first commit
        return None
    if log.log.head() is not None:  # the pointer was written meanwhile
        return _overtaken_error(log)
    return MalformedDocumentError(
        f"dataset {log.name!r} has {newest.number} commits, and its pointer"
        f" {log.log.pointer_key} is missing in {log.lake.url}.",
        "Restore that object from a backup or an older object version; the manifests are intact. To"
        " start over, declare the dataset under a new name.",
        dataset=log.name,
        document=log.log.pointer_key,
    )


def _overtaken_error(log: DatasetLog, numbers: str = "") -> CommitConflictError:
    """Return the error for a table that another writer has changed; `numbers` are the commits in
    words.
    """
    return CommitConflictError(
        f"dataset {log.name!r}: another writer committed first, while this one read the"
        f" table{numbers}.",
        "Nothing of this attempt is visible. Advance again, which continues from the other commit.",
        dataset=log.name,
    )


def _bootstrap_problem(manifest: UnboundedManifest, source: OpenedChanges, now: datetime) -> str:
    """Return why a running bootstrap can't be continued, "" if it can: columns, order or format
    have changed since it began, or it takes longer than the stream keeps deletions.
    """
    bootstrap = manifest.bootstrap
    before = manifest.declaration
    after = source.declaration
    columns = (bootstrap.columns, before.input_names)
    if bootstrap.columns is not None and columns != (source.schema, after.input_names):
        return (
            "the declared columns have changed since it began"
            f" ({bootstrap.columns.difference(source.schema)})"
        )
    if before.groups != after.groups:
        return "order_by has other groups of columns than when it began"
    if before.positions.by_column and not after.positions.by_column:
        return "changes could leave out columns when it began, and are whole rows now"
    order_before = (before.order_by, before.positions.type)
    if order_before != (after.order_by, after.positions.type):
        old_order = describe_order(before.order_by)
        new_order = describe_order(after.order_by)
        return f"the declared order has changed since it began, from {old_order} to {new_order}"
    kept_for = _deletions_kept(source)
    if kept_for is not None and now - bootstrap.started_at > kept_for:
        return (
            f"it began {bootstrap.started_at:%Y-%m-%d %H:%M} UTC, and its stream keeps deletions"
            f" for {kept_for} only: it may have missed some"
        )
    return ""


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What an advance does first, and the decision that its commits store.

    "leave" serves the table as it is; "begin" creates a new one, empty or bootstrapped; "evolve"
    adopts the declared columns and length of history; "apply" does nothing first. All but "leave"
    then apply the changes since the last commit.
    """

    first: Literal["leave", "begin", "evolve", "apply"]
    decision: Decision


def plan_recovery(
    snapshot: TableSnapshot, *, rebuild: str | None = None, forced: bool = False
) -> RecoveryPlan:
    """Return what to do with the table; `rebuild` is the reason to rebuild it, None to go by its
    state.

    `forced` bootstraps even from a stream that no longer holds every key. Raises DatasetError for
    incompatible columns and for a bootstrap that would lack keys, KeyOrderError for a stream whose
    partitions were changed, OffsetOutOfRangeError and MalformedDocumentError where nothing can be
    decided, and CommitConflictError where another writer committed meanwhile.
    """
    manifest = snapshot.manifest
    source = snapshot.source
    spec = snapshot.spec
    if rebuild is None:
        evolves = must_evolve(spec, manifest, source)
        decision = decide_recovery(snapshot)
    else:
        # A rebuild bootstraps whatever there is: a table with other columns or order, one that is
        # declared bootstrap=False, or none.
        evolves = False
        if manifest is None:  # raises if it is unknown whether there is a table
            store = decide_recovery(snapshot).store
        else:
            store = "invalid"
        decision = Decision(
            action="bootstrap", store=store, reason=f"rebuild: {rebuild}", at=snapshot.at
        )
    if decision.action == "bootstrap" and not forced:
        require_complete_stream(snapshot, decision.reason)
    if decision.action == "serve-stale":
        return RecoveryPlan("leave", decision)
    require_ordered_keys(snapshot)
    if decision.action != "continue":
        return RecoveryPlan("begin", decision)
    return RecoveryPlan("evolve" if evolves else "apply", decision)


def must_evolve(
    spec: UnboundedDataset, manifest: UnboundedManifest | None, source: OpenedChanges
) -> bool:
    """Whether the served version has other columns, names or history than declared; False while
    none is served, or another one is built. Raises DatasetError where it can't continue as the
    dataset is declared.
    """
    if manifest is None or manifest.bootstrap.state != "done" or manifest.version is None:
        return False
    served = manifest.version
    declared = source.declaration
    evolution = evolve_table_columns(source, served.named_columns, manifest.declaration.input_names)
    order = order_named_now(spec, served)
    groups = manifest.declaration.groups
    _check_same_groups(spec, groups, declared.groups, served)
    declared_order = (declared.order_by, declared.positions.type)
    has_same_order = (order, served.positions.type) == declared_order
    if not has_same_order and not groups:  # groups were compared above
        raise order_change_error(spec.name, served.order_by, declared.order_by)
    if served.positions.by_column and not declared.positions.by_column:
        raise _whole_rows_error(spec)
    if evolution.names != served.names or served.columns != source.schema:
        return True
    if served.history_columns != spec.history_columns:
        return True
    served_length = describe_history_length(served.history)
    return served_length != describe_history_length(history_from_spec(spec))


_Groups = Mapping[str, tuple[str, ...]]


def _check_same_groups(
    spec: UnboundedDataset, before: _Groups, after: _Groups, served: SealedVersion
) -> None:
    """Raise DatasetError for a column that is ordered by another column than before, and if one of
    the two declarations has groups and the other has none. Groups may be added and dropped.
    """

    def order_of(groups: _Groups, name_now: Callable[[str], str]) -> dict[str, str]:
        """Return the ordering column of each column, under the names of now."""
        order_by_column = {}
        for order, columns in groups.items():
            for name in (order, *columns):
                order_by_column[name_now(name)] = name_now(order)
        return order_by_column

    served_groups = {}
    for order, columns in before.items():
        if order in served.columns:
            served_groups[order] = columns
    old_orders = order_of(served_groups, lambda name: spec.evolution.follow(name, served.columns))
    new_orders = order_of(after, str)
    moved = [
        name
        for name in old_orders.keys() & new_orders.keys()
        if old_orders[name] != new_orders[name]
    ]
    if not moved and bool(old_orders) == bool(new_orders):
        return
    subject = f"the column {min(moved)!r} is" if moved else "its columns are"
    raise DatasetError(
        f"dataset {spec.name!r}: {subject} in another group of order_by than before. Stored values"
        " are in the order of then.",
        "Restore the groups, or rebuild the dataset with these: adjunct dataset rebuild"
        f" {spec.name} MODULE:APP --reason ….",
        dataset=spec.name,
    )


def _whole_rows_error(spec: UnboundedDataset) -> DatasetError:
    """Return the error for a table whose changes were merged by column, and are to be whole rows
    now.
    """
    return DatasetError(
        f"dataset {spec.name!r}: its changes may have left out columns, and those of"
        f" changes= ({spec.following.changes.describe()}) are whole rows. A late one could not be"
        " placed among the earlier changes of its columns.",
        "Declare the earlier format, or rebuild the dataset with this one: adjunct dataset rebuild"
        f" {spec.name} MODULE:APP --reason ….",
        dataset=spec.name,
    )


def decide_recovery(snapshot: TableSnapshot) -> Decision:
    """Return what an advance does with the table, by the rules in the module's docstring.

    Raises OffsetOutOfRangeError for a recreated stream, and for lost changes with
    on_lost_offset="fail". Raises the snapshot's `refusal`.
    """
    state = assess_continuity(snapshot)
    refusal = state.refusal or snapshot.refusal
    if refusal is not None:
        raise refusal
    spec = snapshot.spec
    on_lost = None
    if state.lost and not state.building:  # an unfinished bootstrap just starts again
        on_lost = spec.following.on_lost_offset
    if on_lost == "fail":
        rebuild = (
            f"rebuild it from a complete source: adjunct dataset rebuild {spec.name} MODULE:APP"
            " --reason …"
        )
        raise lost_changes_error(spec.name, state.problem, rebuild)
    action: Literal["create", "bootstrap", "recreate", "continue", "serve-stale"]
    reason = state.problem or "there is no table yet"
    if state.store == "valid":
        action = "continue"
        reason = "the table is valid"
    elif state.store == "building":
        action = "continue"
        reason = "its bootstrap continues"
    elif state.building:
        action = "bootstrap"
        reason = f"the unfinished bootstrap starts again: {state.problem}"
    elif on_lost == "serve_stale":
        action = "serve-stale"
    elif spec.bootstrap:
        action = "bootstrap"
    elif state.store == "none":
        action = "create"
    else:
        action = "recreate"
    return Decision(action=action, store=state.store, reason=reason, at=snapshot.at)


def require_ordered_keys(snapshot: TableSnapshot) -> None:
    """Raise KeyOrderError if a stream whose offsets order the changes has had other partitions.

    A key that has moved then has changes in two partitions, and neither a table that continues nor
    one that is built again can tell which one is newer. A bulk snapshot names a position in each of
    the present partitions, so only later changes are read. Streams of the lake are rewritten when
    they are repartitioned.
    """
    manifest = snapshot.manifest
    source = snapshot.source
    spec = snapshot.spec
    is_of_lake = source.info.partitioner == "spark-murmur3"
    if not source.only_offsets_order_keys or is_of_lake:
        return
    if manifest is None or spec.following.initial is not None:
        return
    changed = describe_changed_partitions(source, offsets_by_partition(manifest.offsets))
    if changed and not source.info.was_recreated(manifest.stream):
        raise KeyOrderError(
            f"dataset {spec.name!r} has to be built again, because the partitions of"
            f" {spec.input} have changed ({changed}): a key may have changes in two partitions now,"
            " and their offsets do not say which one is newer.",
            order_keys_step(spec.name),
            dataset=spec.name,
            stream=str(spec.input),
        )


def require_complete_stream(snapshot: TableSnapshot, why: str) -> None:
    """Raise DatasetError where a bootstrap has no bulk snapshot and its stream no longer holds
    every key.
    """
    spec = snapshot.spec
    if spec.following.initial is not None or snapshot.has_all_keys:
        return
    raise incomplete_stream_error(
        spec, why, "Declare a bulk snapshot (initial=…)", " The served version stays served."
    )


def incomplete_stream_error(
    spec: UnboundedDataset, why: str, instead: str, then: str = ""
) -> DatasetError:
    """Return the error for a bootstrap, for the reason `why`, from a stream that no longer holds
    every key. Its next step begins with `instead` and ends with the sentence `then`.
    """
    problem = (
        f"dataset {spec.name!r} has to be bootstrapped ({why}), and its input {spec.input} does not"
        " hold all changes: retention has deleted the oldest, and the stream is not compacted by"
        " key."
    )
    step = (
        f"{instead}, deliver the whole table into the stream again, or declare bootstrap=False to"
        " continue without "
    )
    return DatasetError(problem, f"{step}the lost changes.{then}", dataset=spec.name)


def lost_changes_error(dataset: str, problem: str, instead: str) -> OffsetOutOfRangeError:
    """Return the error for a table whose next changes retention has deleted: `problem` says which,
    `instead` what helps apart from delivering them again.
    """
    return OffsetOutOfRangeError(
        f"dataset {dataset!r} can't be continued: {problem}: retention has deleted the changes in"
        " between.",
        f"Deliver the lost changes again, or {instead}. Longer retention of the stream prevents"
        " this.",
        dataset=dataset,
    )


def order_change_error(
    dataset: str, stored: tuple[str, ...] | None, declared: tuple[str, ...] | None
) -> DatasetError:
    """Return the error for a stored table that is ordered differently than declared."""
    return DatasetError(
        f"dataset {dataset!r} is ordered by {describe_order(stored)}, and declared to be ordered by"
        f" {describe_order(declared)}: positions of different orders can't be compared.",
        _restore_or_rebuild("the order", dataset),
        dataset=dataset,
    )


def _restore_or_rebuild(what: str, dataset: str) -> str:
    """Return what to do where a declaration has changed that the table can't follow."""
    command = f"adjunct dataset rebuild {dataset} MODULE:APP --reason …"
    return (
        f"Restore {what}, or rebuild the dataset: {command}. The old table is served until the"
        " rebuild is done."
    )


def evolve_table_columns(
    source: OpenedChanges, stored: NamedColumns, input_names: StoredNames
) -> Evolution:
    """Return what the columns of the dataset's stream make of the stored ones; see
    `evolve_columns`. A column that was dropped from the stream and added again is a new one.

    `input_names` are the stored names that the stream had for its columns when the table was stored
    last.
    """
    spec = source.spec
    now = NamedColumns(source.schema, source.declaration.input_names)
    same = drop_replaced(stored, input_names, now, spec.evolution)
    return evolve_columns(spec, same, source.schema)


def evolve_columns(spec: AdjunctDataset, stored: NamedColumns, declared: Schema) -> Evolution:
    """Return what the declared columns make of the stored ones, in the order of the declaration.

    Raises DatasetError, which lists the differences, unless columns are only added, widened,
    reordered, and renamed or dropped as declared; those of the key stay.
    """
    fixed = FixedColumns(spec.key)
    after = evolve(stored.schema, stored.names, declared, spec.evolution, fixed, ordered=True)
    if after.problems:
        raise DatasetError(
            f"dataset {spec.name!r} is stored with other columns than declared:"
            f" {'; '.join(after.problems)}.",
            _restore_or_rebuild("these columns", spec.name),
            dataset=spec.name,
        )
    return after


def rebuilt_names(
    spec: AdjunctDataset, before: SealedVersion | None, declared: Schema
) -> StoredNames:
    """Return the stored names of a table that is built next to the version `before`, which may have
    other columns; the declared names if there is none.

    Columns that have stayed, or were renamed as declared, keep their stored names. Raises
    DatasetError for renames and removals that contradict the columns.
    """
    if before is None:
        return AS_NAMED
    after = adopt_columns(
        before.columns, before.names, declared, spec.evolution, FixedColumns(spec.key)
    )
    if after.problems:
        raise DatasetError(
            f"dataset {spec.name!r} can't be built with the declared columns:"
            f" {'; '.join(after.problems)}.",
            "Correct renamed= and drop= of the dataset.",
            dataset=spec.name,
        )
    return names_in_files(declared, after.names)


def order_named_now(spec: AdjunctDataset, stored: SealedVersion) -> tuple[str, ...] | None:
    """Return what a version is ordered by, under the names of now; None if by offset."""
    if stored.order_by is None:
        return None
    return tuple(spec.evolution.follow(name, stored.columns) for name in stored.order_by)
