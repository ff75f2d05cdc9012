"""Looks at bounded datasets and their inputs as they are when an advance begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.advancing_members import Member, Unit
from dagster_adjunct.assets.sources.open_source import open_source
from dagster_adjunct.assets.versions.advance_report import OnStage, Stages
from dagster_adjunct.assets.versions.manifest import as_bounded
from dagster_adjunct.assets.versions.operator_actions import expire_pins
from dagster_adjunct.resources.errors import DatasetError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.dataset_log import Manifests
    from dagster_adjunct.assets.writing.runtime import Runtime


def look(context: Runtime, specs: Sequence[AdjunctDataset], on_stage: OnStage, partition: str | None = None) -> Unit:
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
    stored_sources = [(manifests[spec.name], source) for spec, _, source in opened if spec.name in manifests]
    carried = {old.name: new for old, source in stored_sources if (new := source.carried_over(old)) is not None}
    if carried:
        commit = log.commit_all(commit, carried, by=context.by)
        manifests |= carried
    members = []
    for spec, stages, source in opened:
        with stages("collect"):
            stored = manifests.get(spec.name)
            manifest = source.first_manifest() if stored is None else source.taken_up(stored)
            committed = None if stored is None else as_bounded(stored)
            members.append(Member(spec, context, source, stages, manifest, committed))
    return Unit(commit, tuple(members))


def _check_membership(specs: Sequence[AdjunctDataset], manifests: Manifests) -> None:
    if specs[0].version_set is None and len(manifests) > 1:
        others = ", ".join(sorted(set(manifests) - {specs[0].name}))
        raise DatasetError(
            f"dataset {specs[0].name!r} is a member of a version set with {others}, and is declared alone.",
            "Declare it with version_set(NAME, …) as before, or under a new name.",
            dataset=specs[0].name,
        )
