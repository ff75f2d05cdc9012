"""What one batch of its application writes to a local table: a generation for each send, then one commit of all.

The batch was begun with one version, pinned by its intent. Its commit names the application and the batch, so a batch
that is run again finds what it has committed, and adds nothing; joins of the batch read the pinned version with what it
has sent so far on top. A later generation wins: sends of one batch in the order of the application, batches in theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.local_manifest import (
    Parent,
    as_local,
    counted,
    expires_of,
    first_manifest,
    has_expired,
    keeps_deletions,
    schema_of,
    serving,
)
from dagster_adjunct.assets.unbounded.next_served_version import retire, without_large_footers
from dagster_adjunct.assets.versions.build_attempts import build_on_record
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.sealed_version import POSITION, SealedVersion, layout_of, version_id
from dagster_adjunct.assets.versions.stored_declaration import declaration_of
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.assets.versions.unbounded_state import SentToTable, Written
from dagster_adjunct.assets.writing.generation_writer import SPARK, GenerationWriter
from dagster_adjunct.assets.writing.write_generation import add, write_generation
from dagster_adjunct.resources.errors import CommitConflictError, DatasetError, ProducerConflictError
from dagster_adjunct.resources.objects.commit_log import commit_upon

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout, Generation
    from dagster_adjunct.resources.objects.lake import Lake

_TRIES = 20


@dataclass(frozen=True, slots=True)
class WritingBatch:
    """Whose batch it is, its number, and the run that does it.

    One that is `cut` was begun with more records: where it is in the table already, it stays as it is.
    """

    application: str
    number: int
    by: str
    cut: bool = False

    def __str__(self) -> str:
        return f"batch {self.number} of application {self.application}"


class LocalWrites:
    """The sends of one batch to one local table, and their commit; a context manager, which drops what stays undone.

    `pinned` is the version that the batch was begun with, None where the table had none.
    """

    def __init__(
        self,
        lake: Lake,
        spec: AdjunctDataset,
        pinned: SealedVersion | None,
        batch: WritingBatch,
        writer: GenerationWriter[Any] = SPARK,
    ) -> None:
        self._lake, self._spec, self._pinned, self._batch, self._writer = lake, spec, pinned, batch, writer
        self._log = DatasetLog(lake, spec.name)
        self._schema = schema_of(spec)
        self._layout: BucketLayout = layout_of(
            self._schema, spec.key, spec.partition_by, spec.partitions, positioned=True
        )
        self._begun: Parent | None = None
        self._generations: list[Generation] = []
        self._sends: list[SentToTable] = []
        self._stack = ExitStack()
        self._committed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if not self._committed:
            for generation in self._generations:
                self._log.drop(generation)

    # -- sends

    def send(self, rows: DataFrame | pa.Table, *, order_by: Sequence[str], partitioned: bool) -> dict[str, int]:
        """Write the last record of each key as a generation; return what was counted.

        `rows` have the table's columns, `__tombstone`, and those of `order_by`, by which the last one of a key wins.
        `partitioned` says that partition i holds bucket i already. Raises NullKeyError.
        """
        begun = self._begin()
        number = begun.next_generation + len(self._sends)
        attempt = self._log.attempt()
        self._stack.enter_context(build_on_record(self._lake, self._spec.name, attempt.id, self._batch.by))
        generation, counters = write_generation(
            self._lake,
            attempt,
            number,
            self._layout,
            _placed(rows, number),
            self._writer,
            what=f"local table {self._spec.name!r}",
            order_by=(*self._spec.key, *order_by),
            keep_tombstones=bool(self._on_top_of()),
            partitioned=partitioned,
            range_of=expires_of(self._spec),
        )
        counters.pop("conflicting", None)  # of changes nothing else is expected
        tombstones = keeps_deletions(generation)
        counters["deleted"] += tombstones
        digest = generation.digest
        assert digest is not None, "without it, other rows of the same batch would be taken for those that are in"
        sent = SentToTable(rows=generation.rows - tombstones, deleted=counters["deleted"], digest=digest)
        self._sends.append(sent)
        self._generations.append(without_large_footers(generation))
        return {"rows": sent.rows, **counters}

    def reader(self, *, sends: bool = True) -> VersionReader:
        """Return the pinned version with what the batch has sent so far on top; it may hold nothing.

        Without `sends` it is the version alone, with the columns that are declared now.
        """
        generations = self._on_top_of(sends=sends) or [self._log.attempt().generation(1)]
        shown = self._pinned.id if self._pinned is not None else "v000000-begun"
        number = self._pinned.number if self._pinned is not None else 1
        version = serving(self._spec, generations, number=number, id=shown, now=self._lake.now(), counters={})
        return VersionReader(self._lake.store, self._spec.name, version)

    def _on_top_of(self, *, sends: bool = True) -> list[Generation]:
        """Return the generations with rows of the pinned version and of the batch, oldest first."""
        before = self._pinned.generations if self._pinned is not None else ()
        mine = self._generations if sends else ()
        return [generation for generation in (*before, *mine) if generation.files]

    @property
    def name(self) -> str:
        """The table's name."""
        return self._spec.name

    @property
    def sent(self) -> tuple[int, ...]:
        """The numbers of the generations that the batch has sent so far."""
        return tuple(generation.id for generation in self._generations if generation.files)

    # -- the commit

    def commit(self, watermark: datetime | None = None) -> tuple[str | None, bool]:
        """Commit what was sent, once for (application, batch); return the version served, and whether it was in before.

        Of a table of state, generations are dropped all of whose rows have expired at `watermark`. Raises
        ProducerConflictError where the batch has committed something else, and CommitConflictError where a later batch
        has committed, or the table was changed by more than a compaction.
        """
        begun = self._begin()
        commit_id = self._log.attempt().id

        def decided(seen: Parent) -> Callable[[], tuple[str | None, bool]]:
            if self._is_in(seen.manifest):
                assert seen.manifest is not None
                served = seen.manifest.version
                return lambda: (None if served is None else served.id, True)
            after = self._after(begun, seen, commit_id, watermark)

            def commit() -> tuple[str | None, bool]:
                self._committed = True  # or it is not known: then the files may be needed
                try:
                    self._log.commit(seen.commit, after, by=self._batch.by, commit_id=commit_id)
                except CommitConflictError:
                    self._committed = False
                    raise
                return None if after.version is None else after.version.id, False

            return commit

        return commit_upon(decided(begun), lambda commit: commit(), lambda _: decided(self._read()), attempts=_TRIES)

    def _begin(self) -> Parent:
        if self._begun is None:
            self._begun = self._read()
        return self._begun

    def _read(self) -> Parent:
        commit, stored = self._log.read()
        return Parent(commit, None if stored is None else as_local(stored, self._spec))

    def _is_in(self, manifest: UnboundedManifest | None) -> bool:
        """Whether this batch is in the table; what it says now has to be what it said then."""
        written = None if manifest is None else manifest.written
        if written is None or written.batch < self._batch.number:
            return False
        name, mine = self._spec.name, str(self._batch)
        if written.batch > self._batch.number or written.undone:
            what = "it was given up" if written.batch == self._batch.number else f"batch {written.batch} is in"
            raise CommitConflictError(
                f"local table {name!r} takes nothing of {mine} any more: {what}.",
                "Let the run that goes on with the application do so. If its batch log was begun anew, begin the table "
                f"anew, too: adjunct dataset delete {name} --reason ….",
                dataset=name,
                application=self._batch.application,
            )
        if written.sends != tuple(self._sends) and not self._batch.cut:
            raise ProducerConflictError(
                f"local table {name!r} has {mine} already, and what it sends now is something else: "
                f"{_told(written.sends)} then, {_told(self._sends)} now.",
                "Expressions and functions must be deterministic. Undo what changed in the application, or give the "
                f"batch up: adjunct checkpoint abandon {self._batch.application} --reason ….",
                producer=self._batch.application,
                sequence=self._batch.number,
            )
        return True

    def _after(self, begun: Parent, seen: Parent, commit_id: str, watermark: datetime | None) -> UnboundedManifest:
        """Return the manifest with this batch in it; one that has sent nothing leaves the version as it is."""
        now, spec = self._lake.now(), self._spec
        if seen.next_generation != begun.next_generation:
            raise CommitConflictError(
                f"local table {spec.name!r} was written by somebody else while {self._batch} was under way.",
                "Nothing of this batch is in it. Run the application again.",
                dataset=spec.name,
            )
        manifest = seen.manifest or first_manifest(spec, now)
        before = None if self._pinned is None else self._pinned.id
        written = Written(
            application=self._batch.application,
            batch=self._batch.number,
            sends=tuple(self._sends),
            before=before,
            watermark=watermark,
        )
        old = manifest.version.generations if manifest.version is not None else ()
        if self._pinned is None and any(generation.files for generation in old):
            raise DatasetError(
                f"local table {spec.name!r} has entries, and {self._batch} was begun without it.",
                f"Give the batch up, so that the next one is begun with it: adjunct checkpoint abandon "
                f"{self._batch.application} --reason ….",
                dataset=spec.name,
            )
        mine = [generation for generation in self._generations if generation.files]
        counters = counted(self._sends)
        after = manifest.after(
            declaration=declaration_of(spec, self._schema),
            next_generation=begun.next_generation + len(self._sends),
            counters=add(manifest.counters, counters),
            written=written,
            change=Change(action="batch", reason=str(self._batch)),
        )
        before_it = [generation for generation in old if generation.files]
        stay = [generation for generation in before_it if not has_expired(generation, watermark)]
        if not mine and manifest.version is not None and len(stay) == len(before_it):
            return after
        generations = (*stay, *mine)
        if not generations:
            generations = (self._log.attempt().generation(after.next_generation),)
            after = after.after(next_generation=after.next_generation + 1)
        number = seen.number + 1
        version = serving(
            spec, generations, number=number, id=version_id(number, commit_id), now=now, counters=counters
        )
        return retire(after, version, now)


def _placed(rows: DataFrame | pa.Table, position: int) -> DataFrame | pa.Table:
    """Return the rows with one position: of a key, what was sent later wins."""
    if hasattr(rows, "column_names"):
        import pyarrow as pa

        table: pa.Table = rows
        return table.append_column(POSITION, pa.array([position] * table.num_rows, pa.int64()))
    from pyspark.sql import functions as F

    frame: DataFrame = rows
    return frame.withColumn(POSITION, F.lit(position).cast("bigint"))


def _told(sends: Sequence[SentToTable]) -> str:
    return "; ".join(f"{sent.rows} records, {sent.deleted} deleted ({sent.digest:016x})" for sent in sends) or "nothing"
