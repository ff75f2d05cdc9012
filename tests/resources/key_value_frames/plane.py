"""A model that tests' tables hold, in a file that Spark's workers can import."""

from __future__ import annotations

from pydantic import BaseModel


class Plane(BaseModel):
    tail: str
    seats: int = 0
