"""Adjunct datasets: reference data as sealed versions and followed change streams."""

from __future__ import annotations

from assets.advance import advance_dataset
from assets.dataset import AdjunctDataset, bounded_dataset, unbounded_dataset, version_set
from assets.manifest import DatasetManifest, SealedVersion
from assets.publishing.bounded import abandon_version, advance_bounded, advance_version_set
from assets.publishing.version_set import current_versions
from assets.reading.view import DatasetView
from assets.report import AdvanceReport
from assets.store import DatasetStore, list_datasets, open_dataset
from assets.unbounded import advance_unbounded

__all__ = [
    "AdjunctDataset",
    "AdvanceReport",
    "DatasetManifest",
    "DatasetStore",
    "DatasetView",
    "SealedVersion",
    "abandon_version",
    "advance_bounded",
    "advance_dataset",
    "advance_unbounded",
    "advance_version_set",
    "bounded_dataset",
    "current_versions",
    "list_datasets",
    "open_dataset",
    "unbounded_dataset",
    "version_set",
]
