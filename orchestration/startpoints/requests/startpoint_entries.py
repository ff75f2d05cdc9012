"""The stored entries of one application's startpoints: each is changed only where it still is what was decided over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.startpoints.requests.fan_out import without
from dagster_adjunct.orchestration.startpoints.requests.startpoint_documents import (
    RequestReader,
    request_key,
    sequence_of,
    settled_key,
    task_json,
    task_key,
)
from dagster_adjunct.resources.errors import MalformedDocumentError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import Target
    from dagster_adjunct.orchestration.startpoints.requests.unreadable_requests import Unreadable
    from dagster_adjunct.resources.metadata import Namespace, NamespaceSnapshot
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class StartpointEntries:
    """The two namespaces of one application: what is asked for, and what was handed to tasks."""

    requests: Namespace
    fan_outs: Namespace
    stored: RequestReader

    def remove(
        self,
        chosen: Mapping[
            str, tuple[frozenset[SystemStreamPartition] | None, Mapping[SystemStreamPartition, str] | None]
        ],
    ) -> None:
        """Remove what tasks have to apply: by task, at these partitions (None: all), with these ids (None: any)."""
        if not chosen:
            return

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], None]:
            changes: dict[str, Any] = {}
            for task, (ssps, ids) in chosen.items():
                key = task_key(task)
                try:
                    held = self.stored.task(key, snapshot.get(key))
                except MalformedDocumentError:
                    continue  # it stays as it is
                changes[key] = task_json(without(held, ssps, ids))
            return changes, None

        self.fan_outs.transact(decide, by="applied")

    def take_back(self, wanted: Mapping[Target, int], *, by: str) -> set[Target]:
        """Delete the requests of these sequences; return the targets of those that no task was handed.

        They count as fanned out first: a coordinator that has read one, and has not committed yet, decides again.
        """

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], set[Target]]:
            state = self.stored.state(snapshot.items())
            pending = [request for held in state.tasks.values() for request in held.pending.values()]
            handed = {(request.target, request.sequence) for request in pending}
            handed |= set(state.settled.items())
            ours = {target for target, sequence in wanted.items() if (target, sequence) not in handed}
            return {settled_key(target): wanted[target] for target in ours}, ours

        if not wanted:
            return set()
        taken = self.fan_outs.transact(decide, by=by)
        self.delete(wanted, by=by)
        return taken

    def delete_as_it_is(self, key: str, value: object, *, by: str) -> bool:
        """Delete the entry of a request where it still is this value; return whether it was."""

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], bool]:
            there = snapshot.get(key) == value
            return {key: None} if there else {}, there

        return self.requests.transact(decide, by=by)

    def remove_unreadable(self, unread: Unreadable, by: str) -> bool:
        """Remove what can't be read of a fan-out where it is still as it was found; return whether it was."""

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], bool]:
            entry = snapshot.get(unread.key)
            if entry is not None and entry == unread.value:
                return {unread.key: None}, True
            try:
                held = self.stored.task(unread.key, entry)
            except MalformedDocumentError:
                return {}, False
            kept = tuple(part for part in held.unread if part.value != unread.value)
            return {unread.key: task_json(replace(held, unread=kept))}, kept != held.unread

        return self.fan_outs.transact(decide, by=by)

    def delete(self, wanted: Mapping[Target, int], *, by: str) -> None:
        """Delete requests, each only where it still is the one of this sequence."""
        sequences = {request_key(target): sequence for target, sequence in wanted.items()}
        if not sequences:
            return

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], None]:
            there = {key: snapshot.get(key) for key in sequences}
            return {key: None for key, entry in there.items() if entry and sequence_of(entry) == sequences[key]}, None

        self.requests.transact(decide, by=by)
