"""The policies of a dataset: retention, partitions in Dagster, how it follows a change stream,
validators, and since when versions are valid."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable
from zoneinfo import ZoneInfo

from dagster_adjunct.assets.declaration.change_formats import ChangeFormat, Upserts
from dagster_adjunct.assets.declaration.change_values import STREAMED_FIRST, Order, describe_order
from dagster_adjunct.assets.declaration.snapshots import InitialLoad
from dagster_adjunct.resources.arguments import argument_error, check_zone
from dagster_adjunct.resources.errors import ConfigurationError, MarkerConflictError
from dagster_adjunct.resources.names import check_name, split_stream_name
from dagster_adjunct.resources.schemas.paths import WHERE_COLUMNS_ARE_MADE
from dagster_adjunct.resources.schemas.schema import Schema, repeated_names
from dagster_adjunct.resources.times import describe_span, fits_utc
from dagster_adjunct.resources.validation import validated


class ArgumentProblem(NamedTuple):
    """What is wrong with an argument: the words of the ConfigurationError."""

    argument: str
    problem: str
    next_step: str = ""


@validated
@dataclass(frozen=True, slots=True)
class DiscardPolicy:
    """Which versions are retained: the newest `keep` sealed ones (None: all), and those that are
    still needed.

    Needed are versions that are served, pinned or leased, and unless `keep` is 1 the one that would
    be served if the current one were revoked; and the one from which a reader of the dataset's
    changes has to go on, until `followed` after it was replaced. Of several builds of one version
    partition only the newest is kept. Nothing younger than `grace` is deleted, by the store's
    clock: neither versions, rejected and revoked ones included, nor leftovers of failed attempts.
    """

    keep: int | None = 3
    grace: timedelta = timedelta(hours=24)
    followed: timedelta = timedelta(days=7)

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise argument_error(
                f"a discard policy has keep={self.keep}", "1 or more versions", argument="keep"
            )
        for argument in ("grace", "followed"):
            span = getattr(self, argument)
            if span < timedelta(0):
                raise argument_error(
                    f"a discard policy has {argument}={describe_span(span)}",
                    "a timedelta that is not negative",
                    argument=argument,
                )


@validated
@dataclass(frozen=True, slots=True)
class VersionPartitions:
    """Versions as partitions in Dagster: one per day, week or month since `start` ("2026-01-01"),
    or one per name in `names`.

    A period has the name of its first day, a week that of its Monday. Days begin at midnight in
    `timezone`, an IANA name such as "Pacific/Auckland" (default: UTC), and have 23 or 25 hours
    there when the clock changes. With neither, partitions are dynamic: names are added as versions
    arrive. A version has the name of its partition. Versions are ordered by name, with numbers in
    it by value, so building an older one does not make it current. A version that is delivered
    under another name is reported and left out.
    """

    by: Literal["day", "week", "month", "name"] = "name"
    start: str | None = None
    names: tuple[str, ...] = ()
    timezone: str | None = None

    def __post_init__(self) -> None:
        if self.by_time and self.names:
            raise ConfigurationError(
                f"version partitions by {self.by} have names={self.names!r}: their names are days.",
                f"Leave names out, or leave {self.by} and start out.",
                argument="names",
            )
        for name in self.names:
            if not _is_usable(name):
                raise argument_error(
                    f"version partitions have the name {name!r}",
                    f"no name that is empty or contains {_UNUSABLE_PARTS[0]!r} or a control"
                    " character, as in Dagster",
                    argument="names",
                )
        if self.timezone is not None:
            if not self.by_time:
                raise ConfigurationError(
                    f"version partitions by name have timezone={self.timezone!r}: only days begin"
                    " in a zone.",
                    "Leave timezone out.",
                    argument="timezone",
                )
            check_zone("version partitions have timezone", self.timezone, argument="timezone")
        if self.by_time != (self.start is not None):
            raise ConfigurationError(
                f"version partitions by {self.by} have start={self.start!r}.",
                'Write VersionPartitions("day", start="2026-01-01"), or leave start out.',
                argument="start",
            )
        if self.start is not None and not self._is_first_day(self.start):
            expected = {"week": "a Monday, such as 2026-01-05", "month": "the first of a month"}
            raise ConfigurationError(
                f"version partitions by {self.by} have start={self.start!r}: expected"
                f" {expected.get(self.by, 'a date such as 2026-01-01')}.",
                argument="start",
            )

    @property
    def by_time(self) -> bool:
        """Whether partitions are periods of time."""
        return self.by != "name"

    def _is_first_day(self, name: str) -> bool:
        """Whether this is the name of a period: the first day of one."""
        if not _is_day(name):
            return False
        day = date.fromisoformat(name)
        if self.by == "week":
            return day.weekday() == 0
        return self.by == "day" or day.day == 1

    def has(self, name: str) -> bool:
        """Whether this is the name of a partition; if partitions are dynamic, any is that
        Dagster accepts.
        """
        if self.start is not None:
            return self._is_first_day(name) and name >= self.start
        if self.names:
            return name in self.names
        return _is_usable(name)

    @property
    def zone(self) -> tzinfo:
        """The zone in which days begin."""
        if self.timezone is None:
            return UTC
        return ZoneInfo(self.timezone)

    def describe_outside(self, name: str) -> str:
        """Return why a delivered version of this name, which `has` rejects, is no partition, and
        what makes it one.
        """
        left_out = f"version {name!r} is delivered and left out, because it is no partition: "
        if self.start is not None:
            is_earlier = self._is_first_day(name) and name < self.start
            if is_earlier:
                return (
                    f"{left_out}the first {self.by} is {self.start}. To build it, declare an"
                    " earlier start"
                )
            named = {"week": ", named by their Mondays", "month": ", named by their first days"}
            return (
                f"{left_out}partitions are the {self.by}s since {self.start}"
                f"{named.get(self.by, '')}, such as {self.start}"
            )
        if self.names:
            return f"{left_out}{len(self.names)} names are declared. To build it, add it to names"
        return f"{left_out}Dagster's partitions can't have such a name"


# Dagster rejects partitions whose names contain one of these.
_UNUSABLE_PARTS = ("...", *"\a\b\f\n\r\t\v\0")


def _is_usable(name: str) -> bool:
    """Whether a partition in Dagster can have this name."""
    return bool(name) and not any(part in name for part in _UNUSABLE_PARTS)


def _is_day(text: str) -> bool:
    """Whether this is a date as partitions are named, such as 2026-01-31."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def natural_sort_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that orders version names naturally: v2 before v10, 2026-01-31 before
    2026-02-01.
    """
    parts = []
    for text in re.findall(r"[0-9]+|[^0-9]+", name):
        if text[0] in "0123456789":
            parts.append((0, int(text), text))  # numbers come before other texts
        else:
            parts.append((1, 0, text))
    return tuple(parts)


History = timedelta | Literal["all"]
OnLostOffset = Literal["rebuild", "fail", "serve_stale"]
CHUNK_RECORDS = 20_000_000


def check_positive(argument: str, span: object) -> None:
    """Raise ConfigurationError for a timedelta that is not positive; other values pass."""
    if isinstance(span, timedelta) and span <= timedelta(0):
        raise ConfigurationError(
            f"{argument} is {describe_span(span)}: expected a positive timedelta.",
            "Write, for example, timedelta(days=7).",
            argument=argument,
        )


@validated
@dataclass(frozen=True, slots=True)
class DeltaCompaction:
    """When the deltas of an unbounded dataset are compacted.

    Minor compaction merges the newest deltas into one as soon as there are `deltas` of them. Major
    compaction merges all into a new base, because readers broadcast the keys in deltas, as soon as
    the deltas hold more than `rows` rows, or more than `fraction` of the base's rows and either
    50,000 rows or `deltas` deltas. `inside_commit=True` compacts within the advance that made it
    due; otherwise a schedule does (`<app>_compact` in Dagster, adjunct dataset compact).
    """

    deltas: int = 8
    fraction: float = 0.2
    rows: int = 2_000_000
    inside_commit: bool = True

    def __post_init__(self) -> None:
        invalid = {}
        if self.deltas < 2:
            invalid["deltas"] = "2 or more"
        if not self.fraction > 0:  # also if it is NaN
            invalid["fraction"] = "more than 0, such as 0.2"
        if self.rows < 1:
            invalid["rows"] = "1 or more"
        for name, expected in invalid.items():
            found = f"a compaction policy has {name}={getattr(self, name)}"
            raise argument_error(found, expected, argument=name)


@validated
@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Sends changes that can't be applied to this stream ("lake.weather-dead"), with the reason,
    and counts them.
    """

    stream: str

    def __post_init__(self) -> None:
        split_stream_name(self.stream)


