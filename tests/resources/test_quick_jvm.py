"""The choice of a JVM that begins quickly: its options, and the archive that the first one
leaves.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.spark.session import check_java, session_config
from dagster_adjunct.resources.spark.tuning import is_quick, quick_jvm_options, stop_jvm


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "java").write_text("")
    return str(tmp_path / "java")


class Jvm:
    """A JVM that writes its archive when its input ends, unless it is cut off."""

    def __init__(self, options: str, *, cut_off: bool = False) -> None:
        self.written = Path(options.partition("ArchiveClassesAtExit=")[2].split()[0])
        self.cut_off = cut_off
        self.proc = SimpleNamespace(stdin=SimpleNamespace(close=lambda: None), wait=self.wait)

    def shutdown(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        self.written.write_text("classes")
        if self.cut_off:
            raise TimeoutError


def test_the_first_jvm_leaves_its_classes_to_the_next_whole_or_not_at_all(
    java: str, tmp_path: Path
) -> None:
    # who does not end its JVM leaves nothing half written
    assert "Archive" not in quick_jvm_options(java)
    first = quick_jvm_options(java, keep_classes=True)
    stop_jvm(Jvm(first, cut_off=True), first)
    assert "ArchiveClassesAtExit" in quick_jvm_options(java, keep_classes=True)
    assert list(tmp_path.glob("cache/**/*.*")) == []
    stop_jvm(Jvm(first), first)
    (kept,) = tmp_path.glob("cache/**/*.jsa")
    for keep in (True, False):
        assert f"-XX:SharedArchiveFile={kept}" in quick_jvm_options(java, keep_classes=keep)
    stop_jvm(None, quick_jvm_options(java))  # nothing to wait for


def test_another_java_has_classes_of_its_own(java: str) -> None:
    first = quick_jvm_options(java, keep_classes=True)
    stop_jvm(Jvm(first), first)
    os.utime(java, ns=(1, 1))  # replaced
    assert "SharedArchiveFile" not in quick_jvm_options(java)


def test_it_is_a_choice_of_the_environment_or_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ADJUNCT_SPARK_QUICK", raising=False)

    def options(**chosen: Any) -> str:
        return session_config(master="local[1]", lake_url="/tmp/lake", **chosen)[
            "spark.driver.extraJavaOptions"
        ]

    check_java()
    assert options().startswith("-Xss16m ")
    assert "TieredStopAtLevel" not in options()
    assert "TieredStopAtLevel" in options(quick=True)
    monkeypatch.setenv("ADJUNCT_SPARK_QUICK", "true")
    assert is_quick()
    assert "TieredStopAtLevel" in options()
    assert "TieredStopAtLevel" not in options(quick=False)
    monkeypatch.setenv("ADJUNCT_SPARK_QUICK", "fast")
    with pytest.raises(ConfigurationError) as caught:
        options()
    assert caught.value.setting == "ADJUNCT_SPARK_QUICK"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it but what the test puts there."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return folder


def java_of(folder: Path, version: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    java = folder / "java"
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    return str(java)


@pytest.mark.parametrize("home", ["none", "8", "not executable", "the program itself"])
def test_a_wrong_java_home_next_to_a_java_that_will_do_is_to_be_unset(
    home: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = java_of(path, "21.0.1")
    assert check_java() == good
    at = tmp_path / "home"
    monkeypatch.setenv("JAVA_HOME", good if home == "the program itself" else str(at))
    if home == "8":
        java_of(at / "bin", "1.8.0_412")
    elif home == "not executable":
        Path(java_of(at / "bin", "21")).chmod(0o644)
    with pytest.raises(ConfigurationError) as refused:
        check_java()
    assert refused.value.setting == "JAVA_HOME"
    assert (
        refused.value.next_step
        == f"Unset JAVA_HOME: {good} on the PATH is Java 21, which is recent enough."
    )


def test_a_java_home_goes_before_the_path(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java_of(path, "1.8.0_412")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    java = java_of(tmp_path / "home" / "bin", "17.0.9")
    assert check_java() == java


@pytest.mark.parametrize("version", [None, "11.0.2", "nonsense"])
def test_without_a_java_that_will_do_one_is_to_be_installed(
    version: str | None, path: Path
) -> None:
    if version is not None:
        java_of(path, version)
    with pytest.raises(ConfigurationError, match="Install a Java 17"):
        check_java()
