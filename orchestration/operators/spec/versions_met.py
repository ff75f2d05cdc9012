"""Which versions of its datasets the records of a batch meet."""

from __future__ import annotations

from typing import Literal, TypeAlias

# as-of: joins by time meet the entry that was valid at each record's own time, others what is served now.
# current: every join meets what is served now; one by time the entry that is current, whatever the record's time.
# recorded: every join meets the version that the batch met which read the record first; one by time as of its time.
VersionsMet: TypeAlias = Literal["as-of", "current", "recorded"]
AS_OF: VersionsMet = "as-of"
CURRENT: VersionsMet = "current"
RECORDED: VersionsMet = "recorded"
VERSIONS_MET: tuple[VersionsMet, ...] = (AS_OF, CURRENT, RECORDED)
