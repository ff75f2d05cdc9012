"""A plan on the assets of what its application writes.

Dagster's UI draws no Mermaid, and its Markdown drops pictures that are not fetched from somewhere: so the plan is shown
as text, and as a document to compare another plan with.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from dagster import MetadataValue

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.planner import ExecutionPlan

LONGEST = 100_000  # characters; each materialisation of each output is stored with it


def plan_metadata(planned: ExecutionPlan) -> dict[str, Any]:
    """Return the plan that a run had, as text and as the document that `ExecutionPlan.from_json` reads."""
    text, document = planned.render(), planned.to_json()
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}\n…\n"
    metadata: dict[str, Any] = {"adjunct/plan": MetadataValue.md(f"{fence}text\n{shown}{fence}")}
    if len(json.dumps(document)) <= LONGEST:
        metadata["adjunct/plan_document"] = MetadataValue.json(document)
    return metadata
