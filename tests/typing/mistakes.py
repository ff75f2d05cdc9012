"""What mypy tells a user: each line here is a mistake, and its comment the error that it is told
as.
"""

from __future__ import annotations

from dagster_adjunct import Application, bounded_dataset, no_such_name, open_lake  # type: ignore[attr-defined]
from dagster_adjunct import expire_versions as not_there  # type: ignore[attr-defined]
from dagster_adjunct.errors import ConfigurationError, OffsetOutOfRangeError
from dagster_adjunct.maintenance import expire_versions
from dagster_adjunct.streams import open_lake as elsewhere  # type: ignore[attr-defined]

open_lake(5)  # type: ignore[arg-type]
bounded_dataset("items", input="lake.items", key="item", partition=2)  # type: ignore[call-arg]
bounded_dataset("items", input="lake.items", key=7)  # type: ignore[arg-type]
Application("shop", "of ada")  # type: ignore[call-arg]
expire_versions(open_lake(), "items")  # type: ignore[call-arg]
expire_versions(open_lake(), "items", by="ada").nothing  # type: ignore[attr-defined]
OffsetOutOfRangeError("gone.", "Begin later.", "lake.orders")  # type: ignore[call-arg]
OffsetOutOfRangeError("gone.", partition="3")  # type: ignore[arg-type]
ConfigurationError("wrong.", shelf="items")  # type: ignore[call-arg]
