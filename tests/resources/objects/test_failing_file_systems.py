"""A file system that fails at any of its calls, before or after it has done what was asked for: a
write that has happened is never denied, and one that is confirmed has happened.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConditionalWritesUnsupportedError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.objects.local_store import LocalStore

CALLS = [
    (os, "link"), (os, "fsync"), (os, "open"), (os, "close"), (fcntl, "flock"),
    (Path, "open"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir"),
]  # fmt: skip
NUMBERS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT]
WRITES: dict[str, Callable[[LocalStore], object]] = {
    "create": lambda store: store.put_if_absent("a/new/k", b"new"),
    "replace": lambda store: store.put_if_match("a/k", b"new", store.put("a/k", b"old")),
    "upload": lambda store: store.upload(Path(store.url).parent / "file", "a/new/k"),
}


@contextmanager
def failing(nth: int, number: int, *, after: bool) -> Iterator[list[str]]:
    """Let the nth of CALLS fail, once it is done if `after`; provide the names of those made."""
    made: list[str] = []

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*args: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) != nth:
                return call(*args, **options)
            if after and name != "open":  # what it opens would stay open
                call(*args, **options)
            raise OSError(number, os.strerror(number))

        return fail

    with pytest.MonkeyPatch.context() as patch:
        for place, name in CALLS:
            patch.setattr(place, name, wrapped(name, getattr(place, name)))
        yield made


def stored(store: LocalStore, key: str) -> bytes | None:
    try:
        return store.get(key).data
    except ObjectNotFoundError:
        return None


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_has_happened_is_not_denied(tmp_path: Path, write: str, after: bool) -> None:
    (tmp_path / "file").write_bytes(b"new")
    key = "a/k" if write == "replace" else "a/new/k"
    for number in NUMBERS:
        nth = 0
        ended = False
        while not ended:
            nth += 1
            store = LocalStore(tmp_path / f"{number}-{nth}")
            store.put("a/k", b"older")
            error = None
            with failing(nth, number, after=after) as made:
                try:
                    WRITES[write](store)
                except AdjunctError as raised:
                    error = raised
            ended = len(made) < nth
            call = None if ended else made[nth - 1]
            if after and call in ("link", "replace") and number in (errno.ENOSPC, errno.EDQUOT):
                continue  # without room there is no link
            has_happened = stored(LocalStore(store.url), key) == b"new"
            is_unknown = isinstance(error, StoreUnavailableError) and not error.without_effect
            assert is_unknown or has_happened == (error is None), (number, call, error)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_links_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ConditionalWritesUnsupportedError):
        LocalStore(tmp_path).put_if_absent("k", b"")


def repeated(call: Callable[..., Any]) -> Callable[..., Any]:
    """Do as NFS does after a lost reply: ask again, and return the answer to that."""

    def twice(*args: Any) -> Any:
        call(*args)
        return call(*args)

    return twice


def test_a_link_or_a_rename_that_meets_itself_has_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", repeated(os.link))
    monkeypatch.setattr(Path, "replace", repeated(Path.replace))
    store = LocalStore(tmp_path)
    etag = store.put_if_absent("k", b"one")
    assert store.get("k").etag == etag
    store.put_if_match("k", b"two", etag)
    assert store.get("k").data == b"two"
