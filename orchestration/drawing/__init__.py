"""Drawings of directed graphs, as Mermaid text and as SVG; what the nodes stand for is not known here."""
