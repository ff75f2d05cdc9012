"""Where an object is kept in a table: its first two folders are the family, the rest of its key is the key.

    applications/flights/manifests/7.json    family "applications/flights/", key "manifests/7.json"
    applications/x                           family "applications/", key "x"
    x                                        family "/", key "x"

A family is in one partition, in the order of its keys, so that a folder is listed by one range of one segment.
"""

from __future__ import annotations

from typing import NamedTuple

_FOLDERS = 2
ROOT = "/"
FAMILIES = "families"
"""The family whose keys are the names of all others. None of these is called so: they end in a slash."""

BESIDE = "_adjunct/metadata/"
"""Where what does not fit in the table lies in the object store."""


class Address(NamedTuple):
    """The family and the key of an object."""

    family: str
    key: str


def address_of(key: str) -> Address:
    """Return where the object of this key is kept."""
    parts = key.split("/", _FOLDERS)
    folder = "".join(f"{part}/" for part in parts[:-1])
    return Address(folder or ROOT, parts[-1])


def key_of(family: str, key: str) -> str:
    """Return the key of the object that is kept there."""
    return key if family == ROOT else family + key


def depth_of(family: str) -> int:
    """Return how many folders a family stands for."""
    return 0 if family == ROOT else family.count("/")


def has_families_below(prefix: str) -> bool:
    """Whether keys that begin with `prefix` may be in other families than that of `address_of(prefix)`."""
    return prefix.count("/") < _FOLDERS
