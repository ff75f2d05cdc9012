"""Credentials that expire at any request of a run, which later goes on with fresh ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagster_adjunct import Application, open_lake
from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.errors import TransientError
from dagster_adjunct.orchestration.code_location.metadata import RETRY_IN_NEW_RUN
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.orchestration.step_world import StepWorld
from tests.rounds import rounds
from tests.servers.s3 import S3Server
from tests.servers.s3_proxy import TroubledS3

pytestmark = [pytest.mark.server, pytest.mark.lengthy]


class Expiring:
    """Credentials in a file, whose key is called expired from the n-th request on."""

    def __init__(self, proxy: TroubledS3, file: Path) -> None:
        self.proxy, self.file = proxy, file
        self.left, self.code, self.asked = 10**9, "ExpiredToken", 0
        self.keys = (f"KEY{number}" for number in itertools.count())
        proxy.refusal_of = self.refusal_of  # type: ignore[method-assign]
        self.renew()

    def renew(self) -> None:
        self.key, self.left = next(self.keys), 10**9
        lines = f"aws_access_key_id={self.key}\naws_secret_access_key=s\n"
        self.file.write_text(f"[default]\n{lines}")

    def refusal_of(self, authorization: str) -> str | None:
        self.asked += 1
        if f"Credential={self.key}/" not in authorization:
            return self.code
        self.left -= 1
        return self.code if self.left < 0 else None


@pytest.fixture
def expiring(
    moto_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Expiring]:
    moto_s3.set_in(monkeypatch)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for proxy in TroubledS3(moto_s3.endpoint).running():
        for name in ("AWS_ENDPOINT_URL_S3", "ADJUNCT_S3_ENDPOINT"):
            monkeypatch.setenv(name, proxy.endpoint)
        monkeypatch.setenv("ADJUNCT_S3_ATTEMPTS", "1")
        yield Expiring(proxy, tmp_path / "credentials")


def shops(world: StepWorld) -> Application:
    world.stream("sales", "k", 1, k="string", n="bigint")
    world.stream("shops", "k", 1, k="string", town="string")
    world.send("shops", ("a", "Rome"), version="v1")
    world.send("sales", *[("a", number) for number in range(5)])
    app = Application("credentials", engine="auto")
    table = app.table(bounded_dataset("shops", input="lake.shops", key="k", partitions=1))
    sales = app.input_stream("lake.sales", default_offset="oldest")
    sales.join(table, on="k", select=["town"]).send_to(
        app.output_stream("lake.out", partitions=1, key="k")
    )
    return app


@pytest.mark.rounds
def test_credentials_that_expire_at_any_request_stop_a_run_for_now(
    moto_s3: S3Server, tmp_path: Path, expiring: Expiring
) -> None:
    every = 23  # of the requests of a run
    for first in rounds((0,), (0, 12)):
        world = StepWorld(open_lake(moto_s3.url()), tmp_path, IN_PROCESS)
        app = shops(world)
        world.advance(*app.datasets)
        said_messages = list[str]()
        for left in itertools.count(first, every):
            expiring.left = left
            try:
                world.run(app)
                break
            except (TransientError, *RETRY_IN_NEW_RUN) as error:
                said_messages.append(str(error))
                expiring.renew()
        expiring.left = 10**9
        world.run(app)
        assert said_messages
        assert all(expiring.code in text for text in said_messages)
        assert sorted(row["n"] for row in world.rows("out")) == list(range(5))
        assert {row["town"] for row in world.rows("out")} == {"Rome"}
