"""Holds: files of a stream that are kept for something outside, such as a table in another catalogue.

    streams/NAME/holds/{hash of the holder}-{number}.json

A hold names the folders of files as they were at one commit. Who maintains the stream spares them until it is let go.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import MalformedDocumentError, ObjectExistsError, OffsetOutOfRangeError
from dagster_adjunct.resources.objects.held_objects import delete_holds, holder_prefix
from dagster_adjunct.resources.streams.lake.segment_index import all_segments
from dagster_adjunct.resources.streams.lake.stream_states import StreamStates

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake


def hold(lake: Lake, stream: str, identity: str, number: str, attempts: Iterable[str], *, holder: str) -> None:
    """Keep these folders of files of the stream with this identity from being deleted, until `let_go`.

    To hold them again changes nothing. Raises OffsetOutOfRangeError where the stream does not list them any more: they
    may be about to be deleted.
    """
    wanted = sorted(set(attempts))
    body = json.dumps({"holder": holder, "attempts": wanted}).encode()
    key = f"{_prefix(lake, stream, holder)}{number}.json"
    try:
        lake.store.put_if_absent(key, body)
    except ObjectExistsError:
        return  # held since they were listed
    # Whoever drops them from the index from now on looks for holds after that, and finds this one.
    streams = StreamStates(lake)
    _, state = streams.state(stream)
    listed = {segment.attempt for segment in all_segments(state, streams.pages_of(stream))}
    gone = [attempt for attempt in wanted if attempt not in listed]
    if gone or state.id != identity:
        lake.store.delete(key)
        raise OffsetOutOfRangeError(
            f"stream {stream!r} has changed since its commit {number}: {len(gone)} of {len(wanted)} folders of files "
            "are not listed any more.",
            "Take a new view of it (stream_view), and repeat this.",
            stream=f"lake.{stream}",
        )


def let_go(lake: Lake, stream: str, *, holder: str, keep: Collection[str] = ()) -> tuple[str, ...]:
    """End this holder's holds but those of the numbers in `keep`; return the numbers that it held.

    With `keep`, holds of the last hour stay as well (`delete_holds`).
    """
    return delete_holds(lake.store, _prefix(lake, stream, holder), keep=keep)


def held_attempts(lake: Lake, stream: str) -> dict[str, list[str]]:
    """Return the folders of files that are held, by holder. Raises MalformedDocumentError."""
    attempts_of: dict[str, set[str]] = {}
    for item in lake.store.list(f"{lake.stream_prefix(stream)}/holds/"):
        try:
            body = json.loads(lake.store.get(item.key).data)
            attempts_of.setdefault(body["holder"], set()).update(body["attempts"])
        except (ValueError, KeyError, TypeError) as error:
            raise MalformedDocumentError(
                f"the hold {item.key!r} in {lake.url} can't be read ({error!r}), so nobody knows what it keeps.",
                "Restore it, or delete it and register the stream again where it was held.",
                document=item.key,
            ) from error
    return {holder: sorted(attempts) for holder, attempts in attempts_of.items()}


def _prefix(lake: Lake, stream: str, holder: str) -> str:
    return holder_prefix(f"{lake.stream_prefix(stream)}/holds/", holder)
