"""The application once events have no channel any more: see `declare.py`."""

from dagster_adjunct.examples.purchases.declare import declare_application

app = declare_application(dropped=("channel",))
