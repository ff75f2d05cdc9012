"""How an unbounded dataset follows its change stream: what is declared beside its key and columns."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from dagster_adjunct.assets.declaration.change_formats import ChangeFormat, Upserts, distinguishes_snapshots
from dagster_adjunct.assets.declaration.change_values import STREAMED_FIRST, Order, describe_order
from dagster_adjunct.resources.common import check_name, check_whole_number, split_stream_name
from dagster_adjunct.resources.errors import ConfigurationError, MarkerConflictError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.snapshots import InitialLoad


@dataclass(frozen=True, slots=True)
class DiscardPolicy:
    """Which versions stay: the newest `keep` (None: all), what is served, pinned or leased, and nothing young.

    Nothing is deleted that is younger than `grace`, by the store's clock: versions, and what failed attempts
    left. Rejected and withdrawn versions go when they are older than `grace`.
    """

    keep: int | None = 3
    grace: timedelta = timedelta(hours=24)

    def __post_init__(self) -> None:
        if self.keep is not None:
            what = f"a discard policy keeps {self.keep!r} versions"
            check_whole_number(self.keep, what, "1 or more", argument="keep", next_step="Change keep=.")
        if not isinstance(self.grace, timedelta) or self.grace < timedelta(0):
            raise ConfigurationError(
                f"a discard policy has a grace period of {self.grace!r}: expected a timedelta that is not negative.",
                "Change grace=.",
                argument="grace",
            )


@dataclass(frozen=True, slots=True)
class VersionPartitions:
    """Versions as partitions in Dagster: one a day since `start` ("2026-01-01"), or one a name in `names`.

    With neither, names are added in Dagster as they come (dynamic). A version takes the name of its partition,
    and versions are ordered by name, numbers in it by value: an older one never becomes current by being built.
    """

    by: Literal["day", "name"] = "name"
    start: str | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.by == "day") != (self.start is not None):
            raise ConfigurationError(
                f"version partitions by {self.by} have start={self.start!r}.",
                'Write VersionPartitions("day", start="2026-01-01"), or leave start out.',
                argument="start",
            )
        if self.start is not None and not _is_day(self.start):
            raise ConfigurationError(
                f"version partitions by day have start={self.start!r}.",
                "Write a day such as 2026-01-01.",
                argument="start",
            )

    def has(self, name: str) -> bool:
        """Whether this is the name of one of the partitions; any name is, where they come as they come."""
        if self.start is not None:
            return _is_day(name) and name >= self.start
        return not self.names or name in self.names


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def natural_sort_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return what orders version names as people do: v2 before v10, 2026-01-31 before 2026-02-01."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((0, int(part), part) if part[0] in "0123456789" else (1, 0, part) for part in parts)


History = timedelta | Literal["all"]
OnLostOffset = Literal["rebuild", "fail", "serve_stale"]
_CHUNK_RECORDS = 20_000_000


@dataclass(frozen=True, slots=True)
class DeltaCompaction:
    """When the deltas of an unbounded dataset are compacted.

    Minor compaction merges deltas into one, as soon as there are `deltas` of them; major compaction merges all into a
    new base, as soon as the deltas hold more than `fraction` of the base's rows, or more than `rows` rows: readers
    broadcast the keys in deltas. Of small deltas only the number counts. `inside_commit=True` compacts inside the
    advance that made it due; else a schedule does (`<app>_compact` in Dagster, adjunct dataset compact).
    """

    deltas: int = 8
    fraction: float = 0.2
    rows: int = 2_000_000
    inside_commit: bool = True

    def __post_init__(self) -> None:
        what = f"a compaction policy has deltas={self.deltas!r}"
        check_whole_number(self.deltas, what, "2 or more", argument="deltas", least=2, next_step="8 is usual.")
        if not isinstance(self.fraction, int | float) or isinstance(self.fraction, bool) or not self.fraction > 0:
            raise ConfigurationError(
                f"a compaction policy has fraction={self.fraction!r}: expected more than 0.",
                "0.2 is a fifth.",
                argument="fraction",
            )
        check_whole_number(self.rows, f"a compaction policy has rows={self.rows!r}", "1 or more", argument="rows")
        if not isinstance(self.inside_commit, bool):
            raise ConfigurationError(
                f"a compaction policy has inside_commit={self.inside_commit!r}: expected True or False.",
                "Choose one.",
                argument="inside_commit",
            )


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Changes that can't be applied go to this stream ("lake.weather-dead"), with the reason, and are counted."""

    stream: str

    def __post_init__(self) -> None:
        split_stream_name(self.stream)


