"""Compares two versions without Spark: added, removed and changed keys.

A key is in the same bucket in both versions, so files are compared bucket by bucket without a
shuffle. Versions with different buckets (a dataset that was recreated with other partitions, say)
are compared as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from dagster_adjunct.assets.reading.superseded import key_codes
from dagster_adjunct.assets.reading.version_reader import VersionReader, read_entries
from dagster_adjunct.resources.bucketing.files import BucketFile
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError
from dagster_adjunct.resources.lazy_modules import np, pa, pc, pt
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.schemas.arrow_values import cast_to
from dagster_adjunct.resources.schemas.equality import differing_values
from dagster_adjunct.resources.schemas.schema import Steps
from dagster_adjunct.resources.schemas.types import Array, Map, Struct, Type, arrow_type
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.schemas.version_columns import NamedPart, list_parts
from dagster_adjunct.resources.user_code import MASKED

_ANCHOR_STEP = 32


class TableComparison(NamedTuple):
    """The differences between two tables, as row numbers (numpy), and the number of unchanged rows.

    `added` are rows of the new table whose key the old one lacks, `removed` rows of the old table
    whose key the new one lacks. Rows whose key is in both and whose values differ are
    `changed_before` in the old table, and in the same order `changed_after` in the new one.
    """

    added: Any
    removed: Any
    changed_before: Any
    changed_after: Any
    unchanged: int


def compare_tables(
    old: pa.Table, new: pa.Table, key: Sequence[str], values: Sequence[str]
) -> TableComparison | None:
    """Compare two tables by key, and the rows with equal keys in the columns `values`; return None
    if a table has a key twice.

    Nulls equal nulls, and NaN equals NaN. Other columns are ignored. Compared columns must have the
    same type in both (see `common_type`).
    """
    if old.select(key).equals(new.select(key)):
        row_in_old = np.arange(new.num_rows)
    else:
        columns = []
        for name in key:
            before = old.column(name)
            after = new.column(name)
            columns.append(pa.chunked_array([*before.chunks, *after.chunks], before.type))
        both = key_codes(columns)
        row_in_old = _match_rows(both.slice(0, old.num_rows), both.slice(old.num_rows))
    new_in_both = row_in_old >= 0
    old_rows = row_in_old[new_in_both]
    old_in_both = np.zeros(old.num_rows, np.bool_)
    old_in_both[old_rows] = True
    has_repeated_key = np.count_nonzero(old_in_both) != len(old_rows)
    if has_repeated_key:
        return None
    # Sorted files have their common keys in the same order, and a filter is cheaper than taking
    # rows one by one.
    is_same_order = bool(np.all(old_rows[1:] > old_rows[:-1]))
    differs = np.zeros(old_rows.size, np.bool_)
    for name in values:
        if is_same_order:
            before = _filter(old.column(name), old_in_both)
        else:
            before = old.column(name).take(pa.array(old_rows))
        differs |= _differing(before, _filter(new.column(name), new_in_both))
    return TableComparison(
        added=np.flatnonzero(~new_in_both),
        removed=np.flatnonzero(~old_in_both),
        changed_before=old_rows[differs],
        changed_after=np.flatnonzero(new_in_both)[differs],
        unchanged=int(np.count_nonzero(~differs)),
    )


def _filter(column: pa.ChunkedArray, mask: Any) -> pa.ChunkedArray:
    """Return the values that a mask (numpy) selects; all of them without a copy."""
    if mask.all():
        return column
    return column.filter(pa.array(mask))


def _match_rows(old: pa.ChunkedArray, new: pa.ChunkedArray) -> Any:
    """Return for each value of `new` its row in `old`, or -1.

    Sorted versions that differ little are the same sequence with a few rows added or removed, so
    most rows are found by guessing: every 32nd value of `old` is looked up, and the rows after it
    are assumed to be at the same distance. Each guess is checked. Only the rows that were missed
    are looked up in a hash table, which is the expensive part.
    """
    row_in_old = np.full(len(new), -1, np.int64)
    if not len(old) or not len(new):
        return row_in_old
    anchors = np.arange(0, len(old), _ANCHOR_STEP)
    hits = pc.index_in(new, value_set=old.take(anchors))
    matched = np.nonzero(hits.is_valid().to_numpy())[0]
    if matched.size:
        distance = anchors[hits.take(matched).to_numpy()] - matched
        rows_until_next = np.diff(np.append(matched, len(new)))
        # Rows before the first match are at its distance, too.
        guess = np.arange(len(new)) + np.concatenate(
            [np.repeat(distance[:1], matched[0]), np.repeat(distance, rows_until_next)]
        )
        is_right = (guess >= 0) & (guess < len(old))
        is_right &= pc.equal(new, old.take(np.where(is_right, guess, 0))).to_numpy()
        row_in_old[is_right] = guess[is_right]
    missed = np.nonzero(row_in_old < 0)[0]
    if missed.size:
        is_taken = np.zeros(len(old), np.bool_)
        is_taken[row_in_old[row_in_old >= 0]] = True
        untaken = np.nonzero(~is_taken)[0]
        found = pc.index_in(new.take(missed), value_set=old.take(untaken))
        is_found = found.is_valid().to_numpy()
        row_in_old[missed[is_found]] = untaken[found.drop_null().to_numpy()]
    return row_in_old


def smallest_rows(table: pa.Table, rows: Any, key: Sequence[str], count: int) -> pa.Table:
    """Return those of the given rows (numpy indices) that have the `count` smallest keys, in
    order.
    """
    if not count or not len(rows):
        return table.schema.empty_table()  # a slice would keep the whole table in memory
    names = [f"k{index}" for index in range(len(key))]  # Arrow reads a dot in a name as a path
    keys = pa.table([table.column(name).take(rows) for name in key], names=names)
    order = [(name, "ascending") for name in names]
    return table.take(
        rows[pc.select_k_unstable(keys, k=min(count, len(rows)), sort_keys=order).to_numpy()]
    )


def common_type(
    old: pa.DataType, new: pa.DataType, *, all_members: bool = False
) -> pa.DataType | None:
    """Return a type in which values of both types are compared, None if there is none: it holds
    every value of both exactly.

    Of structs only the members that both have are compared; with `all_members` all of them, and one
    without a common type leaves the struct without one.
    """
    if old.equals(new):
        return old
    if pt.is_struct(old) and pt.is_struct(new):
        return _common_struct(old, new, all_members=all_members)
    if pt.is_list(old) and pt.is_list(new):
        element = common_type(old.value_type, new.value_type, all_members=all_members)
        if element is None:
            return None
        return pa.list_(element)
    if pt.is_map(old) and pt.is_map(new):
        item = common_type(old.item_type, new.item_type, all_members=all_members)
        if item is None:
            return None
        return pa.map_(new.key_type, item)
    return _common_number(old, new)


def _common_number(old: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    """Return a type that holds the numbers of both types exactly; None if they are not of one
    kind.
    """
    for is_kind in (pt.is_signed_integer, pt.is_floating, pt.is_decimal):
        if is_kind(old) and is_kind(new):
            schemas = [pa.schema([pa.field("value", kind)]) for kind in (old, new)]
            return pa.unify_schemas(schemas, promote_options="permissive").field("value").type
    return None


def _common_struct(
    old: pa.StructType, new: pa.StructType, *, all_members: bool
) -> pa.DataType | None:
    """Return the struct of the members that both have, or with `all_members` one of them; None
    without any, or if with `all_members` a member has no common type.
    """
    before = {field.name: field.type for field in old}
    after = {field.name: field.type for field in new}
    members = []
    for name in sorted(before.keys() & after.keys()):
        kind = common_type(before[name], after[name], all_members=all_members)
        if kind is not None:
            members.append(pa.field(name, kind))
        elif all_members:
            return None
    if all_members:
        for name in sorted(before.keys() ^ after.keys()):
            members.append(pa.field(name, (before | after)[name]))
    if not members:
        return None
    return pa.struct(members)


def _differing(old: pa.ChunkedArray, new: pa.ChunkedArray) -> Any:
    """Return a numpy mask of the rows in which the two columns differ."""
    if pt.is_nested(old.type):
        return differing_values(old.combine_chunks(), new.combine_chunks())
    differs = pc.not_equal(old, new)
    if pt.is_floating(old.type):
        differs = pc.and_not(differs, pc.and_(pc.is_nan(old), pc.is_nan(new)))
    if old.null_count or new.null_count:
        differs = pc.or_(pc.fill_null(differs, False), pc.xor(pc.is_null(old), pc.is_null(new)))
    return np.asarray(differs.to_numpy(), np.bool_)


Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChangedEntry:
    """An entry whose values differ between the two versions; `old` has the new names of columns."""

    key: Entry
    old: Entry
    new: Entry


@dataclass(frozen=True, slots=True)
class EntrySamples:
    """The smallest keys that were added and removed, as dicts by column, which `Dataset.get`
    accepts, and the entries with the smallest changed keys.
    """

    added: tuple[Entry, ...] = ()
    removed: tuple[Entry, ...] = ()
    changed: tuple[ChangedEntry, ...] = ()

    def masked(self, sensitive: Iterable[str]) -> EntrySamples:
        """Return these samples with `***` for the values of sensitive columns."""
        masks = dict.fromkeys(sensitive, MASKED)

        def mask(entry: Entry) -> Entry:
            return {name: masks.get(name, value) for name, value in entry.items()}

        return EntrySamples(
            added=tuple(map(mask, self.added)),
            removed=tuple(map(mask, self.removed)),
            changed=tuple(
                ChangedEntry(mask(entry.key), mask(entry.old), mask(entry.new))
                for entry in self.changed
            ),
        )


class RenamedColumn(NamedTuple):
    """The old and the new name of a column or member."""

    old: str
    new: str


class RetypedColumn(NamedTuple):
    """A column or member whose type changed, by its new name."""

    name: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class ColumnDifferences(Report):
    """The columns, and members at any depth, that only one of two versions has, and those that
    were renamed or whose type changed.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    renamed: tuple[RenamedColumn, ...] = ()
    retyped: tuple[RetypedColumn, ...] = ()

    @staticmethod
    def between(old: VersionReader, new: VersionReader) -> ColumnDifferences:
        """Return how the columns differ.

        A column of both versions is recognised by its name in their files, which a rename leaves
        as it was.
        """
        old_parts = list_parts(old.sealed.named_columns)
        new_parts = list_parts(new.sealed.named_columns)
        renamed = []
        retyped = []
        for stored_steps, old_part in old_parts.items():
            new_part = new_parts.get(stored_steps)
            if new_part is None:
                continue
            if old_part.name != new_part.name:
                renamed.append(RenamedColumn(old_part.path, new_part.path))
            if _shape(old_part.type) != _shape(new_part.type):
                retyped.append(RetypedColumn(new_part.path, str(old_part.type), str(new_part.type)))
        return ColumnDifferences(
            added=tuple(_paths_without(new_parts, old_parts)),
            removed=tuple(_paths_without(old_parts, new_parts)),
            renamed=tuple(renamed),
            retyped=tuple(retyped),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the differences as JSON values."""
        return {
            "added": list(self.added),
            "removed": list(self.removed),
            "renamed": [column._asdict() for column in self.renamed],
            "retyped": [column._asdict() for column in self.retyped],
        }


@dataclass(frozen=True, slots=True)
class VersionDiff(Report):
    """The differences between the versions with the ids `old` and `new`: counted and sampled keys,
    and columns.

    Entries are compared in the columns of both versions: one that was renamed is compared, and one
    that was dropped and added again is not. A column whose type changed is compared only if both
    types are integers, floating-point numbers or decimals; structs are compared in the members of
    both. `to_json` masks the values of `sensitive` columns.
    """

    old: str
    new: str
    added: int
    removed: int
    changed: int
    unchanged: int
    sample: EntrySamples = EntrySamples()
    columns: ColumnDifferences = ColumnDifferences()
    sensitive: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the differences as JSON values, with masked values of sensitive columns."""
        return Report.to_json(replace(self, sample=self.sample.masked(self.sensitive)))


def diff_versions(old: VersionReader, new: VersionReader, *, sample: int = 20) -> VersionDiff:
    """Return how `new` differs from `old`, with up to `sample` keys of each kind.

    Buckets that are equal by the manifests' checksums are not read. At most four others are in
    memory at a time. Raises DatasetError if the two have different keys, and ManifestMismatchError
    for a missing or damaged file.
    """
    if sample < 0:
        raise ConfigurationError(
            f"a diff with a sample of {sample} is asked for.", "Give 0 or more.", argument="sample"
        )
    columns = ColumnDifferences.between(old, new)
    old = name_as(old, new)
    types = _compared_types(old, new)
    key = new.sealed.key
    to_read = buckets_to_read(old, new)
    is_few = len(to_read.buckets) < _WORKERS
    compare = partial(_diff_bucket, old, new, types, sample, is_few)
    diffs = list(_pool(os.getpid()).map(compare, to_read.buckets))
    rows = _merge_samples([_no_samples(old, new, types), *[diff.samples for diff in diffs]])
    rows = rows.smallest(key, sample)
    changed = []
    rows_before = python_rows(rows.changed_before)
    rows_after = python_rows(rows.changed_after)
    for was, now in zip(rows_before, rows_after, strict=True):
        changed.append(ChangedEntry({name: now[name] for name in key}, was, now))
    return VersionDiff(
        old.version,
        new.version,
        added=sum(diff.added for diff in diffs),
        removed=sum(diff.removed for diff in diffs),
        changed=sum(diff.changed for diff in diffs),
        unchanged=to_read.unchanged_rows + sum(diff.unchanged for diff in diffs),
        sample=EntrySamples(
            added=tuple(rows.added.select(key).to_pylist()),
            removed=tuple(rows.removed.select(key).to_pylist()),
            changed=tuple(changed),
        ),
        columns=columns,
        sensitive=tuple(dict.fromkeys([*old.schema.sensitive, *new.schema.sensitive])),
    )


def name_as(old: VersionReader, new: VersionReader) -> VersionReader:
    """Return a reader of the old version in which columns have the names that they have in the new
    one.
    """
    named = old.sealed.named_as(new.sealed.named_columns, keep_others=True)
    return VersionReader(old.store, old.dataset, named)


def _paths_without(
    parts: Mapping[Steps, NamedPart], others: Mapping[Steps, NamedPart]
) -> Iterator[str]:
    """Yield the paths of the parts that are not among the others. Of a part that is yielded, its
    own parts are not.
    """
    for steps, part in parts.items():
        is_inside_yielded = len(steps) > 1 and steps[:-1] not in others
        if steps not in others and not is_inside_yielded:
            yield part.path


def _shape(type_: Type) -> str:
    """Return the text of a type without the members of structs, which are compared themselves."""
    if isinstance(type_, Struct):
        return "struct"
    if isinstance(type_, Array):
        return f"array<{_shape(type_.element)}>"
    if isinstance(type_, Map):
        return f"map<{_shape(type_.value)}>"
    return str(type_)


_WORKERS = min(4, os.cpu_count() or 1)  # buckets in memory at a time


@lru_cache(maxsize=1)
def _pool(process_id: int) -> ThreadPoolExecutor:
    """Return the thread pool for diffs in this process, made at its first diff. Ending it after
    each diff would cost a quarter of its time.

    It is cached by process id, since a forked process lacks its parent's threads.
    """
    return ThreadPoolExecutor(_WORKERS, thread_name_prefix="adjunct-diff")


class _SampledRows(NamedTuple):
    """Rows that were added and removed, and changed ones before and after, in the same order."""

    added: pa.Table
    removed: pa.Table
    changed_before: pa.Table
    changed_after: pa.Table

    def smallest(self, key: Sequence[str], count: int) -> _SampledRows:
        """Return the rows with the `count` smallest keys of each kind."""
        return _SampledRows(
            *[smallest_rows(rows, np.arange(rows.num_rows), key, count) for rows in self]
        )


def _no_samples(
    old: VersionReader, new: VersionReader, types: dict[str, pa.DataType]
) -> _SampledRows:
    """Return no rows, in the columns that samples have."""
    no_old = _cast(old.schema.to_arrow().empty_table(), types)
    no_new = _cast(new.schema.to_arrow().empty_table(), types)
    return _SampledRows(added=no_new, removed=no_old, changed_before=no_old, changed_after=no_new)


def _merge_samples(samples: Sequence[_SampledRows]) -> _SampledRows:
    """Return the rows of all samples, by kind."""
    return _SampledRows(
        added=pa.concat_tables([one.added for one in samples]),
        removed=pa.concat_tables([one.removed for one in samples]),
        changed_before=pa.concat_tables([one.changed_before for one in samples]),
        changed_after=pa.concat_tables([one.changed_after for one in samples]),
    )


class _BucketDiff(NamedTuple):
    """The numbers of added, removed, changed and unchanged keys of a bucket, and samples of its
    rows.
    """

    added: int
    removed: int
    changed: int
    unchanged: int
    samples: _SampledRows


def _diff_bucket(
    old: VersionReader,
    new: VersionReader,
    types: dict[str, pa.DataType],
    sample: int,
    threads: bool,
    bucket: int | None,
) -> _BucketDiff:
    """Return the differences in one bucket, or in all (None), with up to `sample` rows of each
    kind. `types` are the columns to compare, and the types to compare them in; `threads` decodes
    columns in parallel.
    """
    key = new.sealed.key
    before = _cast(read_entries(old, bucket, threads=threads), types)
    after = _cast(read_entries(new, bucket, threads=threads), types)
    compared = compare_tables(before, after, key, [name for name in types if name not in key])
    if compared is None:
        raise repeated_key_error(old, new)
    samples = _SampledRows(
        added=smallest_rows(after, compared.added, key, sample),
        removed=smallest_rows(before, compared.removed, key, sample),
        changed_before=smallest_rows(before, compared.changed_before, key, sample),
        changed_after=smallest_rows(after, compared.changed_after, key, sample),
    )
    return _BucketDiff(
        added=len(compared.added),
        removed=len(compared.removed),
        changed=len(compared.changed_after),
        unchanged=compared.unchanged,
        samples=samples,
    )


def repeated_key_error(old: VersionReader, new: VersionReader) -> DatasetError:
    """Return the error for versions of which one has several entries of a key."""
    problem = (
        f"the key ({', '.join(new.sealed.key)}) is not unique in version {old.version} or"
        f" {new.version} of {new.dataset!r}."
    )
    step = (
        "Compare versions with unique keys only; the validator unique_keys() finds the duplicates."
    )
    return DatasetError(problem, step, version=old.version)


def _cast(table: pa.Table, types: dict[str, pa.DataType]) -> pa.Table:
    """Return the table with these types of these columns."""
    for name, kind in types.items():
        if table.column(name).type != kind:
            index = table.column_names.index(name)
            table = table.set_column(index, name, cast_to(table.column(name), kind))
    return table


def _compared_types(old: VersionReader, new: VersionReader) -> dict[str, pa.DataType]:
    """Return the columns to compare, with the type to compare each in. Raises DatasetError if
    keys differ.
    """
    check_equal_keys(old, new)
    before = old.schema.types
    types = {}
    for name, kind in new.schema.types.items():
        if name not in before:
            continue
        common = common_type(arrow_type(before[name]), arrow_type(kind))
        if common is not None:
            types[name] = common
    return types


def check_equal_keys(old: VersionReader, new: VersionReader) -> None:
    """Raise DatasetError unless both versions have the same key, of types that can be compared."""
    before = old.schema.types
    after = new.schema.types
    if old.sealed.key == new.sealed.key:
        types = [
            common_type(arrow_type(before[name]), arrow_type(after[name]))
            for name in new.sealed.key
        ]
        if None not in types:
            return
    problem = (
        f"version {old.version} of {old.dataset!r} is keyed by ({_describe_key(old)}) and version"
        f" {new.version} of {new.dataset!r} by ({_describe_key(new)})."
    )
    raise DatasetError(problem, "Compare versions with the same key.", version=old.version)


def _describe_key(view: VersionReader) -> str:
    """Return the key columns of a version, with their types."""
    types = view.schema.types
    return ", ".join(f"{name} {types[name]}" for name in view.sealed.key)


class BucketsToRead(NamedTuple):
    """The buckets whose contents may differ, and the number of rows in the others. [None] stands
    for all buckets, which have to be compared at once.
    """

    buckets: list[int | None]
    unchanged_rows: int


def buckets_to_read(old: VersionReader, new: VersionReader) -> BucketsToRead:
    """Return the buckets to read for a comparison of two versions: all at once if their keys are in
    different buckets, else those whose files may have other rows.
    """
    old_columns = old.schema.select(old.sealed.partition_by)
    new_columns = new.schema.select(new.sealed.partition_by)
    has_same_number = old.sealed.layout.partitions == new.sealed.layout.partitions
    has_same_buckets = old_columns == new_columns and has_same_number
    if not has_same_buckets:
        return BucketsToRead([None], 0)
    # Files with other columns, or with superseded rows, say nothing about entries.
    is_positioned = old.sealed.positioned or new.sealed.positioned
    are_files_comparable = old.schema == new.schema and not is_positioned
    old_files = _files_by_bucket(old)
    new_files = _files_by_bucket(new)
    buckets: list[int | None] = []
    unchanged = 0
    for bucket in sorted({*old_files, *new_files}):
        before = old_files.get(bucket, [])
        after = new_files.get(bucket, [])
        if are_files_comparable and _has_same_content(before, after):
            unchanged += sum(file.rows for file in after)
        else:
            buckets.append(bucket)
    return BucketsToRead(buckets, unchanged)


def _files_by_bucket(view: VersionReader) -> dict[int, list[BucketFile]]:
    """Return the files of a version, of all generations, by bucket."""
    by_bucket: dict[int, list[BucketFile]] = {}
    for generation in view.sealed.generations:
        for file in generation.files:
            by_bucket.setdefault(file.bucket, []).append(file)
    return by_bucket


def _has_same_content(old: list[BucketFile], new: list[BucketFile]) -> bool:
    """Whether both lists have just one file, and the two have the same rows by SHA-256 or
    digest.
    """
    if len(old) != 1 or len(new) != 1:
        return False
    before = old[0]
    after = new[0]
    if before.sha256 == after.sha256:
        return True
    if before.digest is None or before.rows != after.rows:
        return False
    return before.digest == after.digest
