"""How the columns of an unbounded dataset, and the length of its history, may change without building it anew.

Rows that are there are not written again: what is added is null in them, what is widened is cast when they are read,
by Spark and by key. The next major compaction writes them in the new columns, and goes by the new history: so this is
committed though no change has come, or it would drop what is to be kept now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.commit_table import commit_manifest
from dagster_adjunct.assets.unbounded.next_served_version import with_version
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.kept_history import length_of
from dagster_adjunct.assets.versions.stored_declaration import kept_history

if TYPE_CHECKING:
    from dagster_adjunct.assets.unbounded.commit_table import Advance, AdvanceProgress


def evolve(advance: Advance, progress: AdvanceProgress) -> AdvanceProgress:
    """Commit that the columns and the history are served that are declared now; the rows there stay as they are."""
    manifest, version, source = progress.manifest, progress.manifest.version, advance.source
    assert version is not None, "there is nothing whose columns could change"
    history, declared = length_of(version.history), length_of(kept_history(advance.spec))
    lengths = f"history is {declared}, was {history}" if history != declared else ""
    reason = "; ".join(filter(None, (version.columns.difference(source.schema), lengths)))
    attempt = advance.log.attempt()
    after = manifest.after(
        declaration=source.declaration,
        decision=advance.decision,
        change=Change(action="evolve", reason=reason),
    )
    after = with_version(advance, progress.commit, after, attempt, version.generations, version.counters)
    return commit_manifest(advance, progress, after, commit_id=attempt.id)
