"""The declaration of an adjunct dataset: its name, input, key and partitioning.

Declaring a dataset reads and writes nothing. There are two kinds (SAMZA-1278): a *bounded* dataset
arrives in versions, each closed by end-of-dataset markers; an *unbounded* one follows a change
stream. The input is a stream, or one of the sources here: folders of files, queries, and the output
of an application.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypedDict, TypeGuard, Unpack

from dagster_adjunct.assets.declaration.change_formats import ChangeFormat, Upserts
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.declaration.extractors import KeyValueExtractor, Projection
from dagster_adjunct.assets.declaration.policies import (
    CHUNK_RECORDS,
    ArgumentProblem,
    ChangeStreamOptions,
    DeadLetters,
    DeltaCompaction,
    DiscardPolicy,
    History,
    OnLostOffset,
    RowValidator,
    Validator,
    VersionPartitions,
    Watermark,
    check_positive,
    check_valid_from,
    check_validators,
    declare_history,
    list_row_validators,
)
from dagster_adjunct.assets.declaration.snapshots import InitialLoad
from dagster_adjunct.assets.declaration.table_versions import (
    DeltaVersions,
    IcebergVersions,
    TableVersions,
)
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.code_lines import CodeLine, find_calling_line
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.file_streams.overview import is_of_files
from dagster_adjunct.resources.files.formats import FileFormat, check_format
from dagster_adjunct.resources.files.tree import check_folder_url
from dagster_adjunct.resources.names import check_name, split_stream_name
from dagster_adjunct.resources.schemas.column_changes import ColumnChanges
from dagster_adjunct.resources.schemas.paths import (
    NamedPath,
    read_named_path,
    require_value,
    split_path,
    write_path,
)
from dagster_adjunct.resources.schemas.records import ArrowFrame
from dagster_adjunct.resources.schemas.schema import Field, Schema, check_key_types, repeated_names
from dagster_adjunct.resources.schemas.types import path_column, write_name
from dagster_adjunct.resources.sql.expression import did_you_mean
from dagster_adjunct.resources.streams.system import CHANGE_IMAGES, CHANGES
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from dagster import AutomationCondition
    from pyspark.sql import DataFrame

    Condition: TypeAlias = AutomationCondition[Any]
# Spark's tasks import this module on machines without Dagster; build_definitions checks the value
else:
    Condition = Any


@validated
@dataclass(frozen=True, slots=True)
class FileSource:
    """Versions as folders of files: each folder below `url` with a completion object is one
    version.

    `url` is a folder, `file:///…` or `s3://BUCKET/PREFIX`. A version has the name of its folder,
    and versions are in the natural order of their names (v2 before v10). A folder without
    completion object holds back those after it. All files in and below a folder are its records,
    except those named `_…` or `.…`.

    If the completion object is in `url` itself, that folder holds one version after the other,
    named by the time of completion: to replace it, remove the completion object, replace the files,
    and write the completion object again.

    `complete` is the completion object's name. It is written last. It may be empty, or a JSON
    object with `rows`, the number of records, `checksum`, as `records_checksum` returns it, and
    `valid_from`, a time; other members reject the version. A folder without records is rejected
    unless `rows` is 0. `schema` is the schema of the files, checked strictly: see
    resources/files/formats.py for each format.
    """

    url: str
    format: FileFormat
    schema: Schema
    complete: str = "_SUCCESS"

    def __post_init__(self) -> None:
        if not self.url:
            raise argument_error(
                f"FileSource has url={self.url!r}",
                "a folder, file:///… or s3://BUCKET/PREFIX",
                argument="url",
            )
        check_folder_url(self.url)
        check_format(self.schema, self.format, f"FileSource of {self.url}")
        if not self.complete or "/" in self.complete:
            raise argument_error(
                f"FileSource has complete={self.complete!r}",
                'the name of an object, without "/", such as _SUCCESS',
                argument="complete",
            )

    def __str__(self) -> str:
        return f"files in {self.url}"


@dataclass(frozen=True, slots=True)
class Computation:
    """What a query is asked for: the version of this name, and its partition in Dagster, None if
    it has none.
    """

    version: str
    partition: str | None


@validated
@dataclass(frozen=True, slots=True)
class QuerySource:
    """Versions computed by a query: each advance runs it and publishes the result if that is new.

    `query` is SQL, in which `{version}` and `{partition}` are replaced by string literals, or a
    function of the session and a Computation that returns a Spark, pandas or Polars frame or an
    Arrow table. `schema` is the schema of the result, checked strictly. `name` stands for the query
    in the stored declaration, so another name needs a rebuild. Without Spark, `query` must be a
    function, which gets IN_PROCESS instead of a session and returns no Spark frame. An answer
    without rows rejects the version, unless `allow_empty`.
    """

    query: str | Callable[[Any, Computation], DataFrame | ArrowFrame]
    schema: Schema
    name: str = "query"
    allow_empty: bool = False

    def __post_init__(self) -> None:
        check_name("query", self.name)

    def __str__(self) -> str:
        return f"query {self.name}"


@dataclass(frozen=True, slots=True)
class OwnedBy:
    """The input of a local table: what the batches of one application send. `schema` are its
    columns.

    `expires` is the timestamp column of a state table after which a row is expired, None if rows
    never expire. `kept_for` says what the rows of a state table are kept for, in words, and
    `zone_rules` which rules of a time zone their times were computed by.
    """

    application: str
    schema: Schema
    expires: str | None = None
    kept_for: str = ""
    zone_rules: str = ""

    def __str__(self) -> str:
        return f"application {self.application}"


Delivered = str | FileSource | QuerySource | TableVersions
Input = Delivered | OwnedBy


def bucket_columns(
    name: str,
    key: Sequence[NamedPath],
    partitions: int | None,
    partition_by: str | Sequence[str] | None,
    broadcast: bool,
) -> tuple[str, ...]:
    """Return the columns that determine the bucket: by default the whole key, none for a broadcast
    copy. A path in `partition_by` stands for the column of the key that is made of it.

    Raises ConfigurationError unless exactly one of `partitions` and `broadcast=True` is given.
    """
    if broadcast == (partitions is not None):
        if broadcast:
            given = "both partitions and broadcast=True"
        else:
            given = "neither partitions nor broadcast=True"
        raise ConfigurationError(
            f"dataset {name!r} has {given}: expected exactly one.",
            "Write partitions=N to partition it by key, or broadcast=True for one copy on every"
            " task.",
            argument="partitions",
            dataset=name,
        )
    if partition_by is not None:
        stored = {column.steps: column.name for column in key}
        names = []
        for text in to_name_tuple(partition_by):
            names.append(stored.get(read_named_path(text).steps, text))
        return tuple(names)
    if broadcast:
        return ()
    return tuple(column.name for column in key)


@dataclass(frozen=True, slots=True)
class StoredColumns:
    """The columns that a dataset stores: their `names`, None for all of the input's, and `paths`,
    those that are made of paths into the input's columns, or renamed.
    """

    names: tuple[str, ...] | None = None
    paths: tuple[NamedPath, ...] = ()


@dataclass(frozen=True, slots=True)
class _NamedColumns:
    """The columns that a declaration names: those of the `key`, and the stored ones (`columns`),
    None for all. Key columns that are made of paths are always stored, before the others.
    """

    key: tuple[NamedPath, ...]
    columns: tuple[NamedPath, ...] | None

    @property
    def key_names(self) -> tuple[str, ...]:
        """The names of the columns of the key."""
        return tuple(column.name for column in self.key)

    @property
    def stored(self) -> StoredColumns:
        """The columns that the dataset stores."""
        named = [*self.key]
        names = None
        if self.columns is not None:
            named += self.columns
            names = tuple(column.name for column in self.columns)
        paths = dict.fromkeys(column for column in named if column.renames)
        return StoredColumns(names, tuple(paths))


def _name_columns(
    dataset: str, source: Input, key: str | Sequence[str], columns: Sequence[str] | None
) -> _NamedColumns:
    """Return the columns that the arguments `key` and `columns` name.

    Raises ConfigurationError for a column that has the name of a part of the key.
    """
    known: tuple[str, ...] = ()  # the columns of a stream are known once it is opened
    if not isinstance(source, str):
        known = source.schema.names
    keys = tuple(read_named_path(text, known) for text in to_name_tuple(key))
    if columns is None:
        return _NamedColumns(keys, None)
    key_paths = [column for column in keys if column.renames]
    path_of_name = {column.name.lower(): column for column in key_paths}
    others = []
    for text in to_name_tuple(columns):
        column = read_named_path(text, known)
        if column in key_paths:
            continue
        key_path = path_of_name.get(column.name.lower())
        if key_path is not None:
            raise ConfigurationError(
                f"dataset {dataset!r}: {write_path(key_path.steps)!r} is stored as"
                f" {key_path.name!r}, and columns has {text!r}.",
                _other_name_step(key_path),
                argument="columns",
                dataset=dataset,
                column=key_path.name,
            )
        others.append(column)
    return _NamedColumns(keys, (*key_paths, *others))


def _other_name_step(column: NamedPath) -> str:
    """Return how to store the value of a path under another name."""
    path = write_path(column.steps)
    return f'Give one of them another name: "{path} as {write_name("_".join(column.steps))}".'


def to_name_tuple(value: str | Collection[str]) -> tuple[str, ...]:
    """Return one name or several as a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(value)


