"""Looks at bounded datasets and their inputs as they are when an advance begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.advancing_members import Member, Unit
from dagster_adjunct.assets.sources.open_source import open_source
from dagster_adjunct.assets.sources.stream_source import StreamSource
from dagster_adjunct.assets.versions.advance_report import OnStage, Stages
from dagster_adjunct.assets.versions.carried_to_rewritten_stream import carried_over
from dagster_adjunct.assets.versions.manifest import BoundedManifest, DatasetManifest, as_bounded
from dagster_adjunct.assets.versions.operator_actions import expire_pins
from dagster_adjunct.assets.versions.stored_declaration import check_declaration
from dagster_adjunct.resources.errors import DatasetError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.version_source import VersionSource
    from dagster_adjunct.assets.versions.dataset_log import Manifests
    from dagster_adjunct.assets.writing.write_context import WriteContext


def look(
    context: WriteContext, specs: Sequence[AdjunctDataset], on_stage: OnStage, partition: str | None = None
) -> Unit:
    """Return the datasets and their inputs as they are now. Pins that have expired end here."""
    log = context.log(specs[0].name)
    commit, manifests = log.read_all()
    _check_membership(specs, manifests)
    if expire_pins(log, manifests, context.now(), by=context.by):
        commit, manifests = log.read_all()
    opened = []
    for spec in specs:
        stages = Stages(spec.name, on_stage)
        with stages("collect"):
            opened.append((spec, stages, open_source(context.systems, spec, context.lake, partition=partition)))
    carried = _carried(manifests, [source for _, _, source in opened])
    if carried:
        commit = log.commit_all(commit, carried, by=context.by)
        manifests |= carried
    members = []
    for spec, stages, source in opened:
        with stages("collect"):
            committed = _continued(source, manifests.get(spec.name))
            manifest = source.first_manifest() if committed is None else committed.declared_as(source.declaration)
            members.append(Member(spec, context, source, stages, manifest, committed))
    return Unit(commit, tuple(members))


def _continued(source: VersionSource, stored: DatasetManifest | None) -> BoundedManifest | None:
    """Return a stored manifest that this source can go on with, None before the first. Raises what refuses it."""
    if stored is None:
        return None
    # Before the declaration, in which a stream made anew with other partitions would differ, too.
    if isinstance(source, StreamSource) and stored.declaration.input == source.declaration.input:
        source.check_not_made_anew(stored.stream)
    check_declaration(source.spec.name, stored.declaration, source.declaration)
    return as_bounded(stored)


def _carried(manifests: Manifests, sources: Sequence[VersionSource]) -> dict[str, DatasetManifest]:
    """Return the manifests of those whose streams were repartitioned just when they had read all of them."""
    streams = [source for source in sources if isinstance(source, StreamSource) and source.spec.name in manifests]
    carried = {source.spec.name: carried_over(manifests[source.spec.name], source.info) for source in streams}
    return {name: after for name, after in carried.items() if after is not None}


def _check_membership(specs: Sequence[AdjunctDataset], manifests: Manifests) -> None:
    if specs[0].version_set is None and len(manifests) > 1:
        others = ", ".join(sorted(set(manifests) - {specs[0].name}))
        raise DatasetError(
            f"dataset {specs[0].name!r} is a member of a version set with {others}, and is declared alone.",
            "Declare it with version_set(NAME, …) as before, or under a new name.",
            dataset=specs[0].name,
        )
