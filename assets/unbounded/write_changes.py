"""Ranges of a change stream written as one generation: read, decoded, bad and late ones set aside.

read -> decode -> late ones out (or: placed over what is there) -> bad ones refused, or set aside -> write, completed
-> those that were set aside to the dead letters
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.following_changes import DeadLetters
from dagster_adjunct.assets.sources.change_dead_letters import send_dead_letters
from dagster_adjunct.assets.unbounded.commit_table import keep
from dagster_adjunct.assets.unbounded.complete_rows import RowCompletion
from dagster_adjunct.assets.unbounded.engine import engine_of
from dagster_adjunct.assets.unbounded.next_ranges import offsets_after
from dagster_adjunct.assets.unbounded.next_served_version import table_layout
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.sealed_version import POSITION
from dagster_adjunct.assets.writing.write_generation import write_generation
from dagster_adjunct.resources.errors import CommitConflictError
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.changes.change_order import Samples
    from dagster_adjunct.assets.sources.opened_stream import Ranges
    from dagster_adjunct.assets.unbounded.commit_table import Advance, AdvanceProgress
    from dagster_adjunct.assets.unbounded.reapply_changes import Rewinding
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.assets.writing.generation_writer import GenerationWriter
    from dagster_adjunct.resources.bucketing.bucket_files import BucketFile, Generation
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
    layout, set_aside = table_layout(source), isinstance(spec.following.on_bad_change, DeadLetters)
    decoder = engine.decoder
    good = decoder.without_problems(changes) if set_aside else decoder.refuse_problems(changes, spec.name)
    completion, writer = None, _Writer(engine.writer)
    if spec.following.completes:
        known = current_generations(progress)
        by_offset, again = spec.following.order is None, rewinding is not None
        completion = RowCompletion(spec.name, layout, known, by_offset, set_aside, again=again)
    generation, counters = write_generation(
        advance.context.lake,
        attempt,
        progress.manifest.next_generation,
        layout,
        good,
        writer,
        what=what,
        order_by=(*layout.key, POSITION, *(source.tie_break if rewinding is None else (OFFSET, PARTITION))),
        keep_tombstones=keep_tombstones,
        partitioned=source.copartitioned and rewinding is None,
        over_time=over_time,
        completion=completion,
    )
    letters = decoder.letters(changes, spec, writer.incomplete) if set_aside else None
    if letters is not None:
        try:
            told = (*(rewinding.told if rewinding is not None else ()), *sorted(writer.incomplete))
            again = rewinding is not None
            progress, counters["quarantined"] = _quarantine(advance, progress, letters, ranges, told, again=again)
        except CommitConflictError:
            advance.log.drop(generation)
            raise
    counters |= {"late": late()} if late is not None else {}
    return progress, generation, counters, samples


def current_generations(progress: AdvanceProgress) -> tuple[Generation, ...]:
    """Return the generations that the next changes come upon: of the table that is built, or else served."""
    version = progress.manifest.version
    if progress.running:
        return progress.bootstrap.building
    return () if version is None else version.generations


class _Writer:
    """Writes files, and takes out of their facts the changes that were set aside: manifests don't keep these."""

    def __init__(self, writer: GenerationWriter[Any]) -> None:
        self._writer = writer
        self.incomplete: list[tuple[int, int, str]] = []
        """Partition, offset and reason of each."""

    def __call__(self, *rows_and_place: Any, **how: Any) -> list[BucketFile]:
        return [self._taken_out(file) for file in self._writer(*rows_and_place, **how)]

    def _taken_out(self, file: BucketFile) -> BucketFile:
        stats = dict(file.stats)
        incomplete = stats.pop("incomplete", None)
        if incomplete is None:
            return file
        self.incomplete += [(partition, offset, reason) for partition, offset, reason in incomplete]
        return replace(file, stats=stats, footer=None)  # the footer has them too


def _quarantine(
    advance: Advance,
    progress: AdvanceProgress,
    letters: DataFrame | pa.Table,
    ranges: Ranges,
    told: tuple[object, ...],
    *,
    again: bool,
) -> tuple[AdvanceProgress, int]:
    """Send the dead letters of changes that can't be applied, once; return how many there are.

    The ranges are committed first: a run that takes over sends the very same ones again, which adds nothing. Those
    of a rewind (`again`) are its own, and it begins again with the same. `told` is what else tells these letters from
    others of the same ranges.
    """
    if progress.manifest.quarantining is None and not again:
        spans = {str(ssp): span for ssp, span in ranges.items()}
        progress = keep(advance, progress, quarantining=spans, change=Change(action="quarantine"))
    system = advance.source.system
    sent = send_dead_letters(
        advance.context.systems,
        advance.spec,
        letters,
        producer=_letters_of(advance, progress, told),
        sequence=1 + sum(system.distance(ssp, "0", end) for ssp, end in offsets_after(progress, ranges).items()),
    )
    return progress, sent


def _letters_of(advance: Advance, progress: AdvanceProgress, told: tuple[object, ...]) -> str:
    """Return the producer of dead letters: another one where the same ranges may give other letters.

    That is so after a rebuild, a changed declaration, or a compaction that has moved the horizon, in a rewind, and
    where an erasure has taken the rows that changes keep columns of.
    """
    spec, extractor, manifest = advance.spec, advance.spec.extractor, progress.manifest
    facts = (
        spec.following.changes.describe(),
        extractor and extractor.describe(),
        spec.columns,
        manifest.horizon,
        *([manifest.positions_from] if manifest.positions_from else []),
        *told,
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
    return f"dead-{spec.name}-{progress.bootstrap.started_at:%Y%m%dT%H%M%S%f}-{digest}"
