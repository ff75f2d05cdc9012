"""What is drawn: nodes with lines of text, and links between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LONGEST = 48
Shape = Literal["box", "stream", "dataset", "table"]
Colour = Literal["input", "transform", "join", "exchange", "several", "write", "outside"]


@dataclass(frozen=True, slots=True)
class Node:
    """A node: `lines` are its text, the first of them its name; `tooltip` is what a pointer over it shows."""

    id: str
    shape: Shape
    colour: Colour
    lines: tuple[str, ...]
    tooltip: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """Records go from one node to another; `marked` where they move between machines, and `label` says how."""

    source: str
    target: str
    label: str = ""
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes and links in an order that the drawing follows; `legend` names the colours that are there."""

    title: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    legend: tuple[tuple[Colour, str], ...] = ()


def shortened(line: str) -> str:
    """Return a line as it is drawn: no longer than a box should be wide."""
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
