"""Searches all objects of a dataset for keys, referenced or not, and redacts keys in documents.

Documents are redacted as JSON, so that those of newer releases can be read too.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, NamedTuple

from dagster_adjunct.assets.reading.key_lookup import coerce_key, decode_key
from dagster_adjunct.assets.reading.stored_file import column_paths
from dagster_adjunct.assets.reading.superseded import is_mask
from dagster_adjunct.assets.retention.discard import RetentionDecision
from dagster_adjunct.assets.versions.dataset_log import SETS, DatasetLog
from dagster_adjunct.assets.versions.leases import list_attempts
from dagster_adjunct.assets.versions.manifest import DatasetManifest, UnboundedManifest
from dagster_adjunct.resources.bucketing.files import (
    BucketFile,
    BucketLayout,
    Generation,
    unpack_footer,
)
from dagster_adjunct.resources.bucketing.writer import GROUP_KEYS
from dagster_adjunct.resources.errors import (
    MalformedDocumentError,
    ObjectNotFoundError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.files.opened import translate_read_errors
from dagster_adjunct.resources.lazy_modules import pa, pc, pq
from dagster_adjunct.resources.objects.arrow_files import open_object
from dagster_adjunct.resources.objects.commit_log import commit_number, seal_json, unseal_json
from dagster_adjunct.resources.objects.store import ObjectInfo, ObjectStore
from dagster_adjunct.resources.reports import Report, to_json_value
from dagster_adjunct.resources.schemas.schema import Field

CLEARED = "(cleared by an erasure)"
ERASE_ACTION = "erase"
"""The action of an erasure's commit."""

_DISCARD_ACTION = "expire"
_REASONS = {"reason", "why"}
_VERDICT_FIELDS = {"name", "passed", "message", "facts"}
_FILE_FIELDS = {"bucket", "name", "rows", "sha256"}


def redact(value: Any, keys: KeySet, *, all_ranges: bool = False) -> Any:
    """Return a document's JSON value with these keys cleared; it stays a valid document of its
    kind.

    Verdicts lose messages and facts that contain a key, and reasons that contain one are replaced.
    Files lose key ranges and footers that contain one; with `all_ranges` all of them, which past
    manifests don't need. Files and verdicts are recognised by their fields, at any depth.

    The reason of an erasure is searched only for keys with text, since a number or date in it may
    be that of the request. The reason of a discard holds counts, and is not searched.
    """
    redact_part = partial(redact, keys=keys, all_ranges=all_ranges)
    if isinstance(value, list):
        return [*map(redact_part, value)]
    if not isinstance(value, dict):
        return value
    is_file = value.keys() >= _FILE_FIELDS
    if is_file:
        return _redact_file(value, keys, all_ranges=all_ranges)
    is_verdict = value.keys() >= _VERDICT_FIELDS
    if is_verdict:
        if keys.is_named_in(value["message"], value["facts"]):
            return {**value, "message": CLEARED, "facts": {}}
        return value
    redacted = {name: redact_part(field) for name, field in value.items()}
    action = value.get("action")
    if action == _DISCARD_ACTION:
        return redacted
    if action == ERASE_ACTION:
        keys_in_reason = keys.with_text()
    else:
        keys_in_reason = keys
    for name in redacted.keys() & _REASONS:
        if isinstance(redacted[name], str) and keys_in_reason.is_named_in(redacted[name]):
            redacted[name] = CLEARED
    return redacted


def _redact_file(file: dict[str, Any], keys: KeySet, *, all_ranges: bool) -> dict[str, Any]:
    """Return a manifest's entry of a file without key range and footer, if one of these contains a
    key or with `all_ranges`; else unchanged.
    """
    has_key = keys.has_encoded(file.get("min_key")) or keys.has_encoded(file.get("max_key"))
    if not all_ranges and not has_key and not _footer_has_key(file, keys):
        return file
    redacted = {**file, "min_key": None, "max_key": None}
    redacted.pop("footer", None)
    return redacted


