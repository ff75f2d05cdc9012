"""What Dagster loads: assets, checks, jobs, sensors and resources of applications."""
