"""What is said of a file that is not as declared, whatever its format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import AdjunctError, SchemaMismatchError
from dagster_adjunct.resources.file_errors import file_error
from dagster_adjunct.resources.schemas.schema import repeated

if TYPE_CHECKING:
    from dagster_adjunct.resources.schemas.schema import Field, Schema


def declared_as(field: Field) -> str:
    """Return how errors name a column, before they come to what was found in it."""
    return f"column {field.name!r} is declared {field.type}"


def check_columns(columns: list[str], schema: Schema, where: str) -> None:
    """Refuse a file whose columns are not those declared, each once."""
    twice, there = repeated(columns), set(columns)
    missing = [name for name in schema.names if name not in there]
    extra = [name for name in columns if name not in schema]
    parts = [f"column {name!r} stands twice" for name in twice]
    parts += [f"column {name!r} is missing" for name in missing]
    parts += [f"column {name!r} is not declared" for name in extra]
    if parts:
        raise SchemaMismatchError(
            f"{where}: {'; '.join(parts)}. Declared are {', '.join(f'{f.name} {f.type}' for f in schema.fields)}.",
            "Deliver the files with exactly these columns, or declare what they hold.",
            column=[*twice, *missing, *extra][0],
        )


def damaged(where: str, error: Exception) -> AdjunctError:
    """Return the error for a file that can't be read as what it should be, or that the file system does not give."""
    if isinstance(error, OSError) and error.errno:
        return file_error(error, error.filename or where, where)
    return SchemaMismatchError(
        f"{where} can't be read: {(str(error) or type(error).__name__).splitlines()[0].rstrip('.')}.",
        "Deliver the file again, whole and in the declared format.",
    )
