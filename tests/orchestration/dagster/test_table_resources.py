"""Tables as Dagster resources: their secrets stay in the environment, whatever a run stores,
logs or pickles.
"""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    AssetExecutionContext,
    DagsterInstance,
    Definitions,
    EnvVar,
    MaterializeResult,
    asset,
)

from dagster_adjunct.code_location import (
    DynamoDbTableResource,
    HttpTableResource,
    KeyValueRowsResource,
    PostgresTableResource,
    RedisTableResource,
    SqliteTableResource,
)
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.code_location.table_resources import TableResource
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables.rate import RateLimit
from tests.servers.dynamodb import DynamoDbServer
from tests.servers.http_records import running_service
from tests.servers.postgres import GUARDED_PASSWORD, GUARDED_USER, PostgresServer
from tests.servers.redis import RedisServerProcess, running_redis

COLUMNS = {"machine": "string", "temperature": "double"}


def use(context: AssetExecutionContext, machines: TableResource) -> MaterializeResult[Any]:
    """What an asset does with a table, and tells, stores and pickles all that it can lay its
    hands on.
    """
    with machines.blocking("machines") as table:
        table.put("m1", {"machine": "m1", "temperature": 21.5})
        record = table.get("m1")
    context.log.info("asked %r by %r, that is %r", table.table, machines, record)
    # in the run's captured output
    print(machines, machines.function(), table.table.write_function.to_dict())
    (Path(context.instance.root_directory) / "pickled").write_bytes(
        pickle.dumps((machines.function(), table.table))
    )
    counts = {f"adjunct/{name}": count for name, count in table.metrics.to_dict().items()}
    return MaterializeResult(
        metadata={"found": str(record), "function": str(machines.function().to_dict()), **counts}
    )


@asset
def in_postgres(
    context: AssetExecutionContext, machines: PostgresTableResource
) -> MaterializeResult[Any]:
    return use(context, machines)


@asset
def in_redis(
    context: AssetExecutionContext, machines: RedisTableResource
) -> MaterializeResult[Any]:
    return use(context, machines)


@asset
def in_dynamodb(
    context: AssetExecutionContext, machines: DynamoDbTableResource
) -> MaterializeResult[Any]:
    return use(context, machines)


@asset
def in_a_service(
    context: AssetExecutionContext, machines: HttpTableResource
) -> MaterializeResult[Any]:
    return use(context, machines)


def machines(**settings: Any) -> PostgresTableResource:
    return PostgresTableResource(
        table="machines", key="machine", columns=COLUMNS, dsn=EnvVar("MACHINES_SECRET"), **settings
    )


@dataclass(frozen=True)
class Told:
    """What a run has come to: whether it succeeded, what it has logged and printed, and all that
    is stored of runs.
    """

    success: bool
    of_this_run: str
    whole: str


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterInstance]:
    with DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as instance:
        yield instance


def run(
    node: Any, resource: Any, instance: DagsterInstance, capfd: pytest.CaptureFixture[str]
) -> Told:
    folder = Path(instance.root_directory)
    (folder / "pickled").unlink(missing_ok=True)
    job = Definitions(
        assets=[node], resources={"machines": resource}
    ).resolve_implicit_global_asset_job_def()
    done = job.execute_in_process(instance=instance, raise_on_error=False)
    if done.success:
        (event,) = done.asset_materializations_for_node(node.op.name)
        assert event.metadata["adjunct/writes"].value == 1
        assert (folder / "pickled").exists()
    stored = [
        path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file()
    ]
    logs = [str(entry) for entry in instance.all_logs(done.run_id)]
    of_this_run = "\n".join([*logs, str(instance.get_run_by_id(done.run_id)), *capfd.readouterr()])
    return Told(done.success, of_this_run, "\n".join([*stored, of_this_run]))


@pytest.mark.parametrize("right", [True, False], ids=["let in", "turned away"])
def test_no_secret_of_postgres_is_in_anything_that_a_run_stores_logs_or_pickles(
    postgres_server: PostgresServer,
    instance: DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    right: bool,
) -> None:
    secret = GUARDED_PASSWORD if right else "a-wrong-secret"
    monkeypatch.setenv("MACHINES_SECRET", postgres_server.dsn(GUARDED_USER, secret))
    postgres_server.execute("DROP TABLE IF EXISTS machines")
    postgres_server.execute(
        "CREATE TABLE machines (machine text PRIMARY KEY, temperature double precision)"
    )
    postgres_server.execute(f"GRANT ALL ON machines TO {GUARDED_USER}")
    reported = run(in_postgres, machines(), instance, capfd)
    assert reported.success is right
    assert ("MACHINES_SECRET" if right else "rejected the login") in reported.of_this_run
    assert secret not in reported.whole


@pytest.mark.parametrize(("right", "apart"), [(True, True), (True, False), (False, False)])
def test_no_secret_of_redis_is_in_anything_that_a_run_stores_logs_or_pickles(
    guarded_redis: RedisServerProcess,
    instance: DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    right: bool,
    apart: bool,
) -> None:
    secret = GUARDED_PASSWORD if right else "a-wrong-secret"
    server = guarded_redis.url()
    monkeypatch.setenv(
        "MACHINES_SECRET", secret if apart else server.replace("redis://", f"redis://:{secret}@")
    )
    where: dict[str, Any] = {"server": server, "password": EnvVar("MACHINES_SECRET")}
    if not apart:
        where = {"url": EnvVar("MACHINES_SECRET")}
    resource = RedisTableResource(prefix="machines", key="machine", columns=COLUMNS, **where)
    reported = run(in_redis, resource, instance, capfd)
    assert reported.success is right
    assert ("MACHINES_SECRET" if right else "rejected the login") in reported.of_this_run
    assert secret not in reported.whole


