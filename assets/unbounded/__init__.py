"""Unbounded datasets: a change stream kept as a consistent snapshot.

follow             one advance: recover, bootstrap, apply changes, commit
recovery           what a run does with the table that it finds
rebuild            the table built anew because somebody asks for it
rewind             changes applied again from a startpoint: rewind_plan decides, reapply reads them again
initial            a bulk snapshot to begin with; postgres_snapshot, from PostgreSQL
evolution          columns that are added or widened
ordering           the order of changes by a column, and those that come too late
compaction         deltas into one, or all into a new base
transient          a table that lives for one run
manager            which stream feeds which datasets
freshness          how far a table is behind; progress, how far its bootstrap is
"""

from __future__ import annotations

from assets.unbounded.follow import advance_unbounded

__all__ = ["advance_unbounded"]
