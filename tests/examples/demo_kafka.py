"""`make demo-kafka`: the commands of examples/parcels/README.md, on a Kafka broker and DynamoDB
Local of their own.

With KEEP=1 the servers stay until Ctrl-C, and what another terminal needs to reach them is printed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.doc_blocks import ROOT, blocks_of
from tests.servers.dynamodb import start_dynamodb
from tests.servers.kafka import start_kafka


def main() -> None:
    """Run everything in .adjunct/parcels, which is emptied first: the servers begin empty, too."""
    folder = ROOT / ".adjunct" / "parcels"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print("Starting Kafka and DynamoDB Local …", flush=True)
    with (
        tempfile.TemporaryDirectory() as data,
        start_kafka(Path(data)) as kafka,
        start_dynamodb() as dynamodb,
    ):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ours = {
            **dynamodb.env,
            "PARCELS_KAFKA": kafka.bootstrap,
            "PARCELS_DEPOTS": "depots",
            "PATH": path,
        }
        for block in blocks_of(ROOT / "examples" / "parcels" / "README.md"):
            for command in (
                block.text.splitlines() if block.run and block.language == "console" else ()
            ):
                print(f"\n$ {command}", flush=True)
                done = subprocess.run(
                    ["bash", "-o", "pipefail", "-c", command],
                    cwd=folder,
                    env={**os.environ, **ours},
                    check=False,
                )
                if done.returncode:
                    sys.exit(done.returncode)
        if os.environ.get("KEEP"):
            print(f"\nThe servers stay until Ctrl-C. In another terminal:\n  cd {folder}")
            print(
                "".join(f"  export {name}={shlex.quote(value)}\n" for name, value in ours.items()),
                flush=True,
            )
            signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
            signal.pause()


if __name__ == "__main__":
    try:
        main()
    except pytest.skip.Exception as missing:  # a server that this machine can't have
        sys.exit(str(missing))
