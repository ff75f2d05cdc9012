"""Ready-made conditions for Dagster's declarative automation, which launch what the sensors
launch.
"""

from dagster_adjunct.orchestration.code_location.automation import new_records as new_records
from dagster_adjunct.orchestration.code_location.automation import (
    new_startpoints as new_startpoints,
)
from dagster_adjunct.orchestration.code_location.automation import new_version as new_version
from dagster_adjunct.orchestration.code_location.automation import stale as stale
