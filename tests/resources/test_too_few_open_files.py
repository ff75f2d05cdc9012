"""What can't be opened because too many files are open is not taken for what does not exist."""

from __future__ import annotations

from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from dagster_adjunct.resources.arguments import check_zone
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.spark.session import check_java
from tests.resources.small_disks import more_open_files


def test_a_zone_is_not_unknown() -> None:
    check_zone("found", "Europe/Vaduz", argument="zone")
    ZoneInfo.clear_cache()
    with more_open_files(0), pytest.raises(ConfigurationError) as caught:
        check_zone("found", "Europe/Vaduz", argument="zone")
    assert caught.value.argument is None
    assert "ulimit -n" in caught.value.next_step
    with pytest.raises(ConfigurationError) as caught:
        check_zone("found", "Europe", argument="zone")  # a folder
    assert caught.value.argument == "zone"


def test_java_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"21.0.1\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert check_java() == str(java)
    with more_open_files(0), pytest.raises(ConfigurationError) as caught:
        check_java()
    assert caught.value.setting is None
    assert "ulimit -n" in caught.value.next_step