@dataclass(frozen=True, slots=True)
class ChangeStreamOptions:
    """How a change stream becomes a table.

    `changes` is the form of the records. `order_by` names the column whose highest value wins, or several, of which
    the first one that differs decides; None for the offset. `keep_tombstones` is how far below the newest value of
    `order_by` deletions are remembered, in its own unit (microseconds for a timestamp, days for a date), or in offsets
    where snapshots' rows never replace streamed changes; None for ever. `on_bad_change` says
    what becomes of changes that can't be read or have no key. `initial` is a bulk snapshot to begin with. `max_age`
    is how long a table stays valid since it was last confirmed caught up. `on_lost_offset` says what happens when
    the stream does not reach back to the next offset. `persistent=False` keeps the table for one run only. `chunk` is
    the most records that one commit takes in. `freshness` is what Dagster warns by. `history` keeps the entries of
    each key over time: for how long below the newest time, or "all"; None keeps the newest only. `valid_from` names the
    column (timestamp or date) that says since when an entry is valid, None for the record's time.
    """

    changes: ChangeFormat = field(default_factory=Upserts)
    order_by: Order | None = None
    keep_tombstones: int | None = None
    on_bad_change: Literal["fail"] | DeadLetters = "fail"
    initial: InitialLoad | None = None
    max_age: timedelta | None = None
    on_lost_offset: OnLostOffset = "rebuild"
    compaction: DeltaCompaction = field(default_factory=DeltaCompaction)
    persistent: bool = True
    chunk: int = _CHUNK_RECORDS
    freshness: timedelta | None = None
    history: History | None = None
    valid_from: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.on_bad_change != "fail" and not isinstance(self.on_bad_change, DeadLetters):
            raise ConfigurationError(
                f'on_bad_change is {self.on_bad_change!r}: expected "fail" or DeadLetters(STREAM).',
                "Choose one.",
                argument="on_bad_change",
            )
        if self.on_lost_offset not in ("rebuild", "fail", "serve_stale"):
            raise ConfigurationError(
                f"on_lost_offset is {self.on_lost_offset!r}: expected rebuild, fail or serve_stale.",
                "Choose one.",
                argument="on_lost_offset",
            )
        if self.keep_tombstones is not None and (self.order is None or self.keep_tombstones < 0):
            raise ConfigurationError(
                f"keep_tombstones is {self.keep_tombstones!r} in the order of {describe_order(self.order_by)}: it is a "
                "distance, 0 or more, in the unit of the ordering column.",
                "Leave it out: by offset, deletions are needed until the next major compaction only.",
                argument="keep_tombstones",
            )
        if self.keep_tombstones is not None and len(self.order_by or ()) > 1:
            raise ConfigurationError(
                f"keep_tombstones is {self.keep_tombstones!r} in the order of {describe_order(self.order_by)}: between "
                "values of several columns there is no distance.",
                "Leave it out, and deletions are remembered for ever, or order by one number.",
                argument="keep_tombstones",
            )
        for name in ("max_age", "freshness"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, timedelta) or value <= timedelta(0)):
                raise ConfigurationError(
                    f"{name} is {value!r}: expected a timedelta of more than nothing.",
                    "Write timedelta(days=7), say.",
                    argument=name,
                )
        check_whole_number(self.chunk, f"chunk is {self.chunk!r}", "1 or more records", argument="chunk")
        if not self.persistent and self.initial is not None:
            raise ConfigurationError(
                "a table of one run can't begin with a bulk snapshot.", "Drop one of the two.", argument="initial"
            )
        if not self.persistent and self.on_bad_change != "fail":
            raise ConfigurationError(
                "a table of one run can't have dead letters: each run would send those of the same changes again.",
                'Declare on_bad_change="fail", or persistent=True.',
                argument="on_bad_change",
            )
        if not self.persistent and self.on_lost_offset == "serve_stale":
            raise ConfigurationError(
                'a table of one run can\'t have on_lost_offset="serve_stale": nothing is stored that could be served.',
                "Declare rebuild or fail, or persistent=True.",
                argument="on_lost_offset",
            )

        self._check_history()
        self._check_completed()

    @property
    def completes(self) -> bool:
        """Whether changes may leave out columns, which keep what the dataset has."""
        return bool(getattr(self.changes, "completes", False))

    def _check_completed(self) -> None:
        """Refuse what can't be declared beside changes that leave out columns: these are in the order of offsets."""
        if not self.completes:
            return
        form = self.changes.describe()
        if self.order_by is not None:
            raise ConfigurationError(
                f"order_by is {self.order_by!r}, and changes ({form}) may leave out columns: these keep what the "
                "dataset has when the change is applied, which is in the order of offsets.",
                "Leave order_by out, or have the source send whole rows.",
                argument="order_by",
            )
        if self.history is not None:
            raise ConfigurationError(
                f"a history is kept, and changes ({form}) may leave out columns: a change that comes late would have "
                "to be completed from what was valid at its time, and so would all that follow it.",
                "Drop history, or have the source send whole rows.",
                argument="history",
            )

    def _check_history(self) -> None:
        """Refuse a history that is none, and what can't be declared beside one."""
        history, column = self.history, self.valid_from
        if history is not None and history != "all" and not (isinstance(history, timedelta) and history > timedelta(0)):
            raise ConfigurationError(
                f'history is {history!r}: expected a timedelta of more than nothing, or "all".',
                "Write timedelta(days=90), say.",
                argument="history",
            )
        if column is not None and (not isinstance(column, str) or not column or column.startswith("__")):
            raise ConfigurationError(
                f"valid_from is {column!r}: expected the name of a column.",
                "Leave it out, and an entry is valid from its record's time.",
                argument="valid_from",
            )
        if column is not None and history is None:
            raise ConfigurationError(
                f"valid_from is {column!r}, and no history is kept: nothing would be told by it.",
                'Declare history=timedelta(…) or "all", or drop valid_from.',
                argument="valid_from",
            )
        if history is not None and self.keep_tombstones is not None:
            raise ConfigurationError(
                f"keep_tombstones is {self.keep_tombstones!r} beside a history, which says itself how long deletions "
                "are remembered.",
                "Drop keep_tombstones.",
                argument="keep_tombstones",
            )
        if history is not None and not self.persistent:
            raise ConfigurationError(
                "a table of one run can't keep a history: it would begin anew in each.",
                "Drop history, or persistent=False.",
                argument="history",
            )

    @property
    def order(self) -> Order | None:
        """What positions are made of; None for the offset alone, by which what comes later always is newer."""
        return STREAMED_FIRST if self.order_by is None and distinguishes_snapshots(self.changes) else self.order_by

    def _check_order(self) -> None:
        given: object = self.order_by
        names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else ()
        if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
            raise ConfigurationError(
                f"order_by is {given!r}: expected the name of a column, or several different ones.",
                "Leave it out to order by offset.",
                argument="order_by",
            )
        for name in names:
            check_name("ordering column", str(name).replace(".", "_"))
        object.__setattr__(self, "order_by", names)

    def _check_types(self) -> None:
        if isinstance(self.changes, type) or not isinstance(self.changes, ChangeFormat):
            raise ConfigurationError(
                f"changes is {self.changes!r}: expected a form of changes.",
                "Write Upserts(), OperationColumn(…), DebeziumUnwrapped() or DebeziumEnvelope(…).",
                argument="changes",
            )
        if self.order_by is not None:
            self._check_order()
        if self.keep_tombstones is not None and (
            isinstance(self.keep_tombstones, bool) or not isinstance(self.keep_tombstones, int)
        ):
            raise ConfigurationError(
                f"keep_tombstones is {self.keep_tombstones!r}: expected a whole number, 0 or more, in the unit of the "
                "ordering column.",
                "Change it, or leave it out.",
                argument="keep_tombstones",
            )
        # By what it can do: the protocol's module imports this one.
        loads = callable(getattr(self.initial, "load", None)) and callable(getattr(self.initial, "describe", None))
        if self.initial is not None and (isinstance(self.initial, type) or not loads):
            raise ConfigurationError(
                f"initial is {self.initial!r}: expected a bulk snapshot.",
                "Write ParquetSnapshot(…), QuerySnapshot(…) or PostgresSnapshot(…).",
                argument="initial",
            )
        if not isinstance(self.compaction, DeltaCompaction):
            raise ConfigurationError(
                f"compaction is {self.compaction!r}: expected a DeltaCompaction.",
                "Write DeltaCompaction(deltas=8), say.",
                argument="compaction",
            )
        if not isinstance(self.persistent, bool):
            raise ConfigurationError(
                f"persistent is {self.persistent!r}: expected True or False.", "Choose one.", argument="persistent"
            )


