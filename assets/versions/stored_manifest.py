"""How a manifest is stored: flat JSON with the fields of both kinds, of which those of the other kind are empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
from dagster_adjunct.assets.versions.manifest import MANIFEST_OF, DatasetManifest
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.resources.errors import AdjunctError, MalformedDocumentError
from dagster_adjunct.resources.stored_documents import first_problem

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit_log import Commit

# In the order in which they are written. Where a field is of one kind only: what stands there for the other one.
_FIELDS: dict[str, Any] = {
    "format": 1,
    "name": None,
    "declaration": None,
    "version": None,
    "head": None,
    "pin": None,
    "versions": [],
    "delivered": [],
    "known": [],
    "abandoned": [],
    "awaited": None,
    "doomed": [],
    "lost": [],
    "stream": None,
    "offsets": {},
    "bootstrap": None,
    "retired": [],
    "retained_from": 1,
    "confirmed_at": None,
    "horizon": None,
    "first_ordered": None,
    "positions_from": 0,
    "quarantining": None,
    "applied": {},
    "decision": None,
    "next_number": 1,
    "next_generation": 1,
    "counters": {},
    "change": None,
    "numbers": [],
    "written": None,
}
_OF_OTHERS: dict[type[DatasetManifest], set[str]] = {
    BoundedManifest: UnboundedManifest.model_fields.keys() - BoundedManifest.model_fields.keys(),
    UnboundedManifest: BoundedManifest.model_fields.keys() - UnboundedManifest.model_fields.keys(),
}


def stored_body(manifest: DatasetManifest) -> dict[str, Any]:
    """Return a manifest as the JSON-able body of a commit."""
    own = manifest.model_dump(mode="json")
    return {name: own.get(name, empty) for name, empty in _FIELDS.items()}


def manifest_from(body: Mapping[str, Any]) -> DatasetManifest:
    """Return the manifest that a commit's body holds. Raises pydantic's ValidationError."""
    declared = body.get("declaration")
    declared_kind = str(declared.get("kind")) if isinstance(declared, Mapping) else ""
    kind = MANIFEST_OF.get(declared_kind, BoundedManifest)  # of what declares no kind, validating tells what is wrong
    # A bootstrap makes a bounded dataset's body malformed; whatever else is of the other kind never meant anything.
    others = _OF_OTHERS[kind] - ({"bootstrap"} if body.get("bootstrap") is not None else set())
    return kind.model_validate({name: value for name, value in body.items() if name not in others})


def parse_manifest(name: str, commit: Commit) -> DatasetManifest:
    """Return the manifest in a dataset's commit, or raise MalformedDocumentError saying what is wrong where."""
    try:
        manifest = manifest_from(commit.body)
        if manifest.name != name:
            raise MalformedDocumentError(f"it describes the dataset {manifest.name!r}", dataset=manifest.name)
    except (ValidationError, AdjunctError) as error:
        raise MalformedDocumentError(
            f"dataset {name!r}: the manifest {commit.manifest_key} can't be read: {problem_with_document(error)}.",
            "Restore that object from a backup; versions committed before it are untouched and can still be "
            "opened by their id.",
            document=commit.manifest_key,
        ) from error
    return manifest


def problem_with_document(error: ValidationError | AdjunctError) -> str:
    """Return in words why a stored document can't be read."""
    return error.problem.rstrip(".") if isinstance(error, AdjunctError) else first_problem(error)
