"""Small facts by key, in namespaces that change by compare-and-swap (Samza's MetadataStore, SEP-11)."""

from dagster_adjunct.resources.metadata.metadata_store import MetadataStore, Namespace, NamespaceSnapshot

__all__ = ["MetadataStore", "Namespace", "NamespaceSnapshot"]
