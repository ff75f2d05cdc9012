"""The same promises for files in a local folder and below an S3 prefix: names, listings, reads
of what was listed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.resources.errors import ConfigurationError, SourceChangedError
from dagster_adjunct.resources.files.tree import FileTree, open_tree

if TYPE_CHECKING:
    from tests.servers.s3 import S3Server

Put = Callable[[str, bytes], None]
NAMES = [
    "a.csv",
    "v1/part 1.csv",
    "v1/größe & co.csv",
    "v1/100%+#?=&.csv",
    "v1/deep/er/*[x]{y}.csv",
    "v10/a.csv",
    "v2/'quoted' \"twice\".csv",
    "日本/テスト.csv",
]


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Put, Callable[[str], None]]:
    """A URL that has a space in it, how to write a file there, and how to delete one."""
    if request.param == "local":
        root = tmp_path / "our files"

        def put(name: str, data: bytes) -> None:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

        return str(root), put, lambda name: (root / name).unlink()
    server: S3Server = request.getfixturevalue("s3_server")
    bucket, client = server.bucket(), server.client()
    return (
        f"s3://{bucket}/our files",
        lambda name, data: (
            client.put_object(Bucket=bucket, Key=f"our files/{name}", Body=data) and None
        ),
        lambda name: client.delete_object(Bucket=bucket, Key=f"our files/{name}") and None,
    )


@pytest.fixture
def s3_server(versitygw: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    versitygw.set_in(monkeypatch)
    return versitygw


def content(tree: FileTree) -> dict[str, bytes]:
    return {file.path: tree.read(file) for file in tree.list()}


def test_files_of_any_name_are_listed_and_read(
    place: tuple[str, Put, Callable[[str], None]],
) -> None:
    url, put, _ = place
    for name in NAMES:
        put(name, name.encode() * 2)
    tree: FileTree = pickle.loads(pickle.dumps(open_tree(url)))
    assert content(tree) == {name: name.encode() * 2 for name in NAMES}
    listed = tree.list()
    assert [file.path for file in listed] == sorted(NAMES)
    assert all(file.size == 2 * len(file.path.encode()) and file.modified.tzinfo for file in listed)
    for file in listed:
        assert tree.read_range(file, 3, 4) == (file.path.encode() * 2)[3:7]
        with tree.on_disk(file) as path:
            assert path.read_bytes() == file.path.encode() * 2


def test_a_folder_is_listed_without_its_neighbours(
    place: tuple[str, Put, Callable[[str], None]],
) -> None:
    url, put, _ = place
    for name in NAMES:
        put(name, b"")
    assert [file.path for file in open_tree(url).list("v1/")] == sorted(
        n for n in NAMES if n.startswith("v1/")
    )
    assert open_tree(url).list("v3/") == []


def test_nothing_there_is_an_empty_list(place: tuple[str, Put, Callable[[str], None]]) -> None:
    assert open_tree(place[0]).list() == []


def test_a_file_that_is_not_what_was_listed_is_never_read(
    place: tuple[str, Put, Callable[[str], None]],
) -> None:
    url, put, delete = place
    put("v1/a b.csv", b"first")
    tree = open_tree(url)
    listed = tree.list()[0]
    put("v1/a b.csv", b"other")
    for read in (tree.read, lambda file: tree.read_range(file, 0, 2)):
        with pytest.raises(SourceChangedError) as caught:
            read(listed)
        assert str(caught.value.file).endswith("v1/a b.csv")
    with pytest.raises(SourceChangedError), tree.on_disk(listed):
        pass
    delete("v1/a b.csv")
    with pytest.raises(SourceChangedError, match="is gone") as caught:
        tree.read(listed)
    assert str(caught.value.file).endswith("v1/a b.csv")


def test_equal_contents_have_equal_tags_whenever_they_were_written(
    place: tuple[str, Put, Callable[[str], None]],
) -> None:
    url, put, _ = place
    tree = open_tree(url)
    put("_SUCCESS", b'{"rows": 1}')
    before = tree.content_tag(tree.list()[0])
    put("_SUCCESS", b'{"rows": 1}')
    assert tree.content_tag(tree.list()[0]) == before
    put("_SUCCESS", b'{"rows": 2}')
    assert tree.content_tag(tree.list()[0]) != before


def test_long_listings_are_read_to_their_end(s3_server: S3Server) -> None:
    bucket, client = s3_server.bucket(), s3_server.client()
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda number: client.put_object(Bucket=bucket, Key=f"f{number:04d}", Body=b""),
                range(1005),
            )
        )
    client.put_object(Bucket=bucket, Key="folder/", Body=b"")
    assert [file.path for file in open_tree(f"s3a://{bucket}").list()] == [
        f"f{n:04d}" for n in range(1005)
    ]


@pytest.mark.parametrize(
    "url", ["s3://", "gs://bucket/x", "file://host/x", "s3//b/x", "C:\\x", "s3:/b", "x\\y"]
)
def test_places_that_can_not_be_files_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        open_tree(url)
    assert refused.value.argument == "url"


def test_a_bucket_that_is_not_there_is_named(s3_server: S3Server) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_tree("s3://adjunct-none/x").list()
    assert caught.value.url == "s3://adjunct-none/x"


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "x").write_bytes(b"1")
    assert content(open_tree(f"file://{tmp_path}/a%20b")) == {"x": b"1"}
