"""What a sensor remembers from tick to tick, as versioned JSON."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import ValidationError

from dagster_adjunct.resources.stored_documents import StoredDocument

# A layout that an older release can't read gets another one.
VERSION = 1

C = TypeVar("C", bound=StoredDocument)


def write_cursor(cursor: StoredDocument) -> str:
    """Return the cursor as it is stored."""
    return json.dumps({"version": VERSION, **cursor.model_dump(mode="json")})


def read_cursor(kind: type[C], text: str | None) -> tuple[C, str]:
    """Return the cursor, and "" or what to say of one that can't be read and so starts anew.

    Starting anew harms nothing: at worst a run is asked for again, which then finds nothing to do.
    """
    if not text:
        return kind(), ""
    try:
        stored = json.loads(text)
        version = stored.pop("version", None)
        if version != VERSION:
            return kind(), f"The cursor is of version {version!r}, and this release writes {VERSION}: it starts anew."
        return kind.model_validate(stored), ""
    except (ValueError, TypeError, AttributeError, ValidationError):
        return kind(), "The cursor can't be read: it starts anew."
