"""The package needs nothing of the project around it: it may be shipped alone, under any name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "kybernate_shim" / "ttrpc"
# Under another name, and where the project cannot be imported. The messages are protobuf's own.
SPEAK = """
import sys
sys.path.insert(0, sys.argv[1])
sys.modules["kybernate_shim"] = None
import asyncio, socket
from google.protobuf.wrappers_pb2 import StringValue
from alone import Client, Method, RpcError, Server

async def greet(request, call):
    return StringValue(value=f"hello {request.value}")

async def main():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    listener.listen()
    server = Server({"a.Service": {"Greet": Method(StringValue, greet)}})
    await server.start(listener)
    client = await Client.connect("socket")
    print((await client.call("a.Service", "Greet", StringValue(value="you"), StringValue)).value)
    try:
        await client.call("a.Service", "Other", StringValue(), StringValue)
    except RpcError as error:
        print(error.code.name)
    await client.close()
    await server.close()

asyncio.run(main())
"""


def test_copy_of_the_package_serves_and_calls(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "alone")
    argv = [sys.executable, "-c", SPEAK, str(tmp_path)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout.split("\n")) == ("", ["hello you", "UNIMPLEMENTED", ""])
