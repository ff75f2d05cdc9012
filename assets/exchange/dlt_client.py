"""What dlt calls to load a package: `LakeDestination` makes a `LakeClient` for each step.

dlt first calls `verify_schema`, then makes a job of each file, then calls `complete_load`, and
calls all of them again after a crash. The jobs do nothing: `complete_load` reads all files, appends
the tables (`dlt_appends.py`), and then records the load with the state of the pipeline
(`dlt_loads.py`), so that a state is never newer than its data.
"""

from __future__ import annotations

import dataclasses
import errno
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import dlt
from dlt.common.configuration import configspec
from dlt.common.configuration.container import Container
from dlt.common.destination import Destination, DestinationCapabilitiesContext
from dlt.common.destination.client import (
    DestinationClientConfiguration,
    JobClientBase,
    LoadJob,
    RunnableLoadJob,
    StateInfo,
    StorageSchemaInfo,
    WithStateSync,
)
from dlt.common.destination.exceptions import DestinationUndefinedEntity
from dlt.common.json import json as dlt_json
from dlt.common.schema.typing import TLoaderMergeStrategy
from dlt.common.schema.utils import (
    get_columns_names_with_prop,
    get_dedup_sort_tuple,
    get_first_column_name_with_prop,
    get_merge_strategy,
    is_complete_column,
)
from dlt.common.storages import FileStorage
from dlt.common.storages.load_package import LoadPackageStateInjectableContext, PackageStorage

from dagster_adjunct.assets.exchange.dlt_appends import LoadAppends, TableLoad
from dagster_adjunct.assets.exchange.dlt_loads import TABLE, LoadLog
from dagster_adjunct.assets.exchange.dlt_tables import LoadedTable, Rows
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError, file_error
from dagster_adjunct.resources.lazy_modules import pa

if TYPE_CHECKING:
    from dlt.common.destination.typing import PreparedTableSchema

    from dagster_adjunct.assets.exchange.dlt_target import LoadTarget

_SEQUENCES_IN_SECOND = 10**7  # digits after the point in the ids that dlt gives to loads
_STRATEGIES: list[TLoaderMergeStrategy] = ["delete-insert", "upsert"]


@configspec
class LakeClientConfiguration(DestinationClientConfiguration):
    """Where a `LakeClient` loads to."""

    destination_type: Final[str] = dataclasses.field(  # type: ignore[misc]
        default="lake", init=False, repr=False, compare=False
    )
    target: Any = dataclasses.field(default=None, repr=False)

    def __str__(self) -> str:
        return "a lake"


class LakeDestination(Destination[LakeClientConfiguration, "LakeClient"]):
    """The destination that `lake_destination` returns."""

    spec = LakeClientConfiguration

    def __init__(
        self,
        target: LoadTarget | None = None,
        destination_name: str | None = None,
        environment: str | None = None,
        **more: Any,
    ) -> None:
        self._target = target
        super().__init__(
            target=target, destination_name=destination_name, environment=environment, **more
        )

    @property
    def client_class(self) -> type[LakeClient]:
        return LakeClient

    def _raw_capabilities(self) -> DestinationCapabilitiesContext:
        caps = DestinationCapabilitiesContext.generic_capabilities("typed-jsonl")
        caps.supported_loader_file_formats = ["typed-jsonl", "parquet"]
        caps.supports_ddl_transactions = False
        caps.supports_transactions = False
        caps.supports_nested_types = True
        caps.max_table_nesting = 0
        caps.decimal_precision = (38, 9)
        caps.wei_precision = (38, 0)
        caps.timestamp_precision = 6
        caps.supported_merge_strategies = _STRATEGIES
        caps.supported_replace_strategies = ["truncate-and-insert"]
        if self._target is not None:
            caps.max_identifier_length = self._target.longest_table
        return caps


class _EmptyJob(RunnableLoadJob):
    """A job for a file that `complete_load` reads. It runs, as dlt waits a second for others."""

    def run(self) -> None:
        pass