def test_no_secret_of_dynamodb_is_in_anything_that_a_run_stores_logs_or_pickles(
    dynamodb_server: DynamoDbServer,
    instance: DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MACHINES_KEY_ID", "AREALKEYID")
    monkeypatch.setenv("MACHINES_SECRET", "a-real-secret")
    resource = DynamoDbTableResource(
        table="resource-machines",
        key="machine",
        columns=COLUMNS,
        create=True,
        region="eu-west-1",
        endpoint_url=dynamodb_server.endpoint,
        credentials=[EnvVar("MACHINES_KEY_ID"), EnvVar("MACHINES_SECRET")],
    )
    reported = run(in_dynamodb, resource, instance, capfd)
    assert reported.success
    assert "MACHINES_SECRET" in reported.of_this_run
    assert "a-real-secret" not in reported.whole
    assert "AREALKEYID" not in reported.whole


@pytest.mark.parametrize("right", [True, False], ids=["let in", "turned away"])
def test_no_secret_of_a_service_is_in_anything_that_a_run_stores_logs_or_pickles(
    instance: DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    right: bool,
) -> None:
    monkeypatch.setenv("MACHINES_SECRET", "Bearer a-real-secret")
    with running_service() as service:
        if not right:  # a service that says what it was sent
            service.bend = lambda method, path: (
                401,
                {},
                service.seen[-1][2]["authorization"].encode(),
            )
        resource = HttpTableResource(
            base_url=service.url,
            path="/machines/{machine}",
            key="machine",
            secret_headers={"Authorization": EnvVar("MACHINES_SECRET")},
        )
        reported = run(in_a_service, resource, instance, capfd)
        assert all(
            headers["authorization"] == "Bearer a-real-secret" for _, _, headers in service.seen
        )
        assert service.seen
    assert reported.success is right
    assert ("MACHINES_SECRET" if right else "rejected with 401") in reported.of_this_run
    assert "a-real-secret" not in reported.whole


@pytest.fixture(scope="module")
def guarded_redis() -> Iterator[RedisServerProcess]:
    with running_redis("--requirepass", GUARDED_PASSWORD) as server:
        yield server


def test_what_is_no_name_of_a_variable_is_refused_and_not_reported() -> None:
    with pytest.raises(ConfigurationError) as reported:
        PostgresTableResource(table="t", key="id", dsn="postgresql://user:correct-horse@host/db")
    assert reported.value.argument == "dsn"
    assert "correct-horse" not in str(reported.value)
    assert PostgresTableResource(table="t", key="id", dsn="MACHINES_DSN").dsn == "MACHINES_DSN"


def test_a_code_location_loads_without_the_variable_of_a_tables_secret() -> None:
    table = machines().remote_table("machines", rate_limit=RateLimit(writes_per_second=100))
    app = Application("plant")
    app.table(table)
    assert (table.key, table.rate_limit.writes_per_second) == (("machine",), 100)
    assert table.write_function is table.read_function
    assert table.write_function.to_dict()["dsn_env"] == "MACHINES_SECRET"


def test_a_table_in_a_file_needs_no_secret(tmp_path: Path) -> None:
    store = SqliteTableResource(
        path=str(tmp_path / "t.sqlite"),
        table="t",
        key=["a", "b"],
        columns={"a": "int", "b": "int"},
        create=True,
    )

    @asset
    def written(pairs: SqliteTableResource) -> None:
        with pairs.blocking("pairs") as table:
            table.put((1, 2), {"a": 1, "b": 2})

    definitions = Definitions(assets=[written], resources={"pairs": store})
    with DagsterInstance.ephemeral() as instance:
        assert (
            definitions.resolve_implicit_global_asset_job_def()
            .execute_in_process(instance=instance)
            .success
        )
    with store.blocking("pairs") as table:
        assert table.get((1, 2)) == {"a": 1, "b": 2}


def test_records_in_a_key_value_table_keep_the_name_of_a_backends_variable(tmp_path: Path) -> None:
    settings = {
        "lake": str(tmp_path / "lake"),
        "scope": "plant",
        "table": "t",
        "columns": {"a": "string", "b": "int"},
    }
    elsewhere = KeyValueRowsResource(
        **settings, key="a", stored_in={"backend": "postgres", "dsn_env": EnvVar("MACHINES_DSN")}
    )
    assert elsewhere.function().to_dict()["stored_in"] == {
        "backend": "postgres",
        "dsn_env": "MACHINES_DSN",
    }
    with pytest.raises(ConfigurationError) as reported:
        KeyValueRowsResource(
            **settings,
            key="a",
            stored_in={"backend": "postgres", "dsn_env": "postgresql://a:correct-horse@b/c"},
        )
    assert "correct-horse" not in str(reported.value)
    with KeyValueRowsResource(**settings, key=["a", "b"], family="a", create=True).blocking(
        "pairs"
    ) as table:
        table.put(("x", 2), {})
        assert table.get(("x", 2)) == {"a": "x", "b": 2}


class _Described(SqliteTableResource):
    team: str = "machines"


def test_a_resource_derived_from_a_store_s_may_have_other_fields(tmp_path: Path) -> None:
    described = _Described(
        path=str(tmp_path / "m.sqlite"), table="m", key=["machine"], columns=COLUMNS, create=True
    )
    with described.blocking("machines") as table:
        table.put("m1", {"temperature": 21.5})
        assert table.get("m1") == {"machine": "m1", "temperature": 21.5}