def _footer_has_key(file: dict[str, Any], keys: KeySet) -> bool:
    """Whether the footer in a manifest's entry of a file contains one of the keys, as the first
    key of a row group or in its statistics; False without a footer. One that can't be read may
    contain any key: True.
    """
    if not file.get("footer"):
        return False
    try:
        metadata = pq.read_metadata(pa.BufferReader(unpack_footer(file["footer"])))
    except (MalformedDocumentError, pa.ArrowException, OSError):
        return True
    first_keys = json.loads((metadata.metadata or {}).get(GROUP_KEYS, b"[]"))
    if any(map(keys.has_encoded, first_keys)):
        return True
    if len(keys.fields) > 1:
        return False  # statistics are of single columns, not of whole keys
    column = column_paths(metadata).index(keys.names[0])
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(column).statistics
        if statistics is None or not statistics.has_min_max:
            continue
        if not keys.keys.isdisjoint([(statistics.min,), (statistics.max,)]):
            return True
    return False


_WORKERS = 8


@dataclass(frozen=True, slots=True)
class KeyFinding:
    """An object in which keys were found or which could not be searched; `finding` says which."""

    object: str
    finding: str

    def __str__(self) -> str:
        return f"{self.object}: {self.finding}"


@dataclass(frozen=True, slots=True)
class KeySearch(Report):
    """The result of a key search: the numbers of searched Parquet files (`objects`), of their rows,
    and of documents.

    `found` are the objects that hold one of the keys, `unsearched` those that could not be read.
    """

    objects: int
    rows: int
    documents: int
    found: tuple[KeyFinding, ...]
    unsearched: tuple[KeyFinding, ...]

    @property
    def clean(self) -> bool:
        """Whether all objects were searched and none of the keys was found."""
        return not self.found and not self.unsearched


def search_keys(log: DatasetLog, keys: KeySet) -> KeySearch:
    """Search every object of a dataset: all files, referenced or not, and all documents.

    Reads the key columns of each file, and each document, also the manifests of its version set.
    """
    listed = list(log.lake.store.list(f"{log.prefix}/"))
    files = []
    documents = list_set_manifests(log)
    for item in listed:
        if item.key.startswith(f"{log.prefix}/data/"):
            files.append(item)
        elif item.key.endswith(".json"):
            documents.append(item.key)
    in_files = search_files(log.lake.store, files, keys)
    with ThreadPoolExecutor(_WORKERS) as pool:
        findings = list(filter(None, pool.map(partial(_search_document, log, keys), documents)))
    found = []
    unreadable = []
    for finding in findings:
        if finding.finding == _UNREADABLE:
            unreadable.append(finding)
        else:
            found.append(finding)
    missing = _find_missing_files(log, {item.key for item in files})
    return replace(
        in_files,
        documents=len(documents),
        found=(*in_files.found, *found),
        unsearched=(*in_files.unsearched, *unreadable, *missing),
    )


def search_files(store: ObjectStore, files: Iterable[ObjectInfo], keys: KeySet) -> KeySearch:
    """Search Parquet objects for rows with one of these keys. Masks, which hold no keys, are
    left out.
    """
    searched = (file for file in files if not is_mask(file.key))
    with ThreadPoolExecutor(_WORKERS) as pool:
        searches = list(pool.map(partial(_search_file, store, keys), searched))
    return KeySearch(
        objects=len(searches),
        rows=sum(search.rows for search in searches),
        documents=0,
        found=tuple(search.found for search in searches if search.found is not None),
        unsearched=tuple(search.unread for search in searches if search.unread is not None),
    )


def list_set_manifests(log: DatasetLog) -> list[str]:
    """Return the object keys of the manifests of the dataset's version set; [] if it is no
    member of one.
    """
    name = log.version_set()
    if name is None:
        return []
    return [item.key for item in log.lake.store.list(f"{SETS}/{name}/manifests/")]


def dataset_part(log: DatasetLog, key: str, document: Any) -> Any:
    """Return what a document with this object key says of this dataset: the whole, or its part of a
    version set's manifest, None if it has none.
    """
    if key.startswith(f"{SETS}/"):
        return document["body"]["members"].get(log.name)
    return document


_UNREADABLE = "it can't be read"


def _search_document(log: DatasetLog, keys: KeySet, key: str) -> KeyFinding | None:
    """Return the finding that a document contains a key, or can't be read; None without one."""
    try:
        part = dataset_part(log, key, json.loads(log.lake.store.get(key).data))
    except ObjectNotFoundError:
        return None  # deleted since it was listed
    except (ValueError, KeyError, TypeError, AttributeError):
        return KeyFinding(key, _UNREADABLE)
    if redact(part, keys) == part:
        return None
    return KeyFinding(key, "it contains a key")