class DescriptionOptions(TypedDict, total=False):
    """What Dagster shows about a dataset, and when it materializes it: see AdjunctDataset."""

    description: str
    owners: str | Collection[str]
    group: str | None
    column_descriptions: Mapping[str, str] | None
    sensitive: str | Collection[str]
    automation_condition: Condition | None


@dataclass(frozen=True, slots=True)
class Presentation:
    """What Dagster shows about a dataset, and when it materializes it by itself.

    `freshness` is the age at which Dagster warns, None if it never does. Values of `sensitive`
    columns are masked.
    """

    description: str = ""
    owners: tuple[str, ...] = ()
    group: str | None = None
    column_descriptions: tuple[tuple[str, str], ...] = ()
    sensitive: tuple[str, ...] = ()
    automation_condition: Condition | None = field(default=None, repr=False)
    freshness: timedelta | None = None

    def __post_init__(self) -> None:
        check_positive("freshness", self.freshness)


def _presentation(shown: DescriptionOptions, freshness: timedelta | None = None) -> Presentation:
    """Return these options as a dataset stores them."""
    described = shown.get("column_descriptions") or {}
    return Presentation(
        description=shown.get("description", ""),
        owners=to_name_tuple(shown.get("owners", ())),
        group=shown.get("group"),
        column_descriptions=tuple(described.items()),
        sensitive=to_name_tuple(shown.get("sensitive", ())),
        automation_condition=shown.get("automation_condition"),
        freshness=freshness,
    )


