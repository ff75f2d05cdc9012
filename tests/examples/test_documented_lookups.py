"""What the page for newcomers shows of the demo's lake is what the main job leaves there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from dagster_adjunct.orchestration.cli.main import root
from tests.doc_blocks import ROOT, Block, blocks_of, printed
from tests.examples.conftest import EVERY, FinishedJob

pytestmark = [pytest.mark.slow, pytest.mark.rounds, pytest.mark.timeout(1200)]


def test_the_documented_look_ups_of_the_demo_print_what_the_page_shows(
    main_job: FinishedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    displayed: Block | None = None
    output = ""
    for block in blocks_of(ROOT / "docs" / "getting-started.md"):
        if not block.run and block.language == "console" and "adjunct" in block.text:
            displayed, output = block, _printed(block, main_job.lake)
        elif not block.run and block.language == "text" and output:
            # Without all flights, figures are others.
            wanted = block.text if EVERY == 1 else re.sub(r"\d[\d,]*", "…", block.text)
            assert printed(wanted, output), (
                f"{block.place} shows\n{block.text}\nand this was printed\n{output}"
            )
    assert displayed is not None


def _printed(block: Block, lake: str) -> str:
    """Return what the commands of a block print on this lake; `adjunct ui` is none of them."""
    outputs = []
    for line in block.text.splitlines():
        program, *arguments = shlex.split(line)
        if program != "adjunct" or arguments[0] in ("ui", "demo"):
            continue
        result = CliRunner().invoke(
            root, [*arguments, "--lake", lake], env={"COLUMNS": "100"}, catch_exceptions=False
        )
        assert result.exit_code == 0, f"{block.place}: {line}\n{result.output}"
        outputs.append(result.output)
    return "\n".join(outputs)
