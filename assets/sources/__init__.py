"""Sources of versions: streams, folders of files and queries; and the entries made from their records."""
