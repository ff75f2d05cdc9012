"""Where versions come from: streams, folders of files, queries; and what of their records is stored."""