class LakeClient(JobClientBase, WithStateSync):
    """Appends the load packages of one dlt schema to streams of a lake."""

    def __init__(
        self,
        schema: dlt.Schema,
        config: LakeClientConfiguration,
        capabilities: DestinationCapabilitiesContext,
    ) -> None:
        super().__init__(schema, config, capabilities)
        if config.target is None:
            problem = "the dlt destination knows no lake: this process did not make the pipeline."
            step = "Pass destination=lake_destination(lake, prefix) to dlt.pipeline."
            raise ConfigurationError(problem, step, argument="destination")
        self._target: LoadTarget = config.target
        self._log = LoadLog(self._target)

    def __enter__(self) -> LakeClient:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        pass

    # -- before a load

    def initialize_storage(self, truncate_tables: Iterable[str] | None = None) -> None:
        if truncate_tables:
            raise _refresh_error(truncate_tables)
        self._log.create()

    def is_storage_initialized(self) -> bool:
        return self._log.exists()

    def drop_storage(self) -> None:
        raise _refresh_error(())

    def drop_tables(self, *tables: str, delete_schema: bool = True) -> None:
        """Refuse what dlt calls for refresh="drop_sources"."""
        raise _refresh_error(tables)

    def should_truncate_table_before_load(self, table_name: str) -> bool:
        return False  # a table that is replaced gets a new version

    def verify_schema(
        self, only_tables: Iterable[str] | None = None, new_jobs: Any = None
    ) -> list[PreparedTableSchema]:
        tables = super().verify_schema(only_tables, new_jobs)  # type: ignore[arg-type]
        self._check_names(new_jobs or ())
        for table in tables:
            self._check_table(table)
            self._check_merge(table)
        return tables

    def _check_names(self, new_jobs: Iterable[Any]) -> None:
        """Raise ConfigurationError if two tables would have one stream."""
        names = {name for name in self.schema.tables if not self._is_internal(name)}
        names |= {job.table_name for job in new_jobs if not self._is_internal(job.table_name)}
        tables_by_stream: dict[str, str] = {self._target.stream(TABLE): TABLE}
        for name in sorted(names):
            stream = self._target.stream(name)
            other = tables_by_stream.setdefault(stream, name)
            if other != name:
                problem = f"the dlt tables {other!r} and {name!r} would both be lake.{stream}."
                step = "Rename one of them in the source: resource.with_name(…), table_name=…"
                raise ConfigurationError(problem, step, stream=f"lake.{stream}")

    def _check_table(self, table: Any) -> None:
        """Raise ConfigurationError for a table of nested values, whose rows would not say whose
        parts they are, and for one with a name of dlt's own, whose rows would not be appended.
        """
        name = table["name"]
        if "parent" in table:
            problem = f"dlt makes a table {name!r} of nested values of {table['parent']!r}."
            step = (
                "Leave out max_table_nesting of the resource and the source, so that they stay"
                " nested."
            )
            raise ConfigurationError(problem, step, argument="max_table_nesting")
        own = (self.schema.version_table_name, self.schema.loads_table_name)
        if self._is_internal(name) and name not in (*own, self.schema.state_table_name):
            problem = f"the dlt table {name!r} has a name of dlt's own tables."
            raise ConfigurationError(problem, "Rename the resource.", argument="name")

    def _check_merge(self, table: Any) -> None:
        """Raise ConfigurationError for merges that no records can express."""
        if table.get("write_disposition") != "merge":
            return
        name = table["name"]
        key = set(get_columns_names_with_prop(table, "primary_key"))
        merge_key = set(get_columns_names_with_prop(table, "merge_key"))
        if not key or not merge_key <= key:
            problem = (
                f"dlt table {name!r} is merged by primary_key={sorted(key)} and"
                f" merge_key={sorted(merge_key)}: expected a primary key, and no other merge key."
            )
            step = (
                "Give the resource primary_key=…; changes of a dataset replace rows by their key."
            )
            raise ConfigurationError(problem, step, table=name)
        strategy = get_merge_strategy(self.schema.tables, name) or _STRATEGIES[0]
        if strategy not in _STRATEGIES:
            problem = (
                f"dlt table {name!r} is merged with strategy {strategy!r}: expected one of"
                f" {', '.join(_STRATEGIES)}."
            )
            step = "For entries over time, merge with upsert, and declare a dataset with history."
            raise ConfigurationError(problem, step, table=name)

    def _is_internal(self, table: str) -> bool:
        """Whether a table or column has a name of dlt's own."""
        return table.startswith(self.schema._dlt_tables_prefix)

    # -- a load

    def create_load_job(
        self, table: PreparedTableSchema, file_path: str, load_id: str, restore: bool = False
    ) -> LoadJob:
        return _EmptyJob(file_path)

    def complete_load(self, load_id: str) -> None:
        storage = Container()[LoadPackageStateInjectableContext].storage
        files = _files_by_table(storage, load_id)
        pipeline = dlt.current.pipeline().pipeline_name
        appends = LoadAppends(self._target, pipeline, load_id, _sequence_of(load_id))
        state = self._read_state(files.pop(self.schema.state_table_name, []))
        prepared = []
        for name, paths in sorted(files.items()):
            if not self._is_internal(name):
                prepared.append(appends.prepare(self._describe(name, paths)))
        counts = {}
        for table in prepared:
            counts[table.stream] = appends.append(appends.create(table))
        load = {
            "load_id": load_id,
            "pipeline": pipeline,
            "loaded_at": datetime.fromtimestamp(float(load_id), UTC),
            "tables": counts,
            "schema_name": self.schema.name,
            "schema_version": self.schema.version,
            "schema_engine_version": self.schema.ENGINE_VERSION,
            "schema_hash": self.schema.stored_version_hash,
            "schema": dlt_json.dumps(self.schema.to_dict()),
            "pending": [each for each in storage.list_packages() if each != load_id],
            **state,
        }
        self._log.add(load, f"{appends.producer}:{self.schema.name}", appends.sequence)

    def _describe(self, name: str, paths: Sequence[Path]) -> TableLoad:
        """Return a table of the load, read from its files, with what dlt's hints say of it."""
        table: Any = self.prepare_load_table(name)
        columns = {}
        for column, described in table["columns"].items():
            if not self._is_internal(column) and is_complete_column(described):
                columns[column] = described
        loaded = LoadedTable(name, columns, [_read_file(path) for path in paths])
        key = get_columns_names_with_prop(table, "primary_key")
        disposition = table["write_disposition"]
        if disposition != "merge":
            return TableLoad(loaded, disposition, key)
        deleted = get_first_column_name_with_prop(table, "hard_delete")
        return TableLoad(loaded, disposition, key, deleted, get_dedup_sort_tuple(table))

    def _read_state(self, paths: Sequence[Path]) -> dict[str, Any]:
        """Return the state of the pipeline that is part of the load, which is the first row in
        these files, as the log of loads stores it; nothing if the load did not change it.
        """
        for path in paths:
            file = _read_file(path)
            for row in file.to_pylist() if isinstance(file, pa.Table) else file:
                return {
                    "state_version": row["version"],
                    "state_engine_version": row["engine_version"],
                    "state_hash": row.get("version_hash"),
                    "state_created_at": row["created_at"],
                    "state": row["state"],
                }
        return {}

    # -- state

    def get_stored_state(self, pipeline_name: str) -> StateInfo | None:
        self._require_log()
        load = self._log.find_state(pipeline_name)
        if load is None:
            return None
        return StateInfo(
            version=load["state_version"],
            engine_version=load["state_engine_version"],
            pipeline_name=pipeline_name,
            state=load["state"],
            created_at=load["state_created_at"],
            version_hash=load["state_hash"],
            _dlt_load_id=load["load_id"],
        )

    def get_stored_schema(self, schema_name: str | None = None) -> StorageSchemaInfo | None:
        if not self._log.exists():
            return None
        return _schema_info(
            self._log.find(
                lambda each: (
                    each["schema"] is not None and schema_name in (None, each["schema_name"])
                )
            )
        )

    def get_stored_schema_by_hash(  # type: ignore[override]
        self, version_hash: str
    ) -> StorageSchemaInfo | None:
        if not self._log.exists():
            return None
        return _schema_info(
            self._log.find(
                lambda each: each["schema"] is not None and each["schema_hash"] == version_hash
            )
        )

    def _require_log(self) -> None:
        """Raise DestinationUndefinedEntity, dlt's error, if nothing was ever loaded."""
        if not self._log.exists():
            # dlt then forgets the local state, which belongs to another lake
            raise DestinationUndefinedEntity(f"no load to prefix {self._target.prefix!r} yet")


