"""Takes the place of `python` where one is kept: python -ISE python_client.py FOLDER PYTHON
ARGUMENTS…

It has the kept Python (python_server.py) of the folder, which it starts where there is none yet,
run what is asked for, and ends as that does. What is not asked for as `-c CODE`, `-m MODULE` or a
file is run by Python itself. It imports little: it is started often, and has to be quick.
"""

import array
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import time

_SERVER = os.path.join(os.path.dirname(__file__), "python_server.py")  # noqa: PTH118, PTH120
_SOCKET = "pythons.socket"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)


def _main(folder: str, python: str, arguments: list[str]) -> None:
    reported = arguments[0] if arguments else "-"
    if reported.startswith("-") and reported not in {"-c", "-m"}:
        os.execv(python, [python, *arguments])
    files = [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208
    files = [file for file in files if _is_open(file)]
    asked = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "files": files,
    }
    text = json.dumps({**asked, "program": f"{folder}/bin/python"}).encode()
    with _connected(folder, python) as connection:
        nearby = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        connection.sendmsg([struct.pack("!i", len(text))], nearby)
        # it may be ready, and signalled, before this one is
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        connection.sendall(text)
        for number in _PASSED_ON:
            signal.signal(
                number, lambda number, frame: connection.sendall(struct.pack("!i", number))
            )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        # Who waits for the end of one of them waits for the process that was made, and not for this
        # one.
        for file in files:
            if file != 2:
                os.close(file)
        answer = connection.recv(4)
    if not answer:
        sys.exit("the kept Python has ended")
    (status,) = struct.unpack("!i", answer)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) in _PASSED_ON:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def _connected(folder: str, python: str) -> socket.socket:
    os.chdir(folder)  # the path of a socket may not be long
    with open("pythons.lock", "w") as lock:  # noqa: PTH123
        if not os.path.exists(_SOCKET):  # noqa: PTH110
            fcntl.flock(lock, fcntl.LOCK_EX)
            _start(python)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_SOCKET)
    return connection


def _start(python: str) -> None:
    if os.path.exists(_SOCKET):  # noqa: PTH110
        return
    with open("environment.json", encoding="utf-8") as reported:  # noqa: PTH123
        environment = json.load(reported)
    if not os.fork():
        os.setsid()
        log = os.open("pythons.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(stream, number)
        os.closerange(3, 64)
        os.execve(python, [python, _SERVER], environment)
    deadline = time.monotonic() + 120
    while not os.path.exists(_SOCKET):  # noqa: PTH110
        if time.monotonic() > deadline:
            sys.exit(f"a Python for tests did not start: see pythons.log in {os.getcwd()}")  # noqa: PTH109
        time.sleep(0.02)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3:])
