"""How a Dagster code location is adjusted: the keys and words of its assets, and when its jobs are launched."""

from __future__ import annotations

from dagster_adjunct._arguments import guard
from dagster_adjunct.orchestration.code_location.dagster_home import prepare_dagster_home
from dagster_adjunct.orchestration.code_location.nodes.asset_subject import AssetSubject
from dagster_adjunct.orchestration.code_location.nodes.translator import AdjunctTranslator
from dagster_adjunct.orchestration.code_location.sensing.launch_when import LaunchWhen

__all__ = [
    "AdjunctTranslator",
    "AssetSubject",
    "LaunchWhen",
    "prepare_dagster_home",
]

guard(globals(), __all__)
