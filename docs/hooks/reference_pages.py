"""Adds one page for each public module to the site: its names with their signatures and docstrings.

The modules and names are those of tests/public_surface.txt, which a test compares with the code.
mkdocstrings reads the sources without importing them, so the site is built without Spark or
Dagster.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "reference"


def on_config(config: MkDocsConfig) -> None:
    """Put the pages into the navigation, in place of the entry "reference/"."""
    for section in config.nav or []:
        for pages in section.values():
            pages[:] = [
                page
                for entry in pages
                for page in ([*_paths()] if entry == f"{FOLDER}/" else [entry])
            ]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Write the pages: a directive for each module, which mkdocstrings replaces by its docstring
    and its names.
    """
    for path, (module, names) in _paths().items():
        text = f"# {module}\n\n"
        options = "".join(f"        - {name}\n" for name in names)
        # The fields of errors have no docstrings, and are not in a signature that can be read from
        # the source.
        every = "true" if module.endswith(".errors") else "false"
        text += (
            f"::: {module}\n    options:\n      show_if_no_docstring: {every}\n     "
            f" members:\n{options}\n"
        )
        files.append(File.generated(config, path, content=text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link the modules in the table of `api.md` to their pages."""
    if page.file.src_uri != "api.md":
        return markdown
    links = {module: f"| [`{module}`]({path}) |" for path, (module, _) in _paths().items()}
    return re.sub(
        r"^\| `([\w.]+)` \|", lambda row: links.get(row[1], row[0]), markdown, flags=re.MULTILINE
    )


def _paths() -> dict[str, tuple[str, list[str]]]:
    """Return the page of each public module, with the module and its names."""
    modules: dict[str, list[str]] = {}
    for line in (ROOT / "tests" / "public_surface.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            modules[next(reversed(modules))].append(line.strip())
        else:
            modules[line] = []
    return {
        f"{FOLDER}/{module.rpartition('.')[2]}.md": (module, names)
        for module, names in modules.items()
    }
