"""A key-value table as a Dagster resource: made where it is not there, used in assets, its
secrets kept away.
"""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance, Definitions, EnvVar, MaterializeResult, asset, materialize

from dagster_adjunct.code_location import KeyValueTableResource
from dagster_adjunct.key_value import (
    KeyValueTableConfiguration,
    KeyValueTableManager,
    TextSerializer,
)
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    KeyValueTableExistsError,
    LakeNotFoundError,
)
from dagster_adjunct.resources.objects.lake import open_lake
from tests.servers.postgres import GUARDED_PASSWORD, GUARDED_USER, PostgresServer


@asset
def counted(counters: KeyValueTableResource) -> MaterializeResult[Any]:
    with counters.blocking() as table:
        before = table.get("runs", family="plant")
        if before is None:
            table.put_if_absent("runs", {"n": 1}, family="plant")
        else:
            table.replace("runs", {"n": before.value["n"] + 1}, before.version, family="plant")
        entry = table.get("runs", family="plant")
        assert entry is not None
        return MaterializeResult(
            metadata={"n": entry.value["n"], "told": f"{table!r} {counters!r}"}
        )


def runs_of(resource: KeyValueTableResource, instance: DagsterInstance | None = None) -> int:
    done = materialize([counted], resources={"counters": resource}, instance=instance)
    (event,) = done.asset_materializations_for_node("counted")
    return int(str(event.metadata["n"].value))


@pytest.mark.lengthy
def test_an_asset_counts_in_a_table_that_is_made_where_it_is_not_there(tmp_path: Path) -> None:
    url = str(tmp_path / "lake")
    resource = KeyValueTableResource(scope="plant", table="counters", lake=url, partitions=2)
    assert [runs_of(resource), runs_of(resource)] == [1, 2]
    manager = KeyValueTableManager(open_lake(url))
    manager.update("plant", "counters", KeyValueTableConfiguration(2, longest_value=100))
    assert runs_of(resource) == 3
    there = KeyValueTableResource(scope="plant", table="counters", lake=url)
    assert runs_of(there) == 4
    with there.blocking(value=TextSerializer()) as table:
        entry = table.get("runs", family="plant")
        assert entry is not None
        assert entry.value == '{"n":4}'
    other = KeyValueTableResource(scope="plant", table="counters", lake=url, partitions=3)
    with pytest.raises(KeyValueTableExistsError, match=r"partitions 2 \(wanted: 3\)") as caught:
        other.blocking()
    assert (caught.value.scope, caught.value.table) == ("plant", "counters")


def test_a_table_that_must_be_there_makes_nothing(tmp_path: Path) -> None:
    resource = KeyValueTableResource(scope="plant", table="counters", lake=str(tmp_path / "none"))
    with pytest.raises(LakeNotFoundError):
        resource.blocking()
    assert not (tmp_path / "none").exists()


def test_a_code_location_with_a_table_is_loaded_offline(tmp_path: Path) -> None:
    resource = KeyValueTableResource(
        scope="plant",
        table="counters",
        lake="s3://no-such-bucket/lake",
        partitions=2,
        backend={"backend": "postgres", "dsn_env": EnvVar("PLANT_DSN")},
    )
    Definitions(
        assets=[counted], resources={"counters": resource}
    ).resolve_implicit_global_asset_job_def()
    assert resource.backend == {"backend": "postgres", "dsn_env": "PLANT_DSN"}


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": {"backend": "postgres", "dsn_env": "postgresql://me:secret@db/plant"}},
        {"backend": {"backend": "dynamodb", "credentials_env": ["ID", "se-cret"]}},
    ],
)
def test_a_secret_in_the_place_of_a_name_is_refused_and_not_displayed(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(
        ConfigurationError, match="is not the name of an environment variable"
    ) as refused:
        KeyValueTableResource(scope="plant", table="counters", **settings)
    assert "secret" not in str(refused.value)
    assert "se-cret" not in str(refused.value)


def test_serializers_have_names() -> None:
    with pytest.raises(ConfigurationError) as caught:
        KeyValueTableResource(scope="plant", table="counters", value="pickle")
    assert caught.value.argument == "name"


def test_no_secret_of_a_table_is_stored_by_a_run_or_in_the_lake(
    postgres_server: PostgresServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PLANT_SECRET", postgres_server.dsn(GUARDED_USER, GUARDED_PASSWORD))
    postgres_server.execute("DROP SCHEMA IF EXISTS counted CASCADE")
    postgres_server.execute(f"CREATE SCHEMA counted AUTHORIZATION {GUARDED_USER}")
    resource = KeyValueTableResource(
        scope="plant",
        table="counters",
        lake=str(tmp_path / "lake"),
        partitions=2,
        backend={"backend": "postgres", "dsn_env": EnvVar("PLANT_SECRET"), "schema": "counted"},
    )
    (tmp_path / "dagster").mkdir()
    with DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        assert [runs_of(resource, instance), runs_of(resource, instance)] == [1, 2]
        (tmp_path / "pickled").write_bytes(pickle.dumps((resource.open(), resource.manager())))
    stored = [
        path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()
    ]
    whole = "\n".join([*stored, *capfd.readouterr(), repr(resource)])
    assert "PLANT_SECRET" in whole
    assert GUARDED_PASSWORD not in whole


@pytest.mark.lengthy
def test_the_resource_imports_no_store_before_it_is_used() -> None:
    heavy = "psycopg", "boto3", "pyspark"
    code = (
        f"import sys, dagster_adjunct.code_location; print([m for m in {heavy!r} if m in"
        " sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed == "[]\n"
