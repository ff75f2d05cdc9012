"""Keys that somebody looks for in everything that a dataset stores: in rows, in manifests, in words."""

from __future__ import annotations

import base64
import datetime as dt
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.reading.entry_keys import coerce_key, decode_key
from dagster_adjunct.resources.bucketing.bucket_files import BucketFile, encode_key

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout
    from dagster_adjunct.resources.schemas.schema import Field

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class KeySet:
    """Some keys of one dataset, in the declared types of its key columns."""

    fields: tuple[Field, ...]
    keys: frozenset[Key]

    @classmethod
    def of(cls, what: str, fields: Sequence[Field], keys: Iterable[object]) -> KeySet:
        """Return these keys, each given as for `get`. Raises SchemaMismatchError; `what` names the dataset in it."""
        return cls(tuple(fields), frozenset(coerce_key(what, fields, key) for key in keys))

    def __len__(self) -> int:
        return len(self.keys)

    def with_text(self) -> KeySet:
        """Return the keys with text in them, which words can't name by chance as they can a number or a date."""
        return _with_text(self)

    def buckets(self, layout: BucketLayout) -> set[int]:
        """Return the buckets in which these keys would be."""
        from dagster_adjunct.resources.bucketing.hashing import bucket_of

        if not layout.bucket_by:
            return {0}
        names = [field.name for field in self.fields]
        places = [names.index(name) for name in layout.bucket_by]
        types = [self.fields[place].type for place in places]
        return {bucket_of([key[place] for place in places], types, layout.partitions) for key in self.keys}

    def may_be_in(self, file: BucketFile) -> bool:
        """Whether a key lies in the range that the manifest lists for this file."""
        if file.min_key is None or file.max_key is None:
            return True
        types = [field.type for field in self.fields]  # rows over time have their moment behind the key
        least, greatest = (decode_key(types, end[: len(types)]) for end in (file.min_key, file.max_key))
        return any(least <= key <= greatest for key in self.keys)

    def rows_in(self, table: pa.Table) -> list[int]:
        """Return the rows of a table, with the key columns, that have one of these keys."""
        import pyarrow as pa
        import pyarrow.compute as pc

        columns = [table.column(field.name) for field in self.fields]
        wanted = pa.array(sorted({key[0] for key in self.keys}), columns[0].type)
        likely: list[int] = pc.indices_nonzero(pc.is_in(columns[0], value_set=wanted)).to_pylist()
        return [row for row in likely if tuple(column[row].as_py() for column in columns) in self.keys]

    def listed_as(self, stored: object) -> bool:
        """Whether a value of a stored document is one of these keys as manifests write them, alone or with a moment."""
        if not isinstance(stored, list):
            return False
        own = stored[:-1] if len(stored) > len(self.fields) and _is_moment(stored[-1]) else stored
        return tuple(own) in _encoded(self)

    def named_in(self, *values: Any) -> bool:
        """Whether words, or JSON-able values, name one of these keys: every part of it, as a word of its own."""
        text = "\n".join(_texts(values))
        return bool(text) and any(all(_named(forms, text) for forms in key) for key in _forms_of(self))


def _is_moment(value: object) -> bool:
    try:
        return isinstance(value, str) and dt.datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


@lru_cache(maxsize=8)
def _with_text(keys: KeySet) -> KeySet:
    return KeySet(keys.fields, frozenset(key for key in keys.keys if any(isinstance(part, str) for part in key)))


@lru_cache(maxsize=8)
def _encoded(keys: KeySet) -> frozenset[tuple[Any, ...]]:
    return frozenset(tuple(encode_key(key)) for key in keys.keys)


@lru_cache(maxsize=8)
def _forms_of(keys: KeySet) -> list[tuple[tuple[str, ...], ...]]:
    """Return, for each part of each key, the ways in which it may be written in words."""
    return [tuple(tuple({form for form in _forms(part) if form}) for part in key) for key in keys.keys]


def _named(forms: tuple[str, ...], text: str) -> bool:
    # A key such as "N1" is not meant by "N10".
    return any(form in text and re.search(_bounded(form), text) for form in forms)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(name)
            yield from _texts(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _texts(inner)
    elif value is not None:
        yield str(value)


def _bounded(form: str) -> str:
    before = r"(?<!\w)" if re.match(r"\w", form[0]) else ""
    after = r"(?!\w)" if re.match(r"\w", form[-1]) else ""
    return f"{before}{re.escape(form)}{after}"


def _forms(value: Any) -> Iterator[str]:
    yield str(value)
    yield repr(value)
    if isinstance(value, str):
        yield repr(value)[1:-1]
        yield json.dumps(value)[1:-1]
        yield json.dumps(value, ensure_ascii=False)[1:-1]
    elif isinstance(value, bytes):
        yield from (base64.b64encode(value).decode(), value.hex(), repr(value)[2:-1])
    elif isinstance(value, dt.datetime):
        utc, local = value.replace(tzinfo=None), value.astimezone().replace(tzinfo=None)
        for moment in (value, utc, local):  # Spark's rows have the time of this machine, without a zone
            yield from (moment.isoformat(), str(moment))
        yield f"{utc.isoformat()}Z"
    elif isinstance(value, dt.date):
        yield value.isoformat()
    elif isinstance(value, Decimal):
        yield from (f"{value:f}", f"{value.normalize():f}", f"{value:,f}")
    elif isinstance(value, int):
        yield f"{value:,}"
