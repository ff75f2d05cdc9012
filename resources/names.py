"""Names that are safe as one segment of a path or an object key."""

from __future__ import annotations

import re

from dagster_adjunct.resources.errors import ConfigurationError, InvalidNameError

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def check_name(kind: str, name: str) -> str:
    """Return `name` if it is safe; `kind` says in the error what it names ("dataset", "stream").

    Safe is: 1 to 100 letters, digits, `-` and `_`, the first one a letter or digit. Dots are left out
    because `system.stream.3` is how a stream partition is written.
    """
    if not isinstance(name, str) or not _SAFE.fullmatch(name):
        system, _, stream = str(name).partition(".")
        if kind == "stream" and _SAFE.fullmatch(system) and _SAFE.fullmatch(stream):
            problem, step = f"stream {name!r} is named with its system: expected its name alone.", f"Write {stream!r}."
        else:
            problem = f"{kind} name {name!r} is not safe: expected 1 to 100 letters, digits, '-' or '_', "
            problem += "beginning with a letter or digit."
            safe = re.sub(r"[^A-Za-z0-9_-]+", "-", str(name)).strip("-_")[:100]
            step = f"Choose another name, such as {safe!r}." if safe else "Choose another name."
        raise InvalidNameError(problem, step, name=str(name))
    return name


def split_stream_name(qualified: str) -> tuple[str, str]:
    """Split "system.stream" into its two checked names."""
    system, dot, stream = str(qualified).partition(".")
    if not dot:
        raise InvalidNameError(
            f"stream {qualified!r} names no system: expected SYSTEM.STREAM.",
            f'Write "lake.{qualified}" for a stream of the lake.',
            name=str(qualified),
        )
    if "." in stream:
        raise InvalidNameError(
            f"stream {qualified!r} has more than one dot: expected SYSTEM.STREAM.",
            f'Write "{system}.{stream.partition(".")[0]}", without a partition; a stream\'s name has no dots.',
            name=str(qualified),
        )
    return check_name("system", system), check_name("stream", stream)


def stream_within(system: str, name: str) -> str:
    """Return the name of a stream within `system`; "SYSTEM.STREAM" is taken as well. One of another is refused."""
    if "." not in name:
        return check_name("stream", name)
    named, stream = split_stream_name(name)
    if named != system:
        raise ConfigurationError(
            f"{name!r} is a stream of the system {named!r}: expected one of {system!r}.",
            f'Write "STREAM" or "{system}.STREAM".',
            stream=name,
            system=named,
        )
    return stream


def split_partitions(text: str) -> tuple[str, str | None]:
    """Split "system.stream.0-3,7" into "system.stream" and what it says of partitions, None where it says nothing.

    Nothing is checked: `split_stream_name` does that.
    """
    system, dot, rest = text.strip().partition(".")
    stream, says, partitions = rest.partition(".")
    return f"{system}{dot}{stream}", partitions if says else None
