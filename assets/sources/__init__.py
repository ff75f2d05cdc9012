"""Where entries come from: versions on streams, in folders of files and from queries, and
changes on streams.
"""
