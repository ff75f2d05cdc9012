"""No cycle between folders of the floors, where a folder is the files that lie in it, without those of its subfolders.

The import linter takes a folder together with its subfolders. So it does not see a root that holds the top of its
folder beside the bottom of it: its subfolders use the one and are used by the other, and none can be read first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dagster_adjunct"
FLOORS = ("orchestration", "assets", "resources")

Code = Mapping[str, str]
"""Files of Python by their path from the root of the repository."""


def code_of_the_floors() -> dict[str, str]:
    files = (file for floor in FLOORS for file in (ROOT / floor).rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


def files_imported_by(text: str, files: Code) -> Iterator[str]:
    """Yield the files that a file imports from: anywhere in it, inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports here say the whole name"
            names = [(f"{node.module}.{alias.name}", node.module or "") for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [(alias.name, alias.name) for alias in node.names]
        for whole, module in names:
            file = file_of(whole, files) or file_of(module, files)
            if file is not None:
                yield file


def file_of(module: str, files: Code) -> str | None:
    """Return the file of a module, which is the `__init__.py` of a folder; None for what is no module of the floors."""
    path = module.removeprefix(f"{PACKAGE}.").replace(".", "/")
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in files), None)


def folder_of(file: str) -> str:
    return file.rpartition("/")[0]


def arrows_between_folders(files: Code) -> dict[tuple[str, str], list[str]]:
    """Return by (folder that imports, folder that is imported from) the imports that make the arrow, in words."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for file, text in sorted(files.items()):
        for imported in sorted(set(files_imported_by(text, files))):
            if folder_of(file) != folder_of(imported):
                words = f"{file} imports {imported}"
                arrows.setdefault((folder_of(file), folder_of(imported)), []).append(words)
    return arrows


def cycle_of_folders(files: Code) -> list[str]:
    """Return the arrows of one cycle between folders, each with the imports that make it; of none, nothing."""
    arrows = arrows_between_folders(files)
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for above, below in arrows:
        sorter.add(above, below)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = error.args[1][::-1]  # it is told from what is imported to who imports it
        return [f"{above} -> {below}: {'; '.join(arrows[above, below])}" for above, below in pairwise(cycle)]
    return []


def test_there_is_no_cycle_between_folders() -> None:
    cycle = cycle_of_folders(code_of_the_floors())
    assert not cycle, "\n".join(cycle)


def test_the_arrows_of_a_cycle_are_told() -> None:
    files = {
        "assets/__init__.py": "",
        "assets/top.py": "from dagster_adjunct.assets.reading.keys import x\n",
        "assets/bottom.py": "import os\nfrom dagster_adjunct.errors import y\n",
        "assets/reading/__init__.py": "",
        "assets/reading/keys.py": "def later():\n    from dagster_adjunct.assets import bottom\n",
    }
    there = "assets -> assets/reading: assets/top.py imports assets/reading/keys.py"
    back = "assets/reading -> assets: assets/reading/keys.py imports assets/bottom.py"
    assert sorted(set(cycle_of_folders(files))) == [there, back]

    below = {file.replace("assets/bottom", "assets/spans/bottom"): text for file, text in files.items()}
    below["assets/reading/keys.py"] = "def later():\n    from dagster_adjunct.assets.spans import bottom\n"
    assert cycle_of_folders(below) == []


def test_an_import_for_type_checkers_of_a_whole_folder_counts() -> None:
    files = {
        "assets/bounded/__init__.py": "from dagster_adjunct.assets.bounded.inside.parts import x\n",
        "assets/bounded/inside/__init__.py": "",
        "assets/bounded/inside/parts.py": "if TYPE_CHECKING:\n    import dagster_adjunct.assets.bounded\n",
    }
    assert len(cycle_of_folders(files)) == 2