Severity = Literal["error", "warn"]
VALIDATOR_NAME = re.compile(r"[A-Za-z0-9_]{1,200}")


@runtime_checkable
class Validator(Protocol):
    """Looks at a candidate and says whether it may be published. A frozen value; `name` is unique in a dataset."""

    @property
    def name(self) -> str: ...

    @property
    def severity(self) -> Severity: ...

    def __call__(self, candidate: Any, /) -> Any:
        """Return the Verdict on a Candidate."""
        ...


def check_validators(what: str, validators: Sequence[Validator]) -> None:
    """Refuse validators that can't be told apart, or that are none. `what` names the dataset in errors."""
    names: list[str] = []
    for validator in validators:
        if not isinstance(validator, Validator) or not callable(validator) or isinstance(validator, type):
            raise ConfigurationError(
                f"{what} has {validator!r} among its validators, which has no name, severity or call.",
                "Use one of the functions of Adjunct, called (unique_keys()), or custom(NAME, FUNCTION).",
                argument="validators",
            )
        names.append(validator.name)
        if not VALIDATOR_NAME.fullmatch(validator.name):
            raise ConfigurationError(
                f"{what} has a validator named {validator.name!r}: expected letters, digits and underscores.",
                "Rename it.",
                argument="validators",
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(
            f"{what} has two validators of the name {twice[0]!r}.",
            "Drop one; a rule that is declared twice with other numbers needs names: custom(NAME, …).",
            argument="validators",
        )


NAME, MARKER = "name", "marker"
_EXAMPLE = datetime(2026, 11, 30, 12, 30, 15, tzinfo=UTC)


def check_valid_from(dataset: str, valid_from: str) -> None:
    """Refuse what tells no time. Raises ConfigurationError."""
    if valid_from in (NAME, MARKER):
        return
    try:
        if isinstance(valid_from, str) and "%" in valid_from:
            told = datetime.strptime(_EXAMPLE.strftime(valid_from), valid_from)
            # A week without its day is read, and left out.
            if told.year == _EXAMPLE.year and told.strftime(valid_from) == _EXAMPLE.strftime(valid_from):
                return
    except ValueError:
        pass
    raise ConfigurationError(
        f'dataset {dataset!r} has valid_from={valid_from!r}: expected "name", "marker", or a pattern of dates '
        "with their year.",
        'Write a pattern as strptime reads it, such as "%Y-%m-%d", or "date=%Y-%m-%d" for folders.',
        argument="valid_from",
        dataset=dataset,
    )


def parse_valid_from(dataset: str, valid_from: str, version: str, marked: Collection[datetime]) -> datetime:
    """Return since when a version is valid, by its name or by what its markers say; a time without a zone is UTC.

    Raises MarkerConflictError where nothing tells it, or markers tell different times: such a version is refused.
    """
    what = f"dataset {dataset!r}, version {version!r}"
    if valid_from == MARKER:
        if len(set(marked)) == 1:
            return next(iter(marked))
        times = ", ".join(f"{time:%Y-%m-%d %H:%M:%S %Z}" for time in sorted(set(marked)))
        raise MarkerConflictError(
            f"{what}: {f'its markers say different times ({times})' if times else 'no marker says'} since when it is "
            'valid, and valid_from is "marker".',
            'Deliver it under a new name, with one time: append_markers(…, valid_from=…), or "valid_from" in the '
            "completion object.",
            dataset=dataset,
            version=version,
        )
    try:
        told = datetime.fromisoformat(version) if valid_from == NAME else datetime.strptime(version, valid_from)
        return told.astimezone(UTC) if told.tzinfo is not None else told.replace(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        expected = "a day or a time, such as 2026-01-31" if valid_from == NAME else f"a name like {valid_from!r}"
        raise MarkerConflictError(
            f"{what}: its name does not tell since when it is valid: expected {expected}.",
            "Deliver it under a name that does, or declare what tells it: valid_from=….",
            dataset=dataset,
            version=version,
        ) from error
