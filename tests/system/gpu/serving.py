"""A container that answers requests on the node's network, and needs the pretended GPU for each piece of an answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.system import gpu
from tests.system.checkpoints import PYTHON
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.toolkit import visible

# Answers with three events, `pause` seconds apart: what was written to the GPU is read back. A GET says how many it has
# at work, and the most that it had at one time since the last GET. A third argument is a file that it loads first.
SERVER = """
import ctypes, json, sys, threading, time
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
if len(sys.argv) > 3:
    weights, place = open(sys.argv[3], "rb").read(), ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(len(weights)))
    call("cuMemcpyHtoD_v2", place, weights, ctypes.c_size_t(len(weights)))
    del weights
lock, at_work, most = threading.Lock(), 0, 0
def count(change):
    global at_work, most
    with lock:
        at_work += change
        most = max(most, at_work)
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    def do_GET(self):
        global most
        with lock:
            content = json.dumps({"at_work": at_work, "most": most}).encode()
            most = at_work
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def do_POST(self):
        count(1)
        try:
            self.answer()
        finally:
            count(-1)
    def answer(self):
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
Server((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


@contextmanager
def serving(
    ctr: Ctr, port: int, *, host: str = "127.0.0.1", flags: Sequence[str] = (), weights: Sequence[str] = ()
) -> Iterator[str]:
    """A container with the program on GPU 0; yield its id once it accepts on the node's own address."""
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    wanted = ["--net-host", *gpu.mounts(), *visible(0), *flags]
    with own.running("python3", "-c", SERVER, host, str(port), *weights, id=ctr.new_id("model"), flags=wanted) as id:

        def accepts() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex((host, port)) == 0

        eventually(accepts, seconds=40)
        yield id
