"""Refuses records whose columns the datasets on their stream could not take any more, though the stream itself can.

A stream takes columns that are wider than they were. The key of a dataset never changes its type, nor does what its
changes are ordered by become anything that has no order of its own, and its extractor declares what it reads: a batch
that widened one of these would be committed, and the dataset could never advance again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.decode_changes import stored_schema
from dagster_adjunct.resources.errors import AdjunctError, PlanningError
from dagster_adjunct.resources.schemas.evolution import evolved, refused_changes

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.resources.schemas.schema import Schema


def check_fed(app: Application, operator: str, stream: str, stored: Schema, sent: Schema) -> None:
    """Raise PlanningError where a dataset on `stream`, whose columns are `stored`, can't take those that are sent."""
    for dataset in app.datasets:
        if dataset.stream != stream:
            continue
        refused = _refused(dataset, stored, evolved(stored, sent))
        if refused:
            raise PlanningError(
                f"{operator}: dataset {dataset.name!r} can't take what would be sent to its stream {stream}: "
                f"{'; '.join(refused)}.",
                "Send these columns as they were, as by .with_columns(NAME=\"cast(NAME as TYPE)\"); or feed a dataset "
                "of another name on a stream of its own.",
                operator=operator,
                dataset=dataset.name,
                stream=stream,
            )  # fmt: skip


def _refused(dataset: AdjunctDataset, before: Schema, after: Schema) -> list[str]:
    try:
        entries = stored_schema(dataset, before)
    except AdjunctError:  # which is wrong already, and told of the dataset itself
        return []
    try:
        return refused_changes(entries, stored_schema(dataset, after), dataset.key)
    except AdjunctError as error:
        return [error.problem.rstrip(".")]
