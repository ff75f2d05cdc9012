"""A Python that has imported what most of ours import, and forks for whoever asks: python
python_server.py, in a folder

A process that it makes is as one that was started: with the arguments, the environment, the folder
and the open files of the one that asks (python_client.py), in a process group of its own, and a
`__main__` of its own. It is killed, with its group, when the one that asked is gone; the server
ends with the test process, which holds the other end of `lifeline`.

A request is its length in 4 bytes, then JSON, with the open files beside it; then come signals, a
number in 4 bytes each. The answer is the exit status as `waitpid` has it, in 4 bytes.
"""

from __future__ import annotations

import array
import fcntl
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

_MOST_FILES = 250
# Files are moved up here first: what a file is to be numbered may be the number of another.
_HIGH = 1000
# What commands, pages, and what Spark's workers are forked from import; nothing of the tests.
_IMPORTED = (
    "numpy",
    "pandas",
    "pyarrow.parquet",
    "pyspark.worker",
    "pyspark.sql",
    "py4j.clientserver",
    "dagster",
    "dagster_adjunct.orchestration.code_location.definitions",
    "dagster_adjunct.orchestration.cli.applications",
    "dagster_adjunct.orchestration.cli.datasets",
    "dagster_adjunct.orchestration.cli.startpoints",
    "dagster_adjunct.orchestration.cli.streams",
    "dagster_adjunct.orchestration.cli.tables",
    "dagster_adjunct.resources.bucketing.writer",
)


def _serve() -> dict[str, Any]:
    """Fork for each request; return one in the process that it is for, and never here."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("being-made")
    listening.listen(64)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    for waited in (listening, woken, os.open("lifeline", os.O_RDONLY | os.O_NONBLOCK)):
        selector.register(waited, selectors.EVENT_READ)
    asking: dict[int, socket.socket] = {}
    Path("being-made").rename("pythons.socket")
    while True:
        for key, _ in selector.select():
            if key.fileobj is listening:
                connection, _ = listening.accept()
                request = _received(connection)
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (listening, connection, *asking.values()):
                        other.close()
                    selector.close()
                    os.close(woken)
                    os.close(wake)
                    return request
                for file in request["received"]:
                    os.close(file)
                asking[pid] = connection
                selector.register(connection, selectors.EVENT_READ, pid)
            elif key.fileobj == woken:
                os.read(woken, 4096)
                _answer_for_those_that_ended(asking, selector)
            elif key.data is None:  # the test process has ended
                for pid, connection in asking.items():
                    _kill(pid)
                    with suppress(OSError):
                        connection.sendall(struct.pack("!i", signal.SIGKILL))
                sys.exit()
            elif reported := asking[key.data].recv(4):
                with suppress(ProcessLookupError):
                    os.kill(key.data, *struct.unpack("!i", reported))
            else:
                _kill(key.data)
                selector.unregister(key.fileobj)


def _received(connection: socket.socket) -> dict[str, Any]:
    files = array.array("i")
    data, nearby, *_ = connection.recvmsg(4, socket.CMSG_SPACE(_MOST_FILES * files.itemsize))
    for _, _, sent in nearby:
        files.frombytes(sent)
    (length,) = struct.unpack("!i", data)
    text = b""
    while len(text) < length:
        text += connection.recv(length - len(text))
    return {**json.loads(text), "received": list(files)}


def _answer_for_those_that_ended(
    asking: dict[int, socket.socket], selector: selectors.BaseSelector
) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        connection = asking.pop(pid)
        with suppress(OSError):
            connection.sendall(struct.pack("!i", status))
        with suppress(KeyError):  # of one that was gone before
            selector.unregister(connection)
        connection.close()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _become(request: dict[str, Any]) -> None:
    """Make this process what was asked for, up to its files, folder, environment and path of
    modules.
    """
    with suppress(PermissionError):
        os.setpgid(0, 0)
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in request["received"]]
    for file in request["received"]:
        os.close(file)
    for number, file in zip(request["files"], high, strict=True):
        os.dup2(file, number)
        os.close(file)
    # What was a file for the server may be a pipe now, and a stream asks only when it is made.
    sys.stdin, sys.stdout, sys.stderr = (
        (open(number, mode, errors=errors, closefd=False) if number in request["files"] else None)  # noqa: SIM115
        for number, mode, errors in ((0, "r", None), (1, "w", None), (2, "w", "backslashreplace"))
    )
    if sys.stderr is not None:
        sys.stderr.reconfigure(line_buffering=True)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    path = os.environ.get("PYTHONPATH")
    sys.path[:0] = path.split(os.pathsep) if path else []
    sys.modules["__main__"] = ModuleType("__main__")
    sys.executable = request["program"]
    multiprocessing.set_executable(sys.executable)
    # what it spawns looks for its main module there
    multiprocessing.process.ORIGINAL_DIR = request["folder"]


def _run(arguments: list[str]) -> None:
    """Do what `python ARGUMENTS…` does: -c CODE, -m MODULE or a file, and what is for it."""
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        main = sys.modules["__main__"]
        main.__file__ = str(Path(arguments[0]).absolute())
        exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), vars(main))


if __name__ == "__main__":
    del sys.path[0]
    for _name in _IMPORTED:
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()  # no collection of those that are forked looks at this again
    _request = _serve()
    _become(_request)
    _run(_request["arguments"])