@validated
@dataclass(frozen=True, slots=True)
class Watermark:
    """Up to when a change stream is taken as complete, for joins that wait (`wait=`).

    The watermark of a partition is the newest time of its changes so far minus `delay`, and that of
    the dataset the lowest of all partitions. A partition that has sent nothing for `idle_after`, by
    the clock of the advances, is taken as complete up to `idle_after` before the last advance that
    found it so; with None it holds the watermark back until its next change. Times later than the
    clock count as the clock's.
    """

    delay: timedelta = timedelta(0)
    idle_after: timedelta | None = None

    def __post_init__(self) -> None:
        if self.delay < timedelta(0):
            raise argument_error(
                f"a watermark has delay={describe_span(self.delay)}",
                "timedelta(0) or more",
                argument="delay",
            )
        check_positive("idle_after", self.idle_after)


@dataclass(frozen=True, slots=True)
class TableHistory:
    """How a table keeps the entries of each key over time.

    - `keep`: how long, or "all"
    - `valid_from`: the column (timestamp or date) that says since when an entry is valid; None for
      the record's time
    - `columns`: the columns whose changes begin an interval of the history; None for all
    - `watermark`: up to when the changes are taken as complete, for joins that wait; None if no
      join can wait
    """

    keep: History
    valid_from: str | None = None
    columns: tuple[str, ...] | None = None
    watermark: Watermark | None = None

    def __post_init__(self) -> None:
        check_positive("history", self.keep)
        name = self.valid_from
        if name is not None and (not name or name.startswith("__")):
            raise ConfigurationError(
                f"valid_from is {name!r}: expected the name of a column.",
                "Leave it out to use the record's time.",
                argument="valid_from",
            )


