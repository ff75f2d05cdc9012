"""Files that Arrow's threads read."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest

from dagster_adjunct.resources.objects.arrow_files import (
    open_bytes,
    read_sealed_table,
    write_sealed_table,
)

_LEAVES_A_FILE_TO_A_THREAD = """
import atexit, threading, time
from dagster_adjunct.resources.objects.arrow_files import RangedFile

def read(file):
    ending.wait()
    time.sleep(0.1)
    print("read to the end", flush=True)
    del file[:]

ending = threading.Event()
atexit.register(ending.set)  # runs before what was registered earlier
file = [RangedFile(0, lambda at, count: b"")]
threading.Thread(target=read, args=(file,), daemon=True).start()
"""


def test_the_interpreter_waits_for_threads_that_still_hold_a_file() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _LEAVES_A_FILE_TO_A_THREAD],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert ended.stdout == "read to the end\n"


def test_the_bytes_that_arrow_reads_are_its_own() -> None:
    data = bytes(range(64))
    before = sys.getrefcount(data)
    opened = open_bytes(data)
    assert sys.getrefcount(data) == before
    assert opened.read() == data


def test_a_sealed_table_of_which_one_bit_has_flipped_is_not_read() -> None:
    table = pa.table({"k": ["a", "b"], "n": [1, 2]})
    data = write_sealed_table(table)
    assert read_sealed_table(data) == table
    for place in range(len(data)):
        with pytest.raises(pa.ArrowInvalid):
            read_sealed_table(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
