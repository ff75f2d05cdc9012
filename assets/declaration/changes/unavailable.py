"""Values that Debezium does not know: its placeholder, in each form that a column's type gives it.

PostgreSQL does not log a large value that an update leaves alone, nor does Oracle, and Debezium sends
`unavailable.value.placeholder` in its place: as text, as base64 or hex where the column holds bytes, as the only
element of an array of texts or UUIDs, as the codes of its bytes in an array of numbers, as the only entry of an hstore.
Arrays and maps arrive as JSON in a text column.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import uuid
from functools import lru_cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column

PLACEHOLDER = "__debezium_unavailable_value"
_JSON = r"\A\s*[\[{]"
_HEX = "hex:"  # as in the connector's setting: what follows are bytes
_NEXT = (
    "Set REPLICA IDENTITY FULL in the source, or leave the column out. To keep the value that the dataset has, declare "
    'on_unavailable="keep". Where it is the column\'s own value: unavailable=None, if the source knows all values, or '
    "another unavailable.value.placeholder in the connector and the same in unavailable="
)


def may_be_unavailable(kind: str) -> bool:
    """Whether a column of this type can hold the placeholder: other types never do, as their values are small."""
    return kind in ("string", "binary") or kind.startswith("decimal")


def check_placeholder(unavailable: str | None, on_unavailable: str, what: str) -> None:
    """Refuse a placeholder that is none, and a rule for it that is none. Raises ConfigurationError."""
    if on_unavailable not in ("refuse", "keep"):
        raise ConfigurationError(
            f"{what} has on_unavailable={on_unavailable!r}: expected 'refuse' or 'keep'.",
            "Choose one.",
            argument="on_unavailable",
        )
    if unavailable is None and on_unavailable == "keep":
        raise ConfigurationError(
            f"{what} has on_unavailable='keep' and unavailable=None: then nothing says that a value is not known.",
            "Give the connector's unavailable.value.placeholder, or leave on_unavailable out.",
            argument="on_unavailable",
        )
    try:
        valid = unavailable is None or bool(_bytes(unavailable))
    except (ValueError, AttributeError):
        valid = False
    if not valid:
        raise ConfigurationError(
            f"{what} has unavailable={unavailable!r}: expected a text, or 'hex:' and bytes in hex, as the connector's "
            "unavailable.value.placeholder.",
            "Leave it out where the connector does not set it.",
            argument="unavailable",
        )


def is_unavailable(placeholder: str, value: Column, kind: str) -> Column:
    """Whether a value of this type is the placeholder; a decimal is given as its text, or as a decimal."""
    from pyspark.sql import functions as F

    if kind == "binary":
        return F.coalesce(value == F.lit(_bytes(placeholder)), F.lit(False))
    return F.coalesce(value.isin(*_texts(placeholder)) | value.rlike(_whole(placeholder)), F.lit(False))


def holds_unavailable(placeholder: str, value: Column) -> Column:
    """Whether a text is JSON that has the placeholder within it."""
    from pyspark.sql import functions as F

    found = reduce(or_, [value.contains(needle) for needle in _needles(placeholder)])
    return F.coalesce(value.rlike(_JSON) & found, F.lit(False))


def unavailable_in_arrow(placeholder: str, values: pa.ChunkedArray, kind: str) -> pa.ChunkedArray:
    """Whether each value is the placeholder, as `is_unavailable`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind == "binary":
        same = pc.equal(values, pa.scalar(_bytes(placeholder), values.type))
    else:
        known = pc.is_in(values, value_set=pa.array(_texts(placeholder), values.type))
        same = pc.or_(known, pc.match_substring_regex(values, _whole(placeholder)))
    return pc.fill_null(same, False)


def held_in_arrow(placeholder: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether each text has the placeholder within it, as `holds_unavailable`."""
    import pyarrow.compute as pc

    found = reduce(pc.or_, [pc.match_substring(values, needle) for needle in _needles(placeholder)])
    return pc.fill_null(pc.and_(pc.match_substring_regex(values, _JSON), found), False)


def unavailable_text(placeholder: str, name: str) -> str:
    """Return the reason for a change whose value of this column is not known."""
    return (
        f"column {name!r} is {placeholder!r}, which stands for a value too large to be logged that was not changed: "
        f"nothing says what it holds. {_NEXT}"
    )


def nested_text(placeholder: str, name: str) -> str:
    """Return the reason for a change that knows one part of this column's value and not another."""
    return (
        f"column {name!r} has {placeholder!r} within its value: a part of it is not known, and a value is stored, or "
        f"kept, as a whole. {_NEXT}"
    )


def inserted_text(name: str) -> str:
    """Return the reason for an inserted row whose value of this column is not known."""
    return f"column {name!r} is not known, and an insert has no row before it to keep that of"


def _bytes(placeholder: str) -> bytes:
    return bytes.fromhex(placeholder[len(_HEX) :]) if placeholder.startswith(_HEX) else placeholder.encode()


@lru_cache(maxsize=64)
def _texts(placeholder: str) -> tuple[str, ...]:
    """Return the placeholder as a text may have it: itself, or its bytes as `binary.handling.mode` codes them."""
    data = _bytes(placeholder)
    coded = (base64.b64encode(data), base64.urlsafe_b64encode(data), data.hex().encode())
    return tuple(dict.fromkeys((data.decode(errors="replace"), *(text.decode() for text in coded))))


@lru_cache(maxsize=64)
def _whole(placeholder: str) -> str:
    """Return a pattern, of Java's and of RE2, for JSON that is the placeholder as a whole."""
    text, data = (_pattern(text) for text in _texts(placeholder)[:2])
    arrays = (*([element] for element in _elements(placeholder)), *_codes(placeholder))
    forms = (
        *map(_pattern, arrays),
        rf"\{{\s*{text}\s*:\s*{text}\s*\}}",
        rf'\{{\s*"scale"\s*:\s*-?\d+\s*,\s*"value"\s*:\s*{data}\s*\}}',
    )
    return rf"\A\s*(?:{'|'.join(forms)})\s*\z"


@lru_cache(maxsize=64)
def _needles(placeholder: str) -> tuple[str, ...]:
    """Return what is a part of JSON that has the placeholder within it: to be searched for, faster than a pattern."""
    codes = (_json(numbers, comma) for numbers in _codes(placeholder) for comma in (",", ", "))
    return (*map(_json, _elements(placeholder)), *codes)


def _elements(placeholder: str) -> tuple[str, ...]:
    """Return what the only element of an array may be."""
    digest = hashlib.md5(_bytes(placeholder), usedforsecurity=False).digest()
    return (*_texts(placeholder), str(uuid.UUID(bytes=digest, version=3)))  # as Java's UUID.nameUUIDFromBytes


def _codes(placeholder: str) -> tuple[list[Any], ...]:
    """Return the bytes as arrays of numbers: whole ones, with a fraction, and as Connect's decimals."""
    numbers = [code - 256 if code > 127 else code for code in _bytes(placeholder)]
    decimals = [base64.b64encode(number.to_bytes(1, "big", signed=True)).decode() for number in numbers]
    return numbers, list(map(float, numbers)), decimals


def _json(value: Any, comma: str = ",") -> str:
    return json.dumps(value, ensure_ascii=False, separators=(comma, ":"))


def _pattern(value: Any) -> str:
    """Return a pattern for a value as JSON, with spaces wherever it may have some."""
    if isinstance(value, list):
        return r"\[\s*" + r"\s*,\s*".join(map(_pattern, value)) + r"\s*\]"
    return re.escape(_json(value))
