"""Ticks of an application's sensors on a lake, with nothing launched."""

from __future__ import annotations

from typing import Any

from dagster import DagsterInstance, Definitions, RunRequest, SensorDefinition, SkipReason, build_sensor_context
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import InProcessCodeLocationOrigin, RemoteInstigatorOrigin, RemoteRepositoryOrigin
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, SensorInstigatorData
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from dagster_adjunct import Application, Lake, LakeResource, build_definitions

_HERE = InProcessCodeLocationOrigin(LoadableTargetOrigin(module_name="tests"))
_LAKES: dict[str, Lake] = {}


class GivenLake(LakeResource):
    """The lake that a test has made, with its clock."""

    def open(self) -> Lake:
        return _LAKES[str(self.url)]


def given_lake(lake: Lake) -> GivenLake:
    """Return the resource that gives this lake, with its clock and its store."""
    _LAKES[lake.url] = lake
    return GivenLake(url=lake.url)


def switch_on(instance: DagsterInstance, *sensors: str) -> None:
    """Store that sensors are on, as the UI does."""
    for name in sensors:
        origin = RemoteInstigatorOrigin(RemoteRepositoryOrigin(_HERE, "tests"), name)
        state = InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.RUNNING, SensorInstigatorData())
        instance.add_instigator_state(state)


class Ticker:
    """One sensor of an application, asked again and again; `cursor` is what it keeps."""

    def __init__(self, lake: Lake, app: Application, instance: DagsterInstance, sensor: str, **options: Any) -> None:
        self._instance = instance
        self._resource = given_lake(lake)
        self.defs: Definitions = build_definitions(app, lake=lake.url, **options)
        self._sensor = self.defs.resolve_sensor_def(sensor)
        self.cursor: str | None = None

    def tick(self) -> RunRequest | str:
        """Return the run that the sensor asks for, or why it asks for none."""
        assert isinstance(self._sensor, SensorDefinition)
        with build_sensor_context(
            instance=self._instance,
            cursor=self.cursor,
            definitions=self.defs,
            resources={"adjunct_lake": self._resource},
        ) as context:
            answer = self._sensor(context)
            self.cursor = context.cursor
        if isinstance(answer, SkipReason):
            return str(answer.skip_message)
        assert isinstance(answer, RunRequest)
        return answer

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
