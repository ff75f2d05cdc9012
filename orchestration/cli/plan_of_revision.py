"""The plan of an application as it was in a revision of git: loaded from a copy of it, in a process of its own.

Nothing of the repository changes: no branch, no index, no worktree that git would know of, and no hook is run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, PlanningError

LONGEST = 300  # seconds
_CHILD = "import sys; from dagster_adjunct.orchestration.cli.plan_of_revision import answer; answer(*sys.argv[1:])"
_QUIET = ("-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false")


def plan_of_revision(reference: str, revision: str, lake: str) -> dict[str, Any]:
    """Return the document of the plan that the application had, over the streams as they are now.

    Raises ConfigurationError where there is no such revision, or no such application in it; PlanningError where it was
    refused.
    """
    top = Path(_git(Path.cwd(), revision, "rev-parse", "--show-toplevel"))
    below = _git(Path.cwd(), revision, "rev-parse", "--show-prefix")
    commit = _git(top, revision, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="adjunct-plan-") as folder:
        tree, reply = Path(folder).resolve() / "tree", Path(folder).resolve() / "reply.json"
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        _git(top, revision, *_QUIET, "read-tree", commit, **index)
        _git(top, revision, *_QUIET, "checkout-index", "--all", f"--prefix={tree}{os.sep}", **index)
        here = tree / below
        if not here.is_dir():
            raise _refused(revision, f"it has no folder {below}", "Run from a folder that is in both.")
        command = [sys.executable, "-P", "-c", _CHILD, reference, lake, str(reply), str(tree)]
        try:
            done = subprocess.run(
                command, cwd=here, env=_environment(top, tree), stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=LONGEST, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise _refused(revision, f"its plan is not there after {LONGEST} s", "Plan it by hand.") from error
        if not reply.exists():
            ending = " ".join(done.stderr.strip().splitlines()[-3:])
            raise _refused(revision, f"its process ended with {done.returncode}: {ending}", "Plan it by hand.")
        told = json.loads(reply.read_text(encoding="utf-8"))
    if "plan" in told:
        document: dict[str, Any] = told["plan"]
        return document
    kind = PlanningError if told["planning"] else ConfigurationError
    raise kind(f"{reference} of revision {revision} ({commit[:12]}): {told['problem']}", told["next_step"])


def answer(reference: str, lake: str, reply: str, tree: str) -> None:
    """Write the plan of an application, or why there is none, to the file `reply`; this is the process of its own."""
    from dagster_adjunct.orchestration.application.load_application import load_application
    from dagster_adjunct.orchestration.planner.lake_catalog import plan_application, systems_for
    from dagster_adjunct.resources.lakes import open_lake

    told: dict[str, Any]
    try:
        app = load_application(reference)
        module = sys.modules[reference.partition(":")[0]]
        places = [module.__file__] if getattr(module, "__file__", None) else list(getattr(module, "__path__", ()))
        if not any(place and Path(place).resolve().is_relative_to(tree) for place in places):
            raise ConfigurationError(
                f"module {module.__name__!r} comes from {places[0] if places else 'nowhere'}, not from the revision.",
                "Run from the folder that holds the module, as a file of the repository.",
                module=module.__name__,
            )
        told = {"plan": plan_application(app, systems_for(app, open_lake(lake))).to_json()}
    except AdjunctError as error:
        planning = isinstance(error, PlanningError)
        told = {"problem": error.problem, "next_step": error.next_step, "planning": planning}
    Path(reply).write_text(json.dumps(told), encoding="utf-8")


def _environment(top: Path, tree: Path) -> dict[str, str]:
    """This process's environment, where folders of the repository on Python's path are those of the revision."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    paths = [Path(path) for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path]
    moved = [
        tree / path.relative_to(top) if path.is_absolute() and path.is_relative_to(top) else path for path in paths
    ]
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, moved)), "PYTHONDONTWRITEBYTECODE": "1"}


def _git(folder: Path, revision: str, *arguments: str, **environment: str) -> str:
    """Return what git says. Raises ConfigurationError, about the revision, where it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=LONGEST, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _refused(revision, f"git can't be run: {error}", "Install git, or name a file.") from error
    if done.returncode:
        reason = f": {done.stderr.strip()}" if done.stderr.strip() else ""
        raise _refused(
            revision,
            f"there is no such file, and git knows no such revision{reason}",
            "Name a file that adjunct plan --format json has written, or a branch, a tag or a commit.",
        )
    return done.stdout.strip()


def _refused(revision: str, what: str, next_step: str) -> ConfigurationError:
    return ConfigurationError(f"--against {revision}: {what}.", next_step, setting="--against")
