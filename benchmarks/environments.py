"""Environments of the benchmarks' peers, which need other versions than this project, and
processes in them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".cache"

Ask = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python of its own in `.cache/NAME`, and the script of this folder that answers commands
    there.

    The script is started as SCRIPT FOLDER IVY. It says one line of JSON when it is up, and one for
    each line of its input; it ends with its input.
    """

    name: str
    packages: tuple[str, ...]
    script: str

    def python(self) -> Path | None:
        """Return its Python, made where it is not there yet; None where the registry does not
        have what it needs.
        """
        home = CACHE / self.name
        python = home / "venv" / "bin" / "python"
        if (home / "ready").exists():
            return python
        print(f"  making {home.relative_to(HERE.parent)} ({', '.join(self.packages)})")
        subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True)
        with TemporaryDirectory() as folder:
            for made in (
                [str(python), "-m", "pip", "install", "--quiet", *self.packages],
                # it ends with its input, once it has fetched the jars
                self._command(python, folder),
            ):
                done = subprocess.run(made, input="", capture_output=True, text=True, check=False)
                if done.returncode:
                    print(
                        f"  left out, the peers can't be had here: {done.stderr.strip()[-500:]}\n"
                    )
                    return None
        (home / "ready").touch()
        return python

    @contextmanager
    def session(self, python: Path, folder: str | Path) -> Iterator[Ask]:
        """Start the script's process; yield what sends it a command and returns its answer."""
        home = Path(folder) / self.name
        home.mkdir()
        log = home / "log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                self._command(python, home),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=home,
            ) as process,
        ):  # fmt: skip
            assert process.stdin is not None

            def answer() -> Any:
                for line in process.stdout or ():
                    try:
                        return json.loads(line)
                    except json.JSONDecodeError:  # Ivy tells of its downloads there
                        continue
                raise SystemExit(f"the peers' process ended:\n{log.read_text()[-3000:]}")

            def ask(command: str) -> Any:
                assert process.stdin is not None
                process.stdin.write(command + "\n")
                process.stdin.flush()
                return answer()

            answer()  # its session is up
            try:
                yield ask
            finally:
                process.stdin.close()

    def _command(self, python: Path, folder: str | Path) -> list[str]:
        return [str(python), str(HERE / self.script), str(folder), str(CACHE / self.name / "ivy")]
