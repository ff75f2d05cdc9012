"""Declarative automation: ready-made conditions for assets, and the sensor that evaluates the
conditions.

A ready-made condition asks the same `Launcher` as the sensor for the same purpose. Dagster
evaluates conditions asset by asset, and launches only the assets whose condition is true. A sensor
launches more: all assets of the application's job, with tags and configuration. So
`AutomationSensor` replaces the runs that Dagster would request by those that the launchers request
(`complete_requests`).
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import dagster as dg
from dagster import SkipReason as Skip

from dagster_adjunct.orchestration.code_location.dagster_internals import SensorExecutionData
from dagster_adjunct.orchestration.code_location.resources import LakeResource
from dagster_adjunct.orchestration.code_location.sensor_ticks import (
    Launcher,
    Tick,
    digest,
    location_of,
    read_cursor,
    write_cursor,
)
from dagster_adjunct.resources.errors import ConfigurationError, raise_first
from dagster_adjunct.resources.validation import validated

Condition = dg.AutomationCondition[Any]
_GIVE_APPLICATION = "Give it to the application: Application(…, automation_condition={}())."


class _Use(NamedTuple):
    """What may have a ready-made condition, and the next step of the error if something else has
    it.
    """

    purpose: str
    next_step: str


_USES = {
    "new_records": _Use("applications with outputs", _GIVE_APPLICATION.format("new_records")),
    "new_startpoints": _Use(
        "applications with outputs, unless they have startpoints=False",
        _GIVE_APPLICATION.format("new_startpoints"),
    ),
    "new_version": _Use(
        "bounded datasets whose versions are delivered by markers or folders",
        "Use stale() for a change stream's table, and AutomationCondition.on_cron(…) for a query.",
    ),
    "stale": _Use(
        "unbounded datasets that declare freshness=",
        "Declare freshness=timedelta(…) of the change stream's table, or use another condition.",
    ),
}
"""By kind of ready-made condition."""


class Owner(NamedTuple):
    """What has a condition, such as `Owner("dataset", "planes")`."""

    kind: str
    name: str


@validated
def new_records() -> Condition:
    """Return the condition of an application that is true when its sensor for new records would
    launch a run.

    `launch_when` of `build_definitions` says when that is. The condition launches the same run as
    the sensor: all assets of the application's job.
    """
    return ReadyMade("new_records")


@validated
def new_startpoints() -> Condition:
    """Return the condition of an application that is true when its sensor for startpoints would
    launch a run.
    """
    return ReadyMade("new_startpoints")


@validated
def new_version() -> Condition:
    """Return the condition of a bounded dataset that is true when a version of it is completely
    delivered.

    If the dataset's versions are partitions, the condition is true for that version's partition
    only.
    """
    return ReadyMade("new_version")


@validated
def stale() -> Condition:
    """Return the condition of an unbounded dataset that is true when it fails its freshness policy.

    It fails if no run has checked its stream for changes within the time that it declares as
    `freshness`.
    """
    # Dagster evaluates no freshness policy before the first materialization.
    failed = dg.AutomationCondition.freshness_failed() | dg.AutomationCondition.missing()
    return (failed & ReadyMade("stale")).with_label("stale")


@dataclass(frozen=True)
class ReadyMade(dg.AutomationCondition[Any]):
    """A ready-made condition as users declare it; `bind_condition` replaces it by one that asks
    a launcher.
    """

    kind: str

    @property
    def name(self) -> str:
        return self.kind

    def evaluate(self, context: dg.AutomationContext[Any]) -> dg.AutomationResult[Any]:
        """Raise ConfigurationError, because only conditions of assets that Adjunct does not make
        are still unbound.
        """
        use = _USES[self.kind]
        raise ConfigurationError(
            f"asset {context.root_context.key.to_user_string()} has the automation condition"
            f" {self.kind}(), which is for {use.purpose}.",
            use.next_step,
            argument="automation_condition",
        )


def bind_condition(
    condition: Condition, owner: Owner, launchers: Mapping[str, Launcher], resource: LakeResource
) -> Condition:
    """Return the condition with each ready-made one replaced by one that asks its launcher.

    Raises ConfigurationError for a ready-made one without a launcher.
    """
    bound = condition
    for ready_made in set(_ready_made(condition)):
        launcher = launchers.get(ready_made.kind)
        if launcher is None:
            use = _USES[ready_made.kind]
            raise condition_error(
                owner,
                f"has the automation condition {ready_made.kind}(), which is for {use.purpose}.",
                use.next_step,
            )
        bound = bound.replace(ready_made, _Asking(ready_made.kind, launcher, resource))
    return bound


def check_condition(condition: object, owner: Owner) -> Condition | None:
    """Return the condition, or None if it is None. Raises ConfigurationError for any other
    value.
    """
    if condition is None or isinstance(condition, dg.AutomationCondition):
        return condition
    raise condition_error(
        owner,
        f"has automation_condition={condition!r}: expected an AutomationCondition.",
        "Give a public condition or one of Dagster's, and call it: new_records().",
    )


def condition_error(owner: Owner, problem: str, next_step: str) -> ConfigurationError:
    """Return the error about the condition of `owner`."""
    return ConfigurationError(
        f"{owner.kind} {owner.name!r} {problem}",
        next_step,
        argument="automation_condition",
        **{owner.kind: owner.name},
    )


def _ready_made(condition: Condition) -> Iterator[ReadyMade]:
    """Yield the ready-made conditions of which a condition is built."""
    if isinstance(condition, ReadyMade):
        yield condition
    for child in condition.children:
        yield from _ready_made(child)


@dataclass
class Answer:
    """A launcher's decision in one tick, its `cursor` for the next tick, and whether that has
    `changed`.

    `keys` are the assets whose conditions asked and became true.
    """

    launcher: Launcher
    decision: dg.RunRequest | Skip
    cursor: str | None
    changed: bool
    keys: set[dg.AssetKey] = field(default_factory=set)


@dataclass
class _Tick:
    """One tick of an `AutomationSensor`: the launchers' answers, and the errors of launchers
    that could not decide.
    """

    log: logging.Logger
    location: str | None
    began: float = field(default_factory=time.monotonic)
    answers: list[Answer] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)


_CURRENT: ContextVar[_Tick | None] = ContextVar("automation_tick", default=None)
# By view of the asset graph, then by launcher name. Dagster makes one view a tick, so each launcher
# is asked once.
_ANSWERS: WeakKeyDictionary[Any, dict[str, Answer]] = WeakKeyDictionary()


class _Asking(dg.AutomationCondition[Any]):
    """A ready-made condition that asks its launcher; assets with the same launcher share one
    answer a tick.
    """

    def __init__(self, kind: str, launcher: Launcher, resource: LakeResource) -> None:
        self._kind = kind
        self._launcher = launcher
        self._resource = resource

    @property
    def name(self) -> str:
        return self._kind

    @property
    def description(self) -> str:
        return self._launcher.description

    def evaluate(self, context: dg.AutomationContext[Any]) -> dg.AutomationResult[Any]:
        """Return the candidates if the launcher requests a run (of its one partition, if it
        names one), else none.
        """
        if context.candidate_subset.is_empty:
            return dg.AutomationResult(context, context.get_empty_subset(), cursor=context.cursor)
        answers = _ANSWERS.setdefault(context.asset_graph_view, {})
        if self._launcher.name not in answers:
            answers[self._launcher.name] = self._ask(context)
        answer = answers[self._launcher.name]
        if isinstance(answer.decision, Skip):
            return dg.AutomationResult(context, context.get_empty_subset(), cursor=answer.cursor)
        answer.keys.add(context.root_context.key)
        wanted = context.candidate_subset
        partition = answer.decision.partition_key
        if partition is not None:
            wanted = wanted.compute_intersection_with_partition_keys({partition})
        return dg.AutomationResult(context, wanted, cursor=answer.cursor)

    def _ask(self, context: dg.AutomationContext[Any]) -> Answer:
        """Return what the launcher decides now; within a tick of `AutomationSensor` (`_CURRENT`),
        its answer and error are also added to the tick.
        """
        current = _CURRENT.get()
        launcher = self._launcher
        tick = Tick(
            context.asset_graph_view.instance,
            context.log if current is None else current.log,
            _stored_cursor(context),
            launcher.job.name,
            launcher.assets,
            self._resource,
            None if current is None else current.location,
            by_condition=True,
        )
        if current is not None:
            tick.began = current.began
        try:
            decision = launcher.evaluate(tick)
        except Exception as error:
            # A user's stream system may raise anything, and other conditions go on.
            if current is None:
                raise
            current.errors.append(error)
            decision = Skip(str(error))
        cursor = write_cursor(tick.cursor) if tick.changed else tick.stored
        answer = Answer(launcher, decision, cursor, tick.changed)
        if isinstance(decision, Skip):
            tick.log.info(f"{launcher.name}: {decision.skip_message}")
        if current is not None:
            current.answers.append(answer)
        return answer


def _stored_cursor(context: dg.AutomationContext[Any]) -> str | None:
    """Return the launcher's cursor as the previous tick left it.

    If the launcher requested a run then, but the rest of the asset's condition was false, no run
    was launched: this attempt is taken back, so that the launcher does not wait before the next
    one.
    """
    before = context.previous_true_subset
    if context.cursor is None or before is None or before.is_empty:
        return context.cursor
    requested = context.get_previous_requested_subset(context.root_context.key)
    if requested is not None and not requested.is_empty:
        return context.cursor
    cursor, _ = read_cursor(context.cursor)
    attempt = max(cursor.asked.attempt - 1, 0)
    asked = cursor.asked.model_copy(update={"attempt": attempt, "asked_at": 0.0})
    return write_cursor(cursor.model_copy(update={"asked": asked}))


@dataclass(frozen=True)
class Steps:
    """By asset, all assets that its op makes `together`; by name of each of the `jobs`, the
    assets that it makes.
    """

    together: Mapping[dg.AssetKey, frozenset[dg.AssetKey]]
    jobs: Mapping[str, frozenset[dg.AssetKey]]

    def whole(self, keys: Collection[dg.AssetKey]) -> set[dg.AssetKey]:
        """Return these assets, and all others that the same ops make."""
        found: set[dg.AssetKey] = set()
        for key in keys:
            found |= self.together.get(key, {key})
        return found


def complete_requests(
    requests: Sequence[dg.RunRequest],
    answers: Sequence[Answer],
    steps: Steps,
    parents: Callable[[dg.AssetKey], Collection[dg.AssetKey]],
) -> list[dg.RunRequest]:
    """Return the runs to launch: Dagster's `requests`, completed by what the launchers decided
    (`answers`).

    A launcher's request is a run of its job, with the job's assets, tags, configuration and run
    key. Requested assets outside the job join that run if they depend on one of its assets, unless
    the run is to stay (`LaunchWhen.stay`). The rest gets a run of its own. An op always makes all
    its assets.
    """
    completed: list[dg.RunRequest] = []
    for request in requests:
        requested = steps.whole(request.asset_selection or ())
        rest = requested
        launches = _launches(request, answers)
        for job, launch in launches.items():
            of_job = requested & steps.jobs.get(job, frozenset())
            launch.keys = steps.whole(launch.keys) | of_job
            rest = rest - launch.keys
        for job, launch in launches.items():
            # Only a run that stays has a configuration.
            stays = any(decision.run_config for decision in launch.decisions)
            if not stays:
                _join_depending(launch.keys, rest, steps, parents)
                rest = rest - launch.keys
            completed.append(_merged(launch.decisions, job, launch.keys, request))
        if rest:
            completed.append(
                dg.RunRequest(
                    tags=request.tags,
                    asset_selection=sorted(rest),
                    partition_key=request.partition_key,
                    asset_check_keys=request.asset_check_keys,
                )
            )
    return completed


def _join_depending(
    keys: set[dg.AssetKey],
    rest: set[dg.AssetKey],
    steps: Steps,
    parents: Callable[[dg.AssetKey], Collection[dg.AssetKey]],
) -> None:
    """Add to `keys` the assets of `rest` that depend on one of the keys, directly or through other
    assets of `rest`, with all that their ops make.
    """
    while more := [key for key in rest - keys if not keys.isdisjoint(parents(key))]:
        keys |= steps.whole(more)


@dataclass
class _Launch:
    """The assets that launchers of one job ask for, and their requests."""

    keys: set[dg.AssetKey] = field(default_factory=set)
    decisions: list[dg.RunRequest] = field(default_factory=list)


def _launches(request: dg.RunRequest, answers: Sequence[Answer]) -> dict[str, _Launch]:
    """Return, by job, what launchers decided to launch when conditions of the requested assets
    asked them.
    """
    launches: dict[str, _Launch] = defaultdict(_Launch)
    for answer in answers:
        launcher = answer.launcher
        decision = answer.decision
        if isinstance(decision, Skip) or decision.partition_key != request.partition_key:
            continue
        if answer.keys.intersection(request.asset_selection or ()):
            tagged = dg.RunRequest(
                decision.run_key,
                decision.run_config,
                {**(launcher.job.tags or {}), **decision.tags},
            )
            launch = launches[launcher.job.name]
            launch.keys.update(decision.asset_selection or launcher.assets)
            launch.decisions.append(tagged)
    return launches


def _merged(
    decisions: Sequence[dg.RunRequest],
    job: str,
    keys: Collection[dg.AssetKey],
    request: dg.RunRequest,
) -> dg.RunRequest:
    """Return one run of these assets for the requests of several launchers of one job."""
    run_keys = [str(decision.run_key) for decision in decisions]
    run_config: dict[str, Any] = {}
    tags = dict(request.tags)
    for decision in decisions:
        run_config |= decision.run_config
        tags |= decision.tags
    return dg.RunRequest(
        run_key=run_keys[0] if len(run_keys) == 1 else f"{job}:{digest(run_keys)}",
        run_config=run_config,
        tags=tags,
        asset_selection=sorted(keys),
        partition_key=request.partition_key,
    )


class AutomationSensor(dg.AutomationConditionSensorDefinition):
    """Evaluates the conditions of Adjunct's assets in the code location; it is off by default.

    A tick without runs gives as its reason what the ready-made conditions wait for. If a launcher
    raises an error, the tick fails, unless another one requests a run or has a changed cursor,
    which a failed tick would not store.
    """

    def __init__(
        self,
        name: str,
        steps: Steps,
        keys: Sequence[dg.AssetKey],
        interval: int,
        metadata: Any = None,
    ) -> None:
        self._steps = steps
        self._keys = keys
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dg.BetaWarning)  # of use_user_code_server
            super().__init__(
                name,
                target=dg.AssetSelection.assets(*keys),
                default_status=dg.DefaultSensorStatus.STOPPED,
                minimum_interval_seconds=interval,
                description="Launches what the automation conditions of these assets request.",
                metadata=metadata,
                emit_backfills=False,  # the runs of a backfill could not be completed
                use_user_code_server=True,
            )

    def with_attributes(self, *, jobs: Any = None, metadata: Any = None) -> AutomationSensor:
        """Return a copy with other metadata; like Dagster's sensor of conditions, it has no jobs to
        replace.
        """
        if metadata is None:
            metadata = self.metadata
        assert self.minimum_interval_seconds is not None
        return AutomationSensor(
            self.name, self._steps, self._keys, self.minimum_interval_seconds, metadata
        )

    def evaluate_tick(self, context: dg.SensorEvaluationContext) -> SensorExecutionData:
        """Evaluate the conditions; see `complete_requests` for what is launched."""
        tick = _Tick(context.log, location_of(context))
        token = _CURRENT.set(tick)
        try:
            made = super().evaluate_tick(context)
        finally:
            _CURRENT.reset(token)
        if not made.run_requests and not any(answer.changed for answer in tick.answers):
            raise_first(tick.errors)
        for error in tick.errors:
            context.log.error(str(error))
        if made.run_requests:
            return made
        reasons = [
            f"{answer.launcher.name}: {answer.decision.skip_message}"
            for answer in tick.answers
            if isinstance(answer.decision, Skip)
        ]
        return SensorExecutionData(
            skip_message=" ".join(reasons) or "No condition is true.",
            cursor=made.cursor,
            log_key=made.log_key,
            automation_condition_evaluations=made.automation_condition_evaluations,
        )

    def resolve_run_requests(
        self,
        run_requests: Sequence[dg.RunRequest],
        context: dg.SensorEvaluationContext,
        *args: Any,
        **kwargs: Any,
    ) -> Sequence[dg.RunRequest]:
        """Return the requests after `complete_requests`, with the job and checks that Dagster
        adds to each.
        """
        tick = _CURRENT.get()
        repository = context.repository_def
        if tick is not None and repository is not None:
            graph = repository.asset_graph
            run_requests = complete_requests(
                run_requests, tick.answers, self._steps, lambda key: graph.get(key).parent_keys
            )
        return super().resolve_run_requests(run_requests, context, *args, **kwargs)
