"""Where a bounded dataset stands in its input, and what its manifest keeps of what was told there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.deliveries import FACTS_KEPT, Delivered

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery
    from dagster_adjunct.assets.versions.manifest import BoundedManifest


def declared(manifest: BoundedManifest, spec: AdjunctDataset) -> BoundedManifest:
    """Return the manifest with what may change in a declaration, order and policy, as it is declared now."""
    now = {
        "order": "arrival" if spec.versions is None else "name",
        "keep": spec.discard.keep,
        "grace_seconds": spec.discard.grace.total_seconds(),
    }
    declaration = manifest.declaration.model_copy(update=now)
    return manifest if declaration == manifest.declaration else manifest.after(declaration=declaration)


def place_in_input(manifest: BoundedManifest, answer: Delivery | Awaiting) -> dict[str, object]:
    """Return where the dataset stands in its input after this, and what retention took before it."""
    return {
        "offsets": dict(answer.offsets),
        "stream": answer.stream or manifest.stream,
        "lost": (*manifest.lost, *([answer.lost] if answer.lost is not None else []))[-FACTS_KEPT:],
    }


def copied(manifest: BoundedManifest, answer: Delivery | Awaiting) -> tuple[Delivered, ...]:
    """Return the deliveries on record, with what the markers are now of those that lie there anew, unchanged."""
    newest = {done.name: done for done in manifest.delivered}
    return tuple(
        done.model_copy(update={"markers": dict(answer.copies[done.name])})
        if done.name in answer.copies and done is newest[done.name]
        else done
        for done in manifest.delivered
    )


def told_by(answer: Delivery | Awaiting, *more: str) -> str:
    """Return what a commit says of what the source told, after `more`."""
    lost = answer.lost.summary() if answer.lost is not None else ""
    return "; ".join(filter(None, (*more, lost, *answer.notes)))
