"""A container that answers requests on the node's network, and needs the pretended GPU for each piece of an answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.system import gpu
from tests.system.checkpoints import PYTHON
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.toolkit import visible

# Answers with three events, `pause` seconds apart: what was written to the GPU is read back.
SERVER = """
import ctypes, json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, f"{name}: {result}"
context, memory, word = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(64 << 20))
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        call("cuCtxSetCurrent", context)
        for step in range(3):
            time.sleep(asked.get("pause", 0) if step else 0)
            sent, back = ctypes.c_uint64(asked["number"] * 10 + step), ctypes.c_uint64()
            place = ctypes.c_uint64(memory.value + 8 * asked["number"])
            call("cuMemcpyHtoD_v2", place, ctypes.byref(sent), ctypes.c_size_t(8))
            call("cuMemcpyDtoH_v2", ctypes.byref(back), place, ctypes.c_size_t(8))
            self.piece(b"data: %d\\n\\n" % back.value)
        self.piece(b"")
    def piece(self, content):
        self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(content), content))
    def log_message(self, *words):
        pass
class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    def handle_error(self, request, client):
        pass  # a client that is gone
Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@contextmanager
def serving(ctr: Ctr, port: int, *, flags: Sequence[str] = ()) -> Iterator[str]:
    """A container with the program on GPU 0; yield its id once it accepts on the node's own port."""
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    wanted = ["--net-host", *gpu.mounts(), *visible(0), *flags]
    with own.running("python3", "-c", SERVER, str(port), id=ctr.new_id("model"), flags=wanted) as id:

        def accepts() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        eventually(accepts, seconds=40)
        yield id