def _schema_info(load: Mapping[str, Any] | None) -> StorageSchemaInfo | None:
    """Return the schema that a load is recorded with, as dlt describes it; None without a load."""
    if load is None:
        return None
    return StorageSchemaInfo(
        version_hash=load["schema_hash"],
        schema_name=load["schema_name"],
        version=load["schema_version"],
        engine_version=load["schema_engine_version"],
        inserted_at=load["loaded_at"],
        schema=load["schema"],
    )


def _refresh_error(tables: Iterable[str]) -> ConfigurationError:
    """Return the error for what dlt asks for with `refresh`: to drop or empty tables, all if none
    are named.
    """
    names = ", ".join(sorted(tables)) or "all tables"
    problem = f"dlt asks to drop or empty {names} (refresh=…), but streams keep their records."
    step = (
        "Delete the streams (adjunct stream delete NAME --reason …), and run the pipeline without"
        " refresh."
    )
    return ConfigurationError(problem, step, argument="refresh")


def _sequence_of(load_id: str) -> int:
    """Return the number of a load, by which its appends are recognised: its id is a time in
    seconds, so later loads have higher numbers.
    """
    try:
        sequence = Decimal(load_id) * _SEQUENCES_IN_SECOND
    except InvalidOperation as error:
        problem = f"the id of the dlt load is {load_id!r}: expected a time in seconds."
        raise ConfigurationError(problem, "Use dlt's own ids.", argument="load_id") from error
    return int(sequence)