DatasetKind = Literal["bounded", "unbounded"]
BY_OFFSET = ("source_partition", "source_offset")
"""The key of a dataset whose records have none: each record's position on its stream, stored as
int and bigint.
"""

MAX_PARTITIONS = 100_000


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class AdjunctDataset:
    """An adjunct dataset: entries by key, built from `input`, which applications join.

    It is a BoundedDataset, an UnboundedDataset or a LocalTable. `key` names the columns that
    identify an entry. `partitions` is the number of buckets, None for one broadcast copy.
    `partition_by` are the key columns that determine the bucket, () for a broadcast copy. `columns`
    are the stored columns. `extractor` turns records into entries. `evolution` says which stored
    columns were renamed or dropped. `bootstrap` makes applications wait until the dataset is first
    readable. `discard` says which versions are retained. Dagster masks values of `sensitive`
    columns; the path of a part of a nested column, "customer.email", masks the whole column.
    `declared_at` is the line of user code that declares it, and is not stored in the lake. Raises
    ConfigurationError.
    """

    kind: ClassVar[DatasetKind]

    name: str
    input: Input
    key: tuple[str, ...]
    partition_by: tuple[str, ...]
    partitions: int | None
    bootstrap: bool = True
    columns: StoredColumns = StoredColumns()
    evolution: ColumnChanges = field(default_factory=ColumnChanges)
    extractor: KeyValueExtractor | None = None
    discard: DiscardPolicy = field(default_factory=DiscardPolicy)
    presentation: Presentation = field(default_factory=Presentation)
    declared_at: CodeLine | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if type(self) is AdjunctDataset:
            raise ConfigurationError(
                f"dataset {self.name!r} is of no kind.",
                "Declare it with bounded_dataset(…) or unbounded_dataset(…).",
                argument="kind",
                dataset=self.name,
            )
        if self.declared_at is None:
            object.__setattr__(self, "declared_at", find_calling_line())
        check_name("dataset", self.name)
        if isinstance(self.input, str):
            split_stream_name(self.input)
        wrong = next(self._problems(), None)
        if wrong is not None:
            raise ConfigurationError(
                f"dataset {self.name!r} {wrong.problem}.",
                wrong.next_step,
                argument=wrong.argument,
                dataset=self.name,
            )

    def _problems(self) -> Iterator[ArgumentProblem]:
        """Yield what is wrong with the arguments, in words that follow the name of the dataset."""
        if not self.key:
            yield ArgumentProblem(
                "key", "has no key", "Name the columns that identify an entry: key=[…]."
            )
        yield from _name_problems("key", self.key, self.columns.paths)
        yield from _name_problems("partition_by", self.partition_by)
        yield from self._column_problems()
        yield from self._spread_problems()
        yield from self._kind_problems()
        yield from _name_problems("sensitive", self.sensitive)
        described = tuple(dict(self.presentation.column_descriptions))
        yield from _name_problems("column_descriptions", described)
        if str(self.input).partition(".")[0] in (CHANGES, CHANGE_IMAGES):
            problem = (
                f"has the input {self.input}, the changes of a dataset, which only applications"
                " read"
            )
            step = (
                "Let an application send them to a stream that this dataset reads:"
                " app.input_changes(…).send_to(…)."
            )
            yield ArgumentProblem("input", problem, step)
        if not self.follows_changes and is_of_files(str(self.input)):
            problem = (
                f"has the input {self.input}, a stream of files, in which nothing says where a"
                " version of a bounded dataset ends"
            )
            step = (
                "Read versions from folders that a completion object ends: input=FileSource(…). For"
                " a table whose newest rows count, use unbounded_dataset(…)."
            )
            yield ArgumentProblem("input", problem, step)
        has_offsets = self.stream is not None and not self.follows_changes
        if self.by_offset and not has_offsets:
            problem = (
                f"is keyed by offset, but its input is {self.input}: only versions on a stream have"
                " offsets"
            )
            yield ArgumentProblem(
                "key", problem, "Name the columns that identify an entry: key=[…]."
            )

    def _kind_problems(self) -> Iterator[ArgumentProblem]:
        """Yield what is wrong with the options that only this kind of dataset has."""
        return iter(())

    def _column_problems(self) -> Iterator[ArgumentProblem]:
        """Yield what is wrong with the stored columns."""
        names = self.columns.names
        if names is None:
            return
        yield from _name_problems("columns", names, self.columns.paths)
        if self.by_offset:  # the columns of the key are added to those that are stored
            return
        for column in self.key:
            if column not in names:
                problem = f"does not store its key column {column!r}"
                yield ArgumentProblem("columns", problem, "Add it to columns=.")

    def _spread_problems(self) -> Iterator[ArgumentProblem]:
        """Yield what is wrong with the number of partitions and the columns that they are by."""
        if self.partitions is None:
            if self.partition_by:
                yield ArgumentProblem(
                    "partition_by", "is broadcast and has partition_by", "Remove one of the two."
                )
            return
        if not 1 <= self.partitions <= MAX_PARTITIONS:
            yield ArgumentProblem(
                "partitions", f"has partitions={self.partitions}: expected 1 to {MAX_PARTITIONS:,}"
            )
        if not self.partition_by:
            yield ArgumentProblem(
                "partition_by",
                "is partitioned and has no partition_by",
                "Name one or more columns of its key.",
            )
        for column in self.partition_by:
            if column not in self.key:
                problem = (
                    f"is partitioned by {column!r}, which is not in its key"
                    f" ({', '.join(self.key)}): entries of one key could be in two buckets"
                )
                step = "Partition by columns of the key only, or add the column to the key."
                yield ArgumentProblem("partition_by", problem, step)

    @property
    def sensitive(self) -> tuple[str, ...]:
        """The names and paths of the columns whose values are masked, as declared."""
        return self.presentation.sensitive

    @property
    def masked(self) -> tuple[str, ...]:
        """The names of the columns whose values are masked: `sensitive`, the columns that its paths
        begin with, and columns that are made of sensitive values.
        """
        names = [*self.sensitive, *map(path_column, self.sensitive)]
        hidden = [*map(split_path, self.sensitive)]
        for column in self.columns.paths:
            for steps in hidden:
                common = min(len(steps), len(column.steps))
                is_nested = steps[:common] == column.steps[:common]  # one of the two in the other
                if common and is_nested:
                    names.append(column.name)
        return tuple(dict.fromkeys(names))

    def steps_to(self, column: str) -> tuple[str, ...]:
        """Return the steps to the value of a stored column: the column of the input, or of the
        extractor's entries, and the fields within it.
        """
        for path in self.columns.paths:
            if path.name == column:
                return path.steps
        return (column,)

    def source_of(self, column: str) -> str:
        """Return the name of the column, or the path, that a stored column is made of, as keys of
        streams spell it.
        """
        steps = self.steps_to(column)
        if len(steps) == 1:
            return steps[0]
        return write_path(steps)

    @property
    def key_sources(self) -> tuple[str, ...]:
        """What the columns of the key are made of, as keys of streams spell it."""
        return tuple(map(self.source_of, self.key))

    @property
    def key_steps(self) -> tuple[tuple[str, ...], ...]:
        """The steps to the values of the key."""
        return tuple(map(self.steps_to, self.key))

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The columns of the input, or of the extractor's entries, that the key is made of."""
        return tuple(dict.fromkeys(steps[0] for steps in self.key_steps))

    @property
    def simple_key(self) -> tuple[str, ...]:
        """The columns of the key that are columns of the input, or of the extractor's entries."""
        return tuple(steps[0] for steps in self.key_steps if len(steps) == 1)

    @property
    def follows_changes(self) -> bool:
        """Whether each commit is a version: it follows changes instead of arriving in versions."""
        return self.kind == "unbounded"

    @property
    def is_local(self) -> bool:
        """Whether it is a local table, which an application owns and no stream feeds."""
        return isinstance(self.input, OwnedBy)

    def is_owned_by(self, application: str) -> bool:
        """Whether it is a local table of this application."""
        return isinstance(self.input, OwnedBy) and self.input.application == application

    @property
    def persistent(self) -> bool:
        """Whether it is stored in the lake, and not only in memory for one run."""
        return True

    @property
    def versions(self) -> VersionPartitions | None:
        """How versions are partitions in Dagster, None if they are not."""
        return None

    @property
    def version_set(self) -> str | None:
        """The name of the version set whose members switch together, None if it has none."""
        return None

    @property
    def over_time(self) -> bool:
        """Whether its entries or versions are valid from a time on, so that they can be joined as
        of a time.
        """
        return False

    @property
    def history_columns(self) -> tuple[str, ...] | None:
        """The columns whose changes begin an interval of the history; None are all columns."""
        return None

    def _history_column_problems(self) -> Iterator[ArgumentProblem]:
        """Yield what is wrong with `history_columns`, as `_problems` does."""
        if self.history_columns is None:
            return
        argument = "history_columns"
        if not self.over_time:
            problem = f"has {argument}, which have no effect without valid_from=…"
            yield ArgumentProblem(argument, problem, f"Declare valid_from=…, or remove {argument}.")
        if not self.history_columns:
            problem = f"has {argument}=[], so that changes of entries would begin no interval"
            yield ArgumentProblem(argument, problem, "Name the columns whose changes begin one.")
        yield from _name_problems(argument, self.history_columns)
        for name in self.history_columns:
            if name in self.key:
                problem = f"names {name!r} in {argument}, a column of the key, which never changes"
                yield ArgumentProblem(argument, problem, "Name other columns.")
            elif self.columns.names is not None and name not in self.columns.names:
                problem = f"names {name!r} in {argument}, and does not store it"
                yield ArgumentProblem(argument, problem, "Add it to columns=, or name another one.")

    @property
    def has_watermark(self) -> bool:
        """Whether it declares up to when it is complete, so that joins can wait for it."""
        return False

    @property
    def by_offset(self) -> bool:
        """Whether the key is the record's position on its stream, which makes keys unique."""
        return self.key == BY_OFFSET

    @property
    def stream(self) -> str | None:
        """The input stream ("lake.planes"), None for a dataset of files or a query, and for a
        local table.
        """
        if not isinstance(self.input, str):
            return None
        return self.input

    @property
    def system_stream(self) -> tuple[str, str]:
        """The system and the name of the input stream ("lake", "planes"), for a dataset that has
        one.
        """
        return split_stream_name(str(self.input))

    @property
    def broadcast(self) -> bool:
        """Whether every task reads a complete copy."""
        return self.partitions is None


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedDataset(AdjunctDataset):
    """A dataset that arrives in versions: on a stream, as files, or from a query.

    With `key=BY_OFFSET`, records on a stream need no key. `duplicates` says whether the last of
    several records of a key wins or the version is rejected. `validators` decide whether a version
    is published. Members of one `version_set` switch together. `versions` makes versions partitions
    in Dagster. `on_damage="previous"` lets readers fall back to the previous sealed version if a
    file is damaged. `valid_from` says what determines since when a version is valid (see
    `bounded_dataset`), None if nothing does. For joins that wait, the newest version is complete
    for `valid_for` after that; None if no join can wait. For `history_columns` see
    `bounded_dataset`.
    """

    kind = "bounded"

    input: Delivered
    duplicates: Literal["last", "error"] = "last"
    validators: tuple[Validator, ...] = ()
    version_set: str | None = None
    versions: VersionPartitions | None = None
    on_damage: Literal["fail", "previous"] = "fail"
    valid_from: str | None = None
    valid_for: timedelta | None = None
    history_columns: tuple[str, ...] | None = None

    def _kind_problems(self) -> Iterator[ArgumentProblem]:
        yield from self._history_column_problems()
        if self.valid_from is not None:
            check_valid_from(self.name, self.valid_from)
        check_positive("valid_for", self.valid_for)
        if self.valid_for is not None and self.valid_from is None:
            problem = "has valid_for without valid_from: its versions have no times"
            yield ArgumentProblem(
                "valid_for", problem, "Declare valid_from=…, or remove valid_for."
            )
        check_validators(f"dataset {self.name!r}", self.validators)
        if not isinstance(self.input, str):
            _check_source_columns(self, self.input.schema)
        if _names_states(self.input) and self.versions is not None:
            problem = "has version partitions, but states of a table have no names of their own"
            step = 'Declare tags="…" of an Iceberg table, or leave versions= out.'
            yield ArgumentProblem("versions", problem, step)

    @property
    def over_time(self) -> bool:
        """Whether versions are valid from a time on."""
        return self.valid_from is not None

    @property
    def has_watermark(self) -> bool:
        """Whether it declares for how long a version is complete."""
        return self.valid_for is not None


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class UnboundedDataset(AdjunctDataset):
    """A dataset that follows the change stream `input`; `following` says how that becomes a
    table, and `validators` what each changed row must meet.
    """

    kind = "unbounded"

    input: str
    following: ChangeStreamOptions = field(default_factory=ChangeStreamOptions)
    validators: tuple[RowValidator, ...] = ()

    def _kind_problems(self) -> Iterator[ArgumentProblem]:
        if self.validators:
            yield from self._validator_problems()
        yield from self._history_column_problems()
        dead = self.following.on_bad_change
        if isinstance(dead, DeadLetters) and dead.stream == self.input:
            problem = (
                f"sends dead letters to its own input {self.input}, where they would be read as"
                " changes"
            )
            step = "Name another stream: on_bad_change=DeadLetters(STREAM)."
            yield ArgumentProblem("on_bad_change", problem, step)
        if self.following.initial is not None and not self.bootstrap:
            problem = "has an initial snapshot, which needs bootstrap=True"
            yield ArgumentProblem("initial", problem, "Remove initial= or bootstrap=False.")
        if self.extractor is not None and self.following.groups:
            problem = (
                f"has an extractor ({self.extractor.describe()}), and order_by orders groups of"
                " columns, of which it may compute one from another"
            )
            yield ArgumentProblem(
                "extractor", problem, "Replace extractor= by columns=, or order whole rows."
            )
        if self.extractor is not None and self.following.completes:
            if isinstance(self.extractor, Projection):
                why = self.extractor.problem_with_missing_columns(
                    self.simple_key, in_any_order=self.following.merges_columns
                )
            else:
                why = "only a Projection says which columns it reads"
            problem = (
                f"has an extractor ({self.extractor.describe()}), and its changes"
                f" ({self.following.changes.describe()}) may leave out columns: {why}"
            )
            step = (
                "Use columns=, or a Projection whose where= reads columns of the key only, and"
                " filter where the dataset is read. Or let the source send whole rows."
            )
            if why:
                yield ArgumentProblem("extractor", problem, step)

    def _validator_problems(self) -> Iterator[ArgumentProblem]:
        """Yield why validators can't check the changes, if they can't."""
        check_validators(f"dataset {self.name!r}", self.validators)
        if self.following.completes:
            problem = (
                f"has validators, and its changes ({self.following.changes.describe()}) may leave"
                " out columns, which validators would have to see"
            )
            yield ArgumentProblem(
                "validators", problem, "Remove validators, or let the source send whole rows."
            )
        if self.following.groups:
            problem = (
                "has validators, and order_by orders groups of columns: a change may set only one"
                " of them, and validators would have to see all"
            )
            yield ArgumentProblem(
                "validators", problem, "Remove validators, or order whole rows by one column."
            )
        if not self.following.persistent:
            problem = "has validators, and with persistent=False nothing keeps what they find"
            yield ArgumentProblem(
                "validators", problem, "Declare persistent=True, or remove validators."
            )

    @property
    def persistent(self) -> bool:
        """Whether it is stored in the lake, and not only in memory for one run."""
        return self.following.persistent

    @property
    def compaction(self) -> DeltaCompaction:
        """When its deltas are compacted."""
        return self.following.compaction

    @property
    def dead_letters(self) -> str | None:
        """The stream of the changes that can't be applied, if they are not to fail."""
        dead = self.following.on_bad_change
        if not isinstance(dead, DeadLetters):
            return None
        return dead.stream

    @property
    def transactions(self) -> str | None:
        """The stream that says which transactions of the input are complete."""
        changes = self.following.changes
        if not isinstance(changes, DebeziumEnvelope):
            return None
        return changes.transactions

    @property
    def over_time(self) -> bool:
        """Whether it keeps the entries of each key over time."""
        return self.following.history is not None

    @property
    def history_columns(self) -> tuple[str, ...] | None:
        """The columns whose changes begin an interval of the history; None are all columns."""
        if self.following.history is None:
            return None
        return self.following.history.columns

    @property
    def has_watermark(self) -> bool:
        """Whether it declares up to when its changes are complete."""
        return self.following.watermark is not None


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTable(AdjunctDataset):
    """A table that one application owns: its batches write it, and no stream feeds it."""

    kind = "unbounded"

    input: OwnedBy
    bootstrap: bool = False
    compaction: DeltaCompaction = field(default_factory=DeltaCompaction)

    def _kind_problems(self) -> Iterator[ArgumentProblem]:
        """Yield nothing. Raises ConfigurationError for a key that can't be compared."""
        what = f"local table {self.name!r}"
        try:
            check_key_types(self.stored, self.key, what)
        except SchemaMismatchError as error:
            raise ConfigurationError(
                error.problem, error.next_step, argument="key", dataset=self.name
            ) from error
        return iter(())

    @property
    def stored(self) -> Schema:
        """The columns that it stores: those that the application sends, and those of its key that
        are made of paths.
        """
        return select_stored_columns(self, self.input.schema, f"local table {self.name!r}")


