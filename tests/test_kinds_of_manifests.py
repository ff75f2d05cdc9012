"""Which of the two kinds a manifest is of is asked in few places: what differs is an attribute of both kinds."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = frozenset({"CommonManifest", "BoundedManifest", "UnboundedManifest"})
OF_MANIFESTS = frozenset({"manifest", "declaration", "declared", "stored"})
ASKED = {
    "assets/reading/chosen_version.py": 2,  # a version is looked up in the list, or in commits
    "assets/rebucketing/rebucketed_table.py": 1,  # refuses versions
    "assets/rebucketing/rebucketed_versions.py": 1,  # refuses tables
    "assets/retention/discard.py": 2,  # commits that are versions stay
    "assets/retention/discard_plan.py": 1,  # versions are judged, or generations
    "assets/retention/erasing/erasure.py": 1,  # versions are rewritten, or generations
    "assets/reading/no_version.py": 1,
    "assets/unbounded/compact_table.py": 1,  # refuses versions
    "assets/versions/common_manifest.py": 1,  # what is declared is what is stored
    "assets/versions/manifest.py": 3,  # the kind that somebody handles alone, or an error
    "orchestration/cli/upkeep_commands.py": 1,
    "orchestration/code_location/shared/asset_metadata.py": 1,
    "orchestration/upkeep/repartitioning.py": 1,  # versions are rewritten, or a table
}
"""How often each file asks. A number may only fall, and no file may join: make what is asked an answer of each kind."""


def asks(tree: ast.AST) -> list[ast.AST]:
    """Return where a manifest's kind is asked for: by its class, by the word that is declared, by what it comes to."""
    return [node for node in ast.walk(tree) if _by_class(node) or _by_word(node) or _by_fact(node)]


def _by_class(node: ast.AST) -> bool:
    if isinstance(node, ast.MatchClass):
        return _names(node.cls)
    if isinstance(node, ast.Compare):
        return any(_names(side) for side in (node.left, *node.comparators))
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in ("isinstance", "issubclass") and _names(node)


def _by_word(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and any(
        isinstance(side, ast.Attribute) and side.attr == "kind" and _last_name(side.value) in OF_MANIFESTS
        for side in (node.left, *node.comparators)
    )


def _by_fact(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "versions_are_commits"


def _names(tree: ast.AST) -> bool:
    return any(_last_name(node) in KINDS for node in ast.walk(tree))


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def test_the_kind_of_a_manifest_is_asked_for_in_these_files_and_no_oftener() -> None:
    files = [file for floor in ("assets", "orchestration") for file in (ROOT / floor).rglob("*.py")]
    counts = {str(file.relative_to(ROOT)): len(asks(ast.parse(file.read_text(encoding="utf-8")))) for file in files}
    assert {file: count for file, count in counts.items() if count} == ASKED, (
        "give BoundedManifest and UnboundedManifest an attribute of the same name, each with its answer, and ask that; "
        "where a file asks less often now, lower its number"
    )


def test_every_way_of_asking_is_counted() -> None:
    code = "\n".join((
        "isinstance(m, BoundedManifest)",
        "isinstance(m, (int, manifests.UnboundedManifest))",
        "not isinstance(m, BoundedManifest | None)",
        "type(m) is UnboundedManifest",
        "match m:\n    case BoundedManifest(name=n): ...",
        "manifest.declaration.kind == 'bounded'",
        "'bounded' != m.manifest.kind",
        "x if m.versions_are_commits else y",
    ))  # fmt: skip
    assert len(asks(ast.parse(code))) == 8
    others = "isinstance(m, Pin)\nwindows.kind == 'session'\nBoundedManifest(kind='bounded')\nas_bounded(m).version"
    assert asks(ast.parse(others)) == []
