"""Tables as Dagster resources: their secrets stay in the environment, whatever a run stores, logs or pickles."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetExecutionContext, DagsterInstance, Definitions, EnvVar, MaterializeResult, asset

from dagster_adjunct.code_location import PostgresTableResource, SqliteTableResource
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables import RateLimit
from tests.servers.postgres import GUARDED_PASSWORD, GUARDED_USER, PostgresServer

COLUMNS = {"machine": "string", "temperature": "double"}


@asset
def warmest(context: AssetExecutionContext, machines: PostgresTableResource) -> MaterializeResult[Any]:
    with machines.blocking("machines") as table:
        table.put("m1", {"machine": "m1", "temperature": 21.5})
        found = table.get("m1")
    context.log.info("asked %r by %r, that is %r", table.table, machines, found)
    print(machines, machines.function(), table.table.write_function.to_dict())  # in the run's captured output
    (Path(context.instance.root_directory) / "pickled").write_bytes(pickle.dumps((machines.function(), table.table)))
    metrics = {f"adjunct/{name}": count for name, count in table.metrics.to_dict().items()}
    return MaterializeResult(metadata={"found": str(found), "function": str(machines.function().to_dict()), **metrics})


def machines(**settings: Any) -> PostgresTableResource:
    return PostgresTableResource(
        table="machines", key="machine", columns=COLUMNS, dsn=EnvVar("MACHINES_DSN"), **settings
    )


def everything_stored(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("right", [True, False], ids=["let in", "turned away"])
def test_no_secret_of_a_table_is_in_anything_that_a_run_stores_logs_or_pickles(
    postgres_server: PostgresServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    right: bool,
) -> None:
    password = GUARDED_PASSWORD if right else "a-wrong-secret"
    postgres_server.execute("DROP TABLE IF EXISTS machines")
    monkeypatch.setenv("MACHINES_DSN", postgres_server.dsn(GUARDED_USER, password))
    postgres_server.execute("CREATE TABLE machines (machine text PRIMARY KEY, temperature double precision)")
    postgres_server.execute(f"GRANT ALL ON machines TO {GUARDED_USER}")
    definitions = Definitions(assets=[warmest], resources={"machines": machines()})
    job = definitions.resolve_implicit_global_asset_job_def()
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        done = job.execute_in_process(instance=instance, raise_on_error=False)
        assert done.success is right
        if right:
            (event,) = done.asset_materializations_for_node("warmest")
            assert event.metadata["adjunct/writes"].value == 1
        stored = everything_stored(tmp_path)
        shown = [str(entry) for entry in instance.all_logs(done.run_id)] + [str(instance.get_run_by_id(done.run_id))]
        captured = capfd.readouterr()
    if right:
        assert b"MACHINES_DSN" in stored
        assert b"machines" in (tmp_path / "pickled").read_bytes()
    else:
        assert "refused the login" in "\n".join(shown)
    for text in (stored.decode(errors="replace"), *shown, captured.out, captured.err):
        assert password not in text


def test_what_is_no_name_of_a_variable_is_refused_and_not_told() -> None:
    with pytest.raises(ConfigurationError, match="dsn is no name of an environment variable") as told:
        PostgresTableResource(table="t", key="id", dsn="postgresql://user:correct-horse@host/db")
    assert "correct-horse" not in str(told.value)
    assert PostgresTableResource(table="t", key="id", dsn="MACHINES_DSN").dsn == "MACHINES_DSN"


def test_a_code_location_loads_without_the_variable_and_an_application_declares_the_table() -> None:
    table = machines().remote_table("machines", rate_limit=RateLimit(writes_per_second=100))
    app = Application("plant")
    app.table(table)
    assert (table.key, table.rate_limit.writes_per_second) == (("machine",), 100)
    assert table.write_function is table.read_function
    assert table.write_function.to_dict()["dsn_env"] == "MACHINES_DSN"


def test_a_table_in_a_file_needs_no_secret(tmp_path: Path) -> None:
    store = SqliteTableResource(
        path=str(tmp_path / "t.sqlite"), table="t", key=["a", "b"], columns={"a": "int", "b": "int"}, create=True
    )

    @asset
    def written(pairs: SqliteTableResource) -> None:
        with pairs.blocking("pairs") as table:
            table.put((1, 2), {"a": 1, "b": 2})

    definitions = Definitions(assets=[written], resources={"pairs": store})
    with DagsterInstance.ephemeral() as instance:
        assert definitions.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance).success
    with store.blocking("pairs") as table:
        assert table.get((1, 2)) == {"a": 1, "b": 2}
