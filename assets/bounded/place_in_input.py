"""Where a bounded dataset stands in its input, and what its manifest keeps of what was told there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.deliveries import FACTS_KEPT, NAMES_KEPT, Delivered

if TYPE_CHECKING:
    from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery
    from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest


def place_in_input(
    manifest: BoundedManifest, answer: Delivery | Awaiting, done: Delivered | None = None
) -> dict[str, object]:
    """Return where the dataset stands in its input after this, what retention took before it, and what was delivered.

    `done` is the delivery that this is, None where it is none.
    """
    delivered, known = _copied(manifest, answer), manifest.known
    if done is not None:
        # A name that was freed is taken again. Those that still are free are remembered however old they are.
        delivered = (*(earlier for earlier in delivered if not (earlier.freed and earlier.name == done.name)), done)
        older, newest = delivered[:-FACTS_KEPT], delivered[-FACTS_KEPT:]
        delivered = (*(earlier for earlier in older if earlier.freed), *newest)
        known = (*known, *(earlier.name for earlier in older if not earlier.freed))[-NAMES_KEPT:]
    return {
        "offsets": dict(answer.offsets),
        "stream": answer.stream or manifest.stream,
        "lost": (*manifest.lost, *([answer.lost] if answer.lost is not None else []))[-FACTS_KEPT:],
        "delivered": delivered,
        "known": known,
    }


def _copied(manifest: BoundedManifest, answer: Delivery | Awaiting) -> tuple[Delivered, ...]:
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
