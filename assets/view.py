"""One sealed version of a dataset, read whole by Spark or by key from plain Python.

A view holds its manifest, so what it reads never changes, whatever is sealed after it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from assets.keys import coerce_key, key_from_text
from assets.lookup import FileCache, KeyFiles
from assets.manifest import POSITION, TOMBSTONE, SealedVersion

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from resources.objects.store import ObjectStore
    from resources.schema import Schema

K = TypeVar("K", bound=Hashable)


class DatasetView:
    """One version, pinned. Reading by key imports no Spark; a view may be shared by threads."""

    def __init__(self, store: ObjectStore, dataset: str, sealed: SealedVersion, cache: FileCache | None = None) -> None:
        self.dataset = dataset
        self.sealed = sealed
        self._store = store
        self._layout = sealed.layout
        self._what = f"dataset {dataset!r}, version {sealed.id}"
        self._key = tuple(sealed.columns.field(name) for name in sealed.key)
        cache = cache or FileCache()
        self._generations = [
            KeyFiles(store, self._what, self._layout, generation, cache) for generation in reversed(sealed.generations)
        ]
        self._bucketed_by = [sealed.key.index(name) for name in sealed.partition_by]

    def __repr__(self) -> str:
        return f"DatasetView({self.dataset!r}, {self.version!r})"

    @property
    def store(self) -> ObjectStore:
        """Where the version's files are."""
        return self._store

    @property
    def version(self) -> str:
        """The version's id."""
        return self.sealed.id

    @property
    def schema(self) -> Schema:
        """The columns that users see."""
        return self.sealed.columns

    @property
    def rows(self) -> int | None:
        """The number of entries; None where deltas have to be merged to know it."""
        return self.sealed.rows

    # -- by Spark

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return all entries, with the columns of `schema`.

        A partitioned dataset is a bucketed scan: a join on its partition columns, or on its key, has no exchange
        on this side. With deltas, superseded rows are dropped by a broadcast join (design, rule 8). Raises
        ManifestMismatchError when the stored files are not exactly those of the manifest.
        """
        from resources.bucketing.read import bucketed_frame

        rows = bucketed_frame(spark, self._store, self._what, self._layout, self.sealed.generations)
        base, *deltas = [generation.id for generation in self.sealed.generations]
        if deltas:
            rows = self._merged(rows, base)
        return rows.select(*[_column(name) for name in self.schema.names])

    def _merged(self, rows: DataFrame, base: int) -> DataFrame:
        """Return the newest row of each key that is not deleted.

        The keys in deltas, each with its winning position, are broadcast; whatever row of such a key is not the
        winner is dropped where it is scanned. Merging is by (position, generation), as rule 7 asks.
        """
        from pyspark.sql import functions as F

        changed = rows.where(_column(_GENERATION) != base)
        if not self.sealed.partition_by:
            changed = changed.coalesce(1)  # one file a generation: no exchange is needed to meet in one task
        keys = [f"__key_{index}" for index in range(len(self._key))]
        winners = (
            changed.groupBy(*[_column(field.name).alias(key) for field, key in zip(self._key, keys, strict=True)])
            .agg(F.max(F.struct(POSITION, _GENERATION)).alias("__winner"))
            .select(*keys, F.col(f"__winner.{POSITION}").alias(_AT), F.col(f"__winner.{_GENERATION}").alias(_IN))
        )
        condition = F.lit(True)
        for field, key in zip(self._key, keys, strict=True):
            condition = condition & (_column(field.name) == F.col(key))
        joined = rows.join(F.broadcast(winners), condition, "left")
        wins = (F.col(POSITION) == F.col(_AT)) & (F.col(_GENERATION) == F.col(_IN))
        return joined.where((F.col(_AT).isNull() | wins) & ~F.col(TOMBSTONE))

    # -- by key

    def get(self, key: object) -> dict[str, Any] | None:
        """Return the entry of `key`, or None.

        A key of several columns is a tuple in the order of the key, or a dict. Raises SchemaMismatchError for a
        value of another type than the key's, and ManifestMismatchError for a missing or damaged file.
        """
        return self._find(coerce_key(self._what, self._key, key))

    def get_text(self, texts: list[str]) -> dict[str, Any] | None:
        """Return the entry of a key given as texts, one a key column, as a command line has them."""
        return self._find(key_from_text(self._what, self._key, texts))

    def get_all(self, keys: Iterable[K]) -> dict[K, dict[str, Any]]:
        """Return the entries of those keys that have one, under the keys as they were given."""
        wanted = [(key, coerce_key(self._what, self._key, key)) for key in keys]
        # In the order of the files, so that each row group is read once.
        placed = sorted(((self._bucket(values), values, index) for index, (_, values) in enumerate(wanted)))
        found = {index: self._find(values) for _, values, index in placed}
        return {key: entry for index, (key, _) in enumerate(wanted) if (entry := found[index]) is not None}

    def _bucket(self, values: tuple[Any, ...]) -> int:
        from resources.hashing import bucket_of

        if not self._bucketed_by:
            return 0
        chosen = self._bucketed_by
        return bucket_of([values[i] for i in chosen], [self._key[i].type for i in chosen], self._layout.partitions)

    def _find(self, values: tuple[Any, ...]) -> dict[str, Any] | None:
        """Return the row with the highest (position, generation) in any generation, unless it is a tombstone."""
        bucket = self._bucket(values)
        best: tuple[tuple[int, int], dict[str, Any]] | None = None
        for files in self._generations:
            row = files.find(bucket, values)
            if row is None:
                continue
            if not self.sealed.positioned:
                return row
            place = (row[POSITION], files.id)
            if best is None or place > best[0]:
                best = (place, row)
        if best is None or best[1][TOMBSTONE]:
            return None
        return {name: best[1][name] for name in self.schema.names}


_GENERATION = "__gen"
_AT, _IN = "__winning_position", "__winning_generation"


def _column(name: str) -> Column:
    from pyspark.sql import functions as F

    return F.col(f"`{name.replace('`', '``')}`")
