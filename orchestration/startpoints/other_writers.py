"""Guards an application's first run: another application may have written its outputs, such as its own former name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    BatchLog,
    check_not_renamed,
    list_applications,
)
from dagster_adjunct.orchestration.startpoints.store import open_startpoints
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import SystemStreamPartition

_SHARED = ("stream", "table")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class OtherWriter:
    """An application that has written `outputs` of the new one, from `partitions` that the new one reads too."""

    name: str
    batches: int
    outputs: tuple[str, ...]
    partitions: tuple[SystemStreamPartition, ...]

    def words(self, app: str) -> str:
        """Return what a run of the new application would repeat."""
        streams = ", ".join(dict.fromkeys(ssp.qualified_stream for ssp in self.partitions))
        shown = ", ".join(self.outputs[:_SHOWN]) + (", …" if len(self.outputs) > _SHOWN else "")
        return (
            f"application {app!r} has never run, and application {self.name!r} has written {shown} from {streams} "
            f"({self.batches:,} batches): a run would read and write these records again"
        )


def describe_other_writers(lake: Lake, app: Application) -> list[str]:
    """Return why runs are rejected, for the plan: a rename, or another application that wrote the outputs."""
    if not lake.exists():
        return []
    commit, state = BatchLog(lake, app.name).read()
    if state.renamed_to is not None:
        return [f"application {app.name!r} was renamed {state.renamed_to!r}: no run starts under its former name."]
    writers = [] if commit is not None else _find_writers(app, _read_other_states(lake, app))
    return [f"{writer.words(app.name)} (adjunct app rename)." for writer in writers]


def check_first_run(lake: Lake, app: Application, *, adopt: bool = False) -> None:
    """Raise ConfigurationError for a renamed application, and for a first run that would write existing outputs again.

    The latter is a first run where another application has written the same outputs from the same inputs, unless
    startpoints say where each partition begins, or `adopt` accepts the outputs as they are.
    """
    commit, state = BatchLog(lake, app.name).read()
    check_not_renamed(app.name, state)
    others = {} if commit is not None else _read_other_states(lake, app)
    for name, other in others.items():
        if other.renamed_to == app.name:
            raise ConfigurationError(
                f"application {name!r} is being renamed {app.name!r}, and the rename has not finished.",
                f"Finish it: adjunct app rename {name} {app.name} --reason ….",
                application=app.name,
            )
    writers = [] if adopt else list(_find_writers(app, others))
    if not writers:
        return
    stored = open_startpoints(lake, app).read()
    handed = [request for held in stored.handed.values() for request in held.values()]
    asked = {request.ssp for request in (*stored.waiting, *handed) if request.until is None}
    for writer in writers:
        if not asked.issuperset(writer.partitions):
            stream = writer.partitions[0].qualified_stream
            raise ConfigurationError(
                f"{writer.words(app.name)}.",
                f"If it is the same application, take over its log: adjunct app rename {writer.name} {app.name} "
                f"--reason …. "
                f"Otherwise set where it begins (adjunct startpoint set MODULE:APP {stream} --upcoming --reason …), "
                f"or let "
                "it add all records to the existing outputs: --adopt (adopt=True; adopt in the config of the Dagster "
                "op).",
                application=app.name,
                stream=stream,
            )


def _read_other_states(lake: Lake, app: Application) -> dict[str, ApplicationState]:
    names = [name for name in list_applications(lake) if name != app.name]
    return {name: BatchLog(lake, name).read().state for name in names}


def _find_writers(app: Application, others: Mapping[str, ApplicationState]) -> Iterator[OtherWriter]:
    targets = (operator.spec.target(app) for operator in app.operators)
    outputs = sorted({target.name for target in targets if target is not None and target.kind in _SHARED})
    for name, state in others.items():
        # "lost_offsets" are counted under the name of an input.
        written = tuple(output for output in outputs if state.totals.get(output, {}).keys() - {"lost_offsets"})
        read = tuple(sorted(ssp for ssp in state.checkpoint if ssp.qualified_stream in app.inputs))
        if written and read:
            yield OtherWriter(name, state.batch, written, read)