def declare_history(
    history: History | None,
    valid_from: str | None,
    history_columns: tuple[str, ...] | None,
    watermark: Watermark | None,
) -> TableHistory | None:
    """Return the history that these arguments of `unbounded_dataset` declare, None without one.

    Raises ConfigurationError for an argument that needs one.
    """
    if history is not None:
        return TableHistory(history, valid_from, history_columns, watermark)
    without_effect = {
        "valid_from": valid_from,
        "history_columns": history_columns,
        "watermark": watermark,
    }
    for argument, value in without_effect.items():
        if value is not None:
            raise ConfigurationError(
                f"{argument} has no effect without a history.",
                f'Declare history=timedelta(…) or "all", or remove {argument}.',
                argument=argument,
            )
    return None


ColumnGroups = tuple[tuple[str, tuple[str, ...]], ...]
"""Ordering columns, each with the other columns of its group."""


@dataclass(frozen=True, slots=True)
class ChangeStreamOptions:
    """How a change stream becomes a table.

    - `changes`: the format of the records
    - `order_by`: the column whose highest value wins, or several, of which the first that differs
      decides; None for the offset
    - `groups`: for each column in `order_by` the other columns that changes set in its order; where
      it is null, a change leaves them all out, and a deletion does not delete them. A group of
      which no column is stored belongs to others: its changes are passed over. () if one order is
      that of whole rows
    - `keep_tombstones`: how far below the newest value of `order_by` deletions are remembered, in
      its own unit (microseconds for a timestamp, days for a date); None for ever. Without
      `order_by`, in offsets, and only for formats whose snapshot rows never replace streamed
      changes
    - `on_bad_change`: what happens to changes that can't be applied (they can't be read, have no
      key, come too late, …)
    - `initial`: a bulk snapshot to start from
    - `max_age`: how long a table stays valid after it was last confirmed to be caught up
    - `on_lost_offset`: what happens if the stream no longer has the next offset
    - `persistent`: False keeps the table for one run only
    - `chunk`: the most records that one commit includes
    - `history`: how the entries of each key are kept over time; None keeps the newest only
    """

    changes: ChangeFormat = field(default_factory=Upserts)
    order_by: Order | None = None
    groups: ColumnGroups = ()
    keep_tombstones: int | None = None
    on_bad_change: Literal["fail"] | DeadLetters = "fail"
    initial: InitialLoad | None = None
    max_age: timedelta | None = None
    on_lost_offset: OnLostOffset = "rebuild"
    compaction: DeltaCompaction = field(default_factory=DeltaCompaction)
    persistent: bool = True
    chunk: int = CHUNK_RECORDS
    history: TableHistory | None = None

    def __post_init__(self) -> None:
        if self.order_by is not None:
            self._set_order(self.order_by)
        check_positive("max_age", self.max_age)
        wrong = next(self._problems(), None)
        if wrong is not None:
            raise ConfigurationError(wrong.problem, wrong.next_step, argument=wrong.argument)

    def _problems(self) -> Iterator[ArgumentProblem]:
        """Yield what is wrong with the options."""
        if self.keep_tombstones is not None:
            yield from self._tombstone_problems(self.keep_tombstones)
        if self.chunk < 1:
            yield ArgumentProblem("chunk", f"chunk is {self.chunk}: expected 1 or more records.")
        if self.groups:
            yield from self._group_problems()
        if not self.persistent:
            yield from self._storage_problems()

    def _tombstone_problems(self, distance: int) -> Iterator[ArgumentProblem]:
        """Yield why deletions can't be remembered for this `distance`, if they can't."""
        argument = "keep_tombstones"
        found = f"{argument} is {distance!r} in the order of {describe_order(self.order_by)}"
        if self.order is None or distance < 0:
            problem = (
                f"{found}: expected a distance, 0 or more, in the unit of the ordering column."
            )
            step = (
                "Leave it out: by offset, deletions are only needed until the next major"
                " compaction."
            )
            yield ArgumentProblem(argument, problem, step)
        if len(self.ordering) > 1:
            problem = f"{found}: there is no distance between values of several columns."
            step = (
                "Leave it out, so that deletions are remembered for ever, or order by one number."
            )
            yield ArgumentProblem(argument, problem, step)
        if self.history is not None:
            problem = (
                f"{argument} is {distance!r}, but history already says how long deletions are"
                " remembered."
            )
            yield ArgumentProblem(argument, problem, f"Remove {argument}.")

    def _group_problems(self) -> Iterator[ArgumentProblem]:
        """Yield what can't be done where groups of columns have orders of their own."""
        named = []
        for order, columns in self.groups:
            named += [order, *columns]
        for name in repeated_names(named):
            problem = f"order_by has the column {name!r} in two of its groups."
            yield ArgumentProblem(
                "order_by", problem, "Name each column once. An ordering column is in its group."
            )
        reasons = {
            "history": "a history has one order",
            "keep_tombstones": "there is no distance between several",
            "initial": "rows of a snapshot have no place in them",
        }
        for argument, why in reasons.items():
            if getattr(self, argument) is not None:
                problem = f"{argument} is declared, and order_by orders groups of columns: {why}."
                yield ArgumentProblem(
                    argument, problem, f"Remove {argument}, or order whole rows by one column."
                )
        if self.completes:
            problem = (
                "order_by orders groups of columns, and changes"
                f" ({self.changes.describe()}) may leave out single ones of a group."
            )
            step = (
                "Let changes have all columns of a group, or none: a null in its ordering column."
            )
            yield ArgumentProblem("order_by", problem, step)

    def _storage_problems(self) -> Iterator[ArgumentProblem]:
        """Yield the given options that need a stored table, which persistent=False rules out."""
        impossible = {}
        if self.initial is not None:
            impossible["initial"] = "have an initial snapshot."
        if self.on_bad_change != "fail":
            why = "have dead letters: each run would send the same changes again."
            impossible["on_bad_change"] = why
        if self.on_lost_offset == "serve_stale":
            impossible["on_lost_offset"] = 'have on_lost_offset="serve_stale": nothing is stored.'
        if self.history is not None:
            impossible["history"] = "keep a history, which would start again in each run."
        for argument, what in impossible.items():
            problem = f"a table with persistent=False can't {what}"
            yield ArgumentProblem(argument, problem, "Declare persistent=True, or leave it out.")

    @property
    def completes(self) -> bool:
        """Whether changes may leave out columns, which then keep their stored values."""
        return bool(getattr(self.changes, "completes", False))

    @property
    def reads_rows(self) -> bool:
        """Whether changes are completed from stored rows."""
        return self.completes or bool(self.groups)

    @property
    def merges_columns(self) -> bool:
        """Whether each column of a row may be set by a change of its own, in any order: offsets do
        not say which changes come before others.
        """
        if self.groups:
            return True
        orders_rows = self.order_by is not None or self.history is not None
        return self.completes and orders_rows

    @property
    def ordering(self) -> Order:
        """The names in `order_by`, () without it."""
        return self.order_by or ()

    @property
    def placing(self) -> tuple[str, ...]:
        """The columns, or paths, that order the changes or say since when they are valid."""
        names = self.ordering
        if self.history is not None and self.history.valid_from is not None:
            names = (*names, self.history.valid_from)
        return tuple(dict.fromkeys(names))

    @property
    def watermark(self) -> Watermark | None:
        """Up to when the changes are taken as complete; None if no join can wait."""
        if self.history is None:
            return None
        return self.history.watermark

    @property
    def order(self) -> Order | None:
        """The names of what positions are made of: `order_by`, or STREAMED_FIRST for formats that
        mark snapshot rows.

        None if a position is just the offset, so that a later change of the stream is always newer.
        """
        if self.order_by is None and getattr(self.changes, "marks_snapshots", False):
            return STREAMED_FIRST
        return self.order_by

    def _set_order(self, given: str | Sequence[str]) -> None:
        """Store `order_by` as a tuple of names. Raises ConfigurationError for one that orders
        nothing.
        """
        names = (given,) if isinstance(given, str) else tuple(given)
        is_repeated = len(set(names)) < len(names)
        if not names or "" in names or is_repeated:
            raise ConfigurationError(
                f"order_by is {given!r}: expected the name of a column, or several different ones.",
                "Leave it out to order by offset.",
                argument="order_by",
            )
        for name in names:
            if "[" in name:
                raise ConfigurationError(
                    f"order_by names {name!r}: expected a column, or a path through structs.",
                    f"Make the value a column of its own: {WHERE_COLUMNS_ARE_MADE}; or leave"
                    " order_by out to order by offset.",
                    argument="order_by",
                )
            check_name("ordering column", name.replace(".", "_").replace("`", "_"))
        object.__setattr__(self, "order_by", names)


