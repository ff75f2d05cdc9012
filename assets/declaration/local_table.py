"""Local tables: unbounded datasets that one application owns, as its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.dataset_arguments import descriptions, names
from dagster_adjunct.assets.declaration.discard_policy import DiscardPolicy
from dagster_adjunct.assets.declaration.following_changes import DeltaCompaction, Following
from dagster_adjunct.assets.declaration.inputs_besides_streams import OwnedBy
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema, check_key_types


class LocalTableOptions(TypedDict, total=False):
    """What can be said of a local table beside its columns and where they lie; as of any unbounded dataset."""

    compaction: DeltaCompaction
    discard: DiscardPolicy
    description: str
    owners: str | Sequence[str]
    group: str
    column_descriptions: Mapping[str, str]
    sensitive: str | Sequence[str]


def local_table(
    name: str,
    *,
    application: str,
    key: tuple[str, ...],
    schema: Schema,
    partitions: int,
    partition_by: tuple[str, ...] = (),
    compaction: DeltaCompaction | None = None,
    discard: DiscardPolicy | None = None,
    description: str = "",
    owners: str | Sequence[str] = (),
    group: str | None = None,
    column_descriptions: Mapping[str, str] | None = None,
    sensitive: str | Sequence[str] = (),
    expires: str | None = None,
    kept_for: str = "",
) -> AdjunctDataset:
    """Return the table `name` of an application, with these columns; see `Application.local_table`.

    With `expires`, a timestamp column, it is a table of an operator's state, and `kept_for` says for what.

    Raises ConfigurationError.
    """
    what = f"local table {name!r}"
    if not isinstance(schema, Schema):
        raise ConfigurationError(
            f"{what} has schema={schema!r}: expected its columns.",
            'Write schema=Schema.of(shop="string", visits="bigint"), say.',
            argument="schema",
            dataset=name,
        )
    try:
        check_key_types(schema, key, what)
    except SchemaMismatchError as error:
        raise ConfigurationError(error.problem, error.next_step, argument="key", dataset=name) from error
    return AdjunctDataset(
        name,
        "unbounded",
        OwnedBy(application, schema, expires, kept_for),
        key,
        partition_by or key,
        partitions,
        bootstrap=False,
        description=description,
        owners=names(owners),
        group=group,
        discard=DiscardPolicy() if discard is None else discard,
        following=Following(compaction=DeltaCompaction() if compaction is None else compaction),
        column_descriptions=descriptions(name, column_descriptions),
        sensitive=names(sensitive),
    )
