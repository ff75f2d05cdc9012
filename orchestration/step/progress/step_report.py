"""What a step tells: events while its batches run, and a report at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.step.progress.time_progress import InputTimes, StateSize
    from dagster_adjunct.resources.tables.metrics import TableMetrics

_FEW = "; one task a stage, as they are few"


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One thing that has just happened to batch number `batch`, or ("caught-up") after it.

    In order: "lease" (text) where the run waited for another one or took over from it, "planned" (how many inputs,
    operators, outputs, tables and datasets) once a run, "startpoint" (text, one each) at the start of a run, "table"
    (report) when a dataset that lives for one run was built or has taken changes in, "lost" (text) where retention was
    faster, "analysis" before Spark checks the operators over no records, once a run and where columns have changed,
    "intent" (records, unit, versions, few: whether it takes one task a stage), "output" (output) before each output,
    "again" (text) where the store broke off and the batch's work begins anew, "outputs" when all are written, "batch"
    (records so far, counters, watermarks) when its end is committed.
    """

    what: str
    batch: int
    detail: Mapping[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the event in one line, for logs."""
        if self.what == "caught-up":
            return f"caught up after batch {self.batch}"
        if self.what == "table":
            return str(self.detail["report"].summary())
        if self.what in ("lease", "startpoint", "lost"):
            return str(self.detail["text"])
        if self.what == "again":
            return f"batch {self.batch}: {self.detail['text']}"
        if self.what == "planned":
            parts = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in self.detail.items() if count]
            return f"planned: {', '.join(parts)}"
        words = {
            "analysis": "checking all operators with Spark, over no records",
            "intent": f"{{records:,}} {{unit}}, dataset versions {{versions}}{_FEW if self.detail.get('few') else ''}",
            "output": "writing {output}",
            "outputs": "all outputs written",
            "batch": "committed; {records:,} {unit} so far",
        }[self.what]
        told = "; ".join(input_times.words() for input_times in self.detail.get("watermarks", ()))
        more = f"; {told}" if told else ""
        return f"batch {self.batch}: {words.format(**{'unit': 'records', **self.detail})}{more}"


def planned_event(app: Application) -> StepEvent:
    """Return the event of a plan without conflicts: how much of everything the application has."""
    kinds = {"input": app.inputs, "operator": app.operators, "output": app.outputs}
    kinds |= {"table": app.tables, "dataset": app.datasets}
    return StepEvent("planned", 0, {kind: len(all_of_it) for kind, all_of_it in kinds.items()})


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one run of the step did. Counters are of this run; `state` is the application's after it.

    `versions` are the ids of the versions that its batches met, by dataset. `startpoints` says in words which
    startpoints were resolved and applied, replays begun and ended, and by whom. `measured` has what each remote table
    has counted and measured in this run's tasks, such as how long requests took and waited. `few_batches` took
    one task a stage, as they had few records. `watermarks` say how far each input has come in the times of its records,
    where it declares these; `state_sizes` how much each table of state holds.
    """

    batches: int
    caught_up: bool
    counters: dict[str, dict[str, int]]
    versions: dict[str, list[str]]
    seconds: dict[str, float]
    state: ApplicationState
    startpoints: tuple[str, ...] = ()
    measured: dict[str, TableMetrics] = field(default_factory=dict)
    few_batches: int = 0
    watermarks: tuple[InputTimes, ...] = ()
    state_sizes: Mapping[str, StateSize] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        measured = {name: metrics.to_dict() for name, metrics in self.measured.items()}
        more: dict[str, Any] = {"startpoints": list(self.startpoints), "measured": measured}
        more["watermarks"] = [input_times.to_json() for input_times in self.watermarks]
        more["state_sizes"] = {name: asdict(size) for name, size in self.state_sizes.items()}
        return {**values, **more, "state": self.state.model_dump(mode="json")}
