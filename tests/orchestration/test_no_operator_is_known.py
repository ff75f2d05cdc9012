"""Nobody but operators themselves knows what kinds of them there are: all others ask `Spec`, by
what it declares.

An operator of somebody's own is asked nothing by the name of a field of another one, or by its
kind: it would be passed over in silence, and values that it declares sensitive would be told.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "orchestration"
OPERATORS = ROOT / "operators"
FILES = [file for file in sorted(ROOT.rglob("*.py")) if not file.is_relative_to(OPERATORS)]
OTHER_KINDS = {
    "made.kind": "whether a declared dataset is bounded",
    "call.kind": "whom an operator asks outside of the batch",
    "entry.kind": "what waits among the requests for startpoints",
    "unread.kind": "what waits there and can't be read",
    "failure.kind": "the class of what Spark has failed over",
    "other.kind": "likewise",
    "target.kind": "the kind of a lineage node",
    "node.kind": "likewise",
    "parameter.kind": "how a function takes an argument",
    "first.kind": "likewise",
}
"""What else has a kind, and is compared by it."""


def is_spec(node: ast.expr) -> bool:
    """Whether an expression is what an operator says of itself, by its name: `spec`,
    `operator.spec`.
    """
    name = (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )
    return name == "spec"


def kinds_known(tree: ast.AST) -> Iterator[str]:
    """Yield where code knows an operator by a field of its, its class or its kind."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.args
            and is_spec(node.args[0])
        ):
            if node.func.id in ("getattr", "hasattr", "isinstance", "vars"):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Compare):
            compared = [ast.unparse(side) for side in (node.left, *node.comparators)]
            kinds = [side for side in compared if side.endswith(".kind")]
            if any(side not in OTHER_KINDS for side in kinds) or any(
                side.endswith("spec)") for side in compared
            ):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Match) and ast.unparse(node.subject).endswith((".kind", "spec")):
            yield f"{node.lineno}: match {ast.unparse(node.subject)}"


@pytest.mark.lengthy
def test_no_operator_is_known_by_a_field_its_class_or_its_kind() -> None:
    assert FILES
    reported = [
        f"{file.relative_to(ROOT)}:{known}"
        for file in FILES
        for known in kinds_known(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert reported == [], "use a member of Spec (operators/operator.py) with a safe default"


@pytest.mark.parametrize(
    "code",
    [
        "getattr(operator.spec, 'as_of', None)",
        "spec = operator.spec\ngetattr(spec, 'dataset')",
        "hasattr(operator.spec, 'update')",
        "isinstance(above.spec, Input)",
        "type(spec) is Input",
        "operator.kind == LateRecords.kind",
        "operator.spec.kind == 'window'",
        "planned.kind in ('join', 'window')",
        "match operator.spec:\n    case Input(): ...",
        "match operator.kind:\n    case 'join': ...",
    ],
)
def test_who_knows_one_is_seen(code: str) -> None:
    assert len(list(kinds_known(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code", ["getattr(table, 'idempotent')", "operator.spec.reads is None", "call.kind == 'sink'"]
)
def test_who_asks_it_is_not(code: str) -> None:
    assert list(kinds_known(ast.parse(code))) == []
