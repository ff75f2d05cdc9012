"""Every error is raised with what it is about: at least one of its fields is stated wherever one
is made.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from dagster_adjunct import errors
from dagster_adjunct.errors import AdjunctError

ROOT = Path(__file__).parent.parent
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, AdjunctError)
]
BASES = (AdjunctError, errors.PermanentError, errors.TransientError)
WITH_FIELDS = {kind.__name__ for kind in KINDS if kind not in BASES}
# Where nothing is known that a field could hold, and why.
FILLED = "whoever calls it fills the fields in"
NOTHING = "what is given has no name here"
WITHOUT = {
    ("resources/files/opened.py", "damaged_file_error"): FILLED,
    ("resources/tables/functions.py", "outcomes_from_missing"): FILLED,
    ("resources/tables/functions.py", "self_cancelled_error"): FILLED,
    ("resources/tables/spark.py", "_error_from_problem"): FILLED,
    ("resources/tables/operation.py", "__post_init__"): FILLED,
    ("resources/bucketing/writer.py", "check_key_order"): "a mistake of ours: it asks for a report",
    ("resources/bucketing/hashing.py", "spark_hash"): NOTHING,
    ("resources/bucketing/hashing.py", "_unhashable_error"): NOTHING,
    ("resources/schemas/schema.py", "from_ddl"): NOTHING,
    ("resources/key_value/iterators.py", "from_bytes"): NOTHING,
    ("resources/key_value/segment.py", "from_bytes"): NOTHING,
    ("resources/spark/tasks.py", "_corresponding_error"): "Spark's text names no operator",
}


def modules() -> Iterator[Path]:
    for floor in ("resources", "assets", "orchestration"):
        yield from sorted((ROOT / floor).rglob("*.py"))
    yield from sorted((ROOT / "dagster_adjunct").glob("*.py"))


def made_without_facts(module: Path) -> Iterator[tuple[str, int]]:
    """Yield the function and line of each call of an error class that states no field."""
    text = module.read_text()
    if not any(name in text for name in WITH_FIELDS):
        return
    unread: list[tuple[ast.AST, str]] = [(ast.parse(text), "")]
    while unread:
        node, name = unread.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
        if isinstance(node, ast.Call) and not node.keywords:
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if called in WITH_FIELDS:
                yield name, node.lineno
        unread += [(child, name) for child in ast.iter_child_nodes(node)]


@pytest.mark.lengthy
def test_errors_are_made_with_what_they_are_about() -> None:
    found = {
        (str(module.relative_to(ROOT)), function): line
        for module in modules()
        for function, line in made_without_facts(module)
    }
    wrong = [
        f"{module}:{line}, in {function}"
        for (module, function), line in found.items()
        if (module, function) not in WITHOUT
    ]
    assert not wrong, "state what the error is about (its fields are in resources/errors.py)"
    assert set(WITHOUT) == set(found), "an exception that is none any more goes"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_is_given_by_name_and_may_be_unknown(kind: type[AdjunctError]) -> None:
    assert [field.name for field in fields(kind)[:2]] == ["problem", "next_step"]
    assert all(field.kw_only and field.default in (None, ()) for field in fields(kind)[2:])


WORDS = {"problem", "next_step"}
READING = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "rpartition",
    "split",
    "find",
    "index",
    "match",
    "search",
    "fullmatch",
    "sub",
}


def is_of_words(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in WORDS


def decided_by_words(module: Path) -> Iterator[int]:
    """Yield the lines in which an error's words are searched, compared or taken apart."""
    text = module.read_text()
    for node in ast.walk(ast.parse(text if any(f".{word}" in text for word in WORDS) else "")):
        if isinstance(node, ast.Compare):
            looked_in = [
                side
                for op, side in zip(node.ops, node.comparators, strict=True)
                if isinstance(op, ast.In | ast.NotIn)
            ]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in READING
        ):
            looked_in = [node.func.value, *node.args]
        else:
            continue
        if any(is_of_words(inner) for side in looked_in for inner in ast.walk(side)):
            yield node.lineno


@pytest.mark.lengthy
def test_nothing_is_decided_by_the_words_of_an_error() -> None:
    found = [
        f"{module.relative_to(ROOT)}:{line}"
        for module in modules()
        for line in decided_by_words(module)
    ]
    assert not found, "give the error a field, and read that"


def test_what_takes_words_apart_is_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        'a = "x" in error.problem\nb = error.problem.removeprefix("d: ")\nc ='
        ' PLACE.match(error.problem[2:])\nd = error.problem.rstrip(".")\ne = error.operator in'
        " names\n"
    )
    assert list(decided_by_words(module)) == [1, 2, 3]
