"""Runs the code of a documentation page as its reader would: block after block, in one folder.

What a fenced block means:
- its first line is `# NAME.EXT`: it is saved under that name, whatever its language
- any other `python` block: typed into one Python session, which lives as long as the page
- `console` or `sh`: commands for a shell, with the virtual environment's programs first on the path
- `text`: what the block before it has printed; `…` stands for anything
- with `<!-- not run: reason -->` on the line before it: only read
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.kept_processes import program, programs

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 300
_FENCE = re.compile(r"^(?P<indent>\s*)```(?P<language>\S*)\s*$")
_NOT_RUN = re.compile(r"^<!-- not run\b.*: .+ -->$")
_FILE = re.compile(r"^# (?P<name>[\w.-]+\.\w+)$")
_SESSION = """
import contextlib, io, json, os, sys, traceback
sys.path.insert(0, "")
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the JVM prints must not mix with the replies
names = {"__name__": "__main__"}
for line in sys.stdin:
    name, code = json.loads(line)
    said, error = io.StringIO(), None
    with contextlib.redirect_stdout(said):
        try:
            exec(compile(code, name, "exec"), names)
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([said.getvalue(), error]), file=replies, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `line` is where its text begins."""

    page: Path
    line: int
    language: str
    text: str
    run: bool

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}, line {self.line}"

    @property
    def file(self) -> str | None:
        """The name that the block is to be saved under, if it says one."""
        match = _FILE.match(self.text.split("\n", 1)[0])
        return match["name"] if match else None


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    opened: tuple[int, str] | None = None
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if opened is None:
            assert not fence["indent"], (
                f"{page.name}, line {number + 1}: an indented block is not run"
            )
            opened = (number, fence["language"])
            continue
        start, language = opened
        opened = None
        text = "\n".join(lines[start + 1 : number]) + "\n"
        skipped = start > 0 and _NOT_RUN.match(lines[start - 1].strip()) is not None
        blocks.append(Block(page, start + 2, language, text, not skipped))
    assert opened is None, f"{page.name}: a block is not closed"
    return blocks


class PageReader:
    """Follows one page in a folder. Use it in a `with` block, which ends what it started."""

    def __init__(self, folder: Path, log: Path, env: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._log = log.open("w", encoding="utf-8")
        self._session: subprocess.Popen[str] | None = None
        self._message: str | None = None
        ours = ("ADJUNCT_", "AWS_", "DAGSTER")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self._environment = {
            **kept,
            "PATH": os.pathsep.join([*map(str, programs()), kept.get("PATH", "")]),
            "ADJUNCT_SPARK_MASTER": "local[2]",
            "COLUMNS": "100",
            # A module that was edited within a second, to the same size, would be taken for the one
            # that the command before has compiled.
            "PYTHONDONTWRITEBYTECODE": "1",
            **(env or {}),
        }

    def __enter__(self) -> PageReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._session is not None:
            _end(self._session)
        self._log.close()

    def follow(self, block: Block) -> None:
        """Do what a reader does with this block; fails with what went wrong, and where."""
        if not block.run:
            self._message = None
        elif block.file is not None:
            (self._folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            self._message = self._typed(block)
        elif block.language in ("console", "sh"):
            self._message = self._commanded(block)
        elif block.language == "text" and self._message is not None:
            assert printed(block.text, self._message), (
                f"{block.place}: the page shows\n{block.text}\nand this was printed\n{self._message}"
            )

    def _commanded(self, block: Block) -> str:
        process = subprocess.Popen(
            ["sh", "-e", "-c", block.text],
            cwd=self._folder,
            env=self._environment,
            start_new_session=True,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            output, complained = process.communicate(timeout=LONGEST)
        finally:
            _end(process)
        assert process.returncode == 0, (
            f"{block.place}: exit code {process.returncode}\n{output}\n{complained[-4000:]}"
        )
        return output

    def _typed(self, block: Block) -> str:
        if self._session is None:
            self._session = subprocess.Popen(
                [program("python"), "-c", _SESSION],
                cwd=self._folder,
                env=self._environment,
                start_new_session=True,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
        asked, answers = _pipes(self._session)
        asked.write(json.dumps([block.place, block.text]) + "\n")
        asked.flush()
        answer = answers.readline()
        assert answer, f"{block.place}: Python ended; see {self._log.name}"
        output, error = json.loads(answer)
        assert error is None, f"{block.place}:\n{error}"
        return str(output)


def printed(displayed: str, output: str) -> bool:
    """Whether what a page shows was printed; spaces count as one, and `…` stands for anything."""
    parts = [re.escape(_flat(part)).strip() for part in displayed.split("…")]
    return re.search(r"\s*.*?\s*".join(parts), _flat(output), re.DOTALL) is not None


def _flat(text: str) -> str:
    return " ".join(text.split())


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that we started, with all of its group."""
    if process.stdin is not None:
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
