"""What only looks makes no lake, nor what finds nothing to run: every such command, in a folder
where there is none.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.cli.output import run_command

APP = """
from dagster_adjunct import Application, bounded_dataset

app = Application("one")
planes = app.table(bounded_dataset("planes", input="lake.planes", key="k", partitions=2))
app.input_stream("lake.in").join(planes, on="k").send_to(app.output_stream("lake.out", partitions=2, key="k"))
"""
WHY = ["--reason", "x", "--by", "y"]
LOOKING = [
    ["plan", "missing_lakes:app"],
    ["run", "missing_lakes:app"],
    ["dataset", "advance", "planes", "missing_lakes:app"],
    ["stream", "list"],
    ["stream", "show", "in"],
    ["stream", "export", "in", "--to", "out.parquet"],
    ["stream", "maintain"],
    ["dataset", "list"],
    ["dataset", "show", "planes"],
    ["dataset", "get", "planes", "1"],
    ["dataset", "items", "planes"],
    ["dataset", "versions", "planes"],
    ["dataset", "history", "planes"],
    ["dataset", "pin", "planes", "v1", *WHY],
    ["dataset", "erase", "planes", "1", "--yes", *WHY],
    ["dataset", "verify", "planes"],
    ["dataset", "expire"],
    ["dataset", "compact", "planes"],
    ["startpoint", "set", "missing_lakes:app", "lake.in", "--oldest", *WHY],
    ["startpoint", "list", "missing_lakes:app"],
    ["startpoint", "clear", "missing_lakes:app", "--all", *WHY],
    ["checkpoint", "show", "one"],
    ["checkpoint", "history", "one"],
    ["checkpoint", "abandon", "one", "--yes", *WHY],
    ["table", "get", "aircraft", "1"],
    ["table", "allow-recreate", "aircraft", *WHY],
    ["kv", "scope", "list"],
    ["kv", "scope", "delete", "plant"],
    ["kv", "list", "plant"],
    ["kv", "show", "plant/machines"],
    ["kv", "update", "plant/machines"],
    ["kv", "seal", "plant/machines"],
    ["kv", "delete", "plant/machines", "--yes"],
    ["kv", "get", "plant/machines", "m1"],
    ["kv", "put", "plant/machines", "m1", "1"],
    ["kv", "remove", "plant/machines", "m1"],
    ["kv", "iterate", "plant/machines"],
]


@pytest.mark.parametrize("command", LOOKING, ids=lambda command: " ".join(command[:2]))
def test_a_command_that_finds_no_lake_says_where_it_looked_and_makes_none(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "missing_lakes.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ADJUNCT_LAKE", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert run_command(lambda: root.main(command, prog_name="adjunct", standalone_mode=False)) == 1
    error = capfd.readouterr().err
    assert all(len(line) <= 80 for line in error.splitlines()), "the error's name counts, too"
    error = error.replace("\n", "")
    assert f"{tmp_path}/.adjunct/lake".replace("\n", "") in error
    assert [path.name for path in tmp_path.iterdir()] == ["missing_lakes.py"]
