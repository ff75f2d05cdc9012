"""`DynamoDbTable`: records as items of a DynamoDB table.

`dynamodb_items.py` defines how values are stored, `dynamodb_requests.py` what conditions store with
a record, `dynamodb_bookkeeping.py` the epochs and the count of runs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import PositiveInt

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.table_backends import dynamodb_requests
from dagster_adjunct.resources.table_backends.columns import (
    Column,
    check_not_reserved,
    parse_known_column,
)
from dagster_adjunct.resources.table_backends.dynamodb_bookkeeping import (
    NAME,
    FencedWrites,
    RunCount,
)
from dagster_adjunct.resources.table_backends.dynamodb_connection import (
    Connection,
    error_code,
    problem_from_boto_error,
)
from dagster_adjunct.resources.table_backends.dynamodb_items import ItemCodec, key_attribute_type
from dagster_adjunct.resources.table_backends.dynamodb_requests import Problems, TableRequests
from dagster_adjunct.resources.table_backends.store import StoreTable
from dagster_adjunct.resources.table_backends.write_plan import (
    Entry,
    ValidEntries,
    validate_entries,
)
from dagster_adjunct.resources.tables.functions import TableUse
from dagster_adjunct.resources.tables.operation import (
    Capabilities,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    State,
)
from dagster_adjunct.resources.tables.presence import BOOKKEEPING_SUFFIX, NO_TABLE, Presence
from dagster_adjunct.resources.threads import PerLoop
from dagster_adjunct.resources.validation import Seconds, validated

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

READY_SECONDS = 60.0
T = TypeVar("T")


def resolve_table_key(
    client: DynamoDBClient,
    label: str,
    table: str,
    key: Mapping[str, str | None],
    *,
    create: bool,
    forgets: bool = False,
    tags: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the attributes of the table's key, each with its type ("S", "N" or "B"), after
    comparing them with `key`.

    `key` is the declared key, with None for types that only the table knows; SchemaMismatchError if
    the table has another. With `create` a missing table is created, billed per request, with these
    tags; `forgets` enables the time to live of its tombstones. Waits until the table can be used.
    """
    description = _describe_table(client, table)
    if description is None:
        if not create:
            problem = f"{label}: the table does not exist in {client.meta.region_name}."
            step = "Correct the name, region or endpoint, or declare the table with create=True."
            raise errors.TableNotFoundError(problem, step, table=label)
        is_own = _create(client, table, key, tags or {})
        description = _wait_until_active(client, label, table)
        if is_own and forgets:  # else whoever creates it sets that
            client.update_time_to_live(
                TableName=table,
                TimeToLiveSpecification={
                    "Enabled": True,
                    "AttributeName": dynamodb_requests.EXPIRES,
                },
            )
    if description["TableStatus"] not in ("ACTIVE", "UPDATING"):
        description = _wait_until_active(client, label, table)
    return _check_key_schema(label, description, key)


def _describe_table(client: DynamoDBClient, table: str) -> Any:
    """Return DynamoDB's description of the table; None if it does not exist."""
    try:
        return client.describe_table(TableName=table)["Table"]
    except client.exceptions.ResourceNotFoundException:
        return None


def _create(
    client: DynamoDBClient, table: str, key: Mapping[str, str | None], tags: Mapping[str, str]
) -> bool:
    """Start to create the table; return False if another client has done so."""
    roles = zip(key, ("HASH", "RANGE"), strict=False)
    types: Any = [{"AttributeName": name, "AttributeType": type_} for name, type_ in key.items()]
    schema: Any = [{"AttributeName": name, "KeyType": role} for name, role in roles]
    tagged: Any = {}
    if tags:
        tagged["Tags"] = [{"Key": name, "Value": value} for name, value in tags.items()]
    try:
        client.create_table(
            TableName=table,
            AttributeDefinitions=types,
            KeySchema=schema,
            BillingMode="PAY_PER_REQUEST",
            **tagged,
        )
    except Exception as error:
        if error_code(error) != "ResourceInUseException":
            raise
        return False
    return True


