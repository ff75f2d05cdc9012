"""What Dagster loads: assets, a job, sensors and checks of the application."""

from dagster_adjunct import build_definitions
from new_project.pipeline import app

defs = build_definitions(app)