Severity = Literal["error", "warn"]
VALIDATOR_NAME = re.compile(r"[A-Za-z0-9_]{1,200}")


@validated
@runtime_checkable
class Validator(Protocol):
    """Decides whether a candidate version may be published. A frozen value, whose `name` is
    unique in a dataset.
    """

    @property
    def name(self) -> str: ...

    @property
    def severity(self) -> Severity: ...

    def __call__(self, candidate: Any, /) -> Any:
        """Return the Verdict on a Candidate."""
        ...


@runtime_checkable
class RowValidator(Validator, Protocol):
    """A validator that may check each row by itself, so that it works for changes, too."""

    @property
    def checks_rows(self) -> bool:
        """Whether each row meets the rule by itself or does not, whatever the others are."""
        ...

    def row_condition(self, dataset: str, columns: Schema) -> str:
        """Return the rule as a condition, in Spark SQL, of rows with these columns. Raises
        PlanningError for a mistake in it.
        """
        ...


def list_row_validators(dataset: str, validators: Sequence[Validator]) -> tuple[RowValidator, ...]:
    """Return the validators of an unbounded dataset. Raises ConfigurationError for one that needs a
    whole version, which changes never are.
    """
    checking = []
    for validator in validators:
        if not isinstance(validator, RowValidator) or not validator.checks_rows:
            raise ConfigurationError(
                f"dataset {dataset!r} has the validator {validator.name!r}, which checks a whole"
                " version: an unbounded dataset gets changes, which are checked one by one.",
                "Use no_nulls(…), values_in(…) or sql_check(NAME, CONDITION), or remove it. Null"
                " keys are bad changes by themselves.",
                argument="validators",
                dataset=dataset,
            )
        checking.append(validator)
    return tuple(checking)


