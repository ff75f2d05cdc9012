"""Adjunct datasets: reference data as sealed versions and followed change streams."""
