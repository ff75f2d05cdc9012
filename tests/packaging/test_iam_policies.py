"""deploy/iam/: each role does its work on a real S3 server that enforces its policies, and uses all
that they allow.

Requests are recorded by operation and key. DynamoDB Local asks nobody for permission, so there only
the record counts.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from dagster_adjunct import (
    IN_PROCESS,
    LakeSettings,
    LakeStreams,
    advance_version_set,
    bounded_dataset,
    current_versions,
    list_datasets,
    open_dataset,
    open_lake,
    run_application,
    systems_for,
    version_set,
)
from dagster_adjunct.code_location import LaunchWhen
from dagster_adjunct.errors import ConfigurationError, DatasetError, StreamNotFoundError
from dagster_adjunct.exchange import (
    pyarrow_dataset,
    register_in_iceberg,
    release_from_iceberg,
    stream_view,
)
from dagster_adjunct.key_value import (
    BlockingKeyValueTable,
    DynamoDbSegments,
    JsonSerializer,
    KeyValueTableConfiguration,
    KeyValueTableManager,
    TextSerializer,
)
from dagster_adjunct.maintenance import delete_stream
from dagster_adjunct.readers import list_readers, read_new, remove_reader
from dagster_adjunct.resources.errors import ObjectExistsError
from dagster_adjunct.resources.objects import store as stores
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, RowEntries
from dagster_adjunct.resources.times import Deadline, read_clocks
from dagster_adjunct.startpoints import StartpointOldest, Startpoints
from dagster_adjunct.tables import BlockingTable, DynamoDbTable, RemoteTable
from tests.kept_processes import program
from tests.orchestration.dagster.ticking import Ticker
from tests.packaging.composed import DEPLOY
from tests.packaging.policies import Need, Recorder, needs_of_dynamodb, needs_of_s3, read_policy
from tests.servers.dynamodb import DynamoDbServer
from tests.servers.s3 import PolicedS3Server

IAM = DEPLOY / "iam"
ROLES = {
    "run": ["run.json"],
    "deliver": ["deliver.json"],
    "code-location": ["code-location.json"],
    "read": ["read.json"],
    "read with leases": ["read.json", "read-leases.json"],
    "read streams": ["read-streams.json"],
    "read streams with holds": ["read-streams.json", "hold-streams.json"],
    "read streams by name": ["read-streams.json", "named-readers.json"],
}
BUCKET, LAKE = "company-lake", "s3://company-lake/adjunct"
IN_BUCKET = f"arn:aws:s3:::{BUCKET}/adjunct/"
IN_DYNAMODB = "arn:aws:dynamodb:eu-central-1:111122223333:table/"
STAYING = LaunchWhen(stay=timedelta(hours=1))


class Roles:
    """The roles as users of a server, and what each of them has needed."""

    def __init__(self, server: PolicedS3Server) -> None:
        self.recorder = Recorder()
        self.environments = {
            role: server.user_env(
                role.replace(" ", "-"), *[(IAM / file).read_text("utf-8") for file in files]
            )
            for role, files in ROLES.items()
        }

    def allow(self, role: str, need: Need) -> bool:
        return any(
            grant.allows(need) for grant in read_policy(*[IAM / file for file in ROLES[role]])
        )

    def as_role(self, role: str, patch: pytest.MonkeyPatch) -> Any:
        """Let this process work as this role, and record what it needs while the context lasts."""
        for name, value in self.environments[role].items():
            patch.setenv(name, value)
        stores._OPENED.clear()  # a process has one client of a lake
        return self.recorder.recording(role, needs_of_s3)


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def orders(patch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The application of the example, and what delivers its sample: `orders.pipeline` and
    `orders.deliver`.
    """
    patch.setenv("ADJUNCT_LAKE", LAKE)
    patch.syspath_prepend(str(DEPLOY))
    yield lambda name: importlib.import_module(f"orders.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "orders"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def roles(
    policed_s3: PolicedS3Server,
    patch: pytest.MonkeyPatch,
    orders: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Roles:
    """All roles, after each has done its work once."""
    policed_s3.server.client().create_bucket(Bucket=BUCKET)
    roles, app, deliver = Roles(policed_s3), orders("pipeline").app, orders("deliver")
    fares, fees = (
        bounded_dataset(name, input=f"lake.{name}", key="product", broadcast=True)
        for name in PRICES
    )
    prices = version_set("prices", fares, fees)
    with roles.as_role("run", patch):  # the first write makes the lake
        LakeStreams(open_lake()).create(
            "first", schema=deliver.STREAMS["products"][0], key=["product"], partitions=1
        )
    with roles.as_role("deliver", patch):
        deliver.deliver()
        deliver.deliver()  # again: what was written for it is deleted
        streams = LakeStreams(open_lake())
        for name in PRICES:
            streams.create(
                name, schema=deliver.STREAMS["products"][0], key=["product"], partitions=1
            )
            streams.append(
                name, deliver.PRODUCTS, producer="sample", sequence=1, end_of_dataset="v1"
            )
        upload_in_parts(f"streams/{PRICES[0]}/data/large", patch)
    with roles.as_role("run", patch):
        lake = open_lake()
        systems = systems_for(app, lake=lake)
        run_application(app, lake=lake, systems=systems, spark=IN_PROCESS, run="first")
        advance_version_set(prices, lake=lake, systems=systems, spark=IN_PROCESS, by="test")
        delete_stream(lake, "first", reason="not needed", by="test")
        upload_in_parts("datasets/products/data/large", patch)
    with roles.as_role("code-location", patch):
        look_and_request(app)
    with roles.as_role("read", patch):
        lake = open_lake(create=False)
        assert {*list_datasets(lake)} == {"customers", "products", *PRICES}
        for name, key in (("products", "apple"), ("customers", "ann"), (PRICES[0], "bread")):
            with open_dataset(lake, name, lease=False) as dataset:
                assert dataset.get(key) is not None
                assert key in dict(dataset.items())
    with roles.as_role("read with leases", patch):
        lake = open_lake(create=False)
        with open_dataset(lake, "products") as dataset:
            dataset.take_lease()
            assert dataset.get("apple") is not None
        for dataset in current_versions(lake, prices).values():
            assert dataset.get("apple") is not None
            dataset.close()
    use_streams(roles, patch, tmp_path_factory.mktemp("catalog"))
    return roles


PRICES = ("fares", "fees")


def upload_in_parts(key: str, patch: pytest.MonkeyPatch) -> None:
    """Upload a file in parts, twice, where the second upload finds out only at its end that the
    object exists.
    """
    store = open_lake(
        settings=LakeSettings(multipart_threshold=5 * 1024 * 1024, part_size=5 * 1024 * 1024)
    ).store
    path = store.staging_dir() / f"iam-{os.getpid()}"
    path.write_bytes(b"x" * (6 * 1024 * 1024))
    try:
        store.upload(path, key)
        with patch.context() as late:
            late.setattr(store, "head", lambda key: None)
            with pytest.raises(ObjectExistsError):
                store.upload(path, key)
    finally:
        path.unlink()


def use_streams(roles: Roles, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Read a stream, hold its files for an Iceberg table, and read it as a named reader."""
    stream = PRICES[0]
    with roles.as_role("read streams", patch):
        lake = open_lake(create=False)
        streams = LakeStreams(lake)
        assert streams.read_arrow(streams.all_ranges(stream)).num_rows
        assert pyarrow_dataset(stream_view(lake, stream)).count_rows()
        with pytest.raises(StreamNotFoundError):
            stream_view(lake, "nowhere")
    with roles.as_role("read streams with holds", patch):
        lake = open_lake(create=False)
        of_lake = {
            "s3.endpoint": os.environ["ADJUNCT_S3_ENDPOINT"],
            "s3.region": os.environ["ADJUNCT_S3_REGION"],
        }
        catalog = SqlCatalog(
            "iam", uri=f"sqlite:///{folder}/catalog.db", warehouse=str(folder), **of_lake
        )
        catalog.create_namespace("streams")
        assert register_in_iceberg(stream_view(lake, stream), catalog, "streams.fares").new
        assert release_from_iceberg(lake, f"lake.{stream}", "streams.fares")
    with roles.as_role("read streams by name", patch):
        lake = open_lake(create=False)
        with read_new(lake, stream, reader="report") as batch:
            assert batch.records
            batch.commit()
        assert [reader.name for reader in list_readers(lake, stream)] == ["report"]
        remove_reader(lake, stream, "report")


def look_and_request(app: Any) -> None:
    """What happens in a code location: sensors, which also fan requests out and ask a run to
    end, and requests.
    """
    lake = open_lake()
    sensors = ("orders_new_records", "orders_startpoints", "orders_restart", "products_delivered")
    with dg.DagsterInstance.ephemeral() as instance:
        for sensor in sensors:
            Ticker(lake, app, instance, sensor, launch_when=STAYING).tick()
        Startpoints(app, lake=lake).request(
            "lake.orders", StartpointOldest(), by="test", reason="a test"
        )
        request = Ticker(lake, app, instance, "orders_startpoints").asked()
        assert "adjunct/startpoints" in request.tags
        instance.add_run(
            dg.DagsterRun(
                "orders", status=dg.DagsterRunStatus.STARTED, tags={"adjunct/loaded": "before"}
            )
        )
        assert (
            "asked to end"
            in Ticker(lake, app, instance, "orders_new_records", launch_when=STAYING).skipped()
        )


@pytest.mark.parametrize("role", ROLES)
def test_the_policy_of_a_role_allows_what_it_needs_and_nothing_else(
    roles: Roles, role: str
) -> None:
    needs = roles.recorder.needs[role]
    assert needs
    assert (
        sorted(
            f"{need.action} {need.resource} {need.prefix}"
            for need in needs
            if not roles.allow(role, need)
        )
        == []
    )
    for grant in read_policy(IAM / ROLES[role][-1]):
        assert grant.unused(needs) == []


READS, WRITES = "s3:GetObject", "s3:PutObject"
REFUSED = [
    ("deliver", READS, "datasets/products/data/1/part"),
    ("deliver", WRITES, "datasets/products/CURRENT"),
    ("deliver", WRITES, "_adjunct/lake.json"),
    ("deliver", "s3:DeleteObject", "streams/orders/CURRENT"),
    ("code-location", READS, "streams/orders/data/1/part"),
    ("code-location", READS, "key-values/1/0/CURRENT-"),
    ("code-location", WRITES, "applications/orders/CURRENT"),
    ("code-location", WRITES, "streams/orders/CURRENT"),
    ("read", WRITES, "datasets/products/CURRENT"),
    ("read", WRITES, "datasets/products/leases/1.json"),
    ("read", "s3:DeleteObject", "datasets/products/leases/1.json"),
    ("read", READS, "streams/orders/CURRENT"),
    ("read", READS, "applications/orders/CURRENT"),
    ("read with leases", WRITES, "datasets/products/CURRENT"),
    ("read with leases", "s3:DeleteObject", "datasets/products/data/1/part"),
    ("deliver", WRITES, "exchanges/1/messages/1"),
    ("code-location", WRITES, "exchanges/1/messages/1"),
    ("read with leases", WRITES, "exchanges/1/messages/1"),
    ("run", WRITES, "../other/CURRENT"),
    ("read streams", READS, "datasets/products/data/1/part"),
    ("read streams", WRITES, "streams/orders/holds/1.json"),
    ("read streams with holds", WRITES, "streams/orders/CURRENT"),
    ("read streams with holds", "s3:DeleteObject", "streams/orders/data/1/part"),
    ("read streams with holds", WRITES, "streams/orders/readers/report/CURRENT"),
    ("read streams by name", WRITES, "streams/orders/CURRENT"),
    ("read streams by name", WRITES, "streams/orders/holds/1.json"),
]


@pytest.mark.parametrize(("role", "action", "key"), REFUSED)
def test_a_policy_refuses_the_work_of_another_role(role: str, action: str, key: str) -> None:
    resource = f"arn:aws:s3:::{BUCKET}/{key[3:]}" if key.startswith("../") else IN_BUCKET + key
    grants = read_policy(*[IAM / file for file in ROLES[role]])
    assert not any(grant.allows(Need(action, resource)) for grant in grants)


def test_the_server_refuses_what_the_policy_of_a_reader_does_not_allow(
    roles: Roles, patch: pytest.MonkeyPatch, orders: Any
) -> None:
    products = orders("deliver").PRODUCTS
    with roles.as_role("read", patch):
        lake = open_lake(create=False)
        streams = LakeStreams(lake)
        with pytest.raises(ConfigurationError, match="403"):
            streams.append("products", products, producer="reader", sequence=1)
        with open_dataset(lake, "products") as dataset, pytest.raises(DatasetError, match="403"):
            dataset.take_lease()
        with pytest.raises(ConfigurationError, match="403"):
            lake.store.put("datasets/products/CURRENT", b"")
    with roles.as_role("deliver", patch), pytest.raises(ConfigurationError, match="403"):
        open_dataset(open_lake(), "products")
    with roles.as_role("code-location", patch):
        streams = LakeStreams(open_lake())
        with pytest.raises(ConfigurationError, match="403"):
            streams.read_arrow(streams.all_ranges("orders"))


_COPY = """
from dagster_adjunct import LakeStreams, Schema, open_dataset, open_lake, session_scope
lake = open_lake()
streams = LakeStreams(lake)
streams.create("ids", schema=Schema.of(customer="string"), key=["customer"], partitions=2)
with session_scope(master="local[1]", lake_url=lake.url) as spark, open_dataset(lake, "customers") as customers:
    streams.append("ids", customers.frame(spark()).select("customer"), producer="copy", sequence=1)
print(streams.read_arrow(streams.all_ranges("ids")).num_rows)
"""


@pytest.mark.spark
@pytest.mark.long
def test_spark_reads_and_writes_the_lake_with_the_policy_of_runs(roles: Roles) -> None:
    command, env = (
        [program("python"), "-c", _COPY],
        {**os.environ, **roles.environments["run"], "ADJUNCT_LAKE": LAKE},
    )
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.stdout == "2\n", done.stderr[-3000:]


def use_tables(server: DynamoDbServer) -> None:
    """Put, update, get and delete records, with conditions and without."""
    columns = {"customer": "string", "spent": "double", "seen": "bigint"}
    of: Any = {"create": True, "forget_deleted_after": 3600.0, **server.session()}
    plain = DynamoDbTable("orders-spending", "customer", columns=columns, **of)
    with BlockingTable(
        RemoteTable("plain", key="customer", read_function=plain, write_function=plain)
    ) as table:
        table.put("ann", {"spent": 1.0, "seen": 1})
        table.update("ann", {"spent": 2.0})
        assert table.get("ann") == {"customer": "ann", "spent": 2.0, "seen": 1}
        table.delete("ann")
    loose = DynamoDbTable("orders-seen", {"customer": "string"}, **of)
    newest = RemoteTable(
        "newest", key="customer", read_function=loose, write_function=loose, newest_by="seen"
    )
    with BlockingTable(newest) as table:
        table.put("ann", {"seen": 1})
        table.delete("ann", newest=2)
    asyncio.run(write_fenced(DynamoDbTable("orders-fenced", "customer", columns=columns, **of)))


async def write_fenced(store: DynamoDbTable) -> None:
    """Put, update and delete records as a run does, with its epoch."""
    fence = Fence(
        InMemoryStore(), "run", holder="h", application="orders", run="r", epoch=1, deadline=_FAR
    )
    await store.begin_run(create=True, marks=False, fence=fence)
    record = {"customer": "ann", "spent": 1.0, "seen": 1}
    for kind, values in (
        (OperationKind.PUT, [record]),
        (OperationKind.UPDATE, [{"spent": 2.0}]),
        (OperationKind.DELETE, None),
    ):
        outcomes = await store.send(
            Operation(kind, RowEntries(["ann"], values), fence=fence, fenced=True)
        )
        assert outcomes.done == 1
    await store.close()


_FAR = Deadline(read_clocks(), 3600.0)


def use_key_values(server: DynamoDbServer, folder: Path) -> None:
    """Create a table, change and read it in all ways, seal and delete it."""
    manager = KeyValueTableManager(
        open_lake(str(folder / "lake")), DynamoDbSegments(endpoint_url=server.endpoint)
    )
    manager.create_scope("orders")
    manager.create("orders", "state", KeyValueTableConfiguration(partitions=1))
    made = manager.open("orders", "state", key=TextSerializer(), value=JsonSerializer())
    with BlockingKeyValueTable(made) as table:
        table.put("ann", 1, family="spent")
        table.put_all([("bob", 2), ("eve", 3)], family="spent")
        found = table.get("ann", family="spent")
        assert found is not None
        table.remove("bob", family="spent")
        assert [
            entry and entry.value for entry in table.get_all(["ann", "eve"], family="spent")
        ] == [1, 3]
        assert [len(page.items) for page in table.entries(family="spent")] == [2]
    manager.seal("orders", "state")
    manager.delete("orders", "state")


def test_the_policies_of_dynamodb_allow_what_tables_send_and_nothing_else(
    dynamodb: DynamoDbServer, tmp_path: Path
) -> None:
    recorder = Recorder()

    def needs_of(operation: str, given: Any, status: int) -> Iterator[Need]:
        return needs_of_dynamodb(operation, given, IN_DYNAMODB)

    with recorder.recording("dynamodb-tables.json", needs_of):
        use_tables(dynamodb)
    with recorder.recording("dynamodb-key-values.json", needs_of):
        use_key_values(dynamodb, tmp_path)
    for file, needs in recorder.needs.items():
        grants = read_policy(IAM / file)
        assert (
            sorted(need.action for need in needs if not any(grant.allows(need) for grant in grants))
            == []
        ), file
        assert [unused for grant in grants for unused in grant.unused(needs)] == [], file


def test_each_policy_is_short_enough_for_a_user_and_on_the_page() -> None:
    page = (DEPLOY.parent / "docs/deploying.md").read_text("utf-8")
    files = sorted(IAM.glob("*.json"))
    assert {file.name for file in files} == {
        *(name for names in ROLES.values() for name in names),
        "dynamodb-tables.json",
        "dynamodb-key-values.json",
        "emr-cluster.json",
        "emr-serverless.json",
        "glue.json",
    }
    for file in files:
        policy = json.loads(file.read_text("utf-8"))
        assert len(json.dumps(policy, separators=(",", ":"))) <= 2048, (
            "AWS allows no longer ones in a user"
        )
        for statement in policy["Statement"]:
            assert f"`{statement['Sid']}`" in page, (
                f"{file.name}: {statement['Sid']} is not explained"
            )