def _wait_until_active(client: DynamoDBClient, label: str, table: str) -> Any:
    """Return the table's description once it can be used; TableUnavailableError after
    READY_SECONDS.
    """
    deadline = time.monotonic() + READY_SECONDS
    pause = 0.05
    while True:
        description = _describe_table(client, table)
        if description is not None and description["TableStatus"] in ("ACTIVE", "UPDATING"):
            return description
        if time.monotonic() > deadline:
            state = "missing"
            if description is not None:
                state = description["TableStatus"]
            problem = f"{label} is {state} after {READY_SECONDS:.0f} s; expected ACTIVE."
            step = "The request is retried; if it keeps failing, check the table in AWS."
            raise errors.TableUnavailableError(problem, step, table=label)
        time.sleep(pause)
        pause = min(2.0, pause * 2)


def _check_key_schema(
    label: str, description: Any, declared: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the attributes of the key that the table has, each with its type, the partition key
    first; SchemaMismatchError if `declared` differs.
    """
    types = {
        part["AttributeName"]: part["AttributeType"] for part in description["AttributeDefinitions"]
    }
    parts = sorted(description["KeySchema"], key=lambda part: part["KeyType"] != "HASH")
    stored = {part["AttributeName"]: types[part["AttributeName"]] for part in parts}
    is_same = list(stored) == list(declared)
    for name, type_ in declared.items():
        if type_ is not None and type_ != stored.get(name):
            is_same = False
    if not is_same:
        problem = (
            f"{label} has the key {_format_key(stored)}, but {_format_key(declared)} is declared."
        )
        step = "Correct the key (partition key first) and its types, or use another table."
        raise errors.SchemaMismatchError(problem, step, table=label)
    return stored


def _format_key(key: Mapping[str, str | None]) -> str:
    """Return the attributes of a key as errors show them: "id (S), at (N)"."""
    return ", ".join(f"{name} ({type_})" if type_ else name for name, type_ in key.items())


class _OpenClient:
    """One event loop's client (in `live`, once connected), and the threads in which its requests
    run.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self.opening = threading.Lock()
        self.live: TableRequests | None = None

    def end(self, *, wait: bool = False) -> None:
        """End the threads and close the connections; with `wait`, first wait for the requests
        under way.
        """
        self.threads.shutdown(wait=wait)
        live = self.live
        self.live = None
        if live is not None:
            live.client.close()


@validated
class DynamoDbTable(StoreTable):
    """Read and write function for one DynamoDB table.

    `key` names the partition key, or partition key and sort key (then keys are tuples). `columns`
    gives the columns' types; without it a record may have any columns, and the key's types come
    from the table, or from `key` as a mapping: key={"id": "string"}. With `create` the first write
    creates a missing table, billed per request; it needs the key's types. An item of the table then
    counts the runs of applications that write it, and their batches. A table with another key is
    rejected.

    Gets are strongly consistent unless `consistent_reads` is false. Up to `threads` requests are
    under way at a time in each event loop. A request has up to 100 gets, or 25 puts or deletes
    without conditions; updates, puts if absent and all writes with conditions are one request each.

    Marks are stored in the item itself: a writer without the same conditions that puts or deletes
    it removes them. `forget_deleted_after` is how many seconds a deleted record's marks must stay;
    DynamoDB removes them some time later, if the table's time to live is enabled for
    `adjunct_expires` (`create` does that). Without `forget_deleted_after` they stay forever.

    Region, endpoint and credentials that are not given come from boto3's own chain.
    `credentials_env` names the environment variables with the access key's id, the secret and
    optionally the session token. A boto3 `session` is for this process only: the table can't be
    pickled or described then, because the session may hold secrets.
    """

    appends_to_json: ClassVar[bool] = True
    inspected_every: ClassVar[float] = 20.0  # accounts may describe tables only so often

    def __init__(  # noqa: PLR0913
        self,
        table: str,
        key: str | Sequence[str] | Mapping[str, str],
        *,
        columns: Mapping[str, str] | None = None,
        create: bool = False,
        region: str | None = None,
        endpoint_url: str | None = None,
        profile: str | None = None,
        credentials_env: Sequence[str] | None = None,
        session: Any = None,
        consistent_reads: bool = True,
        forget_deleted_after: Seconds | None = None,
        threads: PositiveInt = 16,
        connect_timeout: Seconds = 3.0,
        read_timeout: Seconds = 15.0,
    ) -> None:
        self.table = table
        self._label = f"DynamoDB table {table!r}"
        self._declare(table, tuple(key) if isinstance(key, Mapping) else key, columns)
        self.create = create  # needs no columns, only the types of the key (`_types_of_key`)
        self.consistent_reads = consistent_reads
        self.forget_deleted_after = forget_deleted_after
        self.threads = threads
        self.region = region
        self.endpoint_url = endpoint_url
        self.profile = profile
        self.session = session
        self.connect_timeout = connect_timeout
        self.read_timeout = read_timeout
        if isinstance(credentials_env, str):
            credentials_env = (credentials_env,)
        self.credentials_env = None if credentials_env is None else tuple(credentials_env)
        self.connection = Connection(
            region,
            endpoint_url,
            profile,
            self.credentials_env,
            connect_timeout,
            read_timeout,
            session=session,
        )
        self.connection.check(self._label)
        self._key_types = self._types_of_key(key if isinstance(key, Mapping) else {})
        self._typed_key = dict(key) if isinstance(key, Mapping) else None
        self._open: PerLoop[_OpenClient] = PerLoop(
            partial(_OpenClient, f"dynamodb-{table}", threads), _OpenClient.end
        )

    def __repr__(self) -> str:
        where = self.endpoint_url or self.region or "by boto3's configuration"
        return f"DynamoDbTable({self.table!r}, key={self.key}, {where})"

    def to_dict(self) -> dict[str, Any]:
        """The declaration as plain values, without secrets. Raises ConfigurationError if it has a
        boto3 session.
        """
        if self.session is not None:
            problem = (
                f"{self._label} has a boto3 session, which may hold secrets and can't be"
                " serialized."
            )
            step = (
                "Use credentials_env=… or profile=…, or let boto3 find credentials where tasks run."
            )
            raise errors.ConfigurationError(problem, step, argument="session")
        settings = super().to_dict()
        del settings["session"]
        return settings | {"key": self._typed_key or list(self.key)}

    @property
    def capabilities(self) -> Capabilities:
        # To keep the marks of other sources, a put must name the columns to remove, so these must
        # be declared. Without declared columns a name with a dot is that of a column.
        is_declared = self.columns is not None
        return replace(super().capabilities, idempotent=is_declared, inside=is_declared)

    def problem_of(self, error: BaseException, *, sent: bool = True) -> Problem:
        return problem_from_boto_error(error, self._label, sent=sent)

    async def inspect(self) -> Presence:
        """Return whether the table exists, and its count of runs; creates nothing."""
        try:
            requests = await self._get_client(make=False)
        except errors.TableNotFoundError:
            return NO_TABLE
        return await self._run_in_thread(self._presence, requests)

    async def begin_run(self, *, create: bool, marks: bool, fence: Fence | None = None) -> Presence:
        """Create the table if asked to, pass the fence, and count the run; return the table's
        presence.

        Runs are counted in a table that is declared with `create` or has a count: others get no
        item that their owners don't expect.
        """
        requests = await self._get_client(make=create)
        if fence is not None:
            await self._run_in_thread(self._begin_fenced_run, requests.client, fence)
        presence = await self._run_in_thread(self._presence, requests)
        counts_runs = self.create or presence.runs
        if not presence.exists or not counts_runs:
            return presence
        count = partial(self._translated, self._run_count(requests).add)
        return replace(presence, runs=await self._run_in_thread(count))

    def _begin_fenced_run(self, client: DynamoDBClient, fence: Fence) -> None:
        """Store the run's epoch in the table of epochs, which is created if this table is
        declared with `create`.
        """
        key = {NAME: "S"}
        what = f"{self._label}: the table {self._epochs_table!r}, which fenced=True needs,"
        self._translated(
            partial(resolve_table_key, client, what, self._epochs_table, key, create=self.create)
        )
        self._translated(self._fenced_writes(client, fence).announce)

    def _fenced_writes(self, client: DynamoDBClient, fence: Fence) -> FencedWrites:
        """Return what sends writes that take effect only while the run's epoch is the newest."""
        return FencedWrites(client, self._label, self._epochs_table, fence)

    @property
    def _epochs_table(self) -> str:
        return f"{self.table}{BOOKKEEPING_SUFFIX}"

    def _presence(self, requests: TableRequests) -> Presence:
        """Return whether DynamoDB has the table, its id, and its count of runs.

        The id is new if the table was created again or restored. A count that may not be read is
        None.
        """
        description = self._translated(partial(_describe_table, requests.client, self.table))
        if description is None or description["TableStatus"] == "DELETING":
            return NO_TABLE
        runs = None
        with suppress(errors.TableAccessError):  # a writer need not have the right to read
            runs = self._translated(self._run_count(requests).read)
        id = description.get("TableId") or str(description["CreationDateTime"])
        return Presence(exists=True, id=id, runs=runs)

    def _run_count(self, requests: TableRequests) -> RunCount:
        """Return the counter of the runs that write the table, which is an item of the table."""
        return RunCount(requests.client, self._label, self.table, requests.codec.key_types)

    async def open(self) -> None:
        """Connect. A missing table with `create` is no error: the first write creates it."""
        if self._open.here().live is None:
            try:
                await self._get_client(make=False)
            except errors.TableNotFoundError:
                if not self.create:
                    raise

    async def check(self, use: TableUse) -> None:
        """Ask whether the table is there with this key, and may be read and updated.

        The right to write batches, which puts and deletes without conditions use, can't be asked
        for.
        """
        try:
            requests = await self._get_client(make=False)
        except errors.TableNotFoundError:
            if not self.create:
                raise
            return
        updates = OperationKind.UPDATE in use.kinds or bool(use.conditions)
        threads = self._open.here().threads
        await asyncio.get_running_loop().run_in_executor(
            threads, partial(requests.check, reads=use.reads, updates=updates)
        )

    async def find_misfits(self, operation: Operation[Any]) -> Mapping[int, Problem]:
        """Return the problems of entries that could never be stored, by index; none if the table
        can't be asked for its key.
        """
        try:
            requests = await self._get_client(make=self.create)
            return validate_entries(requests.codec, operation).problems
        except errors.AdjunctError:
            return {}  # the request reports it

    async def close(self) -> None:
        """Close the running event loop's connections after its requests."""
        open_client = self._open.take()
        if open_client is not None:
            await asyncio.to_thread(open_client.end, wait=True)

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Read, or write by requests for many entries where nothing is conditional, else by one for
        each key. Raises ConfigurationError for idempotent writes to a table without declared
        columns.
        """
        reads = operation.kind is OperationKind.GET
        try:
            requests = await self._get_client(make=not reads and operation.may_create)
        except errors.TableNotFoundError:
            may_be_created = self.create and operation.may_create
            if not (reads and may_be_created):
                raise
            # The first write creates the table, so it has no records yet.
            return Outcomes(len(operation), [None] * len(operation))
        valid = validate_entries(requests.codec, operation)
        if reads:
            return await self._get(requests, valid, len(operation))
        if operation.fence is not None:
            fenced = None
            if operation.fenced:
                fenced = self._fenced_writes(requests.client, operation.fence)
            requests = replace(requests, fence=operation.fence, fenced=fenced)
        conditions = operation.conditions
        has_marks = conditions.idempotent or conditions.keeps_marks
        if has_marks and self.columns is None:
            problem = f"{self._label} declares no columns, which idempotent writes need."
            step = 'Declare columns={"name": "type", …}.'
            raise errors.ConfigurationError(problem, step, argument="columns", table=self.table)
        is_unconditional = not conditions and not has_marks
        if is_unconditional and operation.kind in (OperationKind.PUT, OperationKind.DELETE):
            return await self._write_batches(requests, operation, valid)
        return await self._write_keys(requests, operation, valid)

    async def _get_client(self, *, make: bool = True) -> TableRequests:
        """Return what sends this event loop's requests, connected first if need be; with `make`, a
        missing table is created if it is declared so.
        """
        open_client = self._open.here()
        if open_client.live is None:
            await asyncio.get_running_loop().run_in_executor(
                open_client.threads, self._connect, open_client, make
            )
        assert open_client.live is not None
        return open_client.live

    def _connect(self, open_client: _OpenClient, make: bool) -> None:
        """Set `open_client.live`, unless another thread has. With `make`, a missing table is
        created if it is declared so.
        """
        with open_client.opening:
            if open_client.live is not None:
                return
            client = self.connection.client(self._label, self.threads)
            try:
                resolve = partial(
                    resolve_table_key,
                    client,
                    self._label,
                    self.table,
                    self._key_types,
                    create=make and self.create,
                    forgets=self.forget_deleted_after is not None,
                )
                key = self._translated(resolve)
            except BaseException:
                client.close()
                raise
            codec = ItemCodec(self._label, key, None if self.columns is None else self._declared)
            forgets = self.forget_deleted_after
            open_client.live = TableRequests(
                client, self.table, codec, self.consistent_reads, forgets
            )

    def _translated(self, request: Callable[[], T]) -> T:
        """Return the result of a blocking request; errors of boto3 become ours."""
        try:
            return request()
        except errors.RunLeaseLostError:
            raise
        except Exception as error:  # noqa: BLE001 - translated
            translated = problem_from_boto_error(error, self._label, sent=False).error
            assert translated is not None
            raise translated from translated.__cause__

    async def _run_in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return what `work` returns in one of this event loop's threads."""
        return await asyncio.get_running_loop().run_in_executor(
            self._open.here().threads, work, *arguments
        )

    async def _get(self, requests: TableRequests, valid: ValidEntries, count: int) -> Outcomes:
        """Get the records of `valid`; the outcomes are those of all `count` entries."""
        records: list[Any] = [None] * count
        problems: Problems = dict(valid.problems)
        parts = _parts(valid.entries, dynamodb_requests.GETS_AT_ONCE)
        await self._run_in_threads(lambda part: problems.update(requests.get(part, records)), parts)
        return Outcomes(count, records, problems)

    async def _write_batches(
        self, requests: TableRequests, operation: Operation[Any], valid: ValidEntries
    ) -> Outcomes:
        """Write only the last entry of each key: nobody could see the effect of earlier ones.

        If the last entry is rejected, the one before it is written instead, and so on. If it fails
        for another reason, the earlier entries get its problem; if it is done, so are they.
        """
        problems: Problems = dict(valid.problems)
        groups_left = _group_by_key(valid.entries)
        while groups_left:
            last = [entries.pop() for entries in groups_left]
            parts = _parts(last, dynamodb_requests.WRITES_AT_ONCE)
            await self._run_in_threads(
                lambda part: problems.update(requests.write_batch(operation.kind, part)), parts
            )
            written = groups_left
            groups_left = []
            for entry, earlier in zip(last, written, strict=True):
                problem = problems.get(entry.place)
                if problem is not None and problem.state is not State.REFUSED:
                    problems.update({other.place: problem for other in earlier})
                elif problem is not None and earlier:
                    groups_left.append(earlier)
        return Outcomes(len(operation), problems=problems)

    async def _write_keys(
        self, requests: TableRequests, operation: Operation[Any], valid: ValidEntries
    ) -> Outcomes:
        """Write the entries one by one: of several keys at a time, of one key in order."""
        problems: Problems = dict(valid.problems)
        defaults_put: list[int] = []  # by each key's entries
        await self._run_in_threads(
            lambda entries: defaults_put.append(
                requests.write_in_sequence(operation, entries, problems)
            ),
            _group_by_key(valid.entries),
        )
        return Outcomes(len(operation), problems=problems, defaults_put=sum(defaults_put))

    async def _run_in_threads(self, work: Callable[[Any], object], parts: Iterable[Any]) -> None:
        """Run `work` for each part, as many at a time as there are threads."""
        loop = asyncio.get_running_loop()
        threads = self._open.here().threads
        running = [loop.run_in_executor(threads, work, part) for part in parts]
        try:
            await asyncio.gather(*running)
        finally:
            for future in running:
                # If the caller was cancelled, parts that have not begun are dropped.
                future.cancel()

    def _types_of_key(self, typed: Mapping[str, str]) -> dict[str, str | None]:
        """Return the attribute type of each column of the key, None if only the table knows it.

        `typed` are the types of a key that is declared as a mapping. Raises ConfigurationError or
        SchemaMismatchError for an invalid key.
        """
        if len(self.key) > 2:
            text = f"{self._label} declares {len(self.key)} key columns; DynamoDB takes one or two."
            raise errors.ConfigurationError(
                text, "Combine some of them into one column.", argument="key"
            )
        check_not_reserved(self._label, self._declared)
        declared = self._declared_columns(typed)
        types: dict[str, str | None] = dict.fromkeys(self.key)
        for name in self.key:
            if name in declared:
                types[name] = self._type_of_key_column(declared[name])
            elif self.columns is not None:
                what = (
                    f"{self._label} has the key column {name!r}, which is not among its columns"
                    f" {', '.join(declared)}."
                )
                raise errors.SchemaMismatchError(
                    what, "Correct the key, or the columns.", column=name
                )
        if self.create and None in types.values():
            problem = f"{self._label} can't be created without the types of its key."
            step = 'Declare columns={"name": "type", …}, or the key as {"id": "string"}.'
            raise errors.ConfigurationError(problem, step, argument="columns", table=self.table)
        return types

    def _declared_columns(self, typed: Mapping[str, str]) -> dict[str, Column]:
        """Return the columns whose types are declared, by columns= or by the key; raises
        ConfigurationError if both declare one, and differ.
        """
        declared = {column.name: column for column in self._declared}
        for name, kind in typed.items():
            column = parse_known_column(name, kind)
            other = declared.get(name)
            if other is not None and key_attribute_type(column) != key_attribute_type(other):
                problem = (
                    f"{self._label} has the key {name!r} as {kind} and the column {name!r} as"
                    f" {other.type}."
                )
                raise errors.ConfigurationError(
                    problem, "Declare both with the same type.", argument="key", table=self.table
                )
            declared[name] = column
        return declared

    def _type_of_key_column(self, column: Column) -> str:
        """Return the attribute type of a key column; ConfigurationError if it can't be in a key."""
        kind = key_attribute_type(column)
        if kind is None:
            raise errors.ConfigurationError(
                f"{self._label}: its key {column.name!r} is {column.type}; expected text, a number,"
                " bytes or a time.",
                "Use another column as the key.",
                argument="key",
            )
        return kind


def _group_by_key(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return the entries of each key as one list, in their order."""
    by_key: dict[Any, list[Entry]] = {}
    for entry in entries:
        by_key.setdefault(dynamodb_requests.identity_of(entry.key), []).append(entry)
    return list(by_key.values())


def _parts(entries: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Return `entries` in parts of at most `size`."""
    return (entries[start : start + size] for start in range(0, len(entries), size))
