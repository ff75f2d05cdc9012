"""What a fan-out left, in words for people: a line for each request that no task applies, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.streams.interface.startpoint import describe_startpoint

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.startpoints.requests.fan_out import FanOut
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest


def gone_in_words(fan_out: FanOut) -> list[str]:
    """Return in words what was deleted and will not be applied, a line each."""
    lines = [f"{_in_words(request)} has expired: no run has taken it up in time" for request in fan_out.expired]
    lines += [
        f"{_in_words(request)} is passed over: one that was asked for later waits there"
        for request in fan_out.passed_over
    ]
    return lines + [
        f"{_in_words(request)} had been applied already, and each request is applied once: ask with a new one"
        for request in fan_out.again
    ]


def left_in_words(fan_out: FanOut) -> list[str]:
    """Return in words what is there and not applied by any task, a line each."""
    lines = [
        f"{_in_words(request)} waits, and no task "
        f"{'' if request.task is None else repr(request.task) + ' '}reads the partition"
        for request in fan_out.unknown
    ]
    lines += [
        f"{_in_words(request)}, handed to {task!r}, waits, and no task reads the partition any more"
        for task, requests in fan_out.stranded.items()
        for request in requests.values()
    ]
    lines += [f"{_in_words(request)} waits behind one that can't be read" for request in fan_out.behind]
    held = {ssp for ssps in fan_out.held.values() for ssp in ssps}
    for entry in fan_out.unreadable:
        waits = "a startpoint was handed out" if entry.kind == "fan-out" else "a startpoint waits"
        more = "; nothing is read there until it is taken back" if entry.at and entry.ssp in held else ""
        lines.append(f"{entry.partition or entry.key}: {waits} that is left alone{more}: {entry.error}")
    named = {entry.ssp for entry in fan_out.unreadable}
    lines += [f"{ssp}: nothing is read there: what its task was handed can't be read" for ssp in sorted(held - named)]
    return lines


def left_alone_in_words(fan_out: FanOut) -> list[str]:
    """Return in words what is left alone where startpoints are switched off, a line each."""
    return [
        f"{request.ssp}: startpoints are switched off: {describe_startpoint(request.startpoint)} is left alone "
        f"({request.by}: {request.reason})"
        for request in fan_out.left_alone
    ]


def _in_words(request: StartpointRequest) -> str:
    return f"{request.ssp}: a startpoint ({request.by}: {request.reason})"
