"""Takes keys out of stored documents: out of manifests of the past, verdicts, and reasons that operators gave.

Works on the documents' JSON, so that it also reads what a newer version of this package wrote.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.bucketing.bucket_files import unpack_footer
from dagster_adjunct.resources.bucketing.writer import GROUP_KEYS
from dagster_adjunct.resources.errors import MalformedDocumentError

if TYPE_CHECKING:
    from dagster_adjunct.assets.retention.erasing.key_set import KeySet

CLEARED = "(cleared by an erasure)"
FORGET = "forget"
"""The action of the commit that an erasure makes."""

_DISCARD = "discard"
_REASONS = ("reason", "why")
_VERDICT = {"name", "passed", "message", "facts"}
_FILE = {"bucket", "name", "rows", "sha256"}


def redacted(value: Any, keys: KeySet, *, all_ranges: bool = False) -> Any:
    """Return a document's JSON value without these keys; what does not name them stays as it is.

    Cleared are the messages and facts of verdicts, and reasons, that name a key, and key ranges and footers of files
    that hold one: with `all_ranges` those of all files, which nobody needs in manifests of the past. What remains
    is still a document of its kind.

    What an erasure gave as its own reason is searched for keys with text only: a number or a date in it may be the
    request's. The reason of a discard is counts, and is not searched.
    """
    if isinstance(value, list):
        return [redacted(item, keys, all_ranges=all_ranges) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() >= _FILE:
        return _without_range(value) if all_ranges or _lists(value, keys) else value
    if value.keys() >= _VERDICT:
        named = keys.named_in(value["message"], value["facts"])
        return {**value, "message": CLEARED, "facts": {}} if named else value
    action = value.get("action")
    wanted = keys.with_text() if action == FORGET else keys
    return {
        name: CLEARED
        if name in _REASONS and isinstance(field, str) and action != _DISCARD and wanted.named_in(field)
        else redacted(field, keys, all_ranges=all_ranges)
        for name, field in value.items()
    }


def _without_range(file: dict[str, Any]) -> dict[str, Any]:
    return {name: field for name, field in file.items() if name != "footer"} | {"min_key": None, "max_key": None}


def _lists(file: dict[str, Any], keys: KeySet) -> bool:
    return keys.listed_as(file.get("min_key")) or keys.listed_as(file.get("max_key")) or _in_footer(file, keys)


def _in_footer(file: dict[str, Any], keys: KeySet) -> bool:
    """Whether a footer gives one of the keys away: as a row group's first, or as the least or greatest value."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.get("footer"):
        return False
    try:
        metadata = pq.read_metadata(pa.BufferReader(unpack_footer(file["footer"])))
    except (MalformedDocumentError, pa.ArrowException, OSError):
        return True  # what can't be read can't be shown to be without them
    if any(keys.listed_as(key) for key in json.loads((metadata.metadata or {}).get(GROUP_KEYS, b"[]"))):
        return True
    if len(keys.fields) > 1:
        return False  # statistics are of single columns: two of them do not make a key
    columns = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    at = columns.index(keys.fields[0].name)
    statistics = (metadata.row_group(group).column(at).statistics for group in range(metadata.num_row_groups))
    return any(
        (of_group.min,) in keys.keys or (of_group.max,) in keys.keys
        for of_group in statistics
        if of_group and of_group.has_min_max
    )
