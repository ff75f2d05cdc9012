"""What all stored parts of a dataset are built on: frozen documents, and the types of values that stand in several."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer

from dagster_adjunct.resources.bucketing.bucket_files import Generation
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.stored_documents import StoredDocument


def _schema(value: Any) -> Any:
    return value if isinstance(value, Schema) else Schema.from_json(value)


def _generation(value: Any) -> Any:
    return value if isinstance(value, Generation) else Generation.from_json(value)


StoredSchema = Annotated[Schema, BeforeValidator(_schema), PlainSerializer(Schema.to_json)]
StoredGeneration = Annotated[Generation, BeforeValidator(_generation), PlainSerializer(Generation.to_json)]
Offset = Annotated[str, Field(min_length=1)]


class ManifestPart(StoredDocument):
    """A frozen part of a manifest; a field that it does not know makes it malformed."""

    # The schema's columns are called `schema` everywhere else; pydantic's own method of that name is deprecated.
    model_config = ConfigDict(arbitrary_types_allowed=True)

    def after(self, **changes: Any) -> Self:
        """Return this document with some fields replaced, checked again as a whole."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **changes})
