"""What a page shows of an example is what the example has."""

from __future__ import annotations

import re

import pytest

from tests.doc_blocks import ROOT, Block, blocks_of

_PART = re.compile(r"^<!-- not run: a part of (?P<file>examples/\S+\.py) -->$")


def displayed_parts() -> list[tuple[Block, str]]:
    """Return the blocks of pages that are parts of examples, each with its file."""
    parts = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        lines = page.read_text(encoding="utf-8").splitlines()
        for block in blocks_of(page):
            match = _PART.match(lines[block.line - 3].strip()) if block.line > 2 else None
            if match is not None:
                parts.append((block, match["file"]))
    return parts


@pytest.mark.parametrize(
    ("block", "file"), displayed_parts(), ids=lambda value: getattr(value, "place", value)
)
def test_a_displayed_part_of_an_example_is_in_it(block: Block, file: str) -> None:
    assert block.text in (ROOT / file).read_text(encoding="utf-8")