def _check_source_columns(dataset: BoundedDataset, records: Schema) -> None:
    """Raise ConfigurationError for columns that a dataset names and its files or its query, with
    these columns, do not have, and for a key that can't be compared.
    """
    what = f"dataset {dataset.name!r} (input {dataset.input})"
    argument = "extractor"  # that the next check is about, for its error
    try:
        if dataset.extractor is not None:
            entries = dataset.extractor.schema(records, what)
        else:
            entries = records
        argument = "columns"
        _check_known(what, _plain_names(dataset, dataset.columns.names or ()), entries.names)
        argument = "key"
        _check_known(what, _plain_names(dataset, dataset.key), entries.names)
        argument = "paths"
        stored = select_stored_columns(dataset, entries, what)
        argument = "key"
        check_key_types(stored, dataset.key, what)
        argument = "history_columns"
        _check_known(what, dataset.history_columns or (), stored.names)
        argument = "sensitive"
        for name in dataset.sensitive:
            if records.column_of(name) is None and stored.column_of(name) is None:
                _check_known(what, [name], (*records.names, *stored.names))
    except SchemaMismatchError as error:
        raise ConfigurationError(
            error.problem,
            error.next_step,
            argument=argument,
            dataset=dataset.name,
            column=error.column,
        ) from error


