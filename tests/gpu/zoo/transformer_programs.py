"""A transformer with random weights that generates, alone and behind an HTTP server. Both need transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.gpu.payload import bring_loopback_up
from tests.gpu.zoo.figures import Impossible, Lines, Options, Round, checksum, require, say
from tests.gpu.zoo.process_programs import end_with
from tests.gpu.zoo.torch_programs import digest, loaded

WIDTH, VOCABULARY = 1024, 8192
LAYER_BYTES = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH)
MIB = 1 << 20
PROMPT, ANSWER = 48, 24  # tokens
CLIENTS, QUESTIONS = 4, 6
PATIENCE_SECONDS = 300  # of a client; a suspend is shorter
CLIENT = "from tests.gpu.zoo.transformer_programs import ask; import sys; ask(int(sys.argv[1]))"


class Model:
    """Answers a number with tokens, one request at a time, always the same."""

    def __init__(self, options: Options) -> None:
        try:
            from transformers import LlamaConfig, LlamaForCausalLM  # of the machine
        except ImportError as error:
            raise Impossible(f"transformers: {error}") from error
        self._torch, self._device = loaded(), options.device
        config = LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_attention_heads=16,
            num_key_value_heads=16,
            num_hidden_layers=max(1, options.mib * MIB // LAYER_BYTES) if options.device == "cuda" else 1,
            vocab_size=VOCABULARY,
            bos_token_id=None,
            eos_token_id=None,  # every answer is as long
            pad_token_id=0,
        )
        self._torch.set_default_dtype(self._torch.bfloat16)
        with self._torch.device(options.device):
            self._model = LlamaForCausalLM(config).eval()
        self._lock = threading.Lock()

    def answer(self, number: int) -> list[int]:
        torch = self._torch
        words = torch.randint(1, VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(number))
        words = words.to(self._device)
        with self._lock, torch.no_grad():
            said = self._model.generate(
                words, attention_mask=torch.ones_like(words), max_new_tokens=ANSWER, do_sample=False
            )
            answer: list[int] = said[0, PROMPT:].tolist()
        return answer

    def weights(self) -> int:
        with self._lock:
            return sum(digest(parameter) for parameter in self._model.parameters()) % (1 << 64)


def generate(options: Options) -> Round:
    """Generate, and look at the weights after it."""
    model = Model(options)

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(QUESTIONS):
            yield f"answer {number}", checksum(json.dumps(model.answer(number)).encode())
        yield "weights", model.weights()

    return a_round


def http_server(model: Model) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept

        def do_GET(self) -> None:  # the library's name
            body = json.dumps(model.answer(int(self.path.lstrip("/")))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server


def http(options: Options) -> Round:
    """Serve until the client, a process without CUDA, has seen a wrong answer or none; its lines are the program's."""
    bring_loopback_up()
    model = Model(options)
    server = http_server(model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    end_with([subprocess.Popen([sys.executable, "-c", CLIENT, str(server.server_port)])])

    def a_round() -> Iterator[tuple[str, int]]:
        threading.Event().wait()  # all that is printed is the client's
        yield "never", 0

    return a_round


def ask(port: int) -> None:
    """Ask from four threads, two of which keep their connection; every answer must be the one of the beginning."""
    first = _Asker(port, keep=True)
    expected = [first.ask(number) for number in range(QUESTIONS)]
    for number in range(QUESTIONS):
        require(first.ask(number) == expected[number], f"answer {number} differs before any suspend")
    say(f"figures {checksum(json.dumps(expected).encode()):08x}")
    lines, gate = Lines(), threading.Lock()

    def client(place: int) -> None:
        asker, number = _Asker(port, keep=place % 2 == 0), place
        try:
            while True:
                number = (number + 1) % QUESTIONS
                answer = asker.ask(number)
                require(answer == expected[number], f"answer {number} of client {place}: {answer}")
                with gate:
                    lines.figure(checksum(json.dumps(answer).encode()))
        except BaseException as error:  # noqa: BLE001  # one request that fails is what this program is about
            say(f"wrong: client {place}: {type(error).__name__}: {error}")
            os._exit(3)

    threads = [threading.Thread(target=client, args=(place,)) for place in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Asker:
    def __init__(self, port: int, *, keep: bool) -> None:
        self._port, self._keep = port, keep
        self._connection: HTTPConnection | None = None

    def ask(self, number: int) -> Any:
        if self._connection is None:
            self._connection = HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_SECONDS)
        self._connection.request("GET", f"/{number}")
        response = self._connection.getresponse()
        body = response.read()
        require(response.status == 200, f"status {response.status}")
        if not self._keep:
            self._connection.close()
            self._connection = None
        return json.loads(body)