def check_validators(what: str, validators: Sequence[Validator]) -> None:
    """Raise ConfigurationError for names that are not unique, or not 1 to 200 letters, digits
    and underscores.
    """
    for validator in validators:
        if not VALIDATOR_NAME.fullmatch(validator.name):
            raise ConfigurationError(
                f"{what} has a validator named {validator.name!r}: expected letters, digits and"
                " underscores.",
                "Rename the validator.",
                argument="validators",
            )
    twice = repeated_names(validator.name for validator in validators)
    if twice:
        raise ConfigurationError(
            f"{what} has two validators named {twice[0]!r}.",
            "Remove one, or give one another name with custom(NAME, …).",
            argument="validators",
        )


NAME = "name"
MARKER = "marker"
_EXAMPLE = datetime(2026, 11, 30, 12, 30, 15, tzinfo=UTC)


def check_valid_from(dataset: str, valid_from: str) -> None:
    """Raise ConfigurationError unless `valid_from` is "name", "marker" or a strptime pattern
    that has the year.
    """
    if valid_from in (NAME, MARKER):
        return
    try:
        if "%" in valid_from:
            # Names in this pattern must have the year, and parse to what they say.
            example = _EXAMPLE.strftime(valid_from)
            parsed = datetime.strptime(example, valid_from)
            # strptime ignores a week without its day.
            if parsed.year == _EXAMPLE.year and parsed.strftime(valid_from) == example:
                return
    except ValueError:
        pass
    raise ConfigurationError(
        f'dataset {dataset!r} has valid_from={valid_from!r}: expected "name", "marker", or a'
        " pattern of dates with their year.",
        'Write a pattern as strptime reads it, such as "%Y-%m-%d", or "date=%Y-%m-%d" for folders.',
        argument="valid_from",
        dataset=dataset,
    )


