"""The files of this distribution that are no code, also where it is imported from a zip file."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

_PACKAGE = "dagster_adjunct"


def read_package_file(place: str) -> str:
    """Return the text of a file, such as "examples/component.yaml"."""
    return resources.files(_PACKAGE).joinpath(place).read_text(encoding="utf-8")


@cache
def package_file(place: str) -> Path:
    """Return a file for other programs to read; in a zip file, a copy for as long as this process
    runs.
    """
    copies = ExitStack()
    atexit.register(copies.close)
    return copies.enter_context(resources.as_file(resources.files(_PACKAGE).joinpath(place)))


def read_package_folder(place: str) -> Iterator[tuple[str, str]]:
    """Yield the files below a folder, without compiled code: their paths in it, and their texts."""
    yield from _read_folder(resources.files(_PACKAGE).joinpath(place), "")


def _read_folder(folder: Traversable, above: str) -> Iterator[tuple[str, str]]:
    """Yield the files of a folder; `above` is the folder's path, before theirs."""
    for child in folder.iterdir():
        if child.is_file():
            yield above + child.name, child.read_text(encoding="utf-8")
        elif child.name != "__pycache__":
            yield from _read_folder(child, f"{above}{child.name}/")
