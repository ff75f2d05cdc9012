"""What in an expression gives another value when the same record is read again: clocks, chance, where it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dagster_adjunct.resources.sql.parsing import functions_called
from dagster_adjunct.resources.sql.special_times import special_times

_CHANGING = frozenset(
    {
        "aes_encrypt", "curdate", "current_date", "current_time", "current_timestamp", "current_user",
        "input_file_block_length", "input_file_block_start", "input_file_name", "java_method", "localtime",
        "localtimestamp", "monotonically_increasing_id", "now", "rand", "randn", "random", "randstr", "reflect",
        "session_user", "shuffle", "spark_partition_id", "try_reflect", "uniform", "user", "uuid",
    }
)  # fmt: skip
_NAMED = re.compile(rf"\b(?:{'|'.join(sorted(_CHANGING))}|unix_timestamp)\b", re.IGNORECASE)
_BARE = re.compile(
    r"\b(current_date|current_time|current_timestamp|current_user|localtimestamp|session_user)\b(?!\s*\()",
    re.IGNORECASE,
)
_NO_TIME = re.compile(r"\bunix_timestamp\s*\(\s*\)", re.IGNORECASE)
# What Spark takes for the day or the moment: a literal of a time, and a text that is made one; `special_times` knows
# those that it makes one by itself.
_SPECIAL = re.compile(
    r"\b(?:date|timestamp(?:_ntz|_ltz)?|cast|try_cast|to_date|to_timestamp(?:_ntz|_ltz)?)\s*\(?\s*"
    r"(['\"])\s*(now|today|tomorrow|yesterday)\b[^'\"]*\1",
    re.IGNORECASE,
)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`(?:[^`]|``)*`")


def changing_values(text: str, types: Mapping[str, str | None]) -> list[str]:
    """Return these in words, each once, of an expression over columns of these types: "rand()", "'now' as a time"."""
    named = [match[2].lower() for match in _SPECIAL.finditer(text)]
    special = [f"'{name}' as a time" for name in dict.fromkeys((*named, *special_times(text, types)))]
    if not _NAMED.search(text):  # most name none, and are not taken apart for that
        return special
    plain = _TEXT.sub("''", text)
    names = [name for name in functions_called(text) if name in _CHANGING]
    names += [match[1].lower() for match in _BARE.finditer(plain)]
    names += ["unix_timestamp"] if _NO_TIME.search(plain) else []
    return [f"{name}()" for name in names] + special
