"""Unbounded datasets: a change stream kept as a consistent snapshot.

follow       one advance: recover, bootstrap, apply changes, commit
recovery     what a run does with the table that it finds
initial      a bulk snapshot to begin with
transient    a table that lives for one run
manager      which stream feeds which datasets
compaction   deltas into one, or all into a new base
"""

from __future__ import annotations

from assets.unbounded.follow import advance_unbounded

__all__ = ["advance_unbounded"]
