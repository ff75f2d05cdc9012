"""Every error is raised with what it is about: at least one of its fields is stated wherever one is made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from dagster_adjunct import errors
from dagster_adjunct.errors import AdjunctError

ROOT = Path(__file__).parent.parent
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AdjunctError)]
WITH_FIELDS = {kind.__name__ for kind in KINDS if len(fields(kind)) > 2}
# Where nothing is known that a field could hold, and why.
FILLED = "whoever calls it fills the fields in"
NOTHING = "what is given has no name here"
WITHOUT = {
    ("resources/files/file_misfits.py", "damaged"): FILLED,
    ("resources/tables/missing_records.py", "outcomes_of_missing"): FILLED,
    ("resources/tables/own_cancellation.py", "ended_itself"): FILLED,
    ("resources/tables/table_task.py", "_error"): FILLED,
    ("resources/tables/partial_update.py", "__post_init__"): FILLED,
    ("resources/bucketing/order_of_keys.py", "check_order"): "a mistake of ours: it asks for a report",
    ("resources/bucketing/writer.py", "_check"): "a mistake of ours: it asks for a report",
    ("resources/bucketing/hashing.py", "spark_hash"): NOTHING,
    ("resources/bucketing/hashing.py", "_hash_array"): NOTHING,
    ("resources/bucketing/hashing.py", "_hasher"): NOTHING,
    ("resources/schemas/schema.py", "from_ddl"): NOTHING,
    ("resources/key_value/iterator_state.py", "from_bytes"): NOTHING,
    ("resources/key_value/key_version.py", "from_bytes"): NOTHING,
    ("resources/spark/spark_errors.py", "_too_deep"): "Spark's text names no operator",
    ("dagster_adjunct/_arguments.py", "_no_member"): "of a value, not of a parameter",
    ("dagster_adjunct/_arguments.py", "__new__"): "of a class, not of a parameter",
    ("dagster_adjunct/_arguments.py", "_misplaced"): "of a call, not of a parameter",
}


def modules() -> Iterator[Path]:
    for floor in ("resources", "assets", "orchestration"):
        yield from sorted((ROOT / floor).rglob("*.py"))
    yield from sorted((ROOT / "dagster_adjunct").glob("*.py"))


def made_without_facts(module: Path) -> Iterator[tuple[str, int]]:
    """Yield the function and line of each call of an error class that states no field."""
    name = ""
    unread: list[tuple[ast.AST, str]] = [(ast.parse(module.read_text()), "")]
    while unread:
        node, name = unread.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
        if isinstance(node, ast.Call) and not node.keywords:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in WITH_FIELDS:
                yield name, node.lineno
        unread += [(child, name) for child in ast.iter_child_nodes(node)]


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
