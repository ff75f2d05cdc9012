"""Columns that expressions name are proven when an application is planned."""

from __future__ import annotations