def _plain_names(dataset: AdjunctDataset, names: Sequence[str]) -> list[str]:
    """Return those of these stored columns that are columns of the input under their own names."""
    return [name for name in names if dataset.steps_to(name) == (name,)]


def select_stored_columns(dataset: AdjunctDataset, entries: Schema, what: str) -> Schema:
    """Return the columns that a dataset stores of entries with these columns.

    Raises SchemaMismatchError for a missing column, a path that leads to no simple value, and a
    path whose name a column has already.
    """
    path_fields = {}
    for column in dataset.columns.paths:
        path_fields[column.name] = _field_of_path(column, entries, what)
    if dataset.columns.names is not None:
        fields = []
        for name in dataset.columns.names:
            if name in path_fields:
                fields.append(path_fields[name])
            else:
                fields.append(entries.field(name, what))
        return Schema(tuple(fields))
    by_lower_name = {name.lower(): name for name in entries.names}
    for column in dataset.columns.paths:
        if column.name.lower() in by_lower_name:
            raise SchemaMismatchError(
                f"{what}: {write_path(column.steps)!r} is stored as {column.name!r}, and there is"
                f" a column {by_lower_name[column.name.lower()]!r} already.",
                f"{_other_name_step(column)} Or leave that column out with columns=.",
                column=column.name,
                dataset=dataset.name,
            )
    return Schema((*path_fields.values(), *entries.fields))


