"""The colours of drawings: of each colour's name, what fills a shape and what outlines it."""

from __future__ import annotations

from dagster_adjunct.orchestration.drawing.graph import Colour

FILLS: dict[Colour, tuple[str, str]] = {
    "input": ("#dbeafe", "#2563eb"),
    "transform": ("#f3f4f6", "#6b7280"),
    "join": ("#dcfce7", "#16a34a"),
    "exchange": ("#ffedd5", "#ea580c"),
    "several": ("#e0e7ff", "#4f46e5"),
    "write": ("#fae8ff", "#a21caf"),
    "outside": ("#ffffff", "#57606a"),
}
MARK = "#ea580c"
LINE = "#57606a"
TEXT = "#1f2328"
