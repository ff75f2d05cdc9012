"""Ticks of an application's sensors and conditions on a lake, with nothing launched."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from dagster import (
    AutomationCondition,
    DagsterInstance,
    Definitions,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    build_sensor_context,
)
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    CodeLocationOrigin,
    InProcessCodeLocationOrigin,
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    SensorInstigatorData,
)
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from dagster_adjunct import Application, Lake, LakeResource, build_definitions
from dagster_adjunct.automation import new_records, new_startpoints, new_version, stale
from dagster_adjunct.code_location import AdjunctTranslator, AssetSubject
from dagster_adjunct.orchestration.code_location.automation import AutomationSensor

HERE = InProcessCodeLocationOrigin(LoadableTargetOrigin(module_name="tests"))
"""The code location of a Ticker, in which runs without an origin count, too."""
ELSEWHERE = RegisteredCodeLocationOrigin("elsewhere")
_LAKES: dict[str, Lake] = {}


class GivenLake(LakeResource):
    """The lake that a test has made, with its clock."""

    def open(self) -> Lake:
        return _LAKES[str(self.url)]


def given_lake(lake: Lake) -> GivenLake:
    """Return the resource that gives this lake, with its clock and its store."""
    _LAKES[lake.url] = lake
    return GivenLake(url=lake.url)


def job_origin(location: CodeLocationOrigin, job: str) -> RemoteJobOrigin:
    """Return the origin of runs of a job in a code location."""
    return RemoteJobOrigin(RemoteRepositoryOrigin(location, "tests"), job)


def switch_on(instance: DagsterInstance, *sensors: str) -> None:
    """Store that sensors are on, as the UI does."""
    for name in sensors:
        origin = RemoteInstigatorOrigin(RemoteRepositoryOrigin(HERE, "tests"), name)
        state = InstigatorState(
            origin, InstigatorType.SENSOR, InstigatorStatus.RUNNING, SensorInstigatorData()
        )
        instance.add_instigator_state(state)


BOTH = pytest.mark.parametrize("by", ["sensor", "condition"])
"""Runs a test twice: once the sensor launches the runs, once the ready-made condition that asks
the same.
"""

_CONDITIONS: dict[str, Callable[[], AutomationCondition[Any]]] = {
    "_new_records": new_records,
    "_startpoints": new_startpoints,
    "_delivered": new_version,
    "_new_versions": new_version,
    "_stale": stale,
}


class Automated(AdjunctTranslator):
    """Gives the assets of some launchers, by the names of their sensors, the conditions that ask
    these.
    """

    def __init__(self, app: Application, *sensors: str) -> None:
        self._app, self._sensors = app, sensors

    def get_automation_condition(self, subject: AssetSubject) -> AutomationCondition[Any] | None:
        dataset = next((one for one in self._app.datasets if one.name == subject.name), None)
        if subject.kind != "dataset" or dataset is None:
            names = {self._app.name}
        else:
            names = {dataset.name, dataset.version_set or dataset.name}
        made = [
            condition()
            for ending, condition in _CONDITIONS.items()
            if {f"{name.replace('-', '_')}{ending}" for name in names} & {*self._sensors}
        ]
        return functools.reduce(operator.or_, made) if made else None


class Ticker:
    """One launcher of an application, asked again and again; `cursor` is what it keeps.

    Its sensor asks it, or, with by="condition", the automation sensor for the condition of the
    launcher's assets.
    """

    def __init__(
        self,
        lake: Lake,
        app: Application,
        instance: DagsterInstance,
        sensor: str,
        by: str = "sensor",
        **options: Any,
    ) -> None:
        self._instance, self._name = instance, sensor
        self._resource = given_lake(lake)
        if by == "condition":
            options = {"translator": Automated(app, sensor), **options}
            sensor = f"{app.name.replace('-', '_')}_automation"
        self.defs: Definitions = build_definitions(app, lake=lake.url, **options)
        self._sensor = self.defs.resolve_sensor_def(sensor)
        self.cursor: str | None = None

    def tick(self) -> RunRequest | str:
        """Return the run that it asks for, or why it asks for none."""
        assert isinstance(self._sensor, SensorDefinition)
        with build_sensor_context(
            instance=self._instance,
            cursor=self.cursor,
            definitions=self.defs,
            resources={"adjunct_lake": self._resource},
        ) as context:
            context._code_location_origin = (
                HERE  # what the daemon tells a sensor, and nobody else can
            )
            if isinstance(self._sensor, AutomationSensor):
                return self._evaluate(self._sensor, context)
            answer = self._sensor(context)
            self.cursor = context.cursor
        if isinstance(answer, SkipReason):
            return str(answer.skip_message)
        assert isinstance(answer, RunRequest)
        return answer

    def _evaluate(
        self, sensor: AutomationSensor, context: SensorEvaluationContext
    ) -> RunRequest | str:
        with patch.object(LakeResource, "open", lambda resource: self._resource.open()):
            made = sensor.evaluate_tick(context)
        self.cursor = made.cursor
        if not made.run_requests:
            return str(made.skip_message).removeprefix(f"{self._name}: ")
        (request,) = made.run_requests
        return request

    def asked(self) -> RunRequest:
        """Return the run that it must ask for."""
        request = self.tick()
        assert isinstance(request, RunRequest), request
        return request

    def skipped(self) -> str:
        """Return why it asks for none."""
        reason = self.tick()
        assert isinstance(reason, str), reason
        return reason
