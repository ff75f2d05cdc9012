"""Whatever planning rejects has an example in `refused_plans.py`, and a row in
`docs/refusals.md`.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagster_adjunct.resources.errors import PlanningError
from tests.doc_blocks import ROOT

EXAMPLES = Path(__file__).with_name("refused_plans.py")
PLACES = [
    *(
        file
        for folder in ("application", "operators", "planner")
        for file in (ROOT / "orchestration" / folder).rglob("*.py")
    ),
    ROOT / "resources" / "sql" / "checking.py",
    ROOT / "assets" / "validation" / "validators.py",
]
ELSEWHERE = {
    "plan.py, ": "a name that is asked of a plan",
    "graph.py, add": "an operator of one's own: docs/contributing/operators.md",
    ".py, compile:": "what only Spark knows, in a run",
    "lookup_join.py, check_stored_columns": "what only the store knows, in a run",
    "output_tables.py, _planning_error": "what only the store knows, which the command asks",
    "records.py, _check_columns_unchanged": "what only Spark knows, in a run",
    "checking.py, check_select": "SQL of a dataset or a validator, whose pages have it",
    "planner.py, check_syntax": "what only Spark's parser knows, which the command asks",
    " and gives records new positions": "what takes operators with several inputs",
}
"""What is refused, but not by planning what the public methods describe: a part of where it is
made, and how.
"""


OF_A_CONSTRUCTOR = ("inside",)
"""Tables of examples whose constructor raises: its caller is in the traceback, and the commands,
which import the module, add its line.
"""


def raised_places() -> Iterator[tuple[str, int, int]]:
    """Where a PlanningError is made: file and function, and the lines of the call."""
    for path in sorted(PLACES):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for node in ast.walk(tree):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id in (
                "PlanningError",
                "PartitionCountMismatchError",
            ):
                around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
                reported = f"{path.name}, {around[-1].name}: {ast.unparse(node)}"
                if not any(part in reported for part in ELSEWHERE):
                    yield str(path), node.lineno, node.end_lineno or 0


@pytest.mark.lengthy
def test_every_refusal_has_an_example_and_a_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: set[tuple[str, int]] = set()
    checked = PlanningError.__post_init__

    def noted(self: PlanningError) -> None:
        frame = sys._getframe(2)
        made.add((str(Path(frame.f_code.co_filename).resolve()), frame.f_lineno))
        checked(self)

    monkeypatch.setattr(PlanningError, "__post_init__", noted)
    monkeypatch.chdir(tmp_path)
    examples = runpy.run_path(str(EXAMPLES))
    problems = examples["problems"]
    assert [text for text in examples["without_line"] if text not in OF_A_CONSTRUCTOR] == []
    lacking = [
        f"{Path(file).relative_to(ROOT)}, line {first}"
        for file, first, last in raised_places()
        if not any(path == file and first <= line <= last for path, line in made)
    ]
    assert not lacking, "\n".join(lacking)
    rows = re.findall(
        r"^\| `([^`]+)` \|", (ROOT / "docs" / "refusals.md").read_text("utf-8"), re.MULTILINE
    )
    patterns = [re.compile(".*?".join(map(re.escape, row.split("…")))) for row in rows]
    assert [
        problem for problem in problems if not any(row.search(problem) for row in patterns)
    ] == []
    assert [row.pattern for row in patterns if not any(map(row.search, problems))] == []
