"""A stream as it is at one moment, to be handed to other engines as it lies in the lake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.reading.stored_files import StoredFile
from dagster_adjunct.resources.bucketing.bucket_files import attempt_of
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.names import stream_within
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.interface.checked_arguments import check_epochs
from dagster_adjunct.resources.streams.interface.registered_systems import LAKE
from dagster_adjunct.resources.streams.interface.stream_system import (
    EPOCH,
    READER,
    SOURCE,
    SOURCE_EPOCH,
    SOURCE_OFFSET,
    TOMBSTONE,
    Epochs,
)
from dagster_adjunct.resources.streams.lake.lake_streams import LakeStreams
from dagster_adjunct.resources.streams.lake.latest_results import (
    WithoutPosition,
    replaced_results,
)
from dagster_adjunct.resources.streams.lake.segment_index import all_segments
from dagster_adjunct.resources.streams.lake.source_coverage import Superseded
from dagster_adjunct.resources.streams.lake.stream_manifest import HIDDEN

if TYPE_CHECKING:
    import polars

    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.objects.object_store import ObjectStore

_MOST_CONDITIONS = 1000
SHOWN = (TOMBSTONE, EPOCH)


@dataclass(frozen=True, slots=True)
class StreamView:
    """All records of a stream at one moment: those of `files`, without those that later epochs have `replaced`.

    Other engines see the columns of `schema`, then `__tombstone` and `__epoch`, which is null for 0 in files. `version`
    counts the stream's commits. `stream_id` tells it from one that was made under its name later.
    """

    store: ObjectStore
    stream: str
    stream_id: str
    version: str
    schema: Schema
    files: tuple[StoredFile, ...]
    replaced: tuple[Superseded, ...] = ()

    @property
    def dataset(self) -> str:
        """The stream's full name, where that of a dataset would stand."""
        return f"lake.{self.stream}"

    @property
    def attempts(self) -> tuple[str, ...]:
        """The folders of its files, by their last part."""
        return tuple(dict.fromkeys(attempt_of(stored.folder) for stored in self.files))

    @property
    def columns(self) -> dict[str, str]:
        """The columns that other engines see, with their types."""
        return {**{field.name: field.type for field in self.schema.fields}, TOMBSTONE: "boolean", EPOCH: "int"}

    @property
    def hidden(self) -> dict[str, str]:
        """The columns that files may have beside these, with their types."""
        return {name: kind for name, kind in HIDDEN if name not in SHOWN}


def stream_view(
    lake: Lake, stream: str, *, epochs: Epochs = "all", without_position: WithoutPosition = "refuse"
) -> StreamView:
    """Return a stream as it is now, for `pyarrow_dataset`, `duckdb_view`, `polars_frame` and the like.

    `epochs` and `without_position` are as in `LakeStreams.read`. Retention and compaction delete the files that were
    in use before an hour later (or as `maintain` was told): take a new view before that. Raises StreamNotFoundError,
    ConfigurationError as a read does, and DatasetError where too many ranges are replaced.
    """
    latest = check_epochs(epochs)
    streams, name = LakeStreams(lake), stream_within(LAKE, stream)
    commit, state = streams.state(name)
    segments = all_segments(state, streams.pages_of(name))
    prefix, what = lake.stream_prefix(name), f"stream {name!r} at commit {commit.number}"
    files = tuple(
        StoredFile(lake.store, what, segment.folder(prefix), file)
        for number, segment in enumerate(segments)
        for file in segment.generation(number, prefix).files
    )
    replaced = replaced_results(streams, name, state, segments, without_position) if latest else []
    if len(replaced) > _MOST_CONDITIONS:
        raise DatasetError(
            f"stream {name!r}: what is replaced lies in {len(replaced):,} ranges, more than other engines take as "
            f"conditions ({_MOST_CONDITIONS:,}).",
            "Write the latest results into files: adjunct stream export --epochs latest.",
            stream=f"lake.{name}",
        )
    return StreamView(lake.store, name, state.id, str(commit.number), state.declaration.schema_, files, tuple(replaced))


# -- what is replaced, as conditions of each engine; a record without a position is replaced by nothing


def arrow_filter(view: StreamView) -> Any:
    """Return pyarrow's expression for the records that nothing has replaced."""
    import pyarrow as pa
    import pyarrow.compute as pc

    gone: Any = pc.scalar(False)
    for span in view.replaced:
        gone = gone | (
            (pc.field(READER) == span.reader)
            & (pc.field(SOURCE) == span.source)
            & (pc.field(SOURCE_OFFSET) >= span.start)
            & (pc.field(SOURCE_OFFSET) < span.end)
            & (pc.field(SOURCE_EPOCH) < span.epoch)
        )
    return ~pc.coalesce(gone, pa.scalar(False))


def sql_filter(view: StreamView) -> str:
    """Return the same for DuckDB."""
    gone = [
        f"({READER} = {_text(span.reader)} AND {SOURCE} = {_text(span.source)} AND {SOURCE_OFFSET} >= {span.start} "
        f"AND {SOURCE_OFFSET} < {span.end} AND {SOURCE_EPOCH} < {span.epoch})"
        for span in view.replaced
    ]
    return f"NOT coalesce({' OR '.join(gone)}, false)" if gone else "true"


def polars_filter(view: StreamView, frame: polars.LazyFrame) -> polars.LazyFrame:
    """Return a Polars frame without what is replaced."""
    import polars as pl

    gone = pl.lit(False)
    for span in view.replaced:
        gone = gone | (
            (pl.col(READER) == span.reader)
            & (pl.col(SOURCE) == span.source)
            & (pl.col(SOURCE_OFFSET) >= span.start)
            & (pl.col(SOURCE_OFFSET) < span.end)
            & (pl.col(SOURCE_EPOCH) < span.epoch)
        )
    return frame.filter(~gone.fill_null(False))


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
