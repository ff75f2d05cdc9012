"""Orchestration: what runs when. Applications, their plan and step, and how Dagster runs them."""

from orchestration.application import Application
from orchestration.batchlog import ApplicationState, application_state, served_versions
from orchestration.build import build_definitions
from orchestration.catalog import systems_for
from orchestration.instance import prepare_dagster_home
from orchestration.lake_resource import LakeResource
from orchestration.message_stream import MessageStream
from orchestration.retention import discard, discard_all
from orchestration.run import RunReport, plan_application, run_application
from orchestration.sensing.launch_when import LaunchWhen
from orchestration.session_scope import session_scope
from orchestration.step import StepEvent, StepReport
from orchestration.translator import AdjunctTranslator, AssetSubject
from orchestration.update_expressions import update_message

__all__ = [
    "AdjunctTranslator",
    "Application",
    "ApplicationState",
    "AssetSubject",
    "LakeResource",
    "LaunchWhen",
    "MessageStream",
    "RunReport",
    "StepEvent",
    "StepReport",
    "application_state",
    "build_definitions",
    "discard",
    "discard_all",
    "plan_application",
    "prepare_dagster_home",
    "run_application",
    "served_versions",
    "session_scope",
    "systems_for",
    "update_message",
]
