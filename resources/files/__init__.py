"""Files that others write: listed and read exactly as they were listed, typed strictly by a declared schema."""

from __future__ import annotations

from dagster_adjunct.resources.files.file_formats import DeclaredFiles, FileFormat, place_in
from dagster_adjunct.resources.files.read_files import count_records, files_frame, files_table
from dagster_adjunct.resources.files.tree import FileTree, FoundFile, open_tree

__all__ = [
    "DeclaredFiles",
    "FileFormat",
    "FileTree",
    "FoundFile",
    "count_records",
    "files_frame",
    "files_table",
    "open_tree",
    "place_in",
]
