"""Files that others write: listed and read exactly as they were listed, typed strictly by a declared schema."""

from __future__ import annotations

from resources.files.formats import FileFormat
from resources.files.read import count_records, files_frame
from resources.files.tree import FileTree, FoundFile, open_tree

__all__ = ["FileFormat", "FileTree", "FoundFile", "count_records", "files_frame", "open_tree"]
