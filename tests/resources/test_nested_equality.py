"""Comparing nested values of Arrow, against plain Python."""

from __future__ import annotations

import random

from dagster_adjunct.resources.schemas.equality import differing_values
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from tests.nested import comparable, draw_rows, draw_schema


def test_nested_values_differ_as_in_python() -> None:
    for seed in range(25):
        drawn = random.Random(seed)
        schema = draw_schema(drawn, columns=1)
        sides = [draw_rows(drawn, schema, range(60)) for _ in range(2)]
        sides[1][:20] = sides[0][:20]
        columns = [
            fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows").column("v0")
            for rows in sides
        ]
        # Slices have offsets into the buffers of the whole.
        old, new = (column.combine_chunks().slice(7) for column in columns)
        expected = [
            comparable(before["v0"]) != comparable(after["v0"])
            for before, after in zip(sides[0][7:], sides[1][7:], strict=True)
        ]
        assert differing_values(old, new).tolist() == expected