def parse_valid_from(
    dataset: str, valid_from: str, version: str, marked: Collection[datetime], zone: tzinfo = UTC
) -> datetime:
    """Return since when a version is valid, according to its name or its markers; names without a
    zone are in `zone`.

    Raises MarkerConflictError, which rejects the version, if the name has no time, the markers have
    none or several, or the time is outside the years 1 to 9999 of UTC.
    """
    if valid_from == MARKER:
        return _require_marked_time(dataset, version, sorted(set(marked)))
    return _parse_named_time(dataset, version, valid_from, zone)


def _require_marked_time(dataset: str, version: str, times: Sequence[datetime]) -> datetime:
    """Return the only one of the different times of a version's markers. Raises
    MarkerConflictError.
    """
    if len(times) == 1 and fits_utc(times[0]):
        return times[0]
    listed = ", ".join(f"{time:%Y-%m-%d %H:%M:%S %Z}" for time in times)
    if not times:
        problem = "no marker has a time"
    elif len(times) == 1:
        problem = f"its markers have a time outside the years 1 to 9999 of UTC ({listed})"
    else:
        problem = f"its markers have different times ({listed})"
    raise MarkerConflictError(
        f"dataset {dataset!r}, version {version!r}: {problem} since when it is valid: expected one,"
        ' because valid_from is "marker".',
        "Deliver it under a new name, with one time: append_markers(…, valid_from=…), or"
        ' "valid_from" in the completion object.',
        dataset=dataset,
        version=version,
    )


def _parse_named_time(dataset: str, version: str, valid_from: str, zone: tzinfo) -> datetime:
    """Return the time in a version's name. Raises MarkerConflictError."""
    try:
        if valid_from == NAME:
            named = datetime.fromisoformat(version)
        else:
            named = datetime.strptime(version, valid_from)
        if named.tzinfo is None:
            named = named.replace(tzinfo=zone)
        return named.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        if valid_from == NAME:
            expected = "a date or time such as 2026-01-31"
        else:
            expected = f"a name in the form {valid_from!r}"
        raise MarkerConflictError(
            f"dataset {dataset!r}, version {version!r}: its name does not say since when it is"
            f" valid: expected {expected}.",
            "Deliver it under such a name, or change valid_from=….",
            dataset=dataset,
            version=version,
        ) from error