def _field_of_path(column: NamedPath, entries: Schema, what: str) -> Field:
    """Return the stored column that a path becomes. Raises SchemaMismatchError if the path leads to
    no simple value, or a column has the path's text as its name.
    """
    text = ".".join(column.steps)
    if len(column.steps) > 1 and text in entries:
        raise SchemaMismatchError(
            f"{what}: {text!r} is read as a path, and there is a column of this name.",
            f"Write its name in backticks, {write_name(text)!r}, or rename it.",
            column=text,
        )
    path = require_value(write_path(column.steps), entries.types, what)
    return Field(column.name, path.type, entries.field(path.column).sensitive)


def _check_known(what: str, columns: Sequence[str], known: Sequence[str]) -> None:
    """Raise SchemaMismatchError for a column that is not known."""
    for column in columns:
        if column not in known:
            problem = f"{what} has no column {column!r}: it has {', '.join(dict.fromkeys(known))}."
            step = f"{did_you_mean(column, known)}Correct the name."
            raise SchemaMismatchError(problem, step, column=column)


def _name_problems(
    argument: str, columns: tuple[str, ...], paths: tuple[NamedPath, ...] = ()
) -> Iterator[ArgumentProblem]:
    """Yield what is wrong with the names in this argument, as `_problems` does; `paths` are the
    columns that are made of paths.
    """
    for column in columns:
        if not column or column.startswith("__"):
            problem = (
                f"names {column!r} in {argument}: expected a column name that does not begin with"
                " '__'"
            )
            yield ArgumentProblem(argument, problem, "Rename the column.")
    repeated = repeated_names(map(str.lower, columns))
    other_names = {path.name: _other_name_step(path) for path in paths}
    for column in columns:
        if column.lower() in repeated:
            step = other_names.get(column, "Name it once.")
            yield ArgumentProblem(argument, f"names column {column!r} twice in {argument}", step)


