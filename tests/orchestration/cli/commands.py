"""Commands on a test's lake: what they print, on a wide terminal, and how they refuse."""

from __future__ import annotations

import json
from typing import Any, Protocol

from click.testing import CliRunner, Result

from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.objects.lake import Lake


class World(Protocol):
    """What a test has on a lake."""

    lake: Lake


def invoke(world: World, *arguments: str, **how: Any) -> Result:
    return CliRunner().invoke(
        root, [*arguments, "--lake", world.lake.url], env={"COLUMNS": "250"}, **how
    )


def printed(world: World, *arguments: str, code: int = 0) -> str:
    """Return what the command prints, which ends with this exit code."""
    result = invoke(world, *arguments)
    assert result.exit_code == code, result.exception
    return result.output


def document(world: World, *arguments: str, code: int = 0) -> Any:
    """Return what the command prints as JSON."""
    return json.loads(printed(world, *arguments, "--json", code=code))


def refused(world: World, *arguments: str) -> str:
    """Return the error that the command ends with."""
    error = invoke(world, *arguments).exception
    assert isinstance(error, AdjunctError), error
    return str(error)