def _files_by_table(storage: PackageStorage, load_id: str) -> dict[str, list[Path]]:
    """Return the files of the load by table, in the order in which dlt wrote them."""
    files: dict[str, list[Path]] = {}
    for state, job in storage.list_all_jobs_with_states(load_id):
        path = storage.get_job_file_path(load_id, state, job.file_name())
        files.setdefault(job.table_name, []).append(Path(storage.storage.make_full_path(path)))
    for paths in files.values():
        paths.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
    return files


def _read_file(path: Path) -> Rows | pa.Table:
    """Return the rows of a file of a load package. Raises SchemaMismatchError if it is damaged or
    gone, and errors of the file system as `file_error` does.
    """
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return pq.read_table(path)
        return [*_read_rows(path)]
    except (ValueError, EOFError, OSError, zlib.error) as error:  # Arrow's errors are two of them
        # Errors about contents have no number.
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise file_error(error, path, "the dlt load") from error
        problem = f"the file {path.name} of the dlt load is damaged or gone: {error}."
        step = "Abort the load (pipeline.abort_packages()), and run the pipeline again."
        raise SchemaMismatchError(problem, step, url=str(path)) from error


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON lines, each of which is one row or a list of rows."""
    with FileStorage.open_zipsafe_ro(str(path)) as lines:
        for line in lines:
            found = dlt_json.typed_loads(line)
            if isinstance(found, dict):
                yield found
            else:
                yield from found
