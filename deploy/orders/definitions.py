"""What the code location serves: assets, jobs, sensors and checks of the application."""

from dagster_adjunct import build_definitions
from orders.pipeline import app

defs = build_definitions(app)
