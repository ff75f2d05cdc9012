"""The application that `defs/orders/defs.yaml` declares, for the command line and for tests."""

from pathlib import Path

import dagster as dg

component = dg.ComponentTree.for_project(Path(__file__).parent).load_component("orders")
app = component.application()