@validated
def bounded_dataset(  # noqa: PLR0913
    name: str,
    *,
    input: Delivered,
    key: str | Sequence[str],
    partitions: int | None = None,
    partition_by: str | Sequence[str] | None = None,
    broadcast: bool = False,
    bootstrap: bool = True,
    columns: Sequence[str] | None = None,
    renamed: Mapping[str, str] | None = None,
    drop: str | Sequence[str] = (),
    extractor: KeyValueExtractor | None = None,
    duplicates: Literal["last", "error"] = "last",
    validators: Sequence[Validator] = (),
    versions: VersionPartitions | None = None,
    discard: DiscardPolicy | None = None,
    on_damage: Literal["fail", "previous"] = "fail",
    valid_from: str | None = None,
    valid_for: timedelta | None = None,
    history_columns: Sequence[str] | None = None,
    **shown: Unpack[DescriptionOptions],
) -> BoundedDataset:
    """Return a dataset that arrives in versions: on a stream ("lake.planes"), as files, or from a
    query.

    By default, `discard` retains the newest three versions, or all that are partitions in Dagster
    or valid over time. `valid_from` says what determines since when a version is valid: "name" (its
    name is a date or time), "marker" (its end-of-dataset markers), or a pattern of its name such as
    "%Y-%m-%d". For joins that wait, the newest version is complete for `valid_for` after that. With
    `history_columns` an interval of a key lasts until one of these columns changes or the entry
    disappears; other columns have the values that they have at its end. Give exactly one of
    `partitions` and `broadcast=True`. `partition_by` is the whole key by default.
    See AdjunctDataset for the other arguments.
    """
    named = _name_columns(name, input, key, columns)
    spread = bucket_columns(name, named.key, partitions, partition_by, broadcast)
    if discard is None:
        # Partitions in Dagster and versions over time stay by default: a month's backfill must not
        # be discarded.
        if versions is not None or valid_from is not None:
            discard = DiscardPolicy(keep=None)
        else:
            discard = DiscardPolicy()
    if history_columns is not None:
        history_columns = to_name_tuple(history_columns)
    return BoundedDataset(
        name=name,
        input=input,
        key=named.key_names,
        partition_by=spread,
        partitions=partitions,
        bootstrap=bootstrap,
        columns=named.stored,
        evolution=ColumnChanges(renamed or {}, to_name_tuple(drop)),
        extractor=extractor,
        duplicates=duplicates,
        validators=tuple(validators),
        versions=versions,
        discard=discard,
        on_damage=on_damage,
        valid_from=valid_from,
        valid_for=valid_for,
        history_columns=history_columns,
        presentation=_presentation(shown),
    )


