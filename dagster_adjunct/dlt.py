"""Loads of dlt pipelines appended to lake streams."""

from dagster_adjunct.assets.exchange.dlt_destination import lake_destination as lake_destination