class _FileSearch(NamedTuple):
    """The number of searched rows of a file, and what was found: `found` that it has one of the
    keys, or `unread` that it could not be searched.
    """

    rows: int = 0
    found: KeyFinding | None = None
    unread: KeyFinding | None = None


def _search_file(store: ObjectStore, keys: KeySet, item: ObjectInfo) -> _FileSearch:
    """Search the rows of a file for the keys; a file that was deleted since it was listed has
    none.
    """
    names = keys.names
    hits = 0
    try:
        with translate_read_errors(item.key):
            source = open_object(store, item.key, item.size)
            file = pq.ParquetFile(source, pre_buffer=True, page_checksum_verification=True)
            missing = []
            for name in names:
                if name not in file.schema_arrow.names:
                    missing.append(name)
            if missing:
                return _FileSearch(unread=KeyFinding(item.key, f"it has no column {missing[0]!r}"))
            for group in range(file.num_row_groups):
                hits += len(keys.rows_in(file.read_row_group(group, columns=names)))
    except ObjectNotFoundError:
        return _FileSearch()
    except SchemaMismatchError as error:
        first_line, _, _ = str(error.__cause__).partition("\n")
        return _FileSearch(unread=KeyFinding(item.key, f"{_UNREADABLE}: {first_line}"))
    finding = None
    if hits:
        rows = f"{hits} row has" if hits == 1 else f"{hits} rows have"
        finding = KeyFinding(item.key, f"{rows} one of the keys")
    return _FileSearch(file.metadata.num_rows, finding)


def _find_missing_files(log: DatasetLog, existing: set[str]) -> list[KeyFinding]:
    """Return findings for missing files of retained versions, and of a table that is being built:
    it is not known whether they held a key.

    `existing` are the object keys of the files that exist.
    """
    manifest = log.read().manifest
    if manifest is None:
        return []
    listed: dict[str, Sequence[Generation]] = {}  # by what lists them
    if isinstance(manifest, UnboundedManifest):
        listed[f"version {manifest.served_id}"] = manifest.served_generations
        listed["the table that is being built"] = manifest.bootstrap.building
    else:
        for ref in manifest.built:
            listed[f"version {ref.id}"] = log.read_version(ref).generations
    findings = []
    for what, generations in listed.items():
        for generation in generations:
            keys = {f"{generation.folder}/{file.name}" for file in generation.files}
            for key in sorted(keys - existing):
                findings.append(KeyFinding(key, f"{what} lists it, and it is missing"))
    return findings


class Leftovers(NamedTuple):
    """Folders and documents that no version references: `garbage` belongs to no build, `builds` to
    builds on record, which an advance may publish or resume.
    """

    garbage: list[str]
    builds: list[RetentionDecision]


def find_leftovers(log: DatasetLog, manifest: DatasetManifest, keys: KeySet) -> Leftovers:
    """Return the leftovers that hold a key, and are not doomed already."""
    store = log.lake.store
    listed = manifest.reachable() | set(manifest.doomed)
    unknown_files = []
    for item in store.list(f"{log.prefix}/data/"):
        if _folder_from_key(item.key) not in listed:
            unknown_files.append(item)
    searched = search_files(store, unknown_files, keys)
    # Unreadable files may contain the keys, so they are deleted too.
    holding = {
        _folder_from_key(finding.object) for finding in (*searched.found, *searched.unsearched)
    }
    documents = {item.key for item in store.list(f"{log.prefix}/versions/")}
    unknown = sorted(documents - listed)
    for finding in filter(None, map(partial(_search_document, log, keys), unknown)):
        if finding.finding != _UNREADABLE:
            holding.add(finding.object)
    on_record = list_attempts(log.lake, log.name)
    garbage = []
    builds = []
    for entry in sorted(holding):
        attempt = next((attempt for attempt in on_record if attempt in entry), None)
        if attempt is None:
            garbage.append(entry)
        else:
            why = (
                f"a build on record, renewed at {on_record[attempt]:%Y-%m-%d %H:%M} UTC: an advance"
                " publishes it, or a discard deletes it"
            )
            builds.append(RetentionDecision(entry, None, why))
    return Leftovers(garbage, builds)


