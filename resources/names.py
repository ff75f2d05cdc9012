"""Names of datasets, streams and partitions."""

from __future__ import annotations

import re
from typing import NamedTuple

from dagster_adjunct.resources.errors import ConfigurationError, InvalidNameError

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def check_name(kind: str, name: str) -> str:
    """Return `name` if it is safe in paths and keys; `kind` says in errors what it names
    ("dataset", "stream").

    A safe name has 1 to 100 letters, digits, `-` and `_`, and begins with a letter or digit. It has
    no dots, because `system.stream.3` names a partition of a stream.
    """
    if not isinstance(name, str) or not _SAFE.fullmatch(name):
        system, _, stream = str(name).partition(".")
        if kind == "stream" and _SAFE.fullmatch(system) and _SAFE.fullmatch(stream):
            problem = f"stream name {name!r} includes its system: expected the name alone."
            step = f"Write {stream!r}."
        else:
            text = str(name)
            shown = repr(text if len(text) <= 120 else f"{text[:120]}…")
            problem = (
                f"{kind} name {shown} is not safe: expected 1 to 100 letters, digits, '-' or '_',"
                " beginning with a letter or digit."
            )
            safe = re.sub(r"[^A-Za-z0-9_-]+", "-", str(name)).strip("-_")[:100]
            if safe:
                step = f"Choose another name, such as {safe!r}."
            else:
                step = "Choose another name."
        raise InvalidNameError(problem, step, name=str(name))
    return name


class StreamName(NamedTuple):
    """A stream's name in its system."""

    system: str
    stream: str


def split_stream_name(qualified: str) -> StreamName:
    """Return the system and the stream that "system.stream" names. Raises InvalidNameError."""
    system, dot, stream = str(qualified).partition(".")
    if not dot:
        problem = f"stream {qualified!r} names no system: expected SYSTEM.STREAM."
        example = f"lake.{qualified}" if qualified else "lake.NAME"
        raise InvalidNameError(
            problem, f'Write "{example}" for a stream of the lake.', name=str(qualified)
        )
    if "." in stream:
        problem = f"stream {qualified!r} has more than one dot: expected SYSTEM.STREAM."
        step = (
            f'Write "{system}.{stream.partition(".")[0]}", without a partition; a stream\'s name'
            " has no dots."
        )
        raise InvalidNameError(problem, step, name=str(qualified))
    return StreamName(check_name("system", system), check_name("stream", stream))


def unqualify_stream_name(system: str, name: str) -> str:
    """Return the stream's name without its system, which may precede it ("SYSTEM.STREAM"). Raises
    ConfigurationError unless that is `system`.
    """
    if "." not in name:
        return check_name("stream", name)
    named, stream = split_stream_name(name)
    if named != system:
        problem = (
            f"stream {name!r} belongs to the system {named!r}: expected a stream of {system!r}."
        )
        raise ConfigurationError(
            problem, f'Write "STREAM" or "{system}.STREAM".', stream=name, system=named
        )
    return stream


def split_partitions(text: str) -> tuple[str, str | None]:
    """Split "system.stream.0-3,7" into "system.stream" and "0-3,7", which is None where no
    partitions are named.

    Neither part is checked: `split_stream_name` does that.
    """
    system, dot, rest = text.strip().partition(".")
    stream, separator, partitions = rest.partition(".")
    return f"{system}{dot}{stream}", partitions if separator else None


def is_storable_text(value: str) -> bool:
    """Return whether the text can be stored as UTF-8 (a lone surrogate can't)."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
