"""Ranges of a change stream written as one generation: read, decoded, bad and late ones set aside.

read -> decode -> late ones out (or: placed over what is there) -> bad ones refused, or to the dead letters -> write
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.following_changes import DeadLetters
from dagster_adjunct.assets.sources.change_dead_letters import send_dead_letters
from dagster_adjunct.assets.unbounded.commit_table import keep
from dagster_adjunct.assets.unbounded.engine import engine_of
from dagster_adjunct.assets.unbounded.next_ranges import offsets_after
from dagster_adjunct.assets.unbounded.next_served_version import table_layout
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.sealed_version import POSITION
from dagster_adjunct.assets.writing.write_generation import write_generation
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.changes.change_order import Samples
    from dagster_adjunct.assets.sources.opened_stream import Ranges
    from dagster_adjunct.assets.unbounded.commit_table import Advance, AdvanceProgress
    from dagster_adjunct.assets.unbounded.reapply_changes import Rewinding
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.resources.bucketing.bucket_files import Generation
    from dagster_adjunct.resources.bucketing.write_over_time import OverTimeWrite


def write_changes(
    advance: Advance,
    progress: AdvanceProgress,
    attempt: Attempt,
    ranges: Ranges,
    *,
    keep_tombstones: bool,
    over_time: OverTimeWrite | None = None,
    rewinding: Rewinding | None,
) -> tuple[AdvanceProgress, Generation, dict[str, int], Samples | None]:
    """Write the changes of these ranges; return the generation that they make, counters, and the first ordered values.

    The progress is another one where ranges with dead letters were committed first. Raises BadChangeError and
    NullKeyError for changes that can't be applied.
    """
    source, spec, manifest = advance.source, advance.spec, progress.manifest
    what = f"dataset {spec.name!r}"
    engine = engine_of(advance.context.spark)
    changes, samples = engine.decoder.read_changes(
        source, ranges, positions_from=manifest.positions_from, samples=manifest.first_ordered
    )
    store, version = advance.context.lake.store, manifest.version
    if rewinding is not None and spec.following.history is None:
        changes, late = rewinding.onto(changes, engine.table, store, spec, manifest)
    else:
        # A table that is built anew has forgotten no deletion yet.
        horizon = None if progress.running else manifest.horizon
        changes, late = engine.decoder.without_late(changes, horizon, spec.following.on_bad_change)
        if rewinding is not None and version is not None:
            changes = rewinding.onto_history(changes, engine.table, store, spec, version)
    quarantined = 0
    if isinstance(spec.following.on_bad_change, DeadLetters):
        changes, letters = engine.decoder.split_problems(changes, spec)
        if letters is not None:
            progress, quarantined = _quarantine(advance, progress, letters, ranges, rewinding)
    else:
        changes = engine.decoder.refuse_problems(changes, spec.name)
    layout = table_layout(source)
    generation, counters = write_generation(
        advance.context.lake,
        attempt,
        progress.manifest.next_generation,
        layout,
        changes,
        engine.writer,
        what=what,
        order_by=(*layout.key, POSITION, *(source.tie_break if rewinding is None else (OFFSET, PARTITION))),
        keep_tombstones=keep_tombstones,
        partitioned=source.copartitioned and rewinding is None,
        over_time=over_time,
    )
    counters |= {"quarantined": quarantined} if quarantined else {}
    counters |= {"late": late()} if late is not None else {}
    return progress, generation, counters, samples


def _quarantine(
    advance: Advance,
    progress: AdvanceProgress,
    letters: DataFrame | pa.Table,
    ranges: Ranges,
    rewinding: Rewinding | None,
) -> tuple[AdvanceProgress, int]:
    """Send the dead letters of changes that can't be applied, once; return how many there are.

    The ranges are committed first: a run that takes over sends the very same ones again, which adds nothing. Those
    of a rewind are its own, and it begins again with the same.
    """
    if progress.manifest.quarantining is None and rewinding is None:
        spans = {str(ssp): span for ssp, span in ranges.items()}
        progress = keep(advance, progress, quarantining=spans, change=Change(action="quarantine"))
    system = advance.source.system
    sent = send_dead_letters(
        advance.context.systems,
        advance.spec,
        letters,
        producer=_letters_of(advance, progress, rewinding),
        sequence=1 + sum(system.distance(ssp, "0", end) for ssp, end in offsets_after(progress, ranges).items()),
    )
    return progress, sent


def _letters_of(advance: Advance, progress: AdvanceProgress, rewinding: Rewinding | None) -> str:
    """Return the producer of dead letters: another one where the same ranges may give other letters.

    That is so after a rebuild, a changed declaration, or a compaction that has moved the horizon, and in a rewind.
    """
    spec, extractor, manifest = advance.spec, advance.spec.extractor, progress.manifest
    facts = (
        spec.following.changes.describe(),
        extractor and extractor.describe(),
        spec.columns,
        manifest.horizon,
        *([manifest.positions_from] if manifest.positions_from else []),
        *(rewinding.told if rewinding is not None else ()),
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
    return f"dead-{spec.name}-{progress.bootstrap.started_at:%Y%m%dT%H%M%S%f}-{digest}"