def delete_superseded_documents(log: DatasetLog) -> int:
    """Delete documents of retained versions that have a newer document; return the number of
    deleted ones.

    Readers need a document only while they open its version, and retry if it is deleted meanwhile.
    """
    manifest = log.read().manifest
    assert manifest is not None
    documents = {ref.document for ref in manifest.listed}
    ids = {ref.id for ref in manifest.listed}
    superseded = []
    for item in log.lake.store.list(f"{log.prefix}/versions/"):
        _, _, name = item.key.rpartition("/")
        version, _, _ = name.rpartition("-")
        if version in ids and item.key not in documents:
            superseded.append(item.key)
    log.lake.store.delete_many(superseded)
    return len(superseded)


def redact_past_manifests(log: DatasetLog, keys: KeySet) -> int:
    """Clear the keys, and all key ranges, from past manifests; return the number of rewritten ones.

    They still say who did what, when and why. The current manifest has no keys, and neither have
    those that follow.
    """
    commit = log.read().commit
    assert commit is not None
    own = [item.key for item in log.lake.store.list(f"{log.prefix}/manifests/")]
    is_in_set = commit.manifest_key.startswith(f"{SETS}/")
    # The own log of a member ended when it joined the set.
    past = own if is_in_set else _manifests_up_to(own, commit.manifest_key)
    past += _manifests_up_to(list_set_manifests(log), commit.manifest_key)
    with ThreadPoolExecutor(_WORKERS) as pool:
        return sum(pool.map(partial(_redact_manifest, log, keys), past))


def _manifests_up_to(manifests: Iterable[str], current: str) -> list[str]:
    """Return the other manifests up to the number of the `current` one, also those of commits
    that lost a race.
    """
    newest = commit_number(current)
    found = []
    for key in manifests:
        if key != current and commit_number(key) <= newest:
            found.append(key)
    return found


def _redact_manifest(log: DatasetLog, keys: KeySet, key: str) -> bool:
    """Clear the keys, and all key ranges, from a past manifest; return whether it had any."""
    store = log.lake.store
    try:
        stored = store.get(key).data
    except ObjectNotFoundError:
        return False  # discarded since it was listed
    whole = unseal_json(stored)
    document = json.loads(whole or stored)
    part = dataset_part(log, key, document)
    cleared = redact(part, keys, all_ranges=True)
    if cleared == part:
        return False
    if key.startswith(f"{SETS}/"):
        document["body"]["members"][log.name] = cleared
    else:
        document = cleared
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    data = text.encode()
    if whole is not None:  # a damaged one stays so
        data = seal_json(data)
    store.put(key, data)
    return True


def _folder_from_key(key: str) -> str:
    """Return the folder of an object."""
    folder, _, _ = key.rpartition("/")
    return folder


Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class KeySet:
    """A set of keys of one dataset, in the declared types of its key columns."""

    fields: tuple[Field, ...]
    keys: frozenset[Key]

    @classmethod
    def of(cls, what: str, fields: Sequence[Field], keys: Iterable[object]) -> KeySet:
        """Return the set of these keys, given as for `get`. Raises SchemaMismatchError; `what`
        names the dataset.
        """
        return cls(tuple(fields), frozenset(coerce_key(what, fields, key) for key in keys))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def names(self) -> list[str]:
        """The names of the key columns."""
        return [field.name for field in self.fields]

    @lru_cache(maxsize=8)  # noqa: B019 - few and small
    def with_text(self) -> KeySet:
        """Return those of the keys that have a string in them: prose does not contain such a key by
        chance, unlike a number or date.
        """
        texts = []
        for key in self.keys:
            if any(isinstance(part, str) for part in key):
                texts.append(key)
        return KeySet(self.fields, frozenset(texts))

    def buckets(self, layout: BucketLayout) -> set[int]:
        """Return the buckets in which these keys would be."""
        from dagster_adjunct.resources.bucketing.hashing import bucket_of_key

        if not layout.bucket_by:
            return {0}
        indices = [self.names.index(name) for name in layout.bucket_by]
        types = [self.fields[index].type for index in indices]
        buckets = set()
        for key in self.keys:
            values = [key[index] for index in indices]
            buckets.add(bucket_of_key(values, types, layout.partitions))
        return buckets

    def may_be_in(self, file: BucketFile) -> bool:
        """Whether one of the keys is in the range that the manifest lists for this file, or no
        range is listed.
        """
        if file.min_key is None or file.max_key is None:
            return True
        types = [field.type for field in self.fields]
        # With history the range includes `valid_from`.
        least = decode_key(types, file.min_key[: len(types)])
        greatest = decode_key(types, file.max_key[: len(types)])
        return any(least <= key <= greatest for key in self.keys)

    def rows_in(self, table: pa.Table) -> list[int]:
        """Return the indices of the rows with one of these keys."""
        columns = table.select(self.names).columns
        # Arrow finds those with the first value of a key, Python the whole key among them.
        wanted = pa.array(sorted({key[0] for key in self.keys}), columns[0].type)
        likely: list[int] = pc.indices_nonzero(pc.is_in(columns[0], value_set=wanted)).to_pylist()
        found = []
        for row in likely:
            if tuple(column[row].as_py() for column in columns) in self.keys:
                found.append(row)
        return found

    def has_encoded(self, stored: object) -> bool:
        """Whether a value of a document is one of these keys in the encoding of manifests.

        With history, `valid_from` may follow the key's own values.
        """
        if not isinstance(stored, list):
            return False
        ends_in_time = len(stored) > len(self.fields) and _is_moment(stored[-1])
        if ends_in_time:
            stored = stored[:-1]
        return tuple(stored) in _encoded_keys(self)

    def is_named_in(self, *values: Any) -> bool:
        """Whether text, or JSON-able values, contain all values of one of these keys, each as a
        whole word.
        """
        text = "\n".join(_texts(values))
        if not text:
            return False
        for forms_of_key in _written_forms(self):
            if all(_is_named(forms, text) for forms in forms_of_key):
                return True
        return False


