"""What an unbounded dataset remembers of its table: its bootstrap, what was replaced, and what was decided."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime

from dagster_adjunct.assets.versions.document_base import ManifestPart, Offset, StoredGeneration, StoredSchema


class Bootstrap(ManifestPart):
    """A snapshot of a change stream: from where, up to which offsets, and whether it is reached.

    The target is each partition's upcoming offset, recorded before anything is read; records that arrive
    later do not extend the wait. `building` are the generations made so far: readers get them when the target is
    reached, and what was served before stays served until then. `columns` are theirs. `why` says what asked for it.
    """

    state: Literal["running", "done"]
    start: dict[str, Offset]
    target: dict[str, Offset]
    started_at: AwareDatetime
    finished_at: AwareDatetime | None = None
    building: tuple[StoredGeneration, ...] = ()
    columns: StoredSchema | None = None
    loaded: bool = False
    why: str = ""


class Retired(ManifestPart):
    """A generation that a compaction or rebuild replaced; versions before number `until` still read it."""

    generation: int
    folder: str
    until: int
    at: AwareDatetime


class SentToTable(ManifestPart):
    """What one operator of a batch has sent to a local table: the last record of each key, and what tells it again."""

    rows: int
    deleted: int
    digest: int


class Written(ManifestPart):
    """The last batch that has written a local table, with each of its `sends` in the order of the application.

    `before` is the version that it was begun with, None where there was none. `undone` says that the batch was given
    up, and the table is as it was before it: what is committed late of that batch changes nothing. `watermark` is, of a
    table of state, up to where rows have expired.
    """

    application: str
    batch: int
    sends: tuple[SentToTable, ...] = ()
    before: str | None = None
    undone: bool = False
    watermark: AwareDatetime | None = None


class Decision(ManifestPart):
    """What was decided about a change stream's table when a run began, and why (the recovery table)."""

    action: Literal["create", "bootstrap", "recreate", "continue", "serve-stale"]
    store: Literal["none", "building", "invalid", "valid"]
    reason: str
    at: AwareDatetime
