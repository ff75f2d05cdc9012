"""The documentation holds: its code runs as written, its links lead somewhere, and it leaves no
setting out.
"""

from __future__ import annotations

import builtins
import inspect
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from markdown.extensions.toc import slugify, unique

from dagster_adjunct import errors
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.resources.objects.lake import LakeSettings
from docs.hooks.page_signatures import names_on, with_signatures
from tests.doc_blocks import ROOT, PageReader, blocks_of, printed
from tests.kept_processes import without_kept_processes
from tests.public_names import names_in, public_modules

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]
WITH_CODE = [
    page
    for page in PAGES
    if any(block.run and block.language != "text" for block in blocks_of(page))
]
LINKED = [
    *sorted(DOCS.rglob("*.md")),
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (?P<text>.+)$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_as_written(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    with PageReader(folder, tmp_path / "session.log") as reader:
        for block in blocks_of(page):
            reader.follow(block)


@pytest.mark.long  # by default they are forked from one that has imported what they need
@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_in_processes_that_are_started_for_it(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.environ.keys() - without_kept_processes(os.environ).keys():
        monkeypatch.delenv(name)
    test_the_code_of_a_page_runs_as_written(page, tmp_path)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_to_pages_and_headings(page: Path) -> None:
    broken = []
    for target in (link["target"] for link in _LINK.finditer(_without_blocks(page))):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if "://" not in target and not (file.exists() and (not anchor or anchor in _anchors(file))):
            broken.append(target)
    assert broken == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(
        r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(
        page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")
    )


def test_every_page_is_linked_from_the_index() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = [page.name for page in DOCS.glob("*.md") if page.name != "index.md"]
    assert [name for name in pages if f"({name})" not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_signatures_on_a_page_are_those_of_the_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_signatures(text) == text, "run: python -m docs.hooks.page_signatures"


def test_each_public_function_has_its_signature_on_one_page() -> None:
    on_pages = [name for page in PAGES for name in names_on(page.read_text(encoding="utf-8"))]
    assert [name for name, count in Counter(on_pages).items() if count > 1] == []
    public = {
        f"{module}.{name}"
        for module, own in public_modules().items()
        for name in names_in(own)
        if inspect.isfunction(getattr(own, name))
    }
    assert public - set(on_pages) == set()


def test_the_page_on_the_command_line_has_every_command() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert [
        path
        for path, _ in _commands(root, "adjunct")
        if f"`{path}`" not in text and f"`{path} " not in text
    ] == []


def test_the_help_of_each_command_explains_its_options() -> None:
    for path, command in _commands(root, "adjunct"):
        unexplained = [
            option.name
            for option in command.params
            if isinstance(option, click.Option) and not option.help
        ]
        assert unexplained == [], path


def test_the_page_on_lakes_has_every_setting() -> None:
    text = (DOCS / "lakes.md").read_text(encoding="utf-8")
    names = [
        field.validation_alias or f"ADJUNCT_S3_{name}".upper()
        for name, field in LakeSettings.model_fields.items()
    ]
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_the_page_on_troubleshooting_has_every_error() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(rows) == sorted(names_in(errors))


def test_pages_name_only_errors_that_exist() -> None:
    known = {*names_in(errors), *vars(builtins)}
    for page in PAGES:
        named = set(re.findall(r"`([A-Z]\w*Error)`", page.read_text("utf-8")))
        assert named <= known, page.name


@pytest.mark.lengthy
def test_a_module_that_a_page_edits_at_once_is_read_again(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = "python -c 'import edited; print(edited.number)'"
    seconds = "touch -d @1700000000 edited.py"
    edit = "sed -i s/1/2/ edited.py"
    page.write_text(
        f"```python\n# edited.py\nnumber = 1\n```\n\n```console\n{seconds}\n{command}\n"
        f"{edit}\n{seconds}\n{command}\n```\n\n```text\n1\n2\n```\n"
    )
    with PageReader(tmp_path, tmp_path / "session.log") as reader:
        for block in blocks_of(page):
            reader.follow(block)


def test_what_a_page_shows_is_compared_part_by_part() -> None:
    assert printed("a  b\n… d", "x\na b\nc\nd")
    assert not printed("a b … e", "a b c d")


def _without_blocks(page: Path) -> str:
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """Return the anchors that the site gives the headings of a page."""
    anchors: set[str] = set()
    for heading in _HEADING.finditer(_without_blocks(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["text"])
        unique(slugify(re.sub(r"[`*]", "", text), "-"), anchors)
    return anchors


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that do something, each with what to type for it."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None
        assert below.help, name
        yield from _commands(below, f"{path} {name}")