def _is_moment(value: object) -> bool:
    """Whether this is the text of a time with a zone."""
    if not isinstance(value, str):
        return False
    try:
        return dt.datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


@lru_cache(maxsize=8)
def _encoded_keys(keys: KeySet) -> frozenset[tuple[Any, ...]]:
    """Return the keys in the encoding of manifests."""
    return frozenset(tuple(to_json_value(key)) for key in keys.keys)


@lru_cache(maxsize=8)
def _written_forms(keys: KeySet) -> list[tuple[tuple[str, ...], ...]]:
    """Return, for each value of each key, the forms in which text may contain that value."""
    written = []
    for key in keys.keys:
        forms_of_key = []
        for value in key:
            forms = set(_value_forms(value)) - {""}
            forms_of_key.append(tuple(forms))
        written.append(tuple(forms_of_key))
    return written


def _is_named(forms: tuple[str, ...], text: str) -> bool:
    """Whether a text has one of these forms as a whole word: "N10" does not contain "N1"."""
    present = [form for form in forms if form in text]
    return any(re.search(_word_pattern(form), text) for form in present)


def _texts(value: Any) -> Iterator[str]:
    """Yield all names and simple values in a JSON-able value, as text."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(name)
            yield from _texts(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _texts(inner)
    elif value is not None:
        yield str(value)


def _word_pattern(form: str) -> str:
    """Return the pattern that finds this text as a whole word: if it begins or ends with a letter
    or digit, none goes before or after it.
    """
    before = ""
    if re.match(r"\w", form[0]):
        before = r"(?<!\w)"
    after = ""
    if re.match(r"\w", form[-1]):
        after = r"(?!\w)"
    return f"{before}{re.escape(form)}{after}"


def _value_forms(value: Any) -> Iterator[str]:
    """Yield the forms in which documents and messages may contain a value."""
    yield str(value)
    yield repr(value)
    if isinstance(value, str):
        yield from (
            repr(value)[1:-1],
            json.dumps(value)[1:-1],
            json.dumps(value, ensure_ascii=False)[1:-1],
        )
    elif isinstance(value, bytes):
        yield from (base64.b64encode(value).decode(), value.hex(), repr(value)[2:-1])
    elif isinstance(value, dt.datetime):
        utc = value.replace(tzinfo=None)
        local = value.astimezone().replace(tzinfo=None)
        for moment in (value, utc, local):  # Spark's rows have local time without a zone
            yield from (moment.isoformat(), str(moment))
        yield f"{utc.isoformat()}Z"
    elif isinstance(value, dt.date):
        yield value.isoformat()
    elif isinstance(value, Decimal):
        yield from (f"{value:f}", f"{value.normalize():f}", f"{value:,f}")
    elif isinstance(value, int):
        yield f"{value:,}"