@validated
def unbounded_dataset(  # noqa: PLR0913
    name: str,
    *,
    input: str,
    key: str | Sequence[str],
    partitions: int | None = None,
    partition_by: str | Sequence[str] | None = None,
    broadcast: bool = False,
    bootstrap: bool = True,
    columns: Sequence[str] | None = None,
    renamed: Mapping[str, str] | None = None,
    drop: str | Sequence[str] = (),
    extractor: KeyValueExtractor | None = None,
    changes: ChangeFormat | None = None,
    order_by: str | Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    keep_tombstones: int | None = None,
    on_bad_change: Literal["fail"] | DeadLetters = "fail",
    initial: InitialLoad | None = None,
    max_age: timedelta | None = None,
    on_lost_offset: OnLostOffset = "rebuild",
    compaction: DeltaCompaction | None = None,
    persistent: bool = True,
    chunk: int | None = None,
    freshness: timedelta | None = None,
    history: History | None = None,
    valid_from: str | None = None,
    history_columns: Sequence[str] | None = None,
    watermark: Watermark | None = None,
    validators: Sequence[Validator] = (),
    discard: DiscardPolicy | None = None,
    **shown: Unpack[DescriptionOptions],
) -> UnboundedDataset:
    """Return a dataset that follows the change stream `input`: the last change of a key wins.

    Give exactly one of `partitions` and `broadcast=True`. `partition_by` is the whole key by
    default. For the format of changes and the recovery of the table see `ChangeStreamOptions`.
    `discard` says how long earlier commits can be read (its grace period, and at least the newest
    `keep` commits). If several writers each own columns, `order_by` maps an ordering column of each
    to its other columns (see `ChangeStreamOptions.groups`). With `history` the table keeps the
    entries of each key over time, each valid from the time in its column `valid_from`, or from its
    record's time; for `history_columns` see `bounded_dataset`. `watermark` says up to when its
    changes are taken as complete, for joins that wait. `validators` are rules of each row: a change
    that does not meet one can't be applied, as `on_bad_change` says.
    """
    named = _name_columns(name, input, key, columns)
    spread = bucket_columns(name, named.key, partitions, partition_by, broadcast)
    groups = []
    if isinstance(order_by, Mapping):
        for order, ordered in order_by.items():
            groups.append((order, to_name_tuple(ordered)))
        order_by = tuple(order_by)
    if history_columns is not None:
        history_columns = to_name_tuple(history_columns)
    if chunk is None:
        chunk = CHUNK_RECORDS
    try:
        following = ChangeStreamOptions(
            changes=changes or Upserts(),
            order_by=order_by,  # type: ignore[arg-type]  # becomes a tuple when it is checked
            groups=tuple(groups),
            keep_tombstones=keep_tombstones,
            on_bad_change=on_bad_change,
            initial=initial,
            max_age=max_age,
            on_lost_offset=on_lost_offset,
            compaction=compaction or DeltaCompaction(),
            persistent=persistent,
            history=declare_history(history, valid_from, history_columns, watermark),
            chunk=chunk,
        )
        presentation = _presentation(shown, freshness)
    except ConfigurationError as error:
        raise error.reworded(
            f"dataset {name!r}: {error.problem}", error.next_step, dataset=name
        ) from error
    return UnboundedDataset(
        name=name,
        input=input,
        key=named.key_names,
        partition_by=spread,
        partitions=partitions,
        bootstrap=bootstrap,
        columns=named.stored,
        evolution=ColumnChanges(renamed or {}, to_name_tuple(drop)),
        extractor=extractor,
        discard=discard or DiscardPolicy(),
        following=following,
        validators=list_row_validators(name, validators),
        presentation=presentation,
    )


@validated
def version_set(name: str, *members: AdjunctDataset) -> tuple[BoundedDataset, ...]:
    """Return these bounded datasets as members of one version set: they switch, pin and roll back
    in one commit.

    A version of the set is published when every member has delivered a version of the same name.
    """
    check_name("version set", name)
    names = [member.name for member in members]
    is_repeated = len(set(names)) < len(names)
    if len(names) < 2 or is_repeated:
        raise ConfigurationError(
            f"version set {name!r} has the members {', '.join(names) or 'none'}: expected two or"
            " more different ones.",
            "Name the datasets that switch together.",
            argument="members",
        )
    joined = []
    for member in members:
        if not _is_named_by_producer(member):
            raise ConfigurationError(
                f"version set {name!r} has the member {member.name!r}, whose versions are not named"
                " by a producer.",
                "Only bounded datasets from a stream, from files or from tags, without version"
                " partitions, can be members.",
                argument="members",
                dataset=member.name,
            )
        joined.append(replace(member, version_set=name))
    return tuple(joined)


def _is_named_by_producer(dataset: AdjunctDataset) -> TypeGuard[BoundedDataset]:
    """Whether it has versions that a producer names, on a stream, in files or by tags."""
    if not isinstance(dataset, BoundedDataset) or isinstance(dataset.input, QuerySource):
        return False
    return dataset.versions is None and not _names_states(dataset.input)


def _names_states(source: Input) -> bool:
    """Whether versions are states of a table, named by their ids."""
    return isinstance(source, IcebergVersions | DeltaVersions) and source.tags is None


class LocalTableOptions(DescriptionOptions, total=False):
    """The options that a local table has in common with every unbounded dataset."""

    compaction: DeltaCompaction
    discard: DiscardPolicy
    renamed: Mapping[str, str]
    drop: str | Collection[str]


def local_table(
    name: str,
    owned: OwnedBy,
    *,
    key: str | Sequence[str],
    partitions: int,
    partition_by: str | Sequence[str] | None = None,
    **options: Unpack[LocalTableOptions],
) -> LocalTable:
    """Return the local table `name` of an application; see `Application.local_table`.

    Raises ConfigurationError for a key that can't be compared.
    """
    named = _name_columns(name, owned, key, None)
    return LocalTable(
        name=name,
        input=owned,
        key=named.key_names,
        partition_by=bucket_columns(name, named.key, partitions, partition_by or None, False),
        partitions=partitions,
        columns=named.stored,
        evolution=ColumnChanges(options.get("renamed", {}), to_name_tuple(options.get("drop", ()))),
        discard=options.get("discard", DiscardPolicy()),
        compaction=options.get("compaction", DeltaCompaction()),
        presentation=_presentation(options),
    )
